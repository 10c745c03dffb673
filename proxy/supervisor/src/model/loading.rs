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

use warden_policies::book::{Measured, Needs};
use warden_policies::lifecycle::{Event, Phase, Timer};
use warden_policies::loading::{Amounts, Reading, Spec};
use warden_policies::{MemoryKind, ModelName};

use super::recipe::recipe;
use super::unit::{Role, Unit, UnitId};
use super::{Control, End, Message, Model};
use crate::error::{Denied, FailureKind};
use crate::memory::leak_history;
use crate::memory::loading::{Told, Word};
use crate::view::event::EventKind;

/// State of the model towards the loader.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Stand {
    /// No process, and none wanted.
    #[default]
    Out,
    /// Waits for room. `changed`: the settings have changed since it asked.
    Asked { urgent: bool, number: u64, changed: bool },
    /// May have processes on these GPUs per replica; an empty list leaves the GPUs to the command. While
    /// `asking` whether new settings may stay, no process is started. `beside`: processes with the latest
    /// settings fit next to the old ones.
    In { places: Vec<Vec<usize>>, told: bool, asking: Option<u64>, beside: bool },
    /// Must unload, for another model or by itself.
    Leaving { for_another: bool },
}

impl Model {
    /// Reports changes to the loader.
    pub(super) fn settle_loading(&mut self) {
        let any = self.units.iter().any(|unit| unit.live.is_some()) || self.is_searching();
        let ends = self.end.is_some();
        match &self.stand {
            Stand::In { told: false, .. } if self.serves_whole() => {
                if let Stand::In { told, .. } = &mut self.stand {
                    *told = true;
                }
                self.tell_loading(Told::Loaded);
            }
            Stand::In { .. } if !any && (ends || self.fails()) => self.give_room_back(),
            // Unloaded by an operator or after `ttl`.
            Stand::In { .. } if self.end.map_or(!self.wanted, |end| end == End::Removed) => {
                self.stand = Stand::Leaving { for_another: false };
                self.tell_loading(Told::Leaves);
                self.changed();
            }
            Stand::Leaving { .. } if !any => {
                self.take_whole();
                self.give_room_back();
            }
            // The room was given back while a start waited for an answer.
            Stand::Out if self.holds_starts() && !ends => drop(self.may_start()),
            Stand::Asked { .. } if ends || !(self.wanted || self.holds_starts()) => {
                self.take_whole();
                self.give_room_back();
            }
            _ => {}
        }
    }

    pub(super) fn give_room_back(&mut self) {
        self.replacements.give_turns_back();
        self.stand = Stand::Out;
        self.tell_loading(Told::Gone);
        self.changed();
    }

    /// True if all replicas that can start serve. A replica that does not start does not delay others.
    fn serves_whole(&self) -> bool {
        let current = || self.units.iter().filter(|unit| unit.role == Role::Current);
        let ready = |unit: &Unit| unit.phase() == Phase::Ready;
        current().any(ready) && current().all(|unit| ready(unit) || unit.waits_for_change())
    }

    /// True if starts failed and the next ones wait; other models may use the room meanwhile.
    fn fails(&self) -> bool {
        self.units.iter().all(Unit::waits_for_change)
    }

    fn holds_starts(&self) -> bool {
        self.units.iter().any(|unit| unit.held.is_some())
    }

    /// True if processes may be started now. Otherwise asks the loader for room.
    pub(super) fn may_start(&mut self) -> bool {
        if let Stand::In { asking, .. } = self.stand {
            return asking.is_none();
        }
        let urgent = !self.operators.restarts.is_empty();
        let asks = match self.stand {
            Stand::Out => true,
            Stand::Asked { urgent: known, .. } => urgent && !known,
            Stand::In { .. } | Stand::Leaving { .. } => false,
        };
        if asks {
            // A repeated wish keeps its number, because the answer may be on its way.
            if self.stand == Stand::Out {
                self.asks += 1;
            }
            let number = self.asks;
            let changed = matches!(self.stand, Stand::Asked { changed: true, .. });
            self.stand = Stand::Asked { urgent, number, changed };
            self.tell_loading(Told::Wants { spec: Box::new(self.loading_spec()), urgent, number });
            self.changed();
        }
        false
    }

    /// Starts a process because of a timer or a repaired file, if there is room; otherwise it waits for room.
    pub(super) fn revive(&mut self, id: UnitId, event: Event) {
        if self.may_start() {
            self.step(id, event);
        } else if let Some(unit) = self.unit_mut(id) {
            unit.held = Some(event);
        }
    }

