//! What a process is made of: whether a new one is needed is seen by comparing two of these.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::spec::{Command, ModelSpec, Socket, SpawnRequest};

/// What a process is made of. Two equal ones mean that nothing needs a new process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Recipe {
    pub(super) request: SpawnRequest,
    pub(super) memory_report: bool,
    pub(super) reclaim: bool,
    socket: Socket,
}

impl Recipe {
    pub(super) fn binary(&self) -> &Path {
        &self.command().binary
    }

    pub(super) fn command(&self) -> &Command {
        &self.request.command
    }
}

/// What a process of this model is made of.
pub(super) fn recipe(spec: &ModelSpec) -> Recipe {
    let request = SpawnRequest { command: spec.command.clone(), oom_score_adj: spec.oom_score_adj };
    Recipe {
        request,
        memory_report: spec.run.memory_report,
        reclaim: spec.recycle.common.reclaim,
        socket: spec.run.socket,
    }
}
