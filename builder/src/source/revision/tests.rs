//! The forms in which a tree's history is preserved.

use std::collections::HashMap;

use super::*;

const COMMIT: &str = "0c1e570980000000000000000000000000000abc";

fn of(root: &str, top: &str, remark: Option<&str>, files: &[(&str, &str)]) -> SourceRevision {
    let files: HashMap<&str, &str> = files.iter().copied().collect();
    for name in files.keys().filter(|name| !name.starts_with("..") && !name.starts_with('/')) {
        assert!(is_evidence(name), "{name} would not be kept from an archive");
    }
    find_revision(root, top, remark, &|name| files.get(name).map(|text| (*text).to_owned()))
}

#[test]
fn a_submodule_in_an_archive_points_to_its_commit() {
    let found = of(
        "pkg-1/vendor/llama.cpp",
        "pkg-1.tar.gz",
        None,
        &[
            ("pkg-1/vendor/llama.cpp/.git", "gitdir: ../../.git/modules/vendor/llama.cpp\n"),
            ("pkg-1/.git/modules/vendor/llama.cpp/HEAD", &format!("{COMMIT}\n")),
            (
                "pkg-1/.git/modules/vendor/llama.cpp/packed-refs",
                "# pack-refs\nffff refs/remotes/origin/master\n",
            ),
        ],
    );
    assert_eq!(found, SourceRevision { commit: Some(COMMIT.into()), build_number: None });
    assert_eq!(found.to_string(), "build unknown, commit 0c1e57098");
}

#[test]
fn a_checkout_follows_its_branch_and_knows_its_tag() {
    let packed = format!("# pack-refs\n{COMMIT} refs/heads/master\n{COMMIT} refs/tags/b9976\n");
    let found = of(
        "",
        "llama.cpp",
        None,
        &[(".git/HEAD", "ref: refs/heads/master\n"), (".git/packed-refs", &packed)],
    );
    assert_eq!(found.to_string(), "build 9976, commit 0c1e57098");
}

#[test]
fn a_loose_branch_wins_over_a_packed_one() {
    let packed = "1111111111111111111111111111111111111111 refs/heads/master\n";
    let files = [
        (".git/HEAD", "ref: refs/heads/master"),
        (".git/refs/heads/master", COMMIT),
        (".git/packed-refs", packed),
    ];
    assert_eq!(of("", "x", None, &files).commit.unwrap(), COMMIT);
}

#[test]
fn an_annotated_tag_is_followed_to_its_commit() {
    let packed = format!("2222222222222222222222222222222222222222 refs/tags/b7\n^{COMMIT}\n");
    assert_eq!(
        of("", "x", None, &[(".git/HEAD", COMMIT), (".git/packed-refs", &packed)]).build_number,
        Some(7)
    );
}

#[test]
fn a_worktree_shares_its_refs() {
    let files = [
        (".git", "gitdir: /repo/.git/worktrees/w"),
        ("/repo/.git/worktrees/w/HEAD", "ref: refs/heads/w"),
        ("/repo/.git/worktrees/w/commondir", "../.."),
        ("/repo/.git/refs/heads/w", COMMIT),
    ];
    assert_eq!(of("", "x", None, &files).commit.unwrap(), COMMIT);
}

#[test]
fn generated_files_remarks_and_names_speak_when_git_does_not() {
    let info = "int LLAMA_BUILD_NUMBER = 4447;\nchar const *LLAMA_COMMIT = \"f7cd1330\";\n";
    let found = of("x", "x.zip", Some(COMMIT), &[("x/common/build-info.cpp", info)]);
    assert_eq!(found, SourceRevision { commit: Some("f7cd1330".into()), build_number: Some(4447) });
    assert_eq!(of("llama.cpp-b12", "a.zip", Some(COMMIT), &[]).to_string(), "build 12, commit 0c1e57098");
    assert_eq!(of("", "llama.cpp-b12.tar.gz", None, &[]).build_number, Some(12));
    assert_eq!(of(&format!("llama.cpp-{COMMIT}"), "", None, &[]).commit.unwrap(), COMMIT);
}

#[test]
fn without_evidence_both_are_unknown() {
    assert_eq!(of("src", "src", Some("made by hand"), &[]).to_string(), "build unknown, commit unknown");
    assert_eq!(of("my-build", "x", None, &[]), SourceRevision::default());
}
