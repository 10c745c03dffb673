//! Prompt cache: memory that grows with each request like a leak up to `--cache-ram`; then each new entry
//! replaces the oldest. The log lines are llama-server's.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use crate::say;

const MIB: u64 = 1 << 20;

#[derive(Debug)]
pub(crate) struct Cache {
    /// Most bytes; `None` without a limit.
    limit: Option<u64>,
    entries: Mutex<VecDeque<Entry>>,
}

#[derive(Debug)]
struct Entry {
    held: Vec<u8>,
    tokens: u64,
}

impl Cache {
    /// Creates a cache by `--cache-ram`: MiB, 0 for none, negative for no limit.
    pub(crate) fn new(cache_ram: i64) -> Self {
        let limit = u64::try_from(cache_ram).ok().map(|mib| mib.saturating_mul(MIB));
        Self { limit, entries: Mutex::default() }
    }

    /// Logs the limit as llama-server does after loading.
    pub(crate) fn announce(&self) {
        match self.limit {
            None => {
                say::err("0.00.059.001 W srv    load_model: prompt cache is enabled, size limit: no limit");
            }
            Some(0) => say::err(
                "0.00.059.001 W srv    load_model: prompt cache is disabled - use `--cache-ram N` to enable it",
            ),
            Some(bytes) => say::err(&format!(
                "0.00.059.001 W srv    load_model: prompt cache is enabled, size limit: {} MiB",
                bytes / MIB
            )),
        }
    }

    /// Keeps a prompt, and drops old ones to make room.
    pub(crate) fn keep(&self, bytes: u64, tokens: u64) {
        if bytes == 0 || self.limit == Some(0) {
            return;
        }
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.push_back(Entry { held: vec![0x5A; size], tokens });
        let total =
            |entries: &VecDeque<Entry>| entries.iter().map(|entry| entry.held.len() as u64).sum::<u64>();
        while entries.len() > 1 && self.limit.is_some_and(|limit| total(&entries) > limit) {
            if let Some(oldest) = entries.pop_front() {
                say::err(&format!(
                    "0.01.000.001 W srv        update:  - cache size limit reached, removing oldest entry (size = {} MiB)",
                    mib(oldest.held.len() as u64)
                ));
            }
        }
        let limit = self.limit.unwrap_or(0);
        let tokens: u64 = entries.iter().map(|entry| entry.tokens).sum();
        say::err(&format!(
            "0.01.000.002 W srv        update:  - cache state: {} prompts, {} MiB (limits: {} MiB, {tokens} tokens, {tokens} est)",
            entries.len(),
            mib(total(&entries)),
            mib(limit)
        ));
    }

    pub(crate) fn bytes(&self) -> u64 {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.iter().map(|entry| entry.held.len() as u64).sum()
    }
}

fn mib(bytes: u64) -> String {
    format!("{}.{:03}", bytes / MIB, bytes % MIB * 1000 / MIB)
}
