//! `mitigations = ["graph-cache-cap=64", …]` of a model: the arguments and variables that result, and a check
//! that the model's llama-server supports them.
//!
//! The operator's own `args` and `env` override a mitigation, with a warning. A mitigation overrides
//! variables that the process would inherit from llama-warden.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use warden_patches::mitigation::{
    BuildFacts, BuildNeed, MitigationAction, MitigationCatalogue, MitigationEffect, MitigationFinding,
    MitigationFit,
};
use warden_policies::declared_memory::{CacheBounds, CacheOption};
use warden_policies::server_flags::FlagList;

use crate::arguments;
use crate::problem::{ConfigPlace, ConfigProblem};

/// Returns the compiled-in list of mitigations. The list for a model, [`ModelMitigations::available`], also
/// contains the fixes of the user's own patch sets.
///
/// # Errors
/// The compiled-in list is broken.
pub fn catalogue() -> Result<Arc<MitigationCatalogue>, String> {
    static ALL: LazyLock<Result<Arc<MitigationCatalogue>, String>> =
        LazyLock::new(|| MitigationCatalogue::embedded().map(Arc::new).map_err(|error| error.to_string()));
    ALL.clone()
}

/// Resolved mitigations of a model, before they are checked against its llama-server.
#[derive(Clone, Debug, Default)]
pub struct ModelMitigations {
    list: Vec<String>,
    args: Vec<String>,
    env: Vec<(String, String)>,
    effects: Vec<(MitigationEffect, ConfigPlace)>,
    /// Mitigations to choose from; `None` for the compiled-in list.
    known: Option<Arc<MitigationCatalogue>>,
    /// Bounds of caches that apply unless the operator or a mitigation sets them.
    cache_bounds: CacheBounds,
}

/// Arguments and variables of a command with mitigations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MitigatedCommand {
    /// Words of the command line.
    pub args: Vec<String>,
    /// Variables to set.
    pub env: Vec<(String, String)>,
    /// Variables to remove.
    pub env_remove: Vec<String>,
    /// Effects that the operator's settings override: index and note.
    pub(super) overruled: Vec<(usize, String)>,
    /// Number of first words in `args` that the operator configured.
    own_words: usize,
}

impl MitigatedCommand {
    /// Spells the added flags like a llama-server that lists `flags`; keeps the operator's words.
    pub(crate) fn respelled(mut self, flags: Option<&FlagList>) -> Self {
        if let Some(flags) = flags {
            let ours = self.args.split_off(self.own_words);
            self.args.extend(flags.translate(&ours).words);
        }
        self
    }
}

impl ModelMitigations {
    /// The list as written.
    pub fn list(&self) -> &[String] {
        &self.list
    }

    /// The operator's own arguments and variables, with the mitigations that the operator lists.
    pub(super) fn new(list: Vec<String>, args: Vec<String>, env: Vec<(String, String)>) -> Self {
        Self { list, args, env, ..Self::default() }
    }

    /// Resolves the list of mitigations, of which `known` are available.
    pub(super) fn resolve_effects(
        &mut self,
        known: Arc<MitigationCatalogue>,
        place: impl Fn(usize) -> ConfigPlace,
    ) -> Vec<MitigationFinding> {
        let done = known.resolve(&self.list);
        self.known = Some(known);
        let with_place = |effect: MitigationEffect| {
            let place = place(effect.item);
            (effect, place)
        };
        self.effects = done.effects.into_iter().map(with_place).collect();
        done.findings
    }

    /// Resolves another list of mitigations over the same arguments and variables; also returns notes about
    /// it. The error says why the list is wrong.
    pub(crate) fn with_list(&self, list: &[String]) -> Result<(Self, Vec<String>), String> {
        let mut all = Self::new(list.to_vec(), self.args.clone(), self.env.clone());
        all.cache_bounds = self.cache_bounds;
        let findings = all.resolve_effects(self.available()?, |_| ConfigPlace::Nowhere);
        let (wrong, notes): (Vec<_>, Vec<_>) = findings.into_iter().partition(|finding| finding.error);
        if let Some(wrong) = wrong.into_iter().next() {
            return Err(match wrong.hint {
                Some(hint) => format!("{}: {hint}", wrong.message),
                None => wrong.message,
            });
        }
        let overruled = all.command(&[]).overruled.into_iter().map(|(_, what)| what);
        let notes = notes.into_iter().map(|note| note.message).chain(overruled).collect();
        Ok((all, notes))
    }

