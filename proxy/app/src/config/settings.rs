//! The configuration as the program uses it: complete, because the defaults are its lowest layer.
//!
//! Sections with compiled-in defaults are the types of `warden_policies::defaults`; here is what has no default number:
//! addresses, paths, models. Model tables stay unread until the defaults for all models are merged beneath them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use figment::value::Dict;
use schemars::JsonSchema;
use serde::Deserialize;
use warden_policies::defaults;
use warden_supervisor::spec::{Replace, Socket};

use super::cancel::Cancel;
use super::policy::{AllPolicyKeys, ModelPolicyKeys, Policy, Shared};
use super::request::{Request, RequestKeys};
use super::schema;

/// Everything but the models' own values.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    /// The public listener, and what a client may cost.
    #[schemars(with = "schema::Server")]
    pub(crate) server: defaults::Server,
    /// The operator's side: status, restart, logs, metrics.
    #[serde(default)]
    pub(crate) admin: Admin,
    /// Where things are kept.
    #[serde(default)]
    pub(crate) paths: Paths,
    /// Our own log.
    #[schemars(with = "schema::Log")]
    pub(crate) log: defaults::Log,
    /// The connection to a backend.
    #[schemars(with = "schema::Upstream")]
    pub(crate) upstream: defaults::Upstream,
    /// Reading numbers.
    #[schemars(with = "schema::Sensors")]
    pub(crate) sensors: defaults::Sensors,
    /// How growth of memory is judged.
    #[schemars(with = "schema::Growth")]
    pub(crate) growth: defaults::Growth,
    /// When a backend is ill although it lives.
    #[schemars(with = "schema::Health")]
    pub(crate) health: defaults::Health,
    /// Budgets over all backends: of the machine, and of each GPU.
    #[serde(default)]
    pub(crate) shared: Shared,
    /// The child processes.
    #[schemars(with = "schema::Child")]
    pub(crate) child: defaults::Child,
    /// Building llama-server.
    #[schemars(with = "schema::Build")]
    pub(crate) build: defaults::Build,
    /// Experiments with fresh servers: `llama-warden diagnose`.
    #[schemars(with = "schema::Diagnose")]
    pub(crate) diagnose: defaults::DiagnoseKeys,
    /// Settings for all models; a model's own come first.
    #[schemars(with = "ModelDefaults")]
    pub(crate) defaults: Dict,
    /// The models, by the name that clients address.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, ModelKeys>")]
    pub(crate) models: BTreeMap<String, Dict>,
}

/// The operator's side.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Admin {
    /// Unix socket of the admin routes. Default: `admin.sock` in the runtime directory.
    #[schemars(schema_with = "schema::path")]
    pub(crate) socket: Option<PathBuf>,
    /// `host:port` for the admin routes over TCP, metrics among them. Default: none. There is no authentication, so
    /// only loopback addresses are taken.
    pub(crate) address: Option<String>,
}

/// Where things are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[expect(clippy::struct_field_names, reason = "the fields are the keys of the file")]
#[serde(deny_unknown_fields)]
pub(crate) struct Paths {
    /// Ledger, and which instances run. Default: `$XDG_STATE_HOME/llama-warden`.
    #[schemars(schema_with = "schema::path")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Sockets: each instance makes a private directory in it, and removes nothing else. Short. Default:
    /// `$XDG_RUNTIME_DIR`, else `/tmp/llama-warden-UID`.
    #[schemars(schema_with = "schema::path")]
    pub(crate) runtime_dir: Option<PathBuf>,
    /// Builds. Default: `$XDG_DATA_HOME/llama-warden`.
    #[schemars(schema_with = "schema::path")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Source archives, cmake and ninja, build trees. Default: `$XDG_CACHE_HOME/llama-warden`.
    #[schemars(schema_with = "schema::path")]
    pub(crate) cache_dir: Option<PathBuf>,
}

