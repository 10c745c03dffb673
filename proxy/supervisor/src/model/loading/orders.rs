//! Asks the loader for room before the model's first process, and gives the room back after the last one.
//!
//! ```text
//!   Unloaded ── requests room ──> Waiting ── Load ──> Granted ── idle, drained, evicted ──> Leaving
//!      ^                             │  starts fail      │                                    │
//!      └──────── gives back ─────────┴───────────────────┴─────── no process is left ─────────┘
//! ```
//!
//! Crashes and replacements within the granted room do not involve the loader.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent};

use crate::clock;
use crate::error::LeaseDenied;
use crate::memory::loading::{LoadingOrder, LoadingReport};
use crate::model::ModelTask;
use crate::model::environment::TaskEnvironment;
use crate::model::life::{ROOM_CHECK_INTERVAL, TaskEnd, TaskLife};
use crate::model::loading::room::{LoadState, ModelRoom};
use crate::model::replacement::ReplacementTracker;
use crate::model::unit::{ProcessUnit, UnitId, UnitList, UnitRole};
use crate::model::warm::KeptState;
use crate::view::event::EventKind;

/// Interval for checking whether a model kept loaded because of another one must still stay.
const COMPANY_CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl ModelTask {
    /// Returns true if processes may be started. Otherwise requests room from the loader.
    pub(crate) fn may_start(&mut self) -> bool {
        if self.room.request(&self.env, !self.operators.restarts.is_empty()) {
            self.life.note_action();
        }
        matches!(self.room.state, LoadState::Granted { asking: None, .. })
    }

    /// Starts processes, or queues the starts until room is granted.
    pub(crate) fn revive_all(&mut self, starts: Vec<(UnitId, LifecycleEvent)>) {
        for (id, event) in starts {
            if self.may_start() {
                self.step_machine(id, event);
            } else if let Some(unit) = self.units.get_mut(id) {
                unit.held_start = Some(event);
            }
        }
    }

    pub(crate) fn follow_loader(&mut self, order: LoadingOrder) {
        match order {
            LoadingOrder::Load(places, asked) => {
                if self.room.take_grant(places, asked) {
                    let held = self.units.take_held_starts();
                    self.step_all(held);
                }
            }
            LoadingOrder::Unload(_) if self.life.end.is_some() || !self.room.is_granted() => {}
            LoadingOrder::Unload(wanted) => {
                self.env.log_event(None, EventKind::MakesRoom { wanted: wanted.name });
                self.room.state = LoadState::Leaving { for_another: true };
                self.stop_all("the model makes room for another one");
                self.room.wanted = false;
            }
            LoadingOrder::ReclaimMemory => {
                let reclaims = &mut self.experience.reclaims;
                if self.life.end.is_none() {
                    self.units.reclaim_for_other(&self.env, &mut self.mail);
                }
                reclaims.for_another = true;
                self.room.report_reclaimed(&self.env, &self.units, &self.replacements, reclaims);
            }
            LoadingOrder::Stay { places, beside, question } => {
                if self.room.note_stay(places, beside, question) {
                    self.life.timers.configuration = None;
                    let held = self.units.take_held_starts();
                    self.step_all(held);
                }
            }
            LoadingOrder::Reload { why, question } => {
                if self.life.end.is_none() && self.room.is_asked_since(question) {
                    self.env.log_event(None, EventKind::LoadsAnew { message: why });
                    self.room.state = LoadState::Leaving { for_another: true };
                    self.stop_all("the model is reloaded with its new settings");
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
                // The next request asks the loader again. Until then no process may start.
                self.room.wanted = false;
                self.stop_all(&because);
            }
        }
    }
}

impl ModelRoom {
    /// Requests room, or gives it back. `any`: the model has a process or searches for a way to start one.
    pub(crate) fn settle(
        &mut self,
        env: &mut TaskEnvironment,
        units: &UnitList,
        replacements: &mut ReplacementTracker,
        life: &mut TaskLife,
        any: bool,
    ) {
        let ends = life.end.is_some();
        match &mut self.state {
            LoadState::Granted { told, .. } if !*told && units.all_serve() => {
                *told = true;
                self.report(LoadingReport::Loaded);
                return;
            }
            LoadState::Granted { .. }
                if !any && (ends || units.all.iter().all(ProcessUnit::waits_for_change)) => {}
            // An operator or `ttl` has unloaded the model.
            LoadState::Granted { .. } if life.end.map_or(!self.wanted, |end| end == TaskEnd::Removed) => {
                self.state = LoadState::Leaving { for_another: false };
                self.report(LoadingReport::Leaving);
                return life.note_action();
            }
            LoadState::Leaving { .. } if !any => self.restore_configured(&mut env.spec),
            LoadState::Waiting { .. } if ends || !(self.wanted || units.holds_starts()) => {
                self.restore_configured(&mut env.spec);
            }
            _ => return,
        }
        self.give_back(replacements, life);
    }

    /// Gives the room back; a later start requests it again.
    pub(crate) fn give_back(&mut self, replacements: &mut ReplacementTracker, life: &mut TaskLife) {
        replacements.release_permits();
        self.state = LoadState::Unloaded;
        self.report(LoadingReport::Unloaded);
        life.note_action();
    }

    /// True if the model is to be unloaded, because none of its processes had a request for `ttl`. Otherwise
    /// sets the time of the next check.
    pub(crate) fn is_ttl_over(
        &self,
        env: &TaskEnvironment,
        units: &UnitList,
        life: &mut TaskLife,
        is_replacing: bool,
    ) -> bool {
        life.timers.idle = None;
        let Some(ttl) = env.spec.ttl else { return false };
        let serves =
            |unit: &ProcessUnit| unit.role == UnitRole::Current && unit.phase() == BackendPhase::Ready;
        // Unload nothing while a replica starts, ends or is replaced.
        if life.end.is_some() || is_replacing || units.all.is_empty() || !units.all.iter().all(serves) {
            return false;
        }
        let now = Instant::now();
        let idle = units.lives().map(|live| env.leases.idle_since(live.id));
        let due = match idle.collect::<Option<Vec<Instant>>>().and_then(|since| since.into_iter().max()) {
            Some(since) => clock::after(since, ttl),
            // While requests run, the model stays for at least another `ttl`.
            None => clock::after(now, ttl),
        };
        if due > now || env.leases.waiting() > 0 {
            life.timers.idle = Some(due.max(clock::after_pause(now, ROOM_CHECK_INTERVAL)));
            return false;
        }
        if env.context.loading.keeps_company(&self.who) {
            life.timers.idle = Some(clock::after(now, COMPANY_CHECK_INTERVAL));
            return false;
        }
        env.log_event(None, EventKind::Unloaded { idle_ms: clock::millis(ttl) });
        true
    }

    /// True if an idle unit is to be started.
    pub(crate) fn needs_start(
        &mut self,
        env: &TaskEnvironment,
        units: &UnitList,
        life: &mut TaskLife,
    ) -> bool {
        self.wanted |= env.leases.needs_process();
        let leaving = env.context.leaving.load(Ordering::SeqCst) > 0;
        let room = &mut life.timers.room;
        *room = room.filter(|until| leaving && *until > Instant::now());
        self.wanted && room.is_none() && units.all.iter().any(ProcessUnit::is_idle)
    }
}
