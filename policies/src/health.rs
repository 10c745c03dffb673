//! Whether a backend is ill in other ways than by its memory.
//!
//! | symptom | sign | what it calls for |
//! |---|---|---|
//! | wedged | work in flight, no token counted and no byte streamed for long | drain, which ends by its deadline |
//! | compute errors | errors of the computation in a row, not one success between them | drain: it answers nothing but errors |
//! | device fault | an Xid that ends a process's use of its GPU | drain |
//! | slow decode | tokens per second and busy slot fall far below the backend's own | when quiet, if the mode allows |
//!
//! It never looks at latency alone: a busy server is slow and sound.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::recycle::{Action, Reason};
use crate::sample::{GpuIndex, Series};

/// The numbers. Reasons: `defaults.toml`, section `[health]`.
pub type HealthPolicy = crate::defaults::Health;

/// A sign of illness.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Symptom {
    /// Work is in flight and nothing has moved for so many seconds.
    Wedged {
        /// Whole seconds without progress.
        seconds: u64,
    },
    /// So many answers in a row said that computing failed.
    ComputeErrors {
        /// Answers in a row.
        in_a_row: u32,
    },
    /// It decodes at this share of its own speed.
    SlowDecode {
        /// Tokens per second and busy slot now.
        now: f64,
        /// And when it was young.
        baseline: f64,
    },
    /// Its GPU reported a fault.
    DeviceFault {
        /// Which GPU.
        gpu: GpuIndex,
        /// The driver's number of the fault.
        xid: u64,
    },
}

impl Symptom {
    /// The label of it.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::Wedged { .. } => Reason::Wedged,
            Self::ComputeErrors { .. } => Reason::ComputeErrors,
            Self::SlowDecode { .. } => Reason::SlowDecode,
            Self::DeviceFault { .. } => Reason::DeviceFault,
        }
    }

    /// What it calls for.
    pub const fn action(&self) -> Action {
        match self {
            Self::SlowDecode { .. } => Action::RecycleWhenQuiet,
            Self::Wedged { .. } | Self::ComputeErrors { .. } | Self::DeviceFault { .. } => Action::DrainNow,
        }
    }

    /// The GPU that it is about, if one is.
    pub const fn series(&self) -> Option<Series> {
        match self {
            Self::DeviceFault { gpu, .. } => Some(Series::Vram(*gpu)),
            _ => None,
        }
    }
}

impl std::fmt::Display for Symptom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Wedged { seconds } => {
                write!(f, "requests are in flight and nothing has moved for {seconds} s")
            }
            Self::ComputeErrors { in_a_row } => {
                write!(f, "the last {in_a_row} answers said that computing failed, and none succeeded")
            }
            Self::SlowDecode { now, baseline } => {
                write!(f, "it decodes {now:.1} tokens/s per busy slot and once did {baseline:.1}")
            }
            Self::DeviceFault { gpu, xid } => write!(f, "GPU {} reported Xid {xid}", gpu.0),
        }
    }
}

/// One look at a generation. Counters only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Look {
    /// Time since the caller's epoch; never goes back.
    pub at: Duration,
    /// Requests in flight.
    pub in_flight: u32,
    /// Bytes of answers that it has streamed since its spawn.
    pub bytes_streamed: u64,
    /// Its count of decodes since its spawn (`n_decode_total`); `None` if it does not tell.
    pub decodes: Option<u64>,
    /// Answers in a row, up to now, that said that computing failed. Refusals, bad requests and clients that leave neither
    /// count nor end the streak.
    pub compute_errors: u32,
}

/// Watches one generation.
#[derive(Clone, Debug)]
pub struct Health {
    policy: HealthPolicy,
    last: Look,
    /// When something moved last, or when the first of the present requests came.
    progress: Duration,
    /// Looks in a row without progress.
    still: u32,
    faults: Vec<(GpuIndex, u64)>,
    /// By the number of busy slots: 1, 2 and 3, 4 to 7, 8 and more. A slot among eight is slower than a lonely one.
    speeds: [Speed; 4],
}

/// Looks without progress that a wedge needs: a machine that slept has a long pause between two looks.
const STILL_LOOKS: u32 = 3;

impl Health {
    /// For a generation that has just become ready.
    pub fn new(policy: &HealthPolicy) -> Self {
        Self {
            policy: policy.clone(),
            last: Look::default(),
            progress: Duration::ZERO,
            still: 0,
            faults: Vec::new(),
            speeds: Default::default(),
        }
    }

    /// Takes a look in.
    pub fn observe(&mut self, look: &Look) {
        let last = std::mem::replace(&mut self.last, *look);
        let moved = look.bytes_streamed > last.bytes_streamed || look.decodes > last.decodes;
        if look.in_flight == 0 || last.in_flight == 0 || moved {
            (self.progress, self.still) = (look.at, 0);
        } else {
            self.still = self.still.saturating_add(1);
        }
    }

