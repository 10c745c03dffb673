//! Words with which a configuration says how a model is run.

use serde::{Deserialize, Serialize};

/// How one generation is replaced by the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Replace {
    /// Drain, stop, start; requests queue meanwhile. Needs no extra memory.
    Sequential,
    /// Start the next generation, switch, then drain the old one. Needs memory for both.
    Overlap,
    /// Overlap where host memory allows and no GPU could be short of memory, else sequential.
    Auto,
}

/// What a process listens on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Socket {
    /// A Unix socket, unless the binary is known not to take one; then a port.
    #[default]
    Auto,
    /// A Unix socket in a private directory: nobody but us can reach the process.
    Unix,
    /// A free port of 127.0.0.1: any user of the machine can reach the process.
    Tcp,
}

/// What becomes of a request whose server dies, or is killed, before it has answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnDeath {
    /// It is executed once more on the next process: what computes an answer changes nothing else.
    #[default]
    Continue,
    /// Its client gets an error, and may send it again.
    Error,
}

/// What the client of a stream gets while its model loads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhileLoading {
    /// The head of the answer, and comments, which clients skip and proxies take for a sign of life.
    #[default]
    Comment,
    /// In chats how far the load is, as text of reasoning; elsewhere comments.
    Reasoning,
    /// Nothing before the model's own answer.
    Off,
}

/// Which of several models a name means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Choose {
    /// The first that is loaded; if none is, the first that loads; else the first.
    #[default]
    Loaded,
    /// The first that is loaded or for which no other model would be unloaded; if there is none, the first.
    Room,
}

/// Whether what conversations will need next goes along when a process is replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Warm {
    /// Slots by file where the build, the model and the disk allow it, else their prompts are evaluated again.
    #[default]
    Auto,
    /// Nothing of a conversation is kept, and the next process begins cold.
    Off,
}

/// How a client's leaving ends its work where the answer is no stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cancel {
    /// By the fix, where the build has it.
    Auto,
    /// By streams that the gateway puts together.
    Assemble,
    /// Not at all.
    Off,
}
