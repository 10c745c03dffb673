//! Mutated input files: each is refused with its name, or converted to valid TOML without injected content.

use proptest::prelude::*;

use super::tests::{DOCKER, PRESET, SWAP, env};
use super::*;
use crate::mutated::mutated_text;

/// Sample with wrappers, shells, Windows paths, a matrix and selectors.
const MORE: &str = r#"
models:
  a:
    cmd: bash -c "source /x/env.sh > /dev/null && exec nice -n 5 env -u A B=1 /opt/llama-server -m '/a b.gguf' --x=1 >> log 2>&1"
    capabilities: {in: [text], tools: true, context: 4096}
    metadata: {a: [1, null, {b: 2}]}
  b: {cmd: 'C:\llama\llama-server.exe -m "D:\m x\b.gguf"', filters: {setParamsByID: {b: {t: 1}, "${MODEL_ID}:x": {t: 2}}}}
  c: {cmd: "systemd-run --user --scope -p MemoryMax=8G numactl -m 0 llama serve -hf o/c", env: ["T=${env.T}"]}
  d: {proxy: "https://host/v1", headers: {a: b}}
routing:
  router: {use: matrix, settings: {matrix: {vars: {x: a}, sets: {s: "(x | b) & c", t: "+s & b"}, evict_costs: {x: 2}}}}
selectors: {s: {strategy: warm, targets: [a, b]}}
peers: {p: {proxy: "http://h", models: [a, e]}}
"#;

fn sound(imported: Result<ImportedConfig, CommandError>) -> Result<(), TestCaseError> {
    match imported {
        Ok(imported) => {
            let text = write::render_config(&imported, "x");
            let table = text.parse::<toml::Table>();
            let table = table.map_err(|error| TestCaseError::fail(format!("{error}\n{text}")))?;
            // Names and notes stay within their keys and comments.
            let models = table.get("models").and_then(toml::Value::as_table).map_or(0, toml::Table::len);
            prop_assert!(models <= imported.models.len(), "{}", text);
            for key in table.keys() {
                let known = ["server", "paths", "log", "models", "remotes", "names", "defaults", "loading"];
                prop_assert!(known.contains(&key.as_str()), "`{}` in {}", key, text);
            }
        }
        Err(failure) => {
            let told = failure.lines().join("\n");
            prop_assert!(told.starts_with("error: ") && told.contains("hint: "), "{}", told);
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn of_llama_swap(text in mutated_text(&[SWAP, MORE])) {
        sound(llama_swap::import_llama_swap(&text, "x.yaml", &env))?;
    }

    #[test]
    fn of_a_preset(text in mutated_text(&[PRESET])) {
        sound(preset::import_preset(&text, "x.ini"))?;
    }

    #[test]
    fn of_a_command(text in mutated_text(&[DOCKER, MORE])) {
        sound(shell::split_words(&text, "x.sh").and_then(|words| command::import_command(&words, "x.sh")))?;
    }
}

#[test]
fn what_refers_to_itself_again_and_again_ends_soon() {
    // Each line expands to nine times the line above.
    let mut yaml = String::from("a0: &a0 [x]\n");
    for n in 1..30 {
        let of = format!("*a{}, ", n - 1).repeat(9);
        yaml += format!("a{n}: &a{n} [{}]\n", of.trim_end_matches(", ")).as_str();
    }
    let told = llama_swap::import_llama_swap(&yaml, "x.yaml", &env).unwrap_err().lines().join("\n");
    assert!(told.contains("this is no YAML that can be read"), "{told}");
    let deep = format!("a: {}{}", "[".repeat(100_000), "]".repeat(100_000));
    let told = llama_swap::import_llama_swap(&deep, "x.yaml", &env).unwrap_err().lines().join("\n");
    assert!(told.contains("more than 1000 brackets"), "{told}");
    // Nesting below the limit reaches the parser, and takes no time.
    let less = format!("a: {}{}", "[".repeat(900), "]".repeat(900));
    assert!(llama_swap::import_llama_swap(&less, "x.yaml", &env).is_err());
}

#[test]
fn a_name_with_lines_in_it_writes_no_lines() {
    let yaml = "models:\n  \"a\\nevil = 1\\n[b]\":\n    cmd: llama-server -m a.gguf\n    description: \"x\\nevil = 1\\r[models.c]\\nbinary = '/bin/sh'\"\n    nobody: knows\n";
    let imported = llama_swap::import_llama_swap(yaml, "x.yaml", &env).unwrap();
    let text = write::render_config(&imported, "x\nevil = 1");
    let table = text.parse::<toml::Table>().unwrap();
    assert!(!table.contains_key("evil") && !table.contains_key("b"), "{text}");
    assert_eq!(table["models"].as_table().unwrap().len(), 1, "{text}");
}
