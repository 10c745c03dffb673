//! Judges sets at many revisions.
//!
//! No revision is inferred from its neighbours, because a patch can stop being verified and be verified again
//! later. Equal contents are judged once, and upstream rarely changes the files that the sets patch.

use serde::Serialize;

use crate::error::Result;
use crate::judge::CachingJudge;
use crate::judgement::{PatchStatus, SetJudgement};
use crate::prove::ProofRecords;
use crate::set::PatchSet;
use crate::set::life::LifeState;
use crate::tree::SourceTree;

/// Result for one patch at one revision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HistoryRow {
    /// Revision, such as `b8827`.
    pub revision: String,
    /// Set and fix, such as `cuda-memory/graph-cache-cap`, or only the set.
    pub patch: String,
    /// Status of the patch.
    pub status: PatchStatus,
    /// Reason in one line; empty if verified.
    pub reason: String,
}

/// Subject of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowGrain {
    /// A fix of a set.
    #[default]
    Fixes,
    /// A whole set.
    Sets,
}

/// Consecutive revisions with the same result for a patch. Line numbers are ignored: upstream moves lines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HistoryRun {
    /// Oldest revision.
    pub first: String,
    /// Newest revision.
    pub last: String,
    /// Number of revisions.
    pub revisions: usize,
    /// Patch, as in [`HistoryRow`].
    pub patch: String,
    /// Status, as in [`HistoryRow`].
    pub status: PatchStatus,
    /// Reason, as in [`HistoryRow`], without the line number.
    pub reason: String,
}

/// Judges sets in one tree. `proofs`: verifications recorded on this machine.
///
/// # Errors
/// Fails if an existing file of the tree cannot be read.
pub fn check_tree(
    sets: &[&PatchSet],
    tree: &dyn SourceTree,
    revision: &str,
    grain: RowGrain,
    judge: &CachingJudge,
    proofs: &ProofRecords,
) -> Result<Vec<HistoryRow>> {
    let mut rows = Vec::new();
    for set in sets {
        let judged = judge.judge(set, tree)?;
        if proofs.all.is_empty() {
            rows.extend(judgement_rows(&judged, revision, grain));
        } else {
            let mut judged = SetJudgement::clone(&judged);
            judged.accept(set, proofs);
            rows.extend(judgement_rows(&judged, revision, grain));
        }
    }
    Ok(rows)
}

/// Merges consecutive equal results of each patch. Patches are in the order of their first rows.
pub fn merge_runs(rows: &[HistoryRow]) -> Vec<HistoryRun> {
    let mut all: Vec<HistoryRun> = Vec::new();
    for patch in patch_names(rows) {
        let start = all.len();
        for row in rows.iter().filter(|row| row.patch == patch) {
            match all[start..].last_mut() {
                Some(run) if run.status == row.status && run.reason == without_line(&row.reason) => {
                    run.last.clone_from(&row.revision);
                    run.revisions += 1;
                }
                _ => all.push(HistoryRun {
                    first: row.revision.clone(),
                    last: row.revision.clone(),
                    revisions: 1,
                    patch: row.patch.clone(),
                    status: row.status,
                    reason: without_line(&row.reason),
                }),
            }
        }
    }
    all
}

/// Removes the line number: `file:12: text` becomes `file: text`.
fn without_line(reason: &str) -> String {
    let cut = || {
        let (place, text) = reason.split_once(": ")?;
        let (file, line) = place.rsplit_once(':')?;
        let is_place =
            !file.contains(' ') && !line.is_empty() && line.bytes().all(|byte| byte.is_ascii_digit());
        is_place.then(|| format!("{file}: {text}"))
    };
    cut().unwrap_or_else(|| reason.to_owned())
}

fn patch_names(rows: &[HistoryRow]) -> Vec<&str> {
    let mut found: Vec<&str> = Vec::new();
    for row in rows {
        if !found.contains(&row.patch.as_str()) {
            found.push(&row.patch);
        }
    }
    found
}

