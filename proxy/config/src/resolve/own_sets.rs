//! The user's own patch sets: folders of `paths.patches`, and sets recorded in builds of the store. The
//! record of a build has priority, because that code runs; so a server starts without the set's folder,
//! too.

use std::collections::HashMap;
use std::sync::Arc;

use warden_patches::Catalogue as Sets;
use warden_patches::mitigation::{Catalogue, ProvenanceFacts};
use warden_patches::set::Origin;

use super::Resolver;
use super::binary::Choice;
use super::mitigations::catalogue;
use super::store;
use crate::machine::Machine;
use crate::problem::{Place, Problem};
use crate::settings::Model;
use crate::source::layers::Loaded;

/// Cache, so that each folder and each build is read once.
#[derive(Debug, Default)]
pub(crate) struct OwnSets {
    folders: Option<Arc<Sets>>,
    lists: HashMap<Choice, Arc<Catalogue>>,
}

impl Loaded {
    /// Loads the curated patch sets, and those of `paths.patches`.
    ///
    /// # Errors
    /// A set is broken, or its name is taken; the problem names file and line.
    pub fn patch_sets(&self, machine: &Machine) -> Result<Sets, Problem> {
        let broken = |error: &warden_patches::Error| {
            let path = ["paths".to_owned(), "patches".to_owned()];
            let place =
                if self.settings.paths.patches.is_empty() { Place::Nowhere } else { self.place(&path) };
            Problem::new(place, format!("a patch set of `paths.patches`: {error}"))
                .hint("`llama-warden patches list` tells when it is well; docs/patches.md explains sets of your own")
        };
        let mut all = Sets::embedded().map_err(|error| broken(&error))?;
        for folder in &self.settings.paths.patches {
            all = all.with_folder(&self.absolute(machine, folder)).map_err(|error| broken(&error))?;
        }
        Ok(all)
    }
}

/// Adds the sets recorded in a build.
///
/// # Errors
/// One of its fixes has a name that now means something else.
pub fn with_build(list: Catalogue, build: &ProvenanceFacts) -> Result<Catalogue, warden_patches::Error> {
    let fixes = build.own.iter().map(|(set, fix)| (set.as_str(), fix));
    list.with_own(fixes, &format!("build {}", build.id))
}

/// Adds the fixes of sets from folders.
///
/// # Errors
/// A fix has a name that is taken.
pub fn with_folders(mut list: Catalogue, sets: &Sets) -> Result<Catalogue, warden_patches::Error> {
    for set in sets.sets().iter().filter(|set| set.origin != Origin::Embedded) {
        let fixes = set.fixes.iter().map(|fix| (set.id.as_str(), fix));
        list = list.with_own(fixes, &set.origin.to_string())?;
    }
    Ok(list)
}

impl Resolver<'_> {
    /// The list of mitigations for a model, with the fixes recorded in its build and those of
    /// `paths.patches`.
    ///
    /// # Errors
    /// The compiled-in list is broken.
    pub(super) fn list_for(&mut self, name: &str, model: &Model) -> Result<Arc<Catalogue>, String> {
        let curated = catalogue()?;
        // Drop problems of the choice: the resolution of the model reports them.
        let known = self.problems.len();
        let (choice, place) = self.choice(name, model);
        self.problems.truncate(known);
        if let Some(list) = self.own.lists.get(&choice) {
            return Ok(Arc::clone(list));
        }
        let mut list = Catalogue::clone(&curated);
        if let Some(build) = self.built(&choice).filter(|build| !build.own.is_empty()) {
            list = with_build(list, &build).unwrap_or_else(|error| {
                let problem = Problem::new(place, format!("model `{name}`: {error}"));
                self.warnings.push(problem.hint("build it again, with the fix under another name"));
                Catalogue::clone(&curated)
            });
        }
        if let Some(sets) = self.folders() {
            let without = list.clone();
            list = with_folders(list, &sets).unwrap_or_else(|error| {
                let place = self.place(&["paths", "patches"]);
                self.problems.push(Problem::new(place, format!("model `{name}`: {error}")));
                without
            });
        }
        let list = Arc::new(list);
        self.own.lists.insert(choice, Arc::clone(&list));
        Ok(list)
    }

    /// The sets of `paths.patches`. Reports problems once.
    fn folders(&mut self) -> Option<Arc<Sets>> {
        if self.loaded.settings.paths.patches.is_empty() {
            return None;
        }
        if self.own.folders.is_none() {
            let sets = self.loaded.patch_sets(self.machine).unwrap_or_else(|problem| {
                self.problems.push(problem);
                Sets::default()
            });
            self.own.folders = Some(Arc::new(sets));
        }
        self.own.folders.clone()
    }

    /// Facts from the provenance of a chosen build. Ignores a damaged store, which a start reports.
    fn built(&self, choice: &Choice) -> Option<ProvenanceFacts> {
        let data = self.loaded.dirs(self.machine).ok()?.data;
        let id = match choice {
            Choice::Build(id) => Some(id.as_str()),
            Choice::Newest => None,
            Choice::Path(_) | Choice::InPath(_) => return None,
        };
        store::find(&data, id).ok().flatten()?.facts.provenance
    }
}
