//! Messages to a model's task: reports of its helper tasks, each about one generation, and requests of
//! operators and of the fleet.
//!
//! tokio reserves room for 32 messages per channel, and the largest message has 224 bytes. The channel
//! carries boxes, so it costs an idle model 0.5 KiB instead of 7 KiB.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use warden_policies::start_search::StartFinding;
use warden_policies::warmth::WarmthReport;
use warden_policies::{GenerationId, ServerFacts};

use super::handover::ModelWill;
use super::unit::ProcessRecipe;
use super::warm::pack::SavedSlots;
use super::warm::unpack::WarmingResult;
use crate::error::{ControlError, SpawnError};
use crate::lease::refused::ModelRefusal;
use crate::memory::declared_memory;
use crate::memory::fleet_memory::ReturnedMemory;
use crate::memory::loading::LoadingOrder;
use crate::memory::tracker::ReadingContext;
use crate::process::failure::{self, OomEvidence};
use crate::process::group::ProcessExit;
use crate::process::heir::OpenGate;
use crate::process::needs::NeedsCheck;
use crate::process::reclaim_file::ReclaimResult;
use crate::process::{BackendProcess, LineSink, ProbeResult, ProcessSample, ServerProps, discreet};
use crate::spec::{RemoteSpec, ServerCommand, SharedSpec, WatchConfig};
use crate::view::entry::{PinView, ReclaimEntry};
use crate::view::ledger::LedgerEntry;
use crate::view::log::LogRing;

/// Name of the operator who requested an action, if known; written to the ledger.
pub(crate) type RequestedBy = Option<Arc<str>>;

#[derive(Debug)]
pub(crate) enum TaskMessage {
    /// Report of a helper. Reports about generations that are gone are ignored.
    Report(GenerationId, HelperReport),
    /// A check of the files that a process with this recipe needs has ended.
    Looked(Box<ProcessRecipe>, NeedsCheck),
    StartSearched(u64, Box<StartFinding>),
    Control(ControlMessage),
    /// Question of the watchdog: a task that is alive answers.
    Beat(oneshot::Sender<()>),
}

#[derive(Debug)]
pub(crate) enum HelperReport {
    /// The process was created, or could not be.
    Spawned(Result<Arc<dyn BackendProcess>, SpawnError>),
    /// The process wrote an output line that may contain memory sizes.
    MemoryLine(String, OwnedSemaphorePermit),
    CrashLogged(OwnedSemaphorePermit),
    Probed(ProbeReport),
    /// The drained process has saved its slots.
    Packed(Box<SavedSlots>),
    /// Warming with the predecessor's conversations, which began after the gate opened, is over.
    Warmed(Box<WarmthReport>),
    /// Descriptions of client settings, made in other processes, that could not be applied to this one.
    SettingsFailed(Vec<String>),
    /// The needed files were checked just before the process was created.
    Looked(NeedsCheck),
    /// The starting process has made no progress for this time.
    Stalled(Duration),
    /// The process has ended and is reaped: its exit and, after a SIGKILL, evidence of a lack of memory.
    Exited(ProcessExit, OomEvidence),
    /// Amount of memory that came back after the process had ended.
    MemoryReturned(ReturnedMemory),
    /// A reading of the process's memory has ended; values that could not be read are missing.
    Sampled {
        taken: ReadingContext,
        sample: Box<ProcessSample>,
    },
    Reclaimed(Box<ReclaimResult>),
}

#[derive(Debug)]
pub(crate) struct ProbeReport {
    pub(super) sent: Instant,
    pub(super) health: ProbeResult,
    /// Properties of the process, requested after the first probe that finds it ready.
    pub(super) props: Option<ServerProps>,
    /// VRAM in bytes, read after the probe that finds a successor ready; `None` if not read or unknown.
    pub(super) vram: Option<u64>,
    /// Descriptions of client settings that could not be applied to the process.
    pub(super) unset: Vec<String>,
    /// Result of carrying over conversations from the predecessor, if that was tried.
    pub(super) warmed: Option<Box<WarmingResult>>,
}

impl ProbeReport {
    pub(super) fn new(sent: Instant, health: ProbeResult) -> Self {
        Self { sent, health, props: None, vram: None, unset: Vec::new(), warmed: None }
    }
}

#[derive(Debug)]
pub(crate) enum ControlMessage {
    Restart(RequestedBy, oneshot::Sender<Result<Vec<LedgerEntry>, ControlError>>),
    Drain(oneshot::Sender<Result<(), ControlError>>),
    /// Ask the processes to give memory back.
    Reclaim(RequestedBy, oneshot::Sender<Result<Vec<ReclaimEntry>, ControlError>>),
    /// Pin (true) or unpin (false) the model for the named operator.
    Pin(bool, Arc<str>, oneshot::Sender<Result<PinView, ControlError>>),
    /// New settings. Answered with true if processes are replaced because of them.
    Apply(SharedSpec, Box<WatchConfig>, oneshot::Sender<bool>),
    /// New settings of a remote model. Answered with true if its address changes.
    PointRemote(Box<RemoteSpec>, oneshot::Sender<bool>),
    Loading(LoadingOrder),
    /// Store facts that were measured about a binary.
    LearnFacts(PathBuf, ServerFacts),
    /// Make no more decisions, and return everything that the next instance needs.
    HandOver(oneshot::Sender<Result<ModelWill, String>>),
    /// The handover failed: this task decides again.
    Thaw,
    /// The next instance has taken over: release the processes.
    LetGo(oneshot::Sender<()>),
    /// The previous instance has released the processes: begin to decide.
    Begin,
    /// Open gates of the next instance, and requests that it has refused.
    Gates(Vec<OpenGate>, Vec<ModelRefusal>),
    /// End the task: this instance has no more requests, and the next one owns the processes.
    Disband,
    Remove,
    /// Shut down; requests may run until this time.
    Shutdown(Instant),
}

