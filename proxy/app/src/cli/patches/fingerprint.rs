//! `patches fingerprint`: records a reviewed version of the code that a set depends on. For maintainers.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use warden_patches::set::fingerprints::{FINGERPRINTS_SCHEMA, SeamFingerprints, add_versions};
use warden_patches::{PatchSet, SeamSeen, SourceTree, fingerprint};

use super::CatalogueArgs;
use super::source::{RangeArgs, SourceArgs, run_blocking};
use crate::cli::build::with_builder;
use crate::cli::{ConfigArgs, block_on};
use crate::config::machine::HostMachine;
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Args)]
pub(crate) struct FingerprintArgs {
    /// Id of the set.
    #[arg(value_name = "SET")]
    patch: String,
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    range: RangeArgs,
    #[command(flatten)]
    catalogue: CatalogueArgs,
    /// Name of the version; in a range each commit has its own. Default: name of the source.
    #[arg(long, value_name = "TEXT", conflicts_with = "range")]
    label: Option<String>,
    /// Named source of the version, such as llama.cpp.
    #[arg(long, value_name = "NAME", default_value = "llama.cpp")]
    of: String,
    /// Adds the result to this file, the set's fingerprints.json, instead of printing it.
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    #[command(flatten)]
    config: ConfigArgs,
}

/// Seams at one revision.
struct RevisionSeams {
    seams: Vec<SeamSeen>,
    label: String,
    commit: String,
}

pub(super) fn run(args: &FingerprintArgs) -> Result<(), CommandError> {
    let machine = HostMachine::read();
    let loaded = args.config.load(&machine, Vec::new())?;
    let set = args.catalogue.load(&loaded, &machine)?.require(&args.patch)?.clone();
    let mut known = match &args.write {
        Some(file) => read_existing(file)?.unwrap_or_else(|| set.fingerprints.clone()),
        None => set.fingerprints.clone(),
    };
    let before: usize = known.seams.values().map(Vec::len).sum();
    for seen in block_on(collect_seams(args, set))?? {
        known = add_versions(&known, &seen.seams, &seen.label, &seen.commit, &args.of);
    }
    let after: usize = known.seams.values().map(Vec::len).sum();
    let Some(file) = &args.write else { return out::print_json(&known) };
    let text = known.to_json().map_err(|error| CommandError::failed(error.to_string()))?;
    std::fs::write(file, text)
        .map_err(|error| CommandError::failed(format!("cannot write {}: {error}", file.display())))?;
    out::print_line(&format!("{}: {} new versions, {after} in all", file.display(), after - before))
}

fn read_existing(file: &Path) -> Result<Option<SeamFingerprints>, CommandError> {
    let bytes = match std::fs::read(file) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(CommandError::failed(format!("cannot read {}: {error}", file.display()))),
    };
    let wrong = |why: String| {
        CommandError::usage(
            format!("{} is no fingerprints.json: {why}", file.display()),
            "name another file with --write",
        )
    };
    let known: SeamFingerprints = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
    if known.schema == FINGERPRINTS_SCHEMA {
        Ok(Some(known))
    } else {
        Err(wrong(format!("its schema is {}", known.schema)))
    }
}

async fn collect_seams(args: &FingerprintArgs, set: PatchSet) -> Result<Vec<RevisionSeams>, CommandError> {
    let machine = HostMachine::read();
    let loaded = args.config.load(&machine, Vec::new())?;
    let numbers = &loaded.settings.build;
    with_builder(&loaded, &machine, async |builder| {
        let Some(range) = &args.range.range else {
            let found = args.source.open(&builder, numbers).await?;
            let label = args.label.clone().unwrap_or_else(|| found.label.clone());
            return run_blocking(move || {
                let seams = fingerprint(&set, found.tree.as_ref())?;
                let revision = found.tree.revision();
                let commit = revision.commit.as_ref().map(|_| revision.short_commit().to_owned());
                Ok(vec![RevisionSeams { seams, label, commit: commit.unwrap_or_default() }])
            })
            .await;
        };
        let (repository, revisions) =
            args.source.fetch_range(range, args.range.every, &builder, numbers).await?;
        let cancel = builder.cancel.clone();
        run_blocking(move || {
            let mut all = Vec::new();
            let mut last: Option<Vec<Option<String>>> = None;
            for info in revisions {
                if cancel.is_cancelled() {
                    return Err(warden_builder::BuilderError::Cancelled);
                }
                let tree = Arc::clone(&repository).tree(&info.commit)?;
                let files = set.seams.iter().flat_map(|seam| &seam.files);
                let ids =
                    files.map(|file| tree.content_id(file)).collect::<warden_patches::Result<Vec<_>>>()?;
                // Skip this commit if it touches none of the set's files, as most commits do.
                if last.as_ref() == Some(&ids) {
                    continue;
                }
                last = Some(ids);
                let commit = info.commit.chars().take(9).collect();
                all.push(RevisionSeams { seams: fingerprint(&set, &tree)?, label: info.label, commit });
            }
            Ok(all)
        })
        .await
    })
    .await
}
