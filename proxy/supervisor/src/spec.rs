//! Inputs of the supervisor. They are plain comparable data, so that a reload detects which models changed.

use std::ffi::OsString;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use warden_policies::admission::{AdmissionMode, AdmissionPolicy};
use warden_policies::book::MemoryNeeds;
use warden_policies::canary;
use warden_policies::defaults::{self, Child, Sensors};
use warden_policies::growth::GrowthPolicy;
use warden_policies::health::HealthPolicy;
use warden_policies::lifecycle::LifecyclePolicy;
use warden_policies::loading;
pub use warden_policies::modes::{ReplaceMode, SocketMode};
use warden_policies::quarantine::QuarantinePolicy;
use warden_policies::recycle::RecyclePolicy;
use warden_policies::start_search::StartSwitch;
use warden_policies::{ByteSize, MemoryLimit, ModelName, ServerFacts};

use crate::origin::RemoteOrigin;

/// Kind of server that a command runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServerKind {
    /// llama-server, or a fork with its flags and routes.
    #[default]
    LlamaServer,
    /// Any other HTTP server, of which no flag and no route is known.
    OtherProgram(ReadyCheck),
}

impl ServerKind {
    /// Returns true for llama-server, whose flags, variables and routes are known.
    pub const fn is_llama_server(&self) -> bool {
        matches!(self, Self::LlamaServer)
    }

    /// Path of the `GET` request that asks whether the server is ready.
    pub fn ready_path(&self) -> &str {
        match self {
            Self::LlamaServer => "/health",
            Self::OtherProgram(check) => &check.path,
        }
    }

    /// Returns true if an answer with this status shows that the server is ready.
    pub const fn is_ready(&self, status: u16) -> bool {
        match self {
            Self::LlamaServer => status == 200,
            Self::OtherProgram(check) if check.needs_success => 200 <= status && status < 300,
            Self::OtherProgram(_) => status < 500,
        }
    }
}

/// Request whose answer shows that a server other than llama-server is ready.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ReadyCheck {
    /// Path of the `GET` request; begins with `/`.
    pub path: String,
    /// True if only a status from 200 to 299 means ready; otherwise any status below 500 does.
    pub needs_success: bool,
}

/// Placeholder for the port in the command of another program.
pub const PORT_PLACEHOLDER: &str = "${PORT}";
/// Placeholder for the path of the Unix socket in the command of another program.
pub const SOCKET_PLACEHOLDER: &str = "${SOCKET}";

/// Command that runs the server of one model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ServerCommand {
    /// Words before the binary, such as `nice -n 5`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wrapper: Vec<String>,
    /// The program.
    pub binary: PathBuf,
    /// Arguments: of llama-server without `--host` and `--port`, of another program with placeholders.
    pub args: Vec<String>,
    /// Variables added to our environment.
    pub env: Vec<(String, String)>,
    /// Variables of our environment that are not inherited, even if `env` sets them.
    pub env_remove: Vec<String>,
    /// Working directory; `None`: ours.
    pub directory: Option<PathBuf>,
    /// Kind of server that the program is.
    #[serde(default, skip_serializing_if = "ServerKind::is_llama_server")]
    pub kind: ServerKind,
}

/// llama.cpp's combined program, and its subcommand that runs llama-server.
const UNIFIED_PROGRAM: (&str, &str) = ("llama", "serve");

impl ServerCommand {
    /// Command with a binary only.
    pub fn from_binary(binary: PathBuf) -> Self {
        Self { binary, ..Self::default() }
    }

    /// Words before `args`: wrapper, binary, and `serve` for llama.cpp's combined program.
    pub fn program_words(&self) -> Vec<OsString> {
        let mut words: Vec<OsString> = self.wrapper.iter().map(OsString::from).collect();
        words.push(self.binary.clone().into_os_string());
        let is_told = self.args.first().is_some_and(|word| word == UNIFIED_PROGRAM.1);
        let is_unified = self.binary.file_name().is_some_and(|name| name == UNIFIED_PROGRAM.0);
        if self.kind.is_llama_server() && is_unified && !is_told {
            words.push(UNIFIED_PROGRAM.1.into());
        }
        words
    }

