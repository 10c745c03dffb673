//! What a server is told to keep: caches that fill up by design, so that growth inside them is no leak.
//!
//! ```text
//!  arguments, environment, build ──> declared ─┐
//!  lines of its log ───────────────> learnt ───┴──> bytes, measured, words
//! ```
//!
//! Two pools of llama-server's are in host memory: the prompt cache (`--cache-ram`) and the checkpoints of contexts that
//! cannot be cut (`--ctx-checkpoints`, for models with sliding windows or recurrent layers). What the log says beats what
//! was declared: the log is about this process.

mod log;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use log::{Learned, read};

use crate::book::{LEAST_BUILD_NUMBER, Run};
use crate::units::{ByteSize, MIB};

/// First build of llama.cpp with the prompt cache in host memory.
const CACHE_SINCE: u32 = 6723;
/// Its bound when nothing is said, in MiB.
const CACHE_DEFAULT_MIB: u64 = 8192;
/// First build with checkpoints of any context, and the number of them for a slot when nothing is said.
const CHECKPOINTS: (u32, u32) = (6685, 32);
/// The same for the time when only sliding windows had them.
const SWA_CHECKPOINTS: (u32, u32) = (6160, 3);

/// Where a number is from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Origin {
    Default,
    /// The build is older than the feature.
    Older,
    /// A flag or a variable, as written.
    Given(String),
    /// The log of the process.
    Log,
    /// `/props`.
    Props,
}

impl std::fmt::Display for Origin {
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
struct Known<T> {
    value: T,
    from: Origin,
}

/// What one server is told to keep in host memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeclaredMemory {
    /// Bound of the prompt cache in bytes; `None` for no bound.
    cache: Known<Option<u64>>,
    /// Checkpoints for each slot.
    checkpoints: Known<u32>,
    slots: Known<u32>,
    /// The slots share one context. What another version has written says nothing of it.
    #[serde(default)]
    one_pool: bool,
    /// Bytes of the largest checkpoint that the log told.
    checkpoint_size: Option<u64>,
    /// Bytes in the prompt cache, as the log told last.
    cache_now: Option<u64>,
    /// Bytes in the checkpoints of each slot, as the log told last.
    slots_now: BTreeMap<u32, u64>,
    /// Memory available on the machine.
    available: Option<u64>,
}

/// A pool that fills by design.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pool {
    /// The prompt cache.
    PromptCache,
    /// Checkpoints of contexts.
    Checkpoints,
}

impl Pool {
    /// The name for people.
    pub const fn noun(self) -> &'static str {
        match self {
            Self::PromptCache => "prompt cache",
            Self::Checkpoints => "context checkpoints",
        }
    }
}

/// What a server is told to keep in one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Declared {
    /// Which.
    pub pool: Pool,
    /// Bytes at most.
    pub most: u64,
    /// Bytes that are in it now; `None` where its log does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub now: Option<u64>,
}

impl Default for DeclaredMemory {
    /// A server of the newest build that is told nothing.
    fn default() -> Self {
        Self::declared(&[], &BTreeMap::new(), None)
    }
}

impl DeclaredMemory {
    /// Nothing is kept.
    pub const NONE: Self = Self {
        cache: Known { value: Some(0), from: Origin::Older },
        checkpoints: Known { value: 0, from: Origin::Older },
        slots: Known { value: 0, from: Origin::Default },
        one_pool: false,
        checkpoint_size: None,
        cache_now: None,
        slots_now: BTreeMap::new(),
        available: None,
    };

