//! All or nothing, to the byte, also when the disk fails or the power goes.

mod failures;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::collection::vec;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::error::{Error, Kind};
use crate::judgement::{FileEdit, Inserted, Judgement};
use crate::tree::Tree;

const CODE: &[u8] = b"int first() {\r\n    return 1;\r\n}\r\n// \xff\xfe\r\nint last() { return 2; }";
const SIDECAR: &str = "src/deep/llama-warden-demo.h";

/// Everything below a folder with its bytes and mode.
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
    let inserted = vec![Inserted { line: at + 1, text: text.trim_end().to_owned(), hook: "hook".into() }];
    FileEdit { path: path.into(), before: Some(before.to_vec()), after: lines.concat(), inserted }
}

fn series_of(edits: Vec<FileEdit>) -> Series {
    let edits = Edits(edits);
    let judgement = Judgement {
        placed: String::new(),
        proof: None,
        set: "demo".into(),
        status: Status::Verified,
        reasons: Vec::new(),
        fixes: Vec::new(),
        edits: Some(edits.clone()),
        seams: Vec::new(),
    };
    Series { judgements: vec![judgement], edits }
}

fn series() -> Series {
    series_of(vec![
        edit("src/one.cpp", CODE, 1, "    call();"),
        edit("src/two.cpp", CODE, 0, "#include \"x\""),
        FileEdit { path: SIDECAR.into(), before: None, after: b"#pragma once\n".to_vec(), inserted: vec![] },
    ])
}

fn open(folder: &TempDir) -> Target {
    Target::open(folder.path(), Revision::default()).unwrap()
}

fn message(error: &Error) -> String {
    format!("{error}\nhint: {}", error.hint().unwrap_or_default())
}

#[test]
fn applied_twice_is_once_and_reversed_is_as_before() {
    let folder = folder();
    let before = snapshot(folder.path());
    assert_eq!(open(&folder).apply(&series()).unwrap(), Applied::Written);
    let patched = snapshot(folder.path());
    assert_eq!(patched[&folder.path().join("src/one.cpp")].as_ref().unwrap().1 & 0o777, 0o755);
    assert!(fs::read_to_string(folder.path().join(SIDECAR)).unwrap().contains("pragma"));
    assert_eq!(open(&folder).apply(&series()).unwrap(), Applied::Already);
    assert_eq!(snapshot(folder.path()), patched);
    assert_eq!(open(&folder).applied()[0].id, "demo");
    let reversed = open(&folder).reverse().unwrap();
    assert_eq!(reversed.files, ["src/deep/llama-warden-demo.h", "src/one.cpp", "src/two.cpp"]);
    assert_eq!(snapshot(folder.path()), before);
    assert_eq!(open(&folder).reverse().unwrap(), Reversed { sets: vec![], files: vec![] });
}

#[test]
fn an_applied_tree_is_judged_as_it_was() {
    let folder = folder();
    open(&folder).apply(&series()).unwrap();
    let original = open(&folder).original().unwrap();
    assert_eq!(original.read("src/one.cpp").unwrap().unwrap(), CODE);
    assert_eq!(original.read(SIDECAR).unwrap(), None);
    assert_eq!(original.read("nothing").unwrap(), None);
}

#[test]
fn a_row_without_edits_touches_nothing() {
    let folder = folder();
    let before = snapshot(folder.path());
    assert_eq!(open(&folder).apply(&series_of(vec![])).unwrap(), Applied::Nothing);
    assert_eq!(snapshot(folder.path()), before);
}

