//! Metrics for Prometheus, as text.

use super::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use warden_gateway::{KeyCounts, RequestOutcome};
use warden_policies::canary::CanaryVerdict;
use warden_policies::lifecycle::BackendPhase;
use warden_policies::sample::HostMemory;
use warden_policies::{GenerationId, MemoryLimit, ModelName, WorkDone};
use warden_sensors::report::{ContextCounts, ContextReport, FixSettings};
use warden_sensors::{CudaReport, HostTotals};
use warden_supervisor::{
    BackendFailure, BackendView, CanaryEntry, CanaryKind, CanaryState, CanaryView, EventKind, FailureKind,
    FleetEvent, LedgerEntry, ModelState, ModelView, ReplacementMode,
};

fn record() -> RequestRecord {
    RequestRecord {
        request_id: "r".into(),
        peer: std::net::IpAddr::from([127, 0, 0, 1]),
        protocol: http::Version::HTTP_11,
        user_agent: None,
        key: None,
        method: http::Method::POST,
        route: "chat",
        model: Some(ModelName::new("m")),
        generation: Some(GenerationId(2)),
        status: 200,
        late_status: None,
        outcome: RequestOutcome::Ok,
        stream: false,
        queued: Duration::from_millis(20),
        first_byte: Some(Duration::from_millis(30)),
        first_token: Some(Duration::from_millis(25)),
        total: Duration::from_millis(40),
        bytes_in: 10,
        bytes_out: 20,
        work: WorkDone { requests: 1, prompt_tokens: 5, output_tokens: 7, images: 0, audio: 0 },
        retries: 0,
        canary_part: None,
        trace: None,
        continued: true,
    }
}

fn backend(generation: u64, phase: BackendPhase) -> BackendView {
    BackendView {
        degraded: None,
        replica: 0,
        generation: Some(GenerationId(generation)),
        phase,
        pid: Some(1),
        program: None,
        ready_since: None,
        in_flight: 1,
        slots: Some(1),
        host: Some(HostMemory { anon: 100, swap: 1, rss: 200 }),
        host_at_ready: None,
        work: WorkDone::default(),
        report: None,
        memory: warden_supervisor::MemoryView::default(),
        health: warden_supervisor::HealthView::default(),
        reclaim: warden_supervisor::ReclaimView::default(),
        next: None,
    }
}

/// A report of one context per device.
fn report(devices: &[(i32, ContextCounts)]) -> CudaReport {
    let context = |(number, &(device, counts)): (usize, &(i32, ContextCounts))| ContextReport {
        context: u32::try_from(number).unwrap(),
        device,
        live: true,
        counts,
        updated_unix_ms: 1,
    };
    CudaReport {
        pid: 1,
        started_unix_ms: 1,
        active: BTreeSet::new(),
        settings: FixSettings::default(),
        contexts: devices.iter().enumerate().map(context).collect(),
    }
}

/// A view with these reports of the old and the new process.
fn reporting(number: u64, old: Option<CudaReport>, new: Option<CudaReport>) -> FleetView {
    let mut view = FleetView { number, ..view() };
    let backends = &mut Arc::make_mut(&mut view.models[0]).backends;
    (backends[0].report, backends[1].report) = (old, new);
    view
}

fn scrape(metrics: &MetricsRegistry, view: &FleetView) -> String {
    metrics.text(&PoolSnapshot::default(), view, &BudgetsByModel::new(), &GatewayGauges::default(), &[], None)
}

