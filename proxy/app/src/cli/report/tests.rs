//! Checks the contents of a report, the redaction, and the output file.

use std::collections::BTreeMap;
use std::io::Read as _;

use serde_json::json;
use warden_config::source::layers::{ConfigSources, load_config};

use super::contents::safe_name;
use super::*;

const TOKEN: &str = "hf_abcdefghijklmnopqrstuvwxyzABCD1234";
const KEY: &str = "correct-horse-battery-9";

fn unpacked(archive: &[u8]) -> BTreeMap<String, String> {
    let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(archive));
    let mut all = BTreeMap::new();
    for entry in tar.entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().to_string_lossy().into_owned();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        assert!(all.insert(name, text).is_none());
    }
    all
}

/// Contents with a secret in each possible place.
fn planted() -> ReportContents {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("w.toml");
    let text = format!(
        "[defaults.env]\nHF_TOKEN = \"{TOKEN}\"\n[models.a]\nargs = [\"--api-key\", \"{KEY}\", \"-mu\", \"https://h/m?sig={KEY}\"]\n"
    );
    std::fs::write(&file, text).unwrap();
    let loaded = load_config(ConfigSources { file: Some(file), ..ConfigSources::default() }).unwrap();
    let mut machine = HostMachine::read();
    machine.env = vec![("SOME_SECRET".into(), "a-secret-of-the-environment-1".into())];
    let mut contents = ReportContents::new(ReportCleaner::for_machine(Some(&loaded), &machine));
    here::gather_machine(&mut contents, Ok(&loaded), &machine);
    contents.add_json(
        "status.json",
        "status",
        json!({"args": ["--api-key", "short1", "-c", "1"], "env": [["MY_PASSWORD", "hush-hush"]], "url": "https://me:hush-pw@host/?k=hush-q",
               "HF_TOKEN": "hush-field", "said": format!("the key is {KEY}")}),
    );
    let state = dir.path().join("state");
    std::fs::create_dir_all(state.join("traces")).unwrap();
    let line = json!({"line": format!("loaded with {KEY} and a-secret-of-the-environment-1, Bearer abcdef123456ghi")}).to_string();
    std::fs::write(state.join("events.jsonl"), format!("{line}\ntorn {{ \"{TOKEN}\n")).unwrap();
    std::fs::write(state.join("ledger.jsonl"), format!("{line}\n")).unwrap();
    std::fs::write(state.join("growth.json"), json!({"a": {"key": TOKEN}}).to_string()).unwrap();
    std::fs::write(state.join("traces/a-g1.jsonl"), "{\"at\":1}\n").unwrap();
    here::gather_files(&mut contents, &state);
    contents.add_text(
        "logs/a",
        "a log",
        &format!("GET https://u:hush-pw@h/x?token=hush-q with --api-key {KEY}\nHF_TOKEN={TOKEN}\n"),
    );
    let metrics =
        "llama_warden_key_requests_total{key=\"alice\"} 1\nllama_warden_key_requests_total{key=\"bob\"} 2\n";
    contents.add_text("metrics.txt", "metrics", metrics);
    contents.add_json(
        "pin.json",
        "who pinned",
        json!({"by": "page, key bob, 10.0.0.7", "said": "key bobsled"}),
    );
    contents.add_note(&format!("it said {KEY}"));
    contents.finish();
    contents
}

