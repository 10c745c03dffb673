//! Schedules memory readings and handles their results.

use std::sync::Arc;

use tokio::time::Instant;
use warden_policies::growth::VerdictChange;
use warden_policies::lifecycle::BackendPhase;
use warden_policies::replacement_cost::ReplacementLoad;
use warden_policies::sample::SampleEdge;
use warden_policies::share::SharedMember;
use warden_policies::{MemoryKind, cooldown};

use super::timers;
use super::unit::{ProcessUnit, UnitId, UnitRole};
use super::words::verdict_sentence;
use super::{HelperReport, ModelTask};
use crate::clock;
use crate::memory::fleet_memory::ReturnedMemory;
use crate::memory::tracker::{ReadingContext, ReadingResult};
use crate::process::{ProcessSample, SampleOptions};
use crate::sync::lock;
use crate::view::event::EventKind;

impl ModelTask {
    /// Detects that a process has become idle or busy. Becoming idle sets the timer of the idle sample, and
    /// of the next judgement if a replacement waits for a quiet moment.
    pub(super) fn watch_idle(&mut self) {
        let (settle, quiet_for) = (self.watch.sensors.idle_settle, self.spec.recycle.common.quiet_for);
        for unit in &mut self.units {
            let phase = unit.phase();
            let Some(live) = &mut unit.live else { continue };
            if phase != BackendPhase::Ready {
                continue;
            }
            // Repeat, because requests come and go meanwhile. While a sample is due, no wake-up is needed.
            loop {
                let idle = self.leases.idle_since(live.id);
                if live.idle_seen != idle {
                    live.idle_seen = idle;
                    live.timers.idle_sample = idle.map(|since| (clock::after(since, settle), since));
                    if let Some(since) = idle
                        && live.wish.since.is_some()
                    {
                        live.timers.judgement = Some(clock::after(since, quiet_for));
                    }
                }
                let returns = live.timers.idle_sample.is_some();
                if self.leases.watch_idle(live.id, idle, returns) || returns {
                    break;
                }
            }
        }
    }

    pub(super) fn fire_samples(&mut self, id: UnitId, now: Instant) {
        if !self.context.begun.is_cancelled() {
            // Read nothing: the previous instance still owns the processes and judges them.
            return;
        }
        let (watch, leases) = (self.watch, Arc::clone(&self.leases));
        let Some(unit) = self.unit_mut(id) else { return };
        if !matches!(unit.phase(), BackendPhase::Ready | BackendPhase::Suspect | BackendPhase::Draining) {
            return;
        }
        let Some(live) = &mut unit.live else { return };
        let generation = live.id;
        let idle = live.timers.take_idle_sample(now);
        let tick = timers::take_due(&mut live.timers.sample, now);
        if tick {
            live.timers.sample = Some(clock::after_pause(now, watch.sensors.interval));
        }
        let judge = timers::take_due(&mut live.timers.judgement, now);
        let Some(process) = live.process.clone() else { return };
        let cell = Arc::clone(&live.cell);
        // The process counts as idle only if no request has come since it became idle.
        let idle = idle.is_some() && idle == leases.idle_since(generation);
        if tick || idle {
            let (number, confirm) = live.memory.begin_reading();
            let reclaims = live.memory.reclaims;
            let share = confirm.then_some(watch.sensors.confirm_share);
            let (metrics, slots) = live.health.what_to_request(leases.in_flight(generation));
            let ask = SampleOptions {
                by_page: confirm,
                gpu_age: watch.sensors.gpu_age,
                limit: watch.sensors.read_limit,
                metrics,
                slots,
            };
            self.spawn_helper(generation, async move {
                let sample = process.sample(ask).await;
                // The reading includes buffers of a request that came meanwhile, so it is no idle sample.
                let in_flight = leases.in_flight(generation);
                let edge = if idle && in_flight == 0 { SampleEdge::Idle } else { SampleEdge::Tick };
                let taken = ReadingContext {
                    number,
                    at: Instant::now(),
                    edge,
                    in_flight,
                    work: cell.work(),
                    confirm: share,
                    reclaims,
                };
                HelperReport::Sampled { taken, sample: Box::new(sample) }
            });
        } else if judge {
            self.judge_unit(id);
        }
    }

