//! The host's memory: the total that a budget in percent refers to, and what a second generation could use.
//!
//! Reads `/proc/meminfo` only. A limit of a container (cgroup) is not looked at.

use serde::{Deserialize, Serialize};

use crate::SensorError;

/// Memory of the host, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostTotals {
    /// `MemTotal`.
    pub total: u64,
    /// `MemAvailable`: what new allocations can take without swapping, as the kernel estimates it.
    pub available: u64,
}

/// Reads [`HostTotals`].
pub fn host_totals() -> Result<HostTotals, SensorError> {
    use procfs::Current as _;
    let what = || "/proc/meminfo".to_owned();
    let info = procfs::Meminfo::current().map_err(|source| SensorError::Proc { what: what(), source })?;
    let available =
        info.mem_available.ok_or_else(|| SensorError::NoField { what: what(), field: "MemAvailable" })?;
    Ok(HostTotals { total: info.mem_total, available })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_has_memory_and_some_of_it_is_available() {
        let totals = host_totals().unwrap();
        assert!(totals.available > 0 && totals.available <= totals.total, "{totals:?}");
    }
}
