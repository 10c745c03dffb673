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

use crate::clock;
use crate::lease::admit::{MemoryHeadroom, ProcessHeadroom};
use crate::memory::fleet_memory::ReturnedMemory;
use crate::memory::tracker::{ReadingContext, ReadingResult};
use crate::model::ModelTask;
use crate::model::environment::TaskEnvironment;
use crate::model::generation::{LiveGeneration, take_due};
use crate::model::loading::room::ModelRoom;
use crate::model::message::{HelperReport, TaskMail};
use crate::model::recycling::words::verdict_sentence;
use crate::model::replacement::decision_for;
use crate::model::replacement::pace::RecyclePace;
use crate::model::unit::{ProcessUnit, UnitId, UnitList, UnitRole};
use crate::process::{ProcessSample, SampleOptions};
use crate::view::event::EventKind;

impl ModelTask {
    pub(crate) fn note_sample(&mut self, id: UnitId, taken: &ReadingContext, sample: &ProcessSample) {
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
        let build = live.health.build;
        tracing::trace!(model = %self.env.spec.name, %generation, edge = ?taken.edge, host = ?sample.host, "sample");
        if first {
            self.replacements.note_sampled(generation, sample.host, &sample.vram);
            self.life.judge_offload(&self.env, &mut self.units, id, true);
            if let Some(live) = self.units.live(id) {
                live.store_held_memory(&self.env);
            }
        }
        for change in changes.unwrap_or_default() {
            let message = verdict_sentence(&change);
            let VerdictChange { request, before, growth, .. } = change;
            let kind = EventKind::Verdict { growth: Box::new(growth), before, request, message };
            self.env.log_event(Some(generation), kind);
        }
        for symptom in &symptoms {
            if !ill_before.iter().any(|known| known.reason() == symptom.reason()) {
                let reason = symptom.reason();
                let message = symptom.to_string();
                self.env.log_event(Some(generation), EventKind::Unwell { reason, message });
                if reason.is_answers() {
                    self.replacements.pace.note_faulty_answers(&self.env, generation, build);
                }
            }
        }
        if let Some(message) = unknown {
            self.env.log_event(Some(generation), EventKind::VramUnknown { message });
        }
        if let Some(devices) = &sample.devices {
            self.env.context.records.publisher.set_machine(devices.views(), sample.totals);
        }
        self.life.note_action();
        let Some(live) = self.units.live_mut(id) else { return };
        live.plan_answer_probe(&self.env);
        let at = self.env.context.now();
        if let Some(worth) = live.note_reclaim_effect(taken.number, at) {
            self.end_reclaim(id, Some(worth));
        }
        if let Some(unit) = self.units.get(id) {
            let is_free = self.replacements.is_empty() && self.life.end.is_none();
            self.room.publish_memory(&self.env, unit, is_free, self.replacements.pace.load_time);
        }
        self.room.report_memory(&self.env, &self.units, &self.replacements);
        if self.env.spec.requests.admission.mode != AdmissionMode::Off {
            let is_free = self.replacements.is_empty() && self.life.end.is_none();
            let known = self.replacements.pace.headroom(&self.env, &self.units, is_free);
            for live in self.units.lives() {
                self.experience.note_prices(&live.memory);
            }
            self.env.leases.change_admission(|admit| admit.publish(known));
        }
        self.judge_unit(id);
    }
}

impl RecyclePace {
    /// Requests that a replacement of this process would affect now.
    pub(crate) fn replacement_load(
        &self,
        env: &TaskEnvironment,
        live: &LiveGeneration,
        overlap: bool,
    ) -> ReplacementLoad {
        let requests = env.leases.in_flight(live.id);
        let work = live.cell.work();
        let usual = work.output_tokens.checked_div(work.requests).unwrap_or(0);
        ReplacementLoad {
            load_time: self.load_time,
            requests,
            // On average, half of a usual answer is still to be generated.
            tokens: usual.saturating_mul(u64::from(requests)) / 2,
            tokens_per_second: live.health.speed.map(|speed| speed * f64::from(requests.max(1))),
            arrivals: live.memory.monitor.rate(),
            overlap,
            lull_every: Some(self.lulls.expected_interval(env.context.now())),
        }
    }

    /// Memory that each serving process has left for prompts.
    fn headroom(&self, env: &TaskEnvironment, units: &UnitList, is_free: bool) -> Vec<ProcessHeadroom> {
        let is_serving =
            |unit: &&ProcessUnit| matches!(unit.phase(), BackendPhase::Ready | BackendPhase::Suspect);
        let headroom = |unit: &ProcessUnit| {
            let live = unit.live.as_ref().filter(|live| live.memory.has_reading())?;
            let is_allowed = is_free && self.may_recycle(env, unit);
            // Requests would wait for this time during a replacement.
            Some(live.headroom(env, is_allowed.then(|| self.load_time.unwrap_or_default())))
        };
        units.all.iter().filter(is_serving).filter_map(headroom).collect()
    }

