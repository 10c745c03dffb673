//! Metrics of models and their processes, all read from the fleet's view at each scrape. The supervisor
//! maintains the counts.

use std::sync::atomic::Ordering;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Unit;
use warden_policies::lifecycle::BackendPhase;
use warden_policies::{ByteSize, MemoryLimit};
use warden_supervisor::{BackendView, CanaryState, FleetView, ModelState, ModelView};

use super::families::{ClearGauges as _, families, labels};
use super::families::{ModelLabel, to_gauge};
use crate::memory_use::BudgetsByModel;

const STATES: [ModelState; 6] = [
    ModelState::Unloaded,
    ModelState::Loading,
    ModelState::Loaded,
    ModelState::Draining,
    ModelState::Backoff,
    ModelState::Failed,
];

labels! {
    StateLabels { model: String, state: &'static str }
    ResultLabels { model: String, result: &'static str }
    ComponentLabels { model: String, component: &'static str }
    KindLabels { model: String, kind: &'static str }
    GpuKindLabels { model: String, gpu: u32, kind: &'static str }
    ReplicaLabels { model: String, replica: u32 }
    ArmLabels { model: String, arm: &'static str }
}

families! {
    pub(super) struct ModelMetrics () {
        state: Family<StateLabels, Gauge>
            = "model_state",
            "The state of a model: 1 for one of `unloaded`, `loading`, `loaded`, `draining`, `backoff`, \
             `failed`, 0 for the others.";
        in_flight: Family<ModelLabel, Gauge> = "in_flight", "Requests on a backend.";
        slots: Family<ReplicaLabels, Gauge>
            = "backend_slots", "Slots of the replica's processes that take requests, as they report them.";
        waiting: Family<ModelLabel, Gauge> = "queue_waiting", "Requests waiting for a backend.";
        depth: Family<ModelLabel, Gauge>
            = "queue_limit", "Requests that may wait. One more is refused as `queue_full`.";
        known_requests: Family<KindLabels, Gauge>
            = "quarantine_known",
            "Requests that are `refused` because their server died of them, or `suspected`.";
        quarantined: Family<ModelLabel, Counter>
            = "quarantined_requests",
            "Requests that were put into quarantine. Alert on it: each is a way to kill the server.";
        quarantine_refusals: Family<ModelLabel, Counter>
            = "quarantine_refusals", "Times that a quarantined request was sent again and refused.";
        ready: Family<ReplicaLabels, Gauge> = "backend_ready", "1 if a process of the replica takes requests.";
        degraded: Family<ReplicaLabels, Gauge>
            = "backend_degraded",
            "1 if a process of the replica started with much less memory on GPUs than its equals, as when \
             its device was lost or full.";
        generation: Family<ReplicaLabels, Gauge> = "backend_generation", "Newest generation of the replica.";
        anon: Family<ReplicaLabels, Gauge>
            = "backend_memory_anon" in Unit::Bytes,
            "`RssAnon` of the replica's processes: two of them while one replaces the other.";
        swap: Family<ReplicaLabels, Gauge>
            = "backend_memory_swap" in Unit::Bytes, "`VmSwap` of the same processes. Budgets limit the sum of the two.";
        budget: Family<KindLabels, Gauge>
            = "backend_budget" in Unit::Bytes,
            "Budget on the sum of the two, `soft` and `hard`, where one is configured as a size or as a \
             share of the machine's memory.";
        vram_budget: Family<GpuKindLabels, Gauge>
            = "backend_vram_budget" in Unit::Bytes,
            "Budget on VRAM of a process on each GPU, `soft` and `hard`, where one is configured as a size \
             or as a share of the GPU's memory.";
        reclaims: Family<ResultLabels, Counter>
            = "reclaims",
            "Requests to a backend to give memory back ([operating](operating.md#a-leaking-model)): `done`, \
             `partly`, `refused` (in use all the time), `failed` (CUDA), `too_soon`, `other_allocator`, \
             `no_answer`, `nobody` (the build cannot do it).";
        reclaimed_bytes: Family<ComponentLabels, Counter>
            = "reclaimed" in Unit::Bytes,
            "Memory that these freed, as counted by the backends: `graphs_host`, `graphs_device`, `pools`, \
             `cublas`, `heap`.";
        canary_requests: Family<ArmLabels, Gauge>
            = "canary_requests",
            "Requests since the running canary began: `canary`, and `base`, the model's own build.";
        canary_failures: Family<ArmLabels, Gauge>
            = "canary_failures", "Those of them that failed because of the build.";
    }
}

impl ModelMetrics {
    /// Clears all gauges and sets them again at each scrape, so that a removed model has no line.
    pub(super) fn read(&self, view: &FleetView, budgets: &BudgetsByModel) {
        self.clear_gauges();
        self.read_budgets(view, budgets);
        let tried = view.models.iter().filter_map(|model| model.canary.as_deref());
        for canary in tried.filter(|canary| canary.state == CanaryState::Running) {
            for (arm, report) in [("base", &canary.report.base), ("canary", &canary.report.canary)] {
                let labels = ArmLabels { model: canary.model.as_str().to_owned(), arm };
                self.canary_requests.get_or_create(&labels).set(to_gauge(report.requests));
                self.canary_failures.get_or_create(&labels).set(to_gauge(report.failures));
            }
        }
        for model in view.models.iter().chain(&view.canaries) {
            self.read_model(model);
            for backend in &model.backends {
                self.read_backend(model.name.as_str(), backend);
            }
        }
    }

    /// Sets the budgets in bytes; `auto` is computed per process: see `backend_forecast_limit_bytes`.
    fn read_budgets(&self, view: &FleetView, budgets: &BudgetsByModel) {
        let bytes = |limit: Option<MemoryLimit>, total: Option<u64>| match (limit?, total) {
            (limit, Some(total)) => limit.resolve(ByteSize(total)),
            (limit, None) => limit.bytes(),
        };
        for (model, budget) in budgets {
            for (kind, limit) in [("soft", budget.soft), ("hard", budget.hard)] {
                if let Some(bytes) = bytes(limit, view.host.map(|host| host.total)) {
                    self.budget
                        .get_or_create(&KindLabels { model: model.clone(), kind })
                        .set(to_gauge(bytes.0));
                }
            }
            for device in &view.devices {
                for (kind, limit) in [("soft", budget.vram_soft), ("hard", budget.vram_hard)] {
                    if let Some(bytes) = bytes(limit, device.total) {
                        let labels = GpuKindLabels { model: model.clone(), gpu: device.gpu.0, kind };
                        self.vram_budget.get_or_create(&labels).set(to_gauge(bytes.0));
                    }
                }
            }
        }
    }

    fn read_model(&self, model: &ModelView) {
        let label = ModelLabel { model: model.name.as_str().to_owned() };
        for state in STATES {
            let labels = StateLabels { model: label.model.clone(), state: state.as_str() };
            self.state.get_or_create(&labels).set(i64::from(state == model.state));
        }
        let in_flight = model.backends.iter().map(|backend| i64::from(backend.in_flight)).sum();
        self.in_flight.get_or_create(&label).set(in_flight);
        self.waiting.get_or_create(&label).set(to_gauge(model.waiting as u64));
        self.depth.get_or_create(&label).set(to_gauge(model.queue_depth as u64));
        let known = &model.quarantine;
        for (kind, refused) in [("refused", true), ("suspected", false)] {
            let count = known.requests.iter().filter(|one| one.refused == refused).count();
            let labels = KindLabels { model: label.model.clone(), kind };
            self.known_requests.get_or_create(&labels).set(to_gauge(count as u64));
        }
        for (outcome, count) in &model.reclaims.counts {
            let labels = ResultLabels { model: label.model.clone(), result: outcome.as_str() };
            self.reclaims.get_or_create(&labels).inner().store(*count, Ordering::Relaxed);
        }
        for (component, bytes) in model.reclaims.given.parts().into_iter().filter(|(_, bytes)| *bytes > 0) {
            let labels = ComponentLabels { model: label.model.clone(), component };
            self.reclaimed_bytes.get_or_create(&labels).inner().store(bytes, Ordering::Relaxed);
        }
        for (counter, count) in
            [(&self.quarantined, known.quarantined), (&self.quarantine_refusals, known.refusals)]
        {
            counter.get_or_create(&label).inner().store(count, Ordering::Relaxed);
        }
    }

    /// Adds a process to its replica's gauges; during a replacement, two processes of a replica add up.
    fn read_backend(&self, model: &str, backend: &BackendView) {
        let label = ReplicaLabels { model: model.to_owned(), replica: backend.replica };
        let is_ready = backend.phase == BackendPhase::Ready;
        let ready = self.ready.get_or_create(&label);
        ready.set(ready.get().max(i64::from(is_ready)));
        if let Some(slots) = backend.slots
            && is_ready
        {
            self.slots.get_or_create(&label).inc_by(i64::from(slots));
        }
        let degraded = self.degraded.get_or_create(&label);
        degraded.set(degraded.get().max(i64::from(backend.degraded.is_some())));
        let newest = self.generation.get_or_create(&label);
        newest.set(newest.get().max(backend.generation.map_or(0, |generation| to_gauge(generation.0))));
        if let Some(host) = backend.host {
            self.anon.get_or_create(&label).inc_by(to_gauge(host.anon));
            self.swap.get_or_create(&label).inc_by(to_gauge(host.swap));
        }
    }
}