/// One model with the defaults for all models beneath it.
#[derive(Clone, Debug, Deserialize)]
#[expect(clippy::struct_field_names, reason = "the fields are the keys of the file")]
pub(crate) struct Model {
    /// Model file, short for `-m` in `args`.
    pub(crate) model: Option<PathBuf>,
    /// The llama-server to run.
    pub(crate) binary: Option<PathBuf>,
    /// A build of the store.
    pub(crate) build: Option<String>,
    /// llama-server's own flags.
    #[serde(default)]
    pub(crate) args: Vec<String>,
    /// Environment.
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    /// What is done about memory that grows.
    #[serde(default)]
    pub(crate) mitigations: Vec<String>,
    /// Working directory.
    pub(crate) directory: Option<PathBuf>,
    /// Other names.
    #[serde(default)]
    pub(crate) aliases: Vec<String>,
    /// Processes.
    pub(crate) replicas: u32,
    /// Start at once.
    pub(crate) preload: bool,
    /// How a generation is replaced.
    pub(crate) replace: Replace,
    /// Whether a process is asked for a report of its GPU memory.
    pub(crate) memory_report: bool,
    /// What a process listens on.
    pub(crate) socket: Socket,
    /// Whether what is read is written to a file, too.
    pub(crate) record: bool,
    /// Where its requests are recorded, redacted.
    pub(crate) record_requests: Option<PathBuf>,
    /// How work for clients that left is ended where the answer is no stream.
    pub(crate) cancel: Cancel,
    /// Requests of the slot kind at a time on one process.
    pub(crate) max_in_flight: Option<u32>,
    /// The queue.
    pub(crate) queue: defaults::Queue,
    /// Requests that kill their server.
    pub(crate) quarantine: defaults::Quarantine,
    /// Start, probe, drain, stop.
    pub(crate) lifecycle: defaults::Lifecycle,
    /// When it is replaced.
    pub(crate) policy: Policy,
    /// What is changed in requests.
    #[serde(default)]
    pub(crate) request: Request,
    /// The name that the backend sees.
    pub(crate) upstream_model: Option<String>,
}

/// The keys of `[models."name"]`, for the schema.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(
    dead_code,
    reason = "only its schema is used: values are read as `Model`, when the defaults are merged in"
)]
struct ModelKeys {
    /// Model file, short for `-m` in `args`. Relative to the configuration file.
    #[schemars(schema_with = "schema::path")]
    model: Option<PathBuf>,
    /// The llama-server to run. Relative to the configuration file. Default: the newest build of the store, else the
    /// `llama-server` in PATH.
    #[schemars(schema_with = "schema::path")]
    binary: Option<PathBuf>,
    /// A build of the store, by its id or the beginning of it.
    build: Option<String>,
    /// llama-server's own flags. Those for listening are ours.
    args: Option<Vec<String>>,
    /// Variables added to our environment.
    env: Option<BTreeMap<String, String>>,
    /// What is done about memory that grows: `id`, `id=value` or `id.part=value`. `llama-warden mitigations list` shows
    /// them.
    mitigations: Option<Vec<String>>,
    /// Working directory of the process. Relative to the configuration file. Default: ours.
    #[schemars(schema_with = "schema::path")]
    directory: Option<PathBuf>,
    /// Other names that clients may use.
    aliases: Option<Vec<String>>,
    /// How many processes; each needs the memory of the whole model. Default: 1.
    #[schemars(range(min = 1))]
    replicas: Option<u32>,
    /// Start at once, instead of at the first request. Default: false.
    preload: Option<bool>,
    /// How a generation is replaced by the next: `sequential` drains, stops, then starts; `overlap` starts the next one
    /// first; `auto` overlaps where memory allows. Default: "auto".
    #[schemars(schema_with = "schema::replace")]
    replace: Option<Replace>,
    /// Ask the process for a report of its GPU memory, for `status` and metrics. Only a build with the fix
    /// `memory-report` writes one. Default: true.
    memory_report: Option<bool>,
    /// What a process listens on: `unix`, a socket that only we can reach, or `tcp`, a free port of 127.0.0.1, which any
    /// user of the machine can reach; `auto` takes the socket, and the port where llama-server is known to take no socket
    /// (before about b5000, `ik_llama.cpp`). Default: "auto".
    #[schemars(schema_with = "schema::socket")]
    socket: Option<Socket>,
    /// Write what is read about each process, memory and work, to a file in the state directory, for
    /// `llama-warden policy replay`. Default: false.
    record: Option<bool>,
    /// Write requests, without what they say, to this file, for `llama-warden diagnose --replay`. Relative to the
    /// configuration file. Default: none.
    #[schemars(schema_with = "schema::path")]
    record_requests: Option<PathBuf>,
    /// How a client's leaving ends its work where the answer is no stream: `auto` by the fix `cancel-nonstream` where the
    /// build has it, `assemble` by asking for a stream and putting the answer together, `off` as llama-server does.
    /// Default: "auto".
    #[schemars(schema_with = "schema::cancel")]
    cancel: Option<Cancel>,
    /// Requests at a time on one process. Default: its number of slots.
    #[schemars(range(min = 1))]
    max_in_flight: Option<u32>,
    /// The queue in front of the model.
    #[schemars(with = "schema::Queue")]
    queue: (),
    /// Requests that kill their server.
    #[schemars(with = "schema::Quarantine")]
    quarantine: (),
    /// Start, probe, drain, stop.
    #[schemars(with = "schema::ModelLifecycle")]
    lifecycle: (),
    /// When a process is replaced, and how growth of its memory is answered.
    policy: ModelPolicyKeys,
    /// What is changed in requests before the model gets them.
    request: RequestKeys,
    /// The name that the backend sees in place of the client's, for one that looks at it, such as a llama-server that
    /// serves several models itself. Default: what the client wrote.
    upstream_model: Option<String>,
}