#[test]
fn what_backends_report_is_summed_by_device_and_their_counters_never_go_down() {
    let metrics = MetricsRegistry::new();
    let counts = |number: u64| ContextCounts {
        graphs_live: number,
        graph_host_bytes: 10 * number,
        pool_bytes: u64::MAX,
        graphs_evicted: number,
        pool_bytes_purged: 100 * number,
        ..ContextCounts::default()
    };
    let has = |text: &str, name: &str, labels: &str, value: &str| {
        let line = format!("llama_warden_backend_{name}{{model=\"m\",replica=\"0\",{labels}}} {value}");
        assert!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
    };
    let old = report(&[(0, counts(5)), (1, counts(1))]);
    // Count between scrapes: at the next scrape the old process may be gone.
    metrics.count_reports(&reporting(1, Some(old.clone()), None));
    let text = scrape(&metrics, &reporting(2, Some(old), Some(report(&[(0, counts(2))]))));
    has(&text, "cuda_graphs", "device=\"0\"", "7");
    has(&text, "cuda_graphs", "device=\"1\"", "1");
    has(&text, "cuda_graph_bytes", "device=\"0\",kind=\"host\"", "70");
    has(&text, "cuda_pool_bytes", "device=\"0\"", &i64::MAX.to_string());
    has(&text, "cuda_graphs_evicted_total", "device=\"0\"", "7");
    has(&text, "cuda_pool_purged_bytes_total", "device=\"1\"", "100");
    // The old process has ended; the new one continues, and its report lacks a context once.
    for new in [report(&[(0, counts(3))]), report(&[]), report(&[(0, counts(4))])] {
        metrics.count_reports(&reporting(3, None, Some(new)));
    }
    let mut last = reporting(4, None, Some(report(&[(0, counts(4))])));
    Arc::make_mut(&mut last.models[0]).backends.remove(0);
    let text = scrape(&metrics, &last);
    has(&text, "cuda_graphs_evicted_total", "device=\"0\"", "9");
    has(&text, "cuda_graphs", "device=\"0\"", "4");
    // A late view is not counted again.
    metrics.count_reports(&reporting(1, Some(report(&[(0, counts(5))])), None));
    let text = scrape(&metrics, &FleetView { number: 5, ..FleetView::default() });
    has(&text, "cuda_graphs_evicted_total", "device=\"0\"", "9");
    assert!(!text.contains("backend_cuda_graphs{"), "what is held is gone with its holder\n{text}");
}

#[test]
fn without_reports_there_is_no_line_about_them() {
    let text = scrape(&MetricsRegistry::new(), &view());
    assert!(text.lines().all(|line| line.starts_with('#') || !line.contains("_cu")), "{text}");
}

fn budgets() -> BudgetsByModel {
    let budget = crate::memory_use::ModelBudget {
        soft: Some(MemoryLimit::Bytes(warden_policies::ByteSize(1000))),
        hard: Some(MemoryLimit::Auto),
        vram_soft: Some(MemoryLimit::Bytes(warden_policies::ByteSize(2000))),
        ..crate::memory_use::ModelBudget::default()
    };
    BudgetsByModel::from([("m".to_owned(), budget)])
}

fn recycled() -> EventKind {
    let reason = warden_policies::Reason::HostSoft;
    let warmth = warden_policies::warmth::WarmthReport { carried: 1, bytes: 5, ..Default::default() };
    let entry = LedgerEntry {
        carried_over: 3,
        gap_ms: 30,
        warm: Some(warmth),
        ..LedgerEntry::new(ModelName::new("m"), 0, reason, ReplacementMode::Sequential)
    };
    EventKind::RecycleDone { entry: Box::new(entry) }
}

fn crashed() -> EventKind {
    let failure =
        BackendFailure { kind: FailureKind::Signal, message: String::new(), lines: Vec::new(), failures: 1 };
    EventKind::Crashed { failure, outside: false }
}

fn crash_loop() -> EventKind {
    let failure =
        BackendFailure { kind: FailureKind::Signal, message: String::new(), lines: Vec::new(), failures: 9 };
    EventKind::CrashLoop { ends: 5, within_s: 60, failure }
}

fn too_large() -> EventKind {
    let short = warden_supervisor::NoRoom {
        series: warden_policies::MemoryKind::Host,
        tokens: 9,
        needed: 2,
        have: 1,
        bytes_per_token: 1.0,
        retry_after: Duration::from_secs(1),
    };
    EventKind::PromptTooLarge { action: "refuse".to_owned(), short }
}

fn view() -> FleetView {
    let model = ModelView {
        state: ModelState::Loaded,
        waiting: 3,
        queue_depth: 9,
        backends: vec![backend(4, BackendPhase::Draining), backend(5, BackendPhase::Ready)],
        was_ready: true,
        ..ModelView::unloaded(ModelName::new("m"))
    };
    FleetView { number: 1, models: vec![Arc::new(model)], ..FleetView::default() }
}

