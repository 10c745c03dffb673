//! Modes of running a model, as named in a configuration.

use serde::{Deserialize, Serialize};

/// Way of replacing a generation by the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplaceMode {
    /// Drain, stop, start; requests queue meanwhile. Needs no extra memory.
    Sequential,
    /// Start the next generation, switch, then drain the old one. Needs memory for both.
    Overlap,
    /// Overlap if host memory allows it and no GPU can run short, else sequential.
    Auto,
}

/// Listener of a process.
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
    /// Executed once more on the next process, because computing an answer has no other effect.
    #[default]
    Continue,
    /// The client gets an error and may retry.
    Error,
}

/// Output to a streaming client while its model loads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhileLoading {
    /// The head of the answer and comments, which clients skip and which keep proxies from closing the
    /// connection.
    #[default]
    Comment,
    /// In chats, the progress of the load as reasoning text; elsewhere comments.
    Reasoning,
    /// Nothing before the model's own answer.
    Off,
}

/// Choice among several models of one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChooseMode {
    /// The first that is loaded; else the first that is loading; else the first.
    #[default]
    Loaded,
    /// The first that is loaded or fits without unloading another model; else the first.
    Room,
}

/// Carrying over of conversations in a replacement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WarmMode {
    /// Slots by file if build, model and disk allow it, else by evaluating their prompts again.
    #[default]
    Auto,
    /// No conversation is kept, and the next process starts cold.
    Off,
}

/// Way to end the work of a non-streamed answer whose client has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CancelMode {
    /// By the fix, if the build has it.
    Auto,
    /// By requesting a stream and assembling the answer.
    Assemble,
    /// Not ended.
    Off,
}
