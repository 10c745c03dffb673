//! A running process in the form in which it is handed over to the next instance. Another version of the
//! program may have written it, so new fields need a default.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use warden_policies::{GenerationId, ServerFacts, WorkDone};

use crate::process::endpoint::ListenAddress;
use crate::process::needs::AnswerIdentity;
use crate::process::root::ChildId;
use crate::spec::ServerCommand;

/// A process and its files: pidfd, standard output, standard error.
#[derive(Debug)]
pub(crate) struct ProcessHeir {
    pub(crate) record: HeirRecord,
    pub(crate) files: Vec<OwnedFd>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HeirRecord {
    pub(crate) replica: u32,
    pub(crate) generation: GenerationId,
    pub(crate) child: ChildId,
    pub(crate) pid: i32,
    pub(crate) endpoint: ListenAddress,
    /// Path of the socket; for a process on a port, the path from which its other files get their names.
    pub(crate) socket: PathBuf,
    /// Command and options of the process, without addresses and report paths.
    pub(crate) made_of: serde_json::Value,
    /// Command with which the process was started, as far as needed for requests to it.
    pub(crate) command: ServerCommand,
    pub(crate) facts: ServerFacts,
    /// Identity of the process's answers when it started, if known. Files may have changed since.
    #[serde(default)]
    pub(crate) kin: Option<AnswerIdentity>,
    pub(crate) saves_for_us: bool,
    /// Start time of the process, by the fleet's clock.
    pub(crate) spawned: Duration,
    pub(crate) loading: Duration,
    pub(crate) work: WorkDone,
    pub(crate) memory: serde_json::Value,
}

/// Process that takes requests in the deciding instance, reported to the previous one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenGate {
    pub(crate) model: String,
    pub(crate) generation: GenerationId,
    pub(crate) endpoint: ListenAddress,
    pub(crate) facts: ServerFacts,
    pub(crate) slots: Option<u32>,
    /// Identity of the process's answers when it started, if known. Another process with the same identity
    /// can continue an answer that this one began.
    #[serde(default)]
    pub(crate) kin: Option<AnswerIdentity>,
    /// True if a setting of the model was changed while the process ran; answers in progress may not follow
    /// the change.
    #[serde(default)]
    pub(crate) touched: bool,
}
