//! Asks the loader for room before the model's first process, and gives the room back after the last one.
//!
//! ```text
//!   Out ── wanted: asks ──> Asked ── Load ──> In ── idle, drained, evicted ──> Leaving
//!    ^                        │ starts fail               │                        │
//!    └────── gives back ──────┴───────────────────────────┴── no process is left ──┘
//! ```
//!
//! Crashes and replacements within the granted room do not involve the loader.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent};

use super::life::ROOM_CHECK_INTERVAL;
use super::room::LoadState;
use super::unit::{ProcessUnit, UnitId, UnitRole};
use super::warm::KeptState;
use super::{ModelTask, TaskEnd};
use crate::clock;
use crate::error::LeaseDenied;
use crate::memory::loading::{LoadingOrder, LoadingReport};
use crate::view::event::EventKind;

/// Interval for checking whether a model kept loaded because of another one must still stay.
const COMPANY_CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl ModelTask {
    pub(super) fn settle_loading(&mut self) {
        let any = self.units.any_process() || self.experience.dead_starts.is_searching();
        let ends = self.life.end.is_some();
        match &self.room.state {
            LoadState::Granted { told: false, .. } if self.units.all_serve() => {
                if let LoadState::Granted { told, .. } = &mut self.room.state {
                    *told = true;
                }
                self.room.report(LoadingReport::Loaded);
            }
            LoadState::Granted { .. } if !any && (ends || self.units.all_starts_failed()) => {
                self.give_room_back();
            }
            // An operator or `ttl` has unloaded the model.
            LoadState::Granted { .. }
                if self.life.end.map_or(!self.room.wanted, |end| end == TaskEnd::Removed) =>
            {
                self.room.state = LoadState::Leaving { for_another: false };
                self.room.report(LoadingReport::Leaving);
                self.life.note_action();
            }
            LoadState::Leaving { .. } if !any => {
                self.room.restore_configured(&mut self.env.spec);
                self.give_room_back();
            }
            // The room was given back while a start waits: request room again.
            LoadState::Unloaded if self.units.holds_starts() && !ends => drop(self.may_start()),
            LoadState::Waiting { .. } if ends || !(self.room.wanted || self.units.holds_starts()) => {
                self.room.restore_configured(&mut self.env.spec);
                self.give_room_back();
            }
            _ => {}
        }
    }

    pub(super) fn give_room_back(&mut self) {
        self.replacements.release_permits();
        self.room.state = LoadState::Unloaded;
        self.room.report(LoadingReport::Unloaded);
        self.life.note_action();
    }

    /// Returns true if processes may be started. Otherwise requests room from the loader.
    pub(super) fn may_start(&mut self) -> bool {
        if self.room.request(&self.env, !self.operators.restarts.is_empty()) {
            self.life.note_action();
        }
        matches!(self.room.state, LoadState::Granted { asking: None, .. })
    }

    /// Starts a process, or queues the start until room is granted.
    pub(super) fn revive(&mut self, id: UnitId, event: LifecycleEvent) {
        if self.may_start() {
            self.step_machine(id, event);
        } else if let Some(unit) = self.units.get_mut(id) {
            unit.held_start = Some(event);
        }
    }

    pub(super) fn follow_loader(&mut self, order: LoadingOrder) {
        match order {
            LoadingOrder::Load(places, asked) => {
                if self.room.take_grant(places, asked) {
                    self.run_held_starts();
                }
            }
            LoadingOrder::Unload(_) if self.life.end.is_some() || !self.room.is_granted() => {}
            LoadingOrder::Unload(wanted) => {
                self.env.log_event(None, EventKind::MakesRoom { wanted: wanted.name });
                self.leave_for("the model makes room for another one");
                self.room.wanted = false;
            }
            LoadingOrder::ReclaimMemory => self.reclaim_for_other(),
            LoadingOrder::Stay { places, beside, question } => {
                if self.room.note_stay(places, beside, question) {
                    self.life.timers.configuration = None;
                    self.run_held_starts();
                }
            }
            LoadingOrder::Reload { why, question } => {
                if self.life.end.is_none() && self.room.is_asked_since(question) {
                    self.env.log_event(None, EventKind::LoadsAnew { message: why });
                    self.leave_for("the model is reloaded with its new settings");
                }
            }
            LoadingOrder::LoadAlong => self.room.wanted |= self.life.end.is_none(),
            LoadingOrder::DropKeptState => self.experience.kept_state.iter().for_each(KeptState::clear_files),
            LoadingOrder::NeverLoad { why, by_room } => {
                // The fallback arguments may need less.
                if !self.room.is_waiting() || by_room && self.fall_back(&why) {
                    return;
                }
                let because = format!("it cannot be loaded: {why}");
                let denied = LeaseDenied::NeverLoaded(why);
                self.env.leases.refuse_waiting(&denied);
                self.env.leases.with_state(|queue| queue.predecessor.give_up());
                self.env.context.refuse_in_predecessor(&self.env.spec.name, &denied);
                self.give_up_replacements(&because);
                // The next request asks the loader again. Until then no process may start.
                self.room.wanted = false;
                self.stop_all();
            }
        }
    }

    fn run_held_starts(&mut self) {
        for id in self.units.ids() {
            if let Some(event) = self.units.get_mut(id).and_then(|unit| unit.held_start.take()) {
                self.step_machine(id, event);
            }
        }
    }

    fn leave_for(&mut self, why: &str) {
        self.give_up_replacements(why);
        self.room.state = LoadState::Leaving { for_another: true };
        self.stop_all();
    }

    /// Drains and stops the model's processes if none had a request for `ttl`.
    pub(super) fn unload_if_idle(&mut self) {
        self.life.timers.idle = None;
        let Some(ttl) = self.env.spec.ttl else { return };
        let serves =
            |unit: &ProcessUnit| unit.role == UnitRole::Current && unit.phase() == BackendPhase::Ready;
        // Unload nothing while a replica starts, ends or is replaced.
        if self.life.end.is_some()
            || !self.replacements.is_empty()
            || !self.operators.restarts.is_empty()
            || self.units.all.is_empty()
            || !self.units.all.iter().all(serves)
        {
            return;
        }
        let now = Instant::now();
        let idle = self.units.lives().map(|live| self.env.leases.idle_since(live.id));
        let due = match idle.collect::<Option<Vec<Instant>>>().and_then(|since| since.into_iter().max()) {
            Some(since) => clock::after(since, ttl),
            // While requests run, the model stays for at least another `ttl`.
            None => clock::after(now, ttl),
        };
        if due > now || self.env.leases.waiting() > 0 {
            self.life.timers.idle = Some(due.max(clock::after_pause(now, ROOM_CHECK_INTERVAL)));
            return;
        }
        if self.env.context.loading.keeps_company(&self.room.who) {
            self.life.timers.idle = Some(clock::after(now, COMPANY_CHECK_INTERVAL));
            return;
        }
        self.env.log_event(None, EventKind::Unloaded { idle_ms: clock::millis(ttl) });
        self.room.wanted = false;
        self.stop_all();
    }
}
