//! Why a leg could not be run, or a file not be read.

use std::path::PathBuf;

use warden_experiment::Workload;
use warden_supervisor::Failure;

/// Why there is no finding.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum DiagnoseError {
    /// The server did not get ready.
    #[error("the server did not start: {}", .0.message)]
    Start(Box<Failure>),
    /// The server has not what the workload needs.
    #[error("{workload}: {why}")]
    CannotDo {
        workload: Workload,
        why: String,
        /// All workloads of its kind, which need the same.
        kind: Kind,
    },
    /// Somebody asked for an end before there was anything to tell.
    #[error("it was interrupted before the server was ready")]
    Interrupted,
    /// No client could be made, or no picture be encoded: nothing that a server could be blamed for.
    #[error("{what}: {why}")]
    Own { what: &'static str, why: String },
    /// A file of recorded requests cannot be used.
    #[error("{}: {what}", .path.display())]
    Recording {
        path: PathBuf,
        /// What is wrong with it, and where.
        what: String,
    },
}

/// What a workload needs of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// To chat.
    Text,
    /// To see.
    Vision,
    /// To hear.
    Audio,
    /// To embed.
    Embeddings,
    /// Whatever was recorded.
    Any,
}

impl Kind {
    /// What a workload needs.
    pub const fn of(workload: Workload) -> Self {
        match workload {
            Workload::ShortText
            | Workload::LongText
            | Workload::Conversation
            | Workload::OutputLengths
            | Workload::DistinctPrompts
            | Workload::PrefillSweep => Self::Text,
            Workload::SameImage | Workload::ImageSizes => Self::Vision,
            Workload::Audio => Self::Audio,
            Workload::Embeddings => Self::Embeddings,
            Workload::Replay => Self::Any,
        }
    }

    /// What is said of a server that has not got it.
    pub(crate) const fn missing(self) -> &'static str {
        match self {
            Self::Vision => "the server takes no images: it has no vision projector (--mmproj)",
            Self::Audio => "the server takes no audio: it has no projector for it (--mmproj)",
            Self::Text => "the server does not chat",
            Self::Embeddings => "the server makes no embeddings (--embeddings)",
            Self::Any => "the server refuses it",
        }
    }
}

impl DiagnoseError {
    /// What can be done about it, if that can be told.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Start(failure) if !failure.lines.is_empty() => {
                Some(format!("its last lines:\n{}", failure.lines.join("\n")))
            }
            Self::Recording { .. } => Some(
                "one JSON object a line: {\"method\": \"POST\", \"path\": \"/v1/chat/completions\", \"body\": {…}}".to_owned(),
            ),
            Self::Start(_) | Self::CannotDo { .. } | Self::Interrupted | Self::Own { .. } => None,
        }
    }
}
