//! Serves the leases and waiting requests of an instance that has handed its processes over. The next
//! instance decides about the processes and reports their gates.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::time::Instant;
use warden_policies::GenerationId;

use super::environment::TaskEnvironment;
use super::generation::LiveGeneration;
use super::message::{ControlMessage, HelperReport, ProbeReport, TaskMail, TaskMessage};
use super::operators::OperatorRequests;
use super::unit::UnitList;
use crate::clock;
use crate::error::LeaseDenied;
use crate::lease::cell::GenerationCell;
use crate::lease::queue::QueueRefusal;
use crate::lease::refused::ModelRefusal;
use crate::process::ProbeResult;
use crate::process::heir::OpenGate;

/// Task of a model whose processes belong to the next instance.
pub(super) struct RemainingTask {
    env: TaskEnvironment,
    mail: TaskMail,
    units: UnitList,
    operators: OperatorRequests,
    /// Processes of the next instance that requests of this instance may use.
    guests: BTreeMap<GenerationId, Arc<GenerationCell>>,
    /// Generations with an open gate in the next instance. `None` before its first report.
    followed: Option<BTreeSet<GenerationId>>,
    is_ending: bool,
}

impl RemainingTask {
    pub(super) fn new(
        env: TaskEnvironment,
        mail: TaskMail,
        units: UnitList,
        operators: OperatorRequests,
    ) -> Self {
        Self { env, mail, units, operators, guests: BTreeMap::new(), followed: None, is_ending: false }
    }

    pub(super) async fn run(mut self) {
        let leases = Arc::clone(&self.env.leases);
        loop {
            let mail = &mut self.mail;
            tokio::select! {
                message = mail.inbox.recv() => match message {
                    Some(TaskMessage::Control(ControlMessage::Disband)) | None => return,
                    Some(message) => self.take_message(message),
                },
                () = leases.wake.notified() => {
                    for generation in leases.with_state(|queue| queue.table.take_doubted()) {
                        self.probe_doubted(generation);
                    }
                }
                Some(_) = mail.helpers.join_next(), if !mail.helpers.is_empty() => {}
            }
            // No process will serve the requests that still wait.
            if self.is_ending && !leases.any_open() {
                leases.refuse_waiting(&LeaseDenied::ShuttingDown);
            }
            self.operators.send_answers();
        }
    }

    fn take_message(&mut self, message: TaskMessage) {
        match message {
            TaskMessage::Report(generation, HelperReport::Exited(..)) => self.note_lost_process(generation),
            TaskMessage::Report(generation, HelperReport::Probed(report)) => {
                if report.health == ProbeResult::Ready {
                    self.reopen_gate(generation);
                } else {
                    self.probe_doubted(generation);
                }
            }
            TaskMessage::Control(ControlMessage::Gates(gates, refused)) => {
                self.follow_gates(&gates);
                self.pass_on_refusals(&refused);
            }
            TaskMessage::Control(ControlMessage::Shutdown(_)) => {
                self.env.leases.set_refusal(Some(QueueRefusal::ShuttingDown));
                self.is_ending = true;
            }
            // Operators have to ask the next instance: the dropped reply channel reports the end of this one.
            TaskMessage::Control(control) => drop(control),
            // Sending fails if the watchdog no longer waits.
            TaskMessage::Beat(question) => drop(question.send(())),
            TaskMessage::Report(..) | TaskMessage::Looked(..) | TaskMessage::StartSearched(..) => {}
        }
    }

    fn live(&self, generation: GenerationId) -> Option<&LiveGeneration> {
        self.units.lives().find(|live| live.id == generation)
    }

    fn note_lost_process(&mut self, generation: GenerationId) {
        let leases = &self.env.leases;
        leases.close_gate(generation);
        for unit in &mut self.units.all {
            if let Some(live) = unit.live.take_if(|live| live.id == generation) {
                live.cell.revoke();
            }
        }
        leases.remove_generation(generation);
    }

    /// Opens and closes gates as the next instance does, so that requests here can use its processes.
    fn follow_gates(&mut self, gates: &[OpenGate]) {
        let leases = Arc::clone(&self.env.leases);
        let open: BTreeSet<GenerationId> = gates.iter().map(|gate| gate.generation).collect();
        for cell in leases.with_state(|queue| queue.open_cells()) {
            if !open.contains(&cell.id) {
                leases.close_gate(cell.id);
            }
        }
        if gates.iter().any(|gate| gate.touched) {
            leases.settings.note_touched();
        }
        for gate in gates {
            let known = self.live(gate.generation).map(|live| &live.cell);
            let cell = known.or_else(|| self.guests.get(&gate.generation)).cloned();
            let cell = cell.unwrap_or_else(|| self.add_guest(gate));
            leases.open_gate(&cell, self.env.lease_limit(gate.slots));
        }
        for id in self.guests.keys().copied().collect::<Vec<_>>() {
            if !open.contains(&id) && leases.with_state(|queue| queue.is_unused(id)) {
                self.guests.remove(&id);
                leases.remove_generation(id);
            }
        }
        self.followed = Some(open);
        self.env.context.predecessor.followed.notify_one();
    }

    fn add_guest(&mut self, gate: &OpenGate) -> Arc<GenerationCell> {
        let cell = Arc::new(GenerationCell::new(gate.generation, gate.endpoint.clone(), gate.facts));
        // An interrupted answer can only be continued on a process with a known identity.
        if let Some(kin) = gate.kin {
            let _first = cell.kin.set(kin);
        }
        self.guests.insert(gate.generation, Arc::clone(&cell));
        cell
    }

    /// Refuses the waiting requests of the models that the next instance has refused.
    fn pass_on_refusals(&self, refused: &[ModelRefusal]) {
        for refused in refused {
            if let Some(denied) = refused.denied() {
                self.env.leases.refuse_waiting_since(&denied, refused.moment());
            } else {
                let model = &self.env.spec.name;
                tracing::debug!(%model, "unknown reason of a refusal by the next instance");
            }
        }
    }

    /// Probes a process that refused a connection.
    fn probe_doubted(&mut self, generation: GenerationId) {
        let policy = self.env.spec.lifecycle;
        let Some(process) = self.live(generation).and_then(|live| live.child.process.clone()) else {
            // The next instance owns and watches this process, so only reopen the gate here.
            if let Some(cell) = self.guests.get(&generation)
                && self.is_followed(generation)
            {
                let leases = &self.env.leases;
                let limit = leases
                    .with_state(|queue| queue.slot_limit(generation))
                    .unwrap_or_else(|| self.env.lease_limit(None));
                leases.open_gate(cell, limit);
                self.env.context.predecessor.followed.notify_one();
            }
            return;
        };
        let sent = Instant::now();
        self.mail.spawn_helper(generation, async move {
            let health = process.probe(policy.probe_timeout).await;
            if health != ProbeResult::Ready {
                tokio::time::sleep_until(clock::after_pause(sent, policy.start_probe_interval)).await;
            }
            HelperReport::Probed(ProbeReport::new(sent, health))
        });
    }

    fn reopen_gate(&self, generation: GenerationId) {
        if let Some(live) = self.live(generation)
            && self.is_followed(generation)
        {
            self.env.leases.open_gate(&live.cell, self.env.lease_limit(live.start.slots));
            self.env.context.predecessor.followed.notify_one();
        }
    }

    fn is_followed(&self, generation: GenerationId) -> bool {
        self.followed.as_ref().is_none_or(|gates| gates.contains(&generation))
    }
}
