//! The one binary: its arguments, its exit code, and the main thread.

use std::process::ExitCode;

use clap::Parser;

mod cli;
mod config;
mod exit;
mod out;

fn main() -> ExitCode {
    exit::install_panic_hook();
    match cli::run(cli::Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
