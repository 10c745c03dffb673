//! Why a command failed, and with which exit code: the one place that maps errors to codes.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | it did what was asked |
//! | 1 | it could not: a build failed, a port is taken, no instance runs |
//! | 2 | it was asked wrongly: configuration or usage |
//! | 3 | a patch set is refused for a source, or not verified there; `diagnose` found a leak; `--against`: the new build is worse; a canary that was watched was worse |
//! | 4 | `diagnose` saw the server crash under a workload, whether or not memory leaks besides |
//! | 5 | `diagnose` had too few readings to say whether anything leaks, or a memory may leak; `--between` found no single commit; `--against` cannot tell; nor was it known of a canary |
//! | 130 | it was interrupted; `diagnose` has shown what it knew by then |

use std::process::ExitCode;

use warden_policies::secrets;
use warden_supervisor::{ControlError, FleetError};

use crate::config::problem::{Problem, Problems, error_lines};
use crate::out;

/// Exit code for configuration and usage.
pub(crate) const USAGE: u8 = 2;
/// Exit code for a patch set that is refused.
pub(crate) const REFUSED: u8 = 3;
/// Exit code for a leak that was found.
pub(crate) const LEAKS: u8 = 3;
/// Exit code for a server that crashed under a workload.
pub(crate) const CRASHES: u8 = 4;
/// Exit code for an experiment that was too short to say anything, or left open whether a memory leaks.
pub(crate) const TOO_FEW: u8 = 5;
/// Exit code after an interrupt, as shells have it: 128 and the number of SIGINT.
pub(crate) const INTERRUPTED: u8 = 130;
/// Exit code for everything else.
pub(crate) const FAILURE: u8 = 1;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] Problems),
    /// The command was used wrongly.
    #[error("{message}")]
    Usage { message: String, hint: String },
    /// It was asked rightly and could not be done.
    #[error("{message}")]
    Failed {
        /// What could not be done to which thing.
        message: String,
        /// The cure, if there is one to tell.
        hint: Option<String>,
    },
    /// A patch set does not fit a source, or nobody has looked whether it does.
    #[error("{message}")]
    Refused { message: String, hint: String },
    /// Somebody wanted it to end.
    #[error("{message}")]
    Interrupted { message: String },
    /// The output says it all; only the exit code is left to give.
    #[error("exit code {code}")]
    Told { code: u8 },
    /// Whoever read our output has left; there is nobody to tell.
    #[error("the output was closed")]
    Pipe,
}

impl Failure {
    /// It was ended, and has told what there was to tell.
    pub(crate) const INTERRUPTED: Self = Self::Told { code: INTERRUPTED };

    /// A wrong use, with its cure.
    pub(crate) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), hint: hint.into() }
    }

    /// A failure without a cure to tell.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::Failed { message: message.into(), hint: None }
    }

    /// A failure with its cure.
    pub(crate) fn hinted(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Failed { message: message.into(), hint: Some(hint.into()) }
    }

    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Config(_) | Self::Usage { .. } => USAGE,
            Self::Refused { .. } => REFUSED,
            Self::Told { code } => *code,
            Self::Interrupted { .. } => INTERRUPTED,
            Self::Failed { .. } | Self::Pipe => FAILURE,
        }
    }

    /// The lines that tell it: `error:` and, where there is a cure, `hint:`.
    pub(crate) fn lines(&self) -> Vec<String> {
        match self {
            Self::Config(problems) => problems.lines(),
            Self::Usage { message, hint } | Self::Refused { message, hint } => {
                error_lines(message, Some(hint))
            }
            Self::Failed { message, hint } => error_lines(message, hint.as_deref()),
            Self::Interrupted { message } => error_lines(message, None),
            Self::Told { .. } | Self::Pipe => Vec::new(),
        }
    }

    /// Tells it on standard error and returns the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        for line in self.lines() {
            // It may quote what a server said, or a part of the configuration.
            out::error_line(&secrets::text(&line));
        }
        ExitCode::from(self.code())
    }
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self::Config(problem.into())
    }
}

impl From<FleetError> for Failure {
    fn from(error: FleetError) -> Self {
        match error {
            FleetError::DuplicateName { .. } | FleetError::NoReplicas(_) | FleetError::SocketPath { .. } => {
                Self::usage(error.to_string(), "")
            }
            // The state directory is the operator's choice: unwritable is a matter of configuration.
            FleetError::StateDir { .. } | FleetError::RuntimeDir { .. } => Self::usage(error.to_string(), ""),
            FleetError::ShuttingDown | FleetError::NoThread(_) => Self::failed(error.to_string()),
        }
    }
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        Self::failed(error.to_string())
    }
}

impl From<warden_builder::Error> for Failure {
    fn from(error: warden_builder::Error) -> Self {
        let (message, hint) = (error.to_string(), error.hint());
        match error.kind() {
            warden_builder::Kind::Input => Self::usage(message, hint.unwrap_or_default()),
            warden_builder::Kind::Refused => Self::Refused { message, hint: hint.unwrap_or_default() },
            warden_builder::Kind::Cancelled => Self::Interrupted { message },
            warden_builder::Kind::Machine | warden_builder::Kind::Build => Self::Failed { message, hint },
        }
    }
}

impl From<warden_patches::Error> for Failure {
    fn from(error: warden_patches::Error) -> Self {
        warden_builder::Error::from(error).into()
    }
}

/// A panic is a bug of ours: one line and how to report it, instead of a stack trace.
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
    use crate::config::problem::{Place, Problem};

    #[test]
    fn every_problem_of_a_configuration_gets_its_own_lines_and_code_2() {
        let place = || Place::File { path: "w.toml".into(), line: 3 };
        let failure = Failure::from(Problems(vec![
            Problem::new(place(), "bad").hint("cure"),
            Problem::new(Place::Env("X".into()), "worse"),
        ]));
        assert_eq!(
            failure.lines(),
            ["error: w.toml:3: bad", "hint: cure", "error: environment variable X: worse"]
        );
        assert_eq!(failure.code(), 2);
    }

    #[test]
    fn usage_is_code_2_and_the_rest_is_code_1() {
        assert_eq!(Failure::usage("a", "b").code(), 2);
        assert_eq!(Failure::hinted("a", "b").code(), 1);
        assert_eq!(Failure::Refused { message: "a".into(), hint: "b".into() }.code(), 3);
        assert_eq!(Failure::failed("a").lines(), ["error: a"]);
    }
}
