//! Resolves names without a process of their own, and references to models.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use warden_gateway::{ModelRules, RequestRules, VirtualName};
use warden_policies::ModelName;
use warden_supervisor::spec::RemoteSpec;

use super::resolved::ResolvedModel;
use super::resolver::ConfigResolver;
use super::rules::{PROMPT_PARAMETERS, TOKEN_LIMIT_PARAMETERS};
use crate::settings::ModelConfig;

impl ConfigResolver<'_> {
    /// Resolves the names for the gateway. `models` are in the order of the configuration, and `remote_rules`
    /// are those of each remote model.
    pub(super) fn resolve_names(
        &mut self,
        models: &[ResolvedModel],
        remotes: &[RemoteSpec],
        remote_rules: &[Arc<ModelRules>],
    ) -> BTreeMap<String, VirtualName> {
        let loaded = self.loaded;
        let here =
            loaded.models.iter().map(|(name, ..)| name.as_str()).zip(models.iter().map(|one| &one.rules));
        let there = remotes.iter().map(|spec| spec.name.as_str()).zip(remote_rules);
        let rules: Vec<(&str, &Arc<ModelRules>)> = here.chain(there).collect();
        let mut all = BTreeMap::new();
        for (name, named) in &loaded.settings.names {
            let key = ["names", name];
            let taken = loaded.models.iter().find(|(model, own)| model == name || own.aliases.contains(name));
            let of_remotes = remotes
                .iter()
                .find(|spec| spec.name.as_str() == name || spec.aliases.contains(name))
                .map(|spec| spec.name.as_str());
            let taken = taken.map(|(model, ..)| model.as_str()).or(of_remotes);
            // Allow an entry for a model's own name: it changes requests to that name, not to its aliases.
            let is_own = taken == Some(name) && named.models.iter().eq([name]);
            if let Some(model) = taken
                && !is_own
            {
                let message = format!("`names.{name}`: the name is used by model `{model}`, too");
                self.report(&key, message, "every name must be unique");
            }
            if name.is_empty() || named.models.is_empty() {
                let message = format!("`names.{name}`: a name must not be empty, and needs a model");
                self.report(&key, message, "name the models in `models`, the best first");
            }
            let own = self.request_rules(&key, &named.request);
            let mut models: Vec<(ModelName, Arc<ModelRules>)> = Vec::new();
            for model in &named.models {
                let Some((_, rules)) = rules.iter().find(|(known, _)| *known == model) else {
                    self.report_unknown_model(&["names", name, "models"], model, "the name means the others");
                    continue;
                };
                let request = merge_rules(&rules.request, &own);
                models.push((ModelName::new(model), Arc::new(ModelRules { request, ..(***rules).clone() })));
            }
            if !models.is_empty() {
                all.insert(name.clone(), VirtualName { models, choose: named.choose });
            }
        }
        all
    }

    /// Models that are loaded together with a model (`with`).
    pub(super) fn loaded_with(&mut self, name: &str, model: &ModelConfig) -> Vec<ModelName> {
        let loaded = self.loaded;
        let key = ["models", name, "with"];
        let mut all = Vec::new();
        for other in &model.with {
            let (message, hint) = match loaded.models.iter().find(|(known, ..)| known == other) {
                Some(_) if other == name => ("it names the model itself".to_owned(), "leave it out"),
                Some((_, known)) if known.groups.iter().any(|group| model.groups.contains(group)) => (
                    format!("`{other}` is in the same group, so the two are never loaded at a time"),
                    "take one of them out of the group, or leave it out here",
                ),
                Some(_) => {
                    all.push(ModelName::new(other));
                    continue;
                }
                None if loaded.settings.remotes.contains_key(other) => {
                    (format!("`{other}` is served by an endpoint: there is nothing to load"), "leave it out")
                }
                None => {
                    self.report_unknown_model(&key, other, "the model is loaded without it");
                    continue;
                }
            };
            self.report(&key, format!("`models.{name}.with`: {message}"), hint);
        }
        all
    }

    /// Reports an unknown model; with folders of models, warns and describes the effect with `meanwhile`.
    fn report_unknown_model(&mut self, key: &[&str], model: &str, meanwhile: &str) {
        let loaded = self.loaded;
        let message = format!("`{}`: there is no model `{model}`", key.join("."));
        if loaded.folders.is_empty() {
            let known = loaded.models.iter().map(|(known, ..)| known).chain(loaded.settings.remotes.keys());
            let known: Vec<_> = known.map(|known| format!("`{known}`")).collect();
            self.report(key, message, format!("the models are {}", known.join(", ")));
        } else {
            let hint = format!("it is added when its file appears; until then {meanwhile}");
            self.warn(key, message, hint);
        }
    }
}

