//! Finds out whether a set can be had in a tree, and what it would change there.

use super::{Judgement, PatchSet, SeamSeen, Status, Tree};
use crate::error::Result;

/// Judges a set in a tree. Reads, and changes nothing.
///
/// # Errors
///
/// A file of the tree is there and cannot be read.
pub fn judge(set: &PatchSet, _tree: &dyn Tree) -> Result<Judgement> {
    Ok(Judgement {
        set: set.id.clone(),
        status: Status::Refused,
        reasons: Vec::new(),
        fixes: Vec::new(),
        edits: None,
        seams: Vec::new(),
    })
}

/// The set's seams as they are in a tree.
///
/// # Errors
///
/// A file of the tree is there and cannot be read.
pub fn fingerprint(_set: &PatchSet, _tree: &dyn Tree) -> Result<Vec<SeamSeen>> {
    Ok(Vec::new())
}

/// Judges many trees, equal contents once.
#[derive(Debug, Default)]
pub struct Judge;

impl Judge {
    /// As [`judge`], remembered by the contents of all files that the set reads.
    ///
    /// # Errors
    ///
    /// A file of the tree is there and cannot be read.
    pub fn judge(&self, set: &PatchSet, tree: &dyn Tree) -> Result<std::sync::Arc<Judgement>> {
        judge(set, tree).map(std::sync::Arc::new)
    }
}
