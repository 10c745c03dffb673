//! A reading of all devices and of the processes on them.

use std::path::PathBuf;

use warden_policies::{GpuIndex, Vram, VramSource};

use super::baseline::{Baseline, Before};
use super::drm::{self, Card, Clients};
use super::ladder::{self, ChildProcesses, Found, Listed, OnDevice, Place};
use super::{DeviceReading, Gpus, VramOf, Why};

/// A reading of all devices and of the processes on them, for every backend in one round of sampling.
#[derive(Clone, Debug)]
pub struct Snapshot {
    devices: Vec<DeviceReading>,
    users: Vec<Users>,
    place: Place,
    proc: PathBuf,
    /// Reason why there are no devices.
    none: String,
}

/// Processes on one device.
#[derive(Clone, Debug)]
enum Users {
    /// Not read: the device has no memory of its own.
    Unified,
    /// Listed by NVML.
    Listed(Result<Vec<Listed>, String>),
    /// To be read from the files of each process, except for KFD's list.
    Files { card: Card, kfd: Vec<Listed> },
}

impl Snapshot {
    pub(super) fn read(gpus: &Gpus) -> Self {
        let told = gpus.nvidia.iter().flat_map(super::Nvidia::read);
        let nvidia = told.map(|told| {
            let listed = told.listed.map(|entries| listed(gpus, entries));
            (told.reading, Users::Listed(listed))
        });
        let cards = gpus.cards.iter().map(|card| {
            let kfd = drm::by_kfd(&gpus.sources.sys, card).into_iter().map(|(pid, bytes)| (pid, Some(bytes)));
            (card.reading(), Users::Files { card: card.clone(), kfd: listed(gpus, kfd.collect()) })
        });
        let all = nvidia.chain(cards).zip(&gpus.devices).map(|((reading, users), device)| {
            let users = if device.unified { Users::Unified } else { users };
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

    /// Returns the VRAM of the process group that `leader` leads, as drivers report it; no estimates. On
    /// AMD and Intel this reads files of the group's processes, so it may block like [`Gpus::read`].
    pub fn of_group(&self, leader: u32) -> VramOf {
        self.of_child(leader, &[], None)
    }

    /// Like [`Self::of_group`], including the processes `outside` the group that belong to it.
    ///
    /// `before` is the use before the spawn, and whether no other backend of ours has run since then, which
    /// a hidden list of processes could not show. With it there is an estimate if the driver reports no
    /// bytes: the increase of the device's use. An estimate is made only if the device was idle then and no
    /// other program is on it now.
    pub fn of_child(&self, leader: u32, outside: &[u32], before: Option<(&Baseline, bool)>) -> VramOf {
        let place = Place { alone: before.map_or(self.place.alone, |(_, alone)| alone), ..self.place };
        self.find(ChildProcesses { leader, outside }, before.map(|(before, _)| before), place)
    }

    /// Returns the current use, to be kept until after the next spawn.
    pub fn baseline(&self) -> Baseline {
        let devices = self.devices.iter().zip(&self.users).filter_map(|(device, users)| {
            let nobody = match users {
                Users::Listed(Ok(listed)) => listed.is_empty(),
                // Without a list the used bytes have to prove that the device is idle.
                Users::Listed(Err(_)) => true,
                Users::Unified | Users::Files { .. } => return None,
            };
            Some(Before { gpu: device.index, used: device.used?, nobody })
        });
        Baseline { devices: devices.collect() }
    }

    fn find(&self, child: ChildProcesses<'_>, before: Option<&Baseline>, place: Place) -> VramOf {
        let files = self.users.iter().any(|users| matches!(users, Users::Files { .. }));
        let clients = if files { Clients::of_child(&self.proc, child) } else { Clients::default() };
        let mut answer = VramOf::default();
        for (device, users) in self.devices.iter().zip(&self.users) {
            let gpu = device.index;
            let found = match users {
                Users::Unified => continue,
                Users::Listed(listed) => {
                    let listed = listed.as_deref().map_err(String::as_str);
                    let device = OnDevice { gpu, listed, used: device.used };
                    ladder::on_device(&device, child, before.and_then(|before| before.of(gpu)), place)
                }
                Users::Files { card, kfd } => from_files(gpu, child, &clients.on(card), kfd),
            };
            match found {
                Found::Nothing => {}
                Found::Vram(vram) => answer.readings.push(vram),
                Found::Unknown(why) => answer.unavailable = answer.unavailable.or(Some(why)),
            }
        }
        if answer.readings.is_empty() && answer.unavailable.is_none() {
            answer.unavailable = Some(self.nowhere());
        }
        answer
    }

    fn nowhere(&self) -> Why {
        let unified = self.users.iter().position(|users| matches!(users, Users::Unified));
        match (self.devices.first(), unified) {
            (None, _) => Why::NoDevice(self.none.clone()),
            (Some(_), Some(at)) if self.users.iter().all(|users| matches!(users, Users::Unified)) => {
                Why::Unified(self.devices[at].index)
            }
            _ => Why::NotOnAny,
        }
    }
}

fn listed(gpus: &Gpus, entries: Vec<(u32, Option<u64>)>) -> Vec<Listed> {
    let entries = entries.into_iter();
    entries.map(|(pid, bytes)| Listed { pid, bytes, who: gpus.processes.who(pid) }).collect()
}

/// Determines the VRAM from KFD (HIP) and fdinfo (the rest). Newer kernels count HIP in both, so the larger
/// one is taken, not the sum.
fn from_files(
    gpu: GpuIndex,
    child: ChildProcesses<'_>,
    by_files: &Result<Option<u64>, String>,
    kfd: &[Listed],
) -> Found {
    let ours = kfd.iter().filter(|one| one.who.is_of(child)).filter_map(|one| one.bytes);
    let by_kfd = ours.reduce(u64::saturating_add);
    match (by_files, by_kfd) {
        (Err(reason), None) => Found::Unknown(Why::Unreadable { gpu, reason: reason.clone() }),
        (Ok(None), None | Some(0)) => Found::Nothing,
        (by_files, by_kfd) => {
            let by_files = by_files.as_ref().ok().copied().flatten().unwrap_or(0);
            let bytes = by_files.max(by_kfd.unwrap_or(0));
            Found::Vram(Vram { gpu, bytes, source: VramSource::Process })
        }
    }
}
