//! NVIDIA GPUs through NVML, opened at run time. Each MIG instance is a device here.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::{Mutex, PoisonError};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::event::EventSet;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device as Handle, Nvml};
use warden_policies::GpuIndex;

use super::{DeviceReading, GpuDevice, GpuFault, GpuVendor};

/// File names of the library: the usual one, that of development packages, WSL's, NixOS's.
pub(super) const NVML_LIBRARIES: [&str; 4] = [
    "libnvidia-ml.so.1",
    "libnvidia-ml.so",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    "/run/opengl-driver/lib/libnvidia-ml.so.1",
];

/// Maximum number of events read from one device at a time; a device with more errors is faulty anyway.
const MAX_EVENTS: usize = 64;

/// Parts of names of GPUs that use host memory, for drivers that report this memory as VRAM.
const UNIFIED_NAMES: [&str; 6] = ["Orin", "Thor", "Xavier", "Tegra", "GB10", "nvgpu"];

#[derive(Debug)]
pub(super) struct NvidiaGpus {
    devices: Vec<NvidiaDevice>,
}

#[derive(Debug)]
struct NvidiaDevice {
    described: GpuDevice,
    handle: Handle<'static>,
    /// Xid and ECC events, if the driver offers any. Locked, because two threads must not wait on one set.
    events: Option<Mutex<EventSet<'static>>>,
    last: Mutex<LastFaults>,
}

#[derive(Debug, Default)]
struct LastFaults {
    /// Number of uncorrected errors when the driver last reported it.
    ecc: Option<u64>,
    gone: bool,
}

pub(super) type NvmlProcess = (u32, Option<u64>);

#[derive(Debug)]
pub(super) struct NvidiaReading {
    pub(super) reading: DeviceReading,
    pub(super) listed: Result<Vec<NvmlProcess>, String>,
}

impl NvidiaGpus {
    /// Opens NVML. The error says why there are no devices.
    pub(super) fn open(libraries: &[OsString]) -> Result<Self, String> {
        let mut refused = None;
        for library in libraries {
            match open_library(library) {
                Ok(nvml) => return Self::list(nvml),
                // The file is missing or is no library: try the next name.
                Err(NvmlError::LibloadingError(_)) => {}
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        Err(match refused {
            None => "NVIDIA's libnvidia-ml.so.1 is not installed".to_owned(),
            Some(error) => format!("NVIDIA's libnvidia-ml.so.1 refused to start: {}", describe_error(&error)),
        })
    }

    fn list(nvml: &'static Nvml) -> Result<Self, String> {
        let count = nvml.device_count().map_err(|error| {
            format!("the NVIDIA driver does not count its GPUs: {}", describe_error(&error))
        })?;
        let devices: Vec<NvidiaDevice> =
            (0..count).flat_map(|index| device_or_instances(nvml, index)).collect();
        if devices.is_empty() {
            return Err("the NVIDIA driver knows no GPU that this user may use".to_owned());
        }
        Ok(Self { devices })
    }

    pub(super) fn described(&self) -> impl Iterator<Item = &GpuDevice> {
        self.devices.iter().map(|one| &one.described)
    }

    pub(super) fn free(&self) -> impl Iterator<Item = Option<u64>> {
        let free = |one: &NvidiaDevice| one.handle.memory_info().ok().map(|memory| memory.free);
        self.devices.iter().map(free)
    }

    pub(super) fn read(&self) -> Vec<NvidiaReading> {
        self.devices.iter().map(NvidiaDevice::read).collect()
    }
}

/// Opens a library once and returns the same one to every later call: events and devices refer to it.
pub(super) fn open_library(library: &OsString) -> Result<&'static Nvml, NvmlError> {
    static OPENED: Mutex<BTreeMap<OsString, &'static Nvml>> = Mutex::new(BTreeMap::new());
    let mut all = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = all.get(library) {
        return Ok(known);
    }
    let nvml: &'static Nvml = Box::leak(Box::new(Nvml::builder().lib_path(library).init()?));
    all.insert(library.clone(), nvml);
    Ok(nvml)
}

/// Returns a GPU, or its MIG instances if it is split.
fn device_or_instances(nvml: &'static Nvml, index: u32) -> Vec<NvidiaDevice> {
    let Ok(handle) = nvml.device_by_index(index) else { return Vec::new() };
    let split = handle.mig_mode().is_ok_and(|mode| mode.current == 1);
    let most = if split { handle.mig_device_count().unwrap_or(0) } else { 0 };
    let parts: Vec<NvidiaDevice> = (0..most)
        .filter_map(|index| handle.mig_device_by_index(index).ok())
        .map(|part| NvidiaDevice::new(nvml, part, &handle))
        .collect();
    if parts.is_empty() {
        // A device handle cannot be copied, so request the device again.
        return nvml
            .device_by_index(index)
            .map(|same| NvidiaDevice::new(nvml, same, &handle))
            .into_iter()
            .collect();
    }
    parts
}

impl NvidiaDevice {
    fn new(nvml: &'static Nvml, handle: Handle<'static>, whole: &Handle<'static>) -> Self {
        let memory = handle.memory_info();
        let name = handle.name().or_else(|_| whole.name()).unwrap_or_else(|_| "NVIDIA GPU".to_owned());
        // A discrete GPU always reports its memory; GB10 and Jetson boards report that they have none.
        let unified = matches!(memory, Err(NvmlError::NotSupported))
            || UNIFIED_NAMES.iter().any(|part| name.contains(part));
        let total = memory.ok().map(|memory| memory.total).filter(|total| *total > 0);
        let described = GpuDevice {
            index: GpuIndex(0),
            vendor: GpuVendor::Nvidia,
            name,
            uuid: handle.uuid().ok(),
            pci: whole.pci_info().ok().map(|pci| kernel_address(&pci.bus_id)),
            total: if unified { None } else { total },
            unified,
        };
        Self {
            described,
            events: open_event_set(nvml, &handle),
            last: Mutex::new(LastFaults { ecc: uncorrected_errors(&handle), gone: false }),
            handle,
        }
    }

