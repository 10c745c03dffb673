//! Settings that select other kernels, and the server's support for them.

use tokio_util::sync::CancellationToken;

use super::super::server::{TestBench, TrialSettings, run_with_flag};
use crate::error::Result;

/// One thread: more would only spin on a machine that just compiled. One slot: the second request finds the
/// first one's prompt in the cache.
pub(super) const COMMON_FLAGS: [&str; 6] = ["-t", "1", "-c", "512", "-np", "1"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KernelSetting {
    /// CPU; weights are repacked on load if the CPU has kernels for that, including AMX.
    Repacked,
    NotRepacked,
    /// CPU, with flash attention over a quantised KV cache.
    QuantisedCache,
    Gpu,
    /// GPU, with each kernel launched separately.
    GpuWithoutGraphs,
    /// GPU, with flash attention over a quantised KV cache.
    GpuQuantisedCache,
}

/// Flags that the server supports according to its `--help`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KnownFlags {
    pub(super) no_repack: bool,
    /// `-fa` takes the word `on`; in older servers `-fa` is a switch.
    pub(super) fa_takes_word: bool,
}

impl KnownFlags {
    /// Parses the server's help. A server without help counts as supporting no flag.
    pub(super) async fn from_server(bench: &TestBench<'_>, cancel: &CancellationToken) -> Result<Self> {
        let trial = TrialSettings { hide_gpus: true, ..bench.trial.clone() };
        let help = run_with_flag(bench.binary, "--help", &trial, cancel).await?;
        Ok(help.map(|(_, help)| Self::in_help(&help)).unwrap_or_default())
    }

    fn in_help(help: &str) -> Self {
        let flash = help.lines().find(|line| line.contains("--flash-attn")).unwrap_or_default();
        Self {
            no_repack: help.contains("--no-repack"),
            fa_takes_word: flash.contains("on|off") || flash.contains("FA"),
        }
    }
}

impl KernelSetting {
    pub(super) fn all(flags: KnownFlags, has_gpu: bool) -> Vec<Self> {
        let all = [
            (Self::Repacked, true),
            (Self::NotRepacked, flags.no_repack),
            (Self::QuantisedCache, true),
            (Self::Gpu, has_gpu),
            (Self::GpuWithoutGraphs, has_gpu),
            (Self::GpuQuantisedCache, has_gpu),
        ];
        all.into_iter().filter_map(|(setting, here)| here.then_some(setting)).collect()
    }

    pub(super) const fn words(self) -> &'static str {
        match self {
            Self::Repacked => "repacked",
            Self::NotRepacked => "--no-repack",
            Self::QuantisedCache => "repacked, -fa on -ctk q8_0 -ctv q8_0",
            Self::Gpu => "-ngl 99",
            Self::GpuWithoutGraphs => "-ngl 99, GGML_CUDA_DISABLE_GRAPHS=1",
            Self::GpuQuantisedCache => "-ngl 99, -fa on -ctk q8_0 -ctv q8_0",
        }
    }

    pub(super) fn flags(self, known: KnownFlags) -> Vec<&'static str> {
        let flash = if known.fa_takes_word { &["-fa", "on"][..] } else { &["-fa"] };
        match self {
            Self::Repacked | Self::Gpu | Self::GpuWithoutGraphs => Vec::new(),
            Self::NotRepacked => vec!["--no-repack"],
            Self::QuantisedCache | Self::GpuQuantisedCache => {
                [flash, &["-ctk", "q8_0", "-ctv", "q8_0"]].concat()
            }
        }
    }

    pub(super) fn variables(self) -> Vec<(String, String)> {
        match self {
            Self::GpuWithoutGraphs => vec![("GGML_CUDA_DISABLE_GRAPHS".to_owned(), "1".to_owned())],
            _ => Vec::new(),
        }
    }

    pub(super) const fn on_gpu(self) -> bool {
        matches!(self, Self::Gpu | Self::GpuWithoutGraphs | Self::GpuQuantisedCache)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_those_of_the_servers_own_help() {
        let new = "-fa,   --flash-attn [on|off|auto]       set Flash Attention use\n-nr, --no-repack  disable weight repacking";
        let known = KnownFlags::in_help(new);
        assert_eq!(known, KnownFlags { no_repack: true, fa_takes_word: true });
        assert_eq!(KernelSetting::QuantisedCache.flags(known), ["-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"]);
        let old = KnownFlags::in_help("-fa,   --flash-attn      enable Flash Attention (default: disabled)");
        assert_eq!(old, KnownFlags::default());
        assert_eq!(KernelSetting::QuantisedCache.flags(old)[..2], ["-fa", "-ctk"]);
        assert_eq!(KernelSetting::all(old, false), [KernelSetting::Repacked, KernelSetting::QuantisedCache]);
        assert_eq!(KernelSetting::all(known, true).len(), 6);
    }
}
