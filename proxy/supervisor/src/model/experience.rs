//! What the processes of a model have shown so far: how long they load, what prompts cost, when they have nothing to do.

use std::time::Duration;

use warden_policies::admission::Price;
use warden_policies::replacement_cost::Lulls;

use crate::memory::tracker::MemoryTracker;
use crate::process::Props;
use crate::spec::Command;
use crate::view::Modalities;

#[derive(Debug)]
pub(super) struct Experience {
    /// From spawn to ready, as it was the last time.
    pub(super) load_time: Option<Duration>,
    /// The fastest of those that were started with the same command.
    fastest: Option<Duration>,
    pub(super) n_ctx: Option<u64>,
    pub(super) modalities: Option<Modalities>,
    pub(super) lulls: Lulls,
    /// A process would not start with a directory for slots.
    pub(super) refuses_slot_files: bool,
    /// Of processes made of this it is known that they do not use what they have restored.
    pub(super) reuses_no_slots: Option<u64>,
    /// What the last process was started with that became ready.
    command: Option<Command>,
    /// What prompts cost in a process, and what that is made of.
    prices: (String, Vec<Price>),
}

impl Experience {
    pub(super) fn new(lulls: Lulls) -> Self {
        let (load_time, fastest, n_ctx, modalities, command, prices) = Default::default();
        let (refuses_slot_files, reuses_no_slots) = (false, None);
        Self {
            load_time,
            fastest,
            n_ctx,
            modalities,
            lulls,
            refuses_slot_files,
            reuses_no_slots,
            command,
            prices,
        }
    }

    /// How long the fastest start of this command took.
    pub(super) fn fastest_of(&self, command: &Command) -> Option<Duration> {
        self.fastest.filter(|_| self.command.as_ref() == Some(command))
    }

    /// A process became ready. Returns whether the one before it was started with another command.
    pub(super) fn ready(&mut self, took: Duration, props: &Props, command: Command) -> bool {
        self.load_time = Some(took);
        self.n_ctx = props.n_ctx.or(self.n_ctx);
        self.modalities = props.modalities.or(self.modalities);
        let before = self.command.replace(command);
        let is_other = before.is_some_and(|before| Some(&before) != self.command.as_ref());
        self.fastest = Some(self.fastest.filter(|_| !is_other).map_or(took, |known| known.min(took)));
        is_other
    }

    /// What was learnt of a process, for the next one like it.
    pub(super) fn note_prices(&mut self, memory: &MemoryTracker) {
        let learnt = memory.cost.learnt();
        if !learnt.is_empty() {
            self.prices = (memory.key.clone(), learnt);
        }
    }

    /// What is known of processes like this.
    pub(super) fn prices(&self, key: &str) -> &[Price] {
        if self.prices.0 == key { &self.prices.1 } else { &[] }
    }
}
