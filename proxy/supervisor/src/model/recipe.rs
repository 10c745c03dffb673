//! Recipe of a process: its command and options. If the recipe that the configuration gives differs from the
//! running process's recipe, a new process is needed.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::spec::{ModelSpec, ServerCommand, SocketMode, SpawnRequest};

/// Command and options of a process. If two recipes are equal, no new process is needed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessRecipe {
    pub(super) request: SpawnRequest,
    pub(super) memory_report: bool,
    pub(super) reclaim: bool,
    socket: SocketMode,
}

impl ProcessRecipe {
    pub(super) fn binary(&self) -> &Path {
        &self.command().binary
    }

    pub(super) fn command(&self) -> &ServerCommand {
        &self.request.command
    }
}

/// Recipe for a new process of this model.
pub(super) fn process_recipe(spec: &ModelSpec) -> ProcessRecipe {
    let request = SpawnRequest { command: spec.command.clone(), oom_score_adj: spec.oom_score_adj };
    ProcessRecipe {
        request,
        memory_report: spec.run.memory_report,
        reclaim: spec.recycle.common.reclaim,
        socket: spec.run.socket,
    }
}
