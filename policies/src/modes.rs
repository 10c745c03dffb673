//! Modes of running a model, with their names in the configuration.

use serde::{Deserialize, Serialize};

use crate::named::named_enum;

/// Way of replacing a process by its successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplaceMode {
    /// Drain, stop, then start; requests are queued meanwhile. Needs no extra memory.
    Sequential,
    /// Start the new process, switch over, then drain the old one. Needs memory for both.
    Overlap,
    /// Overlap if host memory allows it and no GPU can run short, else sequential.
    Auto,
}

/// Kind of socket that a llama-server process listens on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SocketMode {
    /// A Unix socket, or a port if the binary is known not to support sockets.
    #[default]
    Auto,
    /// A Unix socket in a private directory: only llama-warden can reach the process.
    Unix,
    /// A free port of 127.0.0.1: any local user can reach the process.
    Tcp,
}

/// Handling of a request whose server dies, or is killed, before it has answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnDeath {
    /// llama-warden sends the request once more, to the next process: computing has no other effect.
    #[default]
    Continue,
    /// The client gets an error and may retry.
    Error,
}

/// Output to a streaming client while its model loads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhileLoading {
    /// Sends the head, then comments: clients ignore these, and proxies keep the connection open.
    #[default]
    Comment,
    /// Sends the progress of the load as reasoning text in chats, and comments elsewhere.
    Reasoning,
    /// Sends nothing before the model answers.
    Off,
}

/// Choice among several models that share a name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChooseMode {
    /// The first model that is loaded; else the first that is loading; else the first of the list.
    #[default]
    Loaded,
    /// The first model that is loaded or fits without unloading another; else the first of the list.
    Room,
}

/// Way of carrying conversations over to the next process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WarmMode {
    /// Slots are saved to files if build, model and disk allow it; else their prompts are evaluated again.
    #[default]
    Auto,
    /// As `Auto`, and conversations of an unloaded model stay on disk, also after the exit of the program.
    Disk,
    /// No conversation is kept, and the next process starts cold.
    Off,
}

/// Way to stop computing a non-streamed answer whose client has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CancelMode {
    /// Uses the build's own cancellation, if the build contains that fix.
    Auto,
    /// Does not stop the computation.
    Off,
}

named_enum! {
    /// Handling of a prompt for which memory is insufficient.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum AdmissionMode {
        /// The gateway checks no prompt.
        #[default]
        Off = "off",
        /// The gateway sends the prompt and logs a warning.
        Warn = "warn",
        /// The prompt waits, goes to another replica, or is refused.
        Enforce = "enforce",
    }
}

named_enum! {
    /// Action on a process whose answers have become faulty: endless repetitions, no text, null numbers.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum AnswersMode {
        /// llama-warden does not look at answers.
        Off = "off",
        /// llama-warden only reports the symptom.
        #[default]
        Observe = "observe",
        /// The process is drained and replaced.
        Replace = "replace",
    }
}

named_enum! {
    /// Action on memory that grows without bound, long before it reaches a budget.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum GrowthMode {
        /// No action; verdicts are still shown.
        Off = "off",
        /// llama-warden only reports the action.
        #[default]
        Observe = "observe",
        /// The backend is replaced before it reaches a limit.
        Recycle = "recycle",
    }
}
