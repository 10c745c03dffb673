//! Rules that find settings which are valid by themselves but contradict each other.
//!
//! A rule inspects the whole configuration and reports findings, with the numbers and the keys to change.
//! Impossible settings are errors that prevent the start; doubtful settings are warnings. The rules read no
//! files and no clock.

mod budgets;
mod limits;
#[cfg(test)]
mod tests;
mod times;

use std::collections::BTreeMap;

use warden_policies::ByteSize;
use warden_policies::declared_memory::DeclaredMemory;
use warden_supervisor::spec::SharedSpec;

use self::ContradictionRule::{Model, Whole};
use super::resolver::ConfigResolver;
use crate::arguments;
use crate::problem::ConfigProblem;
use crate::settings::{ConfigSettings, ModelConfig};

struct ConfigSummary<'a> {
    settings: &'a ConfigSettings,
    memory: ByteSize,
    models: Vec<ModelSummary<'a>>,
}

struct ModelSummary<'a> {
    settings: &'a ConfigSettings,
    memory: ByteSize,
    name: &'a str,
    model: &'a ModelConfig,
    /// Memory that the model's processes are configured to cache.
    declared: DeclaredMemory,
    args: &'a [String],
    /// Number of slots per process; `None` if not configured.
    slots: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct RuleFinding {
    /// Key at which the finding is reported.
    path: Vec<String>,
    message: String,
    hint: String,
    /// True if the setting is impossible and prevents the start.
    fatal: bool,
}

/// A rule for the whole configuration, or for each of its models.
enum ContradictionRule {
    Whole(fn(&ConfigSummary<'_>) -> Vec<RuleFinding>),
    Model(fn(&ModelSummary<'_>) -> Option<RuleFinding>),
}

/// All rules, in the order in which their findings are reported.
const RULES: [ContradictionRule; 27] = [
    Whole(budgets::hard_above_soft),
    Whole(budgets::budgets_of_a_few_bytes),
    Whole(budgets::budgets_above_the_machine),
    Model(budgets::budgets_below_declared_memory),
    Whole(budgets::shared_budgets_below_a_models),
    Model(budgets::replicas_above_the_machine),
    Whole(too_few_kept_floors),
    Whole(limits::more_slots_than_connections),
    Model(limits::more_requests_than_slots),
    Whole(limits::bodies_above_their_memory),
    Whole(limits::clients_and_admin_on_one_port),
    Whole(limits::groups_of_one),
    Whole(limits::groups_closed_by_pin),
    Whole(limits::pins_above_max_loaded),
    Whole(limits::files_with_two_uses),
    Whole(limits::defaults_above_their_limit),
    Whole(limits::defaults_also_set),
    Model(times::waits_above_exchange_timeout),
    Whole(times::ineffective_idle_limits),
    Model(times::prompts_above_idle_limit),
    Whole(times::late_probes),
    Whole(times::misordered_pauses),
    Model(times::unreachable_quiet_time),
    Model(times::windows_too_short_for_quiet),
    Model(times::ages_below_the_pause),
    Model(times::ages_outside_windows),
    Model(times::misordered_horizons),
];

impl ConfigResolver<'_> {
    pub(super) fn check_contradictions(&mut self, specs: &[SharedSpec]) {
        let inherited = self.machine.text_vars();
        let settings = &self.loaded.settings;
        let memory = self.machine.memory;
        let models = self.loaded.models.iter().zip(specs).map(|((name, model), spec)| {
            let command = &spec.command;
            let mut env: BTreeMap<String, String> = inherited.iter().cloned().collect();
            env.extend(spec.start.cache_bounds.iter().cloned());
            env.retain(|name, _| !command.env_remove.contains(name));
            env.extend(command.env.iter().cloned());
            let is_llama_server = command.kind.is_llama_server();
            // Flags of another program mean something else.
            let args = if is_llama_server { command.args.as_slice() } else { &[] };
            let slots = arguments::slots(args);
            let keeps = if is_llama_server {
                DeclaredMemory::from_command(args, &env, None)
            } else {
                DeclaredMemory::NONE
            };
            ModelSummary { settings, memory, name, model, declared: keeps, args, slots }
        });
        let whole = ConfigSummary { settings, memory, models: models.collect() };
        for found in find_contradictions(&whole) {
            let problem =
                ConfigProblem::new(self.loaded.place(&found.path), found.message).with_hint(found.hint);
            if found.fatal { self.problems.push(problem) } else { self.warnings.push(problem) }
        }
    }
}

fn find_contradictions(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let mut found = Vec::new();
    for rule in RULES {
        match rule {
            Whole(rule) => found.extend(rule(whole)),
            Model(rule) => found.extend(whole.models.iter().filter_map(rule)),
        }
    }
    found
}

impl RuleFinding {
    fn new(path: &[&str], message: String, hint: impl Into<String>) -> Self {
        let path = path.iter().map(|&key| key.to_owned()).collect();
        Self { path, message, hint: hint.into(), fatal: false }
    }

    fn fatal(self) -> Self {
        Self { fatal: true, ..self }
    }
}

impl ModelSummary<'_> {
    fn finding(&self, keys: &[&str], message: &str, hint: impl Into<String>) -> RuleFinding {
        let path: Vec<&str> = ["models", self.name].into_iter().chain(keys.iter().copied()).collect();
        RuleFinding::new(&path, format!("model `{}`: {message}", self.name), hint)
    }

    /// Returns the number of slot requests that all processes of the model take at the same time, if known.
    fn concurrent_requests(&self) -> Option<u64> {
        let of_one = self.model.max_in_flight.or(self.slots)?;
        Some(u64::from(of_one) * u64::from(self.model.run.replicas))
    }
}

/// Reports if the leak detector keeps fewer floors (lowest readings) than a test needs: the detector then
/// never finds a leak.
fn too_few_kept_floors(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let growth = &whole.settings.growth;
    if growth.kept >= growth.window {
        return Vec::new();
    }
    let message = format!(
        "`internal.growth.kept` ({}) is below `internal.growth.window` ({})",
        growth.kept, growth.window
    );
    let hint = "keep at least as many floors as a test looks at";
    vec![RuleFinding::new(&["growth", "kept"], message, hint).fatal()]
}
