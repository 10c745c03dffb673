//! Asks the loader for room before the model's first process, and gives the room back after the last one.
//!
//! ```text
//!   Out ── wanted: asks ──> Asked ── Load ──> In ── idle, drained, evicted ──> Leaving
//!    ^                        │ starts fail               │                        │
//!    └────── gives back ──────┴───────────────────────────┴── no process is left ──┘
//! ```
//!
//! Crashes and replacements within the granted room do not involve the loader.

use std::sync::Arc;

use warden_policies::book::{MeasuredNeeds, MemoryNeeds};
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent, LifecycleTimer};
use warden_policies::loading::{LoadSpec, MemoryAmounts, ModelReading};
use warden_policies::{MemoryKind, ModelName};

use super::recipe::process_recipe;
use super::unit::{ProcessUnit, UnitId, UnitRole};
use super::{ControlMessage, ModelTask, TaskEnd, TaskMessage};
use crate::error::{FailureKind, LeaseDenied};
use crate::memory::leak_history;
use crate::memory::loading::{LoadingOrder, LoadingReport};
use crate::view::event::EventKind;

/// State of the model's request for room: none, waiting, granted, or leaving.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum LoadState {
    /// The model has no process and wants none.
    #[default]
    Unloaded,
    /// The model waits for room. `changed`: its settings have changed since it asked.
    Waiting { urgent: bool, number: u64, changed: bool },
    /// The model may have processes. `places`: GPUs of each replica; an empty list leaves the choice to the
    /// command. `asking`: number of a pending question whether the model may stay with new settings; no
    /// process is started meanwhile. `beside`: a process with the latest settings fits next to an old one.
    Granted { places: Vec<Vec<usize>>, told: bool, asking: Option<u64>, beside: bool },
    /// The model is being unloaded, for another model or for a reason of its own.
    Leaving { for_another: bool },
}

impl ModelTask {
    /// Reports changes to the loader.
    pub(super) fn settle_loading(&mut self) {
        let any = self.units.iter().any(|unit| unit.live.is_some()) || self.is_searching();
        let ends = self.end.is_some();
        match &self.load_state {
            LoadState::Granted { told: false, .. } if self.all_serve() => {
                if let LoadState::Granted { told, .. } = &mut self.load_state {
                    *told = true;
                }
                self.report_loading(LoadingReport::Loaded);
            }
            LoadState::Granted { .. } if !any && (ends || self.all_starts_failed()) => self.give_room_back(),
            // An operator or `ttl` has unloaded the model.
            LoadState::Granted { .. } if self.end.map_or(!self.wanted, |end| end == TaskEnd::Removed) => {
                self.load_state = LoadState::Leaving { for_another: false };
                self.report_loading(LoadingReport::Leaving);
                self.note_action();
            }
            LoadState::Leaving { .. } if !any => {
                self.restore_configured();
                self.give_room_back();
            }
            // A start waits, and the room was given back meanwhile: ask for room again.
            LoadState::Unloaded if self.holds_starts() && !ends => drop(self.may_start()),
            LoadState::Waiting { .. } if ends || !(self.wanted || self.holds_starts()) => {
                self.restore_configured();
                self.give_room_back();
            }
            _ => {}
        }
    }

    pub(super) fn give_room_back(&mut self) {
        self.replacements.release_permits();
        self.load_state = LoadState::Unloaded;
        self.report_loading(LoadingReport::Unloaded);
        self.note_action();
    }

    /// True if all replicas serve, except those whose starts fail.
    fn all_serve(&self) -> bool {
        let current = || self.units.iter().filter(|unit| unit.role == UnitRole::Current);
        let ready = |unit: &ProcessUnit| unit.phase() == BackendPhase::Ready;
        current().any(ready) && current().all(|unit| ready(unit) || unit.waits_for_change())
    }

    /// True if the starts of all replicas failed and wait for a pause; other models may use the room
    /// meanwhile.
    fn all_starts_failed(&self) -> bool {
        self.units.iter().all(ProcessUnit::waits_for_change)
    }

