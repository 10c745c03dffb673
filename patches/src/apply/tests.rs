//! Applying all or nothing, to the byte, also after failed or interrupted writes.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;

use proptest::collection::vec;
use proptest::prelude::*;
use tempfile::TempDir;

use super::record::RECORD_FILE;
use super::*;
use crate::edits::{FileEdit, InsertedLine};
use crate::error::{PatchError, PatchErrorClass};
use crate::judgement::{PatchStatus, SetJudgement};
use crate::marker::marker;
use crate::tree::SourceTree;

const CODE: &[u8] = b"int first() {\r\n    return 1;\r\n}\r\n// \xff\xfe\r\nint last() { return 2; }";
const SIDECAR: &str = "src/deep/llama-warden-demo.h";

/// All entries below a folder with their bytes and modes.
fn snapshot(root: &Path) -> BTreeMap<PathBuf, Option<(Vec<u8>, u32)>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let path = entry.path();
            if entry.file_type().unwrap().is_dir() {
                found.insert(path.clone(), None);
                folders.push(path);
            } else {
                let facts = fs::symlink_metadata(&path).unwrap();
                let content = if facts.is_symlink() { Vec::new() } else { fs::read(&path).unwrap() };
                found.insert(path.clone(), Some((content, facts.permissions().mode())));
            }
        }
    }
    found
}

fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("src")).unwrap();
    for (name, mode) in [("src/one.cpp", 0o755), ("src/two.cpp", 0o640)] {
        let file = folder.path().join(name);
        fs::write(&file, CODE).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
    }
    folder
}

fn edit(path: &str, before: &[u8], at: usize, line: &str) -> FileEdit {
    let mut lines: Vec<&[u8]> = before.split_inclusive(|byte| *byte == b'\n').collect();
    let text = format!("{line} {}\r\n", marker("demo", "hook"));
    lines.insert(at, text.as_bytes());
    let inserted = vec![InsertedLine { line: at + 1, text: text.trim_end().to_owned(), hook: "hook".into() }];
    FileEdit { path: path.into(), before: Some(before.to_vec()), after: lines.concat(), inserted }
}

fn series_of(edits: Vec<FileEdit>) -> PatchSeries {
    let edits = TreeEdits(edits);
    let judgement = SetJudgement {
        placed: String::new(),
        proof: None,
        set: "demo".into(),
        status: PatchStatus::Verified,
        reasons: Vec::new(),
        fixes: Vec::new(),
        edits: Some(edits.clone()),
        seams: Vec::new(),
    };
    PatchSeries { judgements: vec![judgement], edits }
}

fn series() -> PatchSeries {
    series_of(vec![
        edit("src/one.cpp", CODE, 1, "    call();"),
        edit("src/two.cpp", CODE, 0, "#include \"x\""),
        FileEdit { path: SIDECAR.into(), before: None, after: b"#pragma once\n".to_vec(), inserted: vec![] },
    ])
}

fn open(folder: &TempDir) -> PatchTarget {
    PatchTarget::open(folder.path(), SourceRevision::default()).unwrap()
}

fn message(error: &PatchError) -> String {
    format!("{error}\nhint: {}", error.hint().unwrap_or_default())
}

#[test]
fn applied_twice_is_once_and_reversed_is_as_before() {
    let folder = folder();
    let before = snapshot(folder.path());
    assert_eq!(open(&folder).apply(&series()).unwrap(), ApplyOutcome::Written);
    let patched = snapshot(folder.path());
    assert_eq!(patched[&folder.path().join("src/one.cpp")].as_ref().unwrap().1 & 0o777, 0o755);
    assert!(fs::read_to_string(folder.path().join(SIDECAR)).unwrap().contains("pragma"));
    assert_eq!(open(&folder).apply(&series()).unwrap(), ApplyOutcome::Already);
    assert_eq!(snapshot(folder.path()), patched);
    let reversed = open(&folder).reverse().unwrap();
    assert_eq!(reversed.sets[0].id, "demo");
    assert_eq!(reversed.files, ["src/deep/llama-warden-demo.h", "src/one.cpp", "src/two.cpp"]);
    assert_eq!(snapshot(folder.path()), before);
    assert_eq!(open(&folder).reverse().unwrap(), ReverseOutcome { sets: vec![], files: vec![] });
}

