//! Detects a server that started with fewer layers or less memory on the GPU than the best earlier process of
//! the same model, build and flags. If a device is lost or full, llama-server starts on the CPU, many times
//! slower, without a machine-readable message.

use serde::{Deserialize, Serialize};

use super::HealthPolicy;
use crate::units::{ByteSize, scale_bytes};

/// GPU use of a server when it is ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuOffload {
    /// Number of layers on GPUs according to the log; `None` if not logged.
    pub layers: Option<u32>,
    /// Total number of layers according to the log; `None` if not logged.
    pub of: Option<u32>,
    /// Bytes of VRAM on all GPUs; `None` if unknown.
    pub vram: Option<u64>,
}

/// Loss of GPU use compared with the best process of the same model, build and flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OffloadLoss {
    /// Present GPU use.
    pub now: GpuOffload,
    /// GPU use of the best process.
    pub known: GpuOffload,
}

impl GpuOffload {
    /// Returns true if any layers or VRAM are known.
    pub fn is_some(&self) -> bool {
        self.layers.is_some_and(|layers| layers > 0) || self.vram.is_some_and(|bytes| bytes > 0)
    }

    /// Returns the maximum of each value.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        let layers = self.layers.max(other.layers);
        Self {
            layers,
            of: if other.layers == layers { other.of.or(self.of) } else { self.of },
            vram: self.vram.max(other.vram),
        }
    }

    /// Parses a log line such as `load_tensors: offloaded 33/33 layers to GPU`. Adds its numbers, because a
    /// server may load several models.
    pub fn apply_log_line(&mut self, line: &str) -> bool {
        let Some((layers, of)) = layers(line) else { return false };
        self.layers = Some(self.layers.unwrap_or(0).saturating_add(layers));
        self.of = Some(self.of.unwrap_or(0).saturating_add(of));
        true
    }

    /// Returns the loss compared with `known`, the best process of the same settings; `None` if small.
    pub fn loss_against(self, known: Self, policy: &HealthPolicy) -> Option<OffloadLoss> {
        let less = |now: Option<u64>, known: Option<u64>, share: f64| {
            now.zip(known).is_some_and(|(now, known)| now < scale_bytes(known, share))
        };
        let of_layers = less(self.layers.map(u64::from), known.layers.map(u64::from), policy.offload_layers);
        let of_vram = less(self.vram, known.vram, policy.offload_vram);
        (of_layers || of_vram).then_some(OffloadLoss { now: self, known })
    }
}

impl std::fmt::Display for OffloadLoss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let of = |offload: &GpuOffload| {
            let layers = offload.layers.map(|layers| match offload.of {
                Some(of) => format!("{layers} of {of} layers"),
                None => format!("{layers} layers"),
            });
            let vram = offload.vram.map(|bytes| format!("{} of VRAM", ByteSize(bytes)));
            let known: Vec<String> = layers.into_iter().chain(vram).collect();
            if known.is_empty() { "nothing".to_owned() } else { known.join(" and ") }
        };
        write!(
            f,
            "it started with {} on GPUs; another process like it had {}",
            of(&self.now),
            of(&self.known)
        )
    }
}

/// Parses the numbers of `offloaded 33/33 layers to GPU`, a text that is unchanged since 2023.
fn layers(line: &str) -> Option<(u32, u32)> {
    let rest = &line[line.find("offloaded ")? + "offloaded ".len()..];
    let (layers, rest) = rest.split_once('/')?;
    let of = rest.split_once(" layers to GPU")?.0;
    Some((layers.trim().parse().ok()?, of.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn had(layers: u32, vram: u64) -> GpuOffload {
        GpuOffload { layers: Some(layers), of: Some(33), vram: Some(vram) }
    }

    fn lost(now: GpuOffload, known: GpuOffload) -> Option<OffloadLoss> {
        now.loss_against(known, &crate::defaults().health)
    }

    #[test]
    fn the_log_tells_the_layers_and_a_draft_model_adds_its_own() {
        let mut offload = GpuOffload::default();
        assert!(
            !offload.apply_log_line("load_tensors: offloading 32 repeating layers to GPU")
                && !offload.is_some()
        );
        assert!(offload.apply_log_line("0.00.123.456 I load_tensors: offloaded 33/33 layers to GPU"));
        assert!(offload.apply_log_line("llm_load_tensors: offloaded 10/12 layers to GPU"));
        assert_eq!((offload.layers, offload.of), (Some(43), Some(45)));
        for odd in ["offloaded /33 layers to GPU", "offloaded 1/2", "offloaded x/y layers to GPU"] {
            assert!(!GpuOffload::default().apply_log_line(odd), "{odd}");
        }
    }

    #[test]
    fn a_server_on_the_processor_has_lost_and_some_layers_more_or_less_are_the_fitting() {
        let known = had(33, 8 * GIB);
        let cpu = had(0, 0);
        let words = lost(cpu, known).unwrap().to_string();
        assert!(
            words.contains("0 of 33 layers and 0 B of VRAM") && words.contains("33 of 33 layers and 8.0 GiB"),
            "{words}"
        );
        assert_eq!(lost(had(30, 7 * GIB), known), None);
        assert!(lost(had(20, 6 * GIB), known).is_some());
        // All layers are reported on the GPU, but their VRAM is not there.
        assert!(lost(had(33, 3 * GIB), known).is_some());
    }

    #[test]
    fn what_is_not_known_is_not_lost_and_who_never_had_a_gpu_has_nothing_to_lose() {
        let known = had(33, 8 * GIB);
        assert_eq!(lost(GpuOffload::default(), known), None);
        assert_eq!(lost(GpuOffload { layers: Some(33), ..GpuOffload::default() }, known), None);
        assert_eq!(lost(had(0, 0), had(0, 0)), None);
        assert_eq!(lost(had(0, 0), GpuOffload::default()), None);
        assert_eq!(
            had(20, GIB).max(had(33, 0)),
            GpuOffload { layers: Some(33), of: Some(33), vram: Some(GIB) }
        );
    }
}
