//! Command and options of a process.

use serde::{Deserialize, Serialize};

use crate::spec::{ModelSpec, ServerCommand, SocketMode, SpawnRequest};

/// Command and options of a process. A process with an equal recipe need not be replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessRecipe {
    pub(crate) request: SpawnRequest,
    pub(crate) memory_report: bool,
    pub(crate) reclaim: bool,
    socket: SocketMode,
}

impl ProcessRecipe {
    pub(crate) fn command(&self) -> &ServerCommand {
        &self.request.command
    }
}

pub(crate) fn process_recipe(spec: &ModelSpec) -> ProcessRecipe {
    ProcessRecipe {
        request: SpawnRequest { command: spec.command.clone(), oom_score_adj: spec.oom_score_adj },
        memory_report: spec.run.memory_report,
        reclaim: spec.recycle.common.reclaim,
        socket: spec.run.socket,
    }
}
