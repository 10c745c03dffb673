//! GPUs of this machine, their readings, and the VRAM of a backend on each.
//!
//! A program opens one [`GpuSensors`] and calls [`GpuSensors::read`] once per sampling round, for all
//! backends. An unknown value is absent, never guessed; [`VramUnknown`] gives the reason.
//!
//! ```text
//! NVIDIA   NVML (libnvidia-ml.so.1, opened at run time)
//! AMD      sysfs of amdgpu, KFD (HIP), DRM fdinfo (Vulkan)   tested with artificial trees, not on hardware
//! Intel    DRM fdinfo of i915 and xe                         tested with artificial trees, not on hardware
//! ```

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
use warden_policies::{GpuIndex, VramReading};

use drm::DrmCard;
use ladder::VramContext;
use nvidia::NvidiaGpus;
use process::ProcViews;
pub use snapshot::{GpuBaseline, GpuSnapshot};
pub use why::{EstimateDoubt, VramUnknown};

/// Vendor of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuVendor {
    /// NVIDIA, read through NVML.
    Nvidia,
    /// AMD, with the amdgpu driver.
    Amd,
    /// Intel, with the i915 or the xe driver.
    Intel,
}

/// A GPU, or a MIG instance of one: the properties that do not change at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuDevice {
    /// Index in [`GpuSensors::devices`]: NVIDIA first, in NVML's order, then the others by PCI address.
    pub index: GpuIndex,
    /// Vendor of the GPU.
    pub vendor: GpuVendor,
    /// Name reported by the driver, or the PCI ids if it reports none.
    pub name: String,
    /// UUID, `GPU-…` or `MIG-…`; only for NVIDIA.
    pub uuid: Option<String>,
    /// PCI address, such as `0000:65:00.0`.
    pub pci: Option<String>,
    /// VRAM in bytes; `None` if the driver does not report it.
    pub total: Option<u64>,
    /// True if the GPU uses host memory: the host series then includes everything.
    pub unified: bool,
}

/// A fault reported by a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuFault {
    /// An Xid error of the NVIDIA driver, with its number if the driver reports it. If several occurred since
    /// the last reading, all get the number of the newest.
    Xid(Option<u64>),
    /// Number of uncorrectable ECC memory errors since the last reading.
    Ecc(u64),
    /// The device no longer responds: it fell off the bus or needs a reset.
    Lost,
}

/// Reading of one device. `None` means that the driver does not report the value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReading {
    /// Index of the device.
    pub index: GpuIndex,
    /// Total VRAM in bytes.
    pub total: Option<u64>,
    /// VRAM in use by all programs, in bytes.
    pub used: Option<u64>,
    /// VRAM available for new allocations, in bytes.
    pub free: Option<u64>,
    /// Temperature in degrees Celsius.
    pub temperature: Option<u32>,
    /// Number of uncorrectable ECC memory errors since the driver was loaded.
    pub ecc_uncorrected: Option<u64>,
    /// Faults since the last reading; `None` if the driver does not report faults.
    pub faults: Option<Vec<GpuFault>>,
}

/// VRAM of one process group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupVram {
    /// VRAM by GPU, in order of index, without GPUs that the group does not use or whose value is unknown.
    pub readings: Vec<VramReading>,
    /// Reason for a missing value. The readings of other GPUs are still valid.
    pub unavailable: Option<VramUnknown>,
}

/// Paths that the sensors read; tests set others.
#[derive(Clone, Debug)]
pub struct GpuSources {
    /// `/proc`, with the process ids of our namespace.
    pub proc: PathBuf,
    /// The host's `/proc`, if it is mounted in our container.
    pub host_proc: PathBuf,
    /// `/sys`.
    pub sys: PathBuf,
    /// Device through which WSL offers the GPUs of Windows.
    pub wsl: PathBuf,
    /// Names of NVIDIA's library, in the order in which they are tried.
    pub nvml: Vec<OsString>,
}

impl Default for GpuSources {
    fn default() -> Self {
        Self {
            proc: PathBuf::from("/proc"),
            host_proc: PathBuf::from("/host/proc"),
            sys: PathBuf::from("/sys"),
            wsl: PathBuf::from("/dev/dxg"),
            nvml: nvidia::NVML_LIBRARIES.map(OsString::from).to_vec(),
        }
    }
}

/// The GPUs of this machine. Open them once: NVIDIA's library stays loaded until the program ends.
#[derive(Debug)]
pub struct GpuSensors {
    sources: GpuSources,
    devices: Vec<GpuDevice>,
    nvidia: Option<NvidiaGpus>,
    cards: Vec<DrmCard>,
    processes: ProcViews,
    notes: Vec<String>,
    place: VramContext,
}

impl GpuSensors {
    /// Finds the GPUs. A machine without GPUs or drivers has no devices, which is no error.
    pub fn open() -> Self {
        Self::open_at(GpuSources::default())
    }

    /// Like [`Self::open`], with other paths.
    pub fn open_at(sources: GpuSources) -> Self {
        let (nvidia, missing) = match NvidiaGpus::open(&sources.nvml) {
            Ok(nvidia) => (Some(nvidia), None),
            Err(missing) => (None, Some(missing)),
        };
        let cards = drm::drm_cards(&sources.sys);
        let cards_described = cards.iter().map(DrmCard::described);
        let described = nvidia.iter().flat_map(NvidiaGpus::described).cloned().chain(cards_described);
        let devices =
            described.zip(0..).map(|(device, index)| GpuDevice { index: GpuIndex(index), ..device });
        let processes = ProcViews::open(&sources.proc, &sources.host_proc);
        let place =
            VramContext { contained: processes.is_contained(), windows: sources.wsl.exists(), alone: false };
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

    /// Returns all devices found by [`Self::open`], by index.
    pub fn devices(&self) -> &[GpuDevice] {
        &self.devices
    }

    /// Returns notes about missing devices and drivers; without NVIDIA GPUs, a note about NVML is normal.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the free bytes of each device with its own memory, if the driver reports them. Blocks for less
    /// than a millisecond, unless the driver is busy.
    pub fn free(&self) -> Vec<(GpuIndex, u64)> {
        let nvidia = self.nvidia.iter().flat_map(NvidiaGpus::free);
        let all = nvidia.chain(self.cards.iter().map(DrmCard::free)).zip(&self.devices);
        let own = all.filter(|(_, device)| !device.unified);
        own.filter_map(|(free, device)| Some((device.index, free?))).collect()
    }

    /// Reads all devices. Call this on a worker thread, because it blocks for milliseconds, and from one task
    /// only, because each fault is reported once.
    pub fn read(&self) -> GpuSnapshot {
        GpuSnapshot::read(self)
    }
}
