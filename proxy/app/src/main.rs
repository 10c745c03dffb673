//! The program's entry point: arguments, exit code, and the main thread.

use std::process::ExitCode;

use warden_config::{self as config, advice};

mod access_line;
mod access_list;
mod access_log;
mod admin;
mod build_text;
mod captures;
mod child_lines;
mod cli;
mod clock;
mod events_file;
mod exit;
mod growth_text;
mod journal;
mod log_writer;
mod logging;
#[cfg(test)]
mod mutated;
mod otel;
mod out;
#[cfg(test)]
#[path = "../../config/src/printed_tests.rs"]
mod printed;
mod private_temp;
mod probe;
mod replay;
mod request_recorder;
mod series;
mod serve;
mod sync;

/// Replaces the C library's allocator, which keeps freed memory in pieces too small to give back to the
/// system; docs/performance.md compares both allocators.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    exit::install_panic_hook();
    let done = cli::run();
    logging::flush();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
