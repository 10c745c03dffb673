//! Determines the VRAM of a process group on one device, from the driver's list of processes.
//!
//! ```text
//! list has bytes for our pids ───────────────────────────────> Process
//!   │ bytes missing or 0, or no entry can be matched
//!   v
//! device unused before the spawn, only ours on it now ───────> Estimate (used now − used before)
//!   │ no
//!   v
//! Unknown, with the reason
//! ```

use std::collections::{BTreeMap, BTreeSet};

use warden_policies::{GpuIndex, VramReading, VramSource};

use super::snapshot::DeviceBaseline;
use super::why::{EstimateDoubt, VramUnknown};

/// Largest number of bytes in use on a device without any program. Drivers use a few MiB themselves; a CUDA
/// context or a desktop takes more than 100 MiB.
const IDLE_DEVICE_BYTES: u64 = 64 << 20;

/// Smallest number of bytes that any program on a GPU uses.
const NO_PROGRAM_BYTES: u64 = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListedProcess {
    /// Pid of the process as the driver reports it.
    pub(super) pid: u32,
    /// Bytes of the process, if reported; the same if the driver lists it twice (compute and graphics).
    pub(super) bytes: Option<u64>,
    pub(super) who: ProcessOwner,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessOwner {
    /// The process was found: its ids in our pid namespace.
    Seen { pid: u32, group: u32 },
    /// The process is in another pid namespace, so it is not our child.
    Other,
    /// The process was not found: it has ended, or is hidden from us.
    Unseen,
}

impl ProcessOwner {
    /// The leader counts even if it does not lead its group, as for host memory.
    pub(super) fn belongs_to(self, child: ChildProcesses<'_>) -> bool {
        let ChildProcesses { leader, outside } = child;
        matches!(self, Self::Seen { pid, group } if pid == leader || group == leader || outside.contains(&pid))
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ChildProcesses<'a> {
    /// Pid of the leader; all members of its group are included.
    pub(super) leader: u32,
    pub(super) outside: &'a [u32],
}

#[derive(Clone, Debug)]
pub(super) struct DeviceUse<'a> {
    pub(super) gpu: GpuIndex,
    pub(super) listed: Result<&'a [ListedProcess], &'a str>,
    pub(super) used: Option<u64>,
}

/// Facts about our environment that affect how VRAM is attributed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct VramContext {
    /// True inside a pid namespace: the driver's pids may mean other processes, and processes may be hidden.
    pub(super) contained: bool,
    pub(super) windows: bool,
    /// True if none of our other backends has run since the baseline.
    pub(super) alone: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum VramFinding {
    /// The group does not use the device.
    Nothing,
    Vram(VramReading),
    Unknown(VramUnknown),
}

pub(super) fn find_vram(
    device: &DeviceUse<'_>,
    child: ChildProcesses<'_>,
    before: Option<DeviceBaseline>,
    place: VramContext,
) -> VramFinding {
    let gpu = device.gpu;
    let listed = match device.listed {
        Ok(listed) => listed,
        Err(reason) => {
            return estimate(device, &[], before, place).unwrap_or_else(|_| {
                VramFinding::Unknown(VramUnknown::NotListed { gpu, reason: reason.to_owned() })
            });
        }
    };
    let (ours, others): (Vec<&ListedProcess>, Vec<&ListedProcess>) =
        listed.iter().partition(|one| one.who.belongs_to(child));
    if ours.is_empty() {
        if !place.contained {
            return VramFinding::Nothing;
        }
        // If the use has grown by less than any context needs, a hidden process cannot be ours.
        let more = device.used.map(|used| used.saturating_sub(before.map_or(0, |before| before.used)));
        let hidden = others.iter().any(|one| one.who == ProcessOwner::Unseen) || listed.is_empty();
        if !hidden || more.is_some_and(|more| more <= IDLE_DEVICE_BYTES) {
            return VramFinding::Nothing;
        }
        return estimate(device, &others, before, place)
            .unwrap_or_else(|doubt| VramFinding::Unknown(VramUnknown::Hidden { gpu, doubt }));
    }
    if let Some(bytes) = sum_bytes(&ours) {
        return VramFinding::Vram(VramReading { gpu, bytes, source: VramSource::Process });
    }
    // Any other listed process belongs to another program, even if `/proc` does not show it to us.
    let estimate =
        if others.is_empty() { estimate(device, &[], before, place) } else { Err(EstimateDoubt::Shared) };
    estimate.unwrap_or_else(|doubt| VramFinding::Unknown(VramUnknown::NoBytes { gpu, doubt }))
}

/// Sums the bytes of several processes; `None` if the driver does not report one of them. Some drivers report
/// 0 bytes for live processes in containers, which also means unknown.
fn sum_bytes(ours: &[&ListedProcess]) -> Option<u64> {
    let mut by_pid: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    for one in ours {
        let bytes = by_pid.entry(one.pid).or_default();
        *bytes = (*bytes).max(one.bytes.filter(|bytes| *bytes > 0));
    }
    by_pid.into_values().try_fold(0_u64, |all, bytes| Some(all.saturating_add(bytes?)))
}

/// Returns the increase of the bytes in use, if only our backend can have caused it.
fn estimate(
    device: &DeviceUse<'_>,
    others: &[&ListedProcess],
    before: Option<DeviceBaseline>,
    place: VramContext,
) -> Result<VramFinding, EstimateDoubt> {
    if place.windows {
        return Err(EstimateDoubt::Windows);
    }
    let before = before.ok_or(EstimateDoubt::NoBaseline)?;
    // In a container the list may be incomplete, so the device must have been nearly unused before.
    let hidden = place.contained || device.listed.is_err();
    // With so little in use no program is running; the list may still show one that has just ended.
    if before.used > IDLE_DEVICE_BYTES && (hidden || !before.is_unlisted) {
        return Err(EstimateDoubt::WasInUse);
    }
    if !place.alone {
        return Err(EstimateDoubt::NotAlone);
    }
    // A single new process that we cannot see is ours; of several, some may belong to others.
    let pids: BTreeSet<u32> = others.iter().map(|one| one.pid).collect();
    if pids.len() > 1 || others.iter().any(|one| one.who != ProcessOwner::Unseen) {
        return Err(EstimateDoubt::Shared);
    }
    let used = device.used.ok_or(EstimateDoubt::NoTotals)?;
    let bytes = used.saturating_sub(before.used);
    if bytes < NO_PROGRAM_BYTES {
        return Ok(VramFinding::Nothing);
    }
    Ok(VramFinding::Vram(VramReading { gpu: device.gpu, bytes, source: VramSource::Estimate }))
}
