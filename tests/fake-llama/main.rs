//! `fake-llama`: a scriptable simulation of llama-server.
//!
//! It takes llama-server's flags, and copies its routes, answers, and behaviour on connections and under
//! SIGTERM. A [`script`] makes it do what llama-server cannot be made to do on demand: leak at a rate, crash
//! at the third request, hang, stall, send invalid bytes. A [`ledger`] records every execution, so that a
//! test can prove that nothing was executed twice.
//!
//! The model file must exist but is never read; answers depend only on the request.

mod args;
mod cache;
mod check;
mod clock;
mod control;
mod dirty;
mod engine;
mod generate;
mod goes_on;
mod help;
mod job;
mod leak;
mod ledger;
mod listen;
mod reclaim;
mod reply;
mod report;
mod routes;
mod say;
mod script;
mod shape;
mod signals;
mod slots;
mod start;
mod vram;
mod wire;

use std::process::ExitCode;

fn main() -> ExitCode {
    let flags: Vec<String> = std::env::args().skip(1).collect();
    let args = match args::parse(&flags) {
        Ok(args::Parsed::Serve(args)) => args,
        Ok(args::Parsed::Version) => {
            say::err("version: 0.0.0-fake (build 1, commit 000000000)");
            say::err("built with Rust for Linux");
            return ExitCode::SUCCESS;
        }
        Ok(args::Parsed::Help) => {
            say::out(help::text().trim_end());
            return ExitCode::SUCCESS;
        }
        Err(refused) => {
            say::err(&refused);
            return ExitCode::FAILURE;
        }
    };
    let script = match script::from_env(&flags) {
        Ok(script) => script,
        Err(wrong) => {
            say::err(&format!("fake-llama: {wrong}"));
            return ExitCode::FAILURE;
        }
    };
    slots::announce_checkpoints();
    match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => {
            let code = runtime.block_on(start::run(args, script));
            // Cuts all open connections, as the end of the real process would.
            runtime.shutdown_background();
            code
        }
        Err(error) => {
            say::err(&format!("fake-llama: cannot start a runtime: {error}"));
            ExitCode::FAILURE
        }
    }
}