    fn holds_starts(&self) -> bool {
        self.units.iter().any(|unit| unit.held_start.is_some())
    }

    /// True if processes may be started now. If not, asks the loader for room.
    pub(super) fn may_start(&mut self) -> bool {
        if let LoadState::Granted { asking, .. } = self.load_state {
            return asking.is_none();
        }
        let urgent = !self.operators.restarts.is_empty();
        let asks = match self.load_state {
            LoadState::Unloaded => true,
            LoadState::Waiting { urgent: known, .. } => urgent && !known,
            LoadState::Granted { .. } | LoadState::Leaving { .. } => false,
        };
        if asks {
            // A repeated request for room keeps its number, because the answer may be on its way.
            if self.load_state == LoadState::Unloaded {
                self.last_wish += 1;
            }
            let number = self.last_wish;
            let changed = matches!(self.load_state, LoadState::Waiting { changed: true, .. });
            self.load_state = LoadState::Waiting { urgent, number, changed };
            self.report_loading(LoadingReport::Wanted {
                spec: Box::new(self.loading_spec()),
                urgent,
                number,
            });
            self.note_action();
        }
        false
    }

    /// Starts a process after a pause or a repaired file, or makes the start wait for room.
    pub(super) fn revive(&mut self, id: UnitId, event: LifecycleEvent) {
        if self.may_start() {
            self.step_machine(id, event);
        } else if let Some(unit) = self.unit_mut(id) {
            unit.held_start = Some(event);
        }
    }

    /// True if a process is started when this timer expires.
    pub(super) const fn starts_process(timer: LifecycleTimer) -> bool {
        matches!(timer, LifecycleTimer::Backoff { .. } | LifecycleTimer::Trial)
    }

    /// Present memory needs, including measurements of processes with the same command.
    pub(super) fn loading_spec(&self) -> LoadSpec {
        let mut spec = LoadSpec {
            replicas: self.spec.run.replicas,
            ttl: self.spec.ttl,
            pin: self.is_pinned(),
            can_do_with_less: self.spec.fallback.is_some() && self.configured_command.is_none(),
            ..self.spec.loading.clone()
        };
        let measured = self.context.leak_history.peak_memory(&leak_history::process_key(&self.spec.command));
        match &mut spec.needs {
            Some(needs) => needs.measured = measured,
            // The needs cannot be computed from the model file, but processes with the same command were
            // measured.
            None if measured.host.is_some() => {
                spec.needs = Some(MemoryNeeds { measured, ..MemoryNeeds::default() });
            }
            None => {}
        }
        spec
    }

    /// Registers the model with the loader. The loader's orders become messages to this task.
    pub(super) fn join_loading(&self) {
        let outbox = self.outbox.clone();
        let listener = Box::new(move |word| {
            outbox.send(TaskMessage::Control(match word {
                LoadingOrder::Load(places, asked) => ControlMessage::Load(places, asked),
                LoadingOrder::Unload(wanted) => ControlMessage::Unload(wanted.name),
                LoadingOrder::ReclaimMemory => ControlMessage::ReclaimForOther,
                LoadingOrder::Stay { places, beside, question } => {
                    ControlMessage::Stay { places, beside, question }
                }
                LoadingOrder::Reload { why, question } => ControlMessage::Reload { why, question },
                LoadingOrder::LoadAlong => ControlMessage::LoadAlong,
                LoadingOrder::DropKeptState => ControlMessage::DropKeptState,
                LoadingOrder::NeverLoad { why, by_room } => ControlMessage::NeverLoad { why, by_room },
            }));
        });
        self.report_loading(LoadingReport::Joined { leases: Arc::clone(&self.leases), listener });
        self.apply_loading();
    }

    /// Reports new settings to the loader. A loaded model stays loaded.
    pub(super) fn apply_loading(&self) {
        self.report_loading(LoadingReport::SettingsChanged(Box::new(self.loading_spec())));
    }

