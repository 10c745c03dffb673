//! Judges thousands of trees, and equal contents only once.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use sha2::{Digest, Sha256};

use super::hooks::sibling_path;
use super::judge;
use crate::error::Result;
use crate::judgement::SetJudgement;
use crate::set::PatchSet;
use crate::set::life::LifeStatement;
use crate::tree::SourceTree;

/// Judges many trees for the sets of a single catalogue. Results have no edits, which hold whole files.
#[derive(Debug, Default)]
pub struct CachingJudge {
    known: Mutex<HashMap<[u8; 32], Arc<SetJudgement>>>,
}

impl CachingJudge {
    /// Like [`judge`], without edits. Results are cached by the contents of all files that the set uses.
    ///
    /// # Errors
    /// Fails if an existing file of the tree cannot be read.
    pub fn judge(&self, set: &PatchSet, tree: &dyn SourceTree) -> Result<Arc<SetJudgement>> {
        let key = cache_key(set, tree)?;
        let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = key.and_then(|key| lock().get(&key).cloned()) {
            return Ok(known);
        }
        let mut judgement = judge(set, tree)?;
        judgement.edits = None;
        let judgement = Arc::new(judgement);
        if let Some(key) = key {
            lock().insert(key, Arc::clone(&judgement));
        }
        Ok(judgement)
    }
}

/// Hash of everything that the judgement depends on; `None` for diffs, which also depend on the revision.
fn cache_key(set: &PatchSet, tree: &dyn SourceTree) -> Result<Option<[u8; 32]>> {
    if !set.diffs.is_empty() {
        return Ok(None);
    }
    let mut hash = Sha256::new();
    hash.update(set.id.as_bytes());
    // Some facts about fixes depend on the build number alone.
    let by_number =
        |life: &LifeStatement| life.holds.is_empty() && life.fails.is_empty() && !life.builds().is_empty();
    if set.fixes.iter().flat_map(|fix| &fix.life).any(by_number) {
        hash.update(tree.revision().build_number.unwrap_or_default().to_le_bytes());
    }
    for path in judged_paths(set) {
        let id = tree.content_id(&path)?;
        hash.update(b"\0");
        hash.update(path.as_bytes());
        hash.update(b"\0");
        hash.update(id.as_deref().unwrap_or("none").as_bytes());
    }
    Ok(Some(hash.finalize().into()))
}

fn judged_paths(set: &PatchSet) -> BTreeSet<String> {
    let mut all: BTreeSet<String> = super::place::named_files(set).into_iter().map(str::to_owned).collect();
    for sidecar in &set.sidecars {
        let files = set.hook(&sidecar.beside).map(|hook| hook.files.as_slice()).unwrap_or_default();
        all.extend(files.iter().map(|file| sibling_path(file, &sidecar.file)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    impl CachingJudge {
        /// Number of different trees judged, counted per set.
        pub(in crate::judge) fn judged(&self) -> usize {
            self.known.lock().unwrap_or_else(PoisonError::into_inner).len()
        }
    }
}