fn judgement_rows(judgement: &SetJudgement, revision: &str, grain: RowGrain) -> Vec<HistoryRow> {
    // Reasons are sorted, worst first.
    let reason = |status: PatchStatus| match status {
        PatchStatus::Verified => String::new(),
        PatchStatus::LocallyVerified => {
            judgement.proof.as_ref().map(|proof| format!("shown {}", proof.short())).unwrap_or_default()
        }
        _ => judgement.reasons.first().map(ToString::to_string).unwrap_or_default(),
    };
    let row =
        |patch: String, status, reason| HistoryRow { revision: revision.to_owned(), patch, status, reason };
    if grain == RowGrain::Sets || judgement.fixes.is_empty() {
        return vec![row(judgement.set.clone(), judgement.status, reason(judgement.status))];
    }
    judgement
        .fixes
        .iter()
        .map(|fix| {
            let life = fix.life.as_ref().filter(|life| life.is != LifeState::Needed);
            let life = || life.map(|life| format!("{}: {}", life.is.name(), life.reason()));
            let why = fix.reason.clone().or_else(life).unwrap_or_else(|| reason(fix.status));
            row(format!("{}/{}", judgement.set, fix.fix), fix.status, why)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judgement::FixJudgement;

    fn rows(patch: &str, statuses: &str) -> Vec<HistoryRow> {
        let status = |letter| match letter {
            'v' => PatchStatus::Verified,
            'n' => PatchStatus::NotApplicable,
            's' => PatchStatus::Superseded,
            'u' => PatchStatus::Unverified,
            _ => PatchStatus::Refused,
        };
        let row = |(index, letter)| {
            let status = status(letter);
            let reason = if status == PatchStatus::Verified { String::new() } else { "because".into() };
            HistoryRow { revision: format!("b{}", index + 1), patch: patch.into(), status, reason }
        };
        statuses.chars().enumerate().map(row).collect()
    }

    #[test]
    fn equal_answers_in_a_row_are_one_run() {
        let rows = [rows("s/a", "nnvvr"), rows("s/b", "vvvvv")].concat();
        let runs: Vec<String> = merge_runs(&rows)
            .iter()
            .map(|run| format!("{} {}..{} {} {}", run.patch, run.first, run.last, run.revisions, run.status))
            .collect();
        assert_eq!(
            runs,
            [
                "s/a b1..b2 2 not-applicable",
                "s/a b3..b4 2 verified",
                "s/a b5..b5 1 refused",
                "s/b b1..b5 5 verified"
            ]
        );
    }

    #[test]
    fn the_line_of_a_reason_does_not_part_a_run() {
        let mut rows = rows("p", "uuu");
        for (row, reason) in
            rows.iter_mut().zip(["a/b.cu:7: seam `x`: new", "a/b.cu:9: seam `x`: new", "c.cu:9: seam"])
        {
            row.reason = reason.into();
        }
        let runs: Vec<(usize, String)> =
            merge_runs(&rows).into_iter().map(|run| (run.revisions, run.reason)).collect();
        assert_eq!(runs, [(2, "a/b.cu: seam `x`: new".to_owned()), (1, "c.cu: seam".to_owned())]);
        assert_eq!(without_line("it is for b1..b2: this is b3"), "it is for b1..b2: this is b3");
    }

    #[test]
    fn a_set_has_a_row_for_each_fix_or_one_for_all() {
        let fix = |fix: &str, status, reason: Option<&str>| FixJudgement {
            fix: fix.into(),
            status,
            reason: reason.map(str::to_owned),
            life: None,
        };
        let judgement = SetJudgement {
            placed: String::new(),
            proof: None,
            set: "s".into(),
            status: PatchStatus::Verified,
            reasons: Vec::new(),
            fixes: vec![
                fix("a", PatchStatus::Verified, None),
                fix("b", PatchStatus::NotApplicable, Some("no graphs")),
            ],
            edits: None,
            seams: Vec::new(),
        };
        let rows = judgement_rows(&judgement, "b7", RowGrain::Fixes);
        let told = |row: &HistoryRow| format!("{} {} {} {}", row.revision, row.patch, row.status, row.reason);
        assert_eq!(
            rows.iter().map(told).collect::<Vec<_>>(),
            ["b7 s/a verified ", "b7 s/b not-applicable no graphs"]
        );
        assert_eq!(
            judgement_rows(&judgement, "b7", RowGrain::Sets).iter().map(told).collect::<Vec<_>>(),
            ["b7 s verified "]
        );
    }
}
