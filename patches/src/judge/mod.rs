//! Judges if a set can be applied to a tree, and what it would change there.
//!
//! ```text
//!  hooks    ── container once, anchor once, between two statements ──> edits   else refused
//!  probes   ── counted, except in guarded containers ────────────────> defines else the probe's status
//!  sidecars ── no #error is reached with these defines ──────────────> edits   else refused
//!  seams    ── fingerprint known ────────────────────────────────────>         else unverified
//! ```
//!
//! The statuses "not applicable" and "superseded" are final: there is nothing to place.

mod anchor;
mod cache;
mod diff;
mod hooks;
mod place;
mod probes;
mod seams;
#[cfg(test)]
mod tests;

pub use cache::CachingJudge;
pub use seams::fingerprint;

use std::collections::BTreeSet;

use place::SourceReader;

use crate::edits::TreeEdits;
use crate::error::Result;
use crate::judgement::{FixJudgement, JudgementReason, PatchStatus, SetJudgement};
use crate::set::PatchSet;
use crate::set::life::{FixStanding, InspectedRevision, LifeState};
use crate::tree::{OverlayTree, SourceTree};

fn fix_states(set: &PatchSet, hold: &BTreeSet<String>, build: Option<u32>) -> Vec<Option<FixStanding>> {
    let looked = InspectedRevision { build, probes: Some(hold) };
    set.fixes.iter().map(|fix| FixStanding::from_life(&fix.life, &looked)).collect()
}

/// Refuses fixes that the tree's own code shows to be harmful. A build number is no evidence, since a fork
/// may count its builds differently.
fn harmful_fixes<'a>(
    set: &'a PatchSet,
    lives: &'a [Option<FixStanding>],
) -> impl Iterator<Item = JudgementReason> + 'a {
    set.fixes.iter().zip(lives).filter_map(|(fix, life)| {
        let life = life.as_ref().filter(|life| life.is == LifeState::Harmful && life.by_source)?;
        let text = format!("it is harmful here: {}", life.reason());
        let reason = JudgementReason::new(PatchStatus::Refused, format!("fix `{}`", fix.id), text);
        Some(JudgementReason { fix: Some(fix.id.clone()), ..reason })
    })
}

/// Judges a set in a tree, without changing the tree. A tree that already has lines of this set is refused.
/// Lines of other sets are ignored and preserved.
///
/// # Errors
/// Fails if an existing file of the tree cannot be read.
pub fn judge(set: &PatchSet, tree: &dyn SourceTree) -> Result<SetJudgement> {
    let mut all = TreeEdits::default();
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
            all.merge(edits);
        }
    }
    // Report diffs for other revisions only if the set has nothing else: a set may have one diff for each
    // range of revisions.
    if set.hooks.is_empty() && outside.len() == set.diffs.len() {
        reasons.extend(outside);
    }
    // Seams and probes describe unmodified upstream; hooks apply to the result of the diffs.
    let plain = SourceReader::new(tree);
    let patched = SourceReader::new(&below);
    let reader = if all.0.is_empty() { &plain } else { &patched };
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
    let (status, mut fixes) = combine_reasons(set, &mut reasons);
    for (fix, life) in fixes.iter_mut().zip(lives) {
        fix.life = life;
    }
    let edits = matches!(status, PatchStatus::Verified | PatchStatus::Unverified).then(|| {
        all.merge(TreeEdits(placed.into_edits()));
        all.merge(TreeEdits(sidecars));
        all
    });
    let placed = edits.as_ref().map(TreeEdits::placed_hash).unwrap_or_default();
    Ok(SetJudgement { set: set.id.clone(), status, reasons, fixes, edits, seams, placed, proof: None })
}

/// The status of a set and of its fixes. Sorts the reasons, the deciding ones first.
fn combine_reasons(set: &PatchSet, reasons: &mut [JudgementReason]) -> (PatchStatus, Vec<FixJudgement>) {
    let of_set: Vec<&JudgementReason> = reasons.iter().filter(|reason| reason.fix.is_none()).collect();
    let mut status = worst(&of_set);
    let own: Vec<(PatchStatus, Option<String>)> = set
        .fixes
        .iter()
        .map(|fix| {
            let about: Vec<&JudgementReason> =
                reasons.iter().filter(|reason| reason.fix.as_deref() == Some(&fix.id)).collect();
            let status = worst(&about);
            let why = about.iter().find(|reason| reason.status == status).map(ToString::to_string);
            (status, why)
        })
        .collect();
    // If no fix is verified, none justifies applying the set: the set gets the worst status of its fixes.
    if !own.is_empty() && !is_final(status) && own.iter().all(|(status, _)| *status != PatchStatus::Verified)
    {
        status = own.iter().map(|(status, _)| *status).max().unwrap_or(status);
    }
    let set_why = of_set.iter().find(|reason| reason.status == status).map(ToString::to_string);
    let fixes = set
        .fixes
        .iter()
        .zip(own)
        .map(|(fix, (own, why))| {
            let (status, reason) = if own == PatchStatus::Verified || is_final(status) {
                (status, set_why.clone())
            } else {
                (own, why)
            };
            FixJudgement { fix: fix.id.clone(), status, reason, life: None }
        })
        .collect();
    reasons.sort_by_key(|reason| {
        (reason.fix.is_some(), reason.status != status, std::cmp::Reverse(reason.status))
    });
    (status, fixes)
}

fn is_final(status: PatchStatus) -> bool {
    matches!(status, PatchStatus::NotApplicable | PatchStatus::Superseded)
}

fn worst(reasons: &[&JudgementReason]) -> PatchStatus {
    let all = || reasons.iter().map(|reason| reason.status);
    all().filter(|status| is_final(*status)).max().or_else(|| all().max()).unwrap_or(PatchStatus::Verified)
}