/// The keys of `[defaults]`: those of a model, without what only one model can have, and with what holds for all.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is used")]
struct ModelDefaults {
    /// The llama-server to run. Relative to the configuration file. Default: the newest build of the store, else the
    /// `llama-server` in PATH.
    #[schemars(schema_with = "schema::path")]
    binary: Option<PathBuf>,
    /// A build of the store, by its id or the beginning of it.
    build: Option<String>,
    /// llama-server's own flags, for models that have no `args` themselves.
    args: Option<Vec<String>>,
    /// Variables added to our environment, beneath the model's own.
    env: Option<BTreeMap<String, String>>,
    /// What is done about memory that grows, for models that have no `mitigations` themselves: `id`, `id=value` or
    /// `id.part=value`. `llama-warden mitigations list` shows them.
    mitigations: Option<Vec<String>>,
    /// Working directory of the processes. Relative to the configuration file. Default: ours.
    #[schemars(schema_with = "schema::path")]
    directory: Option<PathBuf>,
    /// How many processes; each needs the memory of the whole model. Default: 1.
    #[schemars(range(min = 1))]
    replicas: Option<u32>,
    /// Start at once, instead of at the first request. Default: false.
    preload: Option<bool>,
    /// How a generation is replaced by the next: `sequential` drains, stops, then starts; `overlap` starts the next one
    /// first; `auto` overlaps where memory allows. Default: "auto".
    #[schemars(schema_with = "schema::replace")]
    replace: Option<Replace>,
    /// Ask the process for a report of its GPU memory, for `status` and metrics. Only a build with the fix
    /// `memory-report` writes one. Default: true.
    memory_report: Option<bool>,
    /// What a process listens on: `unix`, a socket that only we can reach, or `tcp`, a free port of 127.0.0.1, which any
    /// user of the machine can reach; `auto` takes the socket, and the port where llama-server is known to take no socket
    /// (before about b5000, `ik_llama.cpp`). Default: "auto".
    #[schemars(schema_with = "schema::socket")]
    socket: Option<Socket>,
    /// Write what is read about each process, memory and work, to a file in the state directory, for
    /// `llama-warden policy replay`. Default: false.
    record: Option<bool>,
    /// How a client's leaving ends its work where the answer is no stream: `auto` by the fix `cancel-nonstream` where the
    /// build has it, `assemble` by asking for a stream and putting the answer together, `off` as llama-server does.
    /// Default: "auto".
    #[schemars(schema_with = "schema::cancel")]
    cancel: Option<Cancel>,
    /// Requests at a time on one process. Default: its number of slots.
    #[schemars(range(min = 1))]
    max_in_flight: Option<u32>,
    /// The queue in front of a model.
    #[schemars(with = "schema::Queue")]
    queue: (),
    /// Requests that kill their server.
    #[schemars(with = "schema::Quarantine")]
    quarantine: (),
    /// Start, probe, drain, stop.
    #[schemars(with = "schema::Lifecycle")]
    lifecycle: (),
    /// When a process is replaced, and how growth of its memory is answered.
    policy: AllPolicyKeys,
    /// What is changed in requests before a model gets them.
    request: RequestKeys,
}
