//! Messages from the serving process to the root, and the root's answers. The two may have different
//! versions, so new fields have to be optional. An unreadable message ends the connection.

use std::ffi::OsString;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::process::group::ProcessExit;
use crate::spec::SpawnRequest;

/// Number of a child of the root, never reused.
pub(crate) type ChildId = u64;

/// Program that becomes the next instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SuccessorProgram {
    /// Path of the program file.
    pub binary: PathBuf,
    /// Program name (`argv[0]`).
    pub called: OsString,
    /// Arguments, without the program name.
    pub args: Vec<OsString>,
}

/// A request to the root. A request with a number is answered.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RootRequest {
    /// Create a process.
    Spawn { number: u64, request: Box<SpawnRequest> },
    /// Create the next instance; its end of the handover connection is attached.
    Succeed { number: u64, program: SuccessorProgram },
    /// Reap a child that has ended, and return its exit status.
    Reap { number: u64, child: ChildId },
    /// Send SIGTERM, or SIGKILL if `kill`, to a child's group.
    Signal { child: ChildId, kill: bool },
    /// Release a child. If it runs, it is killed.
    Forget { child: ChildId },
    /// Record that this child, an instance, serves from now on.
    Serves { child: ChildId },
}

/// Answer to a request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RootAnswer {
    /// The process was created. Attached: its pidfd, and the read ends of its output, if it has any.
    Created { number: u64, child: ChildId, pid: i32 },
    /// The process was not created; with the error number, if any, and a message.
    Failed { number: u64, errno: Option<i32>, message: String },
    /// Exit of the child.
    Reaped { number: u64, exit: ProcessExit },
}

impl RootAnswer {
    pub(super) const fn number(&self) -> u64 {
        match self {
            Self::Created { number, .. } | Self::Failed { number, .. } | Self::Reaped { number, .. } => {
                *number
            }
        }
    }
}
