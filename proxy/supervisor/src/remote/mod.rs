//! Models served by a remote endpoint, without a process or memory of ours. Their only state is whether the
//! endpoint answers.
//!
//! ```text
//!     probe ---- answers ---------> open: requests go there; probed again from time to time
//!       |                             | a connection failed, or an answer broke off
//!       |                             v
//!       |                           closed: requests wait for the next probe
//!       +------- does not --------> refusing: requests get an error at once, names in `[names]` choose
//!                                   another model; probed again with growing pauses, for ever
//! ```
//!
//! Queue and leases are those of every model. A changed address makes a new generation: running requests
//! continue at the old one.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use warden_policies::ServerFacts;
use warden_policies::lifecycle::BackendPhase;

use crate::clock;
use crate::error::{BackendFailure, ControlError, FailureKind, LeaseDenied};
use crate::lease::address::LeaseAddress;
use crate::lease::cell::GenerationCell;
use crate::lease::queue::{LeaseQueue, QueueRefusal};
use crate::model::context::FleetContext;
use crate::model::mailbox::{TaskInbox, TaskOutbox, mailbox};
use crate::model::{ControlMessage, TaskMessage};
use crate::origin::probe::{EndpointInfo, ProbeFailure, probe};
use crate::spec::RemoteSpec;
use crate::view::event::EventKind;
use crate::view::{BackendView, ModelOutage, ModelState, ModelView, RemoteView};

/// Task of one remote model.
#[derive(Debug)]
pub(crate) struct RemoteTask {
    context: Arc<FleetContext>,
    leases: Arc<LeaseQueue>,
    spec: RemoteSpec,
    inbox: TaskInbox,
    /// Cell of the present address.
    cell: Arc<GenerationCell>,
    /// Earlier addresses with running requests.
    former: Vec<Arc<GenerationCell>>,
    standing: EndpointState,
    /// Last answer of its endpoint.
    listed: EndpointInfo,
    /// Number of times that it stopped answering.
    outages: u64,
    was_ready: bool,
    /// Time of the next probe.
    due: Instant,
    asking: PendingProbe,
    /// A connection failed since the last probe.
    doubted: bool,
    /// The model is no longer configured, and another one may have its name.
    removed: bool,
}

/// Present or last probe.
#[derive(Debug)]
struct PendingProbe {
    task: JoinSet<Result<EndpointInfo, ProbeFailure>>,
    since: Instant,
    /// A connection had failed before.
    in_doubt: bool,
    /// Consecutive probes without an answer in time.
    slow: u32,
}

impl Default for PendingProbe {
    fn default() -> Self {
        Self { task: JoinSet::new(), since: Instant::now(), in_doubt: false, slow: 0 }
    }
}

/// State of the endpoint.
#[derive(Debug)]
enum EndpointState {
    /// Unknown while it is being probed.
    Unknown,
    Answers {
        since: Instant,
    },
    Silent(BackendFailure),
}

/// Next step after a message.
enum NextStep {
    Go,
    /// End when no request runs, or at this time.
    End(Instant),
}

impl RemoteTask {
    pub(crate) fn new(
        context: Arc<FleetContext>,
        leases: Arc<LeaseQueue>,
        spec: RemoteSpec,
    ) -> (Self, TaskOutbox) {
        let (sender, inbox) = mailbox();
        let cell = cell(&context, &spec);
        let remote = Self {
            context,
            leases,
            spec,
            inbox,
            cell,
            former: Vec::new(),
            standing: EndpointState::Unknown,
            listed: EndpointInfo::default(),
            outages: 0,
            was_ready: false,
            due: Instant::now(),
            asking: PendingProbe::default(),
            doubted: false,
            removed: false,
        };
        (remote, sender)
    }

