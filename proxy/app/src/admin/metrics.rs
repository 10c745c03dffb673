//! Numbers for Prometheus: what requests came to, what replacements cost, what processes hold.
//!
//! Counters and histograms are fed as things happen; what is true *now* is read from the fleet at each scrape. The names
//! are listed in `docs/metrics.md`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use warden_gateway::{Gauges, KeyCounts, Limit, Record};
use warden_policies::MemoryLimit;
use warden_policies::lifecycle::Phase;
use warden_policies::units::exact;
use warden_policies::warmth::{Cold, Warmth};
use warden_supervisor::{CanaryState, EventKind, FleetView};

use super::answer::Budgets;
use super::families::{families, labels};
use super::growth_metrics::GrowthMetrics;
use super::key_metrics::KeyMetrics;
use super::page::tally::Tally;
use super::report_metrics::ReportMetrics;
use super::request_metrics::RequestMetrics;

/// From a tiny model's restart to that of a model of hundreds of gigabytes.
const GAP_SECONDS: [f64; 12] = [0.0, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0, 600.0];

labels! {
    pub(super) ModelLabel { model: String }
    ReasonLabels { model: String, reason: &'static str }
    ModeLabels { model: String, mode: &'static str }
    ResultLabels { model: String, result: &'static str }
    ComponentLabels { model: String, component: &'static str }
    ActionLabels { model: String, action: String }
    OutcomeLabels { model: String, outcome: &'static str }
    KindLabels { model: String, kind: &'static str }
    ReplicaLabels { model: String, replica: u32 }
    LimitLabel { limit: &'static str }
    VerdictLabels { model: String, verdict: &'static str }
    ArmLabels { model: String, arm: &'static str }
}

families! {
    pub(crate) struct Metrics (
        registry: Registry,
        requests: RequestMetrics,
        reports: ReportMetrics,
        growth: GrowthMetrics,
        keys: KeyMetrics
    ) {
        restarts: Family<ReasonLabels, Counter> = "backend_restarts", "Replacements of a backend";
        gap_seconds: Family<ModeLabels, Histogram, fn() -> Histogram>
            [Family::new_with_constructor(gap_histogram)]
            = "backend_restart_gap" in Unit::Seconds, "Time without a backend that takes requests, per replacement";
        reclaims: Family<ResultLabels, Counter>
            = "reclaims", "Requests to a backend to give memory back, by how they ended";
        reclaimed_bytes: Family<ComponentLabels, Counter>
            = "reclaimed" in Unit::Bytes, "Memory that backends gave back on demand, by their own count";
        prompts_too_large: Family<ActionLabels, Counter>
            = "prompts_too_large", "Prompts that do not fit into the memory that is left";
        canary_verdicts: Family<VerdictLabels, Counter>
            = "canary_verdicts", "Canaries that have ended, by what was made of them";
        canary_requests: Family<ArmLabels, Gauge>
            = "canary_requests", "Requests of the canary that runs, and of the model's own build beside it";
        canary_failures: Family<ArmLabels, Gauge>
            = "canary_failures", "Those of them that failed by the fault of the build";
        crashes: Family<ModelLabel, Counter> = "crashes", "Unexpected ends of a backend";
        carried_over: Family<ModelLabel, Counter>
            = "requests_carried_over", "Requests that waited through a replacement";
        warm: Family<OutcomeLabels, Counter>
            = "warm_conversations", "Conversations of processes that were replaced, by what became of them";
        slot_files: Family<ModelLabel, Counter>
            = "slot_files" in Unit::Bytes, "Slots that went to the next process by files";
        in_flight: Family<ModelLabel, Gauge> = "in_flight", "Requests on a backend";
        waiting: Family<ModelLabel, Gauge> = "queue_waiting", "Requests waiting for a backend";
        known_requests: Family<KindLabels, Gauge>
            = "quarantine_known", "Requests that are refused, or suspected of having killed their server";
        quarantined: Family<ModelLabel, Counter>
            = "quarantined_requests", "Requests that were put under refusal because their server died of them";
        quarantine_refusals: Family<ModelLabel, Counter>
            = "quarantine_refusals", "Times that such a request was sent again and refused";
        ready: Family<ReplicaLabels, Gauge> = "backend_ready", "1 if a backend takes requests";
        degraded: Family<ReplicaLabels, Gauge>
            = "backend_degraded", "1 if a backend came up with much less on GPUs than one like it had";
        generation: Family<ReplicaLabels, Gauge> = "backend_generation", "Newest generation of a replica";
        anon: Family<ReplicaLabels, Gauge> = "backend_memory_anon" in Unit::Bytes, "RssAnon of the process group";
        swap: Family<ReplicaLabels, Gauge> = "backend_memory_swap" in Unit::Bytes, "VmSwap of the process group";
        budget: Family<KindLabels, Gauge> = "backend_budget" in Unit::Bytes, "Host memory that a backend may hold";
        connections: Gauge = "connections", "Client connections open";
        limited: Family<LimitLabel, Counter> = "limited", "Connections refused or closed by a limit";
        tls_not_after: Gauge
            = "tls_certificate_expiry_timestamp" in Unit::Seconds,
            "End of the certificate, seconds since 1970; 0 without TLS";
        held_bytes: Gauge = "held" in Unit::Bytes, "Request bodies held in memory";
        own_anon: Gauge = "memory_anon" in Unit::Bytes, "RssAnon of llama-warden itself";
        lost_access_lines: Counter
            = "access_log_lost_lines",
            "Lines that are missing in the file of the access log, because it could not be written in time or at all";
        lost_log_lines: Counter
            = "log_lost_lines", "Lines that are missing in the log, because it could not be written in time or at all";
    }
}

fn gap_histogram() -> Histogram {
    Histogram::new(GAP_SECONDS)
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let (metrics, mut registry) = (Self::default(), Registry::with_prefix("llama_warden"));
        metrics.requests.register(&mut registry);
        metrics.register(&mut registry);
        metrics.reports.register(&mut registry);
        metrics.growth.register(&mut registry);
        metrics.keys.register(&mut registry);
        Self { registry, ..metrics }
    }

    pub(crate) fn request_done(&self, record: &Record) {
        self.requests.done(record);
    }

    /// What the page counts, by model.
    pub(crate) fn tallies(&self) -> BTreeMap<String, Arc<Tally>> {
        self.requests.tallies()
    }

    /// Something happened in the fleet.
    pub(crate) fn event(&self, event: &warden_supervisor::Event) {
        let Some(model) = event.model.as_ref().map(|model| model.as_str().to_owned()) else { return };
        match &event.kind {
            EventKind::RecycleDone { entry } => {
                let reason = entry.reason.as_str();
                self.restarts.get_or_create(&ReasonLabels { model: model.clone(), reason }).inc();
                self.carried_over
                    .get_or_create(&ModelLabel { model: model.clone() })
                    .inc_by(entry.carried_over);
                if let Some(warmth) = &entry.warm {
                    self.warmed(&model, warmth);
                }
                if entry.failed.is_none() {
                    let mode = entry.mode.as_str();
                    self.gap_seconds
                        .get_or_create(&ModeLabels { model, mode })
                        .observe(exact(entry.gap_ms) / 1000.0);
                }
            }
            EventKind::CameBack { warmth } | EventKind::Warmed { warmth } => self.warmed(&model, warmth),
            EventKind::PromptTooLarge { action, .. } => {
                self.prompts_too_large.get_or_create(&ActionLabels { model, action: action.clone() }).inc();
            }
            EventKind::CanaryEnded { entry } => {
                let verdict = entry.canary.verdict.as_str();
                self.canary_verdicts.get_or_create(&VerdictLabels { model, verdict }).inc();
            }
            EventKind::Crashed { .. } => {
                self.crashes.get_or_create(&ModelLabel { model }).inc();
            }
            _ => {}
        }
    }

    /// What became of conversations. Those that are due are counted when that is done.
    fn warmed(&self, model: &str, warmth: &Warmth) {
        let cold = Cold::ALL.map(|cold| (cold.as_str(), warmth.cold.get(&cold).copied().unwrap_or(0)));
        let warm =
            [("carried", warmth.carried), ("evaluated", warmth.evaluated), ("unproven", warmth.unproven)];
        for (outcome, count) in warm.into_iter().chain(cold).filter(|(_, count)| *count > 0) {
            self.warm.get_or_create(&OutcomeLabels { model: model.to_owned(), outcome }).inc_by(count);
        }
        if warmth.bytes > 0 {
            self.slot_files.get_or_create(&ModelLabel { model: model.to_owned() }).inc_by(warmth.bytes);
        }
    }

    /// Lines that are missing in the logs so far.
    pub(crate) fn lost_lines(&self, access: u64, log: u64) {
        // The writers count; a scrape only repeats it.
        self.lost_access_lines.inner().store(access, Ordering::Relaxed);
        self.lost_log_lines.inner().store(log, Ordering::Relaxed);
    }

    /// The picture of the fleet has changed.
    pub(crate) fn fleet_changed(&self, view: &FleetView) {
        self.reports.count(view);
    }

    pub(crate) fn text(
        &self,
        view: &FleetView,
        budgets: &Budgets,
        gateway: &Gauges,
        keys: &[KeyCounts],
        own_anon: Option<u64>,
    ) -> String {
        self.read(view);
        self.reports.count(view);
        self.reports.read(view);
        self.growth.read(view);
        self.keys.read(keys);
        self.budget.clear();
        for (model, budget) in budgets {
            for (kind, bytes) in [("soft", budget.soft), ("hard", budget.hard)] {
                if let Some(bytes) = bytes.and_then(MemoryLimit::bytes) {
                    let labels = KindLabels { model: model.clone(), kind };
                    self.budget.get_or_create(&labels).set(whole(bytes.0));
                }
            }
        }
        self.connections.set(whole(gateway.connections.load(Ordering::Relaxed) as u64));
        self.held_bytes.set(whole(gateway.held_bytes.load(Ordering::Relaxed) as u64));
        self.tls_not_after.set(whole(gateway.tls_not_after.load(Ordering::Relaxed)));
        for limit in Limit::ALL {
            let label = LimitLabel { limit: limit.as_str() };
            // The gateway counts; a scrape only repeats it.
            let counter = self.limited.get_or_create(&label);
            counter.inner().store(gateway.limited.count(limit), Ordering::Relaxed);
        }
        self.own_anon.set(whole(own_anon.unwrap_or_default()));
        let mut text = String::new();
        match encode(&mut text, &self.registry) {
            Ok(()) => text,
            Err(error) => format!("# {error}\n"),
        }
    }

    /// Gauges are made anew at each scrape, so that a removed model leaves no line behind.
    fn read(&self, view: &FleetView) {
        self.in_flight.clear();
        self.waiting.clear();
        self.known_requests.clear();
        self.ready.clear();
        self.degraded.clear();
        self.generation.clear();
        self.anon.clear();
        self.swap.clear();
        self.canary_requests.clear();
        self.canary_failures.clear();
        let tried = view.models.iter().filter_map(|model| model.canary.as_deref());
        for canary in tried.filter(|canary| canary.state == CanaryState::Running) {
            for (arm, report) in [("base", &canary.report.base), ("canary", &canary.report.canary)] {
                let labels = ArmLabels { model: canary.model.as_str().to_owned(), arm };
                self.canary_requests.get_or_create(&labels).set(whole(report.requests));
                self.canary_failures.get_or_create(&labels).set(whole(report.failures));
            }
        }
        for model in view.models.iter().chain(&view.canaries) {
            let label = ModelLabel { model: model.name.as_str().to_owned() };
            let in_flight = model.backends.iter().map(|backend| i64::from(backend.in_flight)).sum();
            self.in_flight.get_or_create(&label).set(in_flight);
            self.waiting.get_or_create(&label).set(whole(model.waiting as u64));
            let known = &model.quarantine;
            for (kind, refused) in [("refused", true), ("suspected", false)] {
                let count = known.requests.iter().filter(|one| one.refused == refused).count();
                let labels = KindLabels { model: label.model.clone(), kind };
                self.known_requests.get_or_create(&labels).set(whole(count as u64));
            }
            for (outcome, count) in &model.reclaims.counts {
                let labels = ResultLabels { model: label.model.clone(), result: outcome.as_str() };
                self.reclaims.get_or_create(&labels).inner().store(*count, Ordering::Relaxed);
            }
            for (component, bytes) in model.reclaims.given.parts().into_iter().filter(|(_, bytes)| *bytes > 0)
            {
                let labels = ComponentLabels { model: label.model.clone(), component };
                self.reclaimed_bytes.get_or_create(&labels).inner().store(bytes, Ordering::Relaxed);
            }
            // The supervisor counts; a scrape only repeats it.
            let counts =
                [(&self.quarantined, known.quarantined), (&self.quarantine_refusals, known.refusals)];
            for (counter, count) in counts {
                counter.get_or_create(&label).inner().store(count, Ordering::Relaxed);
            }
            for backend in &model.backends {
                // While one generation replaces another, a replica has two processes: its memory is that of both.
                let label = ReplicaLabels { model: label.model.clone(), replica: backend.replica };
                let ready = self.ready.get_or_create(&label);
                ready.set(ready.get().max(i64::from(backend.phase == Phase::Ready)));
                let degraded = self.degraded.get_or_create(&label);
                degraded.set(degraded.get().max(i64::from(backend.degraded.is_some())));
                let newest = self.generation.get_or_create(&label);
                newest.set(newest.get().max(backend.generation.map_or(0, |generation| whole(generation.0))));
                if let Some(host) = backend.host {
                    self.anon.get_or_create(&label).inc_by(whole(host.anon));
                    self.swap.get_or_create(&label).inc_by(whole(host.swap));
                }
            }
        }
    }
}

pub(super) fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