#[test]
fn an_applied_tree_is_judged_as_it_was() {
    let folder = folder();
    open(&folder).apply(&series()).unwrap();
    let target = open(&folder);
    let original = target.original().unwrap();
    assert_eq!(original.read("src/one.cpp").unwrap().unwrap(), CODE);
    assert_eq!(original.read(SIDECAR).unwrap(), None);
    assert_eq!(original.read("nothing").unwrap(), None);
}

#[test]
fn a_row_without_edits_touches_nothing() {
    let folder = folder();
    let before = snapshot(folder.path());
    assert_eq!(open(&folder).apply(&series_of(vec![])).unwrap(), ApplyOutcome::Nothing);
    assert_eq!(snapshot(folder.path()), before);
}

#[test]
fn other_sets_on_top_are_refused_with_the_way_out() {
    let folder = folder();
    open(&folder).apply(&series()).unwrap();
    let other = series_of(vec![edit("src/one.cpp", CODE, 1, "    other();")]);
    let error = open(&folder).apply(&other).unwrap_err();
    assert_eq!(error.kind(), PatchErrorClass::Refused);
    let text = message(&error);
    assert!(text.contains("demo@") && text.contains("--reverse"), "{text}");
}

#[test]
fn an_edited_tree_is_refused_with_the_lines_that_differ() {
    let folder = folder();
    open(&folder).apply(&series()).unwrap();
    let file = folder.path().join("src/one.cpp");
    let text = fs::read(&file).unwrap();
    let edited = [&text[..], b"\nint mine;\n"].concat();
    fs::write(&file, &edited).unwrap();
    let patched = snapshot(folder.path());
    let applying = open(&folder).apply(&series()).unwrap_err();
    let reversing = open(&folder).reverse().unwrap_err();
    for error in [applying, reversing] {
        let text = message(&error);
        assert_eq!(error.kind(), PatchErrorClass::Refused);
        assert!(text.contains("src/one.cpp:7: +int mine;"), "{text}");
    }
    assert!(open(&folder).original().is_err());
    assert_eq!(snapshot(folder.path()), patched);
}

