//! Declared memory: caches of a server that fill by design, so that growth inside them is no leak.
//!
//! llama-server has two such pools in host memory: the prompt cache (`--cache-ram`), and the checkpoints of
//! contexts that cannot be truncated (`--ctx-checkpoints`, for models with sliding windows or recurrent
//! layers). Values in the log replace declared values, because the log describes this process.

mod bounds;
mod log;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use bounds::{CHECKPOINTS_OPTION, CacheBounds, CacheOption, PROMPT_CACHE_OPTION};
pub use log::{CacheLogLine, parse_line};

use crate::book::{CommandWords, LEAST_BUILD_NUMBER, ServerRun};
use crate::units::{ByteSize, MIB};

/// First build of llama.cpp with the prompt cache in host memory.
const PROMPT_CACHE_SINCE: u32 = 6723;
const CACHE_DEFAULT_MIB: u64 = 8192;
/// First build with checkpoints for any kind of context, and its default number of checkpoints per slot.
const CHECKPOINTS: (u32, u32) = (6685, 32);
/// First build with checkpoints for sliding windows only, and its default number of checkpoints per slot.
const SWA_CHECKPOINTS: (u32, u32) = (6160, 3);
/// Variable of `--swa-checkpoints` in those builds.
const SWA_CHECKPOINTS_VARIABLE: &str = "LLAMA_ARG_SWA_CHECKPOINTS";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ValueSource {
    Default,
    /// The build is older than the feature.
    Older,
    /// Flag or variable, as written.
    Given(String),
    /// The log of the process.
    Log,
    /// llama-server's `/props`.
    Props,
}

impl std::fmt::Display for ValueSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Default => f.write_str("llama-server's default"),
            Self::Older => f.write_str("this build has none"),
            Self::Given(text) => write!(f, "`{text}`"),
            Self::Log => f.write_str("its log"),
            Self::Props => f.write_str("it says so"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SourcedValue<T> {
    value: T,
    from: ValueSource,
}

/// Host memory that one server may use for its caches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeclaredMemory {
    /// Limit of the prompt cache in bytes; `None` for no limit.
    cache: SourcedValue<Option<u64>>,
    checkpoints: SourcedValue<u32>,
    slots: SourcedValue<u32>,
    /// The slots share one context. Records of older versions lack this field.
    #[serde(default)]
    one_pool: bool,
    /// Bytes of the largest checkpoint in the log.
    checkpoint_size: Option<u64>,
    /// Bytes in the prompt cache, by the latest log line.
    cache_now: Option<u64>,
    /// Bytes in each slot's checkpoints, by the latest log lines.
    slots_now: BTreeMap<u32, u64>,
    /// Available bytes of the machine.
    available: Option<u64>,
}

/// A pool that fills by design.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CachePool {
    /// The prompt cache.
    PromptCache,
    /// Context checkpoints.
    Checkpoints,
}

impl CachePool {
    /// Returns the name for people.
    pub const fn noun(self) -> &'static str {
        match self {
            Self::PromptCache => "prompt cache",
            Self::Checkpoints => "context checkpoints",
        }
    }
}

/// Declared size of one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeclaredPool {
    /// Pool that these sizes describe.
    pub pool: CachePool,
    /// Most bytes.
    pub most: u64,
    /// Present bytes; `None` if the log does not report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub now: Option<u64>,
}

impl Default for DeclaredMemory {
    /// Returns the values of the newest build without flags.
    fn default() -> Self {
        Self::from_command(&[], &BTreeMap::new(), None)
    }
}

impl DeclaredMemory {
    /// No pools.
    pub const NONE: Self = Self {
        cache: SourcedValue { value: Some(0), from: ValueSource::Older },
        checkpoints: SourcedValue { value: 0, from: ValueSource::Older },
        slots: SourcedValue { value: 0, from: ValueSource::Default },
        one_pool: false,
        checkpoint_size: None,
        cache_now: None,
        slots_now: BTreeMap::new(),
        available: None,
    };