    /// Returns the command with more variables.
    pub(crate) fn with_variables(&self, more: &[(String, String)]) -> Self {
        let mut command = self.clone();
        command.env.extend(more.iter().cloned());
        command
    }

    /// Last value of a variable in the command's own environment.
    pub(crate) fn own_variable(&self, name: &str) -> Option<&str> {
        self.env.iter().rfind(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Resolves a path relative to the process's working directory.
    pub(crate) fn resolve_path(&self, path: &str) -> PathBuf {
        self.directory.as_ref().map_or_else(|| path.into(), |directory| directory.join(path))
    }

    /// Sets a variable to one of our files, or removes it. The command's own value stays.
    pub(crate) fn announce_file(&mut self, variable: &str, file: Option<PathBuf>) {
        if self.own_variable(variable).is_some() {
            return;
        }
        match file {
            Some(file) => self.env.push((variable.to_owned(), file.to_string_lossy().into_owned())),
            // An inherited value would give several processes the same file.
            None => self.env_remove.push(variable.to_owned()),
        }
    }

    /// Moves all words after the first into the arguments, for a version of llama-warden without wrappers.
    pub(crate) fn without_wrapper(self) -> Self {
        let mut words = self.program_words().into_iter();
        let binary = words.next().map(PathBuf::from).unwrap_or_default();
        let words = words.map(|word| word.to_string_lossy().into_owned());
        Self { wrapper: Vec::new(), binary, args: words.chain(self.args).collect(), ..self }
    }
}

/// Process to create.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnRequest {
    /// Binary, all arguments, environment, directory.
    pub command: ServerCommand,
    /// Number added to our own `oom_score_adj`; the sum is limited to -1000..=1000.
    pub oom_score_adj: i32,
}

/// Handling of prompts that do not fit into memory.
#[derive(Clone, Debug, PartialEq)]
pub struct AdmissionSpec {
    /// Reaction to such a prompt.
    pub mode: AdmissionMode,
    /// Limits and factors for predicting a prompt's memory.
    pub policy: AdmissionPolicy,
}

/// Handling of a model's requests.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestSpec {
    /// Limits of the queue.
    pub queue: defaults::Queue,
    /// Maximum concurrent slot requests per process; `None`: the number of its slots.
    pub max_in_flight: Option<u32>,
    /// Handling of prompts that do not fit into memory.
    pub admission: AdmissionSpec,
    /// Handling of requests that kill their server.
    pub quarantine: QuarantinePolicy,
}

/// Changes that the supervisor may make to a model's command at a start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StartSpec {
    /// Arguments to add if the model does not fit into memory.
    pub fallback: Option<FallbackSpec>,
    /// Options for a server that dies while loading, the cheapest and likeliest first.
    pub switches: Vec<StartSwitch>,
    /// True if the command leaves the choice of GPUs to the supervisor.
    pub choose_gpus: bool,
    /// Variables that bound the caches of the next process. Their change replaces no process.
    pub cache_bounds: Vec<(String, String)>,
}

/// A model: a name that clients address, and the processes behind it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// Name of the model.
    pub name: ModelName,
    /// Other names that clients may use.
    pub aliases: Vec<String>,
    /// Command that runs the server.
    pub command: ServerCommand,
    /// Run options: number of processes, start, address, recording.
    pub run: defaults::Model,
    /// Handling of requests.
    pub requests: RequestSpec,
    /// Unload after this time without a request; `None`: never.
    pub ttl: Option<Duration>,
    /// Memory needs, and models that may be loaded together with this one.
    pub loading: loading::LoadSpec,
    /// Changes that the supervisor may make to the command.
    pub start: StartSpec,
    /// Crash handling and deadlines.
    pub lifecycle: LifecyclePolicy,
    /// Budgets, and limits on recycling.
    pub recycle: RecyclePolicy,
    /// Number added to the child's `oom_score_adj`, -1000 to 1000.
    pub oom_score_adj: i32,
    /// Model whose canary this is, if any.
    pub canary_of: Option<ModelName>,
}

/// Settings of one model, shared because they take 2.5 KiB. A holder copies them before a change.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedSpec {
    settings: Arc<ModelSpec>,
    /// Known facts about the binary. Changed facts cause no replacement.
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

