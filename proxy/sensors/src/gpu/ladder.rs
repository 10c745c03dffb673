//! Determines the VRAM of one process group on one device, from the driver's list of processes. Pure: the
//! list is an argument.
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

use super::baseline::DeviceBaseline;
use super::why::{EstimateDoubt, VramUnknown};

/// Maximum bytes in use on an idle device whose users a container hides. Drivers use a few MiB themselves;
/// any CUDA context takes more than 100 MiB, and so does any desktop.
const IDLE_DEVICE_BYTES: u64 = 64 << 20;

/// Fewer bytes than this are no program: contexts take far more.
const NO_PROGRAM_BYTES: u64 = 1 << 20;

/// A process that the driver lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListedProcess {
    /// Its pid in the driver's view.
    pub(super) pid: u32,
    /// Bytes that it holds, if reported. A process may be listed twice, for compute and for graphics, with
    /// the same bytes.
    pub(super) bytes: Option<u64>,
    pub(super) who: ProcessOwner,
}

/// Identity of a listed process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessOwner {
    /// Found, with our own process ids.
    Seen { pid: u32, group: u32 },
    /// In another namespace: no child of ours.
    Other,
    /// Not found: it has ended, or is hidden from us.
    Unseen,
}

impl ProcessOwner {
    /// Returns whether it belongs to the child. The leader counts even if it leads no group, as with host
    /// memory.
    pub(super) fn belongs_to(self, child: ChildProcesses<'_>) -> bool {
        let ChildProcesses { leader, outside } = child;
        matches!(self, Self::Seen { pid, group } if pid == leader || group == leader || outside.contains(&pid))
    }
}

/// Processes that are measured together.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChildProcesses<'a> {
    /// The leader; its whole group is included.
    pub(super) leader: u32,
    /// Further processes outside that group.
    pub(super) outside: &'a [u32],
}

/// Data about one device.
#[derive(Clone, Debug)]
pub(super) struct DeviceUse<'a> {
    pub(super) gpu: GpuIndex,
    /// The driver's list, or its error.
    pub(super) listed: Result<&'a [ListedProcess], &'a str>,
    /// Bytes in use by all programs.
    pub(super) used: Option<u64>,
}

/// Our environment, as far as it affects the attribution of VRAM.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct VramContext {
    /// We are in a pid namespace, so the driver's pids may mean other processes or be hidden.
    pub(super) contained: bool,
    pub(super) windows: bool,
    /// No other backend of ours has run since the baseline.
    pub(super) alone: bool,
}

/// Result for one device.
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
        // Less than any context needs: the hidden process cannot be ours.
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
    // Any other listed process belongs to another program, whether we can see it or not.
    let estimate =
        if others.is_empty() { estimate(device, &[], before, place) } else { Err(EstimateDoubt::Shared) };
    estimate.unwrap_or_else(|doubt| VramFinding::Unknown(VramUnknown::NoBytes { gpu, doubt }))
}

/// Sums the bytes of several processes; `None` if one of them has none reported. For a live process, 0
/// bytes means that the driver does not know, as in some containers.
fn sum_bytes(ours: &[&ListedProcess]) -> Option<u64> {
    let mut by_pid: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    for one in ours {
        let bytes = by_pid.entry(one.pid).or_default();
        *bytes = (*bytes).max(one.bytes.filter(|bytes| *bytes > 0));
    }
    by_pid.into_values().try_fold(0_u64, |all, bytes| Some(all.saturating_add(bytes?)))
}

/// Returns the used bytes minus those used before, if the difference can only be ours.
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
    // In a container the list may be incomplete and proves nothing, so the device must have been nearly
    // unused.
    let hidden = place.contained || device.listed.is_err();
    // With so little in use no program is running, even if a process that has just ended is still listed.
    if before.used > IDLE_DEVICE_BYTES && (hidden || !before.is_unlisted) {
        return Err(EstimateDoubt::WasInUse);
    }
    if !place.alone {
        return Err(EstimateDoubt::NotAlone);
    }
    // A single new process that we cannot see is ours under another pid; several are not.
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
