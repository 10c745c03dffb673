//! Tracks the health of one generation: answers, progress, GPU faults and symptoms.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::health::{HealthMonitor, HealthObservation, HealthSymptom, OffloadLoss, ProbeBaseline};
use warden_policies::{GpuIndex, units};
use warden_sensors::ProcessRunState;
use warden_sensors::gpu::GpuFault;

use crate::lease::cell::GenerationCell;
use crate::lease::outcomes::DecodeSpeed;
use crate::process::{ProcessSample, ServerProps, hints};
use crate::spec::{CommonConfig, ServerCommand};
use crate::sync::lock;
use crate::view::HealthView;

/// Shortest stall that is shown. A shorter one is only the pause between two readings.
const MIN_SHOWN_STALL: Duration = Duration::from_secs(10);

/// Xid of a GPU that has fallen off the bus; also used when the driver no longer lists a GPU.
const XID_OFF_THE_BUS: u64 = 79;

#[derive(Debug)]
pub(crate) struct HealthTracker {
    health: HealthMonitor,
    faults_seen: Option<u64>,
    /// Tokens per second of one slot, at the last reading.
    pub(crate) speed: Option<f64>,
    /// llama.cpp's build number, if reported.
    pub(crate) build: Option<u32>,
    /// True if a healthy process answers requests for its slots.
    tells_slots: bool,
    /// True if counters may be read while no request runs.
    asked_idle: bool,
    /// Time limit for reloading after llama-server's sleep; zero if it never unloads the model.
    wake: Duration,
    standing: Option<(Instant, ProcessRunState)>,
    paging: u64,
    /// Time for which a prompt may still be evaluated after its client has left.
    abandoned_prompt_limit: Duration,
    /// Layers or VRAM missing on GPUs, compared with the best process with the same command.
    pub(crate) degraded: Option<OffloadLoss>,
    pub(crate) answers: AnswerTest,
}

/// Comparison of answers to fixed prompts.
#[derive(Debug, Default)]
pub(crate) struct AnswerTest {
    /// Answers of the young process.
    pub(crate) baseline: Option<Arc<ProbeBaseline>>,
    /// Symptom found by the comparison; stays until the process ends.
    pub(crate) altered: Option<HealthSymptom>,
    pub(crate) is_asking: bool,
    /// Earliest time of the next question.
    pub(crate) rests_until: Option<Instant>,
    /// Tries without a usable answer.
    pub(crate) unusable: u32,
}

impl HealthTracker {
    pub(crate) fn new(common: &CommonConfig, command: &ServerCommand) -> Self {
        let mut policy = common.health.clone();
        if let Some(tokens) = hints::batch_size(command) {
            policy.prefill_step = tokens;
        }
        Self {
            health: HealthMonitor::new(&policy),
            faults_seen: None,
            speed: None,
            build: None,
            tells_slots: false,
            asked_idle: hints::may_ask_idle(command, None),
            wake: Duration::ZERO,
            standing: None,
            paging: common.health.paging,
            abandoned_prompt_limit: common.health.wedged_after,
            degraded: None,
            answers: AnswerTest::default(),
        }
    }

    pub(crate) fn note_ready(&mut self, command: &ServerCommand, props: &ServerProps, start: Duration) {
        self.build = props.build;
        self.tells_slots = props.reports_slots;
        self.asked_idle = hints::may_ask_idle(command, props.build);
        self.wake = if hints::unloads_when_idle(command) { start.saturating_mul(2) } else { Duration::ZERO };
    }

    /// Returns two flags: request the counters, and request the slots. A sleeping server gets no request,
    /// because a request would wake it.
    pub(crate) fn what_to_request(&self, in_flight: u32) -> (bool, bool) {
        (in_flight > 0 || self.asked_idle, in_flight > 0 && self.tells_slots && self.health.needs_query())
    }

