//! Tests the effects of a model's list on its command, the notes about it, and the influence of a build.

use super::*;
use std::path::Path;

use warden_patches::mitigation::ProvenanceFacts;
use warden_policies::ByteSize;

use crate::machine::HostMachine;
use crate::problem::ConfigProblems;
use crate::resolve::{ResolvedConfig, resolve_config};
use crate::source::layers::{ConfigSources, load_config};

/// Resolves a configuration with these lines under one model, and inherited variables, on a machine whose
/// memory bounds no cache.
fn read(lines: &str, inherited: &[(&str, &str)]) -> Result<ResolvedConfig, ConfigProblems> {
    read_on(lines, inherited, ByteSize(1 << 40))
}

fn read_on(
    lines: &str,
    inherited: &[(&str, &str)],
    memory: ByteSize,
) -> Result<ResolvedConfig, ConfigProblems> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("m.gguf"), "").unwrap();
    let file = dir.path().join("w.toml");
    std::fs::write(&file, format!("[models.a]\nmodel = \"m.gguf\"\n{lines}\n")).unwrap();
    let loaded = load_config(ConfigSources { file: Some(file), ..ConfigSources::default() })?;
    let mut machine = HostMachine { memory, ..HostMachine::read() };
    machine.env = inherited.iter().map(|(key, value)| (key.into(), value.into())).collect();
    resolve_config(&loaded, &machine, false)
}

/// Arguments behind the model file, set variables, and removed variables.
fn command(resolved: &ResolvedConfig) -> (Vec<&str>, Vec<(&str, &str)>, Vec<&str>) {
    let command = &resolved.fleet.models[0].command;
    (
        command.args[2..].iter().map(String::as_str).collect(),
        command.env.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect(),
        command.env_remove.iter().map(String::as_str).collect(),
    )
}

