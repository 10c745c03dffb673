//! Errors of the listeners, directories and files of an instance, and of the client of its admin socket.

use warden_config::problem::error_lines;

/// Error with a remedy, for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdminError {
    /// The command or the configuration is wrong, or the place where the program runs.
    #[error("{message}")]
    Usage {
        /// Sentence with what is wrong.
        message: String,
        /// Remedy.
        hint: String,
    },
    /// An action failed.
    #[error("{message}")]
    Failed {
        /// Sentence with the failed action and its object.
        message: String,
        /// Remedy.
        hint: Option<String>,
    },
}

impl AdminError {
    pub(crate) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), hint: hint.into() }
    }

    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::Failed { message: message.into(), hint: None }
    }

    pub(crate) fn hinted(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Failed { message: message.into(), hint: Some(hint.into()) }
    }

    /// Returns the lines to log or print: `error:` and, if there is a remedy, `hint:`.
    pub fn lines(&self) -> Vec<String> {
        match self {
            Self::Usage { message, hint } => error_lines(message, Some(hint)),
            Self::Failed { message, hint } => error_lines(message, hint.as_deref()),
        }
    }
}
