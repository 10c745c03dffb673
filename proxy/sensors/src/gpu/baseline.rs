//! Memory use of each device before a backend was spawned, as the reference for estimates.

use warden_policies::GpuIndex;

/// Memory use of the devices, read by [`GpuSnapshot::baseline`](super::GpuSnapshot::baseline) right before
/// a spawn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuBaseline {
    pub(super) devices: Vec<DeviceBaseline>,
}

impl GpuBaseline {
    pub(super) fn for_gpu(&self, gpu: GpuIndex) -> Option<DeviceBaseline> {
        self.devices.iter().copied().find(|before| before.gpu == gpu)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceBaseline {
    pub(super) gpu: GpuIndex,
    /// Bytes in use by all programs.
    pub(super) used: u64,
    /// True if the driver listed no process on the device.
    pub(super) is_unlisted: bool,
}
