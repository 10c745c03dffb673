//! Default bounds of a server's caches. llama-server allows a prompt cache of 8 GiB and 32 checkpoints per
//! slot on any machine; two such processes can exhaust a small one.

use super::{CACHE_DEFAULT_MIB, CHECKPOINTS};
use crate::book::{LaterMemory, ModelShape, ServerRun};
use crate::defaults::Loading;
use crate::units::{ByteSize, MIB, as_f64, truncate_to_u64};

/// Variable and flags that bound the prompt cache.
pub const PROMPT_CACHE_OPTION: CacheOption =
    CacheOption { variable: "LLAMA_ARG_CACHE_RAM", flags: &["--cache-ram", "-cram"] };
/// Variable and flags that bound the checkpoints of a slot.
pub const CHECKPOINTS_OPTION: CacheOption = CacheOption {
    variable: "LLAMA_ARG_CTX_CHECKPOINTS",
    flags: &["--ctx-checkpoints", "-ctxcp", "--swa-checkpoints"],
};

/// Variable and flags of llama-server that set a bound. Builds without the feature ignore the variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheOption {
    /// Environment variable, which a flag overrides.
    pub variable: &'static str,
    /// Spellings of the flag.
    pub flags: &'static [&'static str],
}

/// Bounds that are tighter than llama-server's settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheBounds {
    /// Limit of the prompt cache in MiB; `None` if llama-server's default is as tight, or the memory unknown.
    pub prompt_cache_mib: Option<u64>,
    /// Limit of checkpoints per slot; `None` if llama-server's default is as tight, if the model needs none, or
    /// if its file is unknown.
    pub checkpoints: Option<u32>,
}

impl CacheBounds {
    /// Computes the bounds for one process. `memory`: memory of the machine, 0 if unknown; `model`: `None` if
    /// the model's file is unknown.
    pub fn for_process(
        settings: &Loading,
        memory: ByteSize,
        model: Option<(&ModelShape, &ServerRun)>,
    ) -> Self {
        if memory.0 == 0 {
            return Self::default();
        }
        let limit = truncate_to_u64(as_f64(memory.0) * settings.cache_share);
        let cache = limit.max(settings.min_prompt_cache.0) / MIB;
        let checkpoints = model.and_then(|(shape, run)| {
            let one_per_slot = LaterMemory::estimate(shape, run, None, 1).checkpoint_bytes();
            let fitting = u32::try_from(limit.checked_div(one_per_slot)?).unwrap_or(u32::MAX);
            Some(fitting.max(settings.min_checkpoints))
        });
        Self {
            prompt_cache_mib: Some(cache).filter(|mib| *mib < CACHE_DEFAULT_MIB),
            checkpoints: checkpoints.filter(|count| *count < CHECKPOINTS.1),
        }
    }

    /// Returns each bound with its option and value.
    pub fn settings(self) -> impl Iterator<Item = (CacheOption, String)> {
        let cache = self.prompt_cache_mib.map(|mib| (PROMPT_CACHE_OPTION, mib.to_string()));
        let checkpoints = self.checkpoints.map(|count| (CHECKPOINTS_OPTION, count.to_string()));
        cache.into_iter().chain(checkpoints)
    }
}
