//! Reasons for unknown VRAM, as sentences for status and logs; `docs/sensors.md` gives the remedies.

use serde::{Serialize, Serializer};
use warden_policies::GpuIndex;

/// Reason for unknown VRAM, worded to follow "the VRAM policy is off because" or "… off for GPU 0 because".
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum VramUnknown {
    /// No device was found; the text names the missing driver.
    #[error("no GPU is visible here: {0}")]
    NoDevice(String),
    /// Drivers list all their processes, and none of them is the backend's. This is normal for a backend that
    /// computes on the CPU, and for any backend in its first second.
    #[error("no driver lists this backend on a GPU")]
    NotOnAny,
    #[error("{} uses the host's memory, so the host series watches all there is", gpu_name(*.0))]
    Unified(GpuIndex),
    #[error("the driver does not say which processes use {} ({reason})", gpu_name(*.gpu))]
    NotListed { gpu: GpuIndex, reason: String },
    /// The driver lists the backend without its bytes, or with 0 bytes, which no GPU program holds.
    #[error("the driver lists this backend on {} but not the bytes that it holds; {doubt}", gpu_name(*.gpu))]
    NoBytes { gpu: GpuIndex, doubt: EstimateDoubt },
    /// The listed processes cannot be matched with the processes that we see.
    #[error(
        "the processes that the driver lists on {} cannot be told apart in a container with its own process \
         ids; {doubt}",
        gpu_name(*.gpu)
    )]
    Hidden { gpu: GpuIndex, doubt: EstimateDoubt },
    #[error("what the backend holds on {} cannot be read: {reason}", gpu_name(*.gpu))]
    Unreadable { gpu: GpuIndex, reason: String },
}

/// Reason for a missing estimate of VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum EstimateDoubt {
    /// The memory use was not read before the spawn.
    #[error("and what was in use before it started is not known")]
    NoBaseline,
    /// The device was in use before the backend was spawned.
    #[error("and the GPU was in use before it started")]
    WasInUse,
    /// Another backend of this gateway ran at the same time.
    #[error("and another backend runs beside it")]
    NotAlone,
    /// Other programs are on the device now.
    #[error("and others use the GPU too")]
    Shared,
    /// Windows uses the GPU for its desktop.
    #[error("and Windows uses the GPU too")]
    Windows,
    /// The driver does not report the bytes in use.
    #[error("and the driver does not say what is in use in all")]
    NoTotals,
}

fn gpu_name(index: GpuIndex) -> String {
    format!("GPU {}", index.0)
}

impl VramUnknown {
    /// Returns the reason as a whole sentence.
    pub fn sentence(&self) -> String {
        match self.gpu() {
            Some(gpu) => format!("the VRAM policy is off for {} because {self}", gpu_name(gpu)),
            None => format!("the VRAM policy is off because {self}"),
        }
    }

    /// Returns the GPU whose VRAM is unknown; other GPUs may be known. `None` if all are unknown.
    pub fn gpu(&self) -> Option<GpuIndex> {
        match self {
            Self::NoDevice(_) | Self::NotOnAny | Self::Unified(_) => None,
            Self::NotListed { gpu, .. }
            | Self::NoBytes { gpu, .. }
            | Self::Hidden { gpu, .. }
            | Self::Unreadable { gpu, .. } => Some(*gpu),
        }
    }

    /// Returns whether the missing value is no fault, because the backend has no VRAM to watch.
    pub fn is_normal(&self) -> bool {
        matches!(self, Self::NoDevice(_) | Self::NotOnAny | Self::Unified(_))
    }
}

impl Serialize for VramUnknown {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_keeps_vram_from_being_known_is_a_sentence() {
        let gpu = GpuIndex(1);
        let reason = || "Not Supported".to_owned();
        let doubts = [
            EstimateDoubt::NoBaseline,
            EstimateDoubt::WasInUse,
            EstimateDoubt::NotAlone,
            EstimateDoubt::Shared,
            EstimateDoubt::Windows,
            EstimateDoubt::NoTotals,
        ];
        let whys = [
            VramUnknown::NoDevice("NVIDIA's library is not installed".to_owned()),
            VramUnknown::NotOnAny,
            VramUnknown::Unified(gpu),
            VramUnknown::NotListed { gpu, reason: reason() },
            VramUnknown::Hidden { gpu, doubt: EstimateDoubt::Shared },
            VramUnknown::Unreadable { gpu, reason: reason() },
        ];
        let all = whys.into_iter().chain(doubts.map(|doubt| VramUnknown::NoBytes { gpu, doubt }));
        insta::assert_snapshot!(all.map(|why| why.sentence() + "\n").collect::<String>());
    }
}
