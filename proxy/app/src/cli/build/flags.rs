//! Flags for the target of a build and its patch sets.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use warden_builder::{ArchChoice, BackendChoice, BuilderError};
use warden_patches::{SelectedSets, SetCatalogue, SetSelection};

use crate::exit::CommandError;

#[derive(Clone, Debug, Args)]
pub(crate) struct TargetArgs {
    /// Backend to compute on: auto, cpu, cuda, hip, vulkan or metal.
    ///
    /// `auto` picks a backend for which this machine has a device and a toolkit, and prints the reason.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = parse_with_hint::<BackendChoice>)]
    pub(crate) backend: BackendChoice,
    #[command(flatten)]
    pub(crate) arch: ArchArgs,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ArchArgs {
    /// Machines to build for: native, portable, or GPUs by name.
    ///
    /// `native` is this machine with its GPUs, `portable` the common CPUs and, for CUDA, the common GPUs.
    /// GPUs by name, such as `90`, `86,89` or `gfx1201`, leave the CPU part native; `portable,90` makes the
    /// CPU part portable, too.
    #[arg(long, value_name = "LIST", default_value = "native", value_parser = parse_with_hint::<ArchChoice>)]
    pub(crate) arch: ArchChoice,
}

/// Parses a value, and adds the hint with valid values to the error, because clap shows only the error.
pub(crate) fn parse_with_hint<T: FromStr<Err = BuilderError>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: BuilderError| {
        [Some(error.to_string()), error.hint()].into_iter().flatten().collect::<Vec<_>>().join("; ")
    })
}

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct PatchArgs {
    /// Adds patch sets: the folder of one set, or a folder of several. May be repeated.
    #[arg(long, value_name = "DIR")]
    patches: Vec<PathBuf>,
    /// Applies only this set, by its id. May be repeated. Default: every set for the backend.
    #[arg(long, value_name = "ID", conflicts_with = "plain")]
    patch_set: Vec<String>,
    /// Applies no patches: plain upstream.
    #[arg(long)]
    plain: bool,
    /// Applies sets also where nobody has reviewed them against this version of the code.
    #[arg(long, conflicts_with = "plain")]
    allow_unverified: bool,
}

impl PatchArgs {
    /// Selects the sets of these flags from `known` (curated and configured sets) and the folders of
    /// `--patches`.
    pub(crate) fn select(&self, known: SetCatalogue) -> Result<SetSelection, CommandError> {
        let mut catalogue = known;
        for folder in &self.patches {
            catalogue = catalogue.with_folder(folder)?;
        }
        let sets = match (self.plain, self.patch_set.as_slice()) {
            (true, _) => SelectedSets::None,
            (false, []) => SelectedSets::Default,
            (false, ids) => SelectedSets::Only(ids.to_vec()),
        };
        Ok(SetSelection {
            catalogue,
            sets,
            allow_unverified: self.allow_unverified,
            ..SetSelection::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use warden_builder::{ComputeBackend, CpuTarget};

    use super::*;

    #[derive(Debug, Parser)]
    struct BuildFlagsTestCli {
        #[command(flatten)]
        target: TargetArgs,
        #[command(flatten)]
        patches: PatchArgs,
    }

    fn parsed(flags: &[&str]) -> Result<BuildFlagsTestCli, String> {
        let words = std::iter::once(&"build").chain(flags);
        BuildFlagsTestCli::try_parse_from(words).map_err(|error| error.to_string())
    }

    #[test]
    fn without_flags_the_machine_decides_and_the_curated_sets_are_applied() {
        let command = parsed(&[]).unwrap();
        assert_eq!(command.target.backend, BackendChoice::Auto);
        assert_eq!(command.target.arch.arch, ArchChoice::default());
        let selection = command.patches.select(SetCatalogue::embedded().unwrap()).unwrap();
        assert_eq!((selection.sets, selection.allow_unverified), (SelectedSets::Default, false));
    }

    #[test]
    fn backend_and_architectures_are_read_with_the_cpu_part() {
        let command = parsed(&["--backend", "cuda", "--arch", "portable,90"]).unwrap();
        assert_eq!(command.target.backend, ComputeBackend::Cuda.into());
        assert_eq!(command.target.arch.arch, ArchChoice { cpu: CpuTarget::Portable, gpu: vec!["90".into()] });
    }

    #[test]
    fn sets_are_chosen_by_name_or_left_out() {
        let curated = || SetCatalogue::embedded().unwrap();
        let of = |flags: &[&str]| parsed(flags).unwrap().patches.select(curated()).unwrap();
        assert_eq!(of(&["--plain"]).sets, SelectedSets::None);
        let some = of(&["--patch-set", "a", "--patch-set", "b", "--allow-unverified"]);
        assert_eq!(
            (some.sets, some.allow_unverified),
            (SelectedSets::Only(vec!["a".into(), "b".into()]), true)
        );
        assert!(parsed(&["--plain", "--patch-set", "a"]).unwrap_err().contains("cannot be used with"));
    }
}