    /// Runs until removal or shutdown.
    pub(crate) async fn run(mut self: Box<Self>) {
        let mut end = None;
        loop {
            self.drop_former();
            if end.is_some() {
                self.asking.task = JoinSet::new();
                if !self.removed && !self.leases.any_open() {
                    // No endpoint can serve them any more.
                    self.leases.dismiss(&LeaseDenied::ShuttingDown);
                }
                if self.leases.is_idle() {
                    break;
                }
            }
            if !self.removed {
                self.context.publisher.update(self.show());
            }
            let (asking, due) = (&mut self.asking.task, self.due);
            let is_asked = !asking.is_empty();
            let leases = Arc::clone(&self.leases);
            tokio::select! {
                biased;
                message = self.inbox.recv() => match message.map(|message| self.handle_message(message)) {
                    Some(NextStep::Go) => {}
                    Some(NextStep::End(at)) => end = Some(at),
                    None => break,
                },
                () = at(end) => break,
                () = leases.wake.notified() => self.look(),
                answer = answered(asking) => self.answered(answer),
                () = sleep_until(due), if !is_asked && end.is_none() => self.ask(),
            }
        }
        self.leases.dismiss(&if self.removed { LeaseDenied::Removed } else { LeaseDenied::ShuttingDown });
        for cell in self.former.drain(..).chain([self.cell]) {
            self.leases.forget(cell.id);
            cell.request_stop();
        }
    }

    fn handle_message(&mut self, message: TaskMessage) -> NextStep {
        let control = match message {
            TaskMessage::Control(control) => control,
            TaskMessage::Beat(question) => {
                let _left = question.send(());
                return NextStep::Go;
            }
            TaskMessage::Report(..) | TaskMessage::Looked(..) | TaskMessage::StartSearched(..) => {
                return NextStep::Go;
            }
        };
        match control {
            ControlMessage::Point(spec, reply) => drop(reply.send(self.take_over(*spec))),
            // Without a process to replace, a restart probes the endpoint now.
            ControlMessage::Restart(_, reply) => {
                self.due = Instant::now();
                drop(reply.send(Ok(Vec::new())));
            }
            ControlMessage::Drain(reply) => drop(reply.send(Err(self.no_process_error("drained")))),
            ControlMessage::Reclaim(_, reply) => {
                drop(reply.send(Err(self.no_process_error("asked to give memory back"))))
            }
            ControlMessage::Pin(_, _, reply) => drop(reply.send(Err(self.no_process_error("pinned")))),
            ControlMessage::Remove => {
                self.removed = true;
                self.leases.close(self.cell.id);
                return NextStep::End(clock::after(Instant::now(), Duration::MAX));
            }
            ControlMessage::Shutdown(until) => return NextStep::End(until),
            ControlMessage::Disband => return NextStep::End(Instant::now()),
            ControlMessage::Apply(..)
            | ControlMessage::Load(..)
            | ControlMessage::Unload(_)
            | ControlMessage::GiveBack
            | ControlMessage::Stay { .. }
            | ControlMessage::Anew { .. }
            | ControlMessage::Come
            | ControlMessage::ClearAway
            | ControlMessage::Never { .. }
            | ControlMessage::HandOver(_)
            | ControlMessage::Thaw
            | ControlMessage::LetGo(_)
            | ControlMessage::Gates(..)
            | ControlMessage::Begin
            | ControlMessage::Learn(..) => {}
        }
        NextStep::Go
    }

    fn no_process_error(&self, what: &'static str) -> ControlError {
        ControlError::Remote { model: self.spec.name.clone(), what }
    }

