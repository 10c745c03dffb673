//! The sets that there are: those that are part of this program, and the user's own.

use std::path::Path;

use super::{Fix, PatchSet};
use crate::error::{Error, Result};

/// The sets that there are. Set ids are unique in it, and fix ids too.
#[derive(Clone, Debug, Default)]
pub struct Catalogue {
    sets: Vec<PatchSet>,
}

impl Catalogue {
    /// The curated sets, sorted by id.
    ///
    /// # Errors
    ///
    /// A curated set is broken, which the tests of this crate rule out.
    pub fn embedded() -> Result<Self> {
        Ok(Self::default())
    }

    /// With the user's own: `folder` is one set or a folder of sets.
    ///
    /// # Errors
    ///
    /// A set is broken, there is none, or an id is taken.
    pub fn with_folder(self, _folder: &Path) -> Result<Self> {
        Ok(self)
    }

    /// All sets, the curated ones first.
    pub fn sets(&self) -> &[PatchSet] {
        &self.sets
    }

    /// The set of this id.
    pub fn set(&self, id: &str) -> Option<&PatchSet> {
        self.sets.iter().find(|set| set.id == id)
    }

    /// The fix of this id with the set that it belongs to.
    pub fn fix(&self, id: &str) -> Option<(&PatchSet, &Fix)> {
        self.sets.iter().find_map(|set| set.fix(id).map(|fix| (set, fix)))
    }

    /// The set of this id.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn require(&self, id: &str) -> Result<&PatchSet> {
        self.set(id).ok_or_else(|| Error::NoSuchPatchSet {
            id: id.to_owned(),
            known: self.sets.iter().map(|set| set.id.clone()).collect(),
        })
    }
}