    /// Handles the loader's answer that the model can never be loaded. Uses the fallback arguments if they
    /// can help; otherwise waiting requests and operators get the reason.
    pub(super) fn note_never_loaded(&mut self, why: &str, by_room: bool) {
        if !matches!(self.load_state, LoadState::Waiting { .. }) || by_room && self.fall_back(why) {
            return;
        }
        let denied = LeaseDenied::NeverLoaded(why.to_owned());
        self.leases.refuse_waiting(&denied);
        self.leases.give_up_predecessor();
        self.context.refuse_in_predecessor(&self.spec.name, &denied);
        self.give_up_replacements(&format!("it cannot be loaded: {why}"));
        // The next request asks the loader again. Until then no process may start.
        self.wanted = false;
        self.stop_all();
    }

    /// Handles room that the loader granted to request number `asked`. Answers to withdrawn requests are
    /// ignored.
    pub(super) fn take_room(&mut self, places: Vec<Vec<usize>>, asked: u64) {
        let LoadState::Waiting { number, changed, .. } = self.load_state else { return };
        if number != asked {
            return;
        }
        self.load_state = LoadState::Granted { places, told: false, asking: None, beside: true };
        if changed {
            // The settings have changed since the request, so ask again.
            self.ask_loader();
        } else {
            self.run_held_starts();
        }
        self.note_action();
    }

    /// Runs the starts that waited for room.
    fn run_held_starts(&mut self) {
        for id in self.ids() {
            if let Some(event) = self.unit_mut(id).and_then(|unit| unit.held_start.take()) {
                self.step_machine(id, event);
            }
        }
    }

    /// Asks the loader whether the model may stay with new settings, if they change its memory or GPUs. No
    /// process is started until the answer.
    pub(super) fn ask_to_stay(&mut self, before: &LoadSpec, remade: bool) {
        let now = self.loading_spec();
        // Ignore measurements: they belong to the old command, and the new one may need as much.
        let needs = |spec: &LoadSpec| {
            spec.needs.clone().map(|needs| MemoryNeeds { measured: MeasuredNeeds::default(), ..needs })
        };
        let places = |spec: &LoadSpec| (spec.gpus.clone(), spec.may_split);
        let elsewhere = (self.spec.choose_gpus || remade) && places(&now) != places(before);
        if !(remade && needs(&now) != needs(before) || now.replicas != before.replicas || elsewhere) {
            return;
        }
        if let LoadState::Waiting { changed, .. } = &mut self.load_state {
            *changed = true;
        }
        self.ask_loader();
    }

    /// True while the loader has not answered whether the model may stay with new settings.
    pub(super) fn is_asking_to_stay(&self) -> bool {
        matches!(self.load_state, LoadState::Granted { asking: Some(_), .. })
    }

    fn ask_loader(&mut self) {
        if let LoadState::Granted { asking, .. } = &mut self.load_state {
            self.last_wish += 1;
            *asking = Some(self.last_wish);
            self.report_loading(LoadingReport::ReplacementPlanned(self.last_wish));
        }
    }

    /// Handles the loader's answer that the model may stay, with these GPUs for each process.
    pub(super) fn note_stay(&mut self, now: Vec<Vec<usize>>, fits_beside: bool, question: u64) {
        let LoadState::Granted { places, asking, beside, .. } = &mut self.load_state else { return };
        if *asking != Some(question) {
            return;
        }
        (*places, *asking, *beside) = (now, None, fits_beside);
        self.timers.configuration = None;
        self.run_held_starts();
        self.note_action();
    }

    /// Handles the loader's answer that the model may not stay: drains and stops it, and asks for room
    /// again.
    pub(super) fn reload_model(&mut self, why: String, question: u64) {
        // Accept an answer to an earlier question, too: the loader already counts the model as leaving.
        if self.end.is_some()
            || !matches!(self.load_state, LoadState::Granted { asking: Some(asked), .. } if asked >= question)
        {
            return;
        }
        self.log_event(None, EventKind::LoadsAnew { message: why });
        self.leave_for("the model is reloaded with its new settings");
    }

