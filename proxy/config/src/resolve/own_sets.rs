//! The user's own patch sets: folders in `paths.patches`, and sets recorded in builds of the store. The
//! record of a build takes precedence, because it describes the code that runs; so a server also starts if
//! the set's folder is missing.

use std::collections::HashMap;
use std::sync::Arc;

use warden_patches::SetCatalogue as Sets;
use warden_patches::mitigation::{MitigationCatalogue, ProvenanceFacts};
use warden_patches::set::SetOrigin;

use super::mitigations::catalogue;
use super::resolver::ConfigResolver;
use super::store::{self, BinaryChoice};
use crate::machine::HostMachine;
use crate::problem::{ConfigPlace, ConfigProblem, owned_path};
use crate::source::layers::LoadedConfig;

/// Cache of patch sets and lists of mitigations, so that each folder and each build is read once.
#[derive(Debug, Default)]
pub(crate) struct OwnSets {
    folders: Option<Arc<Sets>>,
    lists: HashMap<BinaryChoice, Arc<MitigationCatalogue>>,
}

impl LoadedConfig {
    /// Loads the patch sets of llama-warden, and those of `paths.patches`.
    ///
    /// # Errors
    /// A set is broken, or its name is in use; the problem names file and line.
    pub fn patch_sets(&self, machine: &HostMachine) -> Result<Sets, ConfigProblem> {
        let broken = |error: &warden_patches::PatchError| {
            let place = self.place(&owned_path(&["paths", "patches"]));
            ConfigProblem::new(place, format!("a patch set of `paths.patches`: {error}")).with_hint(
                "`llama-warden patches list` tells when it is well; docs/patches.md explains \
                            sets of your own",
            )
        };
        let mut all = Sets::embedded().map_err(|error| broken(&error))?;
        for folder in &self.settings.paths.patches {
            all = all.with_folder(&self.absolute(machine, folder)).map_err(|error| broken(&error))?;
        }
        Ok(all)
    }
}

/// Adds the fixes of the sets recorded in a build to a list.
///
/// # Errors
/// A fix in the build has the same name as another mitigation of the list.
pub fn with_build(
    list: MitigationCatalogue,
    build: &ProvenanceFacts,
) -> Result<MitigationCatalogue, warden_patches::PatchError> {
    let fixes = build.own.iter().map(|(set, fix)| (set.as_str(), fix));
    list.with_own(fixes, &format!("build {}", build.id))
}

/// Adds the fixes of sets in folders to a list.
///
/// # Errors
/// The name of a fix is in use.
pub fn with_folders(
    mut list: MitigationCatalogue,
    sets: &Sets,
) -> Result<MitigationCatalogue, warden_patches::PatchError> {
    for set in sets.sets().iter().filter(|set| set.origin != SetOrigin::Embedded) {
        let fixes = set.fixes.iter().map(|fix| (set.id.as_str(), fix));
        list = list.with_own(fixes, &set.origin.to_string())?;
    }
    Ok(list)
}

impl OwnSets {
    /// Returns the list of mitigations for the model `name`, with the fixes recorded in its build and the
    /// fixes of `paths.patches`. Fails if the compiled-in list is broken.
    pub(super) fn list_for(
        &mut self,
        config: &mut ConfigResolver<'_>,
        name: &str,
        (choice, place): (BinaryChoice, ConfigPlace),
    ) -> Result<Arc<MitigationCatalogue>, String> {
        let curated = catalogue()?;
        if let Some(list) = self.lists.get(&choice) {
            return Ok(Arc::clone(list));
        }
        let mut list = MitigationCatalogue::clone(&curated);
        let dirs = config.loaded.dirs(config.machine).ok();
        let build = dirs.and_then(|dirs| store::chosen_build(&dirs.data, &choice)?.facts.provenance);
        if let Some(build) = build
            && !build.own.is_empty()
        {
            list = with_build(list, &build).unwrap_or_else(|error| {
                let problem = ConfigProblem::new(place, format!("model `{name}`: {error}"));
                config.warnings.push(problem.with_hint("build it again, with the fix under another name"));
                MitigationCatalogue::clone(&curated)
            });
        }
        if let Some(sets) = self.folder_sets(config) {
            let without = list.clone();
            list = with_folders(list, &sets).unwrap_or_else(|error| {
                let place = config.place(&["paths", "patches"]);
                config.problems.push(ConfigProblem::new(place, format!("model `{name}`: {error}")));
                without
            });
        }
        let list = Arc::new(list);
        self.lists.insert(choice, Arc::clone(&list));
        Ok(list)
    }

    /// Returns the sets of `paths.patches`; reports problems with them only once.
    fn folder_sets(&mut self, config: &mut ConfigResolver<'_>) -> Option<Arc<Sets>> {
        if config.loaded.settings.paths.patches.is_empty() {
            return None;
        }
        let read = || {
            let sets = config.loaded.patch_sets(config.machine).unwrap_or_else(|problem| {
                config.problems.push(problem);
                Sets::default()
            });
            Arc::new(sets)
        };
        Some(Arc::clone(self.folders.get_or_insert_with(read)))
    }
}
