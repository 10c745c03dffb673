//! Content of the slots, if the script enables it: tokens of prompts and answers, which are not evaluated
//! again, and the files for saving and restoring slots.
//!
//! A token is a word; a chat is its roles and texts, followed by the role of the answer. So the next turn of
//! a conversation begins with the whole content of its slot, as in llama-server.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::goes_on::token_id;
use crate::say;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kept {
    /// None: each prompt is evaluated as a whole.
    #[default]
    Nothing,
    /// As with a dense model: a restored slot is as good as a computed one.
    Dense,
    /// As with sliding windows: restoring reports success, but nothing is reused.
    Windows,
    /// As with a unified KV cache: a new task moves idle slots away, and later prompts find them again.
    Unified,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FileFault {
    Error,
    Garbage,
    /// Half of the file, with a successful answer.
    Full,
}

#[derive(Debug, Clone, Default)]
struct Slot {
    tokens: Vec<u32>,
    /// The content cannot be reused.
    is_stale: bool,
    /// Grows with each use of any slot.
    used: u64,
}

#[derive(Debug)]
pub(crate) struct Slots(Mutex<State>);

#[derive(Debug)]
struct State {
    slots: Vec<Slot>,
    parked: Vec<Vec<u32>>,
    clock: u64,
}

impl Slots {
    pub(crate) fn new(count: usize) -> Self {
        Self(Mutex::new(State { slots: vec![Slot::default(); count], parked: Vec::new(), clock: 0 }))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses a free slot for a prompt: the requested one, else the one that holds most of it, else the
    /// least recently used.
    pub(crate) fn choose(&self, free: &[usize], prompt: &[u32], asked: Option<usize>) -> usize {
        let state = self.state();
        if let Some(asked) = asked.filter(|asked| free.contains(asked)) {
            return asked;
        }
        let common = |slot: &&usize| common(&state.slots[**slot].tokens, prompt);
        let best = free.iter().max_by_key(common).filter(|slot| common(slot) * 10 > prompt.len());
        let oldest = || free.iter().min_by_key(|slot| state.slots[**slot].used);
        best.or_else(oldest).copied().unwrap_or(0)
    }

    /// Begins a prompt in a slot; returns the number of its tokens that the slot had.
    pub(crate) fn begin(&self, kept: Kept, slot: usize, prompt: &[u32], busy: &[bool]) -> u64 {
        if kept == Kept::Nothing {
            return 0;
        }
        let mut state = self.state();
        let state = &mut *state;
        if kept == Kept::Unified {
            for (index, other) in state.slots.iter_mut().enumerate() {
                if index != slot && !busy.get(index).is_some_and(|busy| *busy) && !other.tokens.is_empty() {
                    state.parked.push(std::mem::take(&mut other.tokens));
                }
            }
            let here = common(&state.slots[slot].tokens, prompt);
            let best = (0..state.parked.len()).max_by_key(|index| common(&state.parked[*index], prompt));
            // A content stays in place if only a few words are common.
            let serves = |index: &usize| {
                let there = common(&state.parked[*index], prompt);
                there > here && there * 4 > state.parked[*index].len()
            };
            if let Some(better) = best.filter(serves) {
                let found = state.parked.remove(better);
                let before = std::mem::replace(&mut state.slots[slot].tokens, found);
                state.parked.extend((!before.is_empty()).then_some(before));
            }
        }
        state.clock += 1;
        let slot = &mut state.slots[slot];
        let had = if slot.is_stale { 0 } else { common(&slot.tokens, prompt) };
        *slot = Slot { tokens: prompt.to_vec(), is_stale: false, used: state.clock };
        // At least one token is always evaluated.
        had.min(prompt.len().saturating_sub(1)) as u64
    }

    pub(crate) fn push(&self, slot: usize, text: &str) {
        self.state().slots[slot].tokens.push(token_id(text.trim()));
    }

    /// Number of tokens of each slot, and a growing number of its last use, 0 for never.
    pub(crate) fn told(&self) -> Vec<(usize, u64)> {
        self.state().slots.iter().map(|slot| (slot.tokens.len(), slot.used)).collect()
    }

    /// Returns the file of a slot, and its number of tokens.
    pub(crate) fn save(&self, slot: usize) -> (Vec<u8>, usize) {
        let tokens = self.state().slots[slot].tokens.clone();
        let mut file = json!(tokens).to_string().into_bytes();
        // A KV cache has a fixed number of bytes per token.
        file.resize(file.len() + tokens.len() * 100, b' ');
        (file, tokens.len())
    }

    /// Restores a file; returns its number of tokens, or `None` for an invalid file.
    pub(crate) fn restore(&self, kept: Kept, slot: usize, file: &[u8]) -> Option<usize> {
        let tokens: Vec<u32> = serde_json::from_slice(file).ok()?;
        let count = tokens.len();
        self.state().slots[slot] = Slot { tokens, is_stale: kept == Kept::Windows, used: 0 };
        Some(count)
    }

    /// Empties a slot; returns the number of its tokens.
    pub(crate) fn erase(&self, slot: usize) -> usize {
        std::mem::take(&mut self.state().slots[slot].tokens).len()
    }
}

/// Value of the fix's variable, if it is on.
fn checkpoints_asked() -> Option<String> {
    std::env::var("LLAMA_WARDEN_SLOT_CHECKPOINTS").ok().filter(|text| !text.is_empty() && text != "0")
}

/// Logs that the fix `slot-checkpoints` is on, as a patched build does.
pub(crate) fn announce_checkpoints() {
    if let Some(count) = checkpoints_asked() {
        say::err(&format!("llama-warden: fix slot-checkpoints active: {count} checkpoints, 1024 MiB"));
    }
}

/// True if the process writes checkpoints next to slot files, as a build with the fix `slot-checkpoints`.
pub(crate) fn has_checkpoints(kept: Kept) -> bool {
    kept == Kept::Windows && checkpoints_asked().is_some()
}

pub(crate) fn checkpoint_path(slot_file: &Path) -> PathBuf {
    let mut path = slot_file.as_os_str().to_owned();
    path.push(".checkpoints");
    path.into()
}

/// Checkpoints that fit only this slot file.
pub(crate) fn checkpoints_of(slot_file: &[u8]) -> Vec<u8> {
    slot_file.iter().rev().copied().collect()
}

fn common(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

pub(crate) fn rendered(messages: &Value) -> String {
    let mut text = String::new();
    let mut last = "";
    for message in messages.as_array().into_iter().flatten() {
        last = message["role"].as_str().unwrap_or_default();
        let content = match &message["content"] {
            Value::String(content) => content.clone(),
            parts => {
                let parts = parts.as_array().into_iter().flatten();
                parts.filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join(" ")
            }
        };
        text.extend([last, " ", &content, " "]);
    }
    if last != "assistant" {
        text.push_str("assistant");
    }
    text
}

pub(crate) fn spelled(request: &Value) -> Vec<u32> {
    let of_text = |text: &str| text.split_whitespace().map(token_id).collect();
    match (&request["messages"], &request["prompt"]) {
        (messages @ Value::Array(_), _) => of_text(&rendered(messages)),
        (_, Value::String(text)) => of_text(text),
        (_, Value::Array(parts)) => {
            let each = parts.iter().flat_map(|part| match part {
                Value::String(text) => text.split_whitespace().map(token_id).collect(),
                number => {
                    number.as_u64().and_then(|id| u32::try_from(id).ok()).into_iter().collect::<Vec<_>>()
                }
            });
            each.collect()
        }
        _ => Vec::new(),
    }
}
