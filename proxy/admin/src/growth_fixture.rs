//! A fleet with a backend that leaks, for tests of this crate and of the program.

use std::sync::Arc;
use std::time::Duration;

use warden_policies::growth::{
    AllowanceFill, GrowthBlame, GrowthForecast, GrowthVerdict, IntervalEstimate, SeriesGrowth,
    WorkUnit as Work,
};
use warden_policies::lifecycle::BackendPhase;
use warden_policies::recycle::RecycleHindrance;
use warden_policies::sample::{HostMemory, VramReading, VramSource};
use warden_policies::{
    GenerationId, GpuIndex, MemoryKind, ModelName, Reason, RecycleAction, RecycleDecision,
};
use warden_supervisor::{
    BackendView, DeviceView, FleetView, ForecastView, HealthView, MemoryView, ModelState, ModelView,
    PolicyView,
};

fn interval(value: f64) -> IntervalEstimate {
    IntervalEstimate { value, low: value / 2.0, high: value * 2.0 }
}

/// A backend that leaks host memory with each image, and whose VRAM on GPU 0 is known.
pub(crate) fn leaking() -> BackendView {
    let growth = SeriesGrowth {
        series: MemoryKind::Host,
        verdict: GrowthVerdict::Leaking,
        since_request: 77,
        slope: Some(interval(4.0)),
        baseline: Some(500),
        floor: Some(900),
        fill: AllowanceFill { allowed: 100, used: 80 },
        blame: Some(GrowthBlame::Pays { unit: Work::Image, bytes_per_unit: 16.0, share: 0.9 }),
        law: None,
    };
    let forecast = GrowthForecast { limit: 1000, requests: interval(25.0), seconds: Some(interval(50.0)) };
    let decision = RecycleDecision {
        reason: Some(Reason::Growth),
        series: Some(MemoryKind::Host),
        limit_bytes: Some(1000),
        why_not: Some(RecycleHindrance::Observing { would: RecycleAction::RecycleWhenQuiet }),
        ..RecycleDecision::OBSERVE
    };
    BackendView {
        degraded: None,
        replica: 0,
        generation: Some(GenerationId(3)),
        phase: BackendPhase::Ready,
        pid: Some(1),
        program: None,
        ready_since: None,
        in_flight: 0,
        slots: None,
        host: Some(HostMemory { anon: 1000, swap: 50, rss: 2000 }),
        host_at_ready: None,
        work: warden_policies::WorkDone::default(),
        report: None,
        memory: MemoryView {
            vram: vec![VramReading { gpu: GpuIndex(0), bytes: 300, source: VramSource::Estimate }],
            growth: vec![growth],
            forecasts: vec![ForecastView { series: MemoryKind::Host, reason: Reason::HostSoft, forecast }],
            request_rate: Some(0.5),
            ..MemoryView::default()
        },
        reclaim: warden_supervisor::ReclaimView::default(),
        health: HealthView {
            stalled_limit: None,
            compute_errors: 2,
            decode_rate: Some(30.5),
            decode_baseline: Some(40.0),
            stalled_for: Some(Duration::from_millis(1500)),
        },
        next: Some(PolicyView { decision, held: None }),
    }
}

/// A fleet of one model with these backends and one GPU.
pub(crate) fn fleet(backends: Vec<BackendView>) -> FleetView {
    let model = ModelView {
        state: ModelState::Loaded,
        backends,
        was_ready: true,
        ..ModelView::unloaded(ModelName::new("m"))
    };
    let device = DeviceView {
        gpu: GpuIndex(0),
        total: Some(8000),
        used: Some(5000),
        free: Some(3000),
        temperature: Some(40),
        xid: Some(31),
        ..DeviceView::default()
    };
    FleetView { number: 1, models: vec![Arc::new(model)], devices: vec![device], ..FleetView::default() }
}