    /// Mitigations that this model may use.
    ///
    /// # Errors
    /// The compiled-in list is broken (see [`catalogue`]).
    pub fn available(&self) -> Result<Arc<MitigationCatalogue>, String> {
        self.known.clone().map_or_else(catalogue, Ok)
    }

    /// Returns the items as written; an item of the user's own patch set is shown with the set's name.
    pub fn display_items(&self) -> Vec<String> {
        let own = |item: usize| {
            let found = self.effects.iter().find(|(effect, _)| effect.item == item);
            let entry = found.map(|(effect, _)| &effect.mitigation).filter(|entry| entry.own.is_some())?;
            let MitigationAction::Patch { set, .. } = &entry.action else { return None };
            Some(format!(" (your set {set})"))
        };
        let items = self.list.iter().enumerate();
        items.map(|(item, text)| format!("{text}{}", own(item).unwrap_or_default())).collect()
    }

    /// The operator's own arguments and variables, without mitigations.
    pub(crate) fn unmitigated(&self) -> (&[String], &[(String, String)]) {
        (&self.args, &self.env)
    }

    /// Returns the flags that each mitigation adds, as spelled in the list: source, name and words.
    pub(crate) fn given_flags(&self) -> impl Iterator<Item = (&ConfigPlace, &str, &[String])> {
        self.effects.iter().flat_map(|(effect, place)| {
            effect.flags.iter().map(move |flag| (place, effect.name.as_str(), flag.words.as_slice()))
        })
    }

    pub(super) fn effects(&self) -> &[(MitigationEffect, ConfigPlace)] {
        &self.effects
    }

    /// Returns the ids of all mitigations that have an effect.
    pub fn ids(&self) -> Vec<String> {
        self.effects.iter().map(|(effect, _)| effect.mitigation.id.clone()).collect()
    }

    /// Returns the command with all effects except those whose index is in `leave_out`.
    pub fn command(&self, leave_out: &[usize]) -> MitigatedCommand {
        let mut done = MitigatedCommand {
            args: self.args.clone(),
            env: self.env.clone(),
            own_words: self.args.len(),
            ..MitigatedCommand::default()
        };
        for (index, (effect, _)) in self.effects.iter().enumerate() {
            if !leave_out.contains(&index) {
                self.apply(index, effect, &mut done);
            }
        }
        done
    }

    /// Returns the variables of the cache bounds that neither the operator nor a mitigation has set. The
    /// variables are no part of the command: a machine with other memory, or another version of llama-warden,
    /// must not replace a process.
    pub fn applied_cache_bounds(&self) -> Vec<(String, String)> {
        let done = self.command(&[]);
        let is_unset = |option: &CacheOption| {
            let names: Vec<String> = option.flags.iter().map(|&flag| flag.to_owned()).collect();
            arguments::find_given(&done.args, &names, &[]).is_none()
                && done.env.iter().all(|(name, _)| name != option.variable)
        };
        let unset = self.cache_bounds.settings().filter(|(option, _)| is_unset(option));
        unset.map(|(option, value)| (option.variable.to_owned(), value)).collect()
    }

    pub(super) fn set_cache_bounds(&mut self, bounds: CacheBounds) {
        self.cache_bounds = bounds;
    }

