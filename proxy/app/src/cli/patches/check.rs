//! `patches check`: judges patches in a source, or at each commit of a range.

use clap::Args;
use warden_builder::{BuildEvent, BuildPhase, git};
use warden_config::machine::HostMachine;
use warden_config::resolve::proofs;
use warden_config::source::layers::LoadedConfig;
use warden_patches::history::{self, HistoryRow, RowGrain};
use warden_patches::{CachingJudge, PatchSet, PatchStatus};

use super::{RangeArgs, SetArgs, SourceArgs, run_blocking};
use crate::cli::build::with_builder;
use crate::cli::shared::{ConfigArgs, block_on};
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Args)]
pub(crate) struct PatchCheckArgs {
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    range: RangeArgs,
    #[command(flatten)]
    sets: SetArgs,
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

pub(super) fn check(args: &PatchCheckArgs) -> Result<(), CommandError> {
    let (machine, loaded) = args.config.read()?;
    let sets = args.sets.load(&loaded, &machine)?;
    let grain = if args.by_set { RowGrain::Sets } else { RowGrain::Fixes };
    let rows = block_on(judge_rows(&args.source, &args.range, sets, grain, &loaded, &machine))??;
    if args.json {
        out::print_json(&rows)?;
    } else {
        out::print_text(&table(&rows, args.range.range.is_some()))?;
    }
    check_rows(&rows, args.allow_unverified)
}

async fn judge_rows(
    source: &SourceArgs,
    range: &RangeArgs,
    sets: Vec<PatchSet>,
    grain: RowGrain,
    loaded: &LoadedConfig,
    machine: &HostMachine,
) -> Result<Vec<HistoryRow>, CommandError> {
    if range.range.is_some() && (source.source.is_some() || source.git.reference.is_some()) {
        return Err(CommandError::usage(
            "--range goes with --git alone",
            "a range has its own ends: leave --source and --ref away",
        ));
    }
    let numbers = &loaded.settings.build;
    let proofs = proofs::load_proofs(loaded, machine)?;
    with_builder(loaded, machine, async |builder| {
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
        let reporter = builder.reporter.clone();
        let cancel = builder.cancel.clone();
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

/// Merges equal consecutive rows of a range.
fn table(rows: &[HistoryRow], is_range: bool) -> String {
    let lines: Vec<Vec<String>> = if is_range {
        let runs = history::merge_runs(rows).into_iter().map(|run| {
            let span = if run.first == run.last { run.first } else { format!("{}..{}", run.first, run.last) };
            vec![span, run.patch, status_text(run.status), run.reason]
        });
        runs.collect()
    } else {
        let one = |row: &HistoryRow| {
            vec![row.revision.clone(), row.patch.clone(), status_text(row.status), row.reason.clone()]
        };
        rows.iter().map(one).collect()
    };
    out::table(["REVISION", "PATCH", "STATUS", "WHY"], lines)
}

pub(super) fn status_text(status: PatchStatus) -> String {
    status.to_string().replace('-', " ")
}

fn check_rows(rows: &[HistoryRow], allow_unverified: bool) -> Result<(), CommandError> {
    let count = |status| rows.iter().filter(|row| row.status == status).count();
    let refused = count(PatchStatus::Refused);
    let unverified = count(PatchStatus::Unverified);
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
