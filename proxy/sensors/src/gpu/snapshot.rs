//! All devices at one moment, and who was on them.

use std::path::PathBuf;

use warden_policies::{GpuIndex, Vram, VramSource};

use super::baseline::{Baseline, Before};
use super::drm::{self, Card, Clients};
use super::ladder::{self, ChildProcesses, Found, Listed, OnDevice, Place};
use super::{DeviceReading, Gpus, VramOf, Why};

/// All devices at one moment, and who was on them: answers for every backend of a round of sampling.
#[derive(Clone, Debug)]
pub struct Snapshot {
    devices: Vec<DeviceReading>,
    users: Vec<Users>,
    place: Place,
    proc: PathBuf,
    /// Why there are no devices.
    none: String,
}

/// Who is on one device.
#[derive(Clone, Debug)]
enum Users {
    /// Nobody asks: it has no memory of its own.
    Unified,
    /// As NVML tells.
    Listed(Result<Vec<Listed>, String>),
    /// To be read from the files of each process, but for what KFD tells.
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

    /// Each device, by index.
    pub fn devices(&self) -> &[DeviceReading] {
        &self.devices
    }

    /// The VRAM of the process group that `leader` leads, as drivers tell it; no estimates. On AMD and Intel this reads
    /// files of the group's processes, so it may block as [`Gpus::read`] does.
    pub fn of_group(&self, leader: u32) -> VramOf {
        self.of_child(leader, &[], None)
    }

    /// The same with the processes `outside` of the group that belong to it. With what was in use `before` (and whether
    /// no other backend of ours ran since then, which a hidden list of processes could not tell) there is an estimate
    /// where the driver does not tell: what the device has more in use than before. It is made only if the device was
    /// not in use then and nobody else is on it now.
    pub fn of_child(&self, leader: u32, outside: &[u32], before: Option<(&Baseline, bool)>) -> VramOf {
        let place = Place { alone: before.map_or(self.place.alone, |(_, alone)| alone), ..self.place };
        self.find(ChildProcesses { leader, outside }, before.map(|(before, _)| before), place)
    }

    /// What is in use now, to be kept until after the next spawn.
    pub fn baseline(&self) -> Baseline {
        let devices = self.devices.iter().zip(&self.users).filter_map(|(device, users)| {
            let nobody = match users {
                Users::Listed(Ok(listed)) => listed.is_empty(),
                // Nothing is known: the bytes have to prove it.
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

/// HIP memory by KFD and the rest by fdinfo: newer kernels count HIP in both, so the larger is taken, not the sum.
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
