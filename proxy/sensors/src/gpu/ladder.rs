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

use warden_policies::{GpuIndex, Vram, VramSource};

use super::baseline::Before;
use super::why::{Doubt, Why};

/// Maximum bytes in use on an idle device whose users a container hides. Drivers use a few MiB themselves;
/// any CUDA context takes more than 100 MiB, and so does any desktop.
const IDLE: u64 = 64 << 20;

/// Fewer bytes than this are no program: contexts take far more.
const NOTHING: u64 = 1 << 20;

/// A process that the driver lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    /// Its pid in the driver's view.
    pub(super) pid: u32,
    /// Bytes that it holds, if reported. A process may be listed twice, for compute and for graphics, with
    /// the same bytes.
    pub(super) bytes: Option<u64>,
    pub(super) who: Who,
}

/// Identity of a listed process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
    /// Found, with our own process ids.
    Seen { pid: u32, group: u32 },
    /// In another namespace: no child of ours.
    Other,
    /// Not found: it has ended, or is hidden from us.
    Unseen,
}

impl Who {
    /// Returns whether it belongs to the child. The leader counts even if it leads no group, as with host
    /// memory.
    pub(super) fn is_of(self, child: ChildProcesses<'_>) -> bool {
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
pub(super) struct OnDevice<'a> {
    pub(super) gpu: GpuIndex,
    /// The driver's list, or its error.
    pub(super) listed: Result<&'a [Listed], &'a str>,
    /// Bytes in use by all programs.
    pub(super) used: Option<u64>,
}

/// Our environment, as far as it affects the attribution of VRAM.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    /// We are in a pid namespace, so the driver's pids may mean other processes or be hidden.
    pub(super) contained: bool,
    pub(super) windows: bool,
    /// No other backend of ours has run since the baseline.
    pub(super) alone: bool,
}

/// Result for one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The group does not use the device.
    Nothing,
    Vram(Vram),
    Unknown(Why),
}

pub(super) fn on_device(
    device: &OnDevice<'_>,
    child: ChildProcesses<'_>,
    before: Option<Before>,
    place: Place,
) -> Found {
    let gpu = device.gpu;
    let listed = match device.listed {
        Ok(listed) => listed,
        Err(reason) => {
            return estimate(device, &[], before, place)
                .unwrap_or_else(|_| Found::Unknown(Why::NotListed { gpu, reason: reason.to_owned() }));
        }
    };
    let (ours, others): (Vec<&Listed>, Vec<&Listed>) = listed.iter().partition(|one| one.who.is_of(child));
    if ours.is_empty() {
        if !place.contained {
            return Found::Nothing;
        }
        // Less than any context needs: the hidden process cannot be ours.
        let more = device.used.map(|used| used.saturating_sub(before.map_or(0, |before| before.used)));
        let hidden = others.iter().any(|one| one.who == Who::Unseen) || listed.is_empty();
        if !hidden || more.is_some_and(|more| more <= IDLE) {
            return Found::Nothing;
        }
        return estimate(device, &others, before, place)
            .unwrap_or_else(|doubt| Found::Unknown(Why::Hidden { gpu, doubt }));
    }
    if let Some(bytes) = sum(&ours) {
        return Found::Vram(Vram { gpu, bytes, source: VramSource::Process });
    }
    // Any other listed process belongs to another program, whether we can see it or not.
    let estimate = if others.is_empty() { estimate(device, &[], before, place) } else { Err(Doubt::Shared) };
    estimate.unwrap_or_else(|doubt| Found::Unknown(Why::NoBytes { gpu, doubt }))
}

/// Sums the bytes of several processes; `None` if one of them has none reported. For a live process, 0
/// bytes means that the driver does not know, as in some containers.
fn sum(ours: &[&Listed]) -> Option<u64> {
    let mut by_pid: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    for one in ours {
        let bytes = by_pid.entry(one.pid).or_default();
        *bytes = (*bytes).max(one.bytes.filter(|bytes| *bytes > 0));
    }
    by_pid.into_values().try_fold(0_u64, |all, bytes| Some(all.saturating_add(bytes?)))
}

/// Returns the used bytes minus those used before, if the difference can only be ours.
fn estimate(
    device: &OnDevice<'_>,
    others: &[&Listed],
    before: Option<Before>,
    place: Place,
) -> Result<Found, Doubt> {
    if place.windows {
        return Err(Doubt::Windows);
    }
    let before = before.ok_or(Doubt::NoBaseline)?;
    // In a container the list may be incomplete and proves nothing, so the device must have been nearly
    // unused.
    let hidden = place.contained || device.listed.is_err();
    // With so little in use no program is running, even if a process that has just ended is still listed.
    if before.used > IDLE && (hidden || !before.nobody) {
        return Err(Doubt::WasInUse);
    }
    if !place.alone {
        return Err(Doubt::NotAlone);
    }
    // A single new process that we cannot see is ours under another pid; several are not.
    let pids: BTreeSet<u32> = others.iter().map(|one| one.pid).collect();
    if pids.len() > 1 || others.iter().any(|one| one.who != Who::Unseen) {
        return Err(Doubt::Shared);
    }
    let used = device.used.ok_or(Doubt::NoTotals)?;
    let bytes = used.saturating_sub(before.used);
    if bytes < NOTHING {
        return Ok(Found::Nothing);
    }
    Ok(Found::Vram(Vram { gpu: device.gpu, bytes, source: VramSource::Estimate }))
}