fn told(all: &[ConfigProblem]) -> String {
    let line = |one: &ConfigProblem| format!("{one} | {}", one.hint.as_deref().unwrap_or_default());
    all.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Removes the path of the temporary folder, which differs in each run.
fn without_folder(told: &str) -> String {
    let line = |line: &str| line[line.find("w.toml:").unwrap_or_default()..].to_owned() + "\n";
    told.lines().map(line).collect()
}

#[test]
fn variables_flags_and_removals_reach_the_command() {
    let list = "mitigations = [\"no-cuda-graphs\", \"cache-ram=512\", \"no-concurrent-streams\", \"malloc-arenas=4\"]\n\
                args = [\"-c\", \"1\"]\nenv = { A = \"1\" }";
    let resolved = read(list, &[]).unwrap();
    let (args, env, removed) = command(&resolved);
    assert_eq!(args, ["-c", "1", "--cache-ram", "512"]);
    assert_eq!(env, [("A", "1"), ("GGML_CUDA_DISABLE_GRAPHS", "1"), ("MALLOC_ARENA_MAX", "4")]);
    assert_eq!(removed, ["GGML_CUDA_GRAPH_OPT"]);
    assert_eq!(told(&resolved.warnings), "");
}

#[test]
fn what_is_written_for_llama_server_itself_wins_and_is_told() {
    let list = "mitigations = [\"cache-ram=512\", \"malloc-arenas\", \"no-concurrent-streams\",\n\
                \"no-swa-full\", \"image-max-tokens=9\"]\n\
                args = [\"-cram\", \"64\", \"--swa-full\"]\n\
                env = { MALLOC_ARENA_MAX = \"9\", GGML_CUDA_GRAPH_OPT = \"1\", LLAMA_ARG_IMAGE_MAX_TOKENS = \"5\" }";
    let resolved = read(list, &[]).unwrap();
    let (args, env, removed) = command(&resolved);
    assert_eq!(args, ["-cram", "64", "--swa-full"]);
    assert_eq!(env.len(), 3);
    assert_eq!(removed, ["LLAMA_ARG_SWA_FULL"]);
    insta::assert_snapshot!(without_folder(&told(&resolved.warnings)));
}

#[test]
fn what_says_the_same_is_no_conflict() {
    let list = "mitigations = [\"cache-ram=512\", \"malloc-arenas=4\", \"no-cuda-graphs\"]\n\
                args = [\"-cram\", \"512\"]\nenv = { MALLOC_ARENA_MAX = \"4\", GGML_CUDA_DISABLE_GRAPHS = \"yes\" }";
    let resolved = read(list, &[("MALLOC_ARENA_MAX", "4")]).unwrap();
    assert_eq!(command(&resolved).0, ["-cram", "512"]);
    assert_eq!(told(&resolved.warnings), "");
}

#[test]
fn a_mitigation_wins_over_our_own_environment_and_says_so() {
    let resolved = read("mitigations = [\"malloc-arenas=4\"]", &[("MALLOC_ARENA_MAX", "1")]).unwrap();
    assert_eq!(command(&resolved).1, [("MALLOC_ARENA_MAX", "4")]);
    insta::assert_snapshot!(without_folder(&told(&resolved.warnings)));
}

#[test]
fn the_machine_bounds_caches_that_nobody_else_bounds() {
    let bounds = |lines: &str, vars: &[(&str, &str)]| -> Vec<(String, String)> {
        let resolved = read_on(lines, vars, ByteSize(16 << 30)).unwrap();
        let spec = &resolved.fleet.models[0];
        assert!(!spec.start.cache_bounds.iter().any(|bound| spec.command.env.contains(bound)));
        spec.start.cache_bounds.clone()
    };
    let cache = |mib: &str| vec![("LLAMA_ARG_CACHE_RAM".to_owned(), mib.to_owned())];
    assert_eq!(bounds("", &[]), cache("2048"));
    assert_eq!(bounds("args = [\"--no-mmap\"]\nmitigations = [\"no-swa-full\"]", &[]), cache("2048"));
    for lines in [
        "env = { LLAMA_ARG_CACHE_RAM = \"9000\" }",
        "args = [\"-cram\", \"9000\"]",
        "mitigations = [\"cache-ram=9000\"]",
    ] {
        assert_eq!(bounds(lines, &[]), [], "{lines}");
    }
    assert_eq!(bounds("", &[("LLAMA_ARG_CACHE_RAM", "9000")]), [], "the process inherits it");
}

#[test]
fn a_variable_that_acts_by_presence_is_warned_about_when_it_looks_switched_off() {
    let resolved = read("env = { GGML_CUDA_DISABLE_GRAPHS = \"0\" }", &[]).unwrap();
    insta::assert_snapshot!(without_folder(&told(&resolved.warnings)));
}

#[test]
fn a_models_own_list_replaces_the_one_for_all_models() {
    let both = "mitigations = [\"no-mmap\"]\n[defaults]\nmitigations = [\"no-cuda-graphs\",\n\"cache-ram\"]";
    let resolved = read(both, &[]).unwrap();
    assert_eq!(command(&resolved), (vec!["--no-mmap"], vec![], vec![]));
    let inherited = both.split_once('\n').unwrap().1;
    let problems = read(inherited, &[]).unwrap_err();
    assert!(problems.to_string().contains("w.toml:5: model `a`: `cache-ram` needs a value"), "{problems}");
}

fn judged(lines: &str, build: &BuildFacts) -> (MitigatedCommand, String, String) {
    let resolved = read(lines, &[]).unwrap();
    let (mut problems, mut warnings) = (Vec::new(), Vec::new());
    let command = MitigationChecker::default().check(
        "a",
        &resolved.models[0].mitigations,
        build,
        &mut problems,
        &mut warnings,
    );
    (command, told(&problems), told(&warnings))
}

fn build(backend: &str) -> BuildFacts {
    let provenance = ProvenanceFacts {
        own: Vec::new(),
        fix_states: Vec::new(),
        id: "12345678".to_owned(),
        backend: backend.to_owned(),
        fixes: Some(Vec::new()),
        options: vec![("GGML_CUDA_GRAPHS".to_owned(), "OFF".to_owned())],
    };
    BuildFacts {
        binary: Path::new("/nowhere/llama-server").to_owned(),
        number: None,
        provenance: Some(provenance),
    }
}

#[test]
fn what_is_for_another_backend_is_left_out_with_a_warning() {
    let list = "mitigations = [\"no-cuda-graphs\", \"cache-ram=5\"]";
    let (command, problems, warnings) = judged(list, &build("cpu"));
    assert_eq!(
        (command.env.len(), &command.args[2..]),
        (0, ["--cache-ram".to_owned(), "5".to_owned()].as_slice())
    );
    assert_eq!(problems, "");
    insta::assert_snapshot!(without_folder(&warnings));
    let (command, problems, warnings) = judged(list, &build("cuda"));
    assert_eq!((command.env.len(), problems.as_str(), warnings.as_str()), (1, "", ""));
}

#[test]
fn a_build_option_that_the_build_lacks_is_an_error_with_the_command() {
    let list = "mitigations = [\"build-no-cuda-graphs\", \"build-one-copy\"]";
    let (_, problems, _) = judged(list, &build("cuda"));
    assert_eq!(problems.lines().count(), 1, "{problems}");
    insta::assert_snapshot!(without_folder(&problems));
}
