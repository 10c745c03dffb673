//! Numbers about growth, for Prometheus: what the detector says of each memory, what is forecast, what the policy does
//! next, and the GPUs. All are read from the fleet's picture at each scrape; what is not known has no line.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Unit;
use warden_policies::growth::{Blame, Growth, Verdict};
use warden_policies::sample::VramSource;
use warden_supervisor::{BackendView, DeviceView, FleetView, PolicyView};

use super::families::{families, labels};
use super::metrics::whole;

labels! {
    SeriesLabels { model: String, replica: u32, series: String }
    VerdictLabels { model: String, replica: u32, series: String, verdict: &'static str }
    BlameLabels { model: String, replica: u32, series: String, unit: &'static str }
    LimitLabels { model: String, replica: u32, series: String, limit: &'static str }
    VramLabels { model: String, replica: u32, gpu: u32, source: &'static str }
    ReplicaLabels { model: String, replica: u32 }
    ActionLabels { model: String, replica: u32, action: &'static str, reason: &'static str }
    GpuLabels { gpu: u32 }
}

type Fraction = Gauge<f64, AtomicU64>;

families! {
    pub(super) struct GrowthMetrics () {
        vram: Family<VramLabels, Gauge> = "backend_vram" in Unit::Bytes, "VRAM of the process group";
        vram_unknown: Family<ReplicaLabels, Gauge>
            = "backend_vram_unknown", "1 if VRAM is not known, so that its policy is off";
        verdict: Family<VerdictLabels, Gauge> = "backend_growth_verdict", "1 for what a memory says now";
        slope: Family<SeriesLabels, Fraction>
            = "backend_growth" in Unit::Other("bytes_per_request".to_owned()), "Growth for each request";
        blame: Family<BlameLabels, Fraction>
            = "backend_growth_blame" in Unit::Other("bytes_per_unit".to_owned()),
            "What each unit of work pays that is blamed for growth";
        baseline: Family<SeriesLabels, Gauge>
            = "backend_growth_baseline" in Unit::Bytes, "Memory of the process when it had settled";
        allowed: Family<SeriesLabels, Gauge>
            = "backend_allowance" in Unit::Bytes, "What the server may keep beyond that";
        allowed_used: Family<SeriesLabels, Gauge> = "backend_allowance_used" in Unit::Bytes, "How much of it is in use";
        limit: Family<LimitLabels, Gauge>
            = "backend_forecast_limit" in Unit::Bytes, "The limit to which growth is forecast";
        left_requests: Family<LimitLabels, Fraction>
            = "backend_forecast" in Unit::Other("requests".to_owned()), "Requests until the limit is reached";
        left_seconds: Family<LimitLabels, Fraction>
            = "backend_forecast" in Unit::Seconds, "Time until the limit is reached";
        action: Family<ActionLabels, Gauge> = "backend_policy_next", "1 for what the policy does next";
        held: Family<ReplicaLabels, Gauge> = "backend_policy_held", "1 if that is held back";
        errors: Family<ReplicaLabels, Gauge>
            = "backend_compute_errors", "Answers in a row that say that computing failed";
        stalled: Family<ReplicaLabels, Fraction>
            = "backend_stalled" in Unit::Seconds, "Time with work in flight and no progress";
        decode: Family<ReplicaLabels, Fraction>
            = "backend_decode" in Unit::Other("tokens_per_second".to_owned()), "Speed of a busy slot";
        decode_baseline: Family<ReplicaLabels, Fraction>
            = "backend_decode_baseline" in Unit::Other("tokens_per_second".to_owned()),
            "Speed of a busy slot when the process was fresh";
        gpu_total: Family<GpuLabels, Gauge> = "gpu_memory" in Unit::Bytes, "Memory of the GPU";
        gpu_used: Family<GpuLabels, Gauge> = "gpu_memory_used" in Unit::Bytes, "Memory of the GPU in use by anybody";
        gpu_free: Family<GpuLabels, Gauge> = "gpu_memory_free" in Unit::Bytes, "Memory of the GPU that can be had";
        gpu_temperature: Family<GpuLabels, Gauge> = "gpu_temperature" in Unit::Celsius, "Temperature of the GPU";
        gpu_xid: Family<GpuLabels, Gauge> = "gpu_last_xid", "The last Xid error of the GPU";
    }
}

impl GrowthMetrics {
    /// Gauges are made anew, so that what is not known any more leaves no line behind.
    pub(super) fn read(&self, view: &FleetView) {
        self.clear();
        for model in view.models.iter().chain(&view.canaries) {
            // While one process replaces another, a replica has two: the newer one comes last and counts.
            for backend in &model.backends {
                self.read_backend(model.name.as_str(), backend);
            }
        }
        for device in &view.devices {
            self.read_device(device);
        }
    }

    fn clear(&self) {
        self.vram.clear();
        self.vram_unknown.clear();
        self.verdict.clear();
        self.slope.clear();
        self.blame.clear();
        for gauge in [&self.baseline, &self.allowed, &self.allowed_used] {
            gauge.clear();
        }
        self.left_requests.clear();
        self.left_seconds.clear();
        self.limit.clear();
        self.action.clear();
        for gauge in [&self.held, &self.errors] {
            gauge.clear();
        }
        for gauge in [&self.stalled, &self.decode, &self.decode_baseline] {
            gauge.clear();
        }
        for gauge in [&self.gpu_total, &self.gpu_used, &self.gpu_free, &self.gpu_temperature, &self.gpu_xid] {
            gauge.clear();
        }
    }

    fn read_backend(&self, model: &str, backend: &BackendView) {
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
            // Both processes of a replica hold VRAM.
            self.vram.get_or_create(&labels).inc_by(whole(vram.bytes));
        }
        if backend.memory.vram_unknown.is_some() {
            self.vram_unknown.get_or_create(&replica).set(1);
        }
        for growth in &backend.memory.growth {
            self.read_growth(&replica, growth);
        }
        for one in &backend.memory.forecasts {
            let labels = LimitLabels {
                model: model.to_owned(),
                replica: backend.replica,
                series: one.series.to_string(),
                limit: one.reason.as_str(),
            };
            self.limit.get_or_create(&labels).set(whole(one.forecast.limit));
            self.left_requests.get_or_create(&labels).set(one.forecast.requests.value);
            if let Some(seconds) = one.forecast.seconds {
                self.left_seconds.get_or_create(&labels).set(seconds.value);
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

    fn read_growth(&self, replica: &ReplicaLabels, growth: &Growth) {
        let ReplicaLabels { model, replica } = replica.clone();
        let series = growth.series.to_string();
        for verdict in
            [Verdict::Warming, Verdict::Steady, Verdict::Bounded, Verdict::Suspected, Verdict::Leaking]
        {
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
        }
        if let Some(baseline) = growth.baseline {
            self.baseline.get_or_create(&labels).set(whole(baseline));
        }
        if growth.fill.allowed > 0 {
            self.allowed.get_or_create(&labels).set(whole(growth.fill.allowed));
            self.allowed_used.get_or_create(&labels).set(whole(growth.fill.used));
        }
        if let Some(Blame::Pays { unit, bytes_per_unit, .. }) = &growth.blame {
            let labels = BlameLabels { model, replica, series, unit: unit.as_str() };
            self.blame.get_or_create(&labels).set(*bytes_per_unit);
        }
    }

    fn read_next(&self, replica: &ReplicaLabels, next: &PolicyView) {
        let ReplicaLabels { model, replica: number } = replica.clone();
        let (action, reason) = (next.decision.action.as_str(), next.decision.reason);
        let reason = reason.map_or("", warden_policies::Reason::as_str);
        self.action.get_or_create(&ActionLabels { model, replica: number, action, reason }).set(1);
        let held = next.held.is_some() || next.decision.why_not.is_some();
        self.held.get_or_create(replica).set(i64::from(held));
    }

    fn read_device(&self, device: &DeviceView) {
        let labels = GpuLabels { gpu: device.gpu.0 };
        let known = [
            (&self.gpu_total, device.total),
            (&self.gpu_used, device.used),
            (&self.gpu_free, device.free),
            (&self.gpu_temperature, device.temperature.map(u64::from)),
            (&self.gpu_xid, device.xid),
        ];
        for (gauge, value) in known {
            if let Some(value) = value {
                gauge.get_or_create(&labels).set(whole(value));
            }
        }
    }
}

#[cfg(test)]
#[path = "growth_metrics_tests.rs"]
pub(crate) mod tests;