    fn apply(&self, index: usize, effect: &MitigationEffect, done: &mut MitigatedCommand) {
        let own = |name: &String| self.env.iter().find(|(key, _)| key == name).map(|(_, value)| value);
        let name = &effect.name;
        let mut overruled =
            |what: String| done.overruled.push((index, format!("{what}, which wins over mitigation {name}")));
        for (key, value) in &effect.set {
            let presence =
                matches!(effect.mitigation.action, MitigationAction::Variable { presence: true, .. });
            match own(key) {
                None => done.env.push((key.clone(), value.clone())),
                Some(given) if given == value || presence => {}
                Some(given) => overruled(format!("`env` sets {key} to `{given}`")),
            }
        }
        for key in &effect.unset {
            match own(key) {
                None => done.env_remove.push(key.clone()),
                Some(_) => overruled(format!("`env` sets {key}")),
            }
        }
        for flag in &effect.flags {
            let words: Vec<&str> = flag.words.iter().map(String::as_str).collect();
            if let Some((given, same)) = arguments::find_given(&self.args, &flag.names, &words) {
                if !same {
                    overruled(format!("`args` have `{given}`"));
                }
            } else if let Some(key) = flag.variables.iter().find(|key| own(key).is_some()) {
                overruled(format!("`env` sets {key}"));
            } else {
                done.args.extend(flag.words.iter().cloned());
            }
        }
        for flag in &effect.forbidden {
            if arguments::find_given(&self.args, std::slice::from_ref(flag), &[]).is_some() {
                overruled(format!("`args` have `{flag}`"));
            }
        }
    }

    /// Describes the effect of each item.
    pub fn describe_effects(&self) -> Vec<String> {
        let done = self.command(&[]);
        let mut lines = Vec::new();
        for (index, (effect, _)) in self.effects.iter().enumerate() {
            let mut parts: Vec<String> = Vec::new();
            let set = effect.set.iter().filter(|pair| done.env.contains(pair));
            parts.extend(set.map(|(key, value)| format!("sets {key}={value}")));
            let removed = effect.unset.iter().filter(|key| done.env_remove.contains(key));
            parts.extend(removed.map(|key| format!("removes {key}")));
            let rest = &done.args[self.args.len()..];
            let given = effect
                .flags
                .iter()
                .filter(|flag| rest.windows(flag.words.len()).any(|words| words == flag.words.as_slice()));
            parts.extend(given.map(|flag| format!("gives `{}`", flag.words.join(" "))));
            parts.extend(effect.need.as_ref().map(|need| match need {
                BuildNeed::Fix { set, .. } => format!("needs the patch set {set} in the build"),
                BuildNeed::Option { name, value } => format!("needs a build with -D{name}={value}"),
            }));
            let said = done.overruled.iter().filter(|(own, _)| *own == index).map(|(_, what)| what.clone());
            parts.extend(said);
            if !parts.is_empty() {
                lines.push(format!("{}: {}", effect.name, parts.join(", ")));
            }
        }
        lines
    }
}

/// Cache of checks of mitigations against llama-servers, so that each binary is searched for a fix only once.
#[derive(Debug, Default)]
pub struct MitigationChecker(HashMap<(PathBuf, String), MitigationFit>);

impl MitigationChecker {
    /// Checks a model's mitigations against its llama-server; the returned command lacks unsuitable ones.
    pub(crate) fn check(
        &mut self,
        name: &str,
        all: &ModelMitigations,
        build: &BuildFacts,
        problems: &mut Vec<ConfigProblem>,
        warnings: &mut Vec<ConfigProblem>,
    ) -> MitigatedCommand {
        let mut leave_out = Vec::new();
        for (index, (effect, place)) in all.effects.iter().enumerate() {
            let key = (build.binary.clone(), effect.name.clone());
            let fit = self.0.entry(key).or_insert_with(|| effect.fit(build)).clone();
            let problem =
                |message: String| ConfigProblem::new(place.clone(), format!("model `{name}`: {message}"));
            match fit {
                MitigationFit::Fits => {}
                MitigationFit::Note(message) => warnings.push(problem(message)),
                MitigationFit::LeftOut(message) => {
                    leave_out.push(index);
                    warnings.push(problem(message));
                }
                MitigationFit::Missing { message, hint } => problems.push(problem(message).with_hint(hint)),
            }
        }
        all.command(&leave_out)
    }
}

#[cfg(test)]
#[path = "mitigations_tests.rs"]
mod tests;
