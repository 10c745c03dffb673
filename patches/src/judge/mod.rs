//! Judges if a set can be applied to a tree, and what it would change there.
//!
//! ```text
//!  hooks    ── container once, anchor once, between two statements ──> edits   else refused
//!  probes   ── counted, except in guarded containers ────────────────> defines else the probe's status
//!  sidecars ── no #error is reached with these defines ──────────────> edits   else refused
//!  seams    ── fingerprint known ────────────────────────────────────>         else unverified
//! ```
//!
//! The statuses "not applicable" and "superseded" are final and override the hooks' results: there is
//! nothing to place.

mod anchor;
mod cache;
mod diff;
mod edit;
mod hooks;
mod place;
mod probes;
mod seams;
mod status;
#[cfg(test)]
mod tests;

pub use cache::CachingJudge;
pub use seams::fingerprint;

use std::collections::BTreeSet;

use place::SourceReader;

use crate::error::Result;
use crate::judgement::{JudgementReason, PatchStatus, SetJudgement, TreeEdits};
use crate::set::PatchSet;
use crate::set::life::{FixStanding, InspectedRevision, LifeState};
use crate::tree::{OverlayTree, SourceTree};

/// State of each fix in a tree, in the set's order.
fn fix_states(set: &PatchSet, hold: &BTreeSet<String>, build: Option<u32>) -> Vec<Option<FixStanding>> {
    let looked = InspectedRevision { build, probes: Some(hold) };
    set.fixes.iter().map(|fix| FixStanding::from_life(&fix.life, &looked)).collect()
}

/// Refuses fixes that are harmful in a tree, as the tree itself shows. A build number does not suffice,
/// since a fork may have its own numbers.
fn harmful_fixes<'a>(
    set: &'a PatchSet,
    lives: &'a [Option<FixStanding>],
) -> impl Iterator<Item = JudgementReason> + 'a {
    set.fixes.iter().zip(lives).filter_map(|(fix, life)| {
        let life = life.as_ref().filter(|life| life.is == LifeState::Harmful && life.by_source)?;
        Some(JudgementReason {
            status: PatchStatus::Refused,
            part: format!("fix `{}`", fix.id),
            fix: Some(fix.id.clone()),
            file: None,
            line: None,
            text: format!("it is harmful here: {}", life.reason()),
        })
    })
}

/// Judges a set in a tree, without changing the tree.
///
/// A tree that already has lines of this set is refused: they have to be removed first. Lines of other sets
/// are ignored and preserved.
///
/// # Errors
///
/// Fails if an existing file of the tree cannot be read.
pub fn judge(set: &PatchSet, tree: &dyn SourceTree) -> Result<SetJudgement> {
    let mut diffs = edit::MergedEdits::default();
    let mut reasons = Vec::new();
    let mut below = OverlayTree::new(tree);
    let mut outside = Vec::new();
    for one in &set.diffs {
        let placed = diff::place_diff(one, &below)?;
        let (not_meant, other): (Vec<_>, Vec<_>) =
            placed.reasons.into_iter().partition(|reason| reason.status == PatchStatus::NotApplicable);
        outside.extend(not_meant);
        reasons.extend(other);
        if let Some(edits) = placed.edits {
            below.add(&edits);
            diffs.add(edits);
        }
    }
    // A diff for other revisions is normal among several; a set of only such diffs is not applicable.
    if set.hooks.is_empty() && outside.len() == set.diffs.len() {
        reasons.extend(outside);
    }
    // Seams and probes describe unmodified upstream; hooks apply to the result of the diffs.
    let plain = SourceReader::new(tree);
    let patched = SourceReader::new(&below);
    let reader = if diffs.is_empty() { &plain } else { &patched };
    let (placed, unplaced) = hooks::place_hooks(set, reader)?;
    let asked = probes::evaluate_probes(set, &plain, &placed)?;
    reasons.extend(asked.reasons);
    let lives = fix_states(set, &asked.hold, tree.revision().build_number);
    reasons.extend(harmful_fixes(set, &lives));
    let (seams, found) = seams::compare_seams(set, &plain)?;
    reasons.extend(found);
    reasons.extend(unplaced);
    let (sidecars, found) = hooks::place_sidecars(set, reader, &placed, &asked.defines)?;
    reasons.extend(found);
    let (status, mut fixes) = status::combine_reasons(set, &mut reasons);
    for (fix, life) in fixes.iter_mut().zip(lives) {
        fix.life = life;
    }
    let edits = matches!(status, PatchStatus::Verified | PatchStatus::Unverified).then(|| {
        diffs.add(TreeEdits(placed.into_edits()));
        diffs.add(TreeEdits(sidecars));
        diffs.into_edits()
    });
    let placed = edits.as_ref().map(crate::prove::placed_hash).unwrap_or_default();
    Ok(SetJudgement { set: set.id.clone(), status, reasons, fixes, edits, seams, placed, proof: None })
}
