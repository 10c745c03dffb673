//! Errors of commands, and their exit codes. No other module maps errors to exit codes.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | success |
//! | 1 | failure: a build failed, a port is taken, no instance runs |
//! | 2 | invalid configuration or usage |
//! | 3 | a patch set is refused or not verified; `diagnose` found a leak or mixing; a new build or canary is worse |
//! | 4 | `diagnose` saw the server crash under a workload, whether or not memory leaks as well |
//! | 5 | `diagnose` or a watched canary gave no verdict, or a memory may leak; `--between` found no single commit |
//! | 130 | interrupted; `diagnose` has shown its results until then |

use std::path::Path;
use std::process::ExitCode;

use warden_config::problem::{ConfigProblem, ConfigProblems, error_lines};
use warden_policies::secrets;
use warden_supervisor::{ControlError, FleetError};

use crate::out;

pub(crate) const USAGE_CODE: u8 = 2;
pub(crate) const REFUSED_CODE: u8 = 3;
pub(crate) const LEAKS_CODE: u8 = 3;
pub(crate) const CRASHES_CODE: u8 = 4;
pub(crate) const UNDECIDED_CODE: u8 = 5;
/// Exit code after an interrupt, as in shells: 128 plus the number of SIGINT.
pub(crate) const INTERRUPTED_CODE: u8 = 130;
pub(crate) const FAILURE_CODE: u8 = 1;

#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    #[error(transparent)]
    Config(#[from] ConfigProblems),
    #[error("{message}")]
    Usage { message: String, hint: String },
    #[error("{message}")]
    Failed {
        /// Sentence with the failed action and its object.
        message: String,
        hint: Option<String>,
    },
    /// A patch set does not fit a source, or is not verified there.
    #[error("{message}")]
    Refused { message: String, hint: String },
    #[error("{message}")]
    Interrupted { message: String },
    /// The output has already reported everything; only the exit code is left.
    #[error("exit code {code}")]
    Reported { code: u8 },
    /// The reader of this program's output has closed it, so nothing can be reported.
    #[error("the output was closed")]
    Pipe,
}

impl CommandError {
    /// The command was interrupted, and all results were shown before.
    pub(crate) const INTERRUPTED: Self = Self::Reported { code: INTERRUPTED_CODE };

    pub(crate) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), hint: hint.into() }
    }

    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::Failed { message: message.into(), hint: None }
    }

    /// Returns a function that turns the error of a file operation into `cannot DO PATH: ERROR`.
    pub(crate) fn cannot<E: std::fmt::Display>(doing: &str, path: &Path) -> impl Fn(E) -> Self {
        move |error| Self::failed(format!("cannot {doing} {}: {error}", path.display()))
    }

    pub(crate) fn hinted(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Failed { message: message.into(), hint: Some(hint.into()) }
    }

    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Config(_) | Self::Usage { .. } => USAGE_CODE,
            Self::Refused { .. } => REFUSED_CODE,
            Self::Reported { code } => *code,
            Self::Interrupted { .. } => INTERRUPTED_CODE,
            Self::Failed { .. } | Self::Pipe => FAILURE_CODE,
        }
    }

    /// Returns the lines of the report: `error:` and, if there is a remedy, `hint:`.
    pub(crate) fn lines(&self) -> Vec<String> {
        match self {
            Self::Config(problems) => problems.lines(),
            Self::Usage { message, hint } | Self::Refused { message, hint } => {
                error_lines(message, Some(hint))
            }
            Self::Failed { message, hint } => error_lines(message, hint.as_deref()),
            Self::Interrupted { message } => error_lines(message, None),
            Self::Reported { .. } | Self::Pipe => Vec::new(),
        }
    }

    pub(crate) fn report(&self) -> ExitCode {
        for line in self.lines() {
            // Hide secrets: the text may quote the output of a server, or a part of the configuration.
            out::error_line(&secrets::redact_text(&line));
        }
        ExitCode::from(self.code())
    }
}

impl From<ConfigProblem> for CommandError {
    fn from(problem: ConfigProblem) -> Self {
        Self::Config(problem.into())
    }
}

impl From<FleetError> for CommandError {
    fn from(error: FleetError) -> Self {
        match error {
            FleetError::DuplicateName { .. } | FleetError::NoReplicas(_) | FleetError::SocketPath { .. } => {
                Self::usage(error.to_string(), "")
            }
            // The operator chooses the state directory, so an unwritable one counts as configuration.
            FleetError::StateDir { .. } | FleetError::RuntimeDir { .. } => Self::usage(error.to_string(), ""),
            FleetError::ShuttingDown | FleetError::NoThread(_) => Self::failed(error.to_string()),
        }
    }
}

impl From<ControlError> for CommandError {
    fn from(error: ControlError) -> Self {
        Self::failed(error.to_string())
    }
}

impl From<warden_builder::BuilderError> for CommandError {
    fn from(error: warden_builder::BuilderError) -> Self {
        let message = error.to_string();
        let hint = error.hint();
        match error.kind() {
            warden_builder::ErrorClass::Input => Self::usage(message, hint.unwrap_or_default()),
            warden_builder::ErrorClass::Refused => Self::Refused { message, hint: hint.unwrap_or_default() },
            warden_builder::ErrorClass::Cancelled => Self::Interrupted { message },
            warden_builder::ErrorClass::Machine | warden_builder::ErrorClass::Build => {
                Self::Failed { message, hint }
            }
        }
    }
}

impl From<warden_patches::PatchError> for CommandError {
    fn from(error: warden_patches::PatchError) -> Self {
        warden_builder::BuilderError::from(error).into()
    }
}

/// Makes a panic print one line and how to report the bug, instead of a stack trace.
pub(crate) fn install_panic_hook() {
    std::panic::set_hook(Box::new(|info| {
        let place = info.location().map_or_else(String::new, |at| format!(" at {}:{}", at.file(), at.line()));
        let payload = info.payload();
        let text = payload
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let text = text.unwrap_or("no message");
        let text = text.lines().next().unwrap_or_default();
        out::error_line(&format!("error: internal error{place}: {text}"));
        out::error_line(&format!(
            "hint: this is a bug in llama-warden {}; please report it with the command you ran",
            env!("CARGO_PKG_VERSION")
        ));
    }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_config::problem::{ConfigPlace, ConfigProblem};

    #[test]
    fn every_problem_of_a_configuration_gets_its_own_lines_and_code_2() {
        let place = || ConfigPlace::File { path: Path::new("w.toml").into(), line: 3 };
        let failure = CommandError::from(ConfigProblems(vec![
            ConfigProblem::new(place(), "bad").with_hint("cure"),
            ConfigProblem::new(ConfigPlace::Env("X".into()), "worse"),
        ]));
        assert_eq!(
            failure.lines(),
            ["error: w.toml:3: bad", "hint: cure", "error: environment variable X: worse"]
        );
        assert_eq!(failure.code(), 2);
    }

    #[test]
    fn usage_is_code_2_and_the_rest_is_code_1() {
        assert_eq!(CommandError::usage("a", "b").code(), 2);
        assert_eq!(CommandError::hinted("a", "b").code(), 1);
        assert_eq!(CommandError::Refused { message: "a".into(), hint: "b".into() }.code(), 3);
        assert_eq!(CommandError::failed("a").lines(), ["error: a"]);
    }
}