    /// Applies new settings. Returns true if the address changes.
    fn take_over(&mut self, spec: RemoteSpec) -> bool {
        self.look();
        let moved = *spec.origin != *self.spec.origin;
        let renamed = spec.model != self.spec.model;
        self.spec = spec;
        self.leases.set_queue_limits(self.spec.queue.depth, self.spec.queue.wait);
        if moved {
            self.leases.close(self.cell.id);
            self.former.push(std::mem::replace(&mut self.cell, cell(&self.context, &self.spec)));
            self.asking = PendingProbe::default();
            (self.standing, self.listed) = (EndpointState::Unknown, EndpointInfo::default());
            (self.doubted, self.was_ready) = (false, false);
            self.leases.refuse(None);
        } else if matches!(self.standing, EndpointState::Answers { .. }) && !self.doubted {
            self.open();
        }
        if moved && renamed {
            // Waiting requests contain the model's name at the old address.
            let message = format!("a reload has moved the model to `{}`: send again", self.spec.origin);
            let failure =
                BackendFailure { kind: FailureKind::Endpoint, message, lines: Vec::new(), failures: 1 };
            self.leases.dismiss(&LeaseDenied::Silent(failure, Duration::from_secs(1)));
        }
        self.due = Instant::now();
        moved
    }

    /// Handles failed connections.
    fn look(&mut self) {
        let doubted = self.leases.take_doubts().contains(&self.cell.id);
        if doubted && !matches!(self.standing, EndpointState::Silent(_)) {
            // An earlier probe says nothing about the present state.
            self.asking.task = JoinSet::new();
            (self.doubted, self.due) = (true, Instant::now());
        }
    }

    fn ask(&mut self) {
        let (origin, model) = (Arc::clone(&self.spec.origin), self.spec.model.clone());
        let limit = self.spec.numbers.answer_limit;
        self.asking.since = Instant::now();
        self.asking.in_doubt = std::mem::take(&mut self.doubted);
        self.asking.task.spawn(async move { probe(&origin, &model, limit).await });
    }

    fn answered(&mut self, answer: Result<EndpointInfo, ProbeFailure>) {
        let (numbers, now) = (self.spec.numbers, Instant::now());
        // A connection may have failed meanwhile.
        self.look();
        if self.doubted {
            return;
        }
        let why = match answer {
            Ok(listed) => {
                self.listed = listed;
                self.asking.slow = 0;
                return self.serves(clock::again(now, numbers.interval));
            }
            Err(ProbeFailure::Slow(why)) => {
                self.asking.slow += 1;
                let works = self.cell.progressed_since(self.asking.since);
                let answers = matches!(self.standing, EndpointState::Answers { .. }) && !self.asking.in_doubt;
                if works || answers && self.asking.slow < numbers.slow {
                    // A busy endpoint may not answer a probe, so it counts as serving.
                    return self.serves(clock::again(now, numbers.retry_first));
                }
                why
            }
            Err(ProbeFailure::Said(why)) => why,
        };
        self.is_silent(&why);
    }

    fn serves(&mut self, due: Instant) {
        let was_silent = matches!(self.standing, EndpointState::Silent(_));
        let was_ready = std::mem::replace(&mut self.was_ready, true);
        if !matches!(self.standing, EndpointState::Answers { .. }) {
            self.standing = EndpointState::Answers { since: Instant::now() };
        }
        self.due = due;
        self.leases.lives(self.cell.id);
        self.open();
        if was_silent || !was_ready {
            self.tell(EventKind::EndpointAnswers { url: self.spec.origin.to_string() });
        }
    }

    fn is_silent(&mut self, why: &str) {
        let numbers = self.spec.numbers;
        let failures = match &self.standing {
            EndpointState::Silent(failure) => failure.failures.saturating_add(1),
            EndpointState::Answers { .. } | EndpointState::Unknown => 1,
        };
        let pause = numbers.retry_first.saturating_mul(1 << (failures - 1).min(16)).min(numbers.interval);
        self.due = clock::again(Instant::now(), pause);
        let message = format!("the endpoint `{}` does not serve: {why}", self.spec.origin);
        let failure = BackendFailure { kind: FailureKind::Endpoint, message, lines: Vec::new(), failures };
        self.leases.close(self.cell.id);
        // Add time for the probe itself.
        let trial = clock::after(self.due, Duration::from_secs(1));
        self.leases.refuse(Some(QueueRefusal::Silent(failure.clone(), trial)));
        if failures == 1 {
            self.outages += u64::from(self.was_ready);
            self.tell(EventKind::EndpointSilent { failure: failure.clone() });
        }
        self.standing = EndpointState::Silent(failure);
    }