    /// From what it is started with. `env` holds the variables that the process gets; `build` is llama.cpp's build number,
    /// if known: without one the newest defaults are taken, which are the larger ones. A value that llama-server would not
    /// take is passed over: it will not start with it. Slots are told by [`DeclaredMemory::slots`] or the log, too.
    pub fn declared(args: &[String], env: &BTreeMap<String, String>, build: Option<u32>) -> Self {
        let build = build.filter(|build| *build >= LEAST_BUILD_NUMBER);
        let since = |first: u32| build.is_none_or(|build| build >= first);
        let given = |flags: &[&str], variable: &str| given(args, env, flags, variable);

        let cache = match given(&["--cache-ram", "-cram"], "LLAMA_ARG_CACHE_RAM") {
            Some((mib, text)) => {
                let bytes = u64::try_from(mib).ok().map(|mib| mib.saturating_mul(MIB));
                Known { value: bytes, from: Origin::Given(text) }
            }
            None if since(CACHE_SINCE) => {
                Known { value: Some(CACHE_DEFAULT_MIB * MIB), from: Origin::Default }
            }
            None => Known { value: Some(0), from: Origin::Older },
        };
        let flags = ["--ctx-checkpoints", "-ctxcp", "--swa-checkpoints"];
        let checkpoints = match given(&flags, "LLAMA_ARG_CTX_CHECKPOINTS") {
            Some((count, text)) => {
                Known { value: u32::try_from(count).unwrap_or(0), from: Origin::Given(text) }
            }
            None if since(CHECKPOINTS.0) => Known { value: CHECKPOINTS.1, from: Origin::Default },
            None if since(SWA_CHECKPOINTS.0) => Known { value: SWA_CHECKPOINTS.1, from: Origin::Default },
            None => Known { value: 0, from: Origin::Older },
        };
        let slots = given(&["--parallel", "-np"], "LLAMA_ARG_N_PARALLEL")
            .and_then(|(slots, text)| Some((u32::try_from(slots).ok().filter(|slots| *slots > 0)?, text)))
            .map_or_else(
                || Known { value: crate::defaults().lifecycle.unknown_slots, from: Origin::Default },
                |(value, text)| Known { value, from: Origin::Given(text) },
            );
        let one_pool = Run::of(args, env).is_one_pool();
        Self { cache, checkpoints, slots, one_pool, ..Self::NONE }
    }

    /// It has so many slots (`/props`).
    pub fn slots(&mut self, slots: u32) {
        self.slots = Known { value: slots, from: Origin::Props };
    }

    /// Whether all its slots share one context, so that one of them can hold all of it. Where there is one slot it does not matter.
    pub const fn is_one_pool(&self) -> bool {
        self.one_pool
    }

    /// The machine has so many bytes available: what has no bound of its own is reckoned with half of that.
    pub fn available(&mut self, bytes: u64) {
        self.available = Some(bytes);
    }

    /// Takes a line of the log in. `None` if it says nothing about this.
    pub fn learn(&mut self, line: &str) -> Option<Learned> {
        let learned = read(line)?;
        match learned {
            Learned::CacheState { bytes } => self.cache_now = Some(bytes),
            Learned::CacheLimit { bytes } => self.cache = Known { value: bytes, from: Origin::Log },
            Learned::CacheOff => self.cache = Known { value: Some(0), from: Origin::Log },
            Learned::Checkpoint { slot, count, of, bytes } => {
                self.checkpoint_size = Some(self.checkpoint_size.unwrap_or(0).max(bytes));
                self.checkpoints = Known { value: of, from: Origin::Log };
                self.slots_now.insert(slot.unwrap_or(0), u64::from(count).saturating_mul(bytes));
            }
            Learned::SlotSaved { slot } => {
                if let Some(bytes) = self.slots_now.get_mut(&slot) {
                    *bytes = 0;
                }
            }
            Learned::Checkpoints { of } => self.checkpoints = Known { value: of, from: Origin::Log },
            Learned::Slots { slots, one_pool } => {
                self.slots = Known { value: slots, from: Origin::Log };
                self.one_pool = one_pool.unwrap_or(self.one_pool);
            }
        }
        Some(learned)
    }

    /// Bytes of host memory that it may keep.
    pub fn bytes(&self) -> u64 {
        self.cache_bytes().saturating_add(self.checkpoint_bytes())
    }

