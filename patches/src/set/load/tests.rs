//! Invalid sets with their errors, and valid ones.

use std::fs;
use std::path::Path;

use super::super::catalogue::SetCatalogue;
use super::super::fingerprints::KnownVersion;
use super::super::fix::VariableKind;
use super::super::{HookPosition, PatchSet, SetOrigin};
use crate::error::Result;

const GOOD: &str = r#"schema = 1
id = "mine"
title = "A set of ours"
backends = ["cuda"]
first = "b4881"

[[sidecar]]
file = "w.h"
beside = "include"

[[hook]]
id = "include"
files = ["src/a.cpp"]
container = { kind = "function", name = "run" }
at = "before-container"
insert = ['#include "w.h"']

[[hook]]
id = "end"
files = ["src/a.cpp"]
container = { kind = "function", name = "run" }
anchor = "return 0;"
at = "before"
insert = ["w::end();"]

[[probe]]
id = "one"
files = ["src/a.cpp"]
pattern = '\breturn\b'
count = 1
why = "look"
fix = "cure"
define = "W_ONE"

[[seam]]
id = "run"
files = ["src/a.cpp"]
container = { kind = "function", name = "run" }

[[fix]]
id = "cure"
title = "Cures it"
symptom = "it is ill"

[[fix.variable]]
name = "W_LIMIT"
type = "integer"
default = 16
min = 1
max = 100
"#;

fn write(folder: &Path, files: &[(&str, &str)]) {
    fs::create_dir_all(folder).unwrap();
    for (name, text) in files {
        fs::write(folder.join(name), text).unwrap();
    }
}

fn load(text: &str, fingerprints: &str) -> Result<PatchSet> {
    let folder = tempfile::tempdir().unwrap();
    let set = folder.path().join("mine");
    write(&set, &[("set.toml", text), ("w.h", "// ours\n"), ("fingerprints.json", fingerprints)]);
    let catalogue = SetCatalogue::default().with_folder(&set)?;
    Ok(catalogue.set("mine").unwrap().clone())
}

const NONE: &str = r#"{"schema":1,"seams":{}}"#;

/// The error without the folder, which is a new one each time.
fn error(text: &str) -> String {
    let error = load(text, NONE).unwrap_err();
    assert!(error.hint().is_some());
    let text = error.to_string();
    text.split_once("/mine/").map_or(text.clone(), |(_, tail)| tail.to_owned())
}

fn with(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from), "{from}");
    GOOD.replacen(from, to, 1)
}

