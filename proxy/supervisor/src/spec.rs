//! What the supervisor is told: models, how to run them, and where to keep its things. Plain data, comparable, so that
//! a reload can tell which models changed.

use std::ffi::OsString;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use warden_policies::admission::{AdmissionMode, AdmissionPolicy};
use warden_policies::book::Needs;
use warden_policies::canary;
use warden_policies::defaults::{self, Child, Sensors};
use warden_policies::growth::GrowthPolicy;
use warden_policies::health::HealthPolicy;
use warden_policies::lifecycle::LifecyclePolicy;
use warden_policies::loading;
pub use warden_policies::modes::{Replace, Socket};
use warden_policies::quarantine::QuarantinePolicy;
use warden_policies::recycle::RecyclePolicy;
use warden_policies::start_search::StartSwitch;
use warden_policies::{ByteSize, MemoryLimit, ModelName, ServerFacts};

use crate::origin::Origin;

/// How to run llama-server for one model.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Command {
    /// Words put before the binary: a program that ends in running it, such as `nice -n 5`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wrapper: Vec<String>,
    /// The llama-server binary.
    pub binary: PathBuf,
    /// Its arguments, without any for listening: `--host` is the supervisor's.
    pub args: Vec<String>,
    /// Variables added to our own environment.
    pub env: Vec<(String, String)>,
    /// Variables of our own environment that the process must not get. A name that is in `env`, too, is not passed on
    /// either.
    pub env_remove: Vec<String>,
    /// Working directory; ours if `None`.
    pub directory: Option<PathBuf>,
}

/// Name of llama.cpp's one program for all purposes, and the subcommand that makes a llama-server of it.
const UNIFIED: (&str, &str) = ("llama", "serve");

impl Command {
    /// A binary alone: no wrapper, no arguments, our environment and directory.
    pub fn bare(binary: PathBuf) -> Self {
        Self {
            wrapper: Vec::new(),
            binary,
            args: Vec::new(),
            env: Vec::new(),
            env_remove: Vec::new(),
            directory: None,
        }
    }

    /// The words before `args`: wrapper, binary, and `serve` where the binary is llama.cpp's one program for all
    /// purposes.
    pub fn program_words(&self) -> Vec<OsString> {
        let mut words: Vec<OsString> = self.wrapper.iter().map(OsString::from).collect();
        words.push(self.binary.clone().into_os_string());
        let is_told = self.args.first().is_some_and(|word| word == UNIFIED.1);
        if self.binary.file_name().is_some_and(|name| name == UNIFIED.0) && !is_told {
            words.push(UNIFIED.1.into());
        }
        words
    }

    /// The same with its first word as the binary and all others as arguments, as a program that knows no wrapper can
    /// start it.
    pub(crate) fn flat(self) -> Self {
        let mut words = self.program_words().into_iter();
        let binary = words.next().map(PathBuf::from).unwrap_or_default();
        let words = words.map(|word| word.to_string_lossy().into_owned());
        Self { wrapper: Vec::new(), binary, args: words.chain(self.args).collect(), ..self }
    }
}

/// What to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnRequest {
    /// Binary, all arguments, environment, directory.
    pub command: Command,
    /// Added to our own `oom_score_adj`; the sum is kept within -1000 to 1000.
    pub oom_score_adj: i32,
}

/// What is done about prompts that do not fit into memory.
#[derive(Clone, Debug, PartialEq)]
pub struct AdmissionSpec {
    /// Nothing, a warning, or keeping them from being sent.
    pub mode: AdmissionMode,
    /// The numbers.
    pub policy: AdmissionPolicy,
}

/// One model: a name that clients address, and the processes behind it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// The name.
    pub name: ModelName,
    /// Other names for it.
    pub aliases: Vec<String>,
    /// What to run.
    pub command: Command,
    /// How it is run: at least one process, when, on what it listens, what is recorded.
    pub run: defaults::Model,
    /// Who may wait, and for how long.
    pub queue: defaults::Queue,
    /// Requests of the slot kind at a time on one process; its number of slots if `None`.
    pub max_in_flight: Option<u32>,
    /// Without a request for so long it is unloaded; `None`: never.
    pub ttl: Option<Duration>,
    /// What its memory needs, and who may be loaded beside it. The number of its processes is that of `run`.
    pub loading: loading::Spec,
    /// Arguments that are added if it does not fit into memory as it is.
    pub fallback: Option<Fallback>,
    /// What may start it if it dies while it loads, the cheapest and likeliest first.
    pub start_switches: Vec<StartSwitch>,
    /// We choose its GPUs: neither its command nor its environment says anything of them.
    pub choose_gpus: bool,
    /// Crash handling and deadlines.
    pub lifecycle: LifecyclePolicy,
    /// Budgets, and limits on recycling.
    pub recycle: RecyclePolicy,
    /// What is done about prompts that do not fit into memory.
    pub admission: AdmissionSpec,
    /// What is done about requests that kill their server.
    pub quarantine: QuarantinePolicy,
    /// Added to `oom_score_adj` of the child, -1000 to 1000.
    pub oom_score_adj: i32,
    /// It is another build of this model, tried beside it: no client can ask for it.
    pub canary_of: Option<ModelName>,
}

/// The settings of one model, shared. Configuration, fleet and the model's task each hold them; at 2.5 KiB a model, copies
/// would cost a fleet of 1,000 models 10 MiB. A holder that changes a setting copies them first.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedSpec {
    settings: Arc<ModelSpec>,
    /// What is known of how the binary behaves. What becomes known later is told by [`Fleet::learn`](crate::Fleet::learn);
    /// neither replaces a process.
    pub facts: ServerFacts,
}

