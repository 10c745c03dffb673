//! Judges the patch sets of a build when it is planned, and applies them to the work folder when it is made.
//!
//! The sets are judged both times, and both results must be equal: the build is exactly what was planned,
//! even if the source changed in between.

use std::path::Path;

use tokio_util::sync::CancellationToken;
use warden_patches::apply::Target;
use warden_patches::{Planned, PlannedSet, Selection};

use crate::error::{Error, Result};
use crate::plan::{Backend, Offers, Plan};
use crate::source::{Found, Remembered, Source};

/// Judges the selected sets against a source, and collects what the source offers. Blocks.
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

/// Applies the plan's sets to the tree at `root`, as `patches apply` does: all of them, or none and an
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
