//! Combines many reasons into a status.

use crate::judgement::{FixJudgement, JudgementReason, PatchStatus};
use crate::set::PatchSet;

/// The status of a set and of its fixes. Sorts the reasons, the deciding ones first.
pub(super) fn combine_reasons(
    set: &PatchSet,
    reasons: &mut [JudgementReason],
) -> (PatchStatus, Vec<FixJudgement>) {
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
    // No fix is left that would justify applying the set.
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

/// Returns true for statuses with nothing to do, so that no other status matters.
fn is_final(status: PatchStatus) -> bool {
    matches!(status, PatchStatus::NotApplicable | PatchStatus::Superseded)
}

fn worst(reasons: &[&JudgementReason]) -> PatchStatus {
    let all = || reasons.iter().map(|reason| reason.status);
    all().filter(|status| is_final(*status)).max().or_else(|| all().max()).unwrap_or(PatchStatus::Verified)
}
