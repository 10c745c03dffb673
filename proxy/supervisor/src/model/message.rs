//! Messages to a model's task: reports of helper tasks, and requests of operators and of the fleet.
//!
//! tokio reserves room for 32 messages per channel, and the largest message has 224 bytes. The channel
//! carries boxes, so it costs an idle model 0.5 KiB instead of 7 KiB.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use warden_policies::cooldown::RecycleCooldown;
use warden_policies::health::HealthSymptom;
use warden_policies::start_search::StartFinding;
use warden_policies::warmth::WarmthReport;
use warden_policies::{GenerationId, ServerFacts};

use super::generation::ProcessRecipe;
use super::warm::pack::SavedSlots;
use super::warm::stored::save::StoreReport;
use super::warm::unpack::WarmingResult;
use crate::error::{ControlError, SpawnError};
use crate::lease::refused::ModelRefusal;
use crate::memory::declared_memory;
use crate::memory::fleet_memory::ReturnedMemory;
use crate::memory::loading::LoadingOrder;
use crate::memory::tracker::ReadingContext;
use crate::process::answer_probe::ProbeFinding;
use crate::process::failure::{self, OomEvidence};
use crate::process::group::ProcessExit;
use crate::process::heir::{OpenGate, ProcessHeir};
use crate::process::needs::NeedsCheck;
use crate::process::reclaim_file::ReclaimResult;
use crate::process::{BackendProcess, LineSink, ProbeResult, ProcessSample, ServerProps, discreet};
use crate::spec::{RemoteSpec, ServerCommand, SharedSpec, WatchConfig};
use crate::view::InputModalities;
use crate::view::entry::{PinView, ReclaimEntry};
use crate::view::ledger::LedgerEntry;
use crate::view::log::LogRing;

/// Name of the operator who requested an action, if known.
pub(crate) type RequestedBy = Option<Arc<str>>;

#[derive(Debug)]
pub(crate) enum TaskMessage {
    Report(GenerationId, HelperReport),
    /// The file check for a process with this recipe has ended.
    Looked(Box<ProcessRecipe>, NeedsCheck),
    StartSearched(u64, Box<StartFinding>),
    Control(ControlMessage),
    /// Watchdog question, answered by each task that is alive.
    Beat(oneshot::Sender<()>),
}

#[derive(Debug)]
pub(crate) enum HelperReport {
    Spawned(Result<Arc<dyn BackendProcess>, SpawnError>),
    /// Output line that may contain memory sizes.
    MemoryLine(String, OwnedSemaphorePermit),
    CrashLogged(OwnedSemaphorePermit),
    Probed(ProbeReport),
    /// The drained process has saved its slots.
    Packed(Box<SavedSlots>),
    /// The drained process has saved its conversations to disk, or cannot.
    Stored(Duration, Result<StoreReport, String>),
    /// Warming that continued after the gate opened has ended.
    Warmed(Box<WarmthReport>),
    /// Client settings that could not be applied to this process.
    SettingsFailed(Vec<String>),
    /// Result of the file check before the process was created.
    Looked(NeedsCheck),
    /// Time for which the starting process has made no progress.
    Stalled(Duration),
    /// Exit of the reaped process and, after a SIGKILL, evidence of a lack of memory.
    Exited(ProcessExit, OomEvidence),
    /// Memory that the ended process has freed.
    MemoryReturned(ReturnedMemory),
    /// A memory reading has ended; values that could not be read are missing.
    Sampled {
        taken: ReadingContext,
        sample: Box<ProcessSample>,
    },
    Reclaimed(Box<ReclaimResult>),
    /// Fixed prompts were compared, in this time.
    AnswersProbed(ProbeFinding, Duration),
}

#[derive(Debug)]
pub(crate) struct ProbeReport {
    pub(super) sent: Instant,
    pub(super) health: ProbeResult,
    /// Properties reported after the first probe that finds the process ready.
    pub(super) props: Option<ServerProps>,
    /// VRAM of a ready successor, in bytes.
    pub(super) vram: Option<u64>,
    /// Client settings that could not be applied to the process.
    pub(super) unset: Vec<String>,
    pub(super) warmed: Option<Box<WarmingResult>>,
    /// Symptom of a process whose predecessor was replaced for its answers.
    pub(super) altered: Option<HealthSymptom>,
}

