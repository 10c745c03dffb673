//! The program's entry point: arguments, exit code, and the main thread.

use std::process::ExitCode;

mod access_list;
mod child_lines;
mod cli;
mod events_file;
mod exit;
#[cfg(test)]
#[path = "../../admin/tests/fixtures/growth_fixture.rs"]
mod growth_fixture;
mod journal;
mod logging;
#[cfg(test)]
#[path = "../../admin/tests/fixtures/mutated.rs"]
mod mutated;
mod out;
mod private_temp;
mod replay;
#[cfg(test)]
#[path = "../../admin/tests/fixtures/request_fixture.rs"]
mod request_fixture;
mod serve;

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
