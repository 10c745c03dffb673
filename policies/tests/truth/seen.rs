//! The detector's output on one leaking run, compared with the truth.

use warden_policies::growth::{GrowthBlame, GrowthMonitor, GrowthVerdict, SeriesGrowth, WorkUnit};
use warden_policies::{BackendSample, defaults};

use crate::leaks::{HOST, Leaking};
use crate::recorded::{MIB, RecordedLoad, real, whole};

/// Excess of a blamed share over the true share above which a blame is wrong.
const CLAIM: f64 = 0.25;
/// Number of forecasts examined in a run.
const LOOKS: u64 = 8;
/// Forecast limits, as shares of the growth that the rest of the run will bring.
const AHEAD: [f64; 2] = [0.25, 0.75];
/// Smallest growth to a limit: floors scatter by as much, so nearer limits are not examined.
const NEAREST: f64 = 64.0 * MIB;

/// A forecast, and the true number of requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Told {
    pub(crate) truth: f64,
    pub(crate) low: f64,
    pub(crate) value: f64,
    pub(crate) high: f64,
}

#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Request number of the first suspicion.
    pub(crate) suspected: Option<u64>,
    /// Request number of the first verdict "leaking".
    pub(crate) found: Option<u64>,
    /// Bytes leaked until then.
    pub(crate) cost: f64,
    pub(crate) first: Option<GrowthBlame>,
    pub(crate) last: Option<GrowthBlame>,
    /// The detector blamed a wrong unit at some time, even if only as a suspicion.
    pub(crate) ever_wrong: bool,
    /// The series was called harmless after the first verdict "leaking".
    pub(crate) fell_back: bool,
    /// Slope at the end, as a share of the true slope.
    pub(crate) slope: Option<f64>,
    pub(crate) told: Vec<Told>,
}

impl Seen {
    pub(crate) fn of(load: &RecordedLoad, kind: &Leaking, seed: u64) -> Self {
        let mut course = (kind.course)(seed);
        let mut grown: Vec<f64> = Vec::new();
        let samples = load.run(seed, kind.requests, |now| {
            let extra = course(now);
            grown.push(if kind.series == HOST { extra.host } else { extra.vram });
            extra
        });
        let mut this = Self::default();
        let mut monitor = GrowthMonitor::new(&defaults().growth);
        monitor.set_allowance(HOST, kind.declared);
        let mut ask_at = 0;
        for (at, sample) in samples.iter().enumerate() {
            monitor.observe(sample);
            let Some(growth) = own(&monitor, kind) else { continue };
            let requests = sample.work.requests;
            this.take(kind, growth, requests, grown[at]);
            if growth.verdict == GrowthVerdict::Leaking && requests >= ask_at {
                ask_at = requests + kind.requests / LOOKS;
                this.told.extend(
                    AHEAD.iter().filter_map(|part| told(&monitor, kind, &samples, &grown, at, *part)),
                );
            }
        }
        let (middle, end) = (samples.len() / 2, samples.len() - 1);
        let run = real(samples[end].work.requests - samples[middle].work.requests);
        let truth = (grown[end] - grown[middle]) / run;
        this.slope = own(&monitor, kind).and_then(|growth| growth.slope).map(|slope| slope.value / truth);
        this
    }

    fn take(&mut self, kind: &Leaking, growth: &SeriesGrowth, requests: u64, grown: f64) {
        self.ever_wrong |= is_wrong(kind.pays, growth.blame.as_ref());
        if growth.verdict >= GrowthVerdict::Suspected {
            self.suspected.get_or_insert(requests);
        }
        if growth.verdict == GrowthVerdict::Leaking {
            if self.found.is_none() {
                self.found = Some(requests);
                self.cost = grown;
                self.first.clone_from(&growth.blame);
            }
            self.last.clone_from(&growth.blame);
        } else {
            self.fell_back |= self.found.is_some();
        }
    }
}

fn own<'a>(monitor: &'a GrowthMonitor, kind: &Leaking) -> Option<&'a SeriesGrowth> {
    monitor.growth().iter().find(|growth| growth.series == kind.series)
}

/// Returns true if a blame names a wrong unit, or claims too large a share.
pub(crate) fn is_wrong(pays: &[(WorkUnit, f64)], blame: Option<&GrowthBlame>) -> bool {
    matches!(blame, Some(GrowthBlame::Pays { .. })) && !is_right(pays, blame)
}

/// Returns true if a blame names a right unit, and claims at most its share.
pub(crate) fn is_right(pays: &[(WorkUnit, f64)], blame: Option<&GrowthBlame>) -> bool {
    let Some(GrowthBlame::Pays { unit, share, .. }) = blame else { return false };
    pays.iter().any(|(paying, true_share)| paying == unit && *share <= true_share + CLAIM)
}

/// Compares a forecast with the truth, for a limit at this share of the remaining growth.
fn told(
    monitor: &GrowthMonitor,
    kind: &Leaking,
    samples: &[BackendSample],
    grown: &[f64],
    at: usize,
    part: f64,
) -> Option<Told> {
    let end = grown.len() - 1;
    let more = (grown[end] - grown[at]) * part;
    if more < NEAREST {
        return None;
    }
    let floor = own(monitor, kind)?.floor?;
    let read = (0..=at).rev().find(|at| samples[*at].charged(kind.series) == Some(floor))?;
    let reached = (at..=end).find(|later| grown[*later] >= grown[read] + more)?;
    let requests = monitor.forecast(kind.series, floor + whole(more))?.requests;
    let truth = real(samples[reached].work.requests - samples[at].work.requests);
    Some(Told { truth, low: requests.low, value: requests.value, high: requests.high })
}
