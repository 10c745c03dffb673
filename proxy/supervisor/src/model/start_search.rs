//! A process that dies while it loads: once for each command a switch is searched with which it starts.
//!
//! ```text
//!   dies, dies again ── nothing of the model runs, and it has its room ──> search (a writer task) ──> finding, kept in the state directory
//!                                                                                 │
//!   its `fallback` starts it ──> used from the next start on                      │
//!   another switch does ──> Failed: the message names the line to write <─────────┤
//!   none, not every time ──> starts go on after pauses <──────────────────────────┘
//! ```
//!
//! Starts wait while a search runs: two processes of a large model have no room. The search ends as soon as anything else is wanted.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use warden_policies::lifecycle::{Event, Phase};
use warden_policies::start_search::{StartFinding, StartSwitch};
use warden_policies::{GpuIndex, ModelName};

use super::loading::Stand;
use super::unit::{Role, Unit};
use super::{Custody, Message, Model};
use crate::error::Failure;
use crate::memory::leak_history;
use crate::process::failure::End;
use crate::solo::{SoloSpec, Starter};
use crate::spec::Command;
use crate::start_search::{StartHunt, death_at_load};
use crate::view::event::EventKind;

/// Starts that died, of one command.
#[derive(Debug, Default)]
pub(super) struct DeadStarts {
    command: Option<Command>,
    /// What its processes are remembered by.
    key: String,
    /// In a row, as configured.
    deaths: u32,
    /// How the last one died, for people.
    death: String,
    finding: Option<StartFinding>,
    /// The search under way: its number, and what ends it.
    search: Option<(u64, CancellationToken)>,
    searches: u64,
}

impl DeadStarts {
    /// A start was ready, or failed for a reason that has a name.
    pub(super) fn forget_deaths(&mut self) {
        self.deaths = 0;
    }
}

impl Model {
    pub(super) fn is_searching(&self) -> bool {
        self.dead_starts.search.is_some()
    }

    /// Ends a search. Its process is gone when its message comes.
    pub(super) fn stop_start_search(&self) {
        if let Some((_, stop)) = &self.dead_starts.search {
            stop.cancel();
        }
    }

    /// A process ended before it was ready. What is known of such deaths goes into its failure. Returns whether the next start needs
    /// a change of the configuration.
    pub(super) fn note_start_death(&mut self, end: &End<'_>, failure: &mut Failure) -> bool {
        let exit = if let End::Exited(exit, _) = end { Some(*exit) } else { None };
        let Some(death) = death_at_load(exit, failure) else {
            self.dead_starts.forget_deaths();
            return false;
        };
        if self.dead_starts.command.as_ref() != Some(&self.spec.command) {
            let (key, searches) = (leak_history::key(&self.spec.command), self.dead_starts.searches);
            let finding = self.context.leak_history.start_finding(&key);
            let command = Some(self.spec.command.clone());
            let search = self.dead_starts.search.take();
            self.dead_starts =
                DeadStarts { command, key, finding, search, searches, ..DeadStarts::default() };
        }
        self.dead_starts.deaths += 1;
        self.dead_starts.death = death;
        let Some(finding) = self.dead_starts.finding.as_ref().filter(|finding| finding.is_lasting()) else {
            return false;
        };
        failure.message = format!("{}; {}", failure.message, finding.advice());
        finding.switch().is_some_and(|switch| !switch.is_fallback())
    }

    /// Begins a search where one is due, and ends it where it is no more.
    pub(super) fn settle_start_search(&mut self) {
        let may = self.may_search();
        if !may {
            self.stop_start_search();
            return;
        }
        let policy = warden_policies::defaults().start_search;
        match &self.dead_starts.finding {
            None if !self.is_searching() && self.dead_starts.deaths >= policy.deaths => {
                self.begin_start_search();
            }
            Some(finding) if finding.switch().is_some_and(StartSwitch::is_fallback) => {
                let because = format!("it died while it loaded: {}", self.dead_starts.death);
                self.fall_back(&because);
            }
            _ => {}
        }
    }

