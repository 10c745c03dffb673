//! Judges several sets in sequence, each in the tree as changed by the ones before.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::error::Result;
use crate::judge::judge;
use crate::judgement::{FileEdit, SetJudgement, TreeEdits};
use crate::prove::ProofRecords;
use crate::set::PatchSet;
use crate::tree::{OverlayTree, SourceTree};

/// Hexadecimal digits of a set's hash.
const SET_HASH_DIGITS: usize = 12;
/// Name of an empty series.
const EMPTY_NAME: &str = "none";

/// Judgements and changes of a series of sets in a tree.
#[derive(Clone, Debug, Default)]
pub struct PatchSeries {
    /// One judgement per set, in order.
    pub judgements: Vec<SetJudgement>,
    /// All edits combined: each file once, before the first and after the last set. Sets that are refused,
    /// not applicable or superseded do not contribute.
    pub edits: TreeEdits,
}

impl PatchSeries {
    /// Judges the sets. Writes nothing.
    ///
    /// # Errors
    ///
    /// Fails if an existing file of the tree cannot be read.
    pub fn judge(sets: &[&PatchSet], tree: &dyn SourceTree) -> Result<Self> {
        let mut overlay = OverlayTree::new(tree);
        let mut judgements = Vec::with_capacity(sets.len());
        let mut files: BTreeMap<String, FileEdit> = BTreeMap::new();
        for set in sets {
            let judgement = judge(set, &overlay)?;
            if let Some(edits) = &judgement.edits {
                overlay.add(edits);
                for edit in &edits.0 {
                    add_edit(&mut files, edit);
                }
            }
            judgements.push(judgement);
        }
        Ok(Self { judgements, edits: TreeEdits(files.into_values().collect()) })
    }

    /// Marks those sets as locally verified that a record of this machine covers.
    #[must_use]
    pub fn accept(mut self, sets: &[&PatchSet], proofs: &ProofRecords) -> Self {
        for judgement in &mut self.judgements {
            if let Some(set) = sets.iter().find(|set| set.id == judgement.set) {
                judgement.accept(set, proofs);
            }
        }
        self
    }

    /// The sets that change something, as id and hash (twelve hexadecimal digits over their edits).
    pub fn sets(&self) -> Vec<(String, String)> {
        self.edited().map(|(judgement, edits)| (judgement.set.clone(), hash_edits(edits))).collect()
    }

    /// The series as one word: `none`, or such as `cuda-memory@0123456789ab+server@ba9876543210`.
    pub fn id(&self) -> String {
        let sets = self.sets();
        series_name(sets.iter().map(|(id, hash)| (id.as_str(), hash.as_str())))
    }

    /// The judgements that forbid applying the series.
    pub fn blocking(&self, allow_unverified: bool) -> impl Iterator<Item = &SetJudgement> {
        self.judgements.iter().filter(move |judgement| judgement.status.forbids(allow_unverified))
    }

    /// The judgements that have edits, in order.
    pub fn edited(&self) -> impl Iterator<Item = (&SetJudgement, &TreeEdits)> {
        self.judgements.iter().filter_map(|judgement| {
            let edits = judgement.edits.as_ref().filter(|edits| !edits.0.is_empty())?;
            Some((judgement, edits))
        })
    }
}

/// Sets with the hashes of their edits as one word: `none`, or ids with hashes in the order of application.
pub(crate) fn series_name<'a>(sets: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let sets: Vec<String> = sets.map(|(id, hash)| format!("{id}@{hash}")).collect();
    if sets.is_empty() { EMPTY_NAME.to_owned() } else { sets.join("+") }
}

/// Adds a later edit of a file. Shifts earlier `inserted` lines by the lines inserted above them.
fn add_edit(files: &mut BTreeMap<String, FileEdit>, edit: &FileEdit) {
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

/// Hash over several texts, in hexadecimal digits.
pub(crate) fn hash_parts(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        // The length of each part makes the concatenation unambiguous.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex::encode(hash.finalize())
}

/// Hash over everything that edits write, twelve hexadecimal digits; equal for the same set in the same tree.
pub(crate) fn hash_edits(edits: &TreeEdits) -> String {
    let mut hash = Sha256::new();
    for edit in &edits.0 {
        // The length of each part makes the concatenation unambiguous.
        for part in [edit.path.as_bytes(), edit.after.as_slice()] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
    }
    let mut digits = hex::encode(hash.finalize());
    digits.truncate(SET_HASH_DIGITS);
    digits
}
