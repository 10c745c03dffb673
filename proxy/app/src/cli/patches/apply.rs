//! `patches apply`: applies patch sets to a folder. `patches export`: writes ordinary patches for one revision.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use warden_builder::BuildSource;
use warden_config::resolve::proofs;
use warden_patches::apply;
use warden_patches::export::{self, PatchFile};
use warden_patches::whole::{self, LossTolerance};
use warden_patches::{FolderTree, PatchSeries, PatchSet, PatchStatus};

use super::{SetArgs, SourceArgs, check, check_admitted, find_patch, run_blocking};
use crate::cli::build::with_builder;
use crate::cli::shared::{ConfigArgs, block_on};
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Args)]
pub(crate) struct PatchApplyArgs {
    /// Folder that contains llama.cpp.
    #[arg(long, value_name = "DIR")]
    source: PathBuf,
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

pub(super) fn apply(args: &PatchApplyArgs) -> Result<(), CommandError> {
    let source = BuildSource::at(&args.source)?;
    let Some((root, revision)) = source.folder(&CancellationToken::new())? else {
        return Err(CommandError::usage(
            format!("{} is an archive, and patches are written into a folder", args.source.display()),
            "unpack it first; or write patches for it with `llama-warden patches export`",
        ));
    };
    let (machine, loaded) = args.config.read()?;
    let sets = args.sets.load(&loaded, &machine)?;
    let sets: Vec<&PatchSet> = sets.iter().collect();
    let proofs = proofs::load_proofs(&loaded, &machine)?;
    let series = PatchSeries::judge(&sets, &FolderTree::new(&root, revision))?.accept(&sets, &proofs);
    let admitted = check_admitted(&series, args.allow_unverified, "applied");
    let outcome = match (&admitted, args.plan) {
        (Err(_), _) => "refused",
        (Ok(()), true) => "planned",
        (Ok(()), false) if apply::apply(&root, &series)? => "written",
        (Ok(()), false) => "nothing",
    };
    if args.json {
        out::print_json(&result_json(&root.display().to_string(), outcome, &series))?;
    } else {
        out::print_text(&result_text(&root.display().to_string(), outcome, &series))?;
    }
    admitted
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
        lines.push(format!("{}: {}", judgement.set, check::status_text(judgement.status)));
        // The error contains the reasons of a refusal.
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
        "nothing" => Some(format!("{root}: no set changes anything here")),
        "planned" => Some(format!("{root}: {id} would be applied; nothing was changed")),
        _ => None,
    });
    lines.push(String::new());
    lines.join("\n")
}

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

#[derive(Debug, Args)]
pub(crate) struct PatchExportArgs {
    /// Exports only this set, or one fix as SET/FIX, for instance to send it upstream.
    #[arg(value_name = "SET[/FIX]", conflicts_with_all = ["patch_set", "backend"])]
    patch: Option<String>,
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    sets: SetArgs,
    /// Exports sets also where nobody has reviewed them against this version of the code.
    #[arg(long)]
    allow_unverified: bool,
    /// Output folder, created if missing.
    #[arg(long, short, visible_alias = "out", value_name = "DIR")]
    output: PathBuf,
    /// Prints JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn export(args: &PatchExportArgs) -> Result<(), CommandError> {
    block_on(export_series(args))?
}

async fn export_series(args: &PatchExportArgs) -> Result<(), CommandError> {
    let (machine, loaded) = args.config.read()?;
    let mut sets = args.sets.load(&loaded, &machine)?;
    let mut only = None;
    if let Some(patch) = &args.patch {
        let (set, fix) = find_patch(&sets, patch)?;
        only = fix.map(|fix| fix.id.clone());
        sets = vec![set.clone()];
    }
    let numbers = &loaded.settings.build;
    let proofs = proofs::load_proofs(&loaded, &machine)?;
    let (series, files, label, shown) = with_builder(&loaded, &machine, async |builder| {
        let found = args.source.open(&builder, numbers).await?;
        run_blocking(move || {
            let sets: Vec<&PatchSet> = sets.iter().collect();
            let series = PatchSeries::judge(&sets, found.tree.as_ref())?.accept(&sets, &proofs);
            let files = export::export(&series, &sets, found.tree.as_ref(), only.as_deref())?;
            Ok((series, files, found.label, found.shown))
        })
        .await
    })
    .await?;
    check_admitted(&series, args.allow_unverified, "exported")?;
    let paths = write_patches(&args.output, &files)?;
    if args.json {
        let list = files.iter().zip(&paths).map(|(file, path)| {
            let page = args.output.join(&file.page_name);
            json!({ "set": file.set, "path": path, "rationale": page, "crlf": file.crlf })
        });
        return out::print_json(&json!({
            "revision": label,
            "source": shown,
            "patch_set": series.id(),
            "patches": list.collect::<Vec<_>>(),
        }));
    }
    for (file, path) in files.iter().zip(&paths) {
        out::print_line(&path.to_string_lossy())?;
        out::print_line(&args.output.join(&file.page_name).to_string_lossy())?;
    }
    if files.is_empty() {
        return out::print_line(&format!("no set changes anything in {label}"));
    }
    if files.iter().any(|file| file.crlf) {
        out::error_line("note: files with CRLF line ends are changed; git am needs --keep-cr for them");
    }
    Ok(())
}

/// Writes nothing if an existing file has other content.
fn write_patches(folder: &Path, files: &[PatchFile]) -> Result<Vec<PathBuf>, CommandError> {
    let trouble = |path: &Path, error: &dyn std::fmt::Display| {
        CommandError::hinted(
            format!("cannot write {}: {error}", path.display()),
            "choose another folder with -o",
        )
    };
    std::fs::create_dir_all(folder).map_err(|error| trouble(folder, &error))?;
    let paths: Vec<PathBuf> = files.iter().map(|file| folder.join(&file.name)).collect();
    let patches = files.iter().map(|file| (folder.join(&file.name), file.content.as_slice()));
    let pages = files.iter().map(|file| (folder.join(&file.page_name), file.page.as_bytes()));
    let all: Vec<(PathBuf, &[u8])> = patches.chain(pages).collect();
    for (path, wanted) in &all {
        match std::fs::read(path) {
            Ok(content) if content != *wanted => {
                return Err(trouble(path, &"a file with other content is there"));
            }
            _ => {}
        }
    }
    for (path, content) in &all {
        // Readable for all users, because patches are meant to be shared.
        let readable = std::fs::Permissions::from_mode(0o644);
        whole::write_with_mode(path, content, readable, LossTolerance::Irreplaceable)
            .map_err(|error| trouble(path, &error))?;
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_there_with_other_content_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &str| PatchFile {
            name: name.into(),
            set: "s".into(),
            page_name: name.replace(".patch", ".md"),
            page: "page".into(),
            content: content.into(),
            crlf: false,
        };
        let (first, second) = (file("0001-a.patch", "a"), file("0002-b.patch", "b"));
        write_patches(folder.path(), std::slice::from_ref(&first)).unwrap();
        write_patches(folder.path(), &[first.clone(), second.clone()]).unwrap();
        std::fs::write(folder.path().join("0002-b.patch"), "mine").unwrap();
        std::fs::remove_file(folder.path().join("0001-a.patch")).unwrap();
        std::fs::remove_file(folder.path().join("0001-a.md")).unwrap();
        std::fs::remove_file(folder.path().join("0002-b.md")).unwrap();
        let failure = write_patches(folder.path(), &[first, second]).unwrap_err();
        assert!(failure.to_string().contains("0002-b.patch"), "{failure}");
        assert!(!folder.path().join("0001-a.patch").exists());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
