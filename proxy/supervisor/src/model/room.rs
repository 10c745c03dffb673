//! Publishes how much memory each process has left for prompts, and handles prompts that need a fresh
//! process.
//!
//! The queue weighs prompts by the last published readings.

use std::time::Duration;

use warden_policies::admission::AdmissionMode;
use warden_policies::cooldown::Ask;
use warden_policies::lifecycle::Phase;
use warden_policies::recycle::SeriesFacts;
use warden_policies::{Action, Decision, MemoryKind, Reason};

use super::Model;
use super::unit::{Generation, Role, Unit};
use crate::lease::admit::{Board, Known, Left};

impl Model {
    /// Publishes the memory left, by the last readings.
    pub(super) fn publish_room(&mut self) {
        if self.spec.admission.mode == AdmissionMode::Off {
            return;
        }
        let serving = self.units.iter().filter(|unit| matches!(unit.phase(), Phase::Ready | Phase::Suspect));
        let known: Vec<Known> = serving.filter_map(|unit| self.room_of(unit)).collect();
        for unit in &self.units {
            let Some(live) = &unit.live else { continue };
            let memory = &live.memory;
            self.experience.note_prices(memory);
        }
        self.leases.publish_memory(Board { known });
    }

    fn room_of(&self, unit: &Unit) -> Option<Known> {
        let live = unit.live.as_ref().filter(|live| live.memory.is_known())?;
        let memory = &live.memory;
        let series = memory.series(&self.spec.recycle);
        let left = series.iter().map(|facts| self.left(live, facts));
        Some(Known {
            generation: live.id,
            largest: memory.largest_prompt,
            busy: memory.busy,
            recycle: self.recycle_costs(unit, live),
            left: left.collect(),
            cost: memory.cost.clone(),
        })
    }

    /// Memory left until the hard budget, or until the end of the machine's or device's memory.
    fn left(&self, live: &Generation, facts: &SeriesFacts) -> Left {
        // Memory that other processes gave back is reserved for them.
        let reserved = match facts.series {
            MemoryKind::Host => 0,
            MemoryKind::Vram(gpu) => self.context.fleet_memory.reserved(Some(live.id), gpu),
        };
        let free = facts.free.map(|free| free.saturating_sub(reserved));
        let hard = self.spec.recycle.budget(facts).hard;
        let held = facts.charged;
        let in_budget = |held: Option<u64>| Some(hard?.saturating_sub(held?));
        let least = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).min();
        // Memory that this process gives back is free for the next one.
        let gain = facts.gain().unwrap_or(0);
        let floor = facts.growth.as_ref().and_then(|growth| growth.floor);
        Left {
            series: facts.series,
            now: least(in_budget(held), free),
            returns: held.zip(floor).map_or(0, |(held, floor)| held.saturating_sub(floor)),
            fresh: least(in_budget(facts.fresh()), free.map(|free| free.saturating_add(gain))),
        }
    }

    /// Waiting time of requests during a recycle; `None` if it would be held back.
    fn recycle_costs(&self, unit: &Unit, live: &Generation) -> Option<Duration> {
        let free = unit.role == Role::Current && self.replacements.is_empty() && self.end.is_none();
        let decision = Decision {
            action: Action::DrainNow,
            reason: Some(Reason::Admission),
            due: true,
            ..Decision::OBSERVE
        };
        let ask = Ask {
            now: self.context.now(),
            load_time: self.experience.load_time,
            unit: live.random,
            held: None,
        };
        let allowed = free && self.cooldown.check(&decision, &ask, &self.spec.recycle).is_ok();
        allowed.then(|| self.experience.load_time.unwrap_or_default())
    }

    /// Evaluates the policy at once for a process whose queue has a prompt that needs a fresh process.
    pub(super) fn heed_wishes(&mut self) {
        for id in self.ids() {
            let Some(live) = self.live(id) else { continue };
            let wish = self.leases.admission_wish(live.id);
            let heard = live.memory.facts.as_ref().and_then(|facts| facts.admission);
            if wish.is_some() && wish != heard {
                self.judge(id);
            }
        }
    }
}
