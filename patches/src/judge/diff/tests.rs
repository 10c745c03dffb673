//! A fitting diff is placed, another one is refused with the differing line; nothing is placed elsewhere.

use std::collections::BTreeMap;

use super::*;
use crate::set::diff::validate_diff;

struct Files(BTreeMap<&'static str, &'static [u8]>, SourceRevision);

impl SourceTree for Files {
    fn read(&self, path: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.0.get(path).map(|content| content.to_vec()))
    }

    fn revision(&self) -> SourceRevision {
        self.1.clone()
    }
}

fn tree(files: &[(&'static str, &'static [u8])]) -> Files {
    let revision = SourceRevision { commit: Some("0123456789abcdef".into()), build_number: Some(8050) };
    Files(files.iter().copied().collect(), revision)
}

fn diff(content: &str) -> SetDiff {
    SetDiff {
        file: "mine.patch".into(),
        first: Some("b8000".into()),
        last: Some("b8100".into()),
        commits: Vec::new(),
        content: content.as_bytes().to_vec(),
    }
}

const CHANGE: &str = "--- a/x.txt\n+++ b/x.txt\n@@ -2,3 +2,3 @@\n two\n-three\n+THREE\n four\n";
const NUMBERS: &[u8] = b"one\ntwo\nthree\nfour\nfive\n";

fn refusal(content: &str, files: &[(&'static str, &'static [u8])]) -> String {
    let placed = place_diff(&diff(content), &tree(files)).unwrap();
    assert!(placed.edits.is_none(), "{placed:?}");
    assert_eq!(placed.reasons[0].status, PatchStatus::Refused);
    placed.reasons[0].to_string()
}

fn placed(content: &str, files: &[(&'static str, &'static [u8])]) -> Vec<FileEdit> {
    let placed = place_diff(&diff(content), &tree(files)).unwrap();
    assert!(placed.reasons.is_empty(), "{placed:?}");
    placed.edits.unwrap().0
}

#[test]
fn a_diff_that_fits_is_placed() {
    let edits = placed(CHANGE, &[("x.txt", NUMBERS)]);
    assert_eq!(edits[0].after, b"one\ntwo\nTHREE\nfour\nfive\n");
    assert_eq!(edits[0].before.as_deref(), Some(NUMBERS));
}

#[test]
fn a_diff_that_fits_one_line_lower_is_refused_with_the_line() {
    let text = refusal(CHANGE, &[("x.txt", b"zero\none\ntwo\nthree\nfour\nfive\n")]);
    assert_eq!(text, "x.txt:2: diff `mine.patch`: expected `two`, found `one`");
}

#[test]
fn a_context_line_that_differs_only_in_its_end_is_refused() {
    let text = refusal(CHANGE, &[("x.txt", b"one\r\ntwo\r\nthree\r\nfour\r\nfive\r\n")]);
    assert!(text.contains("another end of line"), "{text}");
    let text = refusal(CHANGE, &[("x.txt", b"one\ntwo\nthree\nfour")]);
    assert!(text.contains("x.txt:4") && text.contains("another end of line"), "{text}");
    assert!(refusal(CHANGE, &[("x.txt", b"one\ntwo\n")]).contains("the file ends before"));
    assert!(refusal(CHANGE, &[("x.txt", b"")]).contains("the file has 0 lines"));
    assert!(refusal(CHANGE, &[]).contains("no such file"));
}

#[test]
fn git_diffs_create_and_change_several_files() {
    let text = "From 0123 Mon Sep 17 00:00:00 2001\nFrom: me <me@example.com>\nSubject: x\n\ntext\n---\n x | 1 +\n\n\
                diff --git a/x.txt b/x.txt\nindex 1..2 100644\n--- a/x.txt\n+++ b/x.txt\n@@ -1 +1 @@\n-one\n+ONE\n\
                @@ -5,0 +6 @@\n+six\n\
                diff --git a/n/new.h b/n/new.h\nnew file mode 100644\nindex 0..1\n--- /dev/null\n+++ b/n/new.h\n\
                @@ -0,0 +1 @@\n+hello\n\\ No newline at end of file\n-- \n2.0\n";
    let edits = placed(text, &[("x.txt", NUMBERS)]);
    assert_eq!(edits[0].after, b"ONE\ntwo\nthree\nfour\nfive\nsix\n");
    assert_eq!(
        (edits[1].path.as_str(), &edits[1].before, &edits[1].after[..]),
        ("n/new.h", &None, &b"hello"[..])
    );
    assert!(refusal(text, &[("x.txt", NUMBERS), ("n/new.h", b"")]).contains("is there already"));
}

