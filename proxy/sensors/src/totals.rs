//! The host's memory: its total, which a budget in percent refers to, and the memory available for a second
//! process.
//!
//! `/proc/meminfo` describes the whole host. If our control groups have lower limits, as they usually do in a
//! container, these limits are used instead.

use serde::{Deserialize, Serialize};

use crate::{SensorError, cgroup};

/// Memory that we may use, in bytes: the host's, or less in a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostTotals {
    /// `MemTotal`, or the limit of the container.
    pub total: u64,
    /// Memory available for new allocations without swapping: `MemAvailable`, as estimated by the kernel,
    /// or what is left under the container's limit.
    pub available: u64,
}

/// Reads [`HostTotals`].
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
