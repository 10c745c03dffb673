//! Errors and refusals. Each message names the failed action and its object, and tells how to fix the error.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use warden_policies::sample::MemoryKind;
use warden_policies::{ByteSize, ModelName};

/// Failure of a start, with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendFailure {
    /// Kind of failure.
    pub kind: FailureKind,
    /// Description and advice for people, in one sentence.
    pub message: String,
    /// Last lines of the child's output.
    pub lines: Vec<String>,
    /// Consecutive failures, including this one.
    pub failures: u32,
}

/// Kind of a failed start, from the exit status and the child's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The binary is missing or cannot be run.
    NotExecutable,
    /// A shared library is missing.
    MissingLibrary,
    /// The model file is missing, truncated or not a model.
    BadModel,
    /// The model could not be loaded, for an unknown reason.
    NotLoaded,
    /// llama-server does not know a flag, or its value is wrong.
    BadFlag,
    /// The address could not be bound.
    Address,
    /// Host or device memory ran out.
    OutOfMemory,
    /// A signal ended the process.
    Signal,
    /// The process did not become ready in time.
    Timeout,
    /// The process loaded much less onto GPUs than an earlier one, and another process could serve.
    Degraded,
    /// The process ended with an exit code for an unknown reason.
    Exit,
    /// The remote endpoint does not answer, or refuses requests.
    Endpoint,
}

impl FailureKind {
    /// True if another start with the same command cannot succeed.
    pub(crate) const fn is_permanent(self) -> bool {
        matches!(self, Self::NotExecutable | Self::MissingLibrary | Self::BadModel | Self::BadFlag)
    }
}

/// Error in a fleet's start or configuration.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum FleetError {
    #[error(
        "cannot make the private directory {} for the sockets of the backends: {source}; choose another with \
         `runtime_dir`",
        path.display()
    )]
    RuntimeDir { path: PathBuf, source: io::Error },
    #[error(
        "the socket path {} would have {length} bytes, and a Unix socket's path has at most {limit}: choose a \
         shorter `runtime_dir`",
        path.display()
    )]
    SocketPath { path: PathBuf, length: usize, limit: usize },
    #[error(
        "cannot write the ledger {}: {source}; make its directory writable or choose another with `state_dir`",
        path.display()
    )]
    StateDir { path: PathBuf, source: io::Error },
    /// The writer thread of the state directory cannot be started.
    #[error("cannot start a thread: {0}; raise the limit of tasks (`pids.max`, `TasksMax`)")]
    NoThread(io::Error),
    #[error(
        "the name `{name}` means both the model `{first}` and the model `{second}`: rename one, or remove the alias"
    )]
    DuplicateName { name: String, first: ModelName, second: ModelName },
    #[error("the model `{0}` has `replicas = 0`: give it 1 or more")]
    NoReplicas(ModelName),
    #[error("the fleet is shutting down and takes no new configuration")]
    ShuttingDown,
}

/// Failure to find the model for a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum ResolveError {
    #[error("there is no model `{name}`: {}", known_models(known))]
    Unknown { name: String, known: Vec<String> },
    #[error("no model was named: {}", known_models(known))]
    Missing { known: Vec<String> },
}

fn known_models(known: &[String]) -> String {
    if known.is_empty() {
        "none is configured".to_owned()
    } else {
        format!("the models are `{}`", known.join("`, `"))
    }
}

/// Shortage of memory for a prompt, in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NoRoom {
    /// Host memory or GPU on which memory is short.
    pub series: MemoryKind,
    /// Tokens of the prompt, as far as known.
    pub tokens: u64,
    /// Bytes needed beyond the held memory, including the reserve.
    pub needed: u64,
    /// Bytes left until the memory limit.
    pub have: u64,
    /// Measured bytes per token beyond the largest prompt so far.
    pub bytes_per_token: f64,
    /// Time to wait before a retry. Another version of the program may read the serialized form.
    #[serde(
        alias = "retry_after_seconds",
        deserialize_with = "warden_policies::seconds::known::deserialize"
    )]
    pub retry_after: Duration,
}

