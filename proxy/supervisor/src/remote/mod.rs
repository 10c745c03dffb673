//! Models served by a remote endpoint, without a process of ours. Their only state is whether the endpoint
//! answers.
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
//! Queue and leases work as for local models. A changed address makes a new generation, and running requests
//! continue at the old address.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use warden_policies::ServerFacts;
use warden_policies::lifecycle::BackendPhase;

use crate::clock;
use crate::error::{BackendFailure, ControlError, FailureKind, LeaseDenied};
use crate::lease::cell::{GenerationCell, LeaseAddress};
use crate::lease::queue::{LeaseQueue, QueueRefusal};
use crate::model::context::FleetContext;
use crate::model::message::{TaskInbox, TaskOutbox, mailbox};
use crate::model::{ControlMessage, TaskMessage};
use crate::origin::probe::{EndpointInfo, ProbeFailure, probe};
use crate::spec::RemoteSpec;
use crate::view::event::EventKind;
use crate::view::{BackendView, ModelOutage, ModelState, ModelView, RemoteView};

#[derive(Debug)]
pub(crate) struct RemoteTask {
    context: Arc<FleetContext>,
    leases: Arc<LeaseQueue>,
    spec: RemoteSpec,
    inbox: TaskInbox,
    cell: Arc<GenerationCell>,
    /// Generations of earlier addresses with running requests.
    former_cells: Vec<Arc<GenerationCell>>,
    standing: EndpointState,
    listed: EndpointInfo,
    outages: u64,
    was_ready: bool,
    probe: EndpointProbe,
    /// True if the model was removed: another model may have its name.
    removed: bool,
}

/// Running or last probe, and the time of the next.
#[derive(Debug)]
struct EndpointProbe {
    task: JoinSet<Result<EndpointInfo, ProbeFailure>>,
    since: Instant,
    /// True if a failed connection caused the probe.
    in_doubt: bool,
    slow_count: u32,
    /// True if a connection has failed since the probe began.
    doubted: bool,
    due: Instant,
}

impl EndpointProbe {
    fn new() -> Self {
        let now = Instant::now();
        Self { task: JoinSet::new(), since: now, in_doubt: false, slow_count: 0, doubted: false, due: now }
    }

    fn begin(&mut self, spec: &RemoteSpec) {
        let (origin, model) = (Arc::clone(&spec.origin), spec.model.clone());
        let limit = spec.numbers.answer_limit;
        self.since = Instant::now();
        self.in_doubt = std::mem::take(&mut self.doubted);
        self.task.spawn(async move { probe(&origin, &model, limit).await });
    }

    /// Requests a probe after a failed connection. Cancels a running probe, because its result may be older.
    fn doubt(&mut self) {
        self.task = JoinSet::new();
        self.doubted = true;
        self.due = Instant::now();
    }
}

#[derive(Debug)]
enum EndpointState {
    /// The first probe has no result yet.
    Unknown,
    Answers {
        since: Instant,
    },
    Silent(BackendFailure),
}

impl RemoteTask {
    pub(crate) fn new(
        context: Arc<FleetContext>,
        leases: Arc<LeaseQueue>,
        spec: RemoteSpec,
    ) -> (Self, TaskOutbox) {
        let (sender, inbox) = mailbox();
        let cell = new_cell(&context, &spec);
        let remote = Self {
            context,
            leases,
            spec,
            inbox,
            cell,
            former_cells: Vec::new(),
            standing: EndpointState::Unknown,
            listed: EndpointInfo::default(),
            outages: 0,
            was_ready: false,
            probe: EndpointProbe::new(),
            removed: false,
        };
        (remote, sender)
    }

    pub(crate) async fn run(mut self: Box<Self>) {
        let mut end = None;
        loop {
            self.drop_former();
            if end.is_some() {
                self.probe.task = JoinSet::new();
                if !self.removed && !self.leases.any_open() {
                    // No endpoint can serve the waiting requests any more.
                    self.leases.refuse_waiting(&LeaseDenied::ShuttingDown);
                }
                if self.leases.with_state(|queue| queue.is_idle()) {
                    break;
                }
            }
            if !self.removed {
                self.context.records.publisher.update(self.model_view());
            }
            let EndpointProbe { task, due, .. } = &mut self.probe;
            let may_begin = task.is_empty() && end.is_none();
            let leases = Arc::clone(&self.leases);
            tokio::select! {
                biased;
                message = self.inbox.recv() => match message {
                    Some(message) => end = self.handle_message(message).or(end),
                    None => break,
                },
                () = wait_until(end) => break,
                () = leases.wake.notified() => self.check_doubts(),
                answer = answered(task) => self.note_answer(answer),
                () = sleep_until(*due), if may_begin => self.probe.begin(&self.spec),
            }
        }
        let denied = if self.removed { LeaseDenied::Removed } else { LeaseDenied::ShuttingDown };
        self.leases.refuse_waiting(&denied);
        for cell in self.former_cells.drain(..).chain([self.cell]) {
            self.leases.remove_generation(cell.id);
            cell.request_stop();
        }
    }

