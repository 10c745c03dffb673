//! Schedules memory readings and handles their results. Publishes the memory that each process has left for
//! prompts, for the admission of requests.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::admission::AdmissionMode;
use warden_policies::cooldown::{CooldownQuery, HoldReason};
use warden_policies::growth::VerdictChange;
use warden_policies::lifecycle::BackendPhase;
use warden_policies::recycle::SeriesFacts;
use warden_policies::replacement_cost::ReplacementLoad;
use warden_policies::sample::SampleEdge;
use warden_policies::share::SharedMember;
use warden_policies::{MemoryKind, Reason};

use super::replace::decision_for;
use super::unit::{LiveGeneration, ProcessUnit, UnitId, UnitRole, take_due};
use super::words::verdict_sentence;
use super::{HelperReport, ModelTask};
use crate::clock;
use crate::lease::admit::{MemoryHeadroom, ProcessHeadroom};
use crate::memory::fleet_memory::ReturnedMemory;
use crate::memory::tracker::{ReadingContext, ReadingResult};
use crate::process::{ProcessSample, SampleOptions};
use crate::view::event::EventKind;

impl ModelTask {
    /// Detects that a process has become idle or busy. An idle process gets an idle sample, and a judgement
    /// if a replacement waits for a quiet moment.
    pub(super) fn watch_idle(&mut self) {
        let settle = self.watch.sensors.idle_settle;
        let quiet_for = self.spec.recycle.common.quiet_for;
        for unit in &mut self.units.all {
            let phase = unit.phase();
            let Some(live) = &mut unit.live else { continue };
            if phase != BackendPhase::Ready {
                continue;
            }
            // Repeat, because requests come and go meanwhile.
            loop {
                let idle = self.leases.idle_since(live.id);
                if live.timers.idle_seen != idle {
                    live.timers.idle_seen = idle;
                    live.timers.idle_sample = idle.map(|since| (clock::after(since, settle), since));
                    if let Some(since) = idle
                        && live.wish.since.is_some()
                    {
                        live.timers.judgement = Some(clock::after(since, quiet_for));
                    }
                }
                let returns = live.timers.idle_sample.is_some();
                if self.leases.with_state(|queue| queue.table.watch_idle(live.id, idle, returns)) || returns {
                    break;
                }
            }
        }
    }

    pub(super) fn fire_samples(&mut self, id: UnitId, now: Instant) {
        if !self.context.begun.is_cancelled() {
            // The previous instance still owns and judges the processes.
            return;
        }
        let sensors = self.watch.sensors;
        let Some((phase, live)) = self.units.phase_and_live(id) else { return };
        if !matches!(phase, BackendPhase::Ready | BackendPhase::Suspect | BackendPhase::Draining) {
            return;
        }
        let generation = live.id;
        let idle = live.timers.take_idle_sample(now);
        let is_due = take_due(&mut live.timers.sample, now);
        if is_due {
            live.timers.sample = Some(clock::after_pause(now, sensors.interval));
        }
        let judge = take_due(&mut live.timers.judgement, now);
        let Some(process) = live.child.process.clone() else { return };
        // A process that got a request since then is no longer idle.
        let is_idle = idle.is_some() && idle == self.leases.idle_since(generation);
        if !is_due && !is_idle {
            if judge {
                self.judge_unit(id);
            }
            return;
        }
        let cell = Arc::clone(&live.cell);
        let leases = Arc::clone(&self.leases);
        let (number, confirm) = live.memory.begin_reading();
        let reclaims = live.memory.history.reclaims;
        let (metrics, slots) = live.health.what_to_request(leases.in_flight(generation));
        let ask = SampleOptions {
            by_page: confirm,
            gpu_age: sensors.gpu_age,
            limit: sensors.read_limit,
            metrics,
            slots,
        };
        self.mail.spawn_helper(generation, async move {
            let sample = process.sample(ask).await;
            // Buffers of a request that came meanwhile are in the reading, so it is no idle sample.
            let in_flight = leases.in_flight(generation);
            let edge = if is_idle && in_flight == 0 { SampleEdge::Idle } else { SampleEdge::Tick };
            let taken = ReadingContext {
                number,
                at: Instant::now(),
                edge,
                in_flight,
                work: cell.work(),
                confirm: confirm.then_some(sensors.confirm_share),
                reclaims,
            };
            HelperReport::Sampled { taken, sample: Box::new(sample) }
        });
    }

