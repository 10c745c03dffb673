//! Handles SIGTERM and SIGINT, and dies by a signal on purpose.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use tokio::signal::unix::{SignalKind, signal};

use crate::engine::Engine;
use crate::script::OnTerm;

/// Milliseconds from SIGTERM to the end of llama-server with cut streams, as observed.
const CUT_AFTER_MS: u64 = 9;

/// Waits for SIGTERM, then for the end of the process. Called after loading: until then the signal kills the
/// process at once, as with llama-server.
pub(crate) async fn until_stopped(engine: &Arc<Engine>) -> ExitCode {
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return ExitCode::FAILURE;
    };
    loop {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        if !engine.ignores_term() {
            break;
        }
    }
    engine.refusing.set();
    engine.stopping.set();
    if engine.script().on_term == OnTerm::Cut {
        tokio::time::sleep(Duration::from_millis(CUT_AFTER_MS)).await;
        return ExitCode::SUCCESS;
    }
    engine.tasks.close();
    tokio::select! {
        () = engine.tasks.wait() => ExitCode::SUCCESS,
        _ = term.recv() => ExitCode::FAILURE,
        _ = int.recv() => ExitCode::FAILURE,
    }
}

/// Kills this process by a signal; repeated, because the runtime's SIGSEGV handler ignores the first one.
pub(crate) async fn die_by(number: i32) {
    let deadly = Signal::from_named_raw(number).unwrap_or(Signal::ABORT);
    loop {
        let _ignored = kill_process(getpid(), deadly);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