    fn open(&mut self) {
        self.leases.open(&self.cell, self.spec.max_in_flight);
    }

    fn tell(&self, kind: EventKind) {
        self.context.journal.tell(Some(&self.spec.name), Some(self.cell.id), kind);
    }

    /// Drops earlier addresses without running requests.
    fn drop_former(&mut self) {
        let leases = &self.leases;
        self.former.retain(|cell| {
            let runs = leases.in_flight(cell.id) > 0;
            if !runs {
                leases.forget(cell.id);
            }
            runs
        });
    }

    fn show(&self) -> ModelView {
        let failure = match &self.standing {
            EndpointState::Silent(failure) => Some(failure.clone()),
            EndpointState::Answers { .. } | EndpointState::Unknown => None,
        };
        let state = match self.standing {
            EndpointState::Answers { .. } => ModelState::Loaded,
            EndpointState::Unknown => ModelState::Loading,
            EndpointState::Silent(_) => ModelState::Backoff,
        };
        let outage = failure.is_some().then(|| ModelOutage {
            refusing: true,
            next_start_unix_ms: clock::unix_ms(self.due),
            watching: false,
            cure: format!(
                "it is asked again by itself; `llama-warden restart {}` does it at once",
                self.spec.name
            ),
        });
        ModelView {
            aliases: self.spec.aliases.clone(),
            state,
            waiting: self.leases.waiting(),
            queue_depth: self.spec.queue.depth,
            backends: vec![self.endpoint_view()],
            crashes: self.outages,
            was_ready: self.was_ready,
            n_ctx: self.listed.n_ctx.map(u64::from),
            last_failure: failure,
            outage,
            replace_note: self.listed.note.clone(),
            quarantine: self.leases.quarantine(),
            remote: Some(RemoteView { url: self.spec.origin.to_string(), model: self.spec.model.clone() }),
            ..ModelView::unloaded(self.spec.name.clone())
        }
    }

    fn endpoint_view(&self) -> BackendView {
        let (phase, ready_since) = match self.standing {
            EndpointState::Answers { since } => (BackendPhase::Ready, Some(since.into())),
            EndpointState::Unknown => (BackendPhase::Starting, None),
            EndpointState::Silent(_) => (BackendPhase::Backoff, None),
        };
        BackendView {
            replica: 0,
            generation: Some(self.cell.id),
            phase,
            pid: None,
            program: None,
            ready_since,
            in_flight: self.leases.in_flight(self.cell.id),
            slots: Some(self.spec.max_in_flight),
            host: None,
            host_at_ready: None,
            work: self.cell.work(),
            report: None,
            memory: crate::view::MemoryView::default(),
            health: crate::view::HealthView::default(),
            degraded: None,
            reclaim: crate::view::ReclaimView::default(),
            next: None,
        }
    }
}

/// Cell for a new generation: an address with unknown facts, except that it serves several connections.
fn cell(context: &FleetContext, spec: &RemoteSpec) -> Arc<GenerationCell> {
    let facts = ServerFacts { http_threads: Some(ServerFacts::THREADS_ON_DEMAND), ..ServerFacts::default() };
    Arc::new(GenerationCell::new(
        context.next_generation(),
        LeaseAddress::Remote(Arc::clone(&spec.origin)),
        facts,
    ))
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

async fn answered(
    asking: &mut JoinSet<Result<EndpointInfo, ProbeFailure>>,
) -> Result<EndpointInfo, ProbeFailure> {
    match asking.join_next().await {
        Some(answer) => answer.unwrap_or_else(|error| Err(ProbeFailure::Said(error.to_string()))),
        None => std::future::pending().await,
    }
}
