//! Resolves the list of mitigations of a model, and warns of settings that work against it.

use std::collections::BTreeMap;
use std::path::Path;

use warden_patches::mitigation::{MitigationAction, MitigationCatalogue};
use warden_policies::book::ServerRun;
use warden_policies::declared_memory::{CHECKPOINTS_OPTION, CacheBounds, PROMPT_CACHE_OPTION};

use super::mitigations::{MitigatedCommand, ModelMitigations};
use super::model::ModelResolver;
use super::own_sets::OwnSets;
use super::resolver::ConfigResolver;
use crate::arguments;
use crate::machine::HostMachine;
use crate::model_files;
use crate::problem::{ConfigProblem, owned_path};
use crate::settings::ModelConfig;
use crate::source::layers::LoadedConfig;

impl ModelResolver<'_, '_> {
    /// Resolves the model's list over its own arguments and variables.
    pub(super) fn mitigations(&mut self, args: Vec<String>) -> ModelMitigations {
        let Self { name, model, .. } = *self;
        let env = model.env.clone().into_iter().collect();
        let mut all = ModelMitigations::new(model.mitigations.clone(), args, env);
        if model.runs_other_program() {
            return all;
        }
        let loaded = self.config.loaded;
        let path = owned_path(&["models", name, "mitigations"]);
        let choice = self.binary_choice();
        let list = match self.sets.list_for(self.config, name, choice) {
            Ok(list) => list,
            Err(error) => {
                self.config.problems.push(ConfigProblem::new(loaded.place(&path), error));
                return all;
            }
        };
        self.warn_about_presence(&list);
        for finding in all.resolve_effects(list, |item| loaded.item_place(&path, item)) {
            let place = loaded.item_place(&path, finding.item);
            let problem = ConfigProblem::new(place, self.message(&finding.message));
            let problem = ConfigProblem { hint: finding.hint, ..problem };
            let into = if finding.error { &mut self.config.problems } else { &mut self.config.warnings };
            into.push(problem);
        }
        let done = all.command(&[]);
        all.set_cache_bounds(self.compute_cache_bounds(&done));
        for (index, what) in &done.overruled {
            let place = all.effects()[*index].1.clone();
            let problem = ConfigProblem::new(place, self.message(what));
            self.config.warnings.push(problem.with_hint("remove one of the two"));
        }
        self.warn_about_inherited(&all, &done);
        all
    }

    /// Computes the cache bounds from the machine's memory, without those that the process inherits as
    /// variables.
    fn compute_cache_bounds(&self, command: &MitigatedCommand) -> CacheBounds {
        let machine = self.config.machine;
        let args = command.args.as_slice();
        let mut env: BTreeMap<String, String> = machine.text_vars().into_iter().collect();
        env.extend(command.env.iter().cloned());
        let own = self.model.model.as_deref();
        let file = own.or_else(|| arguments::model_path(args).map(Path::new));
        let file = file.or_else(|| env.get("LLAMA_ARG_MODEL").map(Path::new));
        let directory = self.model.directory.as_ref().map(|path| self.config.absolute(path));
        let directory = directory.as_deref().unwrap_or(&machine.cwd);
        let read = file.and_then(|file| {
            // A relative `model` is resolved in the configuration's folder, a relative `-m` in the process's.
            let path = if own.is_some() { self.config.absolute(file) } else { directory.join(file) };
            model_files::read_model_file(&path).ok()
        });
        let shape = read.as_ref().and_then(|read| read.shape.as_ref().ok());
        let run = ServerRun::from_command(args, &env);
        let mut bounds = CacheBounds::for_process(
            &self.config.loaded.settings.loading,
            machine.memory,
            shape.map(|shape| (shape, &run)),
        );
        if machine.var(PROMPT_CACHE_OPTION.variable).is_some() {
            bounds.prompt_cache_mib = None;
        }
        if machine.var(CHECKPOINTS_OPTION.variable).is_some() {
            bounds.checkpoints = None;
        }
        bounds
    }

    /// Warns of variables that act by merely being set: `GGML_CUDA_DISABLE_GRAPHS = "0"` looks like the
    /// opposite of its effect.
    fn warn_about_presence(&mut self, list: &MitigationCatalogue) {
        for entry in list.mitigations() {
            let MitigationAction::Variable { name: key, presence: true, .. } = &entry.action else {
                continue;
            };
            let given = self.model.env.get(key).map(|value| value.trim().to_lowercase());
            if given.is_some_and(|value| ["", "0", "off", "false", "no"].contains(&value.as_str())) {
                let message = format!("{key} acts by being present, whatever its value: {}", entry.title);
                let hint = format!(
                    "remove it from `env`; `mitigations = [\"{}\"]` says it without the trap",
                    entry.id
                );
                self.warn(&["env", key], &message, hint);
            }
        }
    }

    fn warn_about_inherited(&mut self, all: &ModelMitigations, done: &MitigatedCommand) {
        for (effect, place) in all.effects() {
            for (key, value) in effect.set.iter().filter(|pair| done.env.contains(pair)) {
                let own = self.config.machine.var(key).map(|own| own.to_string_lossy());
                let Some(own) = own.filter(|own| own != value.as_str()) else { continue };
                let message = self.message(&format!(
                    "our own environment has {key}={own}; the process gets {value} from mitigation {}",
                    effect.name
                ));
                self.config.warnings.push(ConfigProblem::new(place.clone(), message));
            }
        }
    }
}

/// Describes the effects and the errors of a model's list of mitigations, for `config show`.
pub(crate) fn explain_mitigations(
    loaded: &LoadedConfig,
    machine: &HostMachine,
    name: &str,
    model: &ModelConfig,
) -> Vec<String> {
    if model.mitigations.is_empty() {
        return Vec::new();
    }
    let mut config = ConfigResolver::new(loaded, machine);
    let mut one = ModelResolver { config: &mut config, sets: &mut OwnSets::default(), name, model };
    let all = one.mitigations(model.args.clone());
    let wrong = config.problems.iter().map(|problem| format!("error: {}", problem.message));
    all.describe_effects().into_iter().chain(wrong).collect()
}
