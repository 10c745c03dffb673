//! The root: the first instance of the program, which forks all processes for its successors.
//!
//! The kernel ends a child with the thread that forked it. So the first instance stays after a handover: it
//! forks, reaps and signals for the serving instance, and all processes end with it.
//!
//! ```text
//!     first instance: serves ── handover ──> only the root: forks, reaps, signals
//!                                 │ wire: request, answer, files
//!     its successor:   starts ────┴──> serves ── handover ──> drains, ends
//!                                                   │
//!     the next one:                    starts ──────┴───────> serves
//! ```
//!
//! Both sides may have different versions, so new fields have to be optional.
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

/// Declares this process a successor of the process `root`. Call it once, at the start.
pub fn set_root(root: u32) {
    let _known = ROOT_PID.set(root);
}

/// PID of the root.
pub fn instance_pid() -> u32 {
    ROOT_PID.get().copied().unwrap_or_else(std::process::id)
}

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

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RootRequest {
    Spawn {
        number: u64,
        request: Box<SpawnRequest>,
    },
    /// Creates the next instance; its end of the handover connection is attached.
    Succeed {
        number: u64,
        program: SuccessorProgram,
    },
    Reap {
        number: u64,
        child: ChildId,
    },
    /// Sends SIGTERM, or SIGKILL if `kill`, to a child's group.
    Signal {
        child: ChildId,
        kill: bool,
    },
    /// Releases a child, and kills it if it runs.
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
    /// The process was created. Attached: its pidfd, and the read ends of its output, if any.
    Created {
        number: u64,
        child: ChildId,
        pid: i32,
    },
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
