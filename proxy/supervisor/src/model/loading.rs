//! Whether the model may have processes now: it asks before its first one, and gives its room back after its last one.
//!
//! ```text
//!   Out ── wanted: asks ──> Asked ── Load ──> In ── nobody asks, drained, makes room ──> Leaving
//!    ^                                         │ starts that fail                           │
//!    └──────────────────── gives back ─────────┴────────────── no process is left ──────────┘
//! ```
//!
//! What a process does within its room (crashes, replacements) is nobody else's business.

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

/// How a model stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Stand {
    /// No process, and no wish for one.
    #[default]
    Out,
    /// It waits for room. With `changed` it has other settings than those with which it has asked.
    Asked { urgent: bool, number: u64, changed: bool },
    /// It may have processes, each on these GPUs; none: wherever its command says. While it is `asking` whether it may stay with other
    /// settings, none is started. Those by its latest settings have room `beside` the ones before.
    In { places: Vec<Vec<usize>>, told: bool, asking: Option<u64>, beside: bool },
    /// No more; for another model, or by itself.
    Leaving { for_another: bool },
}

impl Model {
    /// Tells what has changed since the last time.
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
            // An operator, or the time that nobody asked.
            Stand::In { .. } if self.end.map_or(!self.wanted, |end| end == End::Removed) => {
                self.stand = Stand::Leaving { for_another: false };
                self.tell_loading(Told::Leaves);
                self.changed();
            }
            Stand::Leaving { .. } if !any => {
                self.take_whole();
                self.give_room_back();
            }
            // Its room was given back while a start waited for an answer.
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

    /// What can be loaded of it is: a replica that does not start holds up nobody.
    fn serves_whole(&self) -> bool {
        let current = || self.units.iter().filter(|unit| unit.role == Role::Current);
        let ready = |unit: &Unit| unit.phase() == Phase::Ready;
        current().any(ready) && current().all(|unit| ready(unit) || unit.waits_for_change())
    }

    /// Starts failed, and the next ones wait: meanwhile others may have the room.
    fn fails(&self) -> bool {
        self.units.iter().all(Unit::waits_for_change)
    }

    fn holds_starts(&self) -> bool {
        self.units.iter().any(|unit| unit.held.is_some())
    }

    /// Whether processes may be made. If not, it is asked for.
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
            // One that only presses asks for the same: the answer may be on its way.
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

    /// What starts a process without being asked for: a timer, a file that was mended. It waits for room.
    pub(super) fn revive(&mut self, id: UnitId, event: Event) {
        if self.may_start() {
            self.step(id, event);
        } else if let Some(unit) = self.unit_mut(id) {
            unit.held = Some(event);
        }
    }

    /// Whether a timer that has run out starts a process.
    pub(super) const fn starts(timer: Timer) -> bool {
        matches!(timer, Timer::Backoff { .. } | Timer::Trial)
    }

