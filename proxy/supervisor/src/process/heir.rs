//! A running process as handed over to the next instance. Another version may have written it: new fields
//! need a default.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use warden_policies::{GenerationId, ServerFacts, WorkDone};

use crate::process::endpoint::ListenAddress;
use crate::process::needs::AnswerIdentity;
use crate::process::root::ask::ChildId;
use crate::spec::ServerCommand;

/// A process and its files: pidfd, standard output, standard error.
#[derive(Debug)]
pub(crate) struct ProcessHeir {
    /// Serialized part.
    pub(crate) record: HeirRecord,
    pub(crate) files: Vec<OwnedFd>,
}

/// Serialized part of an [`ProcessHeir`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HeirRecord {
    pub(crate) replica: u32,
    pub(crate) generation: GenerationId,
    pub(crate) child: ChildId,
    pub(crate) pid: i32,
    pub(crate) endpoint: ListenAddress,
    /// Socket path, or the path from which its other files get their names.
    pub(crate) socket: PathBuf,
    /// Recipe, without addresses and report paths.
    pub(crate) made_of: serde_json::Value,
    /// Command that was started, as far as needed for requests to the process.
    pub(crate) command: ServerCommand,
    pub(crate) facts: ServerFacts,
    /// Identity of its answers at the start, if known. Files may have changed since.
    #[serde(default)]
    pub(crate) kin: Option<AnswerIdentity>,
    pub(crate) saves_for_us: bool,
    /// Start time by the fleet's clock.
    pub(crate) spawned: Duration,
    /// Load time.
    pub(crate) loading: Duration,
    pub(crate) work: WorkDone,
    /// Serialized memory tracker.
    pub(crate) memory: serde_json::Value,
}

/// Process that takes requests in another instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenGate {
    pub(crate) model: String,
    pub(crate) generation: GenerationId,
    pub(crate) endpoint: ListenAddress,
    pub(crate) facts: ServerFacts,
    pub(crate) slots: Option<u32>,
    /// Identity of its answers at the start, if known. A process with the same identity can continue an
    /// answer begun by this one.
    #[serde(default)]
    pub(crate) kin: Option<AnswerIdentity>,
    /// A setting of the model was changed while the process ran; answers under way may not follow it.
    #[serde(default)]
    pub(crate) touched: bool,
}
