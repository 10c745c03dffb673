//! What a running process is to the instance that goes on with it. It may have been written by another version: what is added
//! here has to have a default.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use warden_policies::{GenerationId, ServerFacts, Work};

use crate::process::endpoint::Endpoint;
use crate::process::needs::Kin;
use crate::process::root::ask::ChildId;
use crate::spec::Command;

/// A process and its files: the pidfd, standard output, standard error.
#[derive(Debug)]
pub(crate) struct Heir {
    /// What is written of it.
    pub(crate) record: HeirRecord,
    pub(crate) files: Vec<OwnedFd>,
}

/// What is written of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HeirRecord {
    pub(crate) replica: u32,
    pub(crate) generation: GenerationId,
    pub(crate) child: ChildId,
    pub(crate) pid: i32,
    pub(crate) endpoint: Endpoint,
    /// Its path, or what its other files are named after.
    pub(crate) socket: PathBuf,
    /// What it was made of, but for where it listens and reports.
    pub(crate) made_of: serde_json::Value,
    /// The command with which it was started, as far as it matters for asking it.
    pub(crate) command: Command,
    pub(crate) facts: ServerFacts,
    /// What it was started from, if that is known: what lies there by now may be something else.
    #[serde(default)]
    pub(crate) kin: Option<Kin>,
    pub(crate) saves_for_us: bool,
    /// When it was made, by the clock of its fleet.
    pub(crate) spawned: Duration,
    /// How long it loaded.
    pub(crate) loading: Duration,
    pub(crate) work: Work,
    /// What is known of its memory.
    pub(crate) memory: serde_json::Value,
}

/// A process that takes requests in another instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gate {
    pub(crate) model: String,
    pub(crate) generation: GenerationId,
    pub(crate) endpoint: Endpoint,
    pub(crate) facts: ServerFacts,
    pub(crate) slots: Option<u32>,
    /// What it was started from, if that is known: an answer that another such process began can be gone on with there.
    #[serde(default)]
    pub(crate) kin: Option<Kin>,
    /// Something was set in a process of the model while it ran: answers that were under way did not follow that.
    #[serde(default)]
    pub(crate) touched: bool,
}
