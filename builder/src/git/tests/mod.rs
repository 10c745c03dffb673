//! Hand-made repositories, and servers for them.

mod history;
mod obtain;
mod place;
mod repository;
mod server;

use std::path::Path;

use git2::{Index, IndexEntry, IndexTime, ObjectType, Oid, Signature, Time};
use tempfile::TempDir;

/// Date of the first commit, 2024-06-01; each further commit is a day later.
const BEGIN: i64 = 1_717_200_000;
const DAY: i64 = 86_400;

/// A bare repository in a temporary folder.
pub(super) struct Made {
    pub(super) folder: TempDir,
    pub(super) repo: git2::Repository,
}

pub(super) enum Item<'a> {
    File(&'a str),
    Script(&'a str),
    Link(&'a str),
    Submodule,
}

impl Made {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut options = git2::RepositoryInitOptions::new();
        options.bare(true).external_template(false).initial_head("main");
        let repo = git2::Repository::init_opts(folder.path(), &options).unwrap();
        Self { folder, repo }
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Commits the smallest tree that counts as llama.cpp, with additional items.
    pub(super) fn llama(&self, more: &[(&str, Item<'_>)], parents: &[Oid]) -> Oid {
        let mut items = vec![
            ("CMakeLists.txt", Item::File("project")),
            ("ggml/CMakeLists.txt", Item::File("ggml")),
            ("tools/server/CMakeLists.txt", Item::File("server")),
        ];
        items.extend(more.iter().map(|(name, item)| (*name, item.copied())));
        self.commit(&items, parents)
    }

    /// Commits a day after the first parent.
    pub(super) fn commit(&self, items: &[(&str, Item<'_>)], parents: &[Oid]) -> Oid {
        let mut index = Index::new().unwrap();
        for (name, item) in items {
            let (mode, id) = match item {
                Item::File(text) => (0o100_644, self.repo.blob(text.as_bytes()).unwrap()),
                Item::Script(text) => (0o100_755, self.repo.blob(text.as_bytes()).unwrap()),
                Item::Link(target) => (0o120_000, self.repo.blob(target.as_bytes()).unwrap()),
                Item::Submodule => (0o160_000, Oid::from_bytes(&[7; 20]).unwrap()),
            };
            index.add(&entry(name, mode, id)).unwrap();
        }
        let tree = index.write_tree_to(&self.repo).unwrap();
        self.commit_of(tree, parents)
    }

    pub(super) fn commit_of(&self, tree: Oid, parents: &[Oid]) -> Oid {
        let parents: Vec<_> = parents.iter().map(|id| self.repo.find_commit(*id).unwrap()).collect();
        let seconds = parents.first().map_or(BEGIN, |parent| parent.time().seconds() + DAY);
        let who = Signature::new("someone", "some@example.org", &Time::new(seconds, 0)).unwrap();
        let text = format!("commit {seconds}");
        let parents: Vec<_> = parents.iter().collect();
        // Writes trees that git would refuse.
        let tree = self.repo.find_tree(tree).unwrap();
        self.repo.commit(None, &who, &who, &text, &tree, &parents).unwrap()
    }

    /// A line of commits, oldest first; the branch `main` points to the last.
    pub(super) fn line(&self, count: usize) -> Vec<Oid> {
        let mut line: Vec<Oid> = Vec::new();
        for number in 0..count {
            let parent = line.last().copied();
            let text = number.to_string();
            line.push(self.llama(&[("src/llama.cpp", Item::File(&text))], parent.as_slice()));
        }
        self.branch("main", *line.last().unwrap());
        line
    }

    pub(super) fn branch(&self, name: &str, commit: Oid) {
        self.repo.reference(&format!("refs/heads/{name}"), commit, true, "test").unwrap();
    }

    pub(super) fn tag(&self, name: &str, commit: Oid) {
        self.repo.reference(&format!("refs/tags/{name}"), commit, true, "test").unwrap();
    }

    pub(super) fn annotated(&self, name: &str, commit: Oid) {
        let who = Signature::new("someone", "some@example.org", &Time::new(BEGIN, 0)).unwrap();
        let object = self.repo.find_object(commit, Some(ObjectType::Commit)).unwrap();
        self.repo.tag(name, &object, &who, "a tag", true).unwrap();
    }

    /// Removes an object, as if the repository were a partial clone.
    pub(super) fn lose(&self, id: Oid) {
        let name = id.to_string();
        let path = self.path().join("objects").join(&name[..2]).join(&name[2..]);
        std::fs::remove_file(path).unwrap();
    }
}

impl<'a> Item<'a> {
    fn copied(&self) -> Item<'a> {
        match *self {
            Item::File(text) => Item::File(text),
            Item::Script(text) => Item::Script(text),
            Item::Link(target) => Item::Link(target),
            Item::Submodule => Item::Submodule,
        }
    }
}

fn entry(name: &str, mode: u32, id: Oid) -> IndexEntry {
    let zero = IndexTime::new(0, 0);
    IndexEntry {
        ctime: zero,
        mtime: zero,
        dev: 0,
        ino: 0,
        mode,
        uid: 0,
        gid: 0,
        file_size: 0,
        id,
        flags: 0,
        flags_extended: 0,
        path: name.into(),
    }
}