    /// Reads the values from a command. `env`: the process's variables; `build`: llama.cpp's build number; an
    /// unknown build gets the newest defaults, which are the largest. Invalid values are ignored:
    /// llama-server does not start with them.
    pub fn from_command(args: &[String], env: &BTreeMap<String, String>, build: Option<u32>) -> Self {
        let build = build.filter(|build| *build >= LEAST_BUILD_NUMBER);
        let since = |first: u32| build.is_none_or(|build| build >= first);
        let command = CommandWords::new(args, env);
        let given = |flags: &[&str], variable: &str| flag_or_variable(&command, flags, variable);

        let cache = match given(PROMPT_CACHE_OPTION.flags, PROMPT_CACHE_OPTION.variable) {
            // An older build ignores the variable.
            _ if !since(PROMPT_CACHE_SINCE) => SourcedValue { value: Some(0), from: ValueSource::Older },
            Some((mib, text)) => {
                let bytes = u64::try_from(mib).ok().map(|mib| mib.saturating_mul(MIB));
                SourcedValue { value: bytes, from: ValueSource::Given(text) }
            }
            None => SourcedValue { value: Some(CACHE_DEFAULT_MIB * MIB), from: ValueSource::Default },
        };
        let variable =
            if since(CHECKPOINTS.0) { CHECKPOINTS_OPTION.variable } else { SWA_CHECKPOINTS_VARIABLE };
        let checkpoints = match given(CHECKPOINTS_OPTION.flags, variable) {
            Some((count, text)) => {
                SourcedValue { value: u32::try_from(count).unwrap_or(0), from: ValueSource::Given(text) }
            }
            None if since(CHECKPOINTS.0) => SourcedValue { value: CHECKPOINTS.1, from: ValueSource::Default },
            None if since(SWA_CHECKPOINTS.0) => {
                SourcedValue { value: SWA_CHECKPOINTS.1, from: ValueSource::Default }
            }
            None => SourcedValue { value: 0, from: ValueSource::Older },
        };
        let slots = given(&["--parallel", "-np"], "LLAMA_ARG_N_PARALLEL")
            .and_then(|(slots, text)| Some((u32::try_from(slots).ok().filter(|slots| *slots > 0)?, text)))
            .map_or_else(
                || SourcedValue {
                    value: crate::defaults().lifecycle.unknown_slots,
                    from: ValueSource::Default,
                },
                |(value, text)| SourcedValue { value, from: ValueSource::Given(text) },
            );
        let one_pool = ServerRun::from_command(args, env).is_one_pool();
        Self { cache, checkpoints, slots, one_pool, ..Self::NONE }
    }

    /// Sets the number of slots that `/props` reports.
    pub fn set_slots(&mut self, slots: u32) {
        self.slots = SourcedValue { value: slots, from: ValueSource::Props };
    }

    /// Returns true if all slots share one context, so that one slot can use all of it.
    pub const fn is_one_pool(&self) -> bool {
        self.one_pool
    }

    /// Sets the machine's available bytes; half of them are assumed for a prompt cache without a limit.
    pub fn set_available(&mut self, bytes: u64) {
        self.available = Some(bytes);
    }

    /// Applies a log line and returns its content; `None` if the line does not describe a cache.
    pub fn apply_log_line(&mut self, line: &str) -> Option<CacheLogLine> {
        let learned = parse_line(line)?;
        match learned {
            CacheLogLine::CacheState { bytes } => self.cache_now = Some(bytes),
            CacheLogLine::CacheLimit { bytes } => {
                self.cache = SourcedValue { value: bytes, from: ValueSource::Log }
            }
            CacheLogLine::CacheOff => self.cache = SourcedValue { value: Some(0), from: ValueSource::Log },
            CacheLogLine::Checkpoint { slot, count, of, bytes } => {
                self.checkpoint_size = Some(self.checkpoint_size.unwrap_or(0).max(bytes));
                self.checkpoints = SourcedValue { value: of, from: ValueSource::Log };
                self.slots_now.insert(slot.unwrap_or(0), u64::from(count).saturating_mul(bytes));
            }
            CacheLogLine::SlotSaved { slot } => {
                if let Some(bytes) = self.slots_now.get_mut(&slot) {
                    *bytes = 0;
                }
            }
            CacheLogLine::Checkpoints { of } => {
                self.checkpoints = SourcedValue { value: of, from: ValueSource::Log }
            }
            CacheLogLine::Slots { slots, one_pool } => {
                self.slots = SourcedValue { value: slots, from: ValueSource::Log };
                self.one_pool = one_pool.unwrap_or(self.one_pool);
            }
        }
        Some(learned)
    }

    /// Returns the most bytes of host memory that all pools can hold.
    pub fn bytes(&self) -> u64 {
        self.cache_bytes().saturating_add(self.checkpoint_bytes())
    }

