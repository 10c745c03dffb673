//! Rules about groups of models that are never loaded together.

use std::collections::BTreeMap;

use super::{ConfigSummary, ModelSummary, RuleFinding};
use crate::problem::{quoted_key, similarity};

/// Least similarity of two group names at which one of them may be a typing error.
const MIN_TYPO_SIMILARITY: f64 = 0.8;

fn groups<'a>(whole: &'a ConfigSummary<'a>) -> BTreeMap<&'a str, Vec<&'a ModelSummary<'a>>> {
    let mut all: BTreeMap<&str, Vec<&ModelSummary<'_>>> = BTreeMap::new();
    for one in &whole.models {
        for group in &one.model.groups {
            all.entry(group).or_default().push(one);
        }
    }
    all
}

/// Finds groups with a single model: they exclude nothing, and their name may be a typing error.
pub(super) fn groups_of_one(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let all = groups(whole);
    let alone = all.iter().filter_map(|(name, members)| match members.as_slice() {
        [one] => Some((*name, *one)),
        _ => None,
    });
    let found = alone.map(|(name, one)| {
        let message = format!("no other model is in the group {}, so it excludes no model", quoted_key(name));
        let others = all.keys().filter(|other| **other != name);
        let like = others.max_by(|a, b| similarity(a, name).total_cmp(&similarity(b, name)));
        let hint = match like.filter(|like| similarity(like, name) > MIN_TYPO_SIMILARITY) {
            Some(like) => format!("is `{like}` meant?"),
            None => "name it in the other models' `groups`, too, or leave it out".to_owned(),
        };
        one.finding(&["groups"], &message, hint)
    });
    found.collect()
}

/// Finds groups with a pinned model: it is never unloaded, so the others can never be loaded after it.
pub(super) fn groups_closed_by_pin(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let all = groups(whole);
    let found = all.iter().filter(|(_, members)| members.len() > 1).filter_map(|(name, members)| {
        let pins: Vec<&&ModelSummary<'_>> = members.iter().filter(|one| one.model.run.pin).collect();
        let pin = pins.first()?;
        let message = format!(
            "it is pinned, and at most one model of the group {} is loaded: once it is, the others never are",
            quoted_key(name)
        );
        let found = pin.finding(&["pin"], &message, "take `pin` from it, or take it out of the group");
        Some(if pins.len() > 1 { found.fatal() } else { found })
    });
    found.collect()
}

/// Reports if more models are pinned than may be loaded.
pub(super) fn pins_above_max_loaded(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let most = whole.settings.loading.max_loaded;
    let pins = whole.models.iter().filter(|one| one.model.run.pin).count();
    if most == 0 || pins <= usize::try_from(most).unwrap_or(usize::MAX) {
        return Vec::new();
    }
    let message = format!(
        "{pins} models are pinned, and `loading.max_loaded` is {most}: the last of them are never loaded"
    );
    vec![RuleFinding::new(&["loading", "max_loaded"], message, "raise it, or pin fewer models").fatal()]
}
