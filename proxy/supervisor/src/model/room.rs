//! Publishes the memory that each process has left for prompts, and handles prompts that fit only into a new
//! process. The queue compares prompts with these figures, which are from the last readings.

use std::time::Duration;

use warden_policies::admission::AdmissionMode;
use warden_policies::cooldown::CooldownQuery;
use warden_policies::lifecycle::BackendPhase;
use warden_policies::recycle::SeriesFacts;
use warden_policies::{MemoryKind, Reason, RecycleAction, RecycleDecision};

use super::ModelTask;
use super::unit::{LiveGeneration, ProcessUnit, UnitRole};
use crate::lease::admit::{MemoryBoard, MemoryHeadroom, ProcessHeadroom};

impl ModelTask {
    /// Publishes the memory that each process has left, by the last readings.
    pub(super) fn publish_room(&mut self) {
        if self.spec.admission.mode == AdmissionMode::Off {
            return;
        }
        let serving = self
            .units
            .iter()
            .filter(|unit| matches!(unit.phase(), BackendPhase::Ready | BackendPhase::Suspect));
        let known: Vec<ProcessHeadroom> = serving.filter_map(|unit| self.process_headroom(unit)).collect();
        for unit in &self.units {
            let Some(live) = &unit.live else { continue };
            let memory = &live.memory;
            self.experience.note_prices(memory);
        }
        self.leases.publish_memory(MemoryBoard { known });
    }

    fn process_headroom(&self, unit: &ProcessUnit) -> Option<ProcessHeadroom> {
        let live = unit.live.as_ref().filter(|live| live.memory.has_reading())?;
        let memory = &live.memory;
        let series = memory.series_facts(&self.spec.recycle);
        let left = series.iter().map(|facts| self.memory_headroom(live, facts));
        Some(ProcessHeadroom {
            generation: live.id,
            largest: memory.largest_prompt,
            busy: memory.busy,
            recycle: self.recycle_wait(unit, live),
            left: left.collect(),
            cost: memory.cost.clone(),
        })
    }

    /// Memory left until the hard budget, or until the memory of the machine or GPU is exhausted.
    fn memory_headroom(&self, live: &LiveGeneration, facts: &SeriesFacts) -> MemoryHeadroom {
        // Subtract memory that other processes gave back: they may take it again.
        let reserved = match facts.series {
            MemoryKind::Host => 0,
            MemoryKind::Vram(gpu) => self.context.fleet_memory.reserved_vram(Some(live.id), gpu),
        };
        let free = facts.free.map(|free| free.saturating_sub(reserved));
        let hard = self.spec.recycle.budget(facts).hard;
        let held = facts.charged;
        let in_budget = |held: Option<u64>| Some(hard?.saturating_sub(held?));
        let least = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).min();
        // Memory that a replacement of this process frees is available to the new process.
        let gain = facts.gain().unwrap_or(0);
        let floor = facts.growth.as_ref().and_then(|growth| growth.floor);
        MemoryHeadroom {
            series: facts.series,
            now: least(in_budget(held), free),
            coming_back: held.zip(floor).map_or(0, |(held, floor)| held.saturating_sub(floor)),
            fresh: least(in_budget(facts.fresh()), free.map(|free| free.saturating_add(gain))),
        }
    }

    /// Time for which requests would wait during a replacement; `None` if the replacement would be held
    /// back.
    fn recycle_wait(&self, unit: &ProcessUnit, live: &LiveGeneration) -> Option<Duration> {
        let free = unit.role == UnitRole::Current && self.replacements.is_empty() && self.end.is_none();
        let decision = RecycleDecision {
            action: RecycleAction::DrainNow,
            reason: Some(Reason::Admission),
            due: true,
            ..RecycleDecision::OBSERVE
        };
        let ask = CooldownQuery {
            now: self.context.now(),
            load_time: self.experience.load_time,
            unit: live.random,
            held: None,
        };
        let allowed = free && self.cooldown.check(&decision, &ask, &self.spec.recycle).is_ok();
        allowed.then(|| self.experience.load_time.unwrap_or_default())
    }

    /// Applies the policy at once to each process that has to be replaced because of a waiting prompt.
    pub(super) fn judge_recycle_wishes(&mut self) {
        for id in self.ids() {
            let Some(live) = self.live(id) else { continue };
            let wish = self.leases.admission_wish(live.id);
            let heard = live.memory.facts.as_ref().and_then(|facts| facts.admission);
            if wish.is_some() && wish != heard {
                self.judge_unit(id);
            }
        }
    }
}
