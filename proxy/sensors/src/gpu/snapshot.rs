//! A reading of all devices and of the processes on them.

use std::path::PathBuf;

use warden_policies::{GpuIndex, VramReading, VramSource};

use super::drm::{self, DrmCard, DrmClients};
use super::ladder::{self, ChildProcesses, DeviceUse, ListedProcess, VramContext, VramFinding};
use super::{DeviceReading, GpuSensors, GroupVram, VramUnknown};

/// A reading of all devices and of their processes, shared by all backends in one sampling round.
#[derive(Clone, Debug)]
pub struct GpuSnapshot {
    devices: Vec<DeviceReading>,
    users: Vec<DeviceUsers>,
    place: VramContext,
    proc: PathBuf,
    /// Reason why there are no devices.
    none: String,
}

#[derive(Clone, Debug)]
enum DeviceUsers {
    /// The device uses host memory, so its processes are not read.
    Unified,
    /// NVML has listed the processes, or reported an error.
    Listed(Result<Vec<ListedProcess>, String>),
    /// The memory of each process must be read from its own files; only KFD's list has been read already.
    Files { card: DrmCard, kfd: Vec<ListedProcess> },
}

/// Memory use of the devices right before a backend is spawned, the reference for estimates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuBaseline {
    devices: Vec<DeviceBaseline>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceBaseline {
    gpu: GpuIndex,
    pub(super) used: u64,
    pub(super) is_unlisted: bool,
}

impl GpuSnapshot {
    pub(super) fn read(gpus: &GpuSensors) -> Self {
        let told = gpus.nvidia.iter().flat_map(super::NvidiaGpus::read);
        let nvidia = told.map(|told| {
            let listed = told.listed.map(|entries| listed(gpus, entries));
            (told.reading, DeviceUsers::Listed(listed))
        });
        let cards = gpus.cards.iter().map(|card| {
            let kfd = drm::kfd_processes(&gpus.sources.sys, card)
                .into_iter()
                .map(|(pid, bytes)| (pid, Some(bytes)));
            (card.reading(), DeviceUsers::Files { card: card.clone(), kfd: listed(gpus, kfd.collect()) })
        });
        let all = nvidia.chain(cards).zip(&gpus.devices).map(|((reading, users), device)| {
            let users = if device.unified { DeviceUsers::Unified } else { users };
            (DeviceReading { index: device.index, ..reading }, users)
        });
        let (devices, users) = all.unzip();
        Self {
            devices,
            users,
            place: gpus.place,
            proc: gpus.sources.proc.clone(),
            none: gpus.notes.join("; "),
        }
    }

    /// Returns the reading of each device, by index.
    pub fn devices(&self) -> &[DeviceReading] {
        &self.devices
    }

    /// Returns the VRAM of the process group that `leader` leads, as drivers report it. On AMD and Intel this
    /// reads files of the processes, so it may block like [`GpuSensors::read`].
    pub fn group_vram(&self, leader: u32) -> GroupVram {
        self.child_vram(leader, &[], None)
    }

    /// Like [`Self::group_vram`], including the processes `outside` the group that belong to it.
    ///
    /// `before` is the memory use before the spawn, with a flag: true if none of our other backends has run
    /// since. A device whose driver reports no bytes then gets an estimate: the increase of its use. Devices
    /// that were in use before, or that other programs use now, get none.
    pub fn child_vram(
        &self,
        leader: u32,
        outside: &[u32],
        before: Option<(&GpuBaseline, bool)>,
    ) -> GroupVram {
        let place = VramContext { alone: before.map_or(self.place.alone, |(_, alone)| alone), ..self.place };
        self.find(ChildProcesses { leader, outside }, before.map(|(before, _)| before), place)
    }

    /// Returns the present memory use, for estimates after the next spawn.
    pub fn baseline(&self) -> GpuBaseline {
        let devices = self.devices.iter().zip(&self.users).filter_map(|(device, users)| {
            let nobody = match users {
                DeviceUsers::Listed(Ok(listed)) => listed.is_empty(),
                // Without a list of processes, only the bytes in use can show that the device is idle.
                DeviceUsers::Listed(Err(_)) => true,
                DeviceUsers::Unified | DeviceUsers::Files { .. } => return None,
            };
            Some(DeviceBaseline { gpu: device.index, used: device.used?, is_unlisted: nobody })
        });
        GpuBaseline { devices: devices.collect() }
    }

    fn find(&self, child: ChildProcesses<'_>, before: Option<&GpuBaseline>, place: VramContext) -> GroupVram {
        let files = self.users.iter().any(|users| matches!(users, DeviceUsers::Files { .. }));
        let clients = if files { DrmClients::read_child(&self.proc, child) } else { DrmClients::default() };
        let mut answer = GroupVram::default();
        for (device, users) in self.devices.iter().zip(&self.users) {
            let gpu = device.index;
            let found = match users {
                DeviceUsers::Unified => continue,
                DeviceUsers::Listed(listed) => {
                    let listed = listed.as_deref().map_err(String::as_str);
                    let device = DeviceUse { gpu, listed, used: device.used };
                    let mut baselines = before.into_iter().flat_map(|before| &before.devices);
                    let before = baselines.find(|before| before.gpu == gpu).copied();
                    ladder::find_vram(&device, child, before, place)
                }
                DeviceUsers::Files { card, kfd } => from_files(gpu, child, &clients.bytes_on(card), kfd),
            };
            match found {
                VramFinding::Nothing => {}
                VramFinding::Vram(vram) => answer.readings.push(vram),
                VramFinding::Unknown(why) => answer.unavailable = answer.unavailable.or(Some(why)),
            }
        }
        if answer.readings.is_empty() && answer.unavailable.is_none() {
            answer.unavailable = Some(self.no_vram_reason());
        }
        answer
    }

    fn no_vram_reason(&self) -> VramUnknown {
        let unified = self.users.iter().position(|users| matches!(users, DeviceUsers::Unified));
        match (self.devices.first(), unified) {
            (None, _) => VramUnknown::NoDevice(self.none.clone()),
            (Some(_), Some(at)) if self.users.iter().all(|users| matches!(users, DeviceUsers::Unified)) => {
                VramUnknown::Unified(self.devices[at].index)
            }
            _ => VramUnknown::NotOnAny,
        }
    }
}

fn listed(gpus: &GpuSensors, entries: Vec<(u32, Option<u64>)>) -> Vec<ListedProcess> {
    let entries = entries.into_iter();
    entries.map(|(pid, bytes)| ListedProcess { pid, bytes, who: gpus.processes.identify(pid) }).collect()
}

/// Newer kernels count HIP in KFD and in fdinfo, so the larger number is taken, not the sum.
fn from_files(
    gpu: GpuIndex,
    child: ChildProcesses<'_>,
    by_files: &Result<Option<u64>, String>,
    kfd: &[ListedProcess],
) -> VramFinding {
    let ours = kfd.iter().filter(|one| one.who.belongs_to(child)).filter_map(|one| one.bytes);
    let by_kfd = ours.reduce(u64::saturating_add);
    match (by_files, by_kfd) {
        (Err(reason), None) => VramFinding::Unknown(VramUnknown::Unreadable { gpu, reason: reason.clone() }),
        (Ok(None), None | Some(0)) => VramFinding::Nothing,
        (by_files, by_kfd) => {
            let by_files = by_files.as_ref().ok().copied().flatten().unwrap_or(0);
            let bytes = by_files.max(by_kfd.unwrap_or(0));
            VramFinding::Vram(VramReading { gpu, bytes, source: VramSource::Process })
        }
    }
}
