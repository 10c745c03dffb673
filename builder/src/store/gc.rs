//! Which builds go when the store is to be made smaller.

use super::{BuildId, Store};
use crate::error::Result;

/// What stays.
#[derive(Clone, Debug, Default)]
pub struct Keep {
    /// This many of the newest.
    pub newest: usize,
    /// These, whatever their age: what the configuration names and what runs now.
    pub ids: Vec<BuildId>,
}

impl Store {
    /// The builds that [`Self::gc`] would remove, newest first. Damaged and foreign folders are never among them.
    pub fn superfluous(&self, keep: &Keep) -> Result<Vec<BuildId>> {
        let builds = self.list()?.builds.into_iter().map(|build| build.id);
        Ok(builds.skip(keep.newest).filter(|id| !keep.ids.contains(id)).collect())
    }

    /// Removes what is superfluous and says which that was.
    pub fn gc(&self, keep: &Keep) -> Result<Vec<BuildId>> {
        let ids = self.superfluous(keep)?;
        ids.iter().try_for_each(|id| self.remove(id))?;
        Ok(ids)
    }
}
