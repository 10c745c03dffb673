//! Patch sets of the user's own: the folders of `paths.patches`, and what builds of the store say of the sets that they were
//! built with. What a build says counts first, as it is what runs; so a server starts without the set's folder, too.

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

/// What was found so far; each folder and each build is read once.
#[derive(Debug, Default)]
pub(crate) struct OwnSets {
    folders: Option<Arc<Sets>>,
    lists: HashMap<Choice, Arc<Catalogue>>,
}

impl Loaded {
    /// The curated patch sets, and those of `paths.patches`.
    ///
    /// # Errors
    /// One of them is broken, or has a name that is taken; the problem names file and line.
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

/// With what a build says of the sets that it was built with.
///
/// # Errors
/// A fix of it has a name that means something else by now.
pub fn with_build(list: Catalogue, build: &ProvenanceFacts) -> Result<Catalogue, warden_patches::Error> {
    let fixes = build.own.iter().map(|(set, fix)| (set.as_str(), fix));
    list.with_own(fixes, &format!("build {}", build.id))
}

/// With the fixes of sets that were read from folders.
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
    /// The list of mitigations for a model, with the fixes of its build's own sets and of those in `paths.patches`.
    ///
    /// # Errors
    /// The list of this program is broken.
    pub(super) fn list_for(&mut self, name: &str, model: &Model) -> Result<Arc<Catalogue>, String> {
        let curated = catalogue()?;
        // Whoever resolves the model reports what is wrong with the choice itself.
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

    /// The sets of `paths.patches`; what is wrong with them is told once.
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

    /// What the provenance of a chosen build says; a damaged store is told by what starts a server.
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