    /// True if the cooldown would not hold a replacement of this process back now.
    fn may_recycle(&self, env: &TaskEnvironment, unit: &ProcessUnit) -> bool {
        let Some(live) = &unit.live else { return false };
        let ask = CooldownQuery {
            now: env.context.now(),
            load_time: self.load_time,
            unit: live.wish.random,
            held: None,
        };
        unit.role == UnitRole::Current
            && self.cooldown.check(&decision_for(Reason::Admission), &ask, &env.spec.recycle).is_ok()
    }

    /// Records the memory freed after the end of a process.
    pub(crate) fn note_returned(&mut self, env: &TaskEnvironment, returned: &ReturnedMemory) {
        for (series, missing) in &returned.missing {
            let gpu = match series {
                MemoryKind::Host => None,
                MemoryKind::Vram(gpu) => Some(*gpu),
            };
            if let Some(gpu) = gpu
                && missing.is_none()
            {
                env.context.records.publisher.set_leak(gpu, None);
            }
            let cooldown = &mut self.cooldown;
            let Some(held) = cooldown.record_exit(*series, *missing, &env.spec.recycle) else { continue };
            let message = held.to_string();
            if let Some(gpu) = gpu {
                env.context.records.publisher.set_leak(gpu, Some(message.clone()));
            }
            let bytes = match held {
                HoldReason::DriverLeak { bytes, .. } => bytes,
                _ => missing.unwrap_or(0),
            };
            env.log_event(None, EventKind::DriverLeak { gpu, bytes, message });
        }
    }
}

impl ModelRoom {
    /// Publishes the held memory, and the memory that a replacement would free.
    fn publish_memory(
        &self,
        env: &TaskEnvironment,
        unit: &ProcessUnit,
        is_free: bool,
        load_time: Option<Duration>,
    ) {
        let Some(live) = &unit.live else { return };
        let free_to_go = is_free && unit.role == UnitRole::Current && unit.phase() == BackendPhase::Ready;
        let cost = if self.would_overlap(env, unit) { Some(Duration::ZERO) } else { load_time };
        let member = |facts: SeriesFacts| {
            let member = SharedMember { charged: facts.charged, fresh: facts.fresh(), cost, free_to_go };
            (facts.series, member)
        };
        let series = live.memory.series_facts(&env.spec.recycle);
        let members = series.into_iter().map(member).collect();
        env.context.fleet_memory.note_reading(live.id, live.memory.knows_vram(), members);
    }
}

impl LiveGeneration {
    /// Takes a reading that is due. Returns true if the process is to be judged without one.
    pub(crate) fn fire_samples(
        &mut self,
        env: &TaskEnvironment,
        mail: &mut TaskMail,
        phase: BackendPhase,
        now: Instant,
    ) -> bool {
        let sensors = env.watch.sensors;
        if !matches!(phase, BackendPhase::Ready | BackendPhase::Suspect | BackendPhase::Draining) {
            return false;
        }
        let generation = self.id;
        let idle = self.timers.take_idle_sample(now);
        let is_due = take_due(&mut self.timers.sample, now);
        if is_due {
            self.timers.sample = Some(clock::after_pause(now, sensors.interval));
        }
        let judge = take_due(&mut self.timers.judgement, now);
        let Some(process) = self.child.process.clone() else { return false };
        // A process that got a request since then is no longer idle.
        let is_idle = idle.is_some() && idle == env.leases.idle_since(generation);
        if !is_due && !is_idle {
            return judge;
        }
        let cell = Arc::clone(&self.cell);
        let leases = Arc::clone(&env.leases);
        let (number, confirm) = self.memory.begin_reading();
        let reclaims = self.memory.history.reclaims;
        let (metrics, slots) = self.health.what_to_request(leases.in_flight(generation));
        let ask = SampleOptions {
            by_page: confirm,
            gpu_age: sensors.gpu_age,
            limit: sensors.read_limit,
            metrics,
            slots,
        };
        mail.spawn_helper(generation, async move {
            let sample = process.sample(ask).await;
            // Buffers of a request that arrived meanwhile are in the reading, so it is no idle sample.
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
        false
    }

    fn headroom(&self, env: &TaskEnvironment, recycle: Option<Duration>) -> ProcessHeadroom {
        let memory = &self.memory;
        let series = memory.series_facts(&env.spec.recycle);
        ProcessHeadroom {
            generation: self.id,
            largest: memory.history.largest_prompt,
            busy: memory.last.is_busy,
            recycle,
            left: series.iter().map(|facts| self.memory_headroom(env, facts)).collect(),
            cost: memory.cost.clone(),
        }
    }

    /// Memory left until the hard budget, or until the machine or GPU has none.
    fn memory_headroom(&self, env: &TaskEnvironment, facts: &SeriesFacts) -> MemoryHeadroom {
        // Other processes may take back the memory that they gave back.
        let reserved = match facts.series {
            MemoryKind::Host => 0,
            MemoryKind::Vram(gpu) => env.context.fleet_memory.reserved_vram(Some(self.id), gpu),
        };
        let free = facts.free.map(|free| free.saturating_sub(reserved));
        let hard = env.spec.recycle.budget(facts).hard;
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
}
