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
use warden_policies::lifecycle::Phase;

use crate::clock;
use crate::error::{ControlError, Denied, Failure, FailureKind};
use crate::lease::address::Address;
use crate::lease::cell::Cell;
use crate::lease::queue::{Leases, Refusal};
use crate::model::context::Context;
use crate::model::mailbox::{Inbox, Outbox, mailbox};
use crate::model::{Control, Message};
use crate::origin::probe::{Listed, Silence, probe};
use crate::spec::RemoteSpec;
use crate::view::event::EventKind;
use crate::view::{BackendView, ModelState, ModelView, Outage, RemoteView};

/// Task of one remote model.
#[derive(Debug)]
pub(crate) struct Remote {
    context: Arc<Context>,
    leases: Arc<Leases>,
    spec: RemoteSpec,
    inbox: Inbox,
    /// Cell of the present address.
    cell: Arc<Cell>,
    /// Earlier addresses with running requests.
    former: Vec<Arc<Cell>>,
    standing: Standing,
    /// Last answer of its endpoint.
    listed: Listed,
    /// Number of times that it stopped answering.
    outages: u64,
    was_ready: bool,
    /// Time of the next probe.
    due: Instant,
    asking: Asking,
    /// A connection failed since the last probe.
    doubted: bool,
    /// The model is no longer configured, and another one may have its name.
    removed: bool,
}

/// Present or last probe.
#[derive(Debug)]
struct Asking {
    task: JoinSet<Result<Listed, Silence>>,
    since: Instant,
    /// A connection had failed before.
    in_doubt: bool,
    /// Consecutive probes without an answer in time.
    slow: u32,
}

impl Default for Asking {
    fn default() -> Self {
        Self { task: JoinSet::new(), since: Instant::now(), in_doubt: false, slow: 0 }
    }
}

/// State of the endpoint.
#[derive(Debug)]
enum Standing {
    /// Unknown while it is being probed.
    Unknown,
    Answers {
        since: Instant,
    },
    Silent(Failure),
}

/// Next step after a message.
enum Next {
    Go,
    /// End when no request runs, or at this time.
    End(Instant),
}

impl Remote {
    pub(crate) fn new(context: Arc<Context>, leases: Arc<Leases>, spec: RemoteSpec) -> (Self, Outbox) {
        let (sender, inbox) = mailbox();
        let cell = cell(&context, &spec);
        let remote = Self {
            context,
            leases,
            spec,
            inbox,
            cell,
            former: Vec::new(),
            standing: Standing::Unknown,
            listed: Listed::default(),
            outages: 0,
            was_ready: false,
            due: Instant::now(),
            asking: Asking::default(),
            doubted: false,
            removed: false,
        };
        (remote, sender)
    }