#[test]
fn crlf_and_bytes_that_are_no_text_are_kept() {
    let content = b"--- a/x\n+++ b/x\n@@ -1,2 +1,3 @@\n \xff\r\n+new\r\n end\n\\ No newline at end of file\n";
    let diff = SetDiff { content: content.to_vec(), ..diff("") };
    let placed = place_diff(&diff, &tree(&[("x", b"\xff\r\nend")])).unwrap();
    assert_eq!(placed.edits.unwrap().0[0].after, b"\xff\r\nnew\r\nend");
}

#[test]
fn what_a_diff_may_not_do_is_said() {
    let git = |rest: &str| format!("diff --git a/x.txt b/x.txt\n{rest}");
    let mode = git("old mode 100644\nnew mode 100755\n--- a/x.txt\n+++ b/x.txt\n@@ -1 +1 @@\n-one\n+1\n");
    for (content, word) in [
        ("--- a/x.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-one\n", "deletes x.txt"),
        (
            "diff --git a/x.txt b/y.txt\nsimilarity index 100%\nrename from x.txt\nrename to y.txt\n",
            "renames x.txt",
        ),
        (&mode, "sets the mode"),
        ("--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n", "leads out of the tree"),
        ("--- /dev/null\n+++ b/.git/hooks/x\n@@ -0,0 +1 @@\n+b\n", "leads out of the tree"),
        ("--- /etc/x\n+++ /etc/x\n@@ -1 +1 @@\n-a\n+b\n", "leads out of the tree"),
        ("--- a/x.txt\n+++ b/y.txt\n@@ -1 +1 @@\n-a\n+b\n", "may not move files"),
        ("no diff at all\n", "cannot be read"),
        ("--- a/x.txt\n+++ b/x.txt\n@@ -1 +1 @@\n-one\n+1\nnoise\n@@ -2 +2 @@\n-two\n+2\n", "hunk"),
        ("--- a/x.txt\n+++ b/x.txt\n@@ -1,9 +1 @@\n-one\n+1\n", "cannot be read"),
    ] {
        let text = validate_diff(&diff(content)).unwrap_err();
        assert!(text.contains(word), "{content:?}: {text}");
        assert!(refusal(content, &[("x.txt", NUMBERS)]).contains(word));
    }
}

#[test]
fn outside_of_its_range_it_is_not_applicable_and_with_an_unknown_revision_unverified() {
    let ask = |diff: &SetDiff, commit: Option<&str>, build_number| {
        let revision = SourceRevision { commit: commit.map(str::to_owned), build_number };
        let placed = place_diff(diff, &Files([("x.txt", NUMBERS)].into(), revision)).unwrap();
        (placed.reasons.first().map(|reason| reason.status), placed.edits.is_some())
    };
    let builds = diff(CHANGE);
    assert_eq!(ask(&builds, None, Some(8000)), (None, true));
    assert_eq!(ask(&builds, None, Some(8101)), (Some(PatchStatus::NotApplicable), false));
    assert_eq!(ask(&builds, Some("0123456789"), None), (Some(PatchStatus::Unverified), true));
    let commits = SetDiff { first: None, last: None, commits: vec!["0123456".into()], ..diff(CHANGE) };
    assert_eq!(ask(&commits, Some("0123456789abcdef"), None), (None, true));
    assert_eq!(
        ask(&commits, Some("0123457000000000"), Some(8000)),
        (Some(PatchStatus::NotApplicable), false)
    );
    assert_eq!(ask(&commits, None, Some(8000)), (Some(PatchStatus::Unverified), true));
    let neither = SetDiff { commits: Vec::new(), ..commits };
    assert_eq!(ask(&neither, None, Some(8000)), (Some(PatchStatus::Unverified), true));
}

#[test]
fn a_range_that_makes_no_sense_is_said_on_load() {
    let of = |first: &str, last: &str| SetDiff {
        first: Some(first.into()),
        last: Some(last.into()),
        ..diff(CHANGE)
    };
    assert!(validate_diff(&of("b9", "b8")).unwrap_err().contains("empty"));
    assert!(validate_diff(&of("x", "b8")).unwrap_err().contains("`x`"));
    assert!(
        validate_diff(&SetDiff { commits: vec!["zz".into()], ..diff(CHANGE) }).unwrap_err().contains("`zz`")
    );
    validate_diff(&diff(CHANGE)).unwrap();
}
