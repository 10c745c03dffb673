//! Resolving names; commits as trees of files.

use std::sync::Arc;

use warden_patches::SourceTree;

use super::{Item, Made};
use crate::error::BuilderError;
use crate::git::{GitError, GitRepository};
use crate::source::BuildSource;

fn open(made: &Made) -> Arc<GitRepository> {
    GitRepository::open(made.path()).unwrap()
}

#[test]
fn the_newest_tag_is_that_of_the_newest_commit_and_of_the_greatest_number_on_it() {
    let made = Made::new();
    let line = made.line(4);
    made.tag("b20", line[3]);
    made.annotated("b9", line[3]);
    made.tag("b100", line[1]);
    made.tag("v2.0", line[2]);
    let repository = open(&made);
    let newest = |pattern: &str| repository.newest_tag(pattern).unwrap();
    assert_eq!(newest("b*"), Some(("b20".to_owned(), line[3].to_string())), "b100 is on an older commit");
    assert_eq!(newest("v*"), Some(("v2.0".to_owned(), line[2].to_string())));
    assert_eq!(newest("x*"), None);
}

#[test]
fn tags_branches_and_commits_are_found_by_name() {
    let made = Made::new();
    let line = made.line(3);
    made.tag("b1000", line[0]);
    made.annotated("b1001", line[1]);
    made.branch("topic/x", line[1]);
    let repository = open(&made);
    for (name, commit) in [
        ("HEAD", line[2]),
        ("HEAD~2", line[0]),
        ("b1001^", line[0]),
        ("main", line[2]),
        ("topic/x", line[1]),
        ("b1000", line[0]),
        ("b1001", line[1]),
        (&line[0].to_string(), line[0]),
        (&line[0].to_string()[..9], line[0]),
        (&line[0].to_string()[..9].to_uppercase(), line[0]),
    ] {
        assert_eq!(repository.resolve(name).unwrap(), commit.to_string(), "{name}");
    }
}

#[test]
fn a_build_number_without_a_tag_is_counted() {
    let made = Made::new();
    let line = made.line(4);
    let repository = open(&made);
    assert_eq!(repository.resolve("b3").unwrap(), line[2].to_string());
    assert!(repository.resolve("b5").is_err());
    // A tag takes precedence.
    made.tag("b3", line[0]);
    assert_eq!(repository.resolve("b3").unwrap(), line[0].to_string());
}

#[test]
fn an_unknown_name_is_refused_with_similar_ones() {
    let made = Made::new();
    let line = made.line(1);
    made.tag("b9976", line[0]);
    made.tag("gguf-v1", line[0]);
    let error = open(&made).resolve("b9977").unwrap_err();
    assert!(error.to_string().ends_with("no tag, branch or commit `b9977`; similar are: b9976"), "{error}");
    // `config` is a file of the repository, not a reference.
    assert!(open(&made).resolve("config").is_err());
}

#[test]
fn a_folder_without_a_repository_is_refused_even_inside_of_one() {
    let made = Made::new();
    let inner = made.path().join("inner");
    std::fs::create_dir(&inner).unwrap();
    let error = GitRepository::open(&inner).unwrap_err().to_string();
    assert!(error.contains("there is no git repository"), "{error}");
}

#[test]
fn a_worktree_and_a_plain_clone_are_read_in_place() {
    let made = Made::new();
    let line = made.line(2);
    made.branch("other", line[0]);
    let beside = tempfile::tempdir().unwrap();
    let (tree, clone) = (beside.path().join("tree"), beside.path().join("clone"));
    let branch = made.repo.find_reference("refs/heads/other").unwrap();
    let mut options = git2::WorktreeAddOptions::new();
    made.repo.worktree("tree", &tree, Some(options.reference(Some(&branch)))).unwrap();
    git2::Repository::clone(&made.path().to_string_lossy(), &clone).unwrap();
    assert_eq!(GitRepository::open(&tree).unwrap().resolve("HEAD").unwrap(), line[0].to_string());
    let clone = GitRepository::open(&clone).unwrap();
    assert_eq!(clone.resolve("HEAD").unwrap(), line[1].to_string());
    // The clone has this branch only as a remote branch.
    assert_eq!(clone.resolve("other").unwrap(), line[0].to_string());
}

#[test]
fn files_of_a_commit_are_read_by_name_and_named_by_content() {
    let made = Made::new();
    let below = [
        ("vendor/llama.cpp/CMakeLists.txt", Item::File("")),
        ("vendor/llama.cpp/ggml/CMakeLists.txt", Item::File("")),
        ("vendor/llama.cpp/examples/server/CMakeLists.txt", Item::File("")),
        ("vendor/llama.cpp/src/a.cpp", Item::File("same")),
        ("vendor/llama.cpp/src/b.cpp", Item::File("same")),
        ("vendor/llama.cpp/src/link.cpp", Item::Link("a.cpp")),
    ];
    let commit = made.commit(&below, &[]);
    let tree = open(&made).tree(&commit.to_string()).unwrap();
    assert_eq!(tree.root(), Some("vendor/llama.cpp"));
    assert_eq!(tree.read("src/a.cpp").unwrap().unwrap(), b"same");
    assert_eq!(tree.content_id("src/a.cpp").unwrap(), tree.content_id("src/b.cpp").unwrap());
    assert_ne!(tree.content_id("src/a.cpp").unwrap(), tree.content_id("src/link.cpp").unwrap());
    for absent in ["src/c.cpp", "src", "src/a.cpp/x", "src/link.cpp"] {
        assert_eq!(tree.read(absent).unwrap(), None, "{absent}");
        assert_eq!(tree.content_id(absent).unwrap(), None, "{absent}");
    }
}

#[test]
fn a_file_that_the_clone_lacks_is_named_with_a_cure() {
    let made = Made::new();
    let commit = made.llama(&[("src/a.cpp", Item::File("only here"))], &[]);
    made.lose(made.repo.blob(b"only here").unwrap());
    let error =
        BuilderError::from(open(&made).tree(&commit.to_string()).unwrap().read("src/a.cpp").unwrap_err());
    assert!(error.to_string().contains(&format!("lacks `src/a.cpp` of commit {commit}")), "{error}");
    assert!(error.hint().unwrap().contains("--filter"));
}

#[test]
fn a_commit_is_examined_as_a_source() {
    let made = Made::new();
    let line = made.line(2);
    let examine = |commit: git2::Oid| {
        let (repository, shown) = (made.path().to_owned(), "shown".to_owned());
        let source = BuildSource::Commit { repository, shown, commit: commit.to_string() };
        source.examine("/nonexistent".as_ref(), &tokio_util::sync::CancellationToken::new())
    };
    let found = examine(line[1]).unwrap();
    assert_eq!(found.identity, format!("git-{}", line[1]));
    assert_eq!(
        (found.kind.as_str(), found.root.as_str(), found.server.as_str()),
        ("git", "", "tools/server")
    );
    // The number is counted; a tag on the commit would take precedence.
    assert_eq!(found.revision.build_number, Some(2));
    made.annotated("b777", line[1]);
    assert_eq!(examine(line[1]).unwrap().revision.build_number, Some(777));
    let other = made.commit(&[("photo.jpg", Item::File("x"))], &[]);
    assert!(matches!(examine(other), Err(BuilderError::NoLlamaCpp { top, .. }) if top == ["photo.jpg"]));
    let absent = git2::Oid::from_bytes(&[9; 20]).unwrap();
    assert!(matches!(examine(absent), Err(BuilderError::Git(GitError::Repository { .. }))));
}
