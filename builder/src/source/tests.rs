//! Hand-made sources: trees on disk and in archives.

use std::fs;

use super::*;
use crate::archive::tests::{Made, tar_gz};
use crate::event::BuildEvent;

const COMMIT: &str = "0c1e570980000000000000000000000000000abc";

fn put(root: &Path, name: &str, text: &str) {
    let path = root.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn tree(root: &Path) {
    for name in ["CMakeLists.txt", "ggml/CMakeLists.txt", "tools/server/CMakeLists.txt", "src/llama.cpp"] {
        put(root, name, name);
    }
}

fn examine(path: &Path) -> Result<ExaminedSource> {
    BuildSource::at(path)?.examine(&path.with_file_name("cache"), &CancellationToken::new())
}

#[test]
fn a_tree_in_a_subfolder_is_found_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("given");
    tree(&root.join("vendor/llama.cpp"));
    put(&root, "vendor/llama.cpp/.git/HEAD", COMMIT);
    let found = examine(&root).unwrap();
    assert_eq!((found.root.as_str(), found.server.as_str()), ("vendor/llama.cpp", "tools/server"));
    assert_eq!(found.revision.short_commit(), "0c1e57098");
    assert!(found.to_string().ends_with("(vendor/llama.cpp)"), "{found}");
}

#[test]
fn a_submodule_on_disk_is_followed_above_the_given_folder() {
    let folder = tempfile::tempdir().unwrap();
    tree(&folder.path().join("vendor/llama.cpp"));
    put(folder.path(), "vendor/llama.cpp/.git", "gitdir: ../../.git/modules/x");
    put(folder.path(), ".git/modules/x/HEAD", COMMIT);
    assert_eq!(examine(&folder.path().join("vendor/llama.cpp")).unwrap().revision.commit.unwrap(), COMMIT);
}

#[test]
fn identity_follows_content_and_names_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("given");
    tree(&root);
    let identity = || examine(&root).unwrap().identity;
    let first = identity();
    put(&root, ".git/HEAD", COMMIT);
    put(&root, "models/vocab.gguf", "large");
    put(&root, "out/CMakeCache.txt", "built here");
    assert_eq!(identity(), first);
    put(&root, "src/llama.cpp", "changed");
    let changed = identity();
    assert_ne!(changed, first);
    fs::rename(root.join("src/llama.cpp"), root.join("src/other.cpp")).unwrap();
    assert_ne!(identity(), changed);
}

#[test]
fn a_source_that_was_built_in_itself_is_not_the_hash_of_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("given");
    tree(&root);
    let identity = || examine(&root).unwrap().identity;
    let clean = identity();
    put(&root, "CMakeCache.txt", "built here");
    put(&root, "CMakeFiles/x.o", "object");
    assert_eq!(identity(), clean, "what cmake leaves in the root is no source, and the rest is");
    put(&root, "src/llama.cpp", "changed");
    assert_ne!(identity(), clean);
    let copy = folder.path().join("copy");
    fs::create_dir(&copy).unwrap();
    folder::copy_source(&root, &copy, &EventReporter::silent(), &CancellationToken::new()).unwrap();
    assert!(copy.join("src/llama.cpp").exists() && !copy.join("CMakeCache.txt").exists());
}

#[test]
fn a_copied_tree_has_the_identity_of_its_original() {
    let folder = tempfile::tempdir().unwrap();
    let (root, copy) = (folder.path().join("given"), folder.path().join("copy"));
    tree(&root);
    std::os::unix::fs::symlink("../src/llama.cpp", root.join("ggml/link.cpp")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", root.join("ggml/out")).unwrap();
    let found = examine(&root).unwrap();
    fs::create_dir(&copy).unwrap();
    BuildSource::at(&root)
        .unwrap()
        .write_to(&found, &copy, &EventReporter::silent(), &CancellationToken::new())
        .unwrap();
    assert_eq!(examine(&copy).unwrap().identity, found.identity);
    assert!(!copy.join("ggml/out").exists());
}

/// A sparse file of this size, which takes no disk space.
fn sparse(root: &Path, name: &str, bytes: u64) {
    put(root, name, "");
    fs::File::options().write(true).open(root.join(name)).unwrap().set_len(bytes).unwrap();
}

#[test]
fn weights_modules_and_files_larger_than_any_source_are_no_source_and_no_identity() {
    let folder = tempfile::tempdir().unwrap();
    let (root, copy) = (folder.path().join("given"), folder.path().join("copy"));
    tree(&root);
    let identity = examine(&root).unwrap().identity;
    put(&root, "tools/ui/node_modules/left-pad/index.js", "module");
    put(&root, "models/x.safetensors", "weights");
    sparse(&root, "dump.core", 70 << 20);
    let found = examine(&root).unwrap();
    assert_eq!(found.identity, identity);
    fs::create_dir(&copy).unwrap();
    let (reporter, mut events) = EventReporter::channel();
    BuildSource::at(&root).unwrap().write_to(&found, &copy, &reporter, &CancellationToken::new()).unwrap();
    for left in ["tools/ui/node_modules", "models", "dump.core"] {
        assert!(!copy.join(left).exists(), "{left}");
    }
    assert!(copy.join("src/llama.cpp").exists());
    let Ok(BuildEvent::Note(note)) = events.try_recv() else { panic!("nothing is told of it") };
    assert!(note.contains("dump.core (70 MiB)") && note.contains("left out"), "{note}");
    assert!(events.try_recv().is_err(), "the rest is no news");
}

#[test]
fn a_folder_with_more_than_any_source_has_is_refused_before_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("given");
    tree(&root);
    for number in 0..40 {
        sparse(&root, &format!("data/{number}"), 60 << 20);
    }
    let error = examine(&root).unwrap_err();
    assert!(error.to_string().contains("more than 2 GiB"), "{error}");
    assert!(error.hint().is_some(), "{error}");
}