impl ProbeReport {
    pub(super) fn new(sent: Instant, health: ProbeResult) -> Self {
        Self { sent, health, props: None, vram: None, unset: Vec::new(), warmed: None, altered: None }
    }
}

#[derive(Debug)]
pub(crate) enum ControlMessage {
    Restart(RequestedBy, oneshot::Sender<Result<Vec<LedgerEntry>, ControlError>>),
    Drain(oneshot::Sender<Result<(), ControlError>>),
    Reclaim(RequestedBy, oneshot::Sender<Result<Vec<ReclaimEntry>, ControlError>>),
    Pin(bool, Arc<str>, oneshot::Sender<Result<PinView, ControlError>>),
    /// New settings. The reply is true if processes are replaced.
    Apply(SharedSpec, Box<WatchConfig>, oneshot::Sender<bool>),
    /// New settings of a remote model. The reply is true if its address changes.
    PointRemote(Box<RemoteSpec>, oneshot::Sender<bool>),
    Loading(LoadingOrder),
    /// Facts measured about a binary.
    LearnFacts(PathBuf, ServerFacts),
    /// Make no more decisions, and return what the next instance needs.
    HandOver(oneshot::Sender<Result<ModelWill, String>>),
    /// The handover failed: decide again.
    Thaw,
    /// The next instance has taken over: release the processes.
    LetGo(oneshot::Sender<()>),
    /// The previous instance has released the processes: begin to decide.
    Begin,
    /// Open gates of the next instance, and requests that it has refused.
    Gates(Vec<OpenGate>, Vec<ModelRefusal>),
    /// End the task: this instance has no more requests.
    Disband,
    Remove,
    Shutdown(Instant),
}

#[derive(Debug)]
pub(crate) struct ModelWill {
    pub(crate) record: WillRecord,
    pub(crate) heirs: Vec<ProcessHeir>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WillRecord {
    pub(crate) name: String,
    pub(crate) wanted: bool,
    pub(crate) places: Vec<Vec<usize>>,
    pub(crate) fell_back: bool,
    pub(crate) cooldown: RecycleCooldown,
    pub(crate) crashes: u64,
    pub(crate) n_ctx: Option<u64>,
    pub(crate) modalities: Option<InputModalities>,
    #[serde(default)]
    pub(super) by_hand: Option<ManualPin>,
    /// Settings that clients made in the model's processes: route and body of each.
    pub(crate) settings: Vec<(String, Vec<u8>)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ManualPin {
    pub(super) pinned: bool,
    pub(super) by: String,
}

#[derive(Debug)]
pub(crate) struct TaskInbox(mpsc::UnboundedReceiver<Box<TaskMessage>>);

#[derive(Clone, Debug)]
pub(crate) struct TaskOutbox(mpsc::UnboundedSender<Box<TaskMessage>>);

pub(crate) fn mailbox() -> (TaskOutbox, TaskInbox) {
    let (sender, receiver) = mpsc::unbounded_channel();
    (TaskOutbox(sender), TaskInbox(receiver))
}

impl TaskInbox {
    /// Returns `None` if all senders are dropped. Cancel safe: dropping the future loses no message.
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
    /// If the task has ended, drops the message with its reply channel.
    pub(crate) fn send(&self, message: TaskMessage) {
        drop(self.0.send(Box::new(message)));
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

#[derive(Debug)]
pub(super) struct TaskMail {
    pub(super) inbox: TaskInbox,
    pub(super) outbox: TaskOutbox,
    pub(super) helpers: JoinSet<()>,
    /// Running start searches. The task awaits them before it ends, so that their processes are reaped.
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

/// Limit for unhandled memory lines; one start writes about thirty.
const MAX_PENDING_LINES: usize = 256;
/// A single crash report is enough, because the task searches the log for the line.
const MAX_PENDING_ALARMS: usize = 1;

/// Makes the handler that logs each output line of a process and reports important lines to the task.
///
/// A child may write faster than the task reads, so the number of unhandled lines is limited.
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
        // Log the line before the report, because the task searches the log for it.
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
