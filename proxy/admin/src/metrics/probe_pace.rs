//! Counters of answered probes, which the probe thread writes and the pool metrics show.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;

use super::families::FloatGauge;

/// Atomics, so that the answering thread never waits for a reader of the counters.
#[derive(Clone, Debug, Default)]
pub struct ProbePace {
    pub(crate) answers: Counter,
    pub(crate) late: Counter,
    /// Longest time in seconds, which only the answering thread writes.
    pub(crate) longest: FloatGauge,
}

impl ProbePace {
    pub(crate) fn record(&self, took: Duration, late: Duration) {
        self.answers.inc();
        if took >= late {
            self.late.inc();
        }
        if took.as_secs_f64() > self.longest.get() {
            self.longest.set(took.as_secs_f64());
        }
    }
}
