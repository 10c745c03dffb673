//! Describes builds of llama-server in the words of a table. Pure.

use warden_builder::{BuildChoices, BuildId, Provenance};
use warden_patches::PatchStatus;
use warden_policies::ByteSize;

/// Returns the cells of a build: id, time, revision, backend, architecture, fixes, verification, size.
pub fn build_cells(build: &Provenance) -> Vec<String> {
    let recipe = &build.plan.recipe;
    vec![
        build.id.to_string(),
        build.built_at.clone(),
        build.plan.source.revision.to_string(),
        recipe.backend.to_string(),
        recipe.arch(),
        fixes_label(build),
        verification_label(build).to_owned(),
        ByteSize(build.bytes()).to_string(),
    ]
}

/// Describes a build's role as the default: in use, rejected, or was in use; else says that it is bundled.
pub fn default_state(
    id: &BuildId,
    in_use: Option<&BuildId>,
    choices: &BuildChoices,
    bundled: bool,
) -> &'static str {
    if in_use == Some(id) {
        if bundled { "in use, bundled" } else { "in use" }
    } else if choices.rejected(id).is_some() {
        "rejected"
    } else if choices.chosen.iter().any(|one| one.build == *id) {
        "was in use"
    } else if bundled {
        "bundled"
    } else {
        ""
    }
}

/// Marks sets that were verified only on the machine that built them, or not at all.
fn fixes_label(build: &Provenance) -> String {
    if build.fixes().is_empty() {
        return "none".to_owned();
    }
    let applied = build.plan.patches.iter().filter(|set| set.is_applied());
    let doubtful = applied.filter_map(|set| match set.status {
        PatchStatus::LocallyVerified => Some(format!("{} locally verified", set.set)),
        PatchStatus::Unverified => Some(format!("{} not verified", set.set)),
        _ => None,
    });
    let doubtful: Vec<String> = doubtful.collect();
    let told = if doubtful.is_empty() { String::new() } else { format!(" ({})", doubtful.join(", ")) };
    format!("{}{told}", build.fixes().join(","))
}

/// Says whether verification computed with quantised weights. Builds made before that check existed
/// computed only f32.
fn verification_label(build: &Provenance) -> &'static str {
    if build.verified.computed.is_some() { "computed" } else { "not computed" }
}
