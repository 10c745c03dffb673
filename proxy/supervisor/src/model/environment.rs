//! Settings of a model, and what its task shares with others: the fleet's state, the leases and the log.

use std::sync::Arc;
use std::time::Duration;

use warden_policies::modes::{AnswersMode, WarmMode};
use warden_policies::share::ReplacementReach;
use warden_policies::{GenerationId, GpuIndex, Reason, RecycleDecision};

use super::context::{FleetContext, ReplacementPermit};
use super::warm::stored::save::StoreReport;
use crate::clock;
use crate::lease::queue::LeaseQueue;
use crate::process::hints;
use crate::spec::{SharedSpec, WatchConfig};
use crate::view::event::EventKind;
use crate::view::log::LogRing;

#[derive(Debug)]
pub(super) struct TaskEnvironment {
    pub(super) context: Arc<FleetContext>,
    pub(super) leases: Arc<LeaseQueue>,
    pub(super) logs: Arc<LogRing>,
    pub(super) spec: SharedSpec,
    pub(super) watch: WatchConfig,
}

impl TaskEnvironment {
    pub(super) fn log_event(&self, generation: Option<GenerationId>, kind: EventKind) {
        self.context.records.journal.record(Some(&self.spec.name), generation, kind);
    }

    pub(super) fn log_lost_settings(&self, generation: GenerationId, messages: Vec<String>) {
        for message in messages {
            self.log_event(Some(generation), EventKind::SettingLost { message });
        }
    }

    /// Logs that the conversations of a process are on disk, or why they are not.
    pub(super) fn log_stored(
        &self,
        generation: GenerationId,
        took: Duration,
        result: &Result<StoreReport, String>,
    ) {
        let saved = result.as_ref().copied().unwrap_or_default();
        let kind = EventKind::ConversationsStored {
            conversations: saved.conversations,
            slots: saved.slots,
            bytes: saved.bytes,
            took_ms: clock::millis(took),
            no_file: saved.no_file.filter(|_| saved.slots < saved.conversations),
            failed: result.as_ref().err().cloned(),
        };
        self.log_event(Some(generation), kind);
    }

    pub(super) fn lease_limit(&self, slots: Option<u32>) -> u32 {
        self.spec.requests.max_in_flight.or(slots).unwrap_or(self.spec.lifecycle.unknown_slots)
    }

    pub(super) fn enable_conversations(&self) {
        let keeps = self.spec.run.warm != WarmMode::Off && hints::stays_cold(&self.spec.command).is_none();
        self.leases.turns.set_enabled(keeps);
    }

    pub(super) fn watch_answers(&self) {
        self.leases.answers.set_watched(self.spec.recycle.common.answers != AnswersMode::Off);
    }

    pub(super) fn replacement_permit(
        &self,
        replica: u32,
        gpus: &[GpuIndex],
        reach: ReplacementReach,
    ) -> Option<ReplacementPermit> {
        self.context.replacement_permit(&self.spec.name, replica, gpus, reach)
    }

    /// Returns a permit at once; other replacements wait until it is dropped.
    pub(super) fn claim_permit(&self, replica: u32, gpus: &[GpuIndex]) -> ReplacementPermit {
        self.context.claim_permit(&self.spec.name, replica, gpus)
    }

    /// True if another process was ended a moment ago for the same shortage: its memory may suffice.
    pub(super) fn is_spared(&self, decision: &RecycleDecision) -> bool {
        decision.reason == Some(Reason::MemoryExhausted)
            && decision.series.is_some_and(|series| !self.context.may_end_backend(series))
    }
}
