//! Switches to try if a model's llama-server dies while it loads: mitigations that the binary supports and
//! the command line does not contain yet, in the order in which they are tried.

use warden_patches::mitigation::{
    BuildFacts, MitigationAction, MitigationCatalogue, MitigationEffect, MitigationFit,
};
use warden_policies::server_flags::FlagList;
use warden_policies::start_search::{StartSwitch, configuration_line};

use super::mitigations::ModelMitigations;
use crate::arguments;

/// More layers than the largest models have: this number and larger ones mean all layers.
const ALL_LAYERS: u64 = 99;
/// Types of the V cache that do not need flash attention.
const UNQUANTISED_CACHE_TYPES: [&str; 3] = ["f16", "f32", "bf16"];

/// Finds the switches. `flags` are those that the binary lists; if unknown, no flag is offered. `typed`:
/// the model comes from llama-server's command line instead of a file.
pub(super) fn find_switches(
    model: &str,
    mitigations: &ModelMitigations,
    build: &BuildFacts,
    flags: Option<&FlagList>,
    typed: bool,
) -> Vec<StartSwitch> {
    let Ok(list) = mitigations.available() else { return Vec::new() };
    let (args, env) = mitigations.unmitigated();
    let offer = |item: String| {
        let effect = list.resolve(std::slice::from_ref(&item)).effects.into_iter().next()?;
        if mitigations.ids().contains(&effect.mitigation.id) {
            return None;
        }
        let switch = offer_switch(&list, &effect, item, args, env, build, flags)?;
        let configured = mitigations.list();
        let overruled = Some(switch.line.as_str()).filter(|words| !words.is_empty());
        let line = configuration_line(model, &switch.item, configured, overruled, &switch.words(), typed);
        Some(StartSwitch { line, ..switch })
    };
    let mut switches: Vec<StartSwitch> = candidate_items(&list, args).into_iter().filter_map(offer).collect();
    // Free spare capacity: a vector reserves four entries, and most models have one.
    switches.shrink_to_fit();
    switches
}

/// Returns the items to try. If the number of GPU layers is given, half of them is tried before none.
fn candidate_items(list: &MitigationCatalogue, args: &[String]) -> Vec<String> {
    let half = |item: &String| {
        if item != "gpu-layers=0" {
            return None;
        }
        let names = ["--gpu-layers", "--n-gpu-layers", "-ngl"].map(str::to_owned);
        let (given, _) = arguments::find_given(args, &names, &[])?;
        let layers: u64 = given.split(' ').next_back()?.parse().ok()?;
        (2..ALL_LAYERS).contains(&layers).then(|| format!("gpu-layers={}", layers / 2))
    };
    list.start_items().iter().flat_map(|item| half(item).into_iter().chain([item.clone()])).collect()
}

/// Returns the switch for an effect, if it applies; `line` names words of `args` that it overrides.
fn offer_switch(
    list: &MitigationCatalogue,
    effect: &MitigationEffect,
    item: String,
    args: &[String],
    env: &[(String, String)],
    build: &BuildFacts,
    flags: Option<&FlagList>,
) -> Option<StartSwitch> {
    // Trust the flags of the binary more than a note about its build number.
    if matches!(effect.fit(build), MitigationFit::LeftOut(_) | MitigationFit::Missing { .. }) {
        return None;
    }
    let entry = list.mitigation(&effect.mitigation.id)?;
    let mut switch = StartSwitch {
        item,
        needs_gpu: !entry.backends.is_empty() && build.provenance.is_none(),
        cost: entry.cost.clone(),
        ..StartSwitch::default()
    };
    let variable = |name: &String| env.iter().any(|(own, _)| own == name);
    match &entry.action {
        MitigationAction::Variable { .. } => {
            switch.env = effect.set.iter().filter(|(name, _)| !variable(name)).cloned().collect();
        }
        MitigationAction::Flags { .. } => {
            let known = flags?;
            for flag in &effect.flags {
                let words = known.translate(&flag.words).words;
                let name = words.first()?;
                let value = words.get(1);
                if !known.knows(name) || value.is_some_and(|value| !known.takes(name, value)) {
                    return None;
                }
                let given: Vec<&str> = flag.words.iter().map(String::as_str).collect();
                match arguments::find_given(args, &flag.names, &given) {
                    Some((_, true)) => return None,
                    // The effect is already given under another name, such as `-lm none` for `--no-mmap`.
                    Some((given, false))
                        if value.is_some() && given.split(' ').nth(1) == value.map(String::as_str) =>
                    {
                        return None;
                    }
                    // For a trial, appending suffices, because the last word counts; `line` names the word
                    // that must be changed in the configuration.
                    Some((overruled, false)) => switch.line = overruled,
                    None if flag.variables.iter().any(variable) => return None,
                    None => {}
                }
                switch.args.extend(words);
            }
            if entry.id == "no-flash-attention" && has_quantised_v_cache(args) {
                return None;
            }
        }
        MitigationAction::Patch { .. }
        | MitigationAction::Unset { .. }
        | MitigationAction::BuildOption { .. } => return None,
    }
    (!switch.args.is_empty() || !switch.env.is_empty()).then_some(switch)
}

/// A quantised V cache needs flash attention; without it, the server would not start.
fn has_quantised_v_cache(args: &[String]) -> bool {
    let names = ["--cache-type-v", "-ctv"].map(str::to_owned);
    let given = arguments::find_given(args, &names, &[]);
    given.is_some_and(|(words, _)| {
        words.split(' ').nth(1).is_some_and(|kind| !UNQUANTISED_CACHE_TYPES.contains(&kind))
    })
}

#[cfg(test)]
#[path = "start_switches_tests.rs"]
mod tests;
