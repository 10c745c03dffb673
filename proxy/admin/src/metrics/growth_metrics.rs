//! Metrics of memory growth: the leak detector's verdict for each series, forecasts, and the policy's next
//! action. They are read from the fleet's view at each scrape; a metric whose value is unknown has no line.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Unit;
use warden_policies::growth::{GrowthBlame, GrowthVerdict, SeriesGrowth};
use warden_policies::sample::VramSource;
use warden_supervisor::{BackendView, FleetView, PolicyView};

use super::families::to_gauge;
use super::families::{ClearGauges as _, families, labels};

labels! {
    SeriesLabels { model: String, replica: u32, series: String }
    VerdictLabels { model: String, replica: u32, series: String, verdict: &'static str }
    BlameLabels { model: String, replica: u32, series: String, unit: &'static str }
    ComponentLabels { model: String, replica: u32, series: String, component: &'static str }
    LimitLabels { model: String, replica: u32, series: String, limit: &'static str }
    VramLabels { model: String, replica: u32, gpu: u32, source: &'static str }
    ReplicaLabels { model: String, replica: u32 }
    ActionLabels { model: String, replica: u32, action: &'static str, reason: &'static str }
}

type FractionGauge = Gauge<f64, AtomicU64>;

families! {
    pub(super) struct GrowthMetrics () {
        vram: Family<VramLabels, Gauge>
            = "backend_vram" in Unit::Bytes,
            "VRAM of the replica's processes on a GPU. `source` is `process` where the driver reports it, \
             `estimate` where it is the increase of the GPU's memory in use.";
        vram_unknown: Family<ReplicaLabels, Gauge>
            = "backend_vram_unknown",
            "1 if VRAM is not known, so that its policy is off; `status` says why.";
        components: Family<ComponentLabels, Gauge>
            = "backend_memory_component" in Unit::Bytes,
            "A memory of the newest process, split by what it is. `series` is `host`, `vram0`, `vram1`, …; \
             `component` is `settled` (held once it had settled: weights, KV, buffers), `declared` (declared \
             caches filled since) and `growth` (all above). Their sum is what was read.";
        verdict: Family<VerdictLabels, Gauge>
            = "backend_growth_verdict",
            "Verdict on a memory: 1 for one of `warming`, `steady`, `bounded`, `suspected`, `leaking`, 0 for \
             the others.";
        slope: Family<SeriesLabels, FractionGauge>
            = "backend_growth" in Unit::Other("bytes_per_request".to_owned()),
            "Growth for each request, once it is known.";
        speed: Family<SeriesLabels, FractionGauge>
            = "backend_growth" in Unit::Other("bytes_per_second".to_owned()),
            "Growth a second, at the present rate of requests; times 3600 it is growth an hour.";
        blame: Family<BlameLabels, FractionGauge>
            = "backend_growth_blame" in Unit::Other("bytes_per_unit".to_owned()),
            "Growth for each unit of work that is blamed for a leak: `request`, `prompt_token`, \
             `output_token`, `image`, `audio`, `hour`. No line while no unit is blamed.";
        baseline: Family<SeriesLabels, Gauge>
            = "backend_growth_baseline" in Unit::Bytes, "Memory of the process when it had settled.";
        allowed: Family<SeriesLabels, Gauge>
            = "backend_allowance" in Unit::Bytes,
            "Declared caches beyond that: growth within them is no leak.";
        allowed_used: Family<SeriesLabels, Gauge>
            = "backend_allowance_used" in Unit::Bytes, "How much of the allowance is in use.";
        limit: Family<LimitLabels, Gauge>
            = "backend_forecast_limit" in Unit::Bytes,
            "A limit to which growth is forecast. `limit` is the reason of a replacement at it: `host_soft`, \
             `vram_hard`, …";
        left_requests: Family<LimitLabels, FractionGauge>
            = "backend_forecast" in Unit::Other("requests".to_owned()), "Requests until the limit is reached.";
        left_seconds: Family<LimitLabels, FractionGauge>
            = "backend_forecast" in Unit::Seconds, "Time until the limit is reached, at the present rate of requests.";
        earliest: Family<LimitLabels, FractionGauge>
            = "backend_forecast_earliest" in Unit::Seconds, "The same, if growth is as fast as the readings allow.";
        latest: Family<LimitLabels, FractionGauge>
            = "backend_forecast_latest" in Unit::Seconds,
            "The same, if it is as slow as they allow. No line where they allow that it does not grow.";
        action: Family<ActionLabels, Gauge>
            = "backend_policy_next",
            "1 for what the policy does next: `observe`, `recycle_when_quiet`, `drain_now`, `kill_now`. \
             `observe` with a reason is what it would do if it were not configured to observe.";
        held: Family<ReplicaLabels, Gauge>
            = "backend_policy_held", "1 if this action is held back or waits; `status` says by what.";
        errors: Family<ReplicaLabels, Gauge>
            = "backend_compute_errors", "Consecutive answers that report a compute error.";
        stalled: Family<ReplicaLabels, FractionGauge>
            = "backend_stalled" in Unit::Seconds, "Time that work has been in flight without progress.";
        decode: Family<ReplicaLabels, FractionGauge>
            = "backend_decode" in Unit::Other("tokens_per_second".to_owned()), "Recent speed of a busy slot.";
        decode_baseline: Family<ReplicaLabels, FractionGauge>
            = "backend_decode_baseline" in Unit::Other("tokens_per_second".to_owned()),
            "Speed of a busy slot when the process was fresh.";
    }
}

impl GrowthMetrics {
    /// Clears all gauges and sets the known ones again, so that unknown values have no line.
    pub(super) fn read(&self, view: &FleetView) {
        self.clear_gauges();
        for model in view.models.iter().chain(&view.canaries) {
            for (number, backend) in model.backends.iter().enumerate() {
                // While one process replaces another, a replica has two. Report the growth of the newer
                // process, which comes last.
                let mut later = model.backends.iter().skip(number + 1);
                let is_newest = !later.any(|other| other.pid.is_some() && other.replica == backend.replica);
                self.read_backend(model.name.as_str(), backend, is_newest);
            }
        }
    }

    fn read_backend(&self, model: &str, backend: &BackendView, is_newest: bool) {
        if backend.pid.is_none() {
            return;
        }
        let replica = ReplicaLabels { model: model.to_owned(), replica: backend.replica };
        for vram in &backend.memory.vram {
            let source = match vram.source {
                VramSource::Process => "process",
                VramSource::Estimate => "estimate",
            };
            let labels =
                VramLabels { model: model.to_owned(), replica: backend.replica, gpu: vram.gpu.0, source };
            // Both processes of a replica hold VRAM, so add them up.
            self.vram.get_or_create(&labels).inc_by(to_gauge(vram.bytes));
        }
        if backend.memory.vram_unknown.is_some() {
            self.vram_unknown.get_or_create(&replica).set(1);
        }
        if !is_newest {
            return;
        }
        for growth in &backend.memory.growth {
            self.read_growth(&replica, growth, backend.memory.request_rate);
            if let Some(now) = backend.held(growth.series) {
                self.read_components(&replica, growth, now);
            }
        }
        for one in &backend.memory.forecasts {
            let labels = LimitLabels {
                model: model.to_owned(),
                replica: backend.replica,
                series: one.series.to_string(),
                limit: one.reason.as_str(),
            };
            self.limit.get_or_create(&labels).set(to_gauge(one.forecast.limit));
            self.left_requests.get_or_create(&labels).set(one.forecast.requests.value);
            let Some(seconds) = one.forecast.seconds else { continue };
            let all = [
                (&self.left_seconds, seconds.value),
                (&self.earliest, seconds.low),
                (&self.latest, seconds.high),
            ];
            // A forecast of `f64::MAX` seconds means that the limit is never reached, and has no line.
            for (gauge, seconds) in all.into_iter().filter(|(_, seconds)| *seconds < f64::MAX) {
                gauge.get_or_create(&labels).set(seconds);
            }
        }
        let health = &backend.health;
        self.errors.get_or_create(&replica).set(i64::from(health.compute_errors));
        self.stalled.get_or_create(&replica).set(health.stalled_for.map_or(0.0, |time| time.as_secs_f64()));
        for (gauge, speed) in
            [(&self.decode, health.decode_rate), (&self.decode_baseline, health.decode_baseline)]
        {
            if let Some(speed) = speed {
                gauge.get_or_create(&replica).set(speed);
            }
        }
        if let Some(next) = &backend.next {
            self.read_next(&replica, next);
        }
    }

    /// Sets the components of one kind of memory, whose current size is `now` bytes.
    fn read_components(&self, replica: &ReplicaLabels, growth: &SeriesGrowth, now: u64) {
        let settled = growth.baseline.map_or(now, |baseline| baseline.min(now));
        let declared = growth.fill.used.min(growth.fill.allowed).min(now - settled);
        let parts = [("settled", settled), ("declared", declared), ("growth", now - settled - declared)];
        for (component, bytes) in parts {
            let ReplicaLabels { model, replica } = replica.clone();
            let labels = ComponentLabels { model, replica, series: growth.series.to_string(), component };
            self.components.get_or_create(&labels).set(to_gauge(bytes));
        }
    }

    fn read_growth(&self, replica: &ReplicaLabels, growth: &SeriesGrowth, rate: Option<f64>) {
        let ReplicaLabels { model, replica } = replica.clone();
        let series = growth.series.to_string();
        for verdict in GrowthVerdict::ALL {
            let labels = VerdictLabels {
                model: model.clone(),
                replica,
                series: series.clone(),
                verdict: verdict.as_str(),
            };
            self.verdict.get_or_create(&labels).set(i64::from(verdict == growth.verdict));
        }
        let labels = SeriesLabels { model: model.clone(), replica, series: series.clone() };
        if let Some(slope) = growth.slope {
            self.slope.get_or_create(&labels).set(slope.value);
            if let Some(rate) = rate {
                self.speed.get_or_create(&labels).set(slope.value * rate);
            }
        }
        if let Some(baseline) = growth.baseline {
            self.baseline.get_or_create(&labels).set(to_gauge(baseline));
        }
        if growth.fill.allowed > 0 {
            self.allowed.get_or_create(&labels).set(to_gauge(growth.fill.allowed));
            self.allowed_used.get_or_create(&labels).set(to_gauge(growth.fill.used));
        }
        if let Some(GrowthBlame::Pays { unit, bytes_per_unit, .. }) = &growth.blame {
            let labels = BlameLabels { model, replica, series, unit: unit.as_str() };
            self.blame.get_or_create(&labels).set(*bytes_per_unit);
        }
    }

    fn read_next(&self, replica: &ReplicaLabels, next: &PolicyView) {
        let ReplicaLabels { model, replica: number } = replica.clone();
        let action = next.decision.action.as_str();
        let reason = next.decision.reason;
        let reason = reason.map_or("", warden_policies::Reason::as_str);
        self.action.get_or_create(&ActionLabels { model, replica: number, action, reason }).set(1);
        let held = next.held.is_some() || next.decision.why_not.is_some();
        self.held.get_or_create(replica).set(i64::from(held));
    }
}

#[cfg(test)]
#[path = "growth_metrics_tests.rs"]
mod tests;
