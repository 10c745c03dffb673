//! Judges the patch sets of a build when it is planned, and applies them to the work folder when it is made.
//!
//! The sets are judged both times, and both results must be equal: the build is exactly what was planned,
//! even if the source changed in between.

use std::path::Path;

use tokio_util::sync::CancellationToken;
use warden_patches::apply::PatchTarget;
use warden_patches::{PlannedSeries, PlannedSet, SetSelection};

use crate::error::{BuilderError, Result};
use crate::plan::{BuildPlan, ComputeBackend, SourceFeatures};
use crate::source::{BuildSource, CachedTree, ExaminedSource};

/// Judges the selected sets against a source, and collects what the source offers. Blocks.
pub(super) fn judge_sets(
    selection: &SetSelection,
    backend: ComputeBackend,
    source: &BuildSource,
    found: &ExaminedSource,
    cache: &Path,
    cancel: &CancellationToken,
) -> Result<(Vec<PlannedSet>, SourceFeatures)> {
    let tree = CachedTree::new(source, found, cache, cancel);
    let planned = PlannedSeries::judge(selection, backend.name(), &tree)?.sets;
    Ok((planned, SourceFeatures::inspect(&tree, &found.server)?))
}

/// Applies the plan's sets to the tree at `root`, as `patches apply` does: all of them, or none and an
/// error. Blocks.
pub(super) fn apply_sets(selection: &SetSelection, plan: &BuildPlan, root: &Path) -> Result<usize> {
    let mut target = PatchTarget::open(root, plan.source.revision.clone())?;
    let planned = PlannedSeries::judge(selection, plan.recipe.backend.name(), &target.original()?)?;
    if planned.sets != plan.patches {
        return Err(BuilderError::SourceChanged { path: plan.source.given.clone() });
    }
    target.apply(&planned.series)?;
    Ok(planned.series.edits.0.len())
}
