//! `patches check`: judges patches in a source, or at each commit of a range.

use clap::Args;
use warden_builder::{BuildEvent, BuildPhase, git};
use warden_patches::history::{self, HistoryRow, RowGrain};
use warden_patches::{CachingJudge, PatchSet, PatchStatus};

use super::SetArgs;
use super::source::{RangeArgs, SourceArgs, run_blocking};
use crate::cli::build::with_builder;
use crate::cli::{ConfigArgs, block_on};
use crate::config::machine::HostMachine;
use crate::config::resolve::proofs;
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Args)]
pub(crate) struct PatchCheckArgs {
    #[command(flatten)]
    pub(super) source: SourceArgs,
    #[command(flatten)]
    pub(super) range: RangeArgs,
    #[command(flatten)]
    pub(super) sets: SetArgs,
    /// Prints one row per set instead of one per fix.
    #[arg(long = "sets")]
    by_set: bool,
    /// Counts unverified patches as good for the exit code.
    #[arg(long)]
    allow_unverified: bool,
    /// Prints JSON, for programs: an array of `{revision, patch, status, reason}`.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn run(args: &PatchCheckArgs) -> Result<(), CommandError> {
    let machine = HostMachine::read();
    let loaded = args.config.load(&machine, Vec::new())?;
    let sets = args.sets.load(&loaded, &machine)?;
    let grain = if args.by_set { RowGrain::Sets } else { RowGrain::Fixes };
    let rows = block_on(judge_rows(&args.source, &args.range, sets, grain, &args.config))??;
    if args.json {
        out::print_json(&rows)?;
    } else {
        out::print_text(&table(&rows, args.range.range.is_some()))?;
    }
    check_rows(&rows, args.allow_unverified)
}

/// Judges the selected patches in the source or range.
pub(super) async fn judge_rows(
    source: &SourceArgs,
    range: &RangeArgs,
    sets: Vec<PatchSet>,
    grain: RowGrain,
    config: &ConfigArgs,
) -> Result<Vec<HistoryRow>, CommandError> {
    if range.range.is_some() && (source.is_path() || source.names_commit()) {
        return Err(CommandError::usage(
            "--range goes with --git alone",
            "a range has its own ends: leave --source and --ref away",
        ));
    }
    let machine = HostMachine::read();
    let loaded = config.load(&machine, Vec::new())?;
    let numbers = &loaded.settings.build;
    let proofs = proofs::load_proofs(&loaded, &machine)?;
    with_builder(&loaded, &machine, async |builder| {
        let Some(text) = &range.range else {
            let found = source.open(&builder, numbers).await?;
            return run_blocking(move || {
                let sets: Vec<&PatchSet> = sets.iter().collect();
                Ok(history::check_tree(
                    &sets,
                    found.tree.as_ref(),
                    &found.label,
                    grain,
                    &CachingJudge::default(),
                    &proofs,
                )?)
            })
            .await;
        };
        let (repository, revisions) = source.fetch_range(text, range.every, &builder, numbers).await?;
        let (reporter, cancel) = (builder.reporter.clone(), builder.cancel.clone());
        run_blocking(move || {
            let sets: Vec<&PatchSet> = sets.iter().collect();
            let total = u32::try_from(revisions.len()).unwrap_or(u32::MAX);
            reporter.report(BuildEvent::Phase(BuildPhase::Check));
            let told = |done: usize, item: &str| {
                let done = u32::try_from(done).unwrap_or(total);
                reporter.report(BuildEvent::Progress { done, total, item: item.to_owned() });
            };
            git::check_range(&sets, &repository, &revisions, grain, &told, &cancel)
        })
        .await
    })
    .await
}

/// Formats the rows; equal consecutive rows of a range are merged.
fn table(rows: &[HistoryRow], is_range: bool) -> String {
    let mut lines = vec![["REVISION", "PATCH", "STATUS", "WHY"].map(str::to_owned).to_vec()];
    if is_range {
        for run in history::merge_runs(rows) {
            let span = if run.first == run.last { run.first } else { format!("{}..{}", run.first, run.last) };
            lines.push(vec![span, run.patch, status_text(run.status), run.reason]);
        }
    } else {
        for row in rows {
            lines.push(vec![
                row.revision.clone(),
                row.patch.clone(),
                status_text(row.status),
                row.reason.clone(),
            ]);
        }
    }
    out::format_table(&lines)
}

/// Display name of a status.
pub(super) fn status_text(status: PatchStatus) -> String {
    status.to_string().replace('-', " ")
}

/// Returns an error with the number of bad rows, if any.
pub(super) fn check_rows(rows: &[HistoryRow], allow_unverified: bool) -> Result<(), CommandError> {
    let count = |status| rows.iter().filter(|row| row.status == status).count();
    let (refused, unverified) = (count(PatchStatus::Refused), count(PatchStatus::Unverified));
    if refused == 0 && (unverified == 0 || allow_unverified) {
        return Ok(());
    }
    Err(CommandError::Refused {
        message: format!("of {} answers {refused} are refused and {unverified} unverified", rows.len()),
        hint: "`llama-warden patches show ID` shows what a patch depends on; WHY says what changed"
            .to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(revision: &str, status: PatchStatus, reason: &str) -> HistoryRow {
        HistoryRow { revision: revision.into(), patch: "s/f".into(), status, reason: reason.into() }
    }

    #[test]
    fn a_range_is_told_in_runs() {
        let rows = [
            row("b1", PatchStatus::NotApplicable, "no graphs"),
            row("b2", PatchStatus::NotApplicable, "no graphs"),
            row("b3", PatchStatus::Verified, ""),
        ];
        insta::assert_snapshot!(table(&rows, true) + "\n" + &table(&rows, false));
    }

    #[test]
    fn what_is_not_needed_is_fine_and_what_is_unverified_only_when_allowed() {
        let fine = [
            row("b1", PatchStatus::Verified, ""),
            row("b1", PatchStatus::Superseded, ""),
            row("b1", PatchStatus::NotApplicable, ""),
        ];
        assert!(check_rows(&fine, false).is_ok());
        let unverified = [row("b1", PatchStatus::Unverified, "")];
        assert_eq!(check_rows(&unverified, false).unwrap_err().code(), 3);
        assert!(check_rows(&unverified, true).is_ok());
        let refused = check_rows(&[row("b1", PatchStatus::Refused, "")], true).unwrap_err();
        assert_eq!(refused.code(), 3);
        insta::assert_snapshot!(refused.lines().join("\n"));
    }
}
