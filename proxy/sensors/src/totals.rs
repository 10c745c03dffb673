//! The host's memory: its total, and the memory available for a second process.
//!
//! `/proc/meminfo` describes the whole host. In a container, lower limits replace its values.

use serde::{Deserialize, Serialize};

use crate::cgroup;
use crate::error::SensorError;

/// Memory that we may use, in bytes: the host's, or the container's share of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostTotals {
    /// `MemTotal`, or the limit of the container.
    pub total: u64,
    /// Memory available without swapping: the kernel's `MemAvailable`, or the rest of the container's limit.
    pub available: u64,
}

/// Reads the host's memory, or the container's limits.
///
/// # Errors
///
/// `/proc/meminfo` cannot be read, or is from a kernel before 3.14.
pub fn host_totals() -> Result<HostTotals, SensorError> {
    use procfs::Current as _;
    let what = || "/proc/meminfo".to_owned();
    let info = procfs::Meminfo::current().map_err(|source| SensorError::Proc { what: what(), source })?;
    let available =
        info.mem_available.ok_or_else(|| SensorError::NoField { what: what(), field: "MemAvailable" })?;
    Ok(match cgroup::cgroup_allowance(info.mem_total) {
        Some(allowed) => {
            HostTotals { total: info.mem_total.min(allowed.limit), available: available.min(allowed.left) }
        }
        None => HostTotals { total: info.mem_total, available },
    })
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