#[test]
fn an_edit_of_our_own_lines_alone_does_not_keep_the_original_from_being_restored() {
    let folder = folder();
    let before = snapshot(folder.path());
    open(&folder).apply(&series()).unwrap();
    let file = folder.path().join("src/one.cpp");
    let mut lines: Vec<Vec<u8>> =
        fs::read(&file).unwrap().split_inclusive(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
    let ours = lines.remove(1);
    lines.insert(3, [&b"  "[..], &ours].concat());
    fs::write(&file, lines.concat()).unwrap();
    open(&folder).reverse().unwrap();
    assert_eq!(snapshot(folder.path()), before);
}

#[test]
fn a_sidecar_that_was_edited_or_removed_is_noticed() {
    let folder = folder();
    open(&folder).apply(&series()).unwrap();
    fs::write(folder.path().join(SIDECAR), "#pragma once\nmine\n").unwrap();
    let text = message(&open(&folder).reverse().unwrap_err());
    assert!(text.contains(&format!("{SIDECAR}: is no longer the file that was created")), "{text}");
    fs::remove_file(folder.path().join(SIDECAR)).unwrap();
    // A removed sidecar counts as original.
    assert_eq!(open(&folder).apply(&series()).unwrap(), ApplyOutcome::Written);
    fs::remove_file(folder.path().join(SIDECAR)).unwrap();
    open(&folder).reverse().unwrap();
    assert_eq!(fs::read(folder.path().join("src/one.cpp")).unwrap(), CODE);
}

#[test]
fn a_removed_file_is_named() {
    let folder = folder();
    open(&folder).apply(&series()).unwrap();
    fs::remove_file(folder.path().join("src/one.cpp")).unwrap();
    let text = message(&open(&folder).reverse().unwrap_err());
    assert!(text.contains("src/one.cpp: was removed"), "{text}");
}

#[test]
fn a_damaged_or_foreign_record_is_not_believed() {
    let folder = folder();
    open(&folder).apply(&series()).unwrap();
    let path = folder.path().join(RECORD_FILE);
    let text = fs::read_to_string(&path).unwrap();
    let broken = [
        text[..text.len() / 2].to_owned(),
        text.replace("\"schema\": 2", "\"schema\": 3"),
        text.replace("\"original\": \"", "\"original\": \"not hex"),
    ];
    for broken in broken {
        assert_ne!(broken, text);
        fs::write(&path, broken).unwrap();
        let error = PatchTarget::open(folder.path(), SourceRevision::default()).err().unwrap();
        assert!(message(&error).contains("the record of the applied patches cannot be used"), "{error}");
    }
}

#[test]
fn a_record_that_names_files_outside_of_the_tree_is_not_believed() {
    let outer = tempfile::tempdir().unwrap();
    let (root, other) = (outer.path().join("tree"), outer.path().join("other"));
    fs::create_dir_all(root.join("src")).unwrap();
    fs::create_dir(&other).unwrap();
    fs::write(other.join("x"), "precious").unwrap();
    let one = FileEdit { path: SIDECAR.into(), before: None, after: b"x".to_vec(), inserted: vec![] };
    PatchTarget::open(&root, SourceRevision::default()).unwrap().apply(&series_of(vec![one])).unwrap();
    let text = fs::read_to_string(root.join(RECORD_FILE)).unwrap();
    let absolute = other.join("x").display().to_string();
    for path in ["../other/x", ".git/hooks/x", &absolute] {
        let tampered = text.replacen(SIDECAR, path, 1);
        assert_ne!(tampered, text);
        fs::write(root.join(RECORD_FILE), tampered).unwrap();
        let error = PatchTarget::open(&root, SourceRevision::default()).err().unwrap();
        assert!(message(&error).contains("leads out of the tree"), "{path}");
        assert!(other.join("x").exists() && root.join(SIDECAR).exists(), "{path}");
    }
}

#[test]
fn links_read_only_files_and_ways_out_of_the_tree_are_errors_that_name_them() {
    let folder = folder();
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("target.cpp"), CODE).unwrap();
    symlink(outside.path().join("target.cpp"), folder.path().join("src/link.cpp")).unwrap();
    symlink(outside.path(), folder.path().join("elsewhere")).unwrap();
    fs::create_dir(folder.path().join("src/folder.cpp")).unwrap();
    fs::set_permissions(folder.path().join("src/two.cpp"), fs::Permissions::from_mode(0o444)).unwrap();
    let before = snapshot(folder.path());
    for (path, words) in [
        ("src/link.cpp", "src/link.cpp: the file is a symbolic link"),
        ("elsewhere/target.cpp", "elsewhere: the folder is a symbolic link"),
        ("src/two.cpp", "src/two.cpp: the file is read-only\nhint: allow writing first: chmod u+w"),
        ("src/folder.cpp", "this is no regular file"),
        ("../x.cpp", "`../x.cpp` leads out of the tree"),
        (".git/hooks/x", "`.git/hooks/x` leads out of the tree"),
        ("/etc/x.cpp", "`/etc/x.cpp` leads out of the tree"),
    ] {
        let row = series_of(vec![edit("src/one.cpp", CODE, 1, "x();"), edit(path, CODE, 1, "x();")]);
        let text = message(&open(&folder).apply(&row).unwrap_err());
        assert!(text.contains(words), "{text}");
        assert_eq!(snapshot(folder.path()), before, "{path}");
    }
    assert_eq!(fs::read(outside.path().join("target.cpp")).unwrap(), CODE);
}

