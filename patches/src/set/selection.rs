//! Selects the sets for a build.

use super::PatchSet;
use super::catalogue::SetCatalogue;
use crate::error::Result;
use crate::prove::ProofRecords;

/// Selected sets for a build, and the strictness of their application.
#[derive(Clone, Debug, Default)]
pub struct SetSelection {
    /// Available sets.
    pub catalogue: SetCatalogue,
    /// Selected sets.
    pub sets: SelectedSets,
    /// Sets with an unknown seam are applied nevertheless.
    pub allow_unverified: bool,
    /// Records of this machine.
    pub proofs: ProofRecords,
}

/// Selected sets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SelectedSets {
    /// All sets for the backend.
    #[default]
    Default,
    /// No set: unpatched upstream.
    None,
    /// Only the sets with these ids, for any backend.
    Only(Vec<String>),
}

impl SetSelection {
    /// The sets for a build with this backend, such as `cuda`, in the catalogue's order.
    ///
    /// # Errors
    ///
    /// Fails if a named set does not exist.
    pub(crate) fn sets_for(&self, backend: &str) -> Result<Vec<&PatchSet>> {
        match &self.sets {
            SelectedSets::Default => {
                Ok(self.catalogue.sets().iter().filter(|set| set.is_for(backend)).collect())
            }
            SelectedSets::None => Ok(Vec::new()),
            SelectedSets::Only(ids) => {
                for id in ids {
                    self.catalogue.require(id)?;
                }
                Ok(self.catalogue.sets().iter().filter(|set| ids.contains(&set.id)).collect())
            }
        }
    }
}
