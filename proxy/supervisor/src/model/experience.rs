//! Values learned from a model's processes, kept for later processes.

use std::time::Duration;

use warden_policies::admission::PromptPrice;
use warden_policies::replacement_cost::LullHistory;

use super::reclaim::ReclaimCounts;
use super::start_search::DeadStarts;
use super::warm::KeptState;
use crate::memory::tracker::MemoryTracker;
use crate::process::ServerProps;
use crate::spec::ServerCommand;
use crate::view::InputModalities;

#[derive(Debug)]
pub(super) struct ModelExperience {
    /// Time from the spawn until the process was ready, at the last start.
    pub(super) load_time: Option<Duration>,
    /// Shortest load time with the current command.
    fastest_start: Option<Duration>,
    pub(super) n_ctx: Option<u64>,
    pub(super) modalities: Option<InputModalities>,
    pub(super) lulls: LullHistory,
    pub(super) refuses_slot_files: bool,
    /// Hash of the build and command whose processes are known not to use restored slots.
    pub(super) reuses_no_slots: Option<u64>,
    command: Option<ServerCommand>,
    /// Memory prices of prompts, with the leak-history key of the processes for which they are valid.
    prices: (String, Vec<PromptPrice>),
    /// Deaths of processes by a signal before they were ready.
    pub(super) dead_starts: DeadStarts,
    pub(super) reclaims: ReclaimCounts,
    /// Conversations and slots kept while the model is unloaded.
    pub(super) kept_state: Vec<KeptState>,
}

impl ModelExperience {
    pub(super) fn new(lulls: LullHistory) -> Self {
        Self {
            load_time: None,
            fastest_start: None,
            n_ctx: None,
            modalities: None,
            lulls,
            refuses_slot_files: false,
            reuses_no_slots: None,
            command: None,
            prices: (String::new(), Vec::new()),
            dead_starts: DeadStarts::default(),
            reclaims: ReclaimCounts::default(),
            kept_state: Vec::new(),
        }
    }

    pub(super) fn fastest_start(&self, command: &ServerCommand) -> Option<Duration> {
        if self.command.as_ref() == Some(command) { self.fastest_start } else { None }
    }

    /// Returns true if the previous ready process had another command.
    pub(super) fn note_ready(&mut self, took: Duration, props: &ServerProps, command: ServerCommand) -> bool {
        self.load_time = Some(took);
        self.n_ctx = props.n_ctx.or(self.n_ctx);
        self.modalities = props.modalities.or(self.modalities);
        let before = self.command.replace(command);
        let is_other = before.is_some_and(|before| Some(&before) != self.command.as_ref());
        self.fastest_start = match self.fastest_start {
            Some(known) if !is_other => Some(known.min(took)),
            _ => Some(took),
        };
        is_other
    }

    pub(super) fn note_prices(&mut self, memory: &MemoryTracker) {
        let learnt = memory.cost.learnt_prices();
        if !learnt.is_empty() {
            self.prices = (memory.key.clone(), learnt);
        }
    }

    pub(super) fn prices(&self, key: &str) -> &[PromptPrice] {
        if self.prices.0 == key { &self.prices.1 } else { &[] }
    }
}
