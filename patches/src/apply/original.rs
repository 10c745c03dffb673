//! A patched folder as it was.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::error::Result;
use crate::revision::Revision;
use crate::tree::{FolderTree, Tree};

/// A folder's llama.cpp as it is without our patches.
#[derive(Debug)]
pub struct Original {
    pub(super) root: PathBuf,
    pub(super) revision: Revision,
    /// Those that are patched, as they were.
    pub(super) files: BTreeMap<String, Option<Vec<u8>>>,
}

impl Tree for Original {
    fn read(&self, path: &str) -> Result<Option<Vec<u8>>> {
        match self.files.get(path) {
            Some(content) => Ok(content.clone()),
            None => FolderTree::new(&self.root, self.revision.clone()).read(path),
        }
    }

    fn revision(&self) -> Revision {
        self.revision.clone()
    }
}