#[test]
fn the_text_has_counters_of_requests_and_gauges_of_the_fleet() {
    let metrics = MetricsRegistry::new();
    metrics.request_done(&record());
    for _ in 0..2 {
        let text = metrics.text(
            &PoolSnapshot::default(),
            &view(),
            &budgets(),
            &GatewayGauges::default(),
            &[],
            Some(77),
        );
        for line in [
            "llama_warden_requests_total{model=\"m\",route=\"chat\",status=\"200\"} 1",
            "llama_warden_output_tokens_total{model=\"m\"} 7",
            "llama_warden_request_seconds_count{model=\"m\",route=\"chat\"} 1",
            "llama_warden_in_flight{model=\"m\"} 2",
            "llama_warden_model_state{model=\"m\",state=\"loaded\"} 1",
            "llama_warden_model_state{model=\"m\",state=\"failed\"} 0",
            "llama_warden_backend_slots{model=\"m\",replica=\"0\"} 1",
            "llama_warden_queue_limit{model=\"m\"} 9",
            "llama_warden_queue_waiting{model=\"m\"} 3",
            "llama_warden_quarantine_known{model=\"m\",kind=\"refused\"} 0",
            "llama_warden_quarantine_refusals_total{model=\"m\"} 0",
            "llama_warden_backend_ready{model=\"m\",replica=\"0\"} 1",
            "llama_warden_backend_generation{model=\"m\",replica=\"0\"} 5",
            "llama_warden_backend_memory_anon_bytes{model=\"m\",replica=\"0\"} 200",
            "llama_warden_backend_memory_swap_bytes{model=\"m\",replica=\"0\"} 2",
            "llama_warden_backend_budget_bytes{model=\"m\",kind=\"soft\"} 1000",
            "llama_warden_memory_anon_bytes 77",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
        }
    }
    let text = scrape(&metrics, &FleetView::default());
    assert!(!text.contains("llama_warden_backend_ready{"), "a removed model leaves no line");
}

#[test]
fn a_replacement_counts_by_reason_with_its_gap_and_what_it_carried_over() {
    let metrics = MetricsRegistry::new();
    metrics.count_event(&FleetEvent {
        id: 1,
        at: String::new(),
        model: Some(ModelName::new("m")),
        generation: None,
        kind: recycled(),
    });
    let text = scrape(&metrics, &FleetView::default());
    for line in [
        "llama_warden_backend_restarts_total{model=\"m\",reason=\"host_soft\"} 1",
        "llama_warden_backend_restart_gap_seconds_bucket{le=\"0.05\",model=\"m\",mode=\"sequential\"} 1",
        "llama_warden_requests_carried_over_total{model=\"m\"} 3",
    ] {
        assert!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
    }
}

fn running_canary() -> CanaryView {
    CanaryView {
        model: ModelName::new("m"),
        name: ModelName::new("m@canary"),
        state: CanaryState::Running,
        binary: "b".into(),
        build: None,
        share: Some(0.1),
        began_at: String::new(),
        seconds: 1.0,
        ended_at: None,
        verdict: CanaryVerdict::BetterOrEqual,
        report: warden_policies::canary::CanaryReport::default(),
    }
}

fn canary_ended() -> EventKind {
    let entry = CanaryEntry { kind: CanaryKind::Canary, id: 1, at: String::new(), canary: running_canary() };
    EventKind::CanaryEnded { entry: Box::new(entry) }
}

/// A fleet with a value for every metric.
fn everything(metrics: &MetricsRegistry) -> FleetView {
    metrics.request_done(&RequestRecord { stream: true, ..record() });
    metrics.initialize_spans();
    for kind in [recycled(), crashed(), crash_loop(), too_large(), canary_ended()] {
        metrics.count_event(&FleetEvent {
            id: 1,
            at: String::new(),
            model: Some(ModelName::new("m")),
            generation: None,
            kind,
        });
    }
    let mut view = reporting(1, None, Some(report(&[(0, ContextCounts::default())])));
    let mut blind = crate::growth_fixture::leaking();
    blind.memory.vram_unknown = Some("no driver".to_owned());
    let grown = crate::growth_fixture::fleet(vec![blind]);
    view.models.extend(grown.models);
    view.devices = grown.devices;
    view.host = Some(HostTotals { total: 9000, available: 4000 });
    let first = Arc::make_mut(&mut view.models[0]);
    first.reclaims = warden_supervisor::ReclaimTotals {
        counts: vec![(warden_policies::reclaim::ReclaimOutcome::Done, 1)],
        given: warden_policies::reclaim::ReclaimedBytes { heap: 1, ..Default::default() },
    };
    first.canary = Some(Box::new(running_canary()));
    view
}

