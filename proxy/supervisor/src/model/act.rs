//! Carries out what the life-cycle machine asks for.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::health::Symptom;
use warden_policies::lifecycle::{Effect, Event, Phase, Timer};
use warden_policies::{GenerationId, Reason};

use super::unit::{Live, Unit, UnitId};
use super::watched::Watched;
use super::{Message, Model, Report, millis};
use crate::census::Returned;
use crate::child::Exit;
use crate::clock;
use crate::context::SOCKET_PATH_LIMIT;
use crate::discreet;
use crate::error::SpawnError;
use crate::event::EventKind;
use crate::failure::OutOfMemory;
use crate::kept;
use crate::lease::{Cell, Endpoint};
use crate::listening::{endpoint, flags};
use crate::nursery::SpawnRequest;
use crate::priors;
use crate::process::{Process, Sink};
use crate::record::Recorder;
use crate::report;
use crate::shared::Ending;
use crate::spec::{Command, ModelSpec, Socket};
use crate::sync::lock;

impl Model {
    /// Gives an event to a unit's machine and carries out what it answers.
    pub(super) fn step(&mut self, id: UnitId, event: Event) {
        let now = self.context.now();
        let policy = self.spec.lifecycle;
        let Some(unit) = self.unit_mut(id) else { return };
        let before = unit.machine.clone();
        let effects = unit.machine.step(event, now, &policy);
        let (changed, phase) = (unit.machine != before, unit.phase());
        if phase != before.phase() && matches!(phase, Phase::Draining | Phase::Stopping | Phase::Starting) {
            unit.stop_watching(phase);
        }
        let leaving = matches!(phase, Phase::Draining | Phase::Stopping).then(|| unit.generation()).flatten();
        if let Some(leaving) = leaving {
            self.context.census.leaves(leaving);
        }
        if changed || !effects.is_empty() {
            self.changed();
        }
        for effect in effects {
            self.carry_out(id, effect);
        }
        if phase != before.phase() {
            self.tell_phase(id, before.phase(), phase);
        }
    }

    fn tell_phase(&mut self, id: UnitId, before: Phase, phase: Phase) {
        let Some(unit) = self.unit(id) else { return };
        let generation = unit.generation();
        match (before, phase) {
            (_, Phase::Suspect) => {
                let refused = unit.live.as_ref().is_some_and(|live| live.doubted.is_some());
                self.tell(generation, EventKind::Suspect { refused });
            }
            (Phase::Suspect, Phase::Ready) => self.tell(generation, EventKind::Recovered),
            (_, Phase::Draining) => {
                let in_flight = generation.map_or(0, |generation| self.shared.in_flight(generation));
                self.tell(generation, EventKind::Draining { in_flight });
            }
            (_, Phase::Failed) => {
                if let Some(failure) = unit.failure.clone() {
                    self.tell(None, EventKind::Failed { failure });
                }
            }
            _ => {}
        }
    }

    fn carry_out(&mut self, id: UnitId, effect: Effect) {
        match effect {
            Effect::Spawn => self.spawn(id),
            Effect::OpenGate => self.open(id),
            Effect::CloseGate => {
                if let Some(generation) = self.unit(id).and_then(Unit::generation) {
                    let running = self.shared.close(generation);
                    self.note_closed(generation, running);
                }
            }
            Effect::Term => self.signal(id, Live::terminate),
            Effect::Kill => self.signal(id, Live::kill),
            Effect::Arm(timer) => self.arm(id, timer),
            Effect::Disarm => {
                if let Some(unit) = self.unit_mut(id) {
                    unit.timer = None;
                }
            }
            Effect::Alarm => {
                let (ends, within) =
                    (self.spec.lifecycle.breaker_failures, self.spec.lifecycle.breaker_window);
                if let Some(failure) = self.unit(id).and_then(|unit| unit.failure.clone()) {
                    let within_s = within.as_secs();
                    self.tell(None, EventKind::CrashLoop { ends, within_s, failure });
                }
            }
        }
    }

    fn arm(&mut self, id: UnitId, timer: Timer) {
        let timing = self.spec.timing;
        let after = match timer {
            Timer::Start => timing.start_timeout,
            Timer::Suspect => timing.suspect_timeout,
            Timer::Drain => timing.drain_deadline,
            Timer::Grace if self.is_hurried(id) => timing.kill_grace,
            Timer::Grace => timing.stop_grace,
            Timer::Backoff { failures, short } => {
                let delay = self.spec.lifecycle.pause(failures, short, rand::random());
                self.tell(None, EventKind::Backoff { delay_ms: millis(delay), failures });
                delay
            }
            Timer::Trial => timing.recheck,
        };
        if let Some(unit) = self.unit_mut(id) {
            unit.timer = Some((timer, clock::after(Instant::now(), after)));
        }
    }

