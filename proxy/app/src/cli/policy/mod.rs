//! `llama-warden policy replay|check|simulate`: what policies would do, before they do it to a live backend.

use clap::Subcommand;

use crate::exit::Failure;

mod check;
mod models;
mod replay;
mod simulate;

pub(crate) use replay::{find, readings};

/// What can be asked.
#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Runs the detector and a policy over recorded readings: verdicts, blame, forecasts and actions, each with the request
    /// at which it came.
    Replay(Box<replay::ReplayArgs>),
    /// Explains the policies of a configuration in words: what happens at which level, what is off and why.
    Check(check::CheckArgs),
    /// Runs a made-up backend that leaks under a policy, under none, and under a restart every N requests; or plays
    /// recorded requests for several models.
    Simulate(Box<simulate::SimulateArgs>),
}

pub(crate) fn run(command: PolicyCommand) -> Result<(), Failure> {
    match command {
        PolicyCommand::Replay(args) => replay::run(&args),
        PolicyCommand::Check(args) => check::run(args),
        PolicyCommand::Simulate(args) => simulate::run(&args),
    }
}
