//! Numbers about growth, for Prometheus: what the detector says of each memory, what is forecast, what the policy does
//! next, and the GPUs. All are read from the fleet's picture at each scrape; what is not known has no line.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use warden_policies::growth::{Blame, Growth, Verdict};
use warden_policies::sample::VramSource;
use warden_supervisor::{BackendView, DeviceView, FleetView, PolicyView};

use super::metrics::whole;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SeriesLabels {
    model: String,
    replica: u32,
    series: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VerdictLabels {
    model: String,
    replica: u32,
    series: String,
    verdict: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BlameLabels {
    model: String,
    replica: u32,
    series: String,
    unit: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LimitLabels {
    model: String,
    replica: u32,
    series: String,
    limit: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VramLabels {
    model: String,
    replica: u32,
    gpu: u32,
    source: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReplicaLabels {
    model: String,
    replica: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ActionLabels {
    model: String,
    replica: u32,
    action: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuLabels {
    gpu: u32,
}

type Fraction = Gauge<f64, AtomicU64>;

#[derive(Default)]
pub(super) struct GrowthMetrics {
    vram: Family<VramLabels, Gauge>,
    vram_unknown: Family<ReplicaLabels, Gauge>,
    verdict: Family<VerdictLabels, Gauge>,
    slope: Family<SeriesLabels, Fraction>,
    blame: Family<BlameLabels, Fraction>,
    baseline: Family<SeriesLabels, Gauge>,
    allowed: Family<SeriesLabels, Gauge>,
    allowed_used: Family<SeriesLabels, Gauge>,
    left_requests: Family<LimitLabels, Fraction>,
    left_seconds: Family<LimitLabels, Fraction>,
    limit: Family<LimitLabels, Gauge>,
    action: Family<ActionLabels, Gauge>,
    held: Family<ReplicaLabels, Gauge>,
    errors: Family<ReplicaLabels, Gauge>,
    stalled: Family<ReplicaLabels, Fraction>,
    decode: Family<ReplicaLabels, Fraction>,
    decode_baseline: Family<ReplicaLabels, Fraction>,
    gpu_total: Family<GpuLabels, Gauge>,
    gpu_used: Family<GpuLabels, Gauge>,
    gpu_free: Family<GpuLabels, Gauge>,
    gpu_temperature: Family<GpuLabels, Gauge>,
    gpu_xid: Family<GpuLabels, Gauge>,
}

impl GrowthMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let per_request = || Unit::Other("bytes_per_request".to_owned());
        let per_unit = || Unit::Other("bytes_per_unit".to_owned());
        let speed = || Unit::Other("tokens_per_second".to_owned());
        registry.register_with_unit(
            "backend_vram",
            "VRAM of the process group",
            Unit::Bytes,
            self.vram.clone(),
        );
        registry.register(
            "backend_vram_unknown",
            "1 if VRAM is not known, so that its policy is off",
            self.vram_unknown.clone(),
        );
        registry.register("backend_growth_verdict", "1 for what a memory says now", self.verdict.clone());
        registry.register_with_unit(
            "backend_growth",
            "Growth for each request",
            per_request(),
            self.slope.clone(),
        );
        registry.register_with_unit(
            "backend_growth_blame",
            "What each unit of work pays that is blamed for growth",
            per_unit(),
            self.blame.clone(),
        );
        registry.register_with_unit(
            "backend_growth_baseline",
            "Memory of the process when it had settled",
            Unit::Bytes,
            self.baseline.clone(),
        );
        registry.register_with_unit(
            "backend_allowance",
            "What the server may keep beyond that",
            Unit::Bytes,
            self.allowed.clone(),
        );
        registry.register_with_unit(
            "backend_allowance_used",
            "How much of it is in use",
            Unit::Bytes,
            self.allowed_used.clone(),
        );
        registry.register_with_unit(
            "backend_forecast_limit",
            "The limit to which growth is forecast",
            Unit::Bytes,
            self.limit.clone(),
        );
        registry.register_with_unit(
            "backend_forecast",
            "Requests until the limit is reached",
            Unit::Other("requests".to_owned()),
            self.left_requests.clone(),
        );
        registry.register_with_unit(
            "backend_forecast",
            "Time until the limit is reached",
            Unit::Seconds,
            self.left_seconds.clone(),
        );
        registry.register("backend_policy_next", "1 for what the policy does next", self.action.clone());
        registry.register("backend_policy_held", "1 if that is held back", self.held.clone());
        registry.register(
            "backend_compute_errors",
            "Answers in a row that say that computing failed",
            self.errors.clone(),
        );
        registry.register_with_unit(
            "backend_stalled",
            "Time with work in flight and no progress",
            Unit::Seconds,
            self.stalled.clone(),
        );
        registry.register_with_unit("backend_decode", "Speed of a busy slot", speed(), self.decode.clone());
        registry.register_with_unit(
            "backend_decode_baseline",
            "Speed of a busy slot when the process was fresh",
            speed(),
            self.decode_baseline.clone(),
        );
        let gpus = [
            ("gpu_memory", "Memory of the GPU", &self.gpu_total),
            ("gpu_memory_used", "Memory of the GPU in use by anybody", &self.gpu_used),
            ("gpu_memory_free", "Memory of the GPU that can be had", &self.gpu_free),
        ];
        for (name, help, gauge) in gpus {
            registry.register_with_unit(name, help, Unit::Bytes, gauge.clone());
        }
        registry.register_with_unit(
            "gpu_temperature",
            "Temperature of the GPU",
            Unit::Celsius,
            self.gpu_temperature.clone(),
        );
        registry.register("gpu_last_xid", "The last Xid error of the GPU", self.gpu_xid.clone());
    }

    /// Gauges are made anew, so that what is not known any more leaves no line behind.
    pub(super) fn read(&self, view: &FleetView) {
        self.clear();
        for model in &view.models {
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
