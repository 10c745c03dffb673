//! `llama-warden quickstart`: from source to a recycle under load, in one command.

use clap::Args;

use crate::exit::Failure;

/// What `quickstart` takes.
#[derive(Debug, Args)]
pub(crate) struct QuickstartArgs {}

/// Runs it.
pub(crate) fn run(args: QuickstartArgs) -> Result<(), Failure> {
    let QuickstartArgs {} = args;
    Err(Failure::failed("quickstart is not part of this build yet"))
}
