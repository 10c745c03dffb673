//! The old program's side: keeps everything until the new program reports that it is ready.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;
use warden_admin::upgrade_order::UpgradeReport;
use warden_supervisor::{ChildProcess, WorkKind, run_job};

use super::talk::{HandoverHeader, InstancePlace, PROTOCOL, SuccessorMessage, UpgradeChannel, UpgradeHello};
use super::{program, retired::RetiredProgram};
use crate::serve::{RunningInstance, SignalHandlers};

/// Time limit of the freeze: the handover to the new program, and its checks.
const PREPARE_LIMIT: Duration = Duration::from_secs(20);
/// Time limit from `go` until the new program reports that it serves.
const TAKE_OVER_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub(in crate::serve) enum UpgradeError {
    /// The upgrade failed, for the reason given as a sentence. The old program continues as before.
    #[error("{0}")]
    Cannot(String),
    #[error("llama-warden was asked to end")]
    Ends,
}

impl From<String> for UpgradeError {
    fn from(why: String) -> Self {
        Self::Cannot(why)
    }
}

/// Upgrades to another program. On success only the work of [`RetiredProgram`] is left. This function
/// handles a signal to end until the point of no return; after it, the new program does.
pub(in crate::serve) async fn hand_over(
    server: &RunningInstance,
    to: Option<PathBuf>,
    wait: Option<Duration>,
    signals: &mut SignalHandlers,
) -> Result<(UpgradeReport, RetiredProgram), UpgradeError> {
    let until = Instant::now() + wait.unwrap_or(server.upgrade_wait());
    // Choose the program on another thread, because its disk may hang.
    let choosing = run_job(WorkKind::Configuration, move || program::NextProgram::choose(to));
    let next = tokio::select! {
        next = choosing => next.map_err(|error| error.to_string())??,
        () = signals.wait_end() => return Err(UpgradeError::Ends),
        () = tokio::time::sleep_until(until) => return Err("the program could not be looked at in time: does its \
                                                            disk hang?".to_owned().into()),
    };
    let program::NextProgram { binary, same, restart_starts } = next;
    let to = tokio::select! {
        version = program::program_version(&binary, server.version_timeout()) => version?,
        () = signals.wait_end() => return Err(UpgradeError::Ends),
    };
    let (ours, theirs) = UnixStream::pair().map_err(|error| format!("cannot make a socket: {error}"))?;
    let shown = binary.display().to_string();
    let next = program::with_own_arguments(binary);
    tracing::info!(program = %shown, version = %to, "upgrade: starting the next program");
    // Dropping the child kills it, so that nothing is left of it after a failure.
    let child = server.nursery().spawn_successor(next, Some(theirs.into())).await;
    let child = child.map_err(|error| error.to_string())?;
    let talk = UpgradeChannel::new(ours);
    let (since, processes) = tokio::select! {
        ready = prepare_successor(server, &talk, &child, until) => ready?,
        () = signals.wait_end() => return Err(UpgradeError::Ends),
    };
    let frozen_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
    let from = env!("CARGO_PKG_VERSION").to_owned();
    let upgraded = UpgradeReport { from, to, processes, frozen_ms, program: shown, same, restart_starts };
    Ok((upgraded, let_successor_take_over(server, talk, child).await))
}

/// Hands over everything until the new program is ready. Returns the start of the freeze and the number of
/// processes handed over. If the future is dropped before its end, the old program continues as before.
async fn prepare_successor(
    server: &RunningInstance,
    talk: &UpgradeChannel,
    child: &ChildProcess,
    until: Instant,
) -> Result<(Instant, usize), String> {
    receive_hello(talk, &server.instance_place(), until).await?;
    let (will, frozen) = tokio::select! {
        will = server.fleet().handover().prepare_handover(until) => will.map_err(|busy| format!("busy: {busy}"))?,
        // The new program sends nothing meanwhile, so only its end has to be noticed.
        _ = child.wait() => return Err("the next program has ended while it waited".to_owned()),
    };
    let since = Instant::now();
    let until = until.min(since + PREPARE_LIMIT);
    let processes = will.process_count();
    let sent = send_handover(server, talk, will, until).await;
    sent.map_err(|error| format!("the next program did not take over what it was given: {error}"))?;
    match talk.receive::<SuccessorMessage>(until).await {
        Ok((SuccessorMessage::Ready, _)) => {}
        Ok((SuccessorMessage::Cannot { message }, _)) => return Err(message),
        Ok((SuccessorMessage::Serves, _)) => {
            return Err("the next program sent an unexpected message".to_owned());
        }
        Err(error) => return Err(wait_error("did not get ready", &error)),
    }
    frozen.complete_handover();
    Ok((since, processes))
}

/// The point of no return: the new program owns everything from here on.
async fn let_successor_take_over(
    server: &RunningInstance,
    talk: UpgradeChannel,
    child: ChildProcess,
) -> RetiredProgram {
    server.stop_recording().await;
    server.fleet().handover().release_processes().await;
    server.nursery().note_serving(child);
    let until = Instant::now() + TAKE_OVER_LIMIT;
    if let Err(error) = talk.send(server.fleet().handover().remaining_work(), Vec::new(), until).await {
        tracing::error!(%error, "the next program has ended");
    }
    server.retire();
    match talk.receive::<SuccessorMessage>(until).await {
        Ok((SuccessorMessage::Serves, _)) => tracing::info!("upgrade: the next program serves"),
        // If the new program has ended, the process that forked it notices this, and then ends all programs.
        Ok(_) => tracing::error!("the next program sent an unexpected message"),
        Err(error) => tracing::error!(%error, "the next program does not say that it serves"),
    }
    RetiredProgram::new(talk)
}

async fn receive_hello(talk: &UpgradeChannel, place: &InstancePlace, until: Instant) -> Result<(), String> {
    match talk.receive::<UpgradeHello>(until).await {
        Ok((UpgradeHello::Comes { protocol: PROTOCOL, place: theirs, .. }, _)) if theirs == *place => Ok(()),
        Ok((UpgradeHello::Comes { protocol: PROTOCOL, place: theirs, .. }, _)) => Err(format!(
            "by its configuration the next program would be somewhere else ({theirs:?} instead of {place:?}): \
             that takes a restart"
        )),
        Ok((UpgradeHello::Comes { protocol, version, .. }, _)) => Err(format!(
            "version {version} hands over in another way ({protocol} instead of {PROTOCOL}): that takes a restart"
        )),
        Ok((UpgradeHello::CannotCome { message }, _)) => {
            Err(format!("the next program cannot start: {message}"))
        }
        Err(error) => Err(wait_error("did not start", &error)),
    }
}

fn wait_error(what: &str, error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::TimedOut => format!("the next program {what} in time"),
        std::io::ErrorKind::UnexpectedEof => format!("the next program {what}: it has ended"),
        _ => format!("the next program {what}: {error}"),
    }
}

async fn send_handover(
    server: &RunningInstance,
    talk: &UpgradeChannel,
    will: warden_supervisor::FleetWill,
    until: Instant,
) -> std::io::Result<()> {
    let (legacy, files) = server.handover_files()?;
    let pieces: Vec<_> = will.into_pieces().collect();
    talk.send(HandoverHeader { pieces: pieces.len(), ..legacy }, files, until).await?;
    for (piece, files) in pieces {
        let files: Vec<OwnedFd> = files;
        talk.send(piece, files, until).await?;
    }
    Ok(())
}