    /// What it needs now, by what is known of processes with its command.
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
            // Its file is not known, but what processes with its command held.
            None if measured.host.is_some() => spec.needs = Some(Needs { measured, ..Needs::default() }),
            None => {}
        }
        spec
    }

    /// It is there, and can be told what it may do.
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

    /// Other settings. What is loaded stays.
    pub(super) fn apply_loading(&self) {
        self.tell_loading(Told::Is(Box::new(self.loading_spec())));
    }

    /// The loader will never load the model beside what is there. It takes its fallback arguments where that can help; else its callers and
    /// operators are told why.
    pub(super) fn never_loaded(&mut self, why: &str, by_room: bool) {
        if !matches!(self.stand, Stand::Asked { .. }) || by_room && self.fall_back(why) {
            return;
        }
        let denied = Denied::NeverLoaded(why.to_owned());
        self.leases.dismiss(&denied);
        self.leases.give_up_elsewhere();
        self.context.turn_away_before_us(&self.spec.name, &denied);
        self.give_up_replacements(&format!("it cannot be loaded: {why}"));
        // Its next request asks anew, for all that it needs. Nothing of it may come up meanwhile that nobody wants.
        self.wanted = false;
        self.all_down();
    }

    /// There is room, for whom asked with this number: an earlier one has given up since, and has said so.
    pub(super) fn take_room(&mut self, places: Vec<Vec<usize>>, asked: u64) {
        let Stand::Asked { number, changed, .. } = self.stand else { return };
        if number != asked {
            return;
        }
        self.stand = Stand::In { places, told: false, asking: None, beside: true };
        if changed {
            // That room was for other settings.
            self.ask_now();
        } else {
            self.start_the_held();
        }
        self.changed();
    }

    /// What waited for room starts.
    fn start_the_held(&mut self) {
        for id in self.ids() {
            if let Some(event) = self.unit_mut(id).and_then(|unit| unit.held.take()) {
                self.step(id, event);
            }
        }
    }

    /// Its settings are others. Where they say how much it takes, or on which GPUs it may be, it asks before any process is made by them.
    pub(super) fn ask_to_stay(&mut self, before: &Spec, remade: bool) {
        let now = self.loading_spec();
        // What was measured of a command is not known of another one, which may need just as much.
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

    /// Whether it waits to hear if it may stay with other settings. No process is made meanwhile.
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

    /// It may, each process on these GPUs.
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

    /// It may not: it lets its requests end, stops, and asks for room like everybody.
    pub(super) fn load_anew(&mut self, why: String, question: u64) {
        // To an earlier question, too: for the loader it is on its way out.
        if self.end.is_some()
            || !matches!(self.stand, Stand::In { asking: Some(asked), .. } if asked >= question)
        {
            return;
        }
        self.tell(None, EventKind::LoadsAnew { message: why });
        self.leave_for("the model is loaded anew with its new settings");
    }

    /// Another model needs the room.
    pub(super) fn make_room_for(&mut self, wanted: ModelName) {
        if self.end.is_some() || !matches!(self.stand, Stand::In { .. }) {
            return;
        }
        self.tell(None, EventKind::MakesRoom { wanted });
        self.leave_for("the model makes room for another one");
        self.wanted = false;
    }

    /// Ends once the running requests have.
    fn leave_for(&mut self, why: &str) {
        self.give_up_replacements(why);
        self.stand = Stand::Leaving { for_another: true };
        self.all_down();
    }

    /// It drains for another model: what runs is not cut for that, however long it takes.
    pub(super) fn may_take_its_time(&self, id: UnitId) -> bool {
        let lost = self.spec.lifecycle.probes_lost;
        let crashed = self
            .live(id)
            .is_none_or(|live| live.crashed.is_some() || live.hurried || live.silent_for(lost).is_some());
        // What is saved of it then has an end.
        let answers = self.live(id).is_some_and(|live| self.leases.in_flight(live.id) > 0);
        answers && self.end.is_none() && self.stand == (Stand::Leaving { for_another: true }) && !crashed
    }

    /// The GPUs of a replica, if they are chosen by us.
    pub(super) fn place_of(&self, replica: u32) -> Vec<usize> {
        let Stand::In { places, .. } = &self.stand else { return Vec::new() };
        let place = usize::try_from(replica).ok().and_then(|replica| places.get(replica));
        place.filter(|_| self.spec.choose_gpus).cloned().unwrap_or_default()
    }

    /// What its processes hold, once all of them were read.
    pub(super) fn tell_memory(&self) {
        // While one takes another's place both hold memory, and none of them more than it needs.
        if !matches!(self.stand, Stand::In { .. }) || !self.replacements.is_empty() || !self.serves_whole() {
            return;
        }
        let mut held = Amounts::none();
        let made_of = recipe(&self.spec);
        // One that retires goes, with what it holds.
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

    /// A start found too little memory.
    pub(super) fn tell_short(&self, kind: FailureKind) {
        if kind == FailureKind::OutOfMemory {
            self.tell_loading(Told::Short);
        }
    }

    pub(super) fn tell_loading(&self, told: Told) {
        self.context.loading.tell(&self.who, told);
    }

    /// Somebody waits for it, and it waits for room.
    pub(super) fn waits_for_room(&self) -> bool {
        matches!(self.stand, Stand::Asked { .. }) && self.leases.in_need()
    }
}