#[test]
fn what_is_exported_is_what_is_declared_with_the_same_labels() {
    let metrics = MetricsRegistry::new();
    let view = everything(&metrics);
    let key = KeyCounts {
        name: "alice".into(),
        requests: 1,
        running: 1,
        prompt_tokens: 1,
        output_tokens: 1,
        rejected: vec![("rate", 1)],
    };
    let contexts = [("m".to_owned(), crate::pool_facts::ContextUse { used: 1, room: 2 })];
    let pool =
        PoolSnapshot { contexts: contexts.into(), vllm: true, pickers: true, ..PoolSnapshot::default() };
    metrics.note_state(&StateView::default());
    let text = crate::metrics::families::to_plain_text(&metrics.text(
        &pool,
        &view,
        &budgets(),
        &GatewayGauges::default(),
        &[key],
        None,
    ));
    let mut exported: BTreeMap<String, (String, BTreeSet<String>)> = BTreeMap::new();
    let mut last = String::new();
    for line in text.lines() {
        if let Some(told) = line.strip_prefix("# TYPE ") {
            let (name, kind) = told.split_once(' ').unwrap();
            last = name.to_owned();
            exported.insert(last.clone(), (kind.to_owned(), BTreeSet::new()));
        } else if !line.starts_with('#') {
            let labels = line.split_once('{').map_or("", |(_, rest)| rest.split_once('}').unwrap().0);
            let names = labels.split("\",").filter_map(|label| label.split_once("=\"")).map(|(name, _)| name);
            exported.get_mut(&last).unwrap().1.extend(names.filter(|name| *name != "le").map(str::to_owned));
        }
    }
    let declared = crate::metrics::metrics_page_tests::declared().into_iter();
    let declared: BTreeMap<_, _> = declared
        .map(|(name, (kind, labels))| {
            (name, (kind.to_owned(), labels.into_iter().map(str::to_owned).collect()))
        })
        .collect();
    assert_eq!(exported, declared);
}

#[test]
fn a_stream_counts_its_first_token_and_each_further_one() {
    let metrics = MetricsRegistry::new();
    // 7 tokens: the first after 25 ms, the other six within 15 ms.
    let first_token = Some(Duration::from_millis(25));
    metrics.request_done(&RequestRecord { first_token, ..record() });
    metrics.request_done(&RequestRecord { first_token, outcome: RequestOutcome::ClientGone, ..record() });
    metrics.request_done(&RequestRecord { first_token: None, ..record() });
    let text = scrape(&metrics, &view());
    for line in [
        "llama_warden_first_token_seconds_count{model=\"m\"} 2",
        "llama_warden_first_token_seconds_sum{model=\"m\"} 0.05",
        "llama_warden_output_token_seconds_count{model=\"m\"} 1",
        "llama_warden_output_token_seconds_sum{model=\"m\"} 0.0025",
    ] {
        assert!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
    }
}

#[test]
fn a_share_is_a_budget_in_bytes_once_the_whole_is_known() {
    let metrics = MetricsRegistry::new();
    let half = Some(MemoryLimit::Percent(50.0));
    let budget = crate::memory_use::ModelBudget { hard: half, vram_hard: half, ..Default::default() };
    let budgets = BudgetsByModel::from([("m".to_owned(), budget)]);
    let text = |view: &FleetView| {
        metrics.text(&PoolSnapshot::default(), view, &budgets, &GatewayGauges::default(), &[], None)
    };
    assert!(!text(&view()).contains("budget_bytes{"));
    let device = warden_supervisor::DeviceView { total: Some(800), ..Default::default() };
    let host = Some(HostTotals { total: 1000, available: 1 });
    let text = text(&FleetView { host, devices: vec![device], ..view() });
    for line in [
        "llama_warden_backend_budget_bytes{model=\"m\",kind=\"hard\"} 500",
        "llama_warden_backend_vram_budget_bytes{model=\"m\",gpu=\"0\",kind=\"hard\"} 400",
    ] {
        assert!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
    }
}