impl NoRoom {
    /// Serializes the shortage in the form that events use.
    pub(crate) fn serialize_for_event<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct NoRoomEvent {
            series: MemoryKind,
            tokens: u64,
            needed: u64,
            have: u64,
            bytes_per_token: f64,
            #[serde(with = "warden_policies::seconds::known")]
            retry_after_seconds: Duration,
        }
        let Self { series, tokens, needed, have, bytes_per_token, retry_after } = *self;
        NoRoomEvent { series, tokens, needed, have, bytes_per_token, retry_after_seconds: retry_after }
            .serialize(to)
    }
}

impl std::fmt::Display for NoRoom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { series, tokens, needed, have, bytes_per_token, .. } = *self;
        write!(
            f,
            "a prompt of about {tokens} tokens does not fit into the memory `{series}`: it needs {} \
             ({bytes_per_token:.0} bytes for each token beyond the largest prompt so far, and a reserve), and {} are \
             left; send a shorter prompt, or raise the hard budget",
            ByteSize(needed),
            ByteSize(have)
        )
    }
}

/// Reason for not granting a lease. Nothing was sent to any backend. Another version of the program may
/// read this type, and ignores variants that it does not know.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum LeaseDenied {
    #[error("the queue is full: {waiting} of {depth} places are taken")]
    QueueFull { waiting: usize, depth: usize },
    #[error("{0}")]
    NoRoom(NoRoom),
    #[error("no backend was free within {:.1} s", waited.as_secs_f64())]
    Deadline { waited: Duration },
    #[error(
        "it is loaded in {} s at the earliest, and a request waits for {} s at most (`queue.wait`); send again then",
        left.as_secs_f64().ceil(),
        wait.as_secs()
    )]
    TooSlow { left: Duration, wait: Duration },
    /// The model can never be loaded: pinned models leave too little memory.
    #[error("it cannot be loaded: {0}")]
    NeverLoaded(String),
    /// The backend does not start at present; time until the next attempt.
    #[error("the backend does not start: {}", .0.message)]
    StartFailed(BackendFailure, Option<Duration>),
    /// The backend needs a changed flag or file; maximum time until the next start.
    #[error("the backend cannot start before something changes: {}", .0.message)]
    Failed(BackendFailure, Duration),
    /// The remote endpoint does not answer; time until the next probe.
    #[error("{}", .0.message)]
    Silent(BackendFailure, Duration),
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the model was removed from the configuration")]
    Removed,
}

/// Failure of an operator's command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum ControlError {
    #[error(transparent)]
    Unknown(#[from] ResolveError),
    #[error("the new process of `{model}` did not start: {}", failure.message)]
    StartFailed { model: ModelName, failure: BackendFailure },
    #[error("the restart of `{model}` was given up: {because}")]
    GivenUp { model: ModelName, because: String },
    #[error("`{model}` cannot be asked to give memory back: {because}")]
    CannotReclaim { model: ModelName, because: String },
    #[error("`{model}` cannot be pinned: {because}")]
    CannotPin { model: ModelName, because: String },
    #[error("`{model}` is served by an endpoint (`remotes`) and has no process here that could be {what}")]
    Remote { model: ModelName, what: &'static str },
    #[error("the fleet is shutting down")]
    ShuttingDown,
}

/// Failure to start or find a canary.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum CanaryError {
    #[error(transparent)]
    Unknown(#[from] ResolveError),
    #[error(
        "`{0}` is served by an endpoint (`remotes`): there is no llama-server here that another one could be \
         compared with"
    )]
    Remote(ModelName),
    #[error(
        "`{0}` is served by its own `command`: only another llama-server can be compared with a llama-server"
    )]
    OtherProgram(ModelName),
    #[error(
        "`{0}` has a canary: wait for its verdict (`llama-warden canary status`), or end it with \
         `llama-warden canary stop {0}`"
    )]
    Exists(ModelName),
    #[error("`{0}` has no canary: `llama-warden canary start {0}` begins one")]
    None(ModelName),
    #[error(
        "cannot try {}: {source}; name a llama-server, or a build of `llama-warden builds list`",
        path.display()
    )]
    NoBinary { path: PathBuf, source: io::Error },
    #[error("cannot try {}: it is no file that can be executed; name a llama-server", .0.display())]
    NotABinary(PathBuf),
    #[error("a canary gets a share of conversations above 0 and up to {}: {share} is none", most)]
    Share { share: f64, most: f64 },
    #[error(transparent)]
    Fleet(#[from] FleetError),
    #[error("the canary of `{model}` did not begin: {because}")]
    DidNotBegin { model: ModelName, because: String },
    #[error("the fleet is shutting down")]
    ShuttingDown,
}