impl SharedSpec {
    /// Shares these settings.
    pub fn new(settings: ModelSpec, facts: ServerFacts) -> Self {
        Self { settings: Arc::new(settings), facts }
    }
}

impl Deref for SharedSpec {
    type Target = ModelSpec;

    fn deref(&self) -> &ModelSpec {
        &self.settings
    }
}

impl DerefMut for SharedSpec {
    fn deref_mut(&mut self) -> &mut ModelSpec {
        Arc::make_mut(&mut self.settings)
    }
}

/// Another build of llama-server that is tried with a model, beside its own.
#[derive(Clone, Debug, PartialEq)]
pub struct CanarySpec {
    /// The llama-server binary.
    pub binary: PathBuf,
    /// The id of the build in the store, if it is one of the store.
    pub build: Option<String>,
    /// What is known of how it behaves.
    pub facts: ServerFacts,
    /// The share of conversations whose clients it answers, above 0.
    pub share: f64,
    /// When it is over, and what is declared worse.
    pub numbers: canary::Numbers,
}

/// A model that somebody else's endpoint serves.
#[derive(Clone, Debug, PartialEq)]
pub struct RemoteSpec {
    /// The name.
    pub name: ModelName,
    /// Other names for it.
    pub aliases: Vec<String>,
    /// Where it is.
    pub origin: Arc<Origin>,
    /// What it is called there.
    pub model: String,
    /// Who may wait, and for how long.
    pub queue: defaults::Queue,
    /// Requests at a time, at least 1.
    pub max_in_flight: u32,
    /// How its endpoint is asked whether it serves.
    pub numbers: defaults::Remote,
}

/// With what a model is started that does not fit into memory as it is, or dies while it loads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fallback {
    /// Added behind the others, so that they count.
    pub args: Vec<String>,
    /// What one process needs then, as far as that is known.
    pub needs: Option<Needs>,
}

/// Everything the fleet needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetConfig {
    /// The models, in the order in which they are listed to clients.
    pub models: Vec<SharedSpec>,
    /// Models that others serve, listed behind those.
    pub remotes: Vec<RemoteSpec>,
    /// With exactly one model: whatever name a client gives means that model, as llama-server itself does.
    pub any_name: bool,
    /// Budgets over all processes together.
    pub shared: SharedBudgets,
    /// Which models are loaded, and who leaves for whom.
    pub loading: loading::Numbers,
    /// The numbers of the growth detector.
    pub growth: GrowthPolicy,
    /// When a backend is ill.
    pub health: HealthPolicy,
    /// What is declared of canaries.
    pub canary: canary::Numbers,
    /// Private directory (mode 0700) for the children's sockets and memory reports. Its path must be short: a Unix socket's path has at
    /// most 107 bytes.
    pub runtime_dir: PathBuf,
    /// Directory of the ledger, of recordings and of what is remembered of earlier runs.
    pub state_dir: PathBuf,
    /// How things are watched and kept.
    pub watch: Watch,
}

/// Budgets over all processes on this host, and over all on each GPU. A process that passes one gives way to the one
/// whose replacement gives back most.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SharedBudgets {
    /// Of the host's memory; above it one is replaced when quiet.
    pub host_soft: Option<ByteSize>,
    /// Above this one is drained now.
    pub host_hard: Option<ByteSize>,
    /// Of each GPU's memory, as a size or a share of that GPU; above it one is replaced when quiet.
    pub vram_soft: Option<MemoryLimit>,
    /// Above this one is drained now.
    pub vram_hard: Option<MemoryLimit>,
}

/// Sampling and keeping.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Watch {
    /// What is read, and how often.
    pub sensors: Sensors,
    /// What is kept of processes, and how they are run.
    pub child: Child,
}

/// What all models share of the configuration.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    pub(crate) shared: SharedBudgets,
    pub(crate) loading: loading::Numbers,
    pub(crate) growth: GrowthPolicy,
    pub(crate) health: HealthPolicy,
}

impl From<&FleetConfig> for Common {
    fn from(config: &FleetConfig) -> Self {
        Self {
            shared: config.shared,
            loading: config.loading.clone(),
            growth: config.growth.clone(),
            health: config.health.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_started_as_its_wrapper_or_as_a_server() {
        let words = |wrapper: &[&str], binary: &str| {
            let wrapper = wrapper.iter().map(|&word| word.to_owned()).collect();
            let command = Command { wrapper, args: vec!["-c".to_owned()], ..Command::bare(binary.into()) };
            let flat = command.clone().flat();
            assert_eq!(flat.program_words().len(), 1, "{flat:?}");
            let flat = std::iter::once(flat.binary.into_os_string())
                .chain(flat.args.into_iter().map(OsString::from));
            let whole =
                command.program_words().into_iter().chain(command.args.into_iter().map(OsString::from));
            assert!(flat.eq(whole.clone()));
            whole.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(words(&[], "/b/llama-server"), "/b/llama-server -c");
        assert_eq!(words(&["nice", "-n", "5"], "/b/llama-server"), "nice -n 5 /b/llama-server -c");
        assert_eq!(words(&["env"], "/b/llama"), "env /b/llama serve -c");
        assert_eq!(words(&[], "/b/llama"), "/b/llama serve -c");
    }
}
