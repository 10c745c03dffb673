//! Writing to the byte, and refusing before the first write.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;

use tempfile::TempDir;

use super::*;
use crate::edits::{InsertedLine, TreeEdits};
use crate::error::PatchError;
use crate::judgement::{PatchStatus, SetJudgement};
use crate::marker::marker;

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
        fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
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

fn message(error: &PatchError) -> String {
    format!("{error}\nhint: {}", error.hint().unwrap_or_default())
}

#[test]
fn files_are_written_to_the_byte_and_keep_their_modes() {
    let folder = folder();
    assert!(apply(folder.path(), &series()).unwrap());
    let patched = snapshot(folder.path());
    for edit in series().edits.0 {
        let (content, mode) = patched[&folder.path().join(&edit.path)].as_ref().unwrap();
        assert_eq!(content, &edit.after, "{}", edit.path);
        assert!(edit.path != "src/one.cpp" || mode & 0o777 == 0o755, "{mode:o}");
    }
}

#[test]
fn a_row_without_edits_touches_nothing() {
    let folder = folder();
    let before = snapshot(folder.path());
    assert!(!apply(folder.path(), &series_of(vec![])).unwrap());
    assert_eq!(snapshot(folder.path()), before);
}

#[test]
fn links_read_only_files_and_ways_out_of_the_tree_are_errors_that_name_them() {
    let folder = folder();
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("target.cpp"), CODE).unwrap();
    symlink(outside.path().join("target.cpp"), folder.path().join("src/link.cpp")).unwrap();
    symlink(outside.path(), folder.path().join("elsewhere")).unwrap();
    fs::create_dir(folder.path().join("src/folder.cpp")).unwrap();
    fs::set_permissions(folder.path().join("src/two.cpp"), Permissions::from_mode(0o444)).unwrap();
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
        let text = message(&apply(folder.path(), &row).unwrap_err());
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
    let text = message(&apply(folder.path(), &row).unwrap_err());
    assert!(text.contains("changed by another program"), "{text}");
    assert_eq!(snapshot(folder.path()), before);
}
