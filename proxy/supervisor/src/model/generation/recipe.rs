//! Command and options of a process.

use serde::{Deserialize, Serialize};

use crate::spec::{ModelSpec, ServerCommand, SocketMode, SpawnRequest};

/// Command and options of a process. A process with an equal recipe need not be replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessRecipe {
    pub(in crate::model) request: SpawnRequest,
    pub(in crate::model) memory_report: bool,
    pub(in crate::model) reclaim: bool,
    socket: SocketMode,
}

impl ProcessRecipe {
    pub(in crate::model) fn command(&self) -> &ServerCommand {
        &self.request.command
    }
}

pub(in crate::model) fn process_recipe(spec: &ModelSpec) -> ProcessRecipe {
    ProcessRecipe {
        request: SpawnRequest { command: spec.command.clone(), oom_score_adj: spec.oom_score_adj },
        memory_report: spec.run.memory_report,
        reclaim: spec.recycle.common.reclaim,
        socket: spec.run.socket,
    }
}
