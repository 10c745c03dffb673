//! Several sets one after the other: each is judged in the tree as the ones before it leave it.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::error::Result;
use crate::judge::judge;
use crate::judgement::{Edits, FileEdit, Judgement};
use crate::prove::Proofs;
use crate::set::PatchSet;
use crate::tree::{Overlay, Tree};

/// Digits of a set's hash.
const SHORT: usize = 12;
/// The name of no patches at all.
const NONE: &str = "none";

/// What a row of sets would do to a tree.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// One judgement for each set, in order.
    pub judgements: Vec<Judgement>,
    /// All edits together: each file once, as it is before the first and after the last set. Sets that are refused,
    /// not applicable or superseded have no part in it.
    pub edits: Edits,
}

impl Series {
    /// Judges the sets. Nothing is written.
    ///
    /// # Errors
    ///
    /// A file of the tree is there and cannot be read.
    pub fn judge(sets: &[&PatchSet], tree: &dyn Tree) -> Result<Self> {
        let mut overlay = Overlay::new(tree);
        let mut judgements = Vec::with_capacity(sets.len());
        let mut files: BTreeMap<String, FileEdit> = BTreeMap::new();
        for set in sets {
            let judgement = judge(set, &overlay)?;
            if let Some(edits) = &judgement.edits {
                overlay.add(edits);
                for edit in &edits.0 {
                    compose(&mut files, edit);
                }
            }
            judgements.push(judgement);
        }
        Ok(Self { judgements, edits: Edits(files.into_values().collect()) })
    }

    /// Takes those for locally verified that a record of this machine covers.
    #[must_use]
    pub fn accept(mut self, sets: &[&PatchSet], proofs: &Proofs) -> Self {
        for judgement in &mut self.judgements {
            if let Some(set) = sets.iter().find(|set| set.id == judgement.set) {
                judgement.accept(set, proofs);
            }
        }
        self
    }

    /// The sets that change something, as `id@hash` with twelve hexadecimal digits over their edits.
    pub fn sets(&self) -> Vec<(String, String)> {
        self.edited().map(|(judgement, edits)| (judgement.set.clone(), hash(edits))).collect()
    }

    /// The whole row in one word: `none`, or such as `cuda-memory@0123456789ab+server@ba9876543210`.
    pub fn id(&self) -> String {
        let sets = self.sets();
        name(sets.iter().map(|(id, hash)| (id.as_str(), hash.as_str())))
    }

    /// Those judgements that forbid to apply the row.
    pub fn blocking(&self, allow_unverified: bool) -> impl Iterator<Item = &Judgement> {
        self.judgements.iter().filter(move |judgement| judgement.status.forbids(allow_unverified))
    }

    /// The judgements with their edits, in order; those without edits left out.
    pub fn edited(&self) -> impl Iterator<Item = (&Judgement, &Edits)> {
        self.judgements.iter().filter_map(|judgement| {
            let edits = judgement.edits.as_ref().filter(|edits| !edits.0.is_empty())?;
            Some((judgement, edits))
        })
    }
}

/// Sets, each with the hash of its edits, in one word: `none`, or ids with hashes in the order of application.
pub(crate) fn name<'a>(sets: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let sets: Vec<String> = sets.map(|(id, hash)| format!("{id}@{hash}")).collect();
    if sets.is_empty() { NONE.to_owned() } else { sets.join("+") }
}

/// Adds one more edit of a file. Its `inserted` lines are moved by what a later set inserted above them.
fn compose(files: &mut BTreeMap<String, FileEdit>, edit: &FileEdit) {
    let Some(known) = files.get_mut(&edit.path) else {
        files.insert(edit.path.clone(), edit.clone());
        return;
    };
    known.after.clone_from(&edit.after);
    for new in &edit.inserted {
        for old in &mut known.inserted {
            if old.line >= new.line {
                old.line += 1;
            }
        }
        known.inserted.push(new.clone());
    }
    known.inserted.sort_by_key(|inserted| inserted.line);
}

/// A hash over several texts, in hexadecimal digits.
pub(crate) fn digest(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        // Lengths go before, so that the parts cannot run into each other.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex::encode(hash.finalize())
}

/// Twelve hexadecimal digits over everything that edits write: the same set in the same tree has the same.
pub(crate) fn hash(edits: &Edits) -> String {
    let mut hash = Sha256::new();
    for edit in &edits.0 {
        // Lengths go before, so that the parts cannot run into each other.
        for part in [edit.path.as_bytes(), edit.after.as_slice()] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
    }
    let mut digits = hex::encode(hash.finalize());
    digits.truncate(SHORT);
    digits
}
