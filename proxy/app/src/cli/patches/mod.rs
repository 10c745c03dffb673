//! `llama-warden patches …`: which patch sets there are, whether they fit a source, and getting them in and out of it.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | everything asked about is verified, or is not needed there |
//! | 3 | something is refused, or not verified and that was not allowed |
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
use warden_builder::Backend;
use warden_patches::{Catalogue, Judgement, PatchSet, Series, Status};

use crate::cli::build::sets;
use crate::config::machine::Machine;
use crate::config::source::layers::Loaded;
use crate::exit::Failure;

/// What can be done with patch sets.
#[derive(Debug, Subcommand)]
pub(crate) enum PatchesCommand {
    /// Lists the patch sets and their fixes.
    List(list::ListArgs),
    /// Shows all that is known about a set or a fix.
    Show(show::ShowArgs),
    /// Judges sets in a source, or in every commit of a range.
    Check(check::CheckArgs),
    /// Writes sets into a source folder, all or nothing; or takes them out again.
    Apply(apply::ApplyArgs),
    /// Writes sets as ordinary patches for one revision, for git and patch; paths begin at llama.cpp's own folder.
    Export(export::ExportArgs),
    /// Shows sets to be good in a tree that nobody has looked at, and records it beside the configuration.
    Prove(prove::ProveArgs),
    /// Finds the first commit of a range at which a patch stops being verified.
    Bisect(bisect::BisectArgs),
    /// Adds the versions of upstream's code in a source to what is known. For maintainers who have read them.
    #[command(hide = true)]
    Fingerprint(fingerprint::FingerprintArgs),
}

pub(crate) fn run(command: PatchesCommand) -> Result<(), Failure> {
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

/// The sets that there are.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct CatalogueArgs {
    /// More patch sets: a folder that is one, or a folder of them. May be repeated.
    #[arg(long, value_name = "DIR")]
    patches: Vec<PathBuf>,
}

impl CatalogueArgs {
    /// The curated ones, those of the configuration, and those of the flags.
    fn load(&self, loaded: &Loaded, machine: &Machine) -> Result<Catalogue, Failure> {
        let mut catalogue = sets(loaded, machine)?;
        for folder in &self.patches {
            catalogue = catalogue.with_folder(folder)?;
        }
        Ok(catalogue)
    }
}

/// The sets that are meant.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct SetArgs {
    #[command(flatten)]
    catalogue: CatalogueArgs,
    /// Only this set, by its id. May be repeated. Without it: every set.
    #[arg(long, value_name = "ID")]
    patch_set: Vec<String>,
    /// Only sets for this backend, such as cuda.
    #[arg(long, value_name = "NAME", conflicts_with = "patch_set")]
    backend: Option<String>,
}

impl SetArgs {
    /// The sets, in the catalogue's order.
    fn load(&self, loaded: &Loaded, machine: &Machine) -> Result<Vec<PatchSet>, Failure> {
        let catalogue = self.catalogue.load(loaded, machine)?;
        for id in &self.patch_set {
            catalogue.require(id)?;
        }
        if let Some(backend) = &self.backend {
            known_backend(backend, &catalogue)?;
        }
        let wanted = |set: &&PatchSet| match &self.backend {
            Some(backend) => set.is_for(backend),
            None => self.patch_set.is_empty() || self.patch_set.contains(&set.id),
        };
        Ok(catalogue.sets().iter().filter(wanted).cloned().collect())
    }
}

fn known_backend(backend: &str, catalogue: &Catalogue) -> Result<(), Failure> {
    let mut known: Vec<&str> = Backend::ALL.into_iter().map(Backend::name).collect();
    known.extend(catalogue.sets().iter().flat_map(|set| &set.backends).map(String::as_str));
    if known.contains(&backend) {
        return Ok(());
    }
    known.sort_unstable();
    known.dedup();
    Err(Failure::usage(
        format!("there is no backend `{backend}`"),
        format!("there are: {}", known.join(", ")),
    ))
}

/// The sets of a row that forbid it, as an error; fine when there is none.
fn admitted(series: &Series, allow_unverified: bool, what: &str) -> Result<(), Failure> {
    let blocking: Vec<&Judgement> = series.blocking(allow_unverified).collect();
    if blocking.is_empty() {
        return Ok(());
    }
    let told = |judgement: &&Judgement| {
        let why = if judgement.status == Status::Refused { "is refused" } else { "is not verified" };
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
    let hint = if blocking.iter().all(|judgement| judgement.status == Status::Unverified) {
        format!(
            "show it to be good with `llama-warden patches prove`; or read what changed, then use --allow-unverified; or {others}"
        )
    } else {
        others.to_owned()
    };
    Err(Failure::Refused { message, hint })
}