    /// True if the expiry of this timer starts a process.
    pub(super) const fn starts(timer: Timer) -> bool {
        matches!(timer, Timer::Backoff { .. } | Timer::Trial)
    }

    /// Current needs, including measurements of processes with the same command.
    pub(super) fn loading_spec(&self) -> Spec {
        let mut spec = Spec {
            replicas: self.spec.run.replicas,
            ttl: self.spec.ttl,
            pin: self.is_pinned(),
            can_do_with_less: self.spec.fallback.is_some() && self.whole.is_none(),
            ..self.spec.loading.clone()
        };
        let measured = self.context.leak_history.most(&leak_history::key(&self.spec.command));
        match &mut spec.needs {
            Some(needs) => needs.measured = measured,
            // The model file's needs are unknown, but processes with the same command were measured.
            None if measured.host.is_some() => spec.needs = Some(Needs { measured, ..Needs::default() }),
            None => {}
        }
        spec
    }

    /// Registers with the loader and forwards its decisions to this task.
    pub(super) fn join_loading(&self) {
        let outbox = self.outbox.clone();
        let listener = Box::new(move |word| {
            outbox.send(Message::Control(match word {
                Word::Load(places, asked) => Control::Load(places, asked),
                Word::Unload(wanted) => Control::Unload(wanted.name),
                Word::GiveBack => Control::GiveBack,
                Word::Stay { places, beside, question } => Control::Stay { places, beside, question },
                Word::Anew { why, question } => Control::Anew { why, question },
                Word::Come => Control::Come,
                Word::ClearAway => Control::ClearAway,
                Word::Never { why, by_room } => Control::Never { why, by_room },
            }));
        });
        self.tell_loading(Told::Joins { leases: Arc::clone(&self.leases), listener });
        self.apply_loading();
    }

    /// Reports new settings. A loaded model stays loaded.
    pub(super) fn apply_loading(&self) {
        self.tell_loading(Told::Is(Box::new(self.loading_spec())));
    }

    /// Handles the loader's answer that the model can never be loaded. Uses the fallback arguments if they
    /// can help; else its requests and operators get the reason.
    pub(super) fn never_loaded(&mut self, why: &str, by_room: bool) {
        if !matches!(self.stand, Stand::Asked { .. }) || by_room && self.fall_back(why) {
            return;
        }
        let denied = Denied::NeverLoaded(why.to_owned());
        self.leases.dismiss(&denied);
        self.leases.give_up_elsewhere();
        self.context.turn_away_before_us(&self.spec.name, &denied);
        self.give_up_replacements(&format!("it cannot be loaded: {why}"));
        // The next request asks again, with the whole need. Until then no process may start.
        self.wanted = false;
        self.all_down();
    }

    /// Room was granted to the wish with this number. Answers to withdrawn wishes are ignored.
    pub(super) fn take_room(&mut self, places: Vec<Vec<usize>>, asked: u64) {
        let Stand::Asked { number, changed, .. } = self.stand else { return };
        if number != asked {
            return;
        }
        self.stand = Stand::In { places, told: false, asking: None, beside: true };
        if changed {
            // The room was granted for other settings.
            self.ask_now();
        } else {
            self.start_the_held();
        }
        self.changed();
    }

    /// Runs the starts that waited for room.
    fn start_the_held(&mut self) {
        for id in self.ids() {
            if let Some(event) = self.unit_mut(id).and_then(|unit| unit.held.take()) {
                self.step(id, event);
            }
        }
    }

    /// Asks whether the model may stay with new settings, if they change its memory or GPUs. Until the
    /// answer no process starts.
    pub(super) fn ask_to_stay(&mut self, before: &Spec, remade: bool) {
        let now = self.loading_spec();
        // Measurements belong to the old command; the new one may need just as much.
        let needs =
            |spec: &Spec| spec.needs.clone().map(|needs| Needs { measured: Measured::default(), ..needs });
        let places = |spec: &Spec| (spec.gpus.clone(), spec.may_split);
        let elsewhere = (self.spec.choose_gpus || remade) && places(&now) != places(before);
        if !(remade && needs(&now) != needs(before) || now.replicas != before.replicas || elsewhere) {
            return;
        }
        if let Stand::Asked { changed, .. } = &mut self.stand {
            *changed = true;
        }
        self.ask_now();
    }

    /// True while the model waits to hear if it may stay with new settings. No process starts meanwhile.
    pub(super) fn asks_to_stay(&self) -> bool {
        matches!(self.stand, Stand::In { asking: Some(_), .. })
    }