    /// If the message ends the task, returns its latest end. Without requests, the task ends earlier.
    fn handle_message(&mut self, message: TaskMessage) -> Option<Instant> {
        let control = match message {
            TaskMessage::Control(control) => control,
            TaskMessage::Beat(question) => {
                let _left = question.send(());
                return None;
            }
            TaskMessage::Report(..) | TaskMessage::Looked(..) | TaskMessage::StartSearched(..) => {
                return None;
            }
        };
        match control {
            ControlMessage::PointRemote(spec, reply) => drop(reply.send(self.apply_spec(*spec))),
            // A remote model has no process to restart, so probe the endpoint.
            ControlMessage::Restart(_, reply) => {
                self.probe.due = Instant::now();
                drop(reply.send(Ok(Vec::new())));
            }
            ControlMessage::Drain(reply) => drop(reply.send(Err(self.no_process_error("drained")))),
            ControlMessage::Reclaim(_, reply) => {
                drop(reply.send(Err(self.no_process_error("asked to give memory back"))));
            }
            ControlMessage::Pin(_, _, reply) => drop(reply.send(Err(self.no_process_error("pinned")))),
            ControlMessage::Remove => {
                self.removed = true;
                self.leases.close_gate(self.cell.id);
                return Some(clock::after(Instant::now(), Duration::MAX));
            }
            ControlMessage::Shutdown(until) => return Some(until),
            ControlMessage::Disband => return Some(Instant::now()),
            ControlMessage::Apply(..)
            | ControlMessage::Loading(_)
            | ControlMessage::HandOver(_)
            | ControlMessage::Thaw
            | ControlMessage::LetGo(_)
            | ControlMessage::Gates(..)
            | ControlMessage::Begin
            | ControlMessage::LearnFacts(..) => {}
        }
        None
    }

    fn no_process_error(&self, what: &'static str) -> ControlError {
        ControlError::Remote { model: self.spec.name.clone(), what }
    }

    /// Returns true if the endpoint's address changes.
    fn apply_spec(&mut self, spec: RemoteSpec) -> bool {
        self.check_doubts();
        let moved = *spec.origin != *self.spec.origin;
        let renamed = spec.model != self.spec.model;
        self.spec = spec;
        self.leases.with_state(|queue| queue.set_limits(self.spec.queue.depth, self.spec.queue.wait));
        if moved {
            self.leases.close_gate(self.cell.id);
            self.former_cells.push(std::mem::replace(&mut self.cell, new_cell(&self.context, &self.spec)));
            self.probe = EndpointProbe::new();
            self.standing = EndpointState::Unknown;
            self.listed = EndpointInfo::default();
            self.was_ready = false;
            self.leases.set_refusal(None);
        } else if matches!(self.standing, EndpointState::Answers { .. }) && !self.probe.doubted {
            self.open();
        }
        if moved && renamed {
            // The bodies of waiting requests contain the model's name at the old address.
            let message = format!("a reload has moved the model to `{}`: send again", self.spec.origin);
            let denied = LeaseDenied::Silent(endpoint_failure(message, 1), Duration::from_secs(1));
            self.leases.refuse_waiting(&denied);
        }
        self.probe.due = Instant::now();
        moved
    }

    /// Requests a probe after a failed connection, unless the endpoint is known not to answer.
    fn check_doubts(&mut self) {
        let doubted = self.leases.with_state(|queue| queue.table.take_doubted()).contains(&self.cell.id);
        if doubted && !matches!(self.standing, EndpointState::Silent(_)) {
            self.probe.doubt();
        }
    }

    fn note_answer(&mut self, answer: Result<EndpointInfo, ProbeFailure>) {
        let (numbers, now) = (self.spec.numbers, Instant::now());
        // A connection may have failed after the endpoint sent this answer.
        self.check_doubts();
        if self.probe.doubted {
            return;
        }
        let why = match answer {
            Ok(listed) => {
                self.listed = listed;
                self.probe.slow_count = 0;
                return self.note_serving(clock::after_pause(now, numbers.interval));
            }
            Err(ProbeFailure::Timeout(why)) => {
                self.probe.slow_count += 1;
                let works = self.cell.pulses.received_since(self.probe.since);
                let answers = matches!(self.standing, EndpointState::Answers { .. }) && !self.probe.in_doubt;
                if works || answers && self.probe.slow_count < numbers.slow {
                    // A busy endpoint may be too slow for a probe, but still serves.
                    return self.note_serving(clock::after_pause(now, numbers.retry_first));
                }
                why
            }
            Err(ProbeFailure::Refused(why)) => why,
        };
        self.note_silence(&why);
    }

