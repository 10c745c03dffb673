//! `llama-warden policy replay|check|simulate`: shows the effects of policies without a live backend.

use clap::Subcommand;

use crate::exit::CommandError;

mod check;
mod replay;
mod simulate;

pub(crate) use replay::find_model;

#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Runs the detector and a policy over recorded readings, and prints verdicts, blame, forecasts and
    /// actions, each with its request.
    Replay(Box<replay::ReplayArgs>),
    /// Explains the policies of a configuration: the action at each level, disabled parts, and reasons.
    Check(check::PolicyCheckArgs),
    /// Simulates a leaking backend under a policy, without one, and with a restart every N requests.
    Simulate(Box<simulate::SimulateArgs>),
}

pub(crate) fn run(command: PolicyCommand) -> Result<(), CommandError> {
    match command {
        PolicyCommand::Replay(args) => replay::run(&args),
        PolicyCommand::Check(args) => check::run(args),
        PolicyCommand::Simulate(args) => simulate::run(&args),
    }
}
