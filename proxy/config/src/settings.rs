//! The configuration as the program uses it: complete, because the defaults are its lowest layer.
//!
//! Sections with compiled-in defaults are the types of `warden_policies::defaults`; here is what has no default number:
//! addresses, paths, models. These types are what is read, what the schema says and what docs/configuration.md has tables of.
//! A key's comment ends in `Default:` and what it is, where that is something. Model tables stay unread until the defaults for
//! all models are merged beneath them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use figment::value::Dict;
use schemars::JsonSchema;
use serde::Deserialize;
use warden_policies::defaults;

use super::listing::Listing;
use super::named::Named;
use super::policy::{Policy, Shared, optional_duration};
use super::remote::RemoteModel;
use super::request::Request;
use super::schema::{self, AllModels, Of, One};

/// Everything but the models' own values.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The public listener, and what a client may cost.
    #[schemars(with = "Of<defaults::Server>")]
    pub server: defaults::Server,
    /// The operator's side: status, restart, logs, metrics.
    #[serde(default)]
    pub admin: Admin,
    /// Where things are kept.
    #[serde(default)]
    pub paths: Paths,
    /// Our own log.
    #[schemars(with = "Of<defaults::Log>")]
    pub log: defaults::Log,
    /// The connection to a backend.
    #[schemars(with = "Of<defaults::Upstream>")]
    pub upstream: defaults::Upstream,
    /// Reading numbers.
    #[schemars(with = "Of<defaults::Sensors>")]
    pub sensors: defaults::Sensors,
    /// How growth of memory is judged: nothing of it is a key.
    #[schemars(skip)]
    pub growth: defaults::Growth,
    /// How endpoints of others are asked: nothing of it is a key.
    #[schemars(skip)]
    pub remote: defaults::Remote,
    /// What is declared of canaries: nothing of it is a key.
    #[schemars(skip)]
    pub canary: defaults::Canary,
    /// What is kept of readings: nothing of it is a key.
    #[schemars(skip)]
    pub series: defaults::Series,
    /// When a backend is ill although it lives.
    #[schemars(with = "Of<defaults::Health>")]
    pub health: defaults::Health,
    /// Budgets over all backends: of the machine, and of each GPU.
    #[serde(default)]
    pub shared: Shared,
    /// The child processes.
    #[schemars(with = "Of<defaults::Child>")]
    pub child: defaults::Child,
    /// Which models are loaded, and who leaves for whom.
    #[schemars(with = "Of<defaults::Loading>")]
    pub loading: defaults::Loading,
    /// Building llama-server.
    #[schemars(with = "Of<defaults::Build>")]
    pub build: defaults::Build,
    /// Experiments with fresh servers: `llama-warden diagnose`.
    #[schemars(with = "Of<defaults::Diagnose>")]
    pub diagnose: defaults::Diagnose,
    /// When one build may take the place of another.
    #[schemars(with = "Of<defaults::Proof>")]
    pub proof: defaults::Proof,
    /// Renewing llama-server: `llama-warden update`.
    #[schemars(with = "Of<defaults::Update>")]
    pub update: defaults::Update,
    /// Traces of requests, for a collector of OpenTelemetry.
    #[schemars(with = "Of<defaults::Telemetry>")]
    pub telemetry: defaults::Telemetry,
    /// What probes, collectors and balancers ask of one instance of several.
    #[schemars(with = "Of<defaults::Probe>")]
    pub probe: defaults::Probe,
    /// Settings for all models; a model's own come first.
    #[schemars(with = "AllModels")]
    pub defaults: Dict,
    /// The models, by the name that clients address.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, One<Model>>")]
    pub models: BTreeMap<String, Dict>,
    /// Models that somebody else's endpoint serves, by the name that clients address.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, One<RemoteModel>>")]
    pub remotes: BTreeMap<String, RemoteModel>,
    /// Names that mean one of several models, or one with other requests.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, One<Named>>")]
    pub names: BTreeMap<String, Named>,
}

/// The operator's side.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Admin {
    /// Unix socket of the admin routes. Default: `admin.sock` in the instance's private directory.
    #[schemars(schema_with = "schema::path")]
    pub socket: Option<PathBuf>,
    /// `host:port` for the admin routes over TCP, metrics among them. Default: none. There is no authentication, so
    /// only loopback addresses are taken.
    pub address: Option<String>,
}

