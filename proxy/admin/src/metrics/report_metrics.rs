//! Metrics from the memory reports of backends.
//!
//! Current values are read from the fleet at each scrape. Each backend process counts its events from 0, so
//! this module adds each increase to its own counter, which never falls. Increases are read at every change
//! of the fleet's view, so that a process that lives only between two scrapes is counted.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Unit;
use warden_policies::GenerationId;
use warden_sensors::CudaReport;
use warden_sensors::report::{ContextCounts, ContextTotals};
use warden_supervisor::FleetView;
use warden_supervisor::sync::lock;

use super::families::to_gauge;
use super::families::{ClearGauges as _, families, labels};

/// Limit of the contexts remembered per process, which has a few. Beyond the limit, only the contexts of the
/// last report are kept.
const CONTEXTS_KEPT: usize = 1024;

labels! {
    DeviceLabels { model: String, replica: u32, device: i32 }
    PlaceLabels { model: String, replica: u32, device: i32, kind: &'static str }
}

type DeviceGauges = Family<DeviceLabels, Gauge>;
type DeviceCounters = Family<DeviceLabels, Counter>;

families! {
    pub(super) struct ReportMetrics (seen: Mutex<CountedReports>) {
        contexts: DeviceGauges = "backend_cuda_contexts", "CUDA contexts of a backend.";
        graphs: DeviceGauges = "backend_cuda_graphs", "Captured CUDA graphs that exist.";
        graph_bytes: Family<PlaceLabels, Gauge>
            = "backend_cuda_graph" in Unit::Bytes, "Memory of the CUDA graphs that exist, estimated: `host` \
                and `device`.";
        pool: DeviceGauges = "backend_cuda_pool" in Unit::Bytes, "Device memory that the pools cache.";
        pool_peak: DeviceGauges
            = "backend_cuda_pool_peak" in Unit::Bytes, "The most device memory in pools since the process started.";
        handles: DeviceGauges = "backend_cublas_handles", "cuBLAS handles that exist.";
        workspace: DeviceGauges
            = "backend_cublas_workspace" in Unit::Bytes, "Device memory of the workspaces of cuBLAS handles.";
        computes: DeviceCounters = "backend_cuda_computes", "Graph computes.";
        evicted: DeviceCounters
            = "backend_cuda_graphs_evicted",
            "CUDA graphs that `graph-cache-cap` destroyed because there were more than its cap.";
        trimmed: DeviceCounters
            = "backend_cuda_graphs_trimmed",
            "CUDA graphs that `graph-cache-cap` destroyed because they had been unused for a while.";
        invalidations: DeviceCounters
            = "backend_cuda_graph_invalidations",
            "CUDA graphs dropped by a purge or a reset, and captured again if needed.";
        purges: DeviceCounters = "backend_cuda_pool_purges", "Times that `pool-purge` gave the pools back.";
        purged: DeviceCounters
            = "backend_cuda_pool_purged" in Unit::Bytes, "Device memory that `pool-purge` gave back.";
        resets: DeviceCounters = "backend_cublas_resets", "Times that `cublas-reset` recreated the handles.";
        skipped: DeviceCounters
            = "backend_cuda_safe_points_skipped",
            "Times that a fix was due and waited, because something was in use.";
        errors: DeviceCounters = "backend_cuda_fix_errors", "Errors of the fixes in a backend.";
    }
}

/// Counts of the processes' reports that were already added.
#[derive(Default)]
struct CountedReports {
    number: u64,
    /// Last counts by process, then by device and number of the context.
    contexts: HashMap<GenerationId, HashMap<(i32, u32), ContextCounts>>,
}

impl ReportMetrics {
    /// Adds the increases since the last view. A view older than the last is ignored.
    pub(super) fn add_increases(&self, view: &FleetView) {
        let mut seen = lock(&self.seen);
        if view.number < seen.number {
            return;
        }
        seen.number = view.number;
        let mut living = HashMap::with_capacity(seen.contexts.len());
        for model in view.models.iter().chain(&view.canaries) {
            for backend in &model.backends {
                let Some(generation) = backend.generation else { continue };
                let mut known = seen.contexts.remove(&generation).unwrap_or_default();
                if let Some(report) = &backend.report {
                    let labels = |device: i32| DeviceLabels {
                        model: model.name.as_str().to_owned(),
                        replica: backend.replica,
                        device,
                    };
                    self.add_report(report, labels, &mut known);
                }
                living.insert(generation, known);
            }
        }
        seen.contexts = living;
    }

    fn add_report(
        &self,
        report: &CudaReport,
        labels: impl Fn(i32) -> DeviceLabels,
        known: &mut HashMap<(i32, u32), ContextCounts>,
    ) {
        if known.len() > CONTEXTS_KEPT {
            known.retain(|key, _| {
                report.contexts.iter().any(|context| *key == (context.device, context.context))
            });
        }
        for context in &report.contexts {
            let labels = labels(context.device);
            let now = context.counts;
            let last = known.entry((context.device, context.context)).or_default();
            let add = |counter: &DeviceCounters, of: fn(&ContextCounts) -> u64| {
                counter.get_or_create(&labels).inc_by(of(&now).saturating_sub(of(last)));
            };
            add(&self.computes, |counts| counts.computes);
            add(&self.evicted, |counts| counts.graphs_evicted);
            add(&self.trimmed, |counts| counts.graphs_trimmed);
            add(&self.invalidations, |counts| counts.graph_invalidations);
            add(&self.purges, |counts| counts.pool_purges);
            add(&self.purged, |counts| counts.pool_bytes_purged);
            add(&self.resets, |counts| counts.cublas_resets);
            add(&self.skipped, |counts| counts.skipped_busy);
            add(&self.errors, |counts| counts.errors);
            *last = now;
        }
    }

    /// Clears all gauges and sets them again, so that a removed model has no line.
    pub(super) fn read(&self, view: &FleetView) {
        self.clear_gauges();
        for (labels, held) in sum_reports(view) {
            let set = |gauge: &DeviceGauges, number: u64| {
                gauge.get_or_create(&labels).set(to_gauge(number));
            };
            let counts = held.counts;
            set(&self.contexts, u64::from(held.contexts));
            set(&self.graphs, counts.graphs_live);
            set(&self.pool, counts.pool_bytes);
            set(&self.pool_peak, counts.pool_bytes_peak);
            set(&self.handles, counts.cublas_handles);
            set(&self.workspace, counts.cublas_workspace_bytes);
            for (kind, bytes) in [("host", counts.graph_host_bytes), ("device", counts.graph_device_bytes)] {
                let DeviceLabels { model, replica, device } = labels.clone();
                let labels = PlaceLabels { model, replica, device, kind };
                self.graph_bytes.get_or_create(&labels).set(to_gauge(bytes));
            }
        }
    }
}

/// Sums the reports by device. While one process replaces another, a replica has two processes; both count.
fn sum_reports(view: &FleetView) -> BTreeMap<DeviceLabels, ContextTotals> {
    let mut all: BTreeMap<DeviceLabels, ContextTotals> = BTreeMap::new();
    for model in view.models.iter().chain(&view.canaries) {
        for backend in &model.backends {
            for context in backend.report.iter().flat_map(|report| &report.contexts) {
                let labels = DeviceLabels {
                    model: model.name.as_str().to_owned(),
                    replica: backend.replica,
                    device: context.device,
                };
                let sum = all.entry(labels).or_default();
                *sum = sum.with(context);
            }
        }
    }
    all
}
