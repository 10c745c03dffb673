//! Metrics of growth, as text.

use super::*;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::time::Duration;
use warden_policies::growth::{
    AllowanceFill, GrowthForecast, GrowthVerdict, IntervalEstimate, WorkUnit as Work,
};
use warden_policies::lifecycle::BackendPhase;
use warden_policies::recycle::RecycleHindrance;
use warden_policies::sample::{HostMemory, VramReading};
use warden_policies::{
    GenerationId, GpuIndex, MemoryKind, ModelName, Reason, RecycleAction, RecycleDecision,
};
use warden_supervisor::{DeviceView, ForecastView, HealthView, MemoryView, ModelState, ModelView};

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

fn scrape(view: &FleetView) -> String {
    let metrics = GrowthMetrics::default();
    let mut registry = Registry::with_prefix("llama_warden");
    metrics.register(&mut registry);
    // Read twice, because gauges must be set and not added up.
    metrics.read(view);
    metrics.read(view);
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    text
}

#[test]
fn a_backend_that_leaks_shows_verdict_slope_blame_forecast_and_next_action() {
    let text = scrape(&fleet(vec![leaking()]));
    for line in [
        "backend_vram_bytes{model=\"m\",replica=\"0\",gpu=\"0\",source=\"estimate\"} 300",
        "backend_growth_verdict{model=\"m\",replica=\"0\",series=\"host\",verdict=\"leaking\"} 1",
        "backend_growth_verdict{model=\"m\",replica=\"0\",series=\"host\",verdict=\"steady\"} 0",
        "backend_growth_bytes_per_request{model=\"m\",replica=\"0\",series=\"host\"} 4.0",
        "backend_growth_bytes_per_second{model=\"m\",replica=\"0\",series=\"host\"} 2.0",
        "backend_memory_component_bytes{model=\"m\",replica=\"0\",series=\"host\",component=\"settled\"} 500",
        "backend_memory_component_bytes{model=\"m\",replica=\"0\",series=\"host\",component=\"declared\"} 80",
        "backend_memory_component_bytes{model=\"m\",replica=\"0\",series=\"host\",component=\"growth\"} 470",
        "backend_forecast_earliest_seconds{model=\"m\",replica=\"0\",series=\"host\",limit=\"host_soft\"} 25.0",
        "backend_forecast_latest_seconds{model=\"m\",replica=\"0\",series=\"host\",limit=\"host_soft\"} 100.0",
        "backend_growth_blame_bytes_per_unit{model=\"m\",replica=\"0\",series=\"host\",unit=\"image\"} 16.0",
        "backend_growth_baseline_bytes{model=\"m\",replica=\"0\",series=\"host\"} 500",
        "backend_allowance_bytes{model=\"m\",replica=\"0\",series=\"host\"} 100",
        "backend_allowance_used_bytes{model=\"m\",replica=\"0\",series=\"host\"} 80",
        "backend_forecast_limit_bytes{model=\"m\",replica=\"0\",series=\"host\",limit=\"host_soft\"} 1000",
        "backend_forecast_requests{model=\"m\",replica=\"0\",series=\"host\",limit=\"host_soft\"} 25.0",
        "backend_forecast_seconds{model=\"m\",replica=\"0\",series=\"host\",limit=\"host_soft\"} 50.0",
        "backend_policy_next{model=\"m\",replica=\"0\",action=\"observe\",reason=\"growth\"} 1",
        "backend_policy_held{model=\"m\",replica=\"0\"} 1",
        "backend_compute_errors{model=\"m\",replica=\"0\"} 2",
        "backend_stalled_seconds{model=\"m\",replica=\"0\"} 1.5",
        "backend_decode_tokens_per_second{model=\"m\",replica=\"0\"} 30.5",
    ] {
        let line = format!("llama_warden_{line}");
        assert!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
    }
}

#[test]
fn what_is_not_known_has_no_line() {
    let mut backend = leaking();
    backend.memory = MemoryView { vram_unknown: Some("no driver".to_owned()), ..MemoryView::default() };
    backend.next = None;
    let text = scrape(&fleet(vec![backend]));
    assert!(text.contains("llama_warden_backend_vram_unknown{model=\"m\",replica=\"0\"} 1"), "{text}");
    for name in ["backend_vram_bytes{", "backend_growth_verdict{", "backend_policy_next{"] {
        assert!(!text.contains(name), "{name}\n{text}");
    }
    let text = scrape(&FleetView::default());
    assert!(text.lines().all(|line| line.starts_with('#')), "{text}");
}
