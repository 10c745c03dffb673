//! Tests with sample configurations: the name of each file says what it shows. Files in `invalid` have the
//! expected reports in their first lines, after `#!`.

use std::path::{Path, PathBuf};

use warden_policies::{ByteSize, MemoryLimit};

use super::machine::HostMachine;
use super::problem::ConfigProblems;
use super::resolve::{ResolvedConfig, resolve_config};
use super::source::layers::{ConfigSources, load_config};

fn samples(folder: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("samples").join(folder);
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 4, "{folder}: the samples are gone");
    files
}

/// Removes the parts of a text that differ between machines or pins.
pub(super) fn redacted(text: &str, dir: &Path) -> String {
    let here = std::env::current_dir().unwrap();
    let text = text.replace(&dir.display().to_string(), "DIR").replace(&here.display().to_string(), "HERE");
    let is_commit = |word: &str| word.len() == 40 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let words = text.split_inclusive(['#', '"']).map(|word| {
        let end = word.len() - usize::from(word.ends_with('"'));
        if is_commit(&word[..end]) { format!("COMMIT{}", &word[end..]) } else { word.to_owned() }
    });
    words.collect()
}

fn read(file: &Path) -> Result<ResolvedConfig, ConfigProblems> {
    let loaded = load_config(ConfigSources { file: Some(file.to_owned()), ..ConfigSources::default() })?;
    let mut machine = HostMachine::read();
    machine.env.clear();
    // Fix the memory: the samples compare percentages with sizes, so results would depend on the machine.
    machine.memory = ByteSize(24 << 30);
    resolve_config(&loaded, &machine, false)
}

#[test]
fn valid_samples_are_taken() {
    for file in samples("valid") {
        if let Err(problems) = read(&file) {
            panic!("{}: {problems}", file.display());
        }
    }
}

#[test]
fn invalid_samples_are_refused_with_place_and_cure() {
    let mut all = String::new();
    for file in samples("invalid") {
        let Err(problems) = read(&file) else { panic!("{} was taken", file.display()) };
        let told = problems.lines().join("\n");
        let text = std::fs::read_to_string(&file).unwrap();
        let wanted: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("#! ")).collect();
        assert!(!wanted.is_empty(), "{} does not say what is wrong with it", file.display());
        for part in wanted {
            assert!(told.contains(part), "{}: `{part}` is missing in\n{told}", file.display());
        }
        all.extend([redacted(&told, file.parent().unwrap()).as_str(), "\n\n"]);
    }
    insta::assert_snapshot!(all);
}

#[test]
fn what_a_valid_sample_says_reaches_the_fleet() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("samples/valid");
    let resolved = read(&dir.join("two_models_with_budgets_and_aliases.toml")).unwrap();
    let [big, small] = resolved.fleet.models.as_slice() else { panic!("{:?}", resolved.fleet.models) };
    assert_eq!(big.name.as_str(), "org/big-GGUF:Q4");
    assert_eq!(big.command.args[0], "-m");
    assert!(big.command.args[1].ends_with("any.gguf") && Path::new(&big.command.args[1]).is_absolute());
    assert_eq!(big.command.args[2..], ["-np", "2", "--cache-ram", "512"]);
    assert_eq!(big.command.env, [("GGML_CUDA_DISABLE_GRAPHS".to_owned(), "1".to_owned())]);
    assert_eq!((big.requests.queue.depth, big.requests.queue.wait.as_secs()), (64, 120));
    let bytes = |limit: Option<MemoryLimit>| limit.and_then(MemoryLimit::bytes).map(|size| size.0);
    assert!(
        bytes(big.recycle.host_soft) < bytes(big.recycle.host_hard) && big.run.preload && !small.run.preload
    );
    assert_eq!(bytes(small.recycle.host_hard), Some(16 << 30));
    assert_eq!(small.lifecycle.start_timeout.as_secs(), 60);
    assert_eq!(
        (small.run.replicas, small.requests.max_in_flight, small.recycle.max_requests),
        (2, Some(4), Some(10_000))
    );
    assert!((small.recycle.common.overlap_headroom - 2.0).abs() < f64::EPSILON);
}

#[test]
fn a_budget_below_the_prompt_cache_is_warned_about() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("m.gguf"), "").unwrap();
    let file = dir.path().join("w.toml");
    let warnings = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let told = read(&file).unwrap().warnings;
        told.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let small = "[models.a]\nmodel = \"m.gguf\"\npolicy.host.soft = \"4GiB\"\n";
    assert!(warnings(small).is_empty(), "the machine's memory bounds the cache");
    let told = warnings(&format!("{small}args = [\"--cache-ram\", \"8192\"]\n"));
    assert!(
        told[0].contains(
            "w.toml:3: model `a`: the budget of 4.0 GiB is below the prompt cache, which may grow to 8.0 GiB"
        ),
        "{told:?}"
    );
    assert!(warnings(&format!("{small}args = [\"--cache-ram\", \"100\"]\n")).is_empty());
    assert!(warnings(&format!("{small}args = [\"--cache-ram\", \"-1\"]\n"))[0].contains("has no bound"));
}

proptest::proptest! {
    /// Any file gives a result, never a panic.
    #[test]
    fn any_text_is_taken_or_refused(lines in proptest::collection::vec(line(), 0..6)) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("w.toml");
        std::fs::write(&file, lines.join("\n")).unwrap();
        if let Err(problems) = read(&file) {
            proptest::prop_assert!(!problems.0.is_empty());
        }
    }
}

/// A line that resembles one of a configuration.
fn line() -> impl proptest::strategy::Strategy<Value = String> {
    use proptest::prelude::*;
    let key = prop::sample::select(vec![
        "[server]",
        "[models.a]",
        "[models.\"ä b\".policy]",
        "[defaults.queue]",
        "[log]",
        "port",
        "host",
        "host.soft",
        "args",
        "env.X",
        "wait",
        "level",
        "aliases",
        "models.a.replicas",
        "polcy",
        "\"\"",
        "jitter",
        "é",
    ]);
    let value = prop_oneof![
        Just(String::new()),
        any::<i64>().prop_map(|number| number.to_string()),
        any::<f64>().prop_map(|number| format!("{number:?}")),
        "\"[^\"\\\\]{0,8}\"",
        Just("[\"-c\", 1, true]".to_owned()),
        Just("{ a = { b = 1979-05-27 } }".to_owned()),
        Just("\"12GiB\"".to_owned()),
        ".{0,6}",
    ];
    (key, value)
        .prop_map(|(key, value)| if value.is_empty() { key.to_owned() } else { format!("{key} = {value}") })
}
