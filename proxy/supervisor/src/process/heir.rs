//! A running process as handed over to the next instance. Another version of the program may have written
//! it, so new fields need a default.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use warden_policies::{GenerationId, ServerFacts, WorkDone};

use crate::process::endpoint::ListenAddress;
use crate::process::needs::AnswerIdentity;
use crate::process::root::ChildId;
use crate::spec::ServerCommand;

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
    /// Path of the socket, after which the process's other files are named.
    pub(crate) socket: PathBuf,
    /// Recipe without addresses and report paths.
    pub(crate) made_of: serde_json::Value,
    /// Start command, as far as needed for requests to the process.
    pub(crate) command: ServerCommand,
    pub(crate) facts: ServerFacts,
    /// Identity of the process's answers at its start; files may have changed since.
    #[serde(default)]
    pub(crate) kin: Option<AnswerIdentity>,
    pub(crate) saves_for_us: bool,
    /// True if the process saves slots into the model's directory of conversations on disk.
    #[serde(default)]
    pub(crate) stores_slots: bool,
    /// Start time by the fleet's clock.
    pub(crate) spawned: Duration,
    pub(crate) loading: Duration,
    pub(crate) work: WorkDone,
    pub(crate) memory: serde_json::Value,
}

/// Process with an open gate in the next instance, as reported to the previous instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenGate {
    pub(crate) model: String,
    pub(crate) generation: GenerationId,
    pub(crate) endpoint: ListenAddress,
    pub(crate) facts: ServerFacts,
    pub(crate) slots: Option<u32>,
    /// Identity of the process's answers at its start. Another process with it can continue an answer.
    #[serde(default)]
    pub(crate) kin: Option<AnswerIdentity>,
    /// True if a client changed a setting while the process ran: answers must not be continued.
    #[serde(default)]
    pub(crate) touched: bool,
}