    fn is_hurried(&self, id: UnitId) -> bool {
        self.unit(id).and_then(|unit| unit.live.as_ref()).is_some_and(|live| live.hurried)
    }

    fn signal(&mut self, id: UnitId, signal: impl FnOnce(&mut Live)) {
        let Some(generation) = self.unit(id).and_then(|unit| unit.live.as_ref()).map(|live| live.id) else {
            return;
        };
        // Before the signal: it revokes the leases, and their holders give them back from other threads at once.
        let running = self.shared.in_flight(generation);
        self.note_stopped(generation, running);
        let hung = self.hung(id, running);
        if let (Some(hung), Some(live)) = (hung, self.unit(id).and_then(|unit| unit.live.as_ref())) {
            live.cell.note_hung(hung);
        }
        let Some(live) = self.unit_mut(id).and_then(|unit| unit.live.as_mut()) else { return };
        signal(live);
    }

    /// For how long a process that is told to end has computed nothing, if that is why: what it had been given then may be what
    /// it hangs in.
    fn hung(&self, id: UnitId, running: u32) -> Option<Duration> {
        let live = self.unit(id)?.live.as_ref()?;
        let silent = |symptom: &Symptom| match symptom {
            Symptom::Wedged { seconds, .. } => Some(Duration::from_secs(*seconds)),
            _ => None,
        };
        let now = live.watched.symptoms().iter().find_map(silent);
        // Nobody waits for it any more: then it shows no symptom.
        now.or_else(|| self.replaced_since(live.id, Reason::Wedged).filter(|_| running == 0))
    }

    fn open(&mut self, id: UnitId) {
        let Some(unit) = self.unit(id) else { return };
        let (replica, role) = (unit.replica, unit.role);
        let Some(live) = &unit.live else { return };
        let limit = self.limit(live.slots);
        let start = live.ready.unwrap_or(live.spawned).saturating_duration_since(live.spawned);
        let (generation, cell) = (live.id, Arc::clone(&live.cell));
        let opened = self.shared.open(&cell, limit);
        self.note_opened(replica, role, generation, opened, start);
    }

    pub(super) fn limit(&self, slots: Option<u32>) -> u32 {
        self.spec.max_in_flight.or(slots).unwrap_or(self.watch.unknown_slots)
    }

    fn spawn(&mut self, id: UnitId) {
        let generation = self.context.next_generation();
        let socket = self.context.socket(&self.spec.name, generation);
        let (endpoint, failed) = match endpoint(self.spec.socket, self.spec.facts, &socket) {
            Ok(endpoint) => (endpoint, None),
            Err(error) => (Endpoint::Unix(socket.clone()), Some(error)),
        };
        let cell = Arc::new(Cell::new(generation, endpoint.clone(), self.spec.facts));
        let recipe = recipe(&self.spec);
        let watched = self.watched(generation, &recipe.request.command);
        let live = Live::new(generation, socket.clone(), cell, recipe.clone(), watched);
        let Some(unit) = self.unit_mut(id) else { return };
        unit.live = Some(live);

        let mut with_socket = recipe.request;
        with_socket.command.args.extend(flags(&endpoint));
        report::announce(&mut with_socket.command, &socket, recipe.memory_report);
        let world = Arc::clone(&self.context.world);
        let longest = self.watch.log_line_bytes;
        let logs = Arc::clone(&self.logs);
        let outbox = self.outbox.clone();
        let given = discreet::known(&with_socket.command);
        let sink: Sink = Arc::new(move |stream, text| {
            if kept::is_telling(&text) {
                drop(outbox.send(Message::Report(generation, Report::Said(text.clone()))));
            }
            logs.push(generation, stream, given.hide(text));
        });
        let (context, limit) = (Arc::clone(&self.context), self.watch.read_limit);
        let (needed, outbox) = (self.spec.command.clone(), self.outbox.clone());
        self.help(generation, async move {
            // Before the start, so that no change after it is missed.
            let sight = world.look(needed, None).await;
            drop(outbox.send(Message::Report(generation, Report::Looked(sight))));
            if let Some(source) = failed {
                let binary = with_socket.command.binary;
                return Report::Spawned(Err(SpawnError::Exec { binary, source }));
            }
            let length = socket.as_os_str().len();
            if length > SOCKET_PATH_LIMIT {
                let error = io::Error::other(format!(
                    "the socket path {} has {length} bytes, more than a Unix socket's path may have \
                     ({SOCKET_PATH_LIMIT}): choose a shorter runtime_dir",
                    socket.display()
                ));
                let binary = with_socket.command.binary;
                return Report::Spawned(Err(SpawnError::Exec { binary, source: error }));
            }
            // Left by a supervisor with our process id that could not clean up.
            drop(std::fs::remove_file(&socket));
            report::remove(&socket);
            context.census.born(generation, &world.free(limit).await);
            Report::Spawned(world.spawn(with_socket, socket, endpoint, longest, sink).await)
        });
    }

