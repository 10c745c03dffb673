//! All metrics of an instance, and those of llama-warden itself.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use warden_gateway::{GatewayGauges, GatewayLimit, KeyCounts, RequestRecord};
use warden_supervisor::sync::lock;
use warden_supervisor::{FleetView, StateKind, StateView};

use super::event_metrics::EventMetrics;
use super::families::to_gauge;
use super::families::{PREFIX, families, labels};
use super::growth_metrics::GrowthMetrics;
use super::key_metrics::KeyMetrics;
use super::machine_metrics::MachineMetrics;
use super::model_metrics::ModelMetrics;
use super::pool_metrics::{PoolExport, PoolSnapshot};
use super::report_metrics::ReportMetrics;
use super::request_counts::RequestCounters;
use super::request_metrics::RequestMetrics;
use crate::clock;
use crate::memory_use::BudgetsByModel;

labels! {
    LimitLabel { limit: &'static str }
    VersionLabel { version: &'static str }
    OutcomeLabel { outcome: &'static str }
    StateLabel { kind: &'static str }
}

families! {
    pub(super) struct OwnMetrics () {
        build: Family<VersionLabel, Gauge> = "build_info", "1; the label is the version of llama-warden.";
        started: Gauge
            = "start_time" in Unit::Seconds, "When llama-warden started, in seconds since 1970.";
        connections: Gauge = "connections", "Client connections open.";
        limited: Family<LimitLabel, Counter>
            = "limited",
            "Connections that were refused or closed by a limit. See [below](#connection-limits).";
        tls_not_after: Gauge
            = "tls_certificate_expiry_timestamp" in Unit::Seconds,
            "When the certificate in use ends, in seconds since 1970; 0 without TLS.";
        held_bytes: Gauge = "held" in Unit::Bytes, "Bytes of request bodies, and of answers that their \
            clients do not read, held in memory.";
        lost_access_lines: Counter
            = "access_log_lost_lines",
            "Lines that are missing in the file of the access log (`log.access`): the disk was full, or did \
             not keep up.";
        lost_log_lines: Counter
            = "log_lost_lines", "Lines that are missing in the log of llama-warden, for the same reasons.";
        state_lost: Family<StateLabel, Counter>
            = "state_lost_entries",
            "Entries that are missing in the state directory, by kind: its disk was full, failed, or did not answer.";
        state_waiting: Gauge
            = "state_waiting_entries", "Entries that wait to be written to the state directory.";
        state_silent: Gauge
            = "state_silent" in Unit::Seconds,
            "Time that the disk of the state directory has not answered; 0 if it does.";
        spans: Family<OutcomeLabel, Counter>
            = "trace_spans",
            "Spans of [traces](telemetry.md): `exported`, or dropped because too many waited (`queue_full`), \
             because the collector could not be reached for too long (`undelivered`), or because it does not \
             take them (`rejected`).";
        own_anon: Gauge = "memory_anon" in Unit::Bytes, "`RssAnon` of llama-warden itself.";
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpanOutcome {
    Exported,
    QueueFull,
    /// The collector could not be reached for too long.
    Undelivered,
    Rejected,
}

impl SpanOutcome {
    pub(crate) const ALL: [Self; 4] = [Self::Exported, Self::QueueFull, Self::Undelivered, Self::Rejected];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Exported => "exported",
            Self::QueueFull => "queue_full",
            Self::Undelivered => "undelivered",
            Self::Rejected => "rejected",
        }
    }
}

/// All metrics of an instance.
#[derive(Default)]
pub struct MetricsRegistry {
    registry: Registry,
    requests: RequestMetrics,
    models: ModelMetrics,
    events: EventMetrics,
    reports: ReportMetrics,
    growth: GrowthMetrics,
    machine: MachineMetrics,
    keys: KeyMetrics,
    own: OwnMetrics,
    pool: PoolExport,
    /// Held during a scrape, because a scrape sets gauges in several steps.
    scrape: Mutex<()>,
}

impl MetricsRegistry {
    /// Creates metrics without values.
    pub fn new() -> Self {
        let mut metrics = Self::default();
        let mut registry = Registry::with_prefix(PREFIX);
        metrics.pool.register(&mut registry);
        metrics.requests.register(&mut registry);
        metrics.models.register(&mut registry);
        metrics.events.register(&mut registry);
        metrics.growth.register(&mut registry);
        metrics.reports.register(&mut registry);
        metrics.machine.register(&mut registry);
        metrics.keys.register(&mut registry);
        metrics.own.register(&mut registry);
        let version = env!("CARGO_PKG_VERSION");
        metrics.own.build.get_or_create(&VersionLabel { version }).set(1);
        metrics.own.started.set(clock::now().as_second());
        Self { registry, ..metrics }
    }

    /// Counts a request that has ended.
    pub fn request_done(&self, record: &RequestRecord) {
        self.requests.count_request(record);
    }

    /// Returns the request counts that the page shows, by model.
    pub fn tallies(&self) -> BTreeMap<String, Arc<RequestCounters>> {
        self.requests.tallies()
    }

    /// Counts an event of the fleet.
    pub fn count_event(&self, event: &warden_supervisor::FleetEvent) {
        self.events.count(event);
    }

    pub(crate) fn set_lost_lines(&self, access: u64, log: u64) {
        // The writers count lost lines; a scrape only copies the counts.
        self.own.lost_access_lines.inner().store(access, Ordering::Relaxed);
        self.own.lost_log_lines.inner().store(log, Ordering::Relaxed);
    }

    pub(crate) fn note_state(&self, view: &StateView) {
        // Set each kind from the beginning, so that Prometheus sees a rise from 0.
        for kind in StateKind::ALL {
            let lost = view.lost.get(kind.as_str()).copied().unwrap_or_default();
            let label = StateLabel { kind: kind.as_str() };
            self.own.state_lost.get_or_create(&label).inner().store(lost, Ordering::Relaxed);
        }
        self.own.state_waiting.set(i64::try_from(view.waiting).unwrap_or(i64::MAX));
        #[expect(clippy::cast_possible_truncation, reason = "seconds of a process's life")]
        self.own.state_silent.set(view.silent_seconds.unwrap_or_default() as i64);
    }

    pub(crate) fn initialize_spans(&self) {
        for fate in SpanOutcome::ALL {
            self.count_spans(fate, 0);
        }
    }

    pub(crate) fn count_spans(&self, fate: SpanOutcome, count: usize) {
        let labels = OutcomeLabel { outcome: fate.as_str() };
        self.own.spans.get_or_create(&labels).inc_by(count as u64);
    }

    #[cfg(test)]
    pub(crate) fn span_count(&self, fate: SpanOutcome) -> u64 {
        self.own.spans.get_or_create(&OutcomeLabel { outcome: fate.as_str() }).get()
    }

    /// Counts what reports of patched servers have added.
    pub fn count_reports(&self, view: &FleetView) {
        self.reports.add_increases(view);
    }

    pub(crate) fn text(
        &self,
        pool: &PoolSnapshot,
        view: &FleetView,
        budgets: &BudgetsByModel,
        gateway: &GatewayGauges,
        keys: &[KeyCounts],
        own_anon: Option<u64>,
    ) -> String {
        let _alone = lock(&self.scrape);
        self.models.read(view, budgets);
        self.events.initialize(view);
        self.reports.add_increases(view);
        self.reports.read(view);
        self.growth.read(view);
        self.machine.read(view);
        self.keys.read(keys);
        self.own.read(gateway, own_anon);
        let mut text = String::new();
        let encoded = self.pool.read(&mut text, pool, view);
        match encoded.and_then(|()| encode(&mut text, &self.registry)) {
            Ok(()) => text,
            Err(error) => format!("# {error}\n"),
        }
    }
}

impl OwnMetrics {
    fn read(&self, gateway: &GatewayGauges, own_anon: Option<u64>) {
        self.connections.set(to_gauge(gateway.connections.load(Ordering::Relaxed) as u64));
        self.held_bytes.set(to_gauge(gateway.held_bytes.load(Ordering::Relaxed) as u64));
        self.tls_not_after.set(to_gauge(gateway.tls_not_after.load(Ordering::Relaxed)));
        for limit in GatewayLimit::ALL {
            let label = LimitLabel { limit: limit.as_str() };
            let counter = self.limited.get_or_create(&label);
            counter.inner().store(gateway.limited.count(limit), Ordering::Relaxed);
        }
        self.own_anon.set(to_gauge(own_anon.unwrap_or_default()));
    }
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
