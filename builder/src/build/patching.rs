//! The patch sets of a build: judged when it is planned, and written into its work folder when it is made.
//!
//! Both times the sets are judged anew, and the second result has to be the first one: so what is built is what was
//! planned, whatever happened to the source in between.

use std::path::Path;

use tokio_util::sync::CancellationToken;
use warden_patches::apply::Target;
use warden_patches::{Planned, PlannedSet, Selection};

use crate::error::{Error, Result};
use crate::plan::{Backend, Offers, Plan};
use crate::source::{Found, Remembered, Source};

/// Judges the sets of a selection in a source, and looks what it offers. Blocks.
pub(super) fn judge(
    selection: &Selection,
    backend: Backend,
    source: &Source,
    found: &Found,
    cache: &Path,
    cancel: &CancellationToken,
) -> Result<(Vec<PlannedSet>, Offers)> {
    let tree = Remembered::new(source, found, cache, cancel);
    let planned = Planned::judge(selection, backend.name(), &tree)?.sets;
    Ok((planned, Offers::of(&tree, &found.server)?))
}

/// Writes the changes of the plan's sets into the tree at `root`, as `patches apply` does: all of them, or none and an
/// error. Blocks.
pub(super) fn apply(selection: &Selection, plan: &Plan, root: &Path) -> Result<usize> {
    let mut target = Target::open(root, plan.source.revision.clone())?;
    let planned = Planned::judge(selection, plan.recipe.backend.name(), &target.original()?)?;
    if planned.sets != plan.patches {
        return Err(Error::SourceChanged { path: plan.source.given.clone() });
    }
    target.apply(&planned.series)?;
    Ok(planned.series.edits.0.len())
}
