//! Tests the offers for binaries with other flags, and for command lines that already have some.

use warden_patches::mitigation::ProvenanceFacts;

use super::*;

const OLD: &str = "-nr, --no-repack  a\n-fa, --flash-attn [on|off|auto]  b\n--warmup, --no-warmup  c\n--mmap, --no-mmap  d\n\
    -np, --parallel N  e\n-ngl, --gpu-layers, --n-gpu-layers N  f\n";
const NEW: &str = "-nr, --no-repack  a\n-fa, --flash-attn [on|off|auto]  b\n--warmup, --no-warmup  c\n-lm, --load-mode MODE  d\n\
    -np, --parallel N  e\n-ngl, --gpu-layers, --n-gpu-layers N  f\n";

fn flags(own: &str) -> FlagList {
    let filler = (0..20).fold(String::new(), |text, n| text + &format!("--flag-{n} N  a number\n"));
    FlagList::parse(&format!("{own}{filler}")).unwrap()
}

/// Returns the switches offered for these arguments: words, and the line to write.
fn offered(args: &str, backend: Option<&str>, help: Option<&str>) -> Vec<(String, String)> {
    let args = args.split_whitespace().map(str::to_owned).collect();
    let mitigations = ModelMitigations::new(vec!["cache-ram=64".to_owned()], args, Vec::new());
    let provenance =
        |backend: &str| ProvenanceFacts { backend: backend.to_owned(), ..ProvenanceFacts::default() };
    let build = BuildFacts { binary: "/b".into(), number: None, provenance: backend.map(provenance) };
    let flags = help.map(flags);
    let all = find_switches("a", &mitigations, &build, flags.as_ref(), false);
    all.into_iter().map(|one| (one.words(), one.line)).collect()
}

fn words(args: &str, backend: Option<&str>, help: Option<&str>) -> Vec<String> {
    offered(args, backend, help).into_iter().map(|(words, _)| words).collect()
}

#[test]
fn switches_are_spelled_as_the_binary_lists_them() {
    let cpu = ["--no-repack", "--flash-attn off", "--no-warmup", "--no-mmap", "--parallel 1"];
    assert_eq!(words("-m x", Some("cpu"), Some(OLD)), cpu);
    let cpu = ["--no-repack", "--flash-attn off", "--no-warmup", "--load-mode none", "--parallel 1"];
    assert_eq!(words("-m x", Some("cpu"), Some(NEW)), cpu);
    let cuda = words("-m x -ngl 30", Some("cuda"), Some(NEW));
    assert_eq!(cuda[0], "GGML_CUDA_DISABLE_GRAPHS=1");
    assert_eq!(cuda[cuda.len() - 2..], ["--gpu-layers 15", "--gpu-layers 0"]);
    // Without a list of flags, no flag is offered.
    assert_eq!(words("-m x", Some("cuda"), None), ["GGML_CUDA_DISABLE_GRAPHS=1"]);
    assert_eq!(words("-m x", Some("cpu"), Some("")), Vec::<String>::new());
}

#[test]
fn what_the_command_line_has_or_excludes_is_not_tried() {
    let has = "-m x --no-repack --no-warmup -np 1 --no-mmap -ctv q8_0";
    assert_eq!(words(has, Some("cpu"), Some(OLD)), Vec::<String>::new());
    assert_eq!(
        words("-m x -lm none", Some("cpu"), Some(NEW)).iter().filter(|one| one.contains("load")).count(),
        0
    );
}

#[test]
fn the_line_to_write_keeps_the_list_and_names_what_is_in_its_way() {
    let all = offered("-m x -fa on -np 4", Some("cpu"), Some(OLD));
    let line = |words: &str| all.iter().find(|(own, _)| own == words).unwrap().1.clone();
    assert_eq!(
        line("--no-repack"),
        "write `mitigations = [\"cache-ram=64\", \"no-repack\"]` into [models.a]"
    );
    assert_eq!(
        line("--flash-attn off"),
        "in `args` of [models.a], write `--flash-attn off` in place of `-fa on`"
    );
    assert_eq!(line("--parallel 1"), "in `args` of [models.a], write `--parallel 1` in place of `-np 4`");
}