#[test]
fn other_sets_on_top_are_refused_with_the_way_out() {
    let folder = folder();
    open(&folder).apply(&series()).unwrap();
    let other = series_of(vec![edit("src/one.cpp", CODE, 1, "    other();")]);
    let error = open(&folder).apply(&other).unwrap_err();
    assert_eq!(error.kind(), Kind::Refused);
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
        assert_eq!(error.kind(), Kind::Refused);
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
    assert!(text.contains(&format!("{SIDECAR}:2: +mine")), "{text}");
    fs::remove_file(folder.path().join(SIDECAR)).unwrap();
    // Gone is its original state: what is left is restored.
    assert_eq!(open(&folder).apply(&series()).unwrap(), Applied::Finished);
    fs::remove_file(folder.path().join(SIDECAR)).unwrap();
    open(&folder).reverse().unwrap();
    assert_eq!(fs::read(folder.path().join("src/one.cpp")).unwrap(), CODE);
}

#[test]
fn lines_of_ours_without_a_journal_are_refused() {
    let folder = folder();
    open(&folder).apply(&series()).unwrap();
    fs::remove_file(folder.path().join(JOURNAL)).unwrap();
    let patched = fs::read(folder.path().join("src/one.cpp")).unwrap();
    let again = series_of(vec![edit("src/one.cpp", &patched, 1, "    call();")]);
    let text = message(&open(&folder).apply(&again).unwrap_err());
    assert!(text.contains("line 2 is of the patch `// llama-warden:demo/hook`"), "{text}");
}

#[test]
fn a_damaged_or_foreign_journal_is_told_and_not_believed() {
    let folder = folder();
    open(&folder).apply(&series()).unwrap();
    let path = folder.path().join(JOURNAL);
    let text = fs::read_to_string(&path).unwrap();
    let broken = [
        text[..text.len() / 2].to_owned(),
        text.replace("\"schema\": 1", "\"schema\": 2"),
        text.replacen("call();", "kill();", 1),
    ];
    for broken in broken {
        assert_ne!(broken, text);
        fs::write(&path, broken).unwrap();
        let error = Target::open(folder.path(), Revision::default()).err().unwrap();
        assert!(message(&error).contains("journal"), "{error}");
    }
}

#[test]
fn a_journal_that_names_files_or_folders_outside_of_the_tree_is_not_believed() {
    let outer = tempfile::tempdir().unwrap();
    let (root, other) = (outer.path().join("tree"), outer.path().join("other"));
    fs::create_dir_all(root.join("src")).unwrap();
    fs::create_dir(&other).unwrap();
    let one = FileEdit { path: SIDECAR.into(), before: None, after: b"x".to_vec(), inserted: vec![] };
    Target::open(&root, Revision::default()).unwrap().apply(&series_of(vec![one])).unwrap();
    let text = fs::read_to_string(root.join(JOURNAL)).unwrap();
    let absolute = format!("\"{}\"", other.display());
    for (from, to) in [
        ("\"src/deep\"", "\"../other\""),
        ("\"src/deep\"", absolute.as_str()),
        ("\"src/deep/llama-warden-demo.h\"", "\"../other/x\""),
        ("\"src/deep/llama-warden-demo.h\"", "\".git/hooks/x\""),
    ] {
        let tampered = text.replacen(from, to, 1);
        assert_ne!(tampered, text);
        fs::write(root.join(JOURNAL), tampered).unwrap();
        let told = Target::open(&root, Revision::default()).and_then(|mut target| target.reverse());
        assert!(message(&told.unwrap_err()).contains("leads out of the tree"), "{to}");
        assert!(other.exists() && root.join(SIDECAR).exists(), "{to}");
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
    fs::write(folder.path().join("src/two.cpp"), "somebody was here\n").unwrap();
    let before = snapshot(folder.path());
    let text = message(&open(&folder).apply(&row).unwrap_err());
    assert!(text.contains("changed by somebody else"), "{text}");
    assert_eq!(snapshot(folder.path()), before);
}

#[test]
fn two_at_once_cannot_have_one_tree() {
    let folder = folder();
    let first = open(&folder);
    let error = Target::open(folder.path(), Revision::default()).err().unwrap();
    assert!(message(&error).contains("another llama-warden"), "{error}");
    drop(first);
    open(&folder);
}
