//! `llama-warden patches …`: lists patch sets, judges whether they fit a source, applies and reverses them.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | everything requested is verified, or is not needed there |
//! | 3 | a patch is refused, or unverified without permission |
//! | 2 | wrong use, or a broken patch set |
//! | 1 | anything else |

mod apply;
mod bisect;
mod check;
mod export;
mod fingerprint;
mod list;
mod prove;
mod show;
mod source;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use warden_builder::ComputeBackend;
use warden_patches::{PatchSeries, PatchSet, PatchStatus, SetCatalogue, SetJudgement};

use crate::cli::build::load_patch_sets;
use crate::config::machine::HostMachine;
use crate::config::source::layers::LoadedConfig;
use crate::exit::CommandError;

#[derive(Debug, Subcommand)]
pub(crate) enum PatchesCommand {
    /// Lists the patch sets and their fixes.
    List(list::PatchListArgs),
    /// Shows all that is known about a set or a fix.
    Show(show::PatchShowArgs),
    /// Judges sets in a source, or in every commit of a range.
    Check(check::PatchCheckArgs),
    /// Applies sets to a source folder, all or none; or reverses them.
    Apply(apply::PatchApplyArgs),
    /// Writes sets as ordinary patches for one revision, for git and patch; paths begin at llama.cpp's own
    /// folder.
    Export(export::PatchExportArgs),
    /// Proves sets in a tree that nobody has reviewed, and records the proof next to the configuration.
    Prove(prove::ProveArgs),
    /// Finds the first commit of a range at which a patch is no longer verified.
    Bisect(bisect::PatchBisectArgs),
    /// Adds reviewed versions of upstream's code to the known ones. For maintainers.
    #[command(hide = true)]
    Fingerprint(fingerprint::FingerprintArgs),
}

pub(crate) fn run(command: PatchesCommand) -> Result<(), CommandError> {
    match command {
        PatchesCommand::List(args) => list::run(&args),
        PatchesCommand::Show(args) => show::run(&args),
        PatchesCommand::Check(args) => check::run(&args),
        PatchesCommand::Apply(args) => apply::run(&args),
        PatchesCommand::Export(args) => export::run(&args),
        PatchesCommand::Prove(args) => prove::run(&args),
        PatchesCommand::Bisect(args) => bisect::run(&args),
        PatchesCommand::Fingerprint(args) => fingerprint::run(&args),
    }
}

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct CatalogueArgs {
    /// Adds patch sets: the folder of one set, or a folder of several. May be repeated.
    #[arg(long, value_name = "DIR")]
    patches: Vec<PathBuf>,
}

impl CatalogueArgs {
    /// Loads the curated sets, those of the configuration, and those of the flags.
    fn load(&self, loaded: &LoadedConfig, machine: &HostMachine) -> Result<SetCatalogue, CommandError> {
        let mut catalogue = load_patch_sets(loaded, machine)?;
        for folder in &self.patches {
            catalogue = catalogue.with_folder(folder)?;
        }
        Ok(catalogue)
    }
}

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct SetArgs {
    #[command(flatten)]
    catalogue: CatalogueArgs,
    /// Uses only this set, by its id. May be repeated. Default: every set.
    #[arg(long, value_name = "ID")]
    patch_set: Vec<String>,
    /// Uses only sets for this backend, such as cuda.
    #[arg(long, value_name = "NAME", conflicts_with = "patch_set")]
    backend: Option<String>,
}

impl SetArgs {
    /// Loads the selected sets, in the catalogue's order.
    fn load(&self, loaded: &LoadedConfig, machine: &HostMachine) -> Result<Vec<PatchSet>, CommandError> {
        let catalogue = self.catalogue.load(loaded, machine)?;
        for id in &self.patch_set {
            catalogue.require(id)?;
        }
        if let Some(backend) = &self.backend {
            check_backend(backend, &catalogue)?;
        }
        let wanted = |set: &&PatchSet| match &self.backend {
            Some(backend) => set.is_for(backend),
            None => self.patch_set.is_empty() || self.patch_set.contains(&set.id),
        };
        Ok(catalogue.sets().iter().filter(wanted).cloned().collect())
    }
}

fn check_backend(backend: &str, catalogue: &SetCatalogue) -> Result<(), CommandError> {
    let mut known: Vec<&str> = ComputeBackend::ALL.into_iter().map(ComputeBackend::name).collect();
    known.extend(catalogue.sets().iter().flat_map(|set| &set.backends).map(String::as_str));
    if known.contains(&backend) {
        return Ok(());
    }
    known.sort_unstable();
    known.dedup();
    Err(CommandError::usage(
        format!("there is no backend `{backend}`"),
        format!("there are: {}", known.join(", ")),
    ))
}

/// Returns an error that names the blocking sets, if any.
fn check_admitted(series: &PatchSeries, allow_unverified: bool, what: &str) -> Result<(), CommandError> {
    let blocking: Vec<&SetJudgement> = series.blocking(allow_unverified).collect();
    if blocking.is_empty() {
        return Ok(());
    }
    let told = |judgement: &&SetJudgement| {
        let why = if judgement.status == PatchStatus::Refused { "is refused" } else { "is not verified" };
        let reasons = judgement.reasons.iter().map(|reason| format!("\n  {reason}"));
        format!(
            "the patch set `{}` {why} here, so nothing was {what}:{}",
            judgement.set,
            reasons.collect::<String>()
        )
    };
    let message = blocking.iter().map(told).collect::<Vec<_>>().join("\n");
    let others =
        "choose other sets with --patch-set ID, or bring one that knows this source with --patches DIR";
    let hint = if blocking.iter().all(|judgement| judgement.status == PatchStatus::Unverified) {
        format!(
            "show it to be good with `llama-warden patches prove`; or read what changed, then use --allow-unverified; or {others}"
        )
    } else {
        others.to_owned()
    };
    Err(CommandError::Refused { message, hint })
}