/// Another build of llama-server that is tried next to a model's own.
#[derive(Clone, Debug, PartialEq)]
pub struct CanarySpec {
    /// The llama-server binary.
    pub binary: PathBuf,
    /// Id of the build, if it is in the store.
    pub build: Option<String>,
    /// Known facts about the binary.
    pub facts: ServerFacts,
    /// Share of the model's conversations that the canary answers, above 0.
    pub share: f64,
    /// Duration of the trial, and thresholds for a worse build.
    pub numbers: canary::CanaryConfig,
}

/// A model that a remote endpoint serves.
#[derive(Clone, Debug, PartialEq)]
pub struct RemoteSpec {
    /// Name of the model.
    pub name: ModelName,
    /// Other names that clients may use.
    pub aliases: Vec<String>,
    /// Address of the endpoint.
    pub origin: Arc<RemoteOrigin>,
    /// Name of the model at the endpoint.
    pub model: String,
    /// Limits of the queue.
    pub queue: defaults::Queue,
    /// Maximum concurrent requests, at least 1.
    pub max_in_flight: u32,
    /// Intervals and limits for probing the endpoint.
    pub numbers: defaults::Remote,
}

/// Arguments for a model that does not fit into memory or dies while it loads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FallbackSpec {
    /// Arguments appended to the configured ones, which take precedence.
    pub args: Vec<String>,
    /// Memory needs of one process with these arguments, if known.
    pub needs: Option<MemoryNeeds>,
}

/// Configuration of a fleet.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetConfig {
    /// Models in listed order.
    pub models: Vec<SharedSpec>,
    /// Remote models, listed after the local ones.
    pub remotes: Vec<RemoteSpec>,
    /// If there is exactly one model, every name means it, as in llama-server.
    pub any_name: bool,
    /// Budgets over all processes together.
    pub shared: SharedBudgets,
    /// Loading and unloading of models.
    pub loading: loading::LoadingConfig,
    /// Parameters of the growth detector.
    pub growth: GrowthPolicy,
    /// Thresholds for symptoms.
    pub health: HealthPolicy,
    /// Default parameters of canaries.
    pub canary: canary::CanaryConfig,
    /// Private directory (mode 0700) for sockets and memory reports. A Unix socket's path has at most 107
    /// bytes.
    pub runtime_dir: PathBuf,
    /// Directory of the ledger, recordings and data of earlier runs.
    pub state_dir: PathBuf,
    /// Sampling and storage.
    pub watch: WatchConfig,
}

impl FleetConfig {
    pub(crate) fn model(&self, name: &ModelName) -> Option<&SharedSpec> {
        self.models.iter().find(|spec| spec.name == *name)
    }

    pub(crate) fn remote(&self, name: &ModelName) -> Option<&RemoteSpec> {
        self.remotes.iter().find(|spec| spec.name == *name)
    }
}

/// Budgets for the memory of all our processes. If one is exceeded, the process that frees most memory is
/// replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SharedBudgets {
    /// Host memory above which one process is replaced when quiet.
    pub host_soft: Option<ByteSize>,
    /// Host memory above which one process is drained now.
    pub host_hard: Option<ByteSize>,
    /// Memory of each GPU, as a size or a share, above which one process is replaced when quiet.
    pub vram_soft: Option<MemoryLimit>,
    /// Memory of each GPU above which one process is drained now.
    pub vram_hard: Option<MemoryLimit>,
}

/// Sampling and storage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WatchConfig {
    /// Sensors and their intervals.
    pub sensors: Sensors,
    /// Options for children and their output.
    pub child: Child,
}

#[derive(Clone, Debug)]
pub(crate) struct CommonConfig {
    pub(crate) shared: SharedBudgets,
    pub(crate) loading: loading::LoadingConfig,
    pub(crate) growth: GrowthPolicy,
    pub(crate) health: HealthPolicy,
}

impl From<&FleetConfig> for CommonConfig {
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
            let command = ServerCommand {
                wrapper,
                args: vec!["-c".to_owned()],
                ..ServerCommand::from_binary(binary.into())
            };
            let flat = command.clone().without_wrapper();
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
