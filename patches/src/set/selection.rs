//! Selects the sets for a build.

use super::PatchSet;
use super::catalogue::Catalogue;
use crate::error::Result;
use crate::prove::Proofs;

/// Selected sets for a build, and the strictness of their application.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Available sets.
    pub catalogue: Catalogue,
    /// Selected sets.
    pub sets: Sets,
    /// Sets with an unknown seam are applied nevertheless.
    pub allow_unverified: bool,
    /// Records of this machine.
    pub proofs: Proofs,
}

/// Selected sets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Sets {
    /// All sets for the backend.
    #[default]
    Default,
    /// No set: unpatched upstream.
    None,
    /// These sets by id, for any backend.
    Only(Vec<String>),
}

impl Selection {
    /// The sets for a build with this backend, such as `cuda`, in the catalogue's order.
    ///
    /// # Errors
    ///
    /// Fails if a named set does not exist.
    pub(crate) fn sets_for(&self, backend: &str) -> Result<Vec<&PatchSet>> {
        match &self.sets {
            Sets::Default => Ok(self.catalogue.sets().iter().filter(|set| set.is_for(backend)).collect()),
            Sets::None => Ok(Vec::new()),
            Sets::Only(ids) => {
                for id in ids {
                    self.catalogue.require(id)?;
                }
                Ok(self.catalogue.sets().iter().filter(|set| ids.contains(&set.id)).collect())
            }
        }
    }
}