#[test]
fn a_sound_set_is_read_whole() {
    let set =
        load(GOOD, r#"{"schema":1,"seams":{"run":[{"hash":"0123456789abcdef","label":"b1"}]}}"#).unwrap();
    assert_eq!((set.id.as_str(), set.is_for("cuda"), set.is_for("cpu")), ("mine", true, false));
    assert_eq!(set.sidecars[0].content, b"// ours\n");
    assert_eq!(
        (set.hooks[0].at, set.hooks[1].anchor.as_deref()),
        (HookPosition::BeforeContainer, Some("return 0;"))
    );
    assert_eq!(set.probes[0].bounds(), (1, 1));
    assert_eq!(set.fix("cure").unwrap().variables[0].kind, VariableKind::Integer);
    assert_eq!(
        set.fingerprints
            .versions("run")
            .iter()
            .map(|known: &KnownVersion| known.label.as_str())
            .collect::<Vec<_>>(),
        ["b1"]
    );
    assert!(matches!(set.origin, SetOrigin::Folder(_)));
}

#[test]
fn a_broken_set_names_file_line_and_key() {
    let broken = [
        ("schema = 1", "schema = 2"),
        ("schema = 1", "schema = \"1\""),
        ("id = \"mine\"", "id = \"Mine\""),
        ("id = \"mine\"", "id = \"other\""),
        ("[\"cuda\"]", "[\"cudda\"]"),
        ("\"b4881\"", "\"4881\""),
        ("file = \"w.h\"", "file = \"v.h\""),
        ("file = \"w.h\"", "file = \"../w.h\""),
        ("beside = \"include\"", "beside = \"x\""),
        ("id = \"end\"", "id = \"include\""),
        ("anchor = \"return 0;\"", ""),
        ("anchor = \"return 0;\"", "anker = \"return 0;\""),
        ("anchor = \"return 0;\"", "anchor = 'f(\"x\");'"),
        ("insert = [\"w::end();\"]", "insert = [\"/*\"]"),
        ("insert = [\"w::end();\"]", "insert = []"),
        ("count = 1", "count = 1\nguarded = [\"ende\"]"),
        ("count = 1", "count = 1\nguarded = [\"end\"]\ncontainer = { kind = \"function\", name = \"run\" }"),
        ("at = \"before\"", "at = \"beside\""),
        ("[\"src/a.cpp\"]", "[\"../a.cpp\"]"),
        ("[\"src/a.cpp\"]", "[\"src/.GIT/a.cpp\"]"),
        ("[\"src/a.cpp\"]", "[\"/a.cpp\"]"),
        ("[\"src/a.cpp\"]", "[]"),
        ("\"run\" }", "\"run it\" }"),
        ("\"function\"", "\"method\""),
        ("'\\breturn\\b'", "'(return'"),
        ("count = 1", "count = 1\nmin = 2"),
        ("count = 1", "count = -1"),
        ("why = \"look\"", ""),
        ("fix = \"cure\"", "fix = \"care\""),
        ("\"W_ONE\"", "\"w one\""),
        ("default = 16", "default = 1.5"),
        ("default = 16", "default = 101"),
        ("name = \"W_LIMIT\"", "name = \"w-limit\""),
        ("title = \"A set of ours\"", "title = A"),
    ];
    let told = broken.map(|(from, to)| {
        let found = error(&with(from, to));
        assert!(!found.contains('\n'), "{found}");
        format!("{found}\n")
    });
    insta::assert_snapshot!(told.concat());
}

#[test]
fn missing_and_broken_fingerprints_are_named() {
    let fault = |text: &str| {
        let text = load(GOOD, text).unwrap_err().to_string();
        text.split_once("/mine/").unwrap().1.to_owned()
    };
    assert!(
        fault("{\n\"schema\": 1,\n").starts_with("fingerprints.json:3: "),
        "{}",
        fault("{\n\"schema\": 1,\n")
    );
    assert_eq!(fault(r#"{"schema":7}"#), "fingerprints.json: `schema`: this is schema 7, known is 1");
    assert!(fault(r#"{"schema":1,"extra":1}"#).contains("unknown field `extra`"));
    let of = |seam: &str, hash: &str| {
        format!(r#"{{"schema":1,"seams":{{"{seam}":[{{"hash":"{hash}","label":"b1"}}]}}}}"#)
    };
    assert_eq!(fault(&of("walk", "absent")), "fingerprints.json: `seams.walk`: the set has no such seam");
    assert!(fault(&of("run", "12")).starts_with("fingerprints.json: `seams.run[1].hash`: `12` is neither"));
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("mine"), &[("set.toml", GOOD), ("w.h", "")]);
    let error = SetCatalogue::default().with_folder(folder.path()).unwrap_err().to_string();
    assert!(error.ends_with("/mine/fingerprints.json: this file is missing"), "{error}");
}

#[test]
fn a_folder_of_sets_is_read_sorted_and_an_empty_one_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for id in ["b", "a"] {
        let text =
            GOOD.replace("\"mine\"", &format!("\"{id}\"")).replace("\"cure\"", &format!("\"cure-{id}\""));
        let text = text.replace("W_LIMIT", &format!("W_LIMIT_{}", id.to_uppercase()));
        write(&folder.path().join(id), &[("set.toml", &text), ("w.h", ""), ("fingerprints.json", NONE)]);
    }
    let catalogue = SetCatalogue::default().with_folder(folder.path()).unwrap();
    assert_eq!(catalogue.sets().iter().map(|set| set.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(catalogue.fix("cure-b").unwrap().0.id, "b");
    let empty = tempfile::tempdir().unwrap();
    let error = SetCatalogue::default().with_folder(empty.path()).unwrap_err().to_string();
    assert!(error.contains("there is no set.toml in it"), "{error}");
    let error = SetCatalogue::default().with_folder(&empty.path().join("mistyped")).unwrap_err();
    assert!(error.to_string().contains("mistyped: there is no such folder"), "{error}");
    assert_eq!(error.kind(), crate::PatchErrorClass::Input);
}

#[test]
fn an_id_that_is_taken_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| folder.path().join(name).join("mine"));
    for (path, fix) in [(&one, "cure"), (&two, "care")] {
        let text = GOOD.replace("\"cure\"", &format!("\"{fix}\""));
        write(path, &[("set.toml", &text), ("w.h", ""), ("fingerprints.json", NONE)]);
    }
    let error = SetCatalogue::default().with_folder(&one).unwrap().with_folder(&two).unwrap_err().to_string();
    assert!(error.contains("the id `mine` is taken by the set `mine`"), "{error}");
    let three = folder.path().join("three");
    write(
        &three,
        &[("set.toml", &GOOD.replace("\"mine\"", "\"three\"")), ("w.h", ""), ("fingerprints.json", NONE)],
    );
    let error =
        SetCatalogue::default().with_folder(&one).unwrap().with_folder(&three).unwrap_err().to_string();
    assert!(error.contains("the fix `cure` is taken by the set `mine`"), "{error}");
}

#[test]
fn the_embedded_sets_are_sound() {
    let catalogue = SetCatalogue::embedded().unwrap();
    let ids: Vec<&str> = catalogue.sets().iter().map(|set| set.id.as_str()).collect();
    assert!(ids.is_sorted());
    for set in catalogue.sets() {
        assert_eq!(set.origin, SetOrigin::Embedded);
        for sidecar in &set.sidecars {
            assert!(!sidecar.content.is_empty(), "{}", sidecar.file);
        }
    }
}

#[test]
fn the_set_that_the_documentation_shows_is_sound() {
    let page = include_str!("../../../../docs/patches.md");
    let block = |from: &str| page.split_once(from).unwrap().1.split_once("```").unwrap().0;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine");
    let known = block("add the hash:\n\n```json\n");
    for fingerprints in [block("Begin with a `fingerprints.json` without hashes:\n\n```json\n"), known] {
        write(
            &path,
            &[
                (
                    "set.toml",
                    block("This example set counts how often a function of llama.cpp runs:\n\n```toml\n"),
                ),
                ("mine.h", ""),
                ("fingerprints.json", fingerprints),
            ],
        );
        let catalogue = SetCatalogue::default().with_folder(&path).unwrap();
        assert_eq!(catalogue.fix("count-turns").unwrap().0.hooks.len(), 2);
    }
}
