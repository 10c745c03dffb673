//! `patches apply`: applies patch sets to a folder, all or none, and reverses them.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use warden_builder::BuildSource;
use warden_patches::apply::{ApplyOutcome, PatchTarget, ReverseOutcome};
use warden_patches::{PatchSeries, PatchSet, PatchStatus};

use super::{SetArgs, check_admitted};
use crate::cli::ConfigArgs;
use crate::config::machine::HostMachine;
use crate::config::resolve::proofs;
use crate::exit::CommandError;
use crate::out;

#[expect(clippy::struct_excessive_bools, reason = "a command line has flags")]
#[derive(Debug, Args)]
pub(crate) struct PatchApplyArgs {
    /// Folder that contains llama.cpp.
    #[arg(long, value_name = "DIR")]
    source: PathBuf,
    /// Reverses applied sets, byte for byte.
    #[arg(long, conflicts_with_all = ["plan", "allow_unverified", "patch_set", "backend"])]
    reverse: bool,
    /// Shows the changes, and makes none.
    #[arg(long, visible_alias = "dry-run")]
    plan: bool,
    #[command(flatten)]
    sets: SetArgs,
    /// Applies sets also where nobody has reviewed them against this version of the code.
    #[arg(long)]
    allow_unverified: bool,
    /// Prints JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn run(args: &PatchApplyArgs) -> Result<(), CommandError> {
    let source = BuildSource::at(&args.source)?;
    let Some((root, revision)) = source.folder(&CancellationToken::new())? else {
        return Err(CommandError::usage(
            format!("{} is an archive, and patches are written into a folder", args.source.display()),
            "unpack it first; or write patches for it with `llama-warden patches export`",
        ));
    };
    let mut target = PatchTarget::open(&root, revision)?;
    if args.reverse {
        return print_reversed(&root.display().to_string(), &target.reverse()?, args.json);
    }
    let machine = HostMachine::read();
    let loaded = args.config.load(&machine, Vec::new())?;
    let sets = args.sets.load(&loaded, &machine)?;
    let sets: Vec<&PatchSet> = sets.iter().collect();
    let proofs = proofs::load_proofs(&loaded, &machine)?;
    let series = PatchSeries::judge(&sets, &target.original()?)?.accept(&sets, &proofs);
    let admitted = check_admitted(&series, args.allow_unverified, "applied");
    let outcome = match (&admitted, args.plan) {
        (Err(_), _) => "refused",
        (Ok(()), true) => "planned",
        (Ok(()), false) => match target.apply(&series)? {
            ApplyOutcome::Written => "written",
            ApplyOutcome::Already => "already",
            ApplyOutcome::Nothing => "nothing",
        },
    };
    if args.json {
        out::print_json(&result_json(&root.display().to_string(), outcome, &series))?;
    } else {
        out::print_text(&result_text(&root.display().to_string(), outcome, &series))?;
    }
    admitted
}

fn print_reversed(root: &str, reversed: &ReverseOutcome, json: bool) -> Result<(), CommandError> {
    let sets: Vec<String> = reversed.sets.iter().map(ToString::to_string).collect();
    if json {
        let outcome = if sets.is_empty() { "nothing" } else { "reversed" };
        return out::print_json(
            &json!({ "root": root, "outcome": outcome, "sets": sets, "files": reversed.files }),
        );
    }
    if sets.is_empty() {
        return out::print_line(&format!("{root}: no patches are applied; nothing was changed"));
    }
    for file in &reversed.files {
        out::print_line(&format!("restored {file}"))?;
    }
    out::print_line(&format!("{root}: {} taken out", sets.join("+")))
}

fn result_json(root: &str, outcome: &str, series: &PatchSeries) -> Value {
    let sets = series.judgements.iter().map(|judgement| {
        let reasons: Vec<String> = judgement.reasons.iter().map(ToString::to_string).collect();
        json!({
            "set": judgement.set,
            "status": judgement.status,
            "reasons": reasons,
            "fixes": judgement.fixes,
        })
    });
    let files = series.edits.0.iter().map(|edit| {
        let inserted =
            edit.inserted.iter().map(|one| json!({ "line": one.line, "text": one.text, "hook": one.hook }));
        json!({
            "path": edit.path,
            "created": edit.before.is_none(),
            "inserted": inserted.collect::<Vec<_>>(),
        })
    });
    json!({
        "root": root,
        "outcome": outcome,
        "patch_set": series.id(),
        "sets": sets.collect::<Vec<_>>(),
        "files": files.collect::<Vec<_>>(),
    })
}

fn result_text(root: &str, outcome: &str, series: &PatchSeries) -> String {
    let mut lines = Vec::new();
    for judgement in &series.judgements {
        lines.push(format!("{}: {}", judgement.set, super::check::status_text(judgement.status)));
        // Skip the reasons of a refusal: the error contains them.
        if matches!(judgement.status, PatchStatus::NotApplicable | PatchStatus::Superseded)
            || outcome != "refused"
        {
            lines.extend(judgement.reasons.iter().map(|reason| format!("  {reason}")));
        }
    }
    if outcome != "refused" {
        lines.extend(change_lines(series));
    }
    let id = series.id();
    lines.extend(match outcome {
        "written" => Some(format!("{root}: {id} applied")),
        "already" => Some(format!("{root}: {id} is applied already; nothing was changed")),
        "nothing" => Some(format!("{root}: no set changes anything here")),
        "planned" => Some(format!("{root}: {id} would be applied; nothing was changed")),
        _ => None,
    });
    lines.push(String::new());
    lines.join("\n")
}

/// Formats each change as `file:line: text`.
fn change_lines(series: &PatchSeries) -> Vec<String> {
    let mut lines = Vec::new();
    for edit in &series.edits.0 {
        if edit.before.is_none() {
            let count = edit.after.split_inclusive(|byte| *byte == b'\n').count();
            lines.push(format!("{}: new file, {count} lines", edit.path));
        }
        lines.extend(
            edit.inserted.iter().map(|one| format!("{}:{}: {}", edit.path, one.line, one.text.trim())),
        );
        if edit.before.is_some() && edit.inserted.is_empty() {
            lines.push(format!("{}: changed by a diff", edit.path));
        }
    }
    lines
}
