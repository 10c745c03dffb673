//! The root: the first instance of the program, which forks all processes for its successors.
//!
//! The kernel ends a child when the thread that forked it ends. So the first instance stays after a
//! handover: it forks, reaps and signals for the serving instance, and all processes end when it ends.
//!
//! ```text
//!     first instance: serves ── handover ──> only the root: forks, reaps, signals
//!                                 │ wire: request, answer, files
//!     its successor:   starts ────┴──> serves ── handover ──> drains, ends
//!                                                   │
//!     the next one:                    starts ──────┴───────> serves
//! ```
//!
//! Requests and answers may be between different versions, so new fields have to be optional. An unreadable
//! message ends the connection.
//!
//! | file | job |
//! |---|---|
//! | `wire` | messages with files |
//! | `family` | the root's children, which of them serves, and which get an order |
//! | `desk` | answers one successor |
//! | `client` | the successor's connection |

pub(crate) mod client;
pub(crate) mod desk;
pub(crate) mod family;
pub mod wire;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::process::group::ProcessExit;
use crate::spec::SpawnRequest;

static ROOT_PID: OnceLock<u32> = OnceLock::new();

/// Declares this process a successor of the process `root`. Call it once, before anything else.
pub fn set_root(root: u32) {
    // A second call has no effect.
    let _known = ROOT_PID.set(root);
}

/// PID of the first process, by which the instance is known.
pub fn instance_pid() -> u32 {
    ROOT_PID.get().copied().unwrap_or_else(std::process::id)
}

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
enum RootRequest {
    Spawn {
        number: u64,
        request: Box<SpawnRequest>,
    },
    /// Create the next instance; its end of the handover connection is attached.
    Succeed {
        number: u64,
        program: SuccessorProgram,
    },
    Reap {
        number: u64,
        child: ChildId,
    },
    /// Send SIGTERM, or SIGKILL if `kill`, to a child's group.
    Signal {
        child: ChildId,
        kill: bool,
    },
    /// Release a child. If it runs, it is killed.
    Forget {
        child: ChildId,
    },
    Serves {
        child: ChildId,
    },
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RootAnswer {
    /// The process was created. Attached: its pidfd, and the read ends of its output, if it has any.
    Created {
        number: u64,
        child: ChildId,
        pid: i32,
    },
    /// The process was not created; with the error number, if any, and a message.
    Failed {
        number: u64,
        errno: Option<i32>,
        message: String,
    },
    Reaped {
        number: u64,
        exit: ProcessExit,
    },
}

impl RootAnswer {
    const fn number(&self) -> u64 {
        match self {
            Self::Created { number, .. } | Self::Failed { number, .. } | Self::Reaped { number, .. } => {
                *number
            }
        }
    }
}
