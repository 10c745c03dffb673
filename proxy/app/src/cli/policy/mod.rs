//! `llama-warden policy replay|check|simulate`: what policies would do, before they do it to a live backend.

use clap::Subcommand;

use crate::exit::Failure;

mod replay;

/// What can be asked.
#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Runs the detector and a policy over recorded readings: verdicts, blame, forecasts and actions, each with the request
    /// at which it came.
    Replay(Box<replay::ReplayArgs>),
}

/// Answers.
pub(crate) fn run(command: PolicyCommand) -> Result<(), Failure> {
    match command {
        PolicyCommand::Replay(args) => replay::run(&args),
    }
}
