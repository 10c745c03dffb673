//! The configuration as the program uses it. It is complete, because the defaults are its lowest layer.
//!
//! Sections with compiled-in defaults are types of `warden_policies::defaults`; this module has the others:
//! addresses, paths, models. The types define parsing, the schema, and the tables of docs/configuration.md.
//! A key's comment ends in `Default:` and the default, if there is one. Model tables are parsed only after
//! the merge with the defaults for all models.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::IgnoredAny;
use warden_policies::defaults;
use warden_supervisor::spec::{ReadyCheck, ServerKind};

use super::listing::ModelListing;
use super::named::NameConfig;
use super::policy::{PolicyConfig, SharedBudgetConfig, optional_duration};
use super::remote::RemoteModel;
use super::request::RequestConfig;
use super::schema::{self, AllModels, NamedTable, SectionSchema};

/// All settings except those of single models.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfigSettings {
    /// Public listener, and limits for clients.
    #[schemars(with = "SectionSchema<defaults::Server>")]
    pub server: defaults::Server,
    /// Admin routes: status, restart, logs, metrics.
    #[serde(default)]
    pub admin: AdminSettings,
    /// Directories.
    #[serde(default)]
    pub paths: PathSettings,
    /// Log of llama-warden.
    #[schemars(with = "SectionSchema<defaults::Log>")]
    pub log: defaults::Log,
    /// The connection to a backend.
    #[schemars(with = "SectionSchema<defaults::Upstream>")]
    pub upstream: defaults::Upstream,
    /// Readings of memory and GPUs.
    #[schemars(with = "SectionSchema<defaults::Sensors>")]
    pub sensors: defaults::Sensors,
    /// Detector of growing memory; has no public keys.
    #[schemars(skip)]
    pub growth: defaults::Growth,
    /// Requests to remote endpoints; has no public keys.
    #[schemars(skip)]
    pub remote: defaults::Remote,
    /// Verdicts about canaries; has no public keys.
    #[schemars(skip)]
    pub canary: defaults::Canary,
    /// Recorded memory series; has no public keys.
    #[schemars(skip)]
    pub series: defaults::Series,
    /// Detection of a backend that runs but does not work.
    #[schemars(with = "SectionSchema<defaults::Health>")]
    pub health: defaults::Health,
    /// Budgets over all backends: for the machine, and for each GPU.
    #[serde(default)]
    pub shared: SharedBudgetConfig,
    /// Child processes.
    #[schemars(with = "SectionSchema<defaults::Child>")]
    pub child: defaults::Child,
    /// Loading and unloading of models.
    #[schemars(with = "SectionSchema<defaults::Loading>")]
    pub loading: defaults::Loading,
    /// Builds of llama-server.
    #[schemars(with = "SectionSchema<defaults::Build>")]
    pub build: defaults::Build,
    /// Experiments with fresh servers: `llama-warden diagnose`.
    #[schemars(with = "SectionSchema<defaults::Diagnose>")]
    pub diagnose: defaults::Diagnose,
    /// Conditions under which one build may replace another.
    #[schemars(with = "SectionSchema<defaults::Proof>")]
    pub proof: defaults::Proof,
    /// Updates of llama-server: `llama-warden update`.
    #[schemars(with = "SectionSchema<defaults::Update>")]
    pub update: defaults::Update,
    /// Traces of requests, for an OpenTelemetry collector.
    #[schemars(with = "SectionSchema<defaults::Telemetry>")]
    pub telemetry: defaults::Telemetry,
    /// Answers to probes, collectors and load balancers, for several instances.
    #[schemars(with = "SectionSchema<defaults::Probe>")]
    pub probe: defaults::Probe,
    /// Settings for all models; a model's own settings override them.
    #[schemars(with = "AllModels<ModelConfig>")]
    pub defaults: IgnoredAny,
    /// Models, by the name that clients use.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, NamedTable<ModelConfig>>")]
    pub models: IgnoredAny,
    /// Models served by remote endpoints, by the name that clients use.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, NamedTable<RemoteModel>>")]
    pub remotes: BTreeMap<String, RemoteModel>,
    /// Names for one of several models, or for a model with other request settings.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, NamedTable<NameConfig>>")]
    pub names: BTreeMap<String, NameConfig>,
}

/// Admin routes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AdminSettings {
    /// Unix socket of the admin routes. Default: `admin.sock` in the instance's private directory.
    #[schemars(schema_with = "schema::path")]
    pub socket: Option<PathBuf>,
    /// `host:port` of the admin routes over TCP, including metrics. Default: none. There is no
    /// authentication, so only loopback addresses are allowed.
    pub address: Option<String>,
}

/// Directories.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PathSettings {
    /// Ledger and registry of running instances. Default: `$XDG_STATE_HOME/llama-warden`.
    #[schemars(schema_with = "schema::path")]
    pub state_dir: Option<PathBuf>,
    /// Parent of the socket directories: each instance creates a private directory `llama-warden-PID` and
    /// removes nothing else. Must be short. Default: `$XDG_RUNTIME_DIR`, else `/tmp/llama-warden-UID`.
    #[schemars(schema_with = "schema::path")]
    pub runtime_dir: Option<PathBuf>,
    /// Folders of models: each model file in them becomes a model named after it, as long as the file
    /// exists (docs/models.md). Default: none.
    #[serde(default)]
    #[schemars(schema_with = "schema::paths")]
    pub models: Vec<PathBuf>,
    /// Folders of your own patch sets: each is a set, or contains some. `build` applies them together with
    /// the curated ones, and `mitigations` may name their fixes (docs/patches.md). Default: none.
    #[serde(default)]
    #[schemars(schema_with = "schema::paths")]
    pub patches: Vec<PathBuf>,
    /// Store of builds. Default: `$XDG_DATA_HOME/llama-warden`.
    #[schemars(schema_with = "schema::path")]
    pub data_dir: Option<PathBuf>,
    /// Source archives, cmake, ninja and ccache with its files, build trees. Default: `$XDG_CACHE_HOME/llama-warden`.
    #[schemars(schema_with = "schema::path")]
    pub cache_dir: Option<PathBuf>,
}

