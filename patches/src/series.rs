//! Judges several sets in sequence, each in the tree as changed by the ones before.

use crate::edits::TreeEdits;
use crate::error::Result;
use crate::judge::judge;
use crate::judgement::SetJudgement;
use crate::prove::ProofRecords;
use crate::set::PatchSet;
use crate::tree::{OverlayTree, SourceTree};

const EMPTY_NAME: &str = "none";

/// Judgements and changes of a series of sets in a tree.
#[derive(Clone, Debug, Default)]
pub struct PatchSeries {
    /// One judgement per set, in order.
    pub judgements: Vec<SetJudgement>,
    /// All edits combined: each file once. Refused, not applicable and superseded sets contribute none.
    pub edits: TreeEdits,
}

impl PatchSeries {
    /// Judges the sets. Writes nothing.
    ///
    /// # Errors
    /// Fails if an existing file of the tree cannot be read.
    pub fn judge(sets: &[&PatchSet], tree: &dyn SourceTree) -> Result<Self> {
        let mut overlay = OverlayTree::new(tree);
        let mut judgements = Vec::with_capacity(sets.len());
        let mut all = TreeEdits::default();
        for set in sets {
            let judgement = judge(set, &overlay)?;
            if let Some(edits) = &judgement.edits {
                overlay.add(edits);
                all.merge(edits.clone());
            }
            judgements.push(judgement);
        }
        Ok(Self { judgements, edits: all })
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
        self.edited().map(|(judgement, edits)| (judgement.set.clone(), edits.hash())).collect()
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