    /// Whether the room and the processor are the search's: nothing of the model runs, and a start has failed.
    fn may_search(&self) -> bool {
        let waits = |unit: &Unit| {
            unit.role == Role::Current && unit.phase() == Phase::Backoff && unit.start_failures > 0
        };
        self.end.is_none()
            && self.custody == Custody::Ours
            // A canary runs beside the model that serves.
            && self.spec.canary_of.is_none()
            && matches!(self.stand, Stand::In { asking: None, .. })
            && self.replacements.is_empty()
            && self.lives().next().is_none()
            && self.units.iter().any(waits)
            && self.dead_starts.command.as_ref() == Some(&self.spec.command)
    }

    fn begin_start_search(&mut self) {
        let fallback = self.spec.fallback.as_ref().filter(|_| self.whole.is_none());
        let fallback = fallback.map(|fallback| StartSwitch {
            args: fallback.args.clone(),
            line: "its `fallback` says so".to_owned(),
            ..StartSwitch::default()
        });
        let switches: Vec<StartSwitch> =
            fallback.into_iter().chain(self.spec.start_switches.iter().cloned()).collect();
        if switches.is_empty() {
            return;
        }
        let generation = self.context.next_generation();
        let starter = Starter::within(
            Arc::clone(&self.context.world),
            &self.context.runtime_dir,
            &self.spec.lifecycle,
            self.watch,
            ModelName::new(format!("start-{}", generation.0)),
        );
        let starter = match starter {
            Ok(starter) => starter,
            Err(error) => {
                tracing::warn!(model = %self.spec.name, %error, "cannot search for a switch that starts it");
                return self.dead_starts.forget_deaths();
            }
        };
        let (deaths, death) = (self.dead_starts.deaths, self.dead_starts.death.clone());
        self.tell(None, EventKind::StartSearchBegan { deaths, switches: switches.len() });
        let spec = SoloSpec {
            command: self.spec.command.clone(),
            oom_score_adj: self.spec.oom_score_adj,
            socket: self.spec.run.socket,
            facts: self.spec.facts,
        };
        let mut hunt = StartHunt { spec, switches, deaths, death };
        let stop = CancellationToken::new();
        self.dead_starts.searches += 1;
        let number = self.dead_starts.searches;
        self.dead_starts.search = Some((number, stop.clone()));
        let (world, outbox, limit) =
            (Arc::clone(&self.context.world), self.outbox.clone(), self.watch.sensors.read_limit);
        let gpus = self.place_of(0).into_iter();
        let gpus: Vec<GpuIndex> = gpus.filter_map(|gpu| u32::try_from(gpu).ok().map(GpuIndex)).collect();
        self.searches.spawn(async move {
            if !gpus.is_empty()
                && let Some(only) = world.only(gpus, limit).await
            {
                hunt.spec.command.env.push(only);
            }
            let finding = hunt.run(&starter, &mut |_| {}, &stop).await;
            outbox.send(Message::StartSearched(number, Box::new(finding)));
        });
        self.changed();
    }

    pub(super) fn start_searched(&mut self, number: u64, finding: StartFinding) {
        let Some((_, stop)) = self.dead_starts.search.take_if(|(own, _)| *own == number) else { return };
        self.changed();
        if stop.is_cancelled() || self.dead_starts.command.as_ref() != Some(&self.spec.command) {
            return;
        }
        if finding.is_lasting() {
            let keep = self.watch.sensors.priors_kept;
            let (key, name) = (&self.dead_starts.key, &self.spec.name);
            self.context.leak_history.keep_start_finding(key, name, finding.clone(), keep);
        }
        self.tell(None, EventKind::StartSearched { finding: finding.clone() });
        let needs_change = finding.switch().is_some_and(|switch| !switch.is_fallback());
        for id in self.ids() {
            let Some(unit) = self.unit_mut(id).filter(|unit| unit.start_failures > 0) else { continue };
            if let Some(failure) = &mut unit.failure {
                failure.message = format!("{}; {}", failure.message, finding.advice());
            }
            if needs_change {
                self.step(id, Event::Stuck);
            }
        }
        self.dead_starts.finding = Some(finding);
    }
}