/// Receives the messages to a model's task, in the order in which they were sent.
#[derive(Debug)]
pub(crate) struct TaskInbox(mpsc::UnboundedReceiver<Box<TaskMessage>>);

#[derive(Clone, Debug)]
pub(crate) struct TaskOutbox(mpsc::UnboundedSender<Box<TaskMessage>>);

pub(crate) fn mailbox() -> (TaskOutbox, TaskInbox) {
    let (sender, receiver) = mpsc::unbounded_channel();
    (TaskOutbox(sender), TaskInbox(receiver))
}

impl TaskInbox {
    /// Next message; `None` if all senders are dropped. Cancel safe: dropping the future loses no message.
    pub(crate) async fn recv(&mut self) -> Option<TaskMessage> {
        self.0.recv().await.map(|message| *message)
    }

    #[cfg(test)]
    pub(crate) fn try_recv(&mut self) -> Option<TaskMessage> {
        self.0.try_recv().ok().map(|message| *message)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

impl TaskOutbox {
    /// Sends a message. If the task has ended, the message is dropped with its reply channel.
    pub(crate) fn send(&self, message: TaskMessage) {
        drop(self.0.send(Box::new(message)));
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

/// Messages to a model's task, and the helper tasks that send them.
#[derive(Debug)]
pub(super) struct TaskMail {
    pub(super) inbox: TaskInbox,
    pub(super) outbox: TaskOutbox,
    pub(super) helpers: JoinSet<()>,
    /// Running start searches; the end of the task awaits them, so that their processes are reaped.
    pub(super) searches: JoinSet<()>,
}

impl TaskMail {
    pub(super) fn new() -> Self {
        let (outbox, inbox) = mailbox();
        Self { inbox, outbox, helpers: JoinSet::new(), searches: JoinSet::new() }
    }

    pub(super) fn line_sink(
        &self,
        generation: GenerationId,
        command: &ServerCommand,
        logs: &Arc<LogRing>,
    ) -> LineSink {
        make_line_sink(generation, command, Arc::clone(logs), self.outbox.clone())
    }

    pub(super) fn spawn_helper(
        &mut self,
        generation: GenerationId,
        work: impl Future<Output = HelperReport> + Send + 'static,
    ) {
        let outbox = self.outbox.clone();
        self.helpers.spawn(async move {
            outbox.send(TaskMessage::Report(generation, work.await));
        });
    }
}

/// Maximum number of waiting lines about memory; a start writes some thirty.
const MAX_PENDING_LINES: usize = 256;
/// Maximum number of waiting crash reports: the task searches the log for the line.
const MAX_PENDING_ALARMS: usize = 1;

/// Makes the handler of each output line of a process: it logs the line, and notifies the model's task if
/// the line matters.
///
/// A child may write faster than the task reads. The number of waiting messages per process is limited, so
/// that the inbox stays bounded.
fn make_line_sink(
    generation: GenerationId,
    command: &ServerCommand,
    logs: Arc<LogRing>,
    outbox: TaskOutbox,
) -> LineSink {
    let given = discreet::known_secrets(command);
    let said = Arc::new(Semaphore::new(MAX_PENDING_LINES));
    let alarms = Arc::new(Semaphore::new(MAX_PENDING_ALARMS));
    Arc::new(move |stream, text| {
        if declared_memory::is_memory_line(&text)
            && let Ok(pending) = Arc::clone(&said).try_acquire_owned()
        {
            outbox.send(TaskMessage::Report(generation, HelperReport::MemoryLine(text.clone(), pending)));
        }
        let is_crash = failure::is_crash(&text);
        logs.push(generation, stream, given.redact(text));
        // Send the report after logging the line, because the task searches the log for it.
        if is_crash && let Ok(pending) = Arc::clone(&alarms).try_acquire_owned() {
            outbox.send(TaskMessage::Report(generation, HelperReport::CrashLogged(pending)));
        }
    })
}

#[cfg(test)]
mod tests {
    use warden_policies::ModelName;

    use super::*;
    use crate::view::log::OutputStream;

    fn command() -> ServerCommand {
        let directory = None;
        ServerCommand { directory, ..ServerCommand::from_binary("/bin/true".into()) }
    }

    #[test]
    fn however_much_a_child_says_its_inbox_stays_small() {
        let logs = Arc::new(LogRing::new(ModelName::new("m"), 10));
        let (outbox, mut inbox) = mailbox();
        let sink = make_line_sink(GenerationId(1), &command(), logs, outbox);
        for n in 0..100_000 {
            sink(OutputStream::Stderr, format!("CUDA error: number {n}"));
            sink(OutputStream::Stderr, format!("load_model: initializing slots, n_slots = {n}"));
        }
        let alarms = |inbox: &mut TaskInbox| {
            let all = std::iter::from_fn(|| inbox.try_recv());
            all.filter(|message| matches!(message, TaskMessage::Report(_, HelperReport::CrashLogged(_))))
                .count()
        };
        assert!(inbox.len() <= MAX_PENDING_LINES + MAX_PENDING_ALARMS, "{}", inbox.len());
        assert_eq!(alarms(&mut inbox), 1);
        sink(OutputStream::Stderr, "CUDA error: the next one".to_owned());
        assert_eq!(alarms(&mut inbox), 1, "once the last one is taken");
    }
}