    /// Unloads the model to make room for another one.
    pub(super) fn make_room_for(&mut self, wanted: ModelName) {
        if self.end.is_some() || !matches!(self.load_state, LoadState::Granted { .. }) {
            return;
        }
        self.log_event(None, EventKind::MakesRoom { wanted });
        self.leave_for("the model makes room for another one");
        self.wanted = false;
    }

    /// Ends the processes once their running requests have ended.
    fn leave_for(&mut self, why: &str) {
        self.give_up_replacements(why);
        self.load_state = LoadState::Leaving { for_another: true };
        self.stop_all();
    }

    /// True while the model drains to make room for another one. Then running requests are not cut, however
    /// long they take.
    pub(super) fn may_drain_long(&self, id: UnitId) -> bool {
        let lost = self.spec.lifecycle.probes_lost;
        let crashed = self.live(id).is_none_or(|live| {
            live.crashed_at.is_some() || live.short_grace || live.silent_for(lost).is_some()
        });
        // Without running requests, the drain waits only for slots to be saved, which has its own time
        // limit.
        let answers = self.live(id).is_some_and(|live| self.leases.in_flight(live.id) > 0);
        answers
            && self.end.is_none()
            && self.load_state == (LoadState::Leaving { for_another: true })
            && !crashed
    }

    /// GPUs of a replica, if the loader chose them.
    pub(super) fn replica_gpus(&self, replica: u32) -> Vec<usize> {
        let LoadState::Granted { places, .. } = &self.load_state else { return Vec::new() };
        let place = usize::try_from(replica).ok().and_then(|replica| places.get(replica));
        place.filter(|_| self.spec.choose_gpus).cloned().unwrap_or_default()
    }

    /// Reports the memory of the model's processes to the loader, once all of them were read.
    pub(super) fn report_memory(&self) {
        // During a replacement two processes hold memory, so the sum would be too large.
        if !matches!(self.load_state, LoadState::Granted { .. })
            || !self.replacements.is_empty()
            || !self.all_serve()
        {
            return;
        }
        let mut held = MemoryAmounts::none();
        let made_of = process_recipe(&self.spec);
        // Leave out retiring processes, which end and free their memory.
        let current = self.units.iter().filter(|unit| unit.role == UnitRole::Current);
        let current: Vec<_> = current.filter_map(ProcessUnit::generation).collect();
        let (mut leaks, mut gpus_unknown, mut can_give, mut outdated) = (false, false, false, false);
        for live in self.live_generations() {
            if !live.memory.has_reading() {
                return;
            }
            leaks |= live.memory.leaks();
            outdated |= live.recipe != made_of || !current.contains(&live.id);
            gpus_unknown |= !live.memory.knows_vram();
            can_give |= live.can_reclaim(&self.spec.recycle.common);
            held.add(MemoryKind::Host, live.memory.charged_bytes(MemoryKind::Host).unwrap_or(0));
            for vram in &live.memory.vram {
                held.add(MemoryKind::Vram(vram.gpu), vram.bytes);
            }
        }
        self.report_loading(LoadingReport::Measured(ModelReading {
            held,
            leaks,
            gpus_unknown,
            can_reclaim: can_give,
            outdated,
        }));
    }

    /// Reports to the loader that a start lacked memory, if that was the kind of failure.
    pub(super) fn report_short(&self, kind: FailureKind) {
        if kind == FailureKind::OutOfMemory {
            self.report_loading(LoadingReport::StartShort);
        }
    }

    pub(super) fn report_loading(&self, told: LoadingReport) {
        self.context.loading.send_report(&self.who, told);
    }

    /// True if requests wait because the model waits for room.
    pub(super) fn waits_for_room(&self) -> bool {
        matches!(self.load_state, LoadState::Waiting { .. }) && self.leases.needs_process()
    }
}