    /// Runs until removal or shutdown.
    pub(crate) async fn run(mut self: Box<Self>) {
        let mut end = None;
        loop {
            self.leave_former();
            if end.is_some() {
                self.asking.task = JoinSet::new();
                if !self.removed && !self.leases.any_open() {
                    // No endpoint can serve them any more.
                    self.leases.dismiss(&Denied::ShuttingDown);
                }
                if self.leases.is_still() {
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
                message = self.inbox.recv() => match message.map(|message| self.heed(message)) {
                    Some(Next::Go) => {}
                    Some(Next::End(at)) => end = Some(at),
                    None => break,
                },
                () = at(end) => break,
                () = leases.wake.notified() => self.look(),
                answer = answered(asking) => self.answered(answer),
                () = sleep_until(due), if !is_asked && end.is_none() => self.ask(),
            }
        }
        self.leases.dismiss(&if self.removed { Denied::Removed } else { Denied::ShuttingDown });
        for cell in self.former.drain(..).chain([self.cell]) {
            self.leases.forget(cell.id);
            cell.tell_to_end();
        }
    }

    fn heed(&mut self, message: Message) -> Next {
        let control = match message {
            Message::Control(control) => control,
            Message::Beat(question) => {
                let _left = question.send(());
                return Next::Go;
            }
            Message::Report(..) | Message::Looked(..) | Message::StartSearched(..) => return Next::Go,
        };
        match control {
            Control::Point(spec, reply) => drop(reply.send(self.take_over(*spec))),
            // Without a process to replace, a restart probes the endpoint now.
            Control::Restart(_, reply) => {
                self.due = Instant::now();
                drop(reply.send(Ok(Vec::new())));
            }
            Control::Drain(reply) => drop(reply.send(Err(self.none_here("drained")))),
            Control::Reclaim(_, reply) => drop(reply.send(Err(self.none_here("asked to give memory back")))),
            Control::Pin(_, _, reply) => drop(reply.send(Err(self.none_here("pinned")))),
            Control::Remove => {
                self.removed = true;
                self.leases.close(self.cell.id);
                return Next::End(clock::after(Instant::now(), Duration::MAX));
            }
            Control::Shutdown(until) => return Next::End(until),
            Control::Disband => return Next::End(Instant::now()),
            Control::Apply(..)
            | Control::Load(..)
            | Control::Unload(_)
            | Control::GiveBack
            | Control::Stay { .. }
            | Control::Anew { .. }
            | Control::Come
            | Control::ClearAway
            | Control::Never { .. }
            | Control::HandOver(_)
            | Control::Thaw
            | Control::LetGo(_)
            | Control::Gates(..)
            | Control::Begin
            | Control::Learn(..) => {}
        }
        Next::Go
    }

    fn none_here(&self, what: &'static str) -> ControlError {
        ControlError::Remote { model: self.spec.name.clone(), what }
    }

    /// Applies new settings. Returns true if the address changes.
    fn take_over(&mut self, spec: RemoteSpec) -> bool {
        self.look();
        let moved = *spec.origin != *self.spec.origin;
        let renamed = spec.model != self.spec.model;
        self.spec = spec;
        self.leases.set_queue(self.spec.queue.depth, self.spec.queue.wait);
        if moved {
            self.leases.close(self.cell.id);
            self.former.push(std::mem::replace(&mut self.cell, cell(&self.context, &self.spec)));
            self.asking = Asking::default();
            (self.standing, self.listed) = (Standing::Unknown, Listed::default());
            (self.doubted, self.was_ready) = (false, false);
            self.leases.refuse(None);
        } else if matches!(self.standing, Standing::Answers { .. }) && !self.doubted {
            self.open();
        }
        if moved && renamed {
            // Waiting requests contain the model's name at the old address.
            let message = format!("a reload has moved the model to `{}`: send again", self.spec.origin);
            let failure = Failure { kind: FailureKind::Endpoint, message, lines: Vec::new(), failures: 1 };
            self.leases.dismiss(&Denied::Silent(failure, Duration::from_secs(1)));
        }
        self.due = Instant::now();
        moved
    }

    /// Handles failed connections.
    fn look(&mut self) {
        let doubted = self.leases.take_doubts().contains(&self.cell.id);
        if doubted && !matches!(self.standing, Standing::Silent(_)) {
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

    fn answered(&mut self, answer: Result<Listed, Silence>) {
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
            Err(Silence::Slow(why)) => {
                self.asking.slow += 1;
                let works = self.cell.progressed_since(self.asking.since);
                let answers = matches!(self.standing, Standing::Answers { .. }) && !self.asking.in_doubt;
                if works || answers && self.asking.slow < numbers.slow {
                    // A busy endpoint may not answer a probe, so it counts as serving.
                    return self.serves(clock::again(now, numbers.retry_first));
                }
                why
            }
            Err(Silence::Said(why)) => why,
        };
        self.is_silent(&why);
    }

    fn serves(&mut self, due: Instant) {
        let was_silent = matches!(self.standing, Standing::Silent(_));
        let was_ready = std::mem::replace(&mut self.was_ready, true);
        if !matches!(self.standing, Standing::Answers { .. }) {
            self.standing = Standing::Answers { since: Instant::now() };
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
            Standing::Silent(failure) => failure.failures.saturating_add(1),
            Standing::Answers { .. } | Standing::Unknown => 1,
        };
        let pause = numbers.retry_first.saturating_mul(1 << (failures - 1).min(16)).min(numbers.interval);
        self.due = clock::again(Instant::now(), pause);
        let message = format!("the endpoint `{}` does not serve: {why}", self.spec.origin);
        let failure = Failure { kind: FailureKind::Endpoint, message, lines: Vec::new(), failures };
        self.leases.close(self.cell.id);
        // Add time for the probe itself.
        let trial = clock::after(self.due, Duration::from_secs(1));
        self.leases.refuse(Some(Refusal::Silent(failure.clone(), trial)));
        if failures == 1 {
            self.outages += u64::from(self.was_ready);
            self.tell(EventKind::EndpointSilent { failure: failure.clone() });
        }
        self.standing = Standing::Silent(failure);
    }

    fn open(&mut self) {
        self.leases.open(&self.cell, self.spec.max_in_flight);
    }

    fn tell(&self, kind: EventKind) {
        self.context.journal.tell(Some(&self.spec.name), Some(self.cell.id), kind);
    }

    /// Drops earlier addresses without running requests.
    fn leave_former(&mut self) {
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
            Standing::Silent(failure) => Some(failure.clone()),
            Standing::Answers { .. } | Standing::Unknown => None,
        };
        let state = match self.standing {
            Standing::Answers { .. } => ModelState::Loaded,
            Standing::Unknown => ModelState::Loading,
            Standing::Silent(_) => ModelState::Backoff,
        };
        let outage = failure.is_some().then(|| Outage {
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
            backends: vec![self.show_endpoint()],
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

    fn show_endpoint(&self) -> BackendView {
        let (phase, ready_since) = match self.standing {
            Standing::Answers { since } => (Phase::Ready, Some(since.into())),
            Standing::Unknown => (Phase::Starting, None),
            Standing::Silent(_) => (Phase::Backoff, None),
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
fn cell(context: &Context, spec: &RemoteSpec) -> Arc<Cell> {
    let facts = ServerFacts { http_threads: Some(ServerFacts::THREADS_ON_DEMAND), ..ServerFacts::default() };
    Arc::new(Cell::new(context.next_generation(), Address::Remote(Arc::clone(&spec.origin)), facts))
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

async fn answered(asking: &mut JoinSet<Result<Listed, Silence>>) -> Result<Listed, Silence> {
    match asking.join_next().await {
        Some(answer) => answer.unwrap_or_else(|error| Err(Silence::Said(error.to_string()))),
        None => std::future::pending().await,
    }
}
