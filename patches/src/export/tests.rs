//! Exported patches apply with git and with patch, and give the same tree as our own writer.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::*;
use crate::judgement::FixJudgement;
use crate::tree::{FolderTree, SourceRevision};

const BEFORE: &str = "one\n\n\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine";

fn judgement(set: &str, edits: Vec<FileEdit>) -> SetJudgement {
    SetJudgement {
        set: set.into(),
        status: PatchStatus::Verified,
        reasons: Vec::new(),
        placed: String::new(),
        proof: None,
        fixes: vec![FixJudgement {
            fix: "some-fix".into(),
            status: PatchStatus::Verified,
            reason: None,
            life: None,
        }],
        edits: Some(TreeEdits(edits)),
        seams: Vec::new(),
    }
}

/// Two sets, the second one on top of the first.
fn series() -> PatchSeries {
    let middle = BEFORE.replace("three\n", "three\nhook(); // llama-warden:a/x\n");
    let after = format!("#include \"x.h\" // llama-warden:b/y\n{}\n\u{e9}nd\n", middle.replace("two\n", ""));
    let change = |before: &str, after: &str| FileEdit {
        path: "src/code.cpp".into(),
        before: Some(before.into()),
        after: after.into(),
        inserted: vec![],
    };
    let new = FileEdit {
        path: "src/new/x.h".into(),
        before: None,
        after: "#pragma once\n".into(),
        inserted: vec![],
    };
    let judgements = vec![
        judgement("a", vec![change(BEFORE, &middle)]),
        judgement("b", vec![new, change(&middle, &after)]),
    ];
    PatchSeries { judgements, edits: TreeEdits(vec![change(BEFORE, &after)]) }
}

fn files() -> Vec<PatchFile> {
    let revision = SourceRevision { commit: Some("0123456789ab".into()), build_number: Some(8827) };
    export(&series(), &[], &FolderTree::new("/nowhere", revision), None).unwrap()
}

fn run(program: &str, args: &[&str], folder: &Path) -> bool {
    let mut command = Command::new(program);
    command.args(
        ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
            .iter()
            .filter(|_| program == "git"),
    );
    let output =
        command.args(args).current_dir(folder).env("HOME", folder).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stderr.is_empty()
}

fn has(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).status().is_ok_and(|status| status.success())
}

#[test]
fn the_series_is_the_same_bytes_each_time_and_says_what_it_is_for() {
    let files = files();
    assert_eq!(files, self::files());
    let names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(names, ["0001-a.patch", "0002-b.patch"]);
    let text = String::from_utf8(files[1].content.clone()).unwrap();
    for part in [
        "From: llama-warden <",
        "Subject: [PATCH 2/2] b: ",
        "For llama.cpp, build 8827, commit 012345678 (verified there).",
        "Fix some-fix: verified.",
        " 2 files changed, 4 insertions(+), 2 deletions(-)",
        "--- /dev/null\n+++ b/src/new/x.h\n@@ -0,0 +1 @@\n+#pragma once\n",
        "\\ No newline at end of file",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn git_apply_git_am_and_patch_make_the_tree_that_we_would_write() {
    let wanted = series().edits.0[0].after.clone();
    let ways: [(&str, &[&str]); 3] =
        [("git", &["apply"]), ("git", &["am"]), ("patch", &["-p1", "--fuzz=0", "-i"])];
    for (program, args) in ways {
        if !has(program) {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("src")).unwrap();
        fs::write(folder.path().join("src/code.cpp"), BEFORE).unwrap();
        if program == "git" {
            run("git", &["init", "-q"], folder.path());
            run("git", &["add", "."], folder.path());
            run("git", &["commit", "-q", "-m", "x"], folder.path());
        }
        let patches = tempfile::tempdir().unwrap();
        for file in files() {
            let path = patches.path().join(&file.name);
            fs::write(&path, &file.content).unwrap();
            let quiet = run(program, &[args, &[path.to_str().unwrap()]].concat(), folder.path());
            assert!(quiet, "{program} {args:?} was not content with {}", file.name);
        }
        assert_eq!(fs::read(folder.path().join("src/code.cpp")).unwrap(), wanted, "{program} {args:?}");
        assert_eq!(fs::read(folder.path().join("src/new/x.h")).unwrap(), b"#pragma once\n");
        let strange = fs::read_dir(folder.path().join("src")).unwrap().count();
        assert_eq!(strange, 2, "{program} left something behind");
    }
}

#[test]
fn files_with_crlf_are_marked_for_git_am() {
    let edit = FileEdit {
        path: "x".into(),
        before: Some(b"a\r\n".to_vec()),
        after: b"a\r\nb\r\n".to_vec(),
        inserted: vec![],
    };
    let series = PatchSeries { judgements: vec![judgement("a", vec![edit])], edits: TreeEdits::default() };
    let files = export(&series, &[], &FolderTree::new("/nowhere", SourceRevision::default()), None).unwrap();
    assert!(files[0].crlf && !self::files()[0].crlf);
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("x"), "a\r\n").unwrap();
    fs::write(folder.path().join("x.patch"), &files[0].content).unwrap();
    if has("git") {
        run("git", &["init", "-q"], folder.path());
        run("git", &["add", "x"], folder.path());
        run("git", &["commit", "-q", "-m", "x"], folder.path());
        run("git", &["am", "--keep-cr", "x.patch"], folder.path());
        assert_eq!(fs::read(folder.path().join("x")).unwrap(), b"a\r\nb\r\n");
    }
}

/// A tree with the only function that the set `server` uses.
struct One;

impl SourceTree for One {
    fn read(&self, path: &str) -> Result<Option<Vec<u8>>> {
        let text = "#include \"log.h\"\nresult queue::recv_with_timeout(int timeout) {\n    while (true) {\n        \
                    std::cv_status cr_res = condition_results.wait_for(lock, std::chrono::seconds(timeout));\n    }\n}\n";
        Ok(match path {
            "tools/server/server-queue.cpp" => Some(text.into()),
            "tools/server/server.cpp" => Some("int main() {}\n".into()),
            _ => None,
        })
    }

    fn revision(&self) -> SourceRevision {
        SourceRevision { commit: Some("0a1b2c3d4".into()), build_number: Some(9000) }
    }
}

#[test]
fn one_fix_goes_with_a_page_that_says_why_and_what_was_seen_where() {
    let catalogue = crate::SetCatalogue::embedded().unwrap();
    let set = catalogue.set("server").unwrap();
    let series = PatchSeries::judge(&[set], &One).unwrap();
    let files = export(&series, &[set], &One, Some("cancel-nonstream")).unwrap();
    let [file] = files.as_slice() else { panic!("{files:?}") };
    assert_eq!(
        (file.name.as_str(), file.page_name.as_str()),
        ("0001-server-cancel-nonstream.patch", "0001-server-cancel-nonstream.md")
    );
    let mail = String::from_utf8(file.content.clone()).unwrap();
    assert!(mail.contains("Subject: [PATCH] server: Cancels a request when its client"), "{mail}");
    assert!(mail.contains("Fix cancel-nonstream") && !mail.contains("Fix reclaim-heap"), "{mail}");
    insta::assert_snapshot!(file.page);
}
