//! What the process that serves asks of the root, and what it is answered. Both may be of different versions: what is
//! added has to be optional, and what cannot be read ends the conversation.

use std::ffi::OsString;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::process::group::Exit;
use crate::spec::SpawnRequest;

/// A child of the root, as the root and its successors call it. Never reused.
pub(crate) type ChildId = u64;

/// The next instance of ourselves: a program with our own arguments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// The file.
    pub binary: PathBuf,
    /// What it is called.
    pub called: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
}

/// A question, or an order. Those with a number are answered.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ask {
    /// Create a process.
    Spawn { number: u64, request: Box<SpawnRequest> },
    /// Create the next instance; its end of the hand-over comes along.
    Succeed { number: u64, program: Program },
    /// How this child has ended, which it has.
    Reap { number: u64, child: ChildId },
    /// Send a signal to a child's group.
    Signal { child: ChildId, kill: bool },
    /// Nobody will ask for this child any more. If it runs, it is killed.
    Forget { child: ChildId },
    /// This one serves from now on.
    Serves { child: ChildId },
}

/// An answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// A process was created. Its pidfd comes along, and its output, if it has any.
    Created { number: u64, child: ChildId, pid: i32 },
    /// It was not: the number of the error, if it has one, and words.
    Failed { number: u64, errno: Option<i32>, message: String },
    /// How it has ended.
    Reaped { number: u64, exit: Exit },
}

impl Answer {
    pub(super) const fn number(&self) -> u64 {
        match self {
            Self::Created { number, .. } | Self::Failed { number, .. } | Self::Reaped { number, .. } => {
                *number
            }
        }
    }
}
