//! Which sets a build takes.

use super::PatchSet;
use super::catalogue::Catalogue;
use crate::error::Result;
use crate::prove::Proofs;

/// Which sets a build takes, and how strictly.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// The sets that there are.
    pub catalogue: Catalogue,
    /// Those that are meant.
    pub sets: Sets,
    /// Whether a set with an unknown seam is applied all the same.
    pub allow_unverified: bool,
    /// What was shown on this machine.
    pub proofs: Proofs,
}

/// Which sets are meant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Sets {
    /// Every one that is for the backend.
    #[default]
    Default,
    /// None: plain upstream.
    None,
    /// These, by id, whatever the backend.
    Only(Vec<String>),
}

impl Selection {
    /// The sets for a build for this backend, such as `cuda`, in the catalogue's order.
    ///
    /// # Errors
    ///
    /// A set that is named does not exist.
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
