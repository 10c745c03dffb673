//! Metrics of events of processes, counted from the fleet's events.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Unit;
use warden_policies::units::as_f64;
use warden_policies::warmth::{ColdReason, WarmthReport};
use warden_supervisor::{EventKind, FleetEvent, FleetView};

use super::families::ModelLabel;
use super::families::{families, labels};

/// Service gaps in seconds, from the restart of a tiny model to that of hundreds of gigabytes.
const GAP_BUCKETS: [f64; 12] = [0.0, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0, 600.0];

labels! {
    ReasonLabels { model: String, reason: &'static str }
    ModeLabels { model: String, mode: &'static str }
    ActionLabels { model: String, action: String }
    OutcomeLabels { model: String, outcome: &'static str }
    VerdictLabels { model: String, verdict: &'static str }
}

families! {
    pub(super) struct EventMetrics () {
        restarts: Family<ReasonLabels, Counter>
            = "backend_restarts",
            "Replacements of a backend. Budgets: `host_soft`, `host_hard`, `vram_soft`, `vram_hard`, \
             `shared_host`, `shared_vram`; growth: `growth`; limits: `max_requests`, `max_age`; signs of \
             illness: `wedged`, `compute_errors`, `repeating`, `empty_answers`, `null_answers`, `altered`, \
             `slow_decode`, `device_fault`, `unresponsive`, `crashed`, `degraded`; no memory left: \
             `memory_exhausted`, `admission`; people: `operator`, \
             `configuration`.";
        gap_seconds: Family<ModeLabels, Histogram, fn() -> Histogram>
            [Family::new_with_constructor(gap_histogram)]
            = "backend_restart_gap" in Unit::Seconds,
            "Time in which no backend took requests, per replacement; 0 in a successful overlap.";
        carried_over: Family<ModelLabel, Counter>
            = "requests_carried_over", "Requests that waited through a replacement and went to the next generation.";
        warm: Family<OutcomeLabels, Counter>
            = "warm_conversations",
            "Conversations of processes that were replaced as planned, by their outcome in the next one \
             ([warm](warm.md)): `carried` (by a slot file, and counted as cached), `evaluated` (again, \
             before a client asked), `unproven` (restored, with no evidence of use), or why they start cold: \
             `media`, `not_kept`, `time`, `refused`, `slots`.";
        slot_files: Family<ModelLabel, Counter>
            = "slot_files" in Unit::Bytes, "Bytes of slots passed to the next process in files.";
        crashes: Family<ModelLabel, Counter> = "crashes", "Unexpected ends of a backend.";
        crash_loops: Family<ModelLabel, Counter>
            = "crash_loops",
            "Crash loops: a backend ended repeatedly and is still being restarted.";
        prompts_too_large: Family<ActionLabels, Counter>
            = "prompts_too_large",
            "Prompts that do not fit into the memory that is left, where `policy.admission` is on, by what \
             was done: `warn` (sent all the same), `wait`, `elsewhere` (sent to another process), `recycle` \
             (a fresh process first), `refuse`. One that waits first and is then refused counts twice.";
        canary_verdicts: Family<VerdictLabels, Counter>
            = "canary_verdicts",
            "[Canaries](canary.md) that have ended: `undecided`, `better_or_equal`, `worse`. The processes \
             of a running canary are in all other metrics as the model `NAME@canary`.";
    }
}

fn gap_histogram() -> Histogram {
    Histogram::new(GAP_BUCKETS)
}

impl EventMetrics {
    /// Creates the series for alerts with the value 0: Prometheus sees no increase from an absent series.
    pub(super) fn initialize(&self, view: &FleetView) {
        for model in &view.models {
            let label = ModelLabel { model: model.name.as_str().to_owned() };
            for counter in [&self.crashes, &self.crash_loops] {
                drop(counter.get_or_create(&label));
            }
        }
    }

    pub(super) fn count(&self, event: &FleetEvent) {
        let Some(model) = event.model.as_ref().map(|model| model.as_str().to_owned()) else { return };
        match &event.kind {
            EventKind::RecycleDone { entry } if entry.given_up => {}
            EventKind::RecycleDone { entry } => {
                let reason = entry.reason.as_str();
                self.restarts.get_or_create(&ReasonLabels { model: model.clone(), reason }).inc();
                self.carried_over
                    .get_or_create(&ModelLabel { model: model.clone() })
                    .inc_by(entry.carried_over);
                if let Some(warmth) = &entry.warm {
                    self.count_warmth(&model, warmth);
                }
                if entry.failed.is_none() {
                    let mode = entry.mode.as_str();
                    self.gap_seconds
                        .get_or_create(&ModeLabels { model, mode })
                        .observe(as_f64(entry.gap_ms) / 1000.0);
                }
            }
            EventKind::CameBack { warmth } | EventKind::Warmed { warmth } => {
                self.count_warmth(&model, warmth);
            }
            EventKind::ConversationsStored { bytes, .. } => {
                self.slot_files.get_or_create(&ModelLabel { model }).inc_by(*bytes);
            }
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
            EventKind::CrashLoop { .. } => {
                self.crash_loops.get_or_create(&ModelLabel { model }).inc();
            }
            _ => {}
        }
    }

    /// Counts carried and lost conversations; conversations still in transfer are counted afterwards.
    fn count_warmth(&self, model: &str, warmth: &WarmthReport) {
        let cold = ColdReason::ALL.map(|cold| (cold.as_str(), warmth.cold.get(&cold).copied().unwrap_or(0)));
        let warm =
            [("carried", warmth.carried), ("evaluated", warmth.evaluated), ("unproven", warmth.unproven)];
        for (outcome, count) in warm.into_iter().chain(cold).filter(|(_, count)| *count > 0) {
            self.warm.get_or_create(&OutcomeLabels { model: model.to_owned(), outcome }).inc_by(count);
        }
        if warmth.bytes > 0 {
            self.slot_files.get_or_create(&ModelLabel { model: model.to_owned() }).inc_by(warmth.bytes);
        }
    }
}
