//! Errors of legs.

use warden_experiment::Workload;
use warden_supervisor::BackendFailure;

/// Reasons why there is no finding.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum DiagnoseError {
    /// The server did not become ready.
    #[error("the server did not start: {}", .0.message)]
    Start(Box<BackendFailure>),
    /// The server lacks a capability that the workload needs.
    #[error("{workload}: {why}")]
    CannotDo {
        workload: Workload,
        why: String,
        /// Capability that is missing.
        kind: RequiredCapability,
    },
    /// The user interrupted the experiment before there was a result.
    #[error("it was interrupted before the server was ready")]
    Interrupted,
    /// A failure of ours: no client could be created, or no picture encoded.
    #[error("{what}: {why}")]
    Own { what: &'static str, why: String },
}

/// A capability of a server that a workload needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredCapability {
    /// Chat.
    Text,
    /// Image input.
    Vision,
    /// Audio input.
    Audio,
    /// Embeddings.
    Embeddings,
}

impl RequiredCapability {
    /// Returns the capability that a workload needs.
    pub const fn for_workload(workload: Workload) -> Self {
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
        }
    }

    /// Returns a sentence about a server that lacks the capability.
    pub(crate) const fn missing_text(self) -> &'static str {
        match self {
            Self::Vision => "the server takes no images: it has no vision projector (--mmproj)",
            Self::Audio => "the server takes no audio: it has no projector for it (--mmproj)",
            Self::Text => "the server does not chat",
            Self::Embeddings => "the server makes no embeddings (--embeddings)",
        }
    }
}

impl DiagnoseError {
    /// Returns advice on the error, if there is any.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Start(failure) if !failure.lines.is_empty() => {
                Some(format!("its last lines:\n{}", failure.lines.join("\n")))
            }
            Self::Start(_) | Self::CannotDo { .. } | Self::Interrupted | Self::Own { .. } => None,
        }
    }
}