/// Merges rules: those of the name replace the model's for the same parameter.
fn merge_rules(model: &RequestRules, own: &RequestRules) -> RequestRules {
    let named: BTreeSet<&str> = own
        .set
        .iter()
        .chain(&own.default)
        .map(|(named, _)| named)
        .chain(&own.strip)
        .map(String::as_str)
        .collect();
    let says = |key: &String| {
        named.contains(key.as_str())
            || own.max_tokens.is_some() && TOKEN_LIMIT_PARAMETERS.contains(&key.as_str())
            || own.system_prompt.is_some() && PROMPT_PARAMETERS.contains(&key.as_str())
    };
    let rest = |all: &[(String, serde_json::Value)], more: &[(String, serde_json::Value)]| {
        all.iter().filter(|(key, _)| !says(key)).chain(more).cloned().collect()
    };
    let mut system_prompt = own.system_prompt.clone();
    if system_prompt.is_none() && !PROMPT_PARAMETERS.iter().any(|key| named.contains(key)) {
        system_prompt.clone_from(&model.system_prompt);
    }
    let mut max_tokens = own.max_tokens;
    if max_tokens.is_none() && !TOKEN_LIMIT_PARAMETERS.iter().any(|key| named.contains(key)) {
        max_tokens = model.max_tokens;
    }
    RequestRules {
        set: rest(&model.set, &own.set),
        default: rest(&model.default, &own.default),
        strip: model.strip.iter().filter(|key| !says(key)).chain(&own.strip).cloned().collect(),
        system_prompt,
        max_tokens,
        fresh_seed: own.fresh_seed || model.fresh_seed,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use warden_gateway::{SystemMode, SystemPrompt};

    use super::*;

    #[test]
    fn what_a_name_says_of_a_parameter_is_all_that_is_said_of_it() {
        let pairs =
            |all: &[(&str, i32)]| all.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
        let model = RequestRules {
            set: pairs(&[("a", 1), ("b", 1)]),
            default: pairs(&[("c", 1)]),
            strip: vec!["d".to_owned()],
            max_tokens: Some(10),
            ..RequestRules::default()
        };
        let own = RequestRules {
            default: pairs(&[("a", 2), ("d", 2)]),
            strip: vec!["c".to_owned()],
            fresh_seed: true,
            ..RequestRules::default()
        };
        let both = merge_rules(&model, &own);
        assert_eq!(both.set, pairs(&[("b", 1)]));
        assert_eq!(both.default, pairs(&[("a", 2), ("d", 2)]));
        assert_eq!((both.strip, both.max_tokens, both.fresh_seed), (vec!["c".to_owned()], Some(10), true));
        assert_eq!(merge_rules(&model, &RequestRules::default()), model);
        // A limit and a prompt can be written in several ways.
        let prompt = |text: &str| Some(SystemPrompt { text: text.to_owned(), mode: SystemMode::Replace });
        let model = RequestRules {
            set: pairs(&[("n_predict", 4096), ("instructions", 1)]),
            strip: vec!["system".to_owned()],
            ..RequestRules::default()
        };
        let own =
            RequestRules { max_tokens: Some(200), system_prompt: prompt("own"), ..RequestRules::default() };
        assert_eq!(merge_rules(&model, &own), own);
        let both = merge_rules(&own, &model);
        assert_eq!((both.max_tokens, both.system_prompt, both.set), (None, None, model.set));
    }
}
