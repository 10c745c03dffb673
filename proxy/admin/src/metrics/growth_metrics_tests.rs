//! Metrics of growth, as text.

use super::*;
use crate::growth_fixture::{fleet, leaking};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use warden_supervisor::MemoryView;

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