    pub(super) fn note_sample(&mut self, id: UnitId, taken: &ReadingContext, sample: &ProcessSample) {
        let Some(unit) = self.unit_mut(id) else { return };
        let Some(live) = &mut unit.live else { return };
        let ill_before = live.health.symptoms();
        let Some(ReadingResult { first, changes }) =
            live.memory.note_reading(taken, sample, live.spawned, &live.cell)
        else {
            return;
        };
        let number = taken.number;
        if changes.is_some() {
            let uses = |gpu| live.memory.uses_gpu(gpu);
            live.health.note_reading(taken.at, live.spawned, sample, &live.cell, uses);
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
            self.log_verdict(id, change);
        }
        for symptom in &symptoms {
            if !ill_before.iter().any(|known| known.reason() == symptom.reason()) {
                let (reason, message) = (symptom.reason(), symptom.to_string());
                self.log_event(Some(generation), EventKind::Unwell { reason, message });
            }
        }
        if let Some(message) = unknown {
            self.log_event(Some(generation), EventKind::VramUnknown { message });
        }
        if let Some(devices) = &sample.devices {
            let mut shown = devices.views();
            let leaks = lock(&self.context.leaks);
            for device in &mut shown {
                device.leak = leaks.get(&device.gpu).cloned();
            }
            drop(leaks);
            self.context.publisher.set_machine(shown, sample.totals);
        }
        self.note_action();
        self.complete_reclaim(id, number);
        self.publish_memory(id);
        self.report_memory();
        self.publish_room();
        self.judge_unit(id);
    }

    fn log_verdict(&mut self, id: UnitId, change: VerdictChange) {
        let Some(generation) = self.generation(id) else { return };
        let message = verdict_sentence(&change);
        let VerdictChange { request, before, growth, .. } = change;
        let kind = EventKind::Verdict { growth: Box::new(growth), before, request, message };
        self.log_event(Some(generation), kind);
    }

    /// Adds this process to the fleet's memory figures: memory held, and memory that its replacement would
    /// free.
    fn publish_memory(&self, id: UnitId) {
        let Some(unit) = self.unit(id) else { return };
        let Some(live) = &unit.live else { return };
        let free_to_go = unit.role == UnitRole::Current
            && unit.phase() == BackendPhase::Ready
            && self.replacements.is_empty()
            && self.end.is_none();
        let cost = if self.would_overlap(unit) {
            Some(std::time::Duration::ZERO)
        } else {
            self.experience.load_time
        };
        let series = live.memory.series_facts(&self.spec.recycle);
        let member = |facts: &warden_policies::recycle::SeriesFacts| {
            let member = SharedMember { charged: facts.charged, fresh: facts.fresh(), cost, free_to_go };
            (facts.series, member)
        };
        let members = series.iter().map(member).collect();
        self.context.fleet_memory.note_reading(live.id, live.memory.knows_vram(), members);
    }

    /// Requests that a replacement now would affect.
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
            tokens_per_second: live.health.decode_speed().map(|speed| speed * f64::from(requests.max(1))),
            arrivals: live.memory.monitor.rate(),
            overlap: self.would_overlap(unit),
            lull_every: Some(self.experience.lulls.expected_interval(self.context.now())),
        }
    }

    /// Records an idle time that would have been long enough for a replacement.
    pub(super) fn note_lull(&mut self, id: UnitId) {
        let quiet_for = self.spec.recycle.common.quiet_for;
        let Some(generation) = self.generation(id) else { return };
        let Some(idle) = self.leases.idle_since(generation).map(|since| since.elapsed()) else { return };
        if idle >= quiet_for {
            self.experience.lulls.record_lull(self.context.now().saturating_sub(idle));
        }
    }

    /// Records how much memory came back after a process ended.
    pub(super) fn note_returned(&mut self, returned: &ReturnedMemory) {
        for (series, missing) in &returned.missing {
            if let MemoryKind::Vram(gpu) = series
                && missing.is_none()
            {
                lock(&self.context.leaks).remove(gpu);
            }
            let Some(held) = self.cooldown.record_exit(*series, *missing, &self.spec.recycle) else {
                continue;
            };
            let message = held.to_string();
            let gpu = match series {
                MemoryKind::Host => None,
                MemoryKind::Vram(gpu) => Some(*gpu),
            };
            if let Some(gpu) = gpu {
                lock(&self.context.leaks).insert(gpu, message.clone());
            }
            let bytes = match held {
                cooldown::HoldReason::DriverLeak { bytes, .. } => bytes,
                _ => missing.unwrap_or(0),
            };
            self.log_event(None, EventKind::DriverLeak { gpu, bytes, message });
        }
    }
}