/// Settings of a model, merged with the defaults for all models. Keys that only a single model can have are
/// in [`schema::SINGLE_MODEL_KEYS`].
#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct ModelConfig {
    /// Model file, short for `-m` in `args`. Relative to the configuration file.
    #[schemars(schema_with = "schema::path")]
    pub model: Option<PathBuf>,
    /// Program that serves the model in place of a llama-server, with its arguments: `["whisper-server", "-m",
    /// "/models/ggml-base.bin", "--port", "${PORT}"]`. `${PORT}` becomes a free port of 127.0.0.1, `${SOCKET}`
    /// the path of a Unix socket; `command` or `env` must have one of the two. llama-warden uses no shell.
    /// Functions and keys that only llama-server supports are off (docs/models.md#other-programs). Default: the
    /// model is served by llama-server.
    #[serde(default)]
    pub command: Vec<String>,
    /// Path that the program of `command` answers with a status from 200 to 299 once it is ready, such as
    /// `/v1/models`. Default: any answer to `/health` with a status below 500 means ready.
    pub ready: Option<String>,
    /// llama-server binary. Relative to the configuration file. Default: the newest build of the store,
    /// else the `llama-server` in PATH.
    #[schemars(schema_with = "schema::path")]
    pub binary: Option<PathBuf>,
    /// Command in front of the binary, which must end by running it: `["nice", "-n", "5"]`, `["numactl",
    /// "-N", "0"]`. llama-warden queries the binary (`--version`, `--help`) through it, too.
    #[serde(default)]
    pub wrapper: Vec<String>,
    /// Build of the store, by its id or the beginning of it.
    pub build: Option<String>,
    /// llama-server's own flags, without those for listening, which llama-warden sets.
    #[serde(default)]
    pub args: Vec<String>,
    /// Arguments added behind `args` if the model does not fit into memory without them, or dies while
    /// loading and starts with them: a shorter context, fewer layers on GPUs.
    #[serde(default)]
    pub fallback: Vec<String>,
    /// Variables added to the environment of llama-warden.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Mitigations against growing memory: `id`, `id=value` or `id.part=value`, such as
    /// `["graph-cache-cap=64", "no-mmap"]`. `llama-warden mitigations list` shows them.
    #[serde(default)]
    pub mitigations: Vec<String>,
    /// Working directory of the process. Relative to the configuration file. Default: that of llama-warden.
    #[schemars(schema_with = "schema::path")]
    pub directory: Option<PathBuf>,
    /// Other names that clients may use.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Description of the model in lists of models.
    #[serde(default)]
    pub listing: ModelListing,
    /// Limits and modes with defaults.
    #[serde(flatten)]
    #[schemars(with = "SectionSchema<defaults::Model>")]
    pub run: defaults::Model,
    /// Maximum number of concurrent requests per process. Default: its number of slots; 10 for a program of
    /// `command`.
    #[schemars(range(min = 1))]
    pub max_in_flight: Option<u32>,
    /// Time without a request after which the model is unloaded; its next request loads it again. Default:
    /// never.
    #[serde(default, deserialize_with = "optional_duration")]
    #[schemars(schema_with = "schema::age")]
    pub ttl: Option<Duration>,
    /// Allowed GPUs, by their numbers in `llama-warden plan`. Default: those on which the model fits.
    #[serde(default)]
    pub gpus: Vec<usize>,
    /// Names of exclusive groups: at most one model of a group is loaded at a time.
    #[serde(default)]
    pub groups: Vec<String>,
    /// Models to load together with this one. They are not evicted or unloaded by their `ttl` while it is
    /// loaded.
    #[serde(default)]
    pub with: Vec<String>,
    /// Queue in front of the model.
    #[schemars(with = "SectionSchema<defaults::Queue>")]
    pub queue: defaults::Queue,
    /// Handling of requests that kill their server.
    #[schemars(with = "SectionSchema<defaults::Quarantine>")]
    pub quarantine: defaults::Quarantine,
    /// Start, probe, drain, stop.
    #[schemars(with = "SectionSchema<defaults::Lifecycle>")]
    pub lifecycle: defaults::Lifecycle,
    /// Replacement of processes, and reaction to growing memory.
    pub policy: PolicyConfig,
    /// Changes to requests before the model gets them.
    #[serde(default)]
    pub request: RequestConfig,
    /// Model name for the backend in place of the client's, for a backend that evaluates it, such as a
    /// llama-server with several models. Replaces `model` in the body, the form and the query; everything
    /// else stays. Default: the client's name.
    pub upstream_model: Option<String>,
}

impl ModelConfig {
    /// Returns true if another program than llama-server serves the model.
    pub fn runs_other_program(&self) -> bool {
        !self.command.is_empty()
    }

    /// Returns the kind of the model's server.
    pub fn server_kind(&self) -> ServerKind {
        if !self.runs_other_program() {
            return ServerKind::LlamaServer;
        }
        // A path that an operator names is made for this purpose. Any program answers an unknown path.
        ServerKind::OtherProgram(ReadyCheck {
            path: self.ready.clone().unwrap_or_else(|| "/health".to_owned()),
            needs_success: self.ready.is_some(),
        })
    }
}