    fn ask_now(&mut self) {
        if let Stand::In { asking, .. } = &mut self.stand {
            self.asks += 1;
            *asking = Some(self.asks);
            self.tell_loading(Told::Remade(self.asks));
        }
    }

    /// The loader lets the model stay, with these GPUs per process.
    pub(super) fn stay(&mut self, now: Vec<Vec<usize>>, fits_beside: bool, question: u64) {
        let Stand::In { places, asking, beside, .. } = &mut self.stand else { return };
        if *asking != Some(question) {
            return;
        }
        (*places, *asking, *beside) = (now, None, fits_beside);
        self.timers.configuration = None;
        self.start_the_held();
        self.changed();
    }

    /// The loader does not let the model stay: its requests end, it stops, and asks for room again.
    pub(super) fn load_anew(&mut self, why: String, question: u64) {
        // Accept an answer to an earlier question as well: the loader already counts the model as leaving.
        if self.end.is_some()
            || !matches!(self.stand, Stand::In { asking: Some(asked), .. } if asked >= question)
        {
            return;
        }
        self.tell(None, EventKind::LoadsAnew { message: why });
        self.leave_for("the model is loaded anew with its new settings");
    }

    /// Unloads the model for another one.
    pub(super) fn make_room_for(&mut self, wanted: ModelName) {
        if self.end.is_some() || !matches!(self.stand, Stand::In { .. }) {
            return;
        }
        self.tell(None, EventKind::MakesRoom { wanted });
        self.leave_for("the model makes room for another one");
        self.wanted = false;
    }

    /// Ends the processes once their running requests have ended.
    fn leave_for(&mut self, why: &str) {
        self.give_up_replacements(why);
        self.stand = Stand::Leaving { for_another: true };
        self.all_down();
    }

    /// True while the model drains for another one. Running requests are not cut for that, however long
    /// they take.
    pub(super) fn may_take_its_time(&self, id: UnitId) -> bool {
        let lost = self.spec.lifecycle.probes_lost;
        let crashed = self
            .live(id)
            .is_none_or(|live| live.crashed.is_some() || live.hurried || live.silent_for(lost).is_some());
        // Without running requests only slots are being saved, which has a time limit.
        let answers = self.live(id).is_some_and(|live| self.leases.in_flight(live.id) > 0);
        answers && self.end.is_none() && self.stand == (Stand::Leaving { for_another: true }) && !crashed
    }

    /// GPUs of a replica, if the loader chose them.
    pub(super) fn place_of(&self, replica: u32) -> Vec<usize> {
        let Stand::In { places, .. } = &self.stand else { return Vec::new() };
        let place = usize::try_from(replica).ok().and_then(|replica| places.get(replica));
        place.filter(|_| self.spec.choose_gpus).cloned().unwrap_or_default()
    }

    /// Reports the memory of the model's processes, once all were read.
    pub(super) fn tell_memory(&self) {
        // During a replacement two processes hold memory, so the sum would be too large.
        if !matches!(self.stand, Stand::In { .. }) || !self.replacements.is_empty() || !self.serves_whole() {
            return;
        }
        let mut held = Amounts::none();
        let made_of = recipe(&self.spec);
        // A retiring process ends and frees its memory.
        let current = self.units.iter().filter(|unit| unit.role == Role::Current);
        let current: Vec<_> = current.filter_map(Unit::generation).collect();
        let (mut leaks, mut gpus_unknown, mut can_give, mut outdated) = (false, false, false, false);
        for live in self.lives() {
            if !live.memory.is_known() {
                return;
            }
            leaks |= live.memory.leaks();
            outdated |= live.made_of != made_of || !current.contains(&live.id);
            gpus_unknown |= !live.memory.knows_vram();
            can_give |= live.can_be_asked(&self.spec.recycle.common);
            held.add(MemoryKind::Host, live.memory.charged(MemoryKind::Host).unwrap_or(0));
            for vram in &live.memory.vram {
                held.add(MemoryKind::Vram(vram.gpu), vram.bytes);
            }
        }
        self.tell_loading(Told::Read(Reading { held, leaks, gpus_unknown, can_give, outdated }));
    }

    /// Reports a start that lacked memory.
    pub(super) fn tell_short(&self, kind: FailureKind) {
        if kind == FailureKind::OutOfMemory {
            self.tell_loading(Told::Short);
        }
    }

    pub(super) fn tell_loading(&self, told: Told) {
        self.context.loading.tell(&self.who, told);
    }

    /// True if requests wait for the model while the model waits for room.
    pub(super) fn waits_for_room(&self) -> bool {
        matches!(self.stand, Stand::Asked { .. }) && self.leases.in_need()
    }
}