/// Where things are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Paths {
    /// Ledger, and which instances run. Default: `$XDG_STATE_HOME/llama-warden`.
    #[schemars(schema_with = "schema::path")]
    pub state_dir: Option<PathBuf>,
    /// Sockets: each instance makes a private directory `llama-warden-PID` in it, and removes nothing else. Short. `/`, a
    /// home, and where models, the configuration or builds are, are refused. Default: `$XDG_RUNTIME_DIR`, else
    /// `/tmp/llama-warden-UID`.
    #[schemars(schema_with = "schema::path")]
    pub runtime_dir: Option<PathBuf>,
    /// Folders of models: each model file in them is a model of its own, named after it, as long as it is there (docs/models.md).
    /// Default: none.
    #[serde(default)]
    #[schemars(schema_with = "schema::paths")]
    pub models: Vec<PathBuf>,
    /// Folders of patch sets of your own: each is one, or has some in it. `build` applies them beside the curated ones, and
    /// `mitigations` may name their fixes (docs/patches.md). Default: none.
    #[serde(default)]
    #[schemars(schema_with = "schema::paths")]
    pub patches: Vec<PathBuf>,
    /// Builds. Default: `$XDG_DATA_HOME/llama-warden`.
    #[schemars(schema_with = "schema::path")]
    pub data_dir: Option<PathBuf>,
    /// Source archives, cmake and ninja, build trees. Default: `$XDG_CACHE_HOME/llama-warden`.
    #[schemars(schema_with = "schema::path")]
    pub cache_dir: Option<PathBuf>,
}

/// One model with the defaults for all models beneath it. What only one model can have is named in
/// [`schema::OF_ONE_MODEL`].
#[derive(Clone, Debug, Deserialize, JsonSchema)]
pub struct Model {
    /// Model file, short for `-m` in `args`. Relative to the configuration file.
    #[schemars(schema_with = "schema::path")]
    pub model: Option<PathBuf>,
    /// The llama-server to run. Relative to the configuration file. Default: the newest build of the store, else the
    /// `llama-server` in PATH.
    #[schemars(schema_with = "schema::path")]
    pub binary: Option<PathBuf>,
    /// Words put before the binary, of a program that ends in running it: `["nice", "-n", "5"]`, `["numactl", "-N",
    /// "0"]`. llama-warden asks the binary (`--version`, `--help`) through it, too.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub wrapper: Vec<String>,
    /// A build of the store, by its id or the beginning of it.
    pub build: Option<String>,
    /// llama-server's own flags. Those for listening are ours.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub args: Vec<String>,
    /// Arguments that are added behind `args` when the model does not fit into memory as it is, or dies while it loads and starts with them:
    /// a shorter context, fewer layers on GPUs.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub fallback: Vec<String>,
    /// Variables added to our environment.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, String>")]
    pub env: BTreeMap<String, String>,
    /// What is done about memory that grows: `id`, `id=value` or `id.part=value`, such as
    /// `["graph-cache-cap=64", "no-mmap"]`. `llama-warden mitigations list` shows them.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub mitigations: Vec<String>,
    /// Working directory of the process. Relative to the configuration file. Default: ours.
    #[schemars(schema_with = "schema::path")]
    pub directory: Option<PathBuf>,
    /// Other names that clients may use.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub aliases: Vec<String>,
    /// What lists of models say of it.
    #[serde(default)]
    #[schemars(with = "Listing")]
    pub listing: Listing,
    /// The numbers and modes that have defaults.
    #[serde(flatten)]
    #[schemars(with = "Of<defaults::Model>")]
    pub run: defaults::Model,
    /// Write requests to this file, one JSON object a line, for `llama-warden diagnose --replay FILE`. Relative to the
    /// configuration file. Texts become other texts of the same length, pictures others of the same size, names other
    /// names; all that is not known to be harmless is dropped. A reload takes effect at once. Default: none. What people ask
    /// is theirs.
    #[schemars(schema_with = "schema::path")]
    pub record_requests: Option<PathBuf>,
    /// Requests at a time on one process. Default: its number of slots.
    #[schemars(range(min = 1))]
    pub max_in_flight: Option<u32>,
    /// Unloaded when it has had no request for so long; its next request loads it again. Default: never.
    #[serde(default, deserialize_with = "optional_duration")]
    #[schemars(schema_with = "schema::age")]
    pub ttl: Option<Duration>,
    /// The GPUs that it may be on, by their numbers in `llama-warden plan`. Default: those on which it fits.
    #[serde(default)]
    #[schemars(with = "Vec<usize>")]
    pub gpus: Vec<usize>,
    /// Names of groups: of the models of one at most one is loaded at a time.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub groups: Vec<String>,
    /// Models that are loaded along with it, and do not leave for another one, or after their `ttl`, while it is there.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub with: Vec<String>,
    /// The queue in front of the model.
    #[schemars(with = "Of<defaults::Queue>")]
    pub queue: defaults::Queue,
    /// Requests that kill their server.
    #[schemars(with = "Of<defaults::Quarantine>")]
    pub quarantine: defaults::Quarantine,
    /// Start, probe, drain, stop.
    #[schemars(with = "Of<defaults::Lifecycle>")]
    pub lifecycle: defaults::Lifecycle,
    /// When a process is replaced, and how growth of its memory is answered.
    pub policy: Policy,
    /// What is changed in requests before the model gets them.
    #[serde(default)]
    #[schemars(with = "Request")]
    pub request: Request,
    /// The name that the backend sees in place of the client's, for one that looks at it, such as a llama-server that
    /// serves several models itself. It is put in the place of `model` in the body, the form and the query; everything else
    /// stays. Default: what the client wrote.
    pub upstream_model: Option<String>,
}
