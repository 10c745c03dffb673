//! Parses lines of llama-server's log about its caches. llama.cpp's texts are the same from b6723 to October
//! 2026; the prefixes (`srv  …: `, `slot …: `, times, colours) vary and are skipped.

use serde::{Deserialize, Serialize};

/// Content of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum CacheLogLine {
    /// Present size of the prompt cache.
    CacheState {
        /// Bytes.
        bytes: u64,
    },
    /// Limit of the prompt cache; `None` without a limit.
    CacheLimit {
        /// Bytes.
        bytes: Option<u64>,
    },
    /// The prompt cache is off.
    CacheOff,
    /// A context checkpoint was created.
    Checkpoint {
        /// Slot number; `None` if the line does not name it.
        slot: Option<u32>,
        /// Present number of checkpoints in the slot.
        count: u32,
        /// Limit of checkpoints per slot.
        of: u32,
        /// Bytes of this checkpoint.
        bytes: u64,
    },
    /// A slot's content, including checkpoints, moved to the prompt cache.
    SlotSaved {
        /// Slot number.
        slot: u32,
    },
    /// Limit of checkpoints per slot.
    Checkpoints {
        /// Checkpoints per slot.
        of: u32,
    },
    /// Number of slots.
    Slots {
        /// Slots.
        slots: u32,
        /// True if the slots share one context; `None` if the build does not report it.
        one_pool: Option<bool>,
    },
}

/// Parses one line; `None` if it says nothing about caches.
pub fn parse_line(line: &str) -> Option<CacheLogLine> {
    // Most log lines are about other things, so this function makes only cheap searches.
    if let Some(rest) = text_after(line, "cache state: ") {
        return Some(CacheLogLine::CacheState { bytes: mib(text_after(rest, " prompts, ")?)? });
    }
    if let Some(rest) = text_after(line, "created context checkpoint ") {
        let count = number(rest)?;
        let of = number(text_after(rest, " of ")?)?;
        let bytes = mib(text_after(rest, "size = ")?)?;
        return Some(CacheLogLine::Checkpoint { slot: slot(line), count, of, bytes });
    }
    if line.contains("saving idle slot to prompt cache") {
        return Some(CacheLogLine::SlotSaved { slot: slot(line)? });
    }
    if let Some(rest) = text_after(line, "context checkpoints enabled, max = ") {
        return Some(CacheLogLine::Checkpoints { of: number(rest)? });
    }
    if line.contains("context checkpoints disabled") {
        return Some(CacheLogLine::Checkpoints { of: 0 });
    }
    if let Some(rest) = text_after(line, "prompt cache is enabled, size limit: ") {
        let bytes = if rest.starts_with("no limit") { None } else { Some(mib(rest)?) };
        return Some(CacheLogLine::CacheLimit { bytes });
    }
    if let Some(rest) = text_after(line, "cache size limit reduced to ") {
        return Some(CacheLogLine::CacheLimit { bytes: Some(mib(rest)?) });
    }
    if line.contains("prompt cache is disabled") {
        return Some(CacheLogLine::CacheOff);
    }
    if let Some(rest) = text_after(line, "initializing, n_slots = ")
        .or_else(|| text_after(line, "initializing slots, n_slots = "))
    {
        let one_pool = text_after(rest, "kv_unified = '").map(|told| told.starts_with("true"));
        return Some(CacheLogLine::Slots { slots: number(rest)?, one_pool });
    }
    None
}

/// Parses the slot number in a line such as `slot create_check: id  1 | task 0 | …`.
fn slot(line: &str) -> Option<u32> {
    number(text_after(line, ": id ")?.trim_start())
}

fn text_after<'line>(line: &'line str, mark: &str) -> Option<&'line str> {
    line.find(mark).map(|at| &line[at + mark.len()..])
}

fn number(text: &str) -> Option<u32> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..digits].parse().ok()
}

fn mib(text: &str) -> Option<u64> {
    let (number, rest) =
        text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len()));
    if !rest.trim_start().starts_with("MiB") {
        return None;
    }
    let mib: f64 = number.parse().ok()?;
    format!("{mib}MiB").parse::<crate::units::ByteSize>().ok().map(|size| size.0)
}
