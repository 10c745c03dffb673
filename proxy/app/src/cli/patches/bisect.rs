//! `patches bisect`: finds the commit since which a patch is no longer verified. Judges every commit,
//! because a patch can become verified again.

use clap::Args;
use warden_patches::history::{self, HistoryRow, PatchStop, RowGrain};
use warden_patches::{PatchSet, PatchStatus};

use super::SetArgs;
use super::check::{check_rows, judge_rows, status_text};
use super::source::{RangeArgs, SourceArgs};
use crate::cli::{ConfigArgs, block_on};
use crate::config::machine::HostMachine;
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Args)]
pub(crate) struct PatchBisectArgs {
    /// Set, fix, or both as SET/FIX. Default: every fix of every set.
    #[arg(value_name = "PATCH")]
    patch: Option<String>,
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    range: RangeArgs,
    #[command(flatten)]
    sets: SetArgs,
    /// Prints JSON, for programs: an array of `{patch, last_verified, first, again}`.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn run(args: &PatchBisectArgs) -> Result<(), CommandError> {
    if args.range.range.is_none() {
        return Err(CommandError::usage(
            "bisect needs a range",
            "say where to look with --range A..B, such as --range b4881..b10587",
        ));
    }
    let machine = HostMachine::read();
    let loaded = args.config.load(&machine, Vec::new())?;
    let sets = args.sets.load(&loaded, &machine)?;
    let (sets, grain, only) = select_patch(sets, args.patch.as_deref())?;
    let all = block_on(judge_rows(&args.source, &args.range, sets, grain, &args.config))??;
    let rows: Vec<HistoryRow> =
        all.into_iter().filter(|row| only.as_ref().is_none_or(|only| row.patch == *only)).collect();
    let stops = history::find_stops(&rows);
    if args.json {
        out::print_json(&stops)?;
    } else {
        out::print_text(&table(&stops))?;
    }
    let firsts: Vec<HistoryRow> = stops.into_iter().filter_map(|stop| stop.first).collect();
    check_rows(&firsts, false).map_err(|failure| match failure {
        CommandError::Refused { hint, .. } => {
            let count = firsts
                .iter()
                .filter(|row| matches!(row.status, PatchStatus::Refused | PatchStatus::Unverified))
                .count();
            let message = if count == 1 {
                "one patch stops being verified in this range".to_owned()
            } else {
                format!("{count} patches stop being verified in this range")
            };
            CommandError::Refused { message, hint }
        }
        other => other,
    })
}

/// Selects the sets to judge, per set or per fix, and the requested patch.
fn select_patch(
    sets: Vec<PatchSet>,
    patch: Option<&str>,
) -> Result<(Vec<PatchSet>, RowGrain, Option<String>), CommandError> {
    let Some(patch) = patch else { return Ok((sets, RowGrain::Fixes, None)) };
    let (set, fix) = match patch.split_once('/') {
        Some((set, fix)) => (Some(set), Some(fix)),
        None if sets.iter().any(|set| set.id == patch) => (Some(patch), None),
        None => (None, Some(patch)),
    };
    let found = sets
        .into_iter()
        .find(|one| set.is_none_or(|id| one.id == id) && fix.is_none_or(|id| one.fix(id).is_some()))
        .ok_or_else(|| {
            CommandError::usage(
                format!("there is no patch set and no fix `{patch}`"),
                "`llama-warden patches list` shows what there is; sets of your own come with --patches DIR",
            )
        })?;
    let (grain, only) = match fix {
        Some(fix) => (RowGrain::Fixes, format!("{}/{fix}", found.id)),
        None => (RowGrain::Sets, found.id.clone()),
    };
    Ok((vec![found], grain, Some(only)))
}

fn table(stops: &[PatchStop]) -> String {
    let head = ["PATCH", "VERIFIED UNTIL", "STOPS AT", "AS", "VERIFIED AGAIN AT", "WHY"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for stop in stops {
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
        let (at, status, why) = match (&stop.first, &stop.last_verified) {
            (Some(row), _) => (row.revision.clone(), status_text(row.status), row.reason.clone()),
            (None, Some(_)) => ("-".to_owned(), "-".to_owned(), "holds to the end".to_owned()),
            (None, None) => ("-".to_owned(), "-".to_owned(), "never verified in this range".to_owned()),
        };
        lines.push(vec![
            stop.patch.clone(),
            text(&stop.last_verified),
            at,
            status,
            text(&stop.verified_again),
            why,
        ]);
    }
    out::format_table(&lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_until_since_and_again() {
        let row = HistoryRow {
            revision: "b9".into(),
            patch: "s/f".into(),
            status: PatchStatus::Unverified,
            reason: "seam x".into(),
        };
        let some = |text: &str| Some(text.to_owned());
        let stops = [
            PatchStop {
                patch: "s/f".into(),
                last_verified: some("b8"),
                first: Some(row),
                verified_again: some("b12"),
            },
            PatchStop { patch: "s/g".into(), last_verified: some("b20"), first: None, verified_again: None },
            PatchStop { patch: "s/h".into(), last_verified: None, first: None, verified_again: None },
        ];
        insta::assert_snapshot!(table(&stops));
    }
}