    /// Takes the speed of one answer in: tokens generated, the seconds that this took, and the requests in flight beside
    /// it, itself included.
    #[expect(clippy::cast_precision_loss, reason = "tokens of one answer")]
    pub fn speed(&mut self, at: Duration, tokens: u64, seconds: f64, busy: u32) {
        let speed = tokens as f64 / seconds;
        if tokens == 0 || !speed.is_finite() || speed <= 0.0 {
            return;
        }
        let bucket = busy.max(1).ilog2().min(3) as usize;
        self.speeds[bucket].take(at, speed, &self.policy);
    }

    /// The driver reported a fault on a GPU that the backend uses.
    pub fn xid(&mut self, gpu: GpuIndex, xid: u64) {
        if is_fatal(xid) && !self.faults.contains(&(gpu, xid)) {
            self.faults.push((gpu, xid));
        }
    }

    /// What it suffers from now, the weightiest first.
    pub fn symptoms(&self) -> Vec<Symptom> {
        let fault = self.faults.first().map(|(gpu, xid)| Symptom::DeviceFault { gpu: *gpu, xid: *xid });
        let streak = self.last.compute_errors;
        let errors = (self.policy.compute_errors > 0 && streak >= self.policy.compute_errors)
            .then_some(Symptom::ComputeErrors { in_a_row: streak });
        let since = self.last.at.saturating_sub(self.progress);
        let wedged =
            (self.last.in_flight > 0 && self.still >= STILL_LOOKS && since >= self.policy.wedged_after)
                .then_some(Symptom::Wedged { seconds: since.as_secs() });
        let slow = self.speeds.iter().find_map(|speed| speed.symptom(&self.policy));
        [fault, errors, wedged, slow].into_iter().flatten().collect()
    }
}

/// Speeds at about the same number of busy slots.
#[derive(Clone, Debug, Default)]
struct Speed {
    /// When the present window began; `None` before the first answer.
    begun: Option<Duration>,
    readings: Vec<f64>,
    /// Medians of the first windows.
    first: Vec<f64>,
    /// Slow windows in a row, and the last median of them.
    slow: usize,
    now: f64,
}

/// Readings of one window that are kept: their median is as good as that of more.
const READINGS_KEPT: usize = 1024;

impl Speed {
    fn take(&mut self, at: Duration, speed: f64, policy: &HealthPolicy) {
        let begun = *self.begun.get_or_insert(at);
        if at.saturating_sub(begun) >= policy.speed_window
            && self.readings.len() >= policy.speed_readings.max(1)
        {
            let median = median(&mut self.readings);
            self.readings.clear();
            self.begun = Some(at);
            self.judge(median, policy);
        }
        if self.readings.len() < READINGS_KEPT {
            self.readings.push(speed);
        }
    }

    fn judge(&mut self, median: f64, policy: &HealthPolicy) {
        if self.first.len() < policy.speed_baseline.max(1) {
            self.first.push(median);
            return;
        }
        let slow = self.baseline().is_some_and(|baseline| median < baseline * policy.speed_slow);
        self.now = median;
        self.slow = if slow { self.slow.saturating_add(1) } else { 0 };
    }

    fn baseline(&self) -> Option<f64> {
        let mut first = self.first.clone();
        (!first.is_empty()).then(|| median(&mut first))
    }

    fn symptom(&self, policy: &HealthPolicy) -> Option<Symptom> {
        let baseline = self.baseline().filter(|_| self.slow >= policy.speed_persists.max(1))?;
        Some(Symptom::SlowDecode { now: self.now, baseline })
    }
}

