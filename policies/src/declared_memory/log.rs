//! Lines of llama-server's log that tell what it keeps. The texts are upstream's, the same from b6723 to October 2026;
//! what comes before them (`srv  …: `, `slot …: `, times, colours) differs and is passed over.

use serde::{Deserialize, Serialize};

/// What a line of the log told.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Learned {
    /// The prompt cache holds so many bytes.
    CacheState {
        /// Bytes.
        bytes: u64,
    },
    /// The prompt cache may hold so many bytes; `None` for any number.
    CacheLimit {
        /// Bytes.
        bytes: Option<u64>,
    },
    /// The prompt cache is off.
    CacheOff,
    /// A checkpoint of a context was made.
    Checkpoint {
        /// In which slot; `None` if the line does not say.
        slot: Option<u32>,
        /// Checkpoints that the slot has now.
        count: u32,
        /// Checkpoints that it may have.
        of: u32,
        /// Bytes of this one.
        bytes: u64,
    },
    /// What a slot held, its checkpoints included, went to the prompt cache.
    SlotSaved {
        /// Which slot.
        slot: u32,
    },
    /// Each slot may have so many checkpoints.
    Checkpoints {
        /// Checkpoints.
        of: u32,
    },
    /// It has so many slots.
    Slots {
        /// Slots.
        slots: u32,
        /// Whether they share one context; `None`: this build does not say.
        one_pool: Option<bool>,
    },
}

/// Reads one line; `None` if it tells nothing about what is kept.
pub fn read(line: &str) -> Option<Learned> {
    // Nearly every line of a busy server is about something else.
    if let Some(rest) = after(line, "cache state: ") {
        return Some(Learned::CacheState { bytes: mib(after(rest, " prompts, ")?)? });
    }
    if let Some(rest) = after(line, "created context checkpoint ") {
        let count = number(rest)?;
        let of = number(after(rest, " of ")?)?;
        let bytes = mib(after(rest, "size = ")?)?;
        return Some(Learned::Checkpoint { slot: slot(line), count, of, bytes });
    }
    if line.contains("saving idle slot to prompt cache") {
        return Some(Learned::SlotSaved { slot: slot(line)? });
    }
    if let Some(rest) = after(line, "context checkpoints enabled, max = ") {
        return Some(Learned::Checkpoints { of: number(rest)? });
    }
    if line.contains("context checkpoints disabled") {
        return Some(Learned::Checkpoints { of: 0 });
    }
    if let Some(rest) = after(line, "prompt cache is enabled, size limit: ") {
        let bytes = if rest.starts_with("no limit") { None } else { Some(mib(rest)?) };
        return Some(Learned::CacheLimit { bytes });
    }
    if let Some(rest) = after(line, "cache size limit reduced to ") {
        return Some(Learned::CacheLimit { bytes: Some(mib(rest)?) });
    }
    if line.contains("prompt cache is disabled") {
        return Some(Learned::CacheOff);
    }
    if let Some(rest) =
        after(line, "initializing, n_slots = ").or_else(|| after(line, "initializing slots, n_slots = "))
    {
        let one_pool = after(rest, "kv_unified = '").map(|told| told.starts_with("true"));
        return Some(Learned::Slots { slots: number(rest)?, one_pool });
    }
    None
}

/// `slot create_check: id  1 | task 0 | …`
fn slot(line: &str) -> Option<u32> {
    number(after(line, ": id ")?.trim_start())
}

fn after<'line>(line: &'line str, mark: &str) -> Option<&'line str> {
    line.find(mark).map(|at| &line[at + mark.len()..])
}

fn number(text: &str) -> Option<u32> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..digits].parse().ok()
}

/// `62.813 MiB` in bytes.
fn mib(text: &str) -> Option<u64> {
    let (number, rest) =
        text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len()));
    if !rest.trim_start().starts_with("MiB") {
        return None;
    }
    let mib: f64 = number.parse().ok()?;
    format!("{mib}MiB").parse::<crate::units::ByteSize>().ok().map(|size| size.0)
}