#[test]
fn an_archive_without_llama_cpp_is_refused_with_what_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let path = tar_gz(folder.path(), &[Made::File("numpy/setup.py", b""), Made::File("README", b"")]);
    let message = examine(&path).unwrap_err().to_string();
    assert!(message.contains("there is no llama.cpp in") && message.ends_with("README, numpy"), "{message}");
}

#[test]
fn a_folder_without_llama_cpp_is_refused_with_what_it_has() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), "photos/cat.jpg", "");
    assert!(examine(folder.path()).unwrap_err().to_string().ends_with("at its top are: photos"));
}

#[test]
fn a_missing_path_is_told_apart_from_a_bad_file() {
    assert!(matches!(
        BuildSource::at(Path::new("/nonexistent/x.zip")),
        Err(BuilderError::SourceMissing { .. })
    ));
    assert!(matches!(BuildSource::at(Path::new("/dev/null")), Err(BuilderError::NotAnArchive { .. })));
}

#[test]
fn an_archive_is_examined_placed_and_remembered() {
    let folder = tempfile::tempdir().unwrap();
    let path = tar_gz(
        folder.path(),
        &[
            Made::File("p-1/.git/modules/v/HEAD", COMMIT.as_bytes()),
            Made::File("p-1/v/.git", b"gitdir: ../.git/modules/v"),
            Made::File("p-1/v/CMakeLists.txt", b""),
            Made::File("p-1/v/ggml/CMakeLists.txt", b""),
            Made::File("p-1/v/tools/server/CMakeLists.txt", b""),
            Made::File("p-1/v/models/x.gguf", b""),
        ],
    );
    let found = examine(&path).unwrap();
    assert_eq!(found.root, "p-1/v");
    assert_eq!(found.revision.commit.as_deref(), Some(COMMIT));
    let into = tempfile::tempdir().unwrap();
    BuildSource::at(&path)
        .unwrap()
        .write_to(&found, into.path(), &EventReporter::silent(), &CancellationToken::new())
        .unwrap();
    assert!(into.path().join("tools/server/CMakeLists.txt").exists());
    assert!(!into.path().join("models").exists());
    assert!(!into.path().join(".git").exists());
    // A second examination gives the same result, cached or not.
    assert_eq!(examine(&path).unwrap(), found);
}

#[test]
fn folders_and_archives_are_read_as_trees_alike() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("given");
    tree(&root.join("v"));
    put(&root, "v/docs/build.md", "words");
    let packed = tar_gz(
        folder.path(),
        &[
            Made::File("p-1/v/CMakeLists.txt", b"CMakeLists.txt"),
            Made::File("p-1/v/ggml/CMakeLists.txt", b"ggml/CMakeLists.txt"),
            Made::File("p-1/v/tools/server/CMakeLists.txt", b"tools/server/CMakeLists.txt"),
            Made::File("p-1/v/src/llama.cpp", b"src/llama.cpp"),
            Made::File("p-1/v/docs/build.md", b"words"),
            Made::File("p-1/src/other.cpp", b"not ours"),
        ],
    );
    for path in [root, packed] {
        let source = BuildSource::at(&path).unwrap();
        let tree = source.tree(&folder.path().join("cache"), &CancellationToken::new()).unwrap();
        let read = |name: &str| tree.read(name).unwrap().map(|content| String::from_utf8(content).unwrap());
        assert_eq!(read("src/llama.cpp").as_deref(), Some("src/llama.cpp"));
        assert_eq!(read("docs/build.md").as_deref(), Some("words"), "where no patch usually reaches");
        for absent in ["src/other.cpp", "src", "p-1/v/CMakeLists.txt"] {
            assert_eq!(read(absent), None, "{absent} in {}", path.display());
        }
        assert!(tree.content_id("src/llama.cpp").unwrap().is_some());
    }
}