/// The middle one, the upper of two; 0 of none.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Whether an Xid means that no process can go on with the GPU as it is.
///
/// | Xid | what (NVIDIA, "Xid Errors") |
/// |---|---|
/// | 48 | uncorrectable double-bit ECC error |
/// | 62 | the power controller halted |
/// | 64 | remapping of a bad row failed |
/// | 79 | the GPU has fallen off the bus |
/// | 95 | uncontained ECC error |
/// | 119, 120 | the GPU's system processor does not answer, or failed |
/// | 140 | unrecovered ECC error |
///
/// Not fatal here: faults of one program (13, 31, 43, 45, 94), which NVML does not tie to a process; if it was ours,
/// errors of the computation or an exit show it. Nor notes and corrected errors (63, 92, 154) and links (74), which
/// traffic may route around.
pub const fn is_fatal(xid: u64) -> bool {
    matches!(xid, 48 | 62 | 64 | 79 | 95 | 119 | 120 | 140)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn health() -> Health {
        Health::new(&crate::defaults().health)
    }

    fn minutes(n: u64) -> Duration {
        Duration::from_secs(n * 60)
    }

    fn at(minute: u64) -> Look {
        Look { at: minutes(minute), in_flight: 1, ..Look::default() }
    }

    fn names(health: &Health) -> Vec<Reason> {
        health.symptoms().iter().map(Symptom::reason).collect()
    }

    #[test]
    fn work_in_flight_without_progress_for_long_is_a_wedge() {
        let mut health = health();
        for minute in 0..15 {
            health.observe(&at(minute));
            assert_eq!(health.symptoms(), [], "minute {minute}");
        }
        health.observe(&at(15));
        assert_eq!(health.symptoms(), [Symptom::Wedged { seconds: 900 }]);
        health.observe(&Look { bytes_streamed: 1, ..at(16) });
        assert_eq!(health.symptoms(), [], "it moves again");
    }

    #[test]
    fn a_long_prefill_that_counts_decodes_and_an_idle_night_are_no_wedge() {
        let mut health = health();
        for minute in 0..60 {
            health.observe(&Look { decodes: Some(minute), ..at(minute) });
        }
        assert_eq!(health.symptoms(), []);
        for minute in 60..600 {
            health.observe(&Look { in_flight: 0, decodes: Some(59), ..at(minute) });
        }
        health.observe(&Look { decodes: Some(59), ..at(600) });
        assert_eq!(health.symptoms(), [], "the request has only just come");
    }

    #[test]
    fn a_machine_that_slept_with_a_request_in_flight_is_not_wedged_when_it_wakes() {
        let mut health = health();
        health.observe(&at(0));
        health.observe(&at(600));
        assert_eq!(health.symptoms(), []);
    }

    #[test]
    fn errors_of_the_computation_in_a_row_are_a_symptom_and_a_success_ends_it() {
        let mut health = health();
        let errors = |compute_errors| Look { in_flight: 0, compute_errors, ..at(1) };
        health.observe(&errors(7));
        assert_eq!(health.symptoms(), []);
        health.observe(&errors(8));
        assert_eq!(health.symptoms(), [Symptom::ComputeErrors { in_a_row: 8 }]);
        assert_eq!(health.symptoms()[0].action(), Action::DrainNow);
        health.observe(&errors(0));
        assert_eq!(health.symptoms(), []);
    }

    #[test]
    fn a_gpu_that_fell_off_the_bus_is_a_symptom_and_another_programs_fault_is_not() {
        let mut health = health();
        health.xid(GpuIndex(1), 31);
        assert_eq!(health.symptoms(), []);
        health.xid(GpuIndex(1), 79);
        health.xid(GpuIndex(1), 79);
        assert_eq!(health.symptoms(), [Symptom::DeviceFault { gpu: GpuIndex(1), xid: 79 }]);
        assert_eq!(health.symptoms()[0].series(), Some(Series::Vram(GpuIndex(1))));
    }

    /// Ten answers a minute, each at this speed.
    fn answers(health: &mut Health, from: u64, to: u64, speed: f64, busy: u32) {
        for second in (from * 60..to * 60).step_by(6) {
            health.speed(Duration::from_secs(second), 100, 100.0 / speed, busy);
        }
    }

    #[test]
    fn decoding_at_less_than_half_of_its_own_speed_for_half_an_hour_is_a_symptom() {
        let mut health = health();
        answers(&mut health, 0, 60, 40.0, 1);
        answers(&mut health, 60, 85, 15.0, 1);
        assert_eq!(health.symptoms(), [], "not for long enough");
        answers(&mut health, 85, 105, 15.0, 1);
        let [Symptom::SlowDecode { now, baseline }] = health.symptoms()[..] else { panic!("{health:?}") };
        assert!((now - 15.0).abs() < 1e-9 && (baseline - 40.0).abs() < 1e-9, "{now} {baseline}");
        answers(&mut health, 105, 120, 38.0, 1);
        assert_eq!(health.symptoms(), [], "it has recovered");
    }

    #[test]
    fn more_slots_at_a_time_are_not_slowness() {
        let mut health = health();
        answers(&mut health, 0, 60, 40.0, 1);
        answers(&mut health, 60, 180, 12.0, 8);
        assert_eq!(names(&health), []);
    }

    #[test]
    fn single_slow_answers_do_not_move_the_median() {
        let mut health = health();
        answers(&mut health, 0, 60, 40.0, 1);
        for minute in 60..180 {
            answers(&mut health, minute, minute + 1, 40.0, 1);
            for _ in 0..4 {
                health.speed(minutes(minute), 100, 100.0, 1);
            }
        }
        assert_eq!(names(&health), []);
    }

    proptest! {
        #[test]
        fn whatever_moves_now_and_then_is_never_wedged(
            steps in proptest::collection::vec((1u64..14, 0u32..4, any::<bool>()), 1..100)
        ) {
            let mut health = health();
            let mut look = Look::default();
            for (minutes_later, in_flight, by_bytes) in steps {
                look.at += minutes(minutes_later);
                look.in_flight = in_flight;
                if by_bytes { look.bytes_streamed += 1 } else { look.decodes = Some(look.decodes.unwrap_or(0) + 1) }
                health.observe(&look);
                prop_assert!(health.symptoms().is_empty());
            }
        }

        #[test]
        fn senseless_speeds_are_passed_over(tokens in 0u64..3, seconds in prop_oneof![Just(f64::NAN), Just(0.0), Just(-1.0), Just(f64::INFINITY)]) {
            let mut health = health();
            for minute in 0..200 {
                health.speed(minutes(minute), tokens, seconds, 1);
            }
            prop_assert!(health.symptoms().is_empty());
        }
    }
}