#[test]
fn no_secret_of_any_place_is_in_the_archive_or_in_the_list_of_it() {
    let contents = planted();
    let all = unpacked(&contents::pack_archive(&contents).unwrap());
    let names: Vec<&str> =
        all.keys().map(|name| name.strip_prefix("llama-warden-report/").unwrap()).collect();
    assert_eq!(
        names,
        [
            "config.toml",
            "contents.txt",
            "events.jsonl",
            "growth.json",
            "ledger.jsonl",
            "logs/a",
            "machine.txt",
            "metrics.txt",
            "notes.txt",
            "pin.json",
            "recordings/a-g1.jsonl",
            "status.json"
        ]
    );
    for secret in [TOKEN, KEY, "short1", "hush-", "a-secret-of-the-environment-1", "abcdef123456ghi"] {
        for (name, text) in &all {
            assert!(!text.contains(secret), "{secret} in {name}:\n{text}");
        }
        assert!(!contents.table().contains(secret));
    }
    for (name, text) in &all {
        assert!(!text.contains("alice") && !text.contains("bob,"), "the name of a key in {name}:\n{text}");
    }
    let of = |name: &str| &all[&format!("llama-warden-report/{name}")];
    assert!(of("config.toml").contains("args = [\"--api-key\", \"***\", \"-mu\", \"https://h/m?***\"]"));
    assert!(
        of("metrics.txt").contains("{key=\"key-2\"} 2") && of("pin.json").contains("page, key key-2, 10")
    );
    assert!(of("events.jsonl").contains("loaded with ***") && of("logs/a").contains("https://***@h/x?***"));
    assert!(of("machine.txt").contains("llama-warden: ") && of("contents.txt").contains("events.jsonl"));
}

#[test]
fn the_same_contents_are_the_same_archive_and_no_file_is_written_over() {
    let contents = planted();
    let archive = contents::pack_archive(&contents).unwrap();
    assert_eq!(archive, contents::pack_archive(&contents).unwrap());
    let dir = tempfile::tempdir().unwrap();
    let path = archive_path(Some(Path::new("r.tar.gz")), dir.path());
    contents::check_free(&path).unwrap();
    contents::write_archive(&path, &archive).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), archive);
    for refused in [contents::check_free(&path), contents::write_archive(&path, b"other")] {
        assert!(refused.unwrap_err().to_string().contains("is there already"));
    }
    assert_eq!(std::fs::read(&path).unwrap(), archive);
    // A link is refused, too, whatever its target.
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(dir.path().join("elsewhere"), &link).unwrap();
    assert!(contents::check_free(&link).is_err() && contents::write_archive(&link, b"x").is_err());
    assert!(!dir.path().join("elsewhere").exists());
    let missing = contents::write_archive(&dir.path().join("none/r"), b"x").unwrap_err();
    assert!(missing.lines().join(" ").contains("--out"));
}

#[test]
fn it_goes_into_the_current_folder_or_where_it_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let named = archive_path(None, dir.path());
    let name = named.file_name().unwrap().to_string_lossy();
    assert!(
        name.starts_with("llama-warden-report-2") && name.ends_with(".tar.gz") && name.len() == 42,
        "{name}"
    );
    assert_eq!(named.parent(), Some(dir.path()));
    assert_eq!(archive_path(Some(dir.path()), Path::new("/x")).parent(), Some(dir.path()));
    assert_eq!(archive_path(Some(Path::new("a")), dir.path()), dir.path().join("a"));
}

#[test]
fn names_of_others_cannot_lead_out_of_the_folder() {
    for (name, tamed) in [
        ("logs/01-../../etc/passwd.jsonl", "logs/01-../etc/passwd.jsonl"),
        ("../../x", "x"),
        ("/etc/x", "etc/x"),
        ("a\u{1b}[31m b", "a--31m-b"),
        ("..", ""),
    ] {
        assert_eq!(safe_name(name), tamed);
        assert!(!safe_name(name).split('/').any(|part| part == ".."));
    }
    assert!(safe_name(&"x".repeat(5000)).len() <= 100);
}

#[test]
fn the_list_says_what_each_file_is_and_what_is_missing() {
    let mut contents = ReportContents::new(ReportCleaner::default());
    contents.add_text("b.txt", "the second", "12345");
    contents.add_text("a.txt", "the first", "1");
    contents.add_text("empty.txt", "nothing", " \n");
    contents.add_text("logs/a b", "one", "1");
    contents.add_text("logs/a?b", "another of that name", "22");
    contents.add_note("status, logs: no llama-warden\u{1b}[31m is running\nhere");
    contents.finish();
    insta::assert_snapshot!(contents.table());
}