    /// The bound of its prompt cache in bytes; `None` where it has none.
    pub fn cache_bound(&self) -> Option<u64> {
        self.cache.value
    }

    /// Context checkpoints that each slot may keep, and slots. How large one is, is known when the log tells.
    pub fn checkpoints(&self) -> (u32, u32) {
        (self.checkpoints.value, self.slots.value)
    }

    /// Bytes that it may keep in pools whose present size its log does not tell: the part of [`DeclaredMemory::bytes`] that is
    /// still to be allowed for where [`DeclaredMemory::measured`] is subtracted.
    pub fn unmeasured(&self) -> u64 {
        let cache = if self.cache_now.is_some() { 0 } else { self.cache_bytes() };
        let checkpoints = if self.slots_now.is_empty() { self.checkpoint_bytes() } else { 0 };
        cache.saturating_add(checkpoints)
    }

    /// Bytes that it keeps now, where its log tells: the host's part of [`crate::sample::Sample::pools`]. Builds since
    /// about b9000 tell it only with `--log-verbosity 4`.
    pub fn measured(&self) -> Option<u64> {
        if self.cache_now.is_none() && self.slots_now.is_empty() {
            return None;
        }
        let checkpoints = self.slots_now.values().copied().fold(0, u64::saturating_add);
        Some(self.cache_now.unwrap_or(0).saturating_add(checkpoints))
    }

    /// Its pools one by one; one that holds nothing is left out.
    pub fn pools(&self) -> Vec<Declared> {
        let checkpoints = (!self.slots_now.is_empty())
            .then(|| self.slots_now.values().copied().fold(0, u64::saturating_add));
        let all = [
            Declared { pool: Pool::PromptCache, most: self.cache_bytes(), now: self.cache_now },
            Declared { pool: Pool::Checkpoints, most: self.checkpoint_bytes(), now: checkpoints },
        ];
        all.into_iter().filter(|declared| declared.most > 0 || declared.now.is_some()).collect()
    }

    fn cache_bytes(&self) -> u64 {
        // No bound in bytes: upstream stops at as many tokens as the context has, whose size nobody tells.
        self.cache.value.unwrap_or_else(|| self.available.map_or(CACHE_DEFAULT_MIB * MIB, |bytes| bytes / 2))
    }

    fn checkpoint_bytes(&self) -> u64 {
        let count = u64::from(self.slots.value) * u64::from(self.checkpoints.value);
        count.saturating_mul(self.checkpoint_size.unwrap_or(0))
    }

    /// Where each number comes from, one sentence each, for status.
    pub fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        let cache = ByteSize(self.cache_bytes());
        words.push(match (self.cache.value, &self.cache.from) {
            (Some(0), from) => format!("no prompt cache ({from})"),
            (Some(_), from) => format!("prompt cache: {cache} ({from})"),
            (None, from) => format!(
                "prompt cache: without a bound ({from}), reckoned with {cache}, {}",
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
                "context checkpoints: {count} ({}) for each of {slots} slots ({}); their size is not known, so nothing is \
                 allowed for them",
                self.checkpoints.from, self.slots.from
            ),
        });
        words
    }
}

/// The value of a flag, else of a variable, with the text it came from. The last flag counts, as in llama-server.
fn given(
    args: &[String],
    env: &BTreeMap<String, String>,
    flags: &[&str],
    variable: &str,
) -> Option<(i64, String)> {
    let at = args.iter().rposition(|word| flags.contains(&normal(word).as_str()));
    if let Some(at) = at
        && let Some(value) = args.get(at + 1)
        && let Ok(number) = value.trim().parse()
    {
        return Some((number, format!("{} {value}", args[at])));
    }
    let value = env.get(variable)?;
    Some((value.trim().parse().ok()?, format!("{variable}={value}")))
}

/// llama-server takes `_` for `-` in its long flags.
fn normal(word: &str) -> String {
    if word.starts_with("--") { word.replace('_', "-") } else { word.to_owned() }
}
