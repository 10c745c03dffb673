//! Tests valid and faulty files of keys. No message shows a key.

use super::*;

const SECRET: &str = "sk-0123456789abcdef-top-secret";

fn told(text: &str) -> String {
    let problems = KeyFile::parse(Path::new("keys.toml"), text).unwrap_err();
    let text = problems.lines().join("\n");
    assert!(!text.contains("top-secret"), "a key is shown: {text}");
    text
}

fn names(names: &[&str]) -> Vec<(ModelName, Vec<String>)> {
    names.iter().map(|name| (ModelName::new(name), vec![format!("{name}-alias")])).collect()
}

#[test]
fn a_whole_file_is_taken() {
    let text = format!(
        "# keys\n[bob]\nkey = \"{SECRET}\"\nmodels = [\"qwen\", \"em*-alias\"]\nrate = \"60/min\"\ntokens = \"1000/h\"\n\
         concurrency = 4\n\n[alice]\nsha256 = \"{}\"\n",
        KeyHash::from_key(b"other").to_hex()
    );
    let file = KeyFile::parse(Path::new("keys.toml"), &text).unwrap();
    let (specs, warnings) = file.specs(&names(&["qwen", "qwen-2", "embed"]));
    let [bob, alice] = specs.as_slice() else { panic!("{specs:?}") };
    assert_eq!(
        (&*bob.name, bob.hash),
        ("bob", KeyHash::from_key(SECRET.as_bytes())),
        "in the order of the file"
    );
    assert_eq!(bob.models, Some(["qwen", "embed"].iter().map(ModelName::new).collect()));
    assert_eq!(
        (bob.rate, bob.tokens, bob.concurrency),
        ("60/min".parse().ok(), "1000/h".parse().ok(), Some(4))
    );
    assert_eq!((alice.hash, &alice.models, alice.rate), (KeyHash::from_key(b"other"), &None, None));
    assert!(warnings.is_empty(), "{warnings:?}");
    assert!(!format!("{file:?}{specs:?}").contains("top-secret"));
}

#[test]
fn what_is_wrong_is_told_with_its_line_and_the_cure() {
    let hash = KeyHash::from_key(b"x").to_hex();
    let wrong = [
        format!("[a]\nkye = \"{SECRET}\"\n"),
        format!("[a]\nkey = \"{SECRET}\"\nsha256 = \"{hash}\"\n"),
        "[a]\nrate = \"60/min\"\n".to_owned(),
        format!("[a]\nsha256 = \"{hash}\"\nrate = \"often\"\n"),
        format!("[a]\nsha256 = \"{hash}\"\nconcurrency = 0\n"),
        format!("[a]\nsha256 = \"{hash}\"\nmodels = \"m\"\n"),
        "[a]\nsha256 = \"top-secret\"\n".to_owned(),
        "[a]\nkey = \"top-secret\"\n".to_owned(),
        format!("[a]\nkey = \"{SECRET} \"\n"),
        "[a]\nkey = 12345678901234567890\n".to_owned(),
        format!("[a]\nsha256 = \"{hash}\"\n[b]\nsha256 = \"{hash}\"\n"),
        format!("[\"{SECRET}\"]\n"),
        format!("{SECRET} = \"alice\"\n"),
        format!("[\"a b\"]\nsha256 = \"{hash}\"\n"),
        format!("[a]\nkey = {SECRET}\n"),
        "[a]\n[a]\n".to_owned(),
        String::new(),
    ];
    insta::assert_snapshot!(wrong.map(|text| told(&text) + "\n\n").concat());
}

#[test]
fn a_key_and_the_hash_of_the_same_are_found_out() {
    let text = format!(
        "[a]\nkey = \"{SECRET}\"\n[b]\nsha256 = \"{}\"\n",
        KeyHash::from_key(SECRET.as_bytes()).to_hex()
    );
    assert!(told(&text).contains("`a` and `b` are the same key"));
}

#[test]
fn a_pattern_that_means_nothing_is_warned_about() {
    let text = format!("[a]\nkey = \"{SECRET}\"\nmodels = [\"qwne*\"]\n");
    let file = KeyFile::parse(Path::new("keys.toml"), &text).unwrap();
    let (specs, warnings) = file.specs(&names(&["qwen"]));
    assert_eq!(specs[0].models, Some(HashSet::new()), "nothing, not everything");
    assert_eq!(warnings[0].to_string(), "keys.toml:1: key `a`: `qwne*` in `models` means no model");
}

#[test]
fn a_file_that_others_may_read_or_write_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let clear = format!("[a]\nkey = \"{SECRET}\"\n");
    let hashed = key_section("a", SECRET);
    for (text, mode, taken) in [
        (&clear, 0o600, true),
        (&clear, 0o640, true),
        (&clear, 0o644, false),
        (&hashed, 0o644, true),
        (&hashed, 0o666, false),
    ] {
        let path = dir.path().join("keys.toml");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let read = KeyFile::load(&path);
        assert_eq!(read.is_ok(), taken, "{mode:o}: {read:?}");
        if let Err(problems) = read {
            assert!(problems.0[0].hint.as_ref().unwrap().contains("chmod 600"), "{problems:?}");
        }
    }
    let error = KeyFile::load(&dir.path().join("none.toml")).unwrap_err();
    assert!(error.to_string().contains("cannot be read"), "{error}");
}

#[test]
fn a_fresh_key_is_long_and_never_the_same() {
    let (one, two) = (new_key(), new_key());
    assert_ne!(*one, *two);
    assert_eq!((one.len(), unsuitable_key(&one)), (67, None));
    let file = KeyFile::parse(Path::new("k"), &key_section("a.b", &one)).unwrap();
    assert_eq!((file.keys[0].name.as_str(), file.keys[0].hash), ("a.b", KeyHash::from_key(one.as_bytes())));
}