#[test]
fn a_file_that_changed_after_it_was_judged_is_not_overwritten() {
    let folder = folder();
    let row = series();
    fs::write(folder.path().join("src/two.cpp"), "another text\n").unwrap();
    let before = snapshot(folder.path());
    let text = message(&open(&folder).apply(&row).unwrap_err());
    assert!(text.contains("changed by another program"), "{text}");
    assert_eq!(snapshot(folder.path()), before);
}

#[test]
fn the_second_of_two_at_the_same_time_changes_nothing() {
    let folder = folder();
    let mut first = open(&folder);
    let refused =
        PatchTarget::open(folder.path(), SourceRevision::default()).err().map(|error| message(&error));
    assert!(refused.unwrap_or_default().contains("another run"));
    first.apply(&series()).unwrap();
    let patched = snapshot(folder.path());
    drop(first);
    assert_eq!(open(&folder).apply(&series()).unwrap(), ApplyOutcome::Already);
    assert_eq!(snapshot(folder.path()), patched);
}

#[test]
fn a_write_that_fails_undoes_those_before_it_and_names_the_file() {
    let folder = folder();
    let before = snapshot(folder.path());
    let below_a_file = FileEdit {
        path: "src/two.cpp/deep/x.h".into(),
        before: None,
        after: b"x".to_vec(),
        inserted: vec![],
    };
    let mut edits = series().edits.0;
    edits.retain(|edit| edit.path != "src/two.cpp");
    edits.push(below_a_file);
    let text = message(&open(&folder).apply(&series_of(edits)).unwrap_err());
    assert!(text.contains("src/two.cpp/deep"), "{text}");
    assert_eq!(snapshot(folder.path()), before);
}

#[test]
fn a_folder_in_which_writing_was_cut_off_can_be_applied_to_and_reversed() {
    let plain = folder();
    for cut_off in ["src/one.cpp", "src/two.cpp", SIDECAR] {
        let folder = folder();
        let before = snapshot(folder.path());
        open(&folder).apply(&series()).unwrap();
        let patched = snapshot(folder.path());
        let cut = || {
            let file = folder.path().join(cut_off);
            match fs::read(plain.path().join(cut_off)) {
                Ok(original) => fs::write(file, original),
                Err(_) => fs::remove_file(file),
            }
        };
        cut().unwrap();
        assert_eq!(open(&folder).apply(&series()).unwrap(), ApplyOutcome::Written);
        assert_eq!(snapshot(folder.path()), patched);
        cut().unwrap();
        open(&folder).reverse().unwrap();
        // A folder whose only file was never written may stay empty.
        fs::remove_dir(folder.path().join("src/deep")).ok();
        assert_eq!(snapshot(folder.path()), before);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn apply_and_reverse_are_the_identity_over_any_files(
        lines in vec((vec(any::<u8>().prop_filter("line ends", |byte| *byte != b'\n'), 0..12), any::<bool>()), 0..20),
        last in vec(any::<u8>().prop_filter("line ends", |byte| *byte != b'\n'), 0..5),
        places in vec(any::<prop::sample::Index>(), 1..4),
    ) {
        let mut content: Vec<u8> = lines
            .iter()
            .flat_map(|(text, crlf)| [&text[..], if *crlf { b"\r\n" } else { b"\n" }].concat())
            .collect();
        content.extend_from_slice(&last);
        let folder = folder();
        fs::write(folder.path().join("src/one.cpp"), &content).unwrap();
        let before = snapshot(folder.path());
        let mut edits = edit("src/one.cpp", &content, places[0].index(lines.len() + 1), "anchor();");
        for place in &places[1..] {
            edits.after = edit("src/one.cpp", &edits.after, place.index(lines.len() + 1), "more();").after;
        }
        let row = series_of(vec![edits.clone()]);
        prop_assert_eq!(open(&folder).apply(&row).unwrap(), ApplyOutcome::Written);
        prop_assert_eq!(fs::read(folder.path().join("src/one.cpp")).unwrap(), edits.after);
        prop_assert_eq!(open(&folder).apply(&row).unwrap(), ApplyOutcome::Already);
        open(&folder).reverse().unwrap();
        prop_assert_eq!(snapshot(folder.path()), before);
    }
}