    fn note_serving(&mut self, due: Instant) {
        let was_silent = matches!(self.standing, EndpointState::Silent(_));
        let was_ready = std::mem::replace(&mut self.was_ready, true);
        if !matches!(self.standing, EndpointState::Answers { .. }) {
            self.standing = EndpointState::Answers { since: Instant::now() };
        }
        self.probe.due = due;
        self.leases.note_alive(self.cell.id);
        self.open();
        if was_silent || !was_ready {
            self.log_event(EventKind::EndpointAnswers { url: self.spec.origin.to_string() });
        }
    }

    fn note_silence(&mut self, why: &str) {
        let numbers = self.spec.numbers;
        let failures = match &self.standing {
            EndpointState::Silent(failure) => failure.failures.saturating_add(1),
            EndpointState::Answers { .. } | EndpointState::Unknown => 1,
        };
        let pause = numbers.retry_first.saturating_mul(1 << (failures - 1).min(16)).min(numbers.interval);
        self.probe.due = clock::after_pause(Instant::now(), pause);
        let message = format!("the endpoint `{}` does not serve: {why}", self.spec.origin);
        let failure = endpoint_failure(message, failures);
        self.leases.close_gate(self.cell.id);
        // The probe itself may take a second.
        let trial = clock::after(self.probe.due, Duration::from_secs(1));
        self.leases.set_refusal(Some(QueueRefusal::EndpointSilent(failure.clone(), trial)));
        if failures == 1 {
            self.outages += u64::from(self.was_ready);
            self.log_event(EventKind::EndpointSilent { failure: failure.clone() });
        }
        self.standing = EndpointState::Silent(failure);
    }

    fn open(&mut self) {
        self.leases.open_gate(&self.cell, self.spec.max_in_flight);
    }

    fn log_event(&self, kind: EventKind) {
        self.context.records.journal.record(Some(&self.spec.name), Some(self.cell.id), kind);
    }

    fn drop_former(&mut self) {
        let leases = &self.leases;
        self.former_cells.retain(|cell| {
            let runs = leases.in_flight(cell.id) > 0;
            if !runs {
                leases.remove_generation(cell.id);
            }
            runs
        });
    }

    fn model_view(&self) -> ModelView {
        let (state, failure) = match &self.standing {
            EndpointState::Answers { .. } => (ModelState::Loaded, None),
            EndpointState::Unknown => (ModelState::Loading, None),
            EndpointState::Silent(failure) => (ModelState::Backoff, Some(failure.clone())),
        };
        let outage = failure.is_some().then(|| ModelOutage {
            refusing: true,
            next_start_unix_ms: clock::unix_ms(self.probe.due),
            watching: false,
            cure: format!(
                "it is probed again automatically; `llama-warden restart {}` does it at once",
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
            quarantine: self.leases.ward.view(),
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
            generation: Some(self.cell.id),
            ready_since,
            in_flight: self.leases.in_flight(self.cell.id),
            slots: Some(self.spec.max_in_flight),
            work: self.cell.work(),
            ..BackendView::without_process(0, phase)
        }
    }
}

/// State of a new generation. An idle connection costs an endpoint no thread that others wait for.
fn new_cell(context: &FleetContext, spec: &RemoteSpec) -> Arc<GenerationCell> {
    let facts = ServerFacts { http_threads: Some(u32::MAX), ..ServerFacts::default() };
    Arc::new(GenerationCell::new(
        context.next_generation(),
        LeaseAddress::Remote(Arc::clone(&spec.origin)),
        facts,
    ))
}

fn endpoint_failure(message: String, failures: u32) -> BackendFailure {
    BackendFailure { kind: FailureKind::Endpoint, message, lines: Vec::new(), failures }
}

async fn wait_until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

async fn answered(
    asking: &mut JoinSet<Result<EndpointInfo, ProbeFailure>>,
) -> Result<EndpointInfo, ProbeFailure> {
    match asking.join_next().await {
        Some(answer) => answer.unwrap_or_else(|error| Err(ProbeFailure::Refused(error.to_string()))),
        None => std::future::pending().await,
    }
}