    /// `uses` returns true for a GPU on which the process has memory.
    pub(crate) fn note_reading(
        &mut self,
        now: Instant,
        spawned: Instant,
        reading: &ProcessSample,
        cell: &GenerationCell,
        uses: impl Fn(GpuIndex) -> bool,
    ) {
        let at = now.saturating_duration_since(spawned);
        let answers = std::mem::take(&mut lock(&cell.outcomes).decodes);
        for answer in &answers {
            self.health.record_speed(at, answer.tokens, answer.ms / 1000.0, answer.busy);
        }
        self.speed = speed(&answers).or(self.speed);
        for prompt in std::mem::take(&mut lock(&cell.outcomes).prefills) {
            self.health.record_prompt(prompt.new, prompt.all, prompt.ms);
        }
        let decodes = reading.answers.metrics.and_then(|metrics| metrics.decodes);
        let hindered = self.is_hindered(now, reading.standing);
        let (compute_errors, faulty_answers) = {
            let outcomes = lock(&cell.outcomes);
            (outcomes.compute_errors, outcomes.faulty_answers)
        };
        self.health.observe(&HealthObservation {
            at,
            awaited: cell.pulses.awaited_output(self.abandoned_prompt_limit),
            moves: cell.pulses.progress_count(),
            decodes,
            slots: reading.answers.slots,
            tells: self.tells_slots,
            gaps: cell.pulses.gap_stats(),
            hindered,
            wake: self.wake,
            compute_errors,
            faulty_answers,
        });
        self.note_faults(reading, uses);
    }

    /// True if, since the last reading, the process was stopped (SIGSTOP) or waited for pages from disk.
    fn is_hindered(&mut self, at: Instant, standing: Option<ProcessRunState>) -> bool {
        let Some(now) = standing else { return false };
        let before = self.standing.replace((at, now));
        let stopped = now.stopped || before.is_some_and(|(_, before)| before.stopped);
        let paged = before.is_some_and(|(then, before)| {
            let most = self.paging.saturating_mul(at.saturating_duration_since(then).as_secs().max(1));
            now.major_faults.saturating_sub(before.major_faults) > most
        });
        stopped || paged
    }

    fn note_faults(&mut self, reading: &ProcessSample, uses: impl Fn(GpuIndex) -> bool) {
        let Some(devices) = &reading.devices else { return };
        // Faults before the first reading belong to an earlier process.
        let seen = *self.faults_seen.get_or_insert_with(|| devices.last_fault());
        for fault in devices.faults.iter().filter(|fault| fault.number > seen) {
            let xid = match fault.fault {
                GpuFault::Xid(xid) => xid,
                GpuFault::Lost => Some(XID_OFF_THE_BUS),
                GpuFault::Ecc(_) => None,
            };
            if let Some(xid) = xid
                && uses(fault.gpu)
            {
                self.health.record_xid(fault.gpu, xid);
            }
        }
        self.faults_seen = Some(seen.max(devices.last_fault()));
    }

    pub(crate) fn symptoms(&self) -> Vec<HealthSymptom> {
        self.health.symptoms().into_iter().chain(self.answers.altered).collect()
    }

    pub(crate) fn show(&self, cell: &GenerationCell) -> HealthView {
        let slow = self.symptoms().into_iter().find_map(|symptom| match symptom {
            HealthSymptom::SlowDecode { baseline, .. } => Some(baseline),
            _ => None,
        });
        let stalled = self.health.stalled().filter(|(stalled, _)| *stalled >= MIN_SHOWN_STALL);
        HealthView {
            compute_errors: lock(&cell.outcomes).compute_errors,
            decode_rate: self.speed,
            decode_baseline: slow,
            stalled_for: stalled.map(|(stalled, _)| stalled),
            stalled_limit: stalled.and_then(|(_, limit)| Duration::try_from_secs_f64(limit.seconds).ok()),
        }
    }
}

/// Tokens per second of one slot, averaged over all these answers.
fn speed(answers: &VecDeque<DecodeSpeed>) -> Option<f64> {
    let tokens: u64 = answers.iter().map(|answer| answer.tokens).sum();
    let seconds = answers.iter().map(|answer| answer.ms).sum::<f64>() / 1000.0;
    (tokens > 0 && seconds > 0.0).then(|| units::as_f64(tokens) / seconds)
}