    pub(super) fn note_sample(&mut self, id: UnitId, taken: &ReadingContext, sample: &ProcessSample) {
        let Some(live) = self.units.live_mut(id) else { return };
        let ill_before = live.health.symptoms();
        let Some(ReadingResult { first, changes }) =
            live.memory.note_reading(taken, sample, live.start.spawned, &live.cell)
        else {
            return;
        };
        if changes.is_some() {
            let uses = |gpu| live.memory.uses_gpu(gpu);
            live.health.note_reading(taken.at, live.start.spawned, sample, &live.cell, uses);
        }
        let generation = live.id;
        let symptoms = live.health.symptoms();
        let unknown = live.memory.vram_news();
        tracing::trace!(model = %self.spec.name, %generation, edge = ?taken.edge, host = ?sample.host, "sample");
        if first {
            self.replacements.note_sampled(generation, sample.host, &sample.vram);
            self.judge_offload(id, true);
            self.store_held_memory(id);
        }
        for change in changes.unwrap_or_default() {
            let message = verdict_sentence(&change);
            let VerdictChange { request, before, growth, .. } = change;
            let kind = EventKind::Verdict { growth: Box::new(growth), before, request, message };
            self.log_event(Some(generation), kind);
        }
        for symptom in &symptoms {
            if !ill_before.iter().any(|known| known.reason() == symptom.reason()) {
                let reason = symptom.reason();
                let message = symptom.to_string();
                self.log_event(Some(generation), EventKind::Unwell { reason, message });
            }
        }
        if let Some(message) = unknown {
            self.log_event(Some(generation), EventKind::VramUnknown { message });
        }
        if let Some(devices) = &sample.devices {
            self.context.publisher.set_machine(devices.views(), sample.totals);
        }
        self.life.note_action();
        self.complete_reclaim(id, taken.number);
        self.publish_memory(id);
        self.report_memory();
        self.publish_room();
        self.judge_unit(id);
    }

    /// Publishes the held memory, and the memory that a replacement would free.
    fn publish_memory(&self, id: UnitId) {
        let Some(unit) = self.units.get(id) else { return };
        let Some(live) = &unit.live else { return };
        let free_to_go = unit.role == UnitRole::Current
            && unit.phase() == BackendPhase::Ready
            && self.replacements.is_empty()
            && self.life.end.is_none();
        let cost = if self.would_overlap(unit) { Some(Duration::ZERO) } else { self.experience.load_time };
        let member = |facts: SeriesFacts| {
            let member = SharedMember { charged: facts.charged, fresh: facts.fresh(), cost, free_to_go };
            (facts.series, member)
        };
        let series = live.memory.series_facts(&self.spec.recycle);
        let members = series.into_iter().map(member).collect();
        self.context.fleet_memory.note_reading(live.id, live.memory.knows_vram(), members);
    }

    /// Requests that a replacement of this process would affect now.
    pub(super) fn replacement_load(&self, unit: &ProcessUnit) -> ReplacementLoad {
        let Some(live) = &unit.live else { return ReplacementLoad::default() };
        let requests = self.leases.in_flight(live.id);
        let work = live.cell.work();
        let usual = work.output_tokens.checked_div(work.requests).unwrap_or(0);
        ReplacementLoad {
            load_time: self.experience.load_time,
            requests,
            // On average, half of a usual answer is still to be generated.
            tokens: usual.saturating_mul(u64::from(requests)) / 2,
            tokens_per_second: live.health.speed.map(|speed| speed * f64::from(requests.max(1))),
            arrivals: live.memory.monitor.rate(),
            overlap: self.would_overlap(unit),
            lull_every: Some(self.experience.lulls.expected_interval(self.context.now())),
        }
    }

    /// Records an idle period that would have sufficed for a replacement.
    pub(super) fn note_lull(&mut self, id: UnitId) {
        let quiet_for = self.spec.recycle.common.quiet_for;
        let Some(generation) = self.units.generation(id) else { return };
        let Some(idle) = self.leases.idle_since(generation).map(|since| since.elapsed()) else { return };
        if idle >= quiet_for {
            self.experience.lulls.record_lull(self.context.now().saturating_sub(idle));
        }
    }

