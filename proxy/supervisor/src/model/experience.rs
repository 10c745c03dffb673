//! Values learned from a model's processes, kept for later processes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::admission::PromptPrice;

use super::environment::TaskEnvironment;
use super::generation::{HealthTracker, LiveGeneration, ProcessRecipe, ReclaimCounts};
use super::loading::dead_starts::DeadStarts;
use super::warm::KeptState;
use super::warm::stored::StoredConversations;
use crate::lease::cell::GenerationCell;
use crate::lease::queue::LeaseQueue;
use crate::memory::leak_history;
use crate::memory::recording::SampleRecorder;
use crate::memory::tracker::MemoryTracker;
use crate::process::ServerProps;
use crate::spec::ServerCommand;
use crate::sync::lock;
use crate::view::InputModalities;

#[derive(Debug, Default)]
pub(super) struct ModelExperience {
    /// Shortest load time with the current command.
    fastest_start: Option<Duration>,
    pub(super) n_ctx: Option<u64>,
    pub(super) modalities: Option<InputModalities>,
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
    /// Conversations on disk, with `warm = "disk"`.
    pub(super) stored: Option<Arc<StoredConversations>>,
    /// Time for removing expired conversations from disk.
    pub(super) next_sweep: Option<Instant>,
}

impl ModelExperience {
    /// Makes the state of a process that is being created or taken over.
    pub(super) fn new_generation(
        &self,
        env: &TaskEnvironment,
        cell: Arc<GenerationCell>,
        recipe: ProcessRecipe,
        socket: PathBuf,
    ) -> LiveGeneration {
        let memory = self.new_tracker(env, cell.id, recipe.command());
        let health = HealthTracker::new(&lock(&env.context.common), recipe.command());
        let files = self.slot_files(&env.spec, &socket);
        let mut live = LiveGeneration::new(cell.id, socket, cell, recipe, memory, health);
        live.warm.files = files;
        live
    }

    fn new_tracker(
        &self,
        env: &TaskEnvironment,
        generation: GenerationId,
        command: &ServerCommand,
    ) -> MemoryTracker {
        let context = &env.context;
        let key = leak_history::process_key(command);
        let common = lock(&context.common).clone();
        let prices = self.prices(&key);
        let leaks = context.leak_history.leaks_of(&key);
        let bounded = command.with_variables(&env.spec.start.cache_bounds);
        let mut memory = MemoryTracker::new(&common, leaks, key, &bounded);
        for price in prices {
            memory.cost.set_price(*price);
        }
        if env.spec.run.record {
            let limit = env.watch.sensors.trace_bytes.0;
            let name = &env.spec.name;
            let recorder =
                SampleRecorder::begin(&context.records.state, &context.paths.traces, name, generation, limit);
            memory.recorder = Some(recorder);
        }
        memory
    }

    /// Drops kept state, and the conversations of the generations that it came from.
    pub(super) fn drop_state(&mut self, leases: &LeaseQueue, is_dropped: impl Fn(&KeptState) -> bool) {
        for kept in self.kept_state.extract_if(.., |kept| is_dropped(kept)) {
            leases.turns.forget_generation(kept.from);
        }
    }

    pub(super) fn fastest_start(&self, command: &ServerCommand) -> Option<Duration> {
        if self.command.as_ref() == Some(command) { self.fastest_start } else { None }
    }

    /// Returns true if the previous ready process had another command.
    pub(super) fn note_ready(&mut self, took: Duration, props: &ServerProps, command: ServerCommand) -> bool {
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
