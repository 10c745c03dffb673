//! The output of the children: kept in a ring per model and sent to those who listen.

use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;
use warden_policies::{GenerationId, ModelName};

/// Which output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// When it was read, RFC 3339.
    pub at: String,
    /// The model.
    pub model: ModelName,
    /// The process.
    pub generation: GenerationId,
    /// Where it came from.
    pub stream: Stream,
    /// The text, without the line end; a longer line than configured is cut.
    pub text: String,
}

/// The lines so far and those to come.
#[derive(Debug)]
pub struct LogTail {
    /// Those kept, oldest first.
    pub lines: Vec<LogLine>,
    /// The next ones, with none missing in between.
    pub receiver: broadcast::Receiver<LogLine>,
}