    /// What is known of a generation that is about to be made.
    fn watched(&self, generation: GenerationId, command: &Command) -> Watched {
        let context = &self.context;
        let key = priors::key(command);
        let common = lock(&context.common).clone();
        let prices = self.prices.of(&key).to_vec();
        let measured = context.priors.measured(&key);
        let mut watched = Watched::new(&common, context.priors.of(&key), key, command);
        watched.told(measured);
        for price in prices {
            watched.cost.told(price);
        }
        if self.spec.record {
            let limit = self.watch.trace_bytes.0;
            watched.recorder = Recorder::begin(&context.traces, &self.spec.name, generation, limit);
        }
        watched
    }

    /// Waits for the end of a process, and then for what comes back of its memory: the next start does not wait for that.
    pub(super) fn await_exit(&mut self, generation: GenerationId, process: Arc<dyn Process>) {
        /// While others start it is not known what they hold; after some looks it stays unknown.
        const LOOKS: u32 = 5;
        let context = Arc::clone(&self.context);
        let (limit, wait) = (self.watch.read_limit, self.watch.return_wait);
        let outbox = self.outbox.clone();
        let cell = self.units.iter().filter_map(|unit| unit.live.as_ref()).find(|live| live.id == generation);
        let (cell, shared) = (cell.map(|live| Arc::clone(&live.cell)), Arc::clone(&self.shared));
        self.help(generation, async move {
            let exit = process.wait().await;
            let why = match exit {
                Exit::Signal(libc::SIGKILL) => process.out_of_memory().await,
                _ => OutOfMemory::Unknown,
            };
            if let Some(cell) = cell {
                // As soon as it can be: whoever waits to send again must know what became of it.
                shared.ended(&cell, ending(&cell, exit, why));
            }
            context.census.died(generation);
            drop(outbox.send(Message::Report(generation, Report::Exited(exit, why))));
            let mut looks = 0;
            let returned = loop {
                let free = context.world.free(limit).await;
                match context.census.returned(generation, &free) {
                    Some(returned) if looks > 0 || returned.is_complete() => break returned,
                    _ if looks == LOOKS => break Returned::default(),
                    _ => looks += 1,
                }
                tokio::time::sleep(wait).await;
            };
            Report::Returned(returned)
        });
    }

    /// Runs a helper that reports about a generation.
    pub(super) fn help(
        &mut self,
        generation: GenerationId,
        work: impl Future<Output = Report> + Send + 'static,
    ) {
        let outbox = self.outbox.clone();
        self.helpers.spawn(async move {
            drop(outbox.send(Message::Report(generation, work.await)));
        });
    }

    /// The longest time until the end of the process once it is told to stop.
    pub(super) fn patience(&self) -> Duration {
        self.spec.timing.stop_grace.saturating_mul(2)
    }
}

/// What a process's end means for the requests that it had.
fn ending(cell: &Cell, exit: Exit, why: OutOfMemory) -> Ending {
    if cell.is_revoked() {
        // We ended it, for a reason that is the requests' or is not.
        return if cell.hung().is_some() { Ending::OfItself } else { Ending::Stopped };
    }
    match why {
        OutOfMemory::Group | OutOfMemory::Machine => Ending::OutOfMemory,
        OutOfMemory::Unknown | OutOfMemory::No if exit.is_its_own() => Ending::OfItself,
        OutOfMemory::Unknown | OutOfMemory::No => Ending::Stopped,
    }
}

impl Unit {
    /// No more probes, and no more samples unless it drains: memory that runs out cuts a drain short.
    fn stop_watching(&mut self, phase: Phase) {
        if let Some(live) = &mut self.live {
            live.probe_at = None;
            live.sample_at = live.sample_at.filter(|_| phase == Phase::Draining);
            live.idle_sample_at = None;
            live.judge_at = None;
            live.policy = None;
        }
    }
}

/// What a process is made of. Two equal ones mean that nothing needs a new process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Recipe {
    request: SpawnRequest,
    memory_report: bool,
    socket: Socket,
}

impl Recipe {
    pub(super) fn binary(&self) -> &Path {
        &self.command().binary
    }

    pub(super) fn command(&self) -> &Command {
        &self.request.command
    }
}

/// What a process of this model is made of.
pub(super) fn recipe(spec: &ModelSpec) -> Recipe {
    let request = SpawnRequest { command: spec.command.clone(), oom_score_adj: spec.oom_score_adj };
    Recipe { request, memory_report: spec.memory_report, socket: spec.socket }
}