    /// Returns the limit of the prompt cache in bytes; `None` without a limit.
    pub fn cache_bound(&self) -> Option<u64> {
        self.cache.value
    }

    /// Returns the limit of checkpoints per slot, and the slots. Only the log shows a checkpoint's size.
    pub fn checkpoints(&self) -> (u32, u32) {
        (self.checkpoints.value, self.slots.value)
    }

    /// Returns the most bytes of the pools whose present size the log does not report.
    pub fn unmeasured(&self) -> u64 {
        let cache = if self.cache_now.is_some() { 0 } else { self.cache_bytes() };
        let checkpoints = if self.slots_now.is_empty() { self.checkpoint_bytes() } else { 0 };
        cache.saturating_add(checkpoints)
    }

    /// Returns the present bytes of the pools; `None` if the log does not report them: builds since about
    /// b9000 do so only with `--log-verbosity 4`.
    pub fn measured(&self) -> Option<u64> {
        if self.cache_now.is_none() && self.slots_now.is_empty() {
            return None;
        }
        let checkpoints = self.slots_now.values().copied().fold(0, u64::saturating_add);
        Some(self.cache_now.unwrap_or(0).saturating_add(checkpoints))
    }

    /// Returns all pools with a limit above zero.
    pub fn pools(&self) -> Vec<DeclaredPool> {
        let checkpoints = (!self.slots_now.is_empty())
            .then(|| self.slots_now.values().copied().fold(0, u64::saturating_add));
        let all = [
            DeclaredPool { pool: CachePool::PromptCache, most: self.cache_bytes(), now: self.cache_now },
            DeclaredPool { pool: CachePool::Checkpoints, most: self.checkpoint_bytes(), now: checkpoints },
        ];
        all.into_iter().filter(|declared| declared.most > 0 || declared.now.is_some()).collect()
    }

    fn cache_bytes(&self) -> u64 {
        // Without a limit in bytes, llama-server limits the cache in tokens, and does not report their size.
        self.cache.value.unwrap_or_else(|| self.available.map_or(CACHE_DEFAULT_MIB * MIB, |bytes| bytes / 2))
    }

    fn checkpoint_bytes(&self) -> u64 {
        let count = u64::from(self.slots.value) * u64::from(self.checkpoints.value);
        count.saturating_mul(self.checkpoint_size.unwrap_or(0))
    }

    /// Returns a sentence on each value and its source, for `status`; none for [`Self::NONE`].
    pub fn source_sentences(&self) -> Vec<String> {
        let mut words = Vec::new();
        if self.slots.value == 0 {
            return words;
        }
        let cache = ByteSize(self.cache_bytes());
        words.push(match (self.cache.value, &self.cache.from) {
            (Some(0), from) => format!("no prompt cache ({from})"),
            (Some(_), from) => format!("prompt cache: {cache} ({from})"),
            (None, from) => format!(
                "prompt cache: without a bound ({from}), estimated as {cache}, {}",
                if self.available.is_some() {
                    "half of the memory available"
                } else {
                    "llama-server's default"
                }
            ),
        });
        if let Some(now) = self.cache_now {
            words.push(format!("the prompt cache holds {} (its log)", ByteSize(now)));
        }
        let (count, slots) = (self.checkpoints.value, self.slots.value);
        words.push(match self.checkpoint_size {
            _ if count == 0 => format!("no context checkpoints ({})", self.checkpoints.from),
            Some(size) => format!(
                "context checkpoints: {count} ({}) for each of {slots} slots ({}), each {} (its log)",
                self.checkpoints.from,
                self.slots.from,
                ByteSize(size)
            ),
            None => format!(
                "context checkpoints: {count} ({}) for each of {slots} slots ({}); their size is not known, so \
                 nothing is allowed for them",
                self.checkpoints.from, self.slots.from
            ),
        });
        words
    }
}

/// Returns the number of a flag, or else of a variable, with its text.
fn flag_or_variable(command: &CommandWords<'_>, flags: &[&str], variable: &str) -> Option<(i64, String)> {
    if let Some((flag, value)) = command.flag(flags)
        && let Ok(number) = value.trim().parse()
    {
        return Some((number, format!("{flag} {value}")));
    }
    let value = command.variable(variable)?;
    Some((value.trim().parse().ok()?, format!("{variable}={value}")))
}