    fn read(&self) -> NvidiaReading {
        let memory = self.handle.memory_info();
        let gone = matches!(memory, Err(NvmlError::GpuLost | NvmlError::ResetRequired));
        let memory = if self.described.unified { None } else { memory.ok() };
        let ecc = uncorrected_errors(&self.handle);
        let mut faults = self.read_xids();
        faults.extend(self.new_faults(ecc, gone));
        let told = self.events.is_some() || ecc.is_some() || gone || !faults.is_empty();
        NvidiaReading {
            reading: DeviceReading {
                total: memory.as_ref().map(|memory| memory.total),
                used: memory.as_ref().map(|memory| memory.used),
                free: memory.as_ref().map(|memory| memory.free),
                temperature: self.handle.temperature(TemperatureSensor::Gpu).ok(),
                ecc_uncorrected: ecc,
                faults: told.then_some(faults),
                ..DeviceReading::default()
            },
            listed: self.listed(),
        }
    }

    /// Lists compute and graphics processes; NVML counts Vulkan programs as graphics.
    fn listed(&self) -> Result<Vec<NvmlProcess>, String> {
        let compute = list_twice(|| self.handle.running_compute_processes());
        let graphics = list_twice(|| self.handle.running_graphics_processes());
        let all = match (compute, graphics) {
            (Ok(mut compute), graphics) => {
                compute.extend(graphics.unwrap_or_default());
                compute
            }
            (Err(_), Ok(graphics)) if !graphics.is_empty() => graphics,
            (Err(error), _) => return Err(describe_error(&error)),
        };
        let bytes = |used| match used {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        Ok(all.into_iter().map(|process| (process.pid, bytes(process.used_gpu_memory))).collect())
    }

    fn read_xids(&self) -> Vec<GpuFault> {
        let Some(events) = &self.events else { return Vec::new() };
        let events = events.lock().unwrap_or_else(PoisonError::into_inner);
        let mut faults = Vec::new();
        for _ in 0..MAX_EVENTS {
            // A timeout means that there are no more events now.
            let Ok(event) = events.wait(0) else { break };
            if event.event_type.contains(EventTypes::CRITICAL_XID_ERROR) {
                let number = match event.event_data {
                    Some(XidError::Value(number)) => Some(number),
                    Some(XidError::Unknown) | None => None,
                };
                let fault = GpuFault::Xid(number);
                if !faults.contains(&fault) {
                    faults.push(fault);
                }
            }
        }
        faults
    }

    /// A counter that is lower than before was reset.
    fn new_faults(&self, ecc: Option<u64>, gone: bool) -> Vec<GpuFault> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let more = ecc.zip(last.ecc).map_or(0, |(now, before)| now.saturating_sub(before));
        let newly_gone = gone && !last.gone;
        *last = LastFaults { ecc: ecc.or(last.ecc), gone };
        let errors = (more > 0).then_some(GpuFault::Ecc(more));
        errors.into_iter().chain(newly_gone.then_some(GpuFault::Lost)).collect()
    }
}

fn open_event_set(nvml: &'static Nvml, handle: &Handle<'static>) -> Option<Mutex<EventSet<'static>>> {
    let offered = handle.supported_event_types().ok()?;
    let wanted = offered & EventTypes::CRITICAL_XID_ERROR;
    if wanted.is_empty() {
        return None;
    }
    let set = handle.register_events(wanted, nvml.create_event_set().ok()?).ok()?;
    Some(Mutex::new(set))
}

fn uncorrected_errors(handle: &Handle<'static>) -> Option<u64> {
    handle.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile).ok()
}

/// Lists processes; tries once more if the list grew between counting and listing.
fn list_twice(list: impl Fn() -> Result<Vec<ProcessInfo>, NvmlError>) -> Result<Vec<ProcessInfo>, NvmlError> {
    match list() {
        Err(NvmlError::InsufficientSize(_)) => list(),
        other => other,
    }
}

/// Converts a PCI address: NVML's domains have eight digits, the kernel's four.
fn kernel_address(bus: &str) -> String {
    let bus = bus.to_ascii_lowercase();
    match bus.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 && domain.starts_with("0000") => {
            format!("{}:{rest}", &domain[4..])
        }
        _ => bus,
    }
}

fn describe_error(error: &NvmlError) -> String {
    match error {
        NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => {
            "the driver is older than 510, which is the first that tells".to_owned()
        }
        NvmlError::LibRmVersionMismatch => {
            "the library and the loaded driver are of different versions; restart the machine".to_owned()
        }
        NvmlError::NotSupported => "this GPU does not support it".to_owned(),
        NvmlError::NoPermission => "this user may not ask".to_owned(),
        other => other.to_string(),
    }
}