/// Failure to create a process.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum SpawnError {
    #[error("cannot run {}: {source}", binary.display())]
    Exec { binary: PathBuf, source: io::Error },
    #[error("cannot run {} in the directory {}: {source}", binary.display(), directory.display())]
    Directory { binary: PathBuf, directory: PathBuf, source: io::Error },
    #[error("cannot use the directory for sockets {}: {source}", directory.display())]
    Sockets { directory: PathBuf, source: io::Error },
    /// The process was created but cannot be watched, and was killed.
    #[error("cannot watch process {pid}: {source}")]
    Watch { pid: u32, source: io::Error },
    #[error("cannot run {}: the main thread no longer creates processes", binary.display())]
    NurseryGone { binary: PathBuf },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_says_what_was_being_done_and_what_cures_it() {
        let source = || io::Error::other("the kernel said no");
        let failure = || BackendFailure {
            kind: FailureKind::BadModel,
            message: "the model file /m.gguf does not exist".into(),
            lines: Vec::new(),
            failures: 2,
        };
        let model = || ModelName::new("m");
        let unknown = |known: &[&str]| ResolveError::Unknown {
            name: "x".into(),
            known: known.iter().map(|&name| name.to_owned()).collect(),
        };
        let short = NoRoom {
            series: MemoryKind::Host,
            tokens: 9000,
            needed: 3 << 30,
            have: 1 << 30,
            bytes_per_token: 65_536.0,
            retry_after: Duration::from_secs(20),
        };
        let binary = || PathBuf::from("/opt/llama-server");
        let fleet: [FleetError; 6] = [
            FleetError::RuntimeDir { path: "/run/w".into(), source: source() },
            FleetError::SocketPath { path: "/run/w/m-1-g1.sock".into(), length: 120, limit: 107 },
            FleetError::StateDir { path: "/var/w/recycles.jsonl".into(), source: source() },
            FleetError::DuplicateName { name: "fast".into(), first: model(), second: ModelName::new("n") },
            FleetError::NoReplicas(model()),
            FleetError::ShuttingDown,
        ];
        let denied = [
            LeaseDenied::QueueFull { waiting: 8, depth: 8 },
            LeaseDenied::NoRoom(short),
            LeaseDenied::Deadline { waited: Duration::from_millis(30_040) },
            LeaseDenied::StartFailed(failure(), None),
            LeaseDenied::Failed(failure(), Duration::from_secs(60)),
            LeaseDenied::ShuttingDown,
            LeaseDenied::Removed,
        ];
        let control = [
            unknown(&[]).into(),
            unknown(&["a", "b"]).into(),
            ResolveError::Missing { known: vec!["a".into()] }.into(),
            ControlError::StartFailed { model: model(), failure: failure() },
            ControlError::GivenUp { model: model(), because: "another restart began".into() },
            ControlError::CannotReclaim { model: model(), because: "no process of it serves now".into() },
            ControlError::CannotPin { model: model(), because: "another build is only tried".into() },
            ControlError::ShuttingDown,
        ];
        let spawn = [
            SpawnError::Exec { binary: binary(), source: source() },
            SpawnError::Directory { binary: binary(), directory: "/srv".into(), source: source() },
            SpawnError::Sockets { directory: "/run/w".into(), source: source() },
            SpawnError::Watch { pid: 4711, source: source() },
            SpawnError::NurseryGone { binary: binary() },
        ];
        let told = fleet.iter().map(ToString::to_string).chain(denied.iter().map(ToString::to_string));
        let told =
            told.chain(control.iter().map(ToString::to_string)).chain(spawn.iter().map(ToString::to_string));
        insta::assert_snapshot!(told.map(|error| error + "\n").collect::<String>());
    }
}
