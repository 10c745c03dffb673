//! Writing commits into folders.

use std::os::unix::fs::PermissionsExt;

use git2::{ObjectType, Oid};
use tokio_util::sync::CancellationToken;

use super::{Item, Made};
use crate::error::BuilderError;
use crate::event::{BuildEvent, EventReporter};
use crate::git::{GitError, GitRepository};

/// Writes a commit into a folder; returns the folder and the notes.
fn place(made: &Made, commit: Oid) -> crate::Result<(tempfile::TempDir, Vec<String>)> {
    let into = tempfile::tempdir().unwrap();
    let (reporter, mut events) = EventReporter::channel();
    let repository = GitRepository::open(made.path())?;
    repository.tree(&commit.to_string())?.write_to(into.path(), &reporter, &CancellationToken::new())?;
    let mut notes = Vec::new();
    while let Ok(event) = events.try_recv() {
        if let BuildEvent::Note(note) = event {
            notes.push(note);
        }
    }
    Ok((into, notes))
}

#[test]
fn a_commit_is_written_out_as_git_would_without_models_and_submodules() {
    let made = Made::new();
    let commit = made.llama(
        &[
            ("scripts/run.sh", Item::Script("#!/bin/sh")),
            ("src/link.cpp", Item::Link("../ggml/CMakeLists.txt")),
            ("models/vocab.gguf", Item::File("large")),
            ("models/readme", Item::File("text")),
            ("kompute", Item::Submodule),
        ],
        &[],
    );
    let (folder, notes) = place(&made, commit).unwrap();
    let path = |name: &str| folder.path().join(name);
    assert_eq!(std::fs::read_to_string(path("CMakeLists.txt")).unwrap(), "project");
    assert_eq!(std::fs::read_to_string(path("src/link.cpp")).unwrap(), "ggml");
    let may_run = |name: &str| path(name).metadata().unwrap().permissions().mode() & 0o111 != 0;
    assert!(may_run("scripts/run.sh") && !may_run("CMakeLists.txt"));
    assert!(
        !path("models/vocab.gguf").exists() && path("models/readme").exists() && !path("kompute").exists()
    );
    assert!(!path(".git").exists());
    assert_eq!(notes, Vec::<String>::new());
}

#[test]
fn only_the_part_that_is_llama_cpp_is_written() {
    let made = Made::new();
    let commit = made.commit(
        &[
            ("README", Item::File("")),
            ("v/CMakeLists.txt", Item::File("")),
            ("v/ggml/CMakeLists.txt", Item::File("")),
            ("v/tools/server/CMakeLists.txt", Item::File("")),
            // Inside the repository, but outside of the written part.
            ("v/up", Item::Link("../README")),
        ],
        &[],
    );
    let error = place(&made, commit).unwrap_err().to_string();
    assert!(error.contains("its entry `v/up` is a link that leads out"), "{error}");
}

#[test]
fn links_that_leave_the_tree_are_refused() {
    for target in ["/etc/passwd", "../../x", "a/../../../x", ""] {
        let made = Made::new();
        let commit = made.llama(&[("src/x", Item::Link(target))], &[]);
        let error = place(&made, commit).unwrap_err();
        assert!(matches!(&error, BuilderError::Git(GitError::Unsafe { .. })), "{target}: {error}");
    }
}

#[test]
fn trees_that_git_would_never_write_are_refused() {
    let made = Made::new();
    let plain = made.repo.find_commit(made.llama(&[], &[])).unwrap().tree().unwrap();
    let blob = made.repo.blob(b"x").unwrap();
    let link = made.repo.blob(b"ggml").unwrap();
    for (what, extra) in [
        ("a name that climbs", vec![("100644", "../evil", blob)]),
        ("the parent itself", vec![("40000", "..", plain.id())]),
        ("a file through a link", vec![("120000", "z", link), ("40000", "z", plain.id())]),
        ("a name twice", vec![("120000", "z", link), ("100644", "z", blob)]),
    ] {
        let mut raw = Vec::new();
        for entry in &plain {
            raw.extend(format!("{:o} {}\0", entry.filemode(), entry.name().unwrap()).bytes());
            raw.extend(entry.id().as_bytes());
        }
        for (mode, name, id) in extra {
            raw.extend(format!("{mode} {name}\0").bytes());
            raw.extend(id.as_bytes());
        }
        let Ok(tree) = made.repo.odb().unwrap().write(ObjectType::Tree, &raw) else { continue };
        let who = git2::Signature::new("a", "b", &git2::Time::new(0, 0)).unwrap();
        let text = format!("tree {tree}\nauthor {who} 0 +0000\ncommitter {who} 0 +0000\n\n{what}\n");
        let commit = made.repo.odb().unwrap().write(ObjectType::Commit, text.as_bytes()).unwrap();
        let outcome = place(&made, commit);
        assert!(outcome.is_err(), "{what}");
    }
}

#[test]
fn missing_files_fail_a_build_only_where_it_may_need_them() {
    let made = Made::new();
    let commit = made.llama(
        &[
            ("src/a.cpp", Item::File("code")),
            ("docs/a.md", Item::File("words")),
            ("media/logo.png", Item::File("picture")),
        ],
        &[],
    );
    made.lose(made.repo.blob(b"words").unwrap());
    made.lose(made.repo.blob(b"picture").unwrap());
    let (folder, notes) = place(&made, commit).unwrap();
    assert!(folder.path().join("src/a.cpp").exists() && !folder.path().join("docs/a.md").exists());
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(notes[0].contains("lacks docs/a.md, media/logo.png"), "{notes:?}");
    made.lose(made.repo.blob(b"code").unwrap());
    let error = place(&made, commit).unwrap_err();
    assert!(
        matches!(&error, BuilderError::Git(GitError::Missing { path, .. }) if path == "src/a.cpp"),
        "{error}"
    );
}
