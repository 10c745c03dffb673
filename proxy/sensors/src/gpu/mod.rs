//! What GPUs there are, what they tell of themselves, and how much VRAM a backend holds on each.
//!
//! One [`Gpus`] per program, one [`Gpus::read`] per round of sampling: the [`Snapshot`] answers for all backends without
//! asking the drivers again. It never guesses: a figure that nobody tells is absent, and [`Why`] says so in a sentence.
//!
//! ```text
//! NVIDIA   NVML (libnvidia-ml.so.1, opened when the program runs)
//! AMD      sysfs of amdgpu, KFD (HIP), DRM fdinfo (Vulkan)       not run on hardware yet: made-up trees only
//! Intel    DRM fdinfo of i915 and xe                             not run on hardware yet: made-up trees only
//! ```

mod baseline;
mod drm;
mod fdinfo;
mod ladder;
mod nvidia;
mod process;
mod snapshot;
#[cfg(test)]
mod tests;
mod why;

use std::ffi::OsString;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use warden_policies::{GpuIndex, Vram};

pub use baseline::Baseline;
use drm::Card;
use ladder::Place;
use nvidia::Nvidia;
use process::Processes;
pub use snapshot::Snapshot;
pub use why::{Doubt, Why};

/// Who made a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Vendor {
    /// NVIDIA, by NVML.
    Nvidia,
    /// AMD, by the amdgpu driver.
    Amd,
    /// Intel, by the i915 or the xe driver.
    Intel,
}

/// One GPU, or one MIG instance of a GPU: what does not change while the program runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its number in [`Gpus::devices`], from 0: NVIDIA first, in the order of NVML, then the others by PCI address.
    pub index: GpuIndex,
    /// Who made it.
    pub vendor: Vendor,
    /// The driver's name for it; the PCI ids where the driver has none.
    pub name: String,
    /// `GPU-…` or `MIG-…`; NVIDIA only.
    pub uuid: Option<String>,
    /// PCI address, `0000:65:00.0`.
    pub pci: Option<String>,
    /// VRAM in bytes; `None` where the driver does not tell.
    pub total: Option<u64>,
    /// The GPU uses the host's memory: there is no VRAM to watch, the host series has it all.
    pub unified: bool,
}

/// Something that a device reported and that no program should have seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// An Xid of the NVIDIA driver; `None` where the driver did not tell which. Of several since the last reading the
    /// driver repeats the newest.
    Xid(Option<u64>),
    /// So many more memory errors that ECC could not correct, since the last reading.
    Ecc(u64),
    /// The device no longer answers: it fell off the bus or needs a reset.
    Lost,
}

/// One device at the moment of the reading. `None` is always "the driver does not tell".
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReading {
    /// Which device.
    pub index: GpuIndex,
    /// Bytes of VRAM.
    pub total: Option<u64>,
    /// Bytes in use by all programs.
    pub used: Option<u64>,
    /// Bytes that new allocations can take.
    pub free: Option<u64>,
    /// Degrees Celsius.
    pub temperature: Option<u32>,
    /// Memory errors that ECC could not correct, since the driver was loaded.
    pub ecc_uncorrected: Option<u64>,
    /// What went wrong since the last reading; `None` where no fault would be told at all.
    pub faults: Option<Vec<Fault>>,
}

/// The VRAM of one process group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VramOf {
    /// GPU by GPU, in order; a GPU that the group does not use, or whose figure is not known, is not in it.
    pub readings: Vec<Vram>,
    /// Why a figure is missing, if one is. Readings of other GPUs are good nevertheless.
    pub unavailable: Option<Why>,
}

/// Where everything is read from; other places serve tests.
#[derive(Clone, Debug)]
pub struct Sources {
    /// `/proc`, with our own process ids.
    pub proc: PathBuf,
    /// The host's `/proc`, where a container has it.
    pub host_proc: PathBuf,
    /// `/sys`.
    pub sys: PathBuf,
    /// The device by which WSL offers the GPUs of Windows.
    pub wsl: PathBuf,
    /// NVIDIA's libraries, in the order to be tried.
    pub nvml: Vec<OsString>,
}

impl Default for Sources {
    fn default() -> Self {
        Self {
            proc: PathBuf::from("/proc"),
            host_proc: PathBuf::from("/host/proc"),
            sys: PathBuf::from("/sys"),
            wsl: PathBuf::from("/dev/dxg"),
            nvml: nvidia::LIBRARIES.map(OsString::from).to_vec(),
        }
    }
}

/// The GPUs of this machine. Cheap to open, and shared: reading takes `&self`. Open it once: NVIDIA's library stays
/// loaded until the program ends.
#[derive(Debug)]
pub struct Gpus {
    sources: Sources,
    devices: Vec<Device>,
    nvidia: Option<Nvidia>,
    cards: Vec<Card>,
    processes: Processes,
    notes: Vec<String>,
    place: Place,
}

impl Gpus {
    /// Looks for GPUs. Never fails: a machine without one, or without its driver, has no devices.
    pub fn open() -> Self {
        Self::open_at(Sources::default())
    }

    /// The same from other places.
    pub fn open_at(sources: Sources) -> Self {
        let (nvidia, missing) = match Nvidia::open(&sources.nvml) {
            Ok(nvidia) => (Some(nvidia), None),
            Err(missing) => (None, Some(missing)),
        };
        let cards = drm::cards(&sources.sys);
        let described = nvidia.iter().flat_map(Nvidia::described).map(|one| Device {
            index: GpuIndex(0),
            vendor: Vendor::Nvidia,
            name: one.name.clone(),
            uuid: one.uuid.clone(),
            pci: one.pci.clone(),
            total: one.total.filter(|_| !one.unified),
            unified: one.unified,
        });
        let more = cards.iter().map(|card| Device {
            index: GpuIndex(0),
            vendor: card.vendor,
            name: card.name.clone(),
            uuid: None,
            pci: Some(card.pci.clone()),
            total: card.total().filter(|_| !card.unified),
            unified: card.unified,
        });
        let devices =
            described.chain(more).zip(0..).map(|(device, index)| Device { index: GpuIndex(index), ..device });
        let processes = Processes::open(&sources.proc, &sources.host_proc);
        let place = Place { contained: processes.contained(), windows: sources.wsl.exists(), alone: false };
        Self {
            devices: devices.collect(),
            nvidia,
            cards,
            processes,
            notes: missing.into_iter().collect(),
            place,
            sources,
        }
    }

    /// All devices found when opened, by index.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Why there is no device, or why those of a driver are missing. On a machine without NVIDIA's driver that is one
    /// note, and normal.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Bytes that can be had of each device with memory of its own, where the driver tells. It asks for nothing else, so it blocks for less
    /// than a millisecond where the driver has no other work.
    pub fn free(&self) -> Vec<(GpuIndex, u64)> {
        let nvidia = self.nvidia.iter().flat_map(Nvidia::free);
        let all = nvidia.chain(self.cards.iter().map(Card::free)).zip(&self.devices);
        let own = all.filter(|(_, device)| !device.unified);
        own.filter_map(|(free, device)| Some((device.index, free?))).collect()
    }

    /// One reading of all devices. Blocks for some milliseconds: call it where blocking is allowed. Faults are told to
    /// the caller of one reading only, so one task should read.
    pub fn read(&self) -> Snapshot {
        Snapshot::read(self)
    }
}
