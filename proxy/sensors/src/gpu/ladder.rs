//! What one process group holds on one device, from the driver's list of processes. Pure: the list comes in as values.
//!
//! ```text
//! list says bytes for our pids ──────────────────────────────> Process
//!   │ bytes missing or 0, or no entry can be matched
//!   v
//! device empty before the spawn, nobody else on it now ──────> Estimate (used now − used before)
//!   │ no
//!   v
//! Unknown, with the reason
//! ```

use std::collections::{BTreeMap, BTreeSet};

use warden_policies::{GpuIndex, Vram, VramSource};

use super::baseline::Before;
use super::why::{Doubt, Why};

/// What an unused device may have in use at most, in bytes, where a container hides who uses it. Drivers keep a few MiB
/// for themselves; any CUDA context takes more than 100 MiB, any desktop too.
const IDLE: u64 = 64 << 20;

/// Less than this is no program: contexts take far more.
const NOTHING: u64 = 1 << 20;

/// A process that the driver lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    /// Its pid as the driver sees it.
    pub(super) pid: u32,
    /// Bytes that it holds, if told. A process may be listed twice, for compute and for graphics, with the same bytes.
    pub(super) bytes: Option<u64>,
    pub(super) who: Who,
}

/// Whose a listed process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
    /// By our own process ids.
    Seen { pid: u32, group: u32 },
    /// Somebody in another namespace: not a child of ours.
    Other,
    /// Not to be found: it has ended, or we cannot see it.
    Unseen,
}

impl Who {
    /// The leader itself counts even where it leads no group of its own, as it does for host memory.
    pub(super) fn is_of(self, child: ChildProcesses<'_>) -> bool {
        let ChildProcesses { leader, outside } = child;
        matches!(self, Self::Seen { pid, group } if pid == leader || group == leader || outside.contains(&pid))
    }
}

/// The processes that are measured together.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChildProcesses<'a> {
    /// It and its group.
    pub(super) leader: u32,
    /// Further ones, outside of that group.
    pub(super) outside: &'a [u32],
}

/// What is known about one device.
#[derive(Clone, Debug)]
pub(super) struct OnDevice<'a> {
    pub(super) gpu: GpuIndex,
    /// The list, or what the driver said instead.
    pub(super) listed: Result<&'a [Listed], &'a str>,
    /// Bytes in use by all.
    pub(super) used: Option<u64>,
}

/// Where we are, and with whom.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    /// We have process ids of our own, so that the driver's may mean others or be kept from us.
    pub(super) contained: bool,
    pub(super) windows: bool,
    /// No other backend of ours ran since the baseline.
    pub(super) alone: bool,
}

/// The answer for one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The group does not use it.
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
        // Less than any context needs: whoever it is, it is not ours.
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
    // Who is listed beside ours is somebody else, whether we see him or not.
    let estimate = if others.is_empty() { estimate(device, &[], before, place) } else { Err(Doubt::Shared) };
    estimate.unwrap_or_else(|doubt| Found::Unknown(Why::NoBytes { gpu, doubt }))
}

/// The bytes of several processes; `None` if one of them is not told. 0 bytes for a live process is a driver that cannot
/// tell, as in some containers.
fn sum(ours: &[&Listed]) -> Option<u64> {
    let mut by_pid: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    for one in ours {
        let bytes = by_pid.entry(one.pid).or_default();
        *bytes = (*bytes).max(one.bytes.filter(|bytes| *bytes > 0));
    }
    by_pid.into_values().try_fold(0_u64, |all, bytes| Some(all.saturating_add(bytes?)))
}

/// Used now less used before, if that can only be ours.
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
    // A list that a container cuts short proves nothing, so there the device has to be as good as unused.
    let hidden = place.contained || device.listed.is_err();
    // So little in use is nobody's, even if a process that has just ended is still listed.
    if before.used > IDLE && (hidden || !before.nobody) {
        return Err(Doubt::WasInUse);
    }
    if !place.alone {
        return Err(Doubt::NotAlone);
    }
    // One process that came since then and that we cannot see is ours under another id; two are not.
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