    /// Records the memory freed after the end of a process.
    pub(super) fn note_returned(&mut self, returned: &ReturnedMemory) {
        for (series, missing) in &returned.missing {
            let gpu = match series {
                MemoryKind::Host => None,
                MemoryKind::Vram(gpu) => Some(*gpu),
            };
            if let Some(gpu) = gpu
                && missing.is_none()
            {
                self.context.publisher.set_leak(gpu, None);
            }
            let cooldown = &mut self.replacements.cooldown;
            let Some(held) = cooldown.record_exit(*series, *missing, &self.spec.recycle) else { continue };
            let message = held.to_string();
            if let Some(gpu) = gpu {
                self.context.publisher.set_leak(gpu, Some(message.clone()));
            }
            let bytes = match held {
                HoldReason::DriverLeak { bytes, .. } => bytes,
                _ => missing.unwrap_or(0),
            };
            self.log_event(None, EventKind::DriverLeak { gpu, bytes, message });
        }
    }

    pub(super) fn publish_room(&mut self) {
        if self.spec.admission.mode == AdmissionMode::Off {
            return;
        }
        let is_serving =
            |unit: &&ProcessUnit| matches!(unit.phase(), BackendPhase::Ready | BackendPhase::Suspect);
        let serving = self.units.all.iter().filter(is_serving);
        let known = serving.filter_map(|unit| self.process_headroom(unit)).collect();
        for live in self.units.lives() {
            self.experience.note_prices(&live.memory);
        }
        self.leases.change_admission(|admit| admit.publish(known));
    }

    fn process_headroom(&self, unit: &ProcessUnit) -> Option<ProcessHeadroom> {
        let live = unit.live.as_ref().filter(|live| live.memory.has_reading())?;
        let memory = &live.memory;
        let series = memory.series_facts(&self.spec.recycle);
        Some(ProcessHeadroom {
            generation: live.id,
            largest: memory.history.largest_prompt,
            busy: memory.last.is_busy,
            recycle: self.recycle_wait(unit, live),
            left: series.iter().map(|facts| self.memory_headroom(live, facts)).collect(),
            cost: memory.cost.clone(),
        })
    }

    /// Memory left until the hard budget, or until the machine or GPU has none.
    fn memory_headroom(&self, live: &LiveGeneration, facts: &SeriesFacts) -> MemoryHeadroom {
        // Other processes may take back the memory that they gave back.
        let reserved = match facts.series {
            MemoryKind::Host => 0,
            MemoryKind::Vram(gpu) => self.context.fleet_memory.reserved_vram(Some(live.id), gpu),
        };
        let free = facts.free.map(|free| free.saturating_sub(reserved));
        let hard = self.spec.recycle.budget(facts).hard;
        let held = facts.charged;
        let in_budget = |held: Option<u64>| Some(hard?.saturating_sub(held?));
        let least = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).min();
        // The new process gets the memory that this process frees.
        let gain = facts.gain().unwrap_or(0);
        let floor = facts.growth.as_ref().and_then(|growth| growth.floor);
        MemoryHeadroom {
            series: facts.series,
            now: least(in_budget(held), free),
            coming_back: held.zip(floor).map_or(0, |(held, floor)| held.saturating_sub(floor)),
            fresh: least(in_budget(facts.fresh()), free.map(|free| free.saturating_add(gain))),
        }
    }

    /// Time that requests would wait during a replacement; `None` if a replacement would be held back.
    fn recycle_wait(&self, unit: &ProcessUnit, live: &LiveGeneration) -> Option<Duration> {
        let ask = CooldownQuery {
            now: self.context.now(),
            load_time: self.experience.load_time,
            unit: live.wish.random,
            held: None,
        };
        let is_allowed = unit.role == UnitRole::Current
            && self.replacements.is_empty()
            && self.life.end.is_none()
            && self
                .replacements
                .cooldown
                .check(&decision_for(Reason::Admission), &ask, &self.spec.recycle)
                .is_ok();
        is_allowed.then(|| self.experience.load_time.unwrap_or_default())
    }

    /// Judges each process at once that has to be replaced for a waiting prompt.
    pub(super) fn judge_recycle_wishes(&mut self) {
        for id in self.units.ids() {
            let Some(live) = self.units.live(id) else { continue };
            let wish = self.leases.admission_wish(live.id);
            let heard = live.memory.facts.as_ref().and_then(|facts| facts.admission);
            if wish.is_some() && wish != heard {
                self.judge_unit(id);
            }
        }
    }
}
