//! AMD and Intel GPUs, read from `/sys/class/drm`, KFD and DRM fdinfo. Not tested on hardware.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use warden_policies::GpuIndex;

use super::fdinfo::{self, DrmClient};
use super::ladder::ChildProcesses;
use super::{DeviceReading, GpuDevice, GpuVendor};
use crate::files::{field, number_field, read_number};
use crate::host;

/// A GPU driven by amdgpu, i915 or xe.
#[derive(Clone, Debug)]
pub(super) struct DrmCard {
    /// `/sys/class/drm/cardN/device`.
    folder: PathBuf,
    vendor: GpuVendor,
    name: String,
    pci: String,
    unified: bool,
    /// Number of the GPU in KFD, the driver interface that HIP uses.
    kfd: Option<u64>,
}

/// Lists all cards by PCI address.
pub(super) fn drm_cards(sys: &Path) -> Vec<DrmCard> {
    let nodes = KfdNodes::read(sys);
    let mut found: Vec<DrmCard> = folders(&sys.join("class/drm"))
        .filter(|(name, _)| name.strip_prefix("card").is_some_and(is_number))
        .filter_map(|(_, folder)| DrmCard::read(folder.join("device"), &nodes))
        .collect();
    found.sort_by(|a, b| a.pci.cmp(&b.pci));
    found
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn folders(folder: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
}

impl DrmCard {
    fn read(folder: PathBuf, nodes: &KfdNodes) -> Option<Self> {
        let uevent = fs::read_to_string(folder.join("uevent")).ok()?;
        let property = |name: &str| field(&uevent, name, '=');
        let vendor = match property("DRIVER")? {
            "amdgpu" => GpuVendor::Amd,
            "i915" | "xe" => GpuVendor::Intel,
            _ => return None,
        };
        let pci = property("PCI_SLOT_NAME")?.to_ascii_lowercase();
        let ids = property("PCI_ID").unwrap_or_default();
        let product = fs::read_to_string(folder.join("product_name")).unwrap_or_default();
        let brand = if vendor == GpuVendor::Amd { "AMD" } else { "Intel" };
        let name = match product.trim() {
            "" => format!("{brand} {ids}").trim_end().to_owned(),
            product => product.to_owned(),
        };
        let unified = match vendor {
            // All integrated GPUs of Intel have this address.
            GpuVendor::Intel => pci == "0000:00:02.0",
            _ => nodes.with_processor.contains(&pci),
        };
        let kfd = nodes.gpus.get(&pci).copied();
        Some(Self { folder, vendor, name, pci, unified, kfd })
    }

    pub(super) fn described(&self) -> GpuDevice {
        GpuDevice {
            index: GpuIndex(0),
            vendor: self.vendor,
            name: self.name.clone(),
            uuid: None,
            pci: Some(self.pci.clone()),
            total: self.own_memory("total"),
            unified: self.unified,
        }
    }

    /// Reads a number of bytes of VRAM; `None` for Intel, whose drivers report none.
    fn memory(&self, which: &str) -> Option<u64> {
        read_number(&self.folder.join(format!("mem_info_vram_{which}")))
    }

    /// Like [`Self::memory`], but `None` for a GPU that uses host memory.
    fn own_memory(&self, which: &str) -> Option<u64> {
        if self.unified { None } else { self.memory(which) }
    }

    pub(super) fn free(&self) -> Option<u64> {
        Some(self.memory("total")?.saturating_sub(self.memory("used")?))
    }

    pub(super) fn reading(&self) -> DeviceReading {
        let total = self.own_memory("total");
        let used = self.own_memory("used");
        DeviceReading {
            total,
            used,
            free: total.zip(used).map(|(total, used)| total.saturating_sub(used)),
            temperature: self.temperature(),
            ecc_uncorrected: self.uncorrected(),
            ..DeviceReading::default()
        }
    }

    /// The kernel gives the temperature in thousandths of a degree.
    fn temperature(&self) -> Option<u32> {
        let monitors = self.folder.join("hwmon");
        let thousandths =
            folders(&monitors).filter_map(|(_, folder)| read_number(&folder.join("temp1_input"))).max()?;
        u32::try_from(thousandths / 1000).ok()
    }

    /// Reads the count of memory errors that ECC could not correct, from a line such as `ue: 0`.
    fn uncorrected(&self) -> Option<u64> {
        let text = fs::read_to_string(self.folder.join("ras/umc_err_count")).ok()?;
        field(&text, "ue", ':')?.parse().ok()
    }
}

#[derive(Debug, Default)]
struct KfdNodes {
    gpus: BTreeMap<String, u64>,
    /// PCI addresses of GPUs that share a KFD node, and therefore memory, with a CPU.
    with_processor: Vec<String>,
}

impl KfdNodes {
    fn read(sys: &Path) -> Self {
        let mut nodes = Self::default();
        for (_, folder) in folders(&sys.join("class/kfd/kfd/topology/nodes")) {
            let Some(id) = read_number(&folder.join("gpu_id")).filter(|id| *id > 0) else { continue };
            let text = fs::read_to_string(folder.join("properties")).unwrap_or_default();
            let property = |name: &str| number_field(&text, name).unwrap_or(0);
            let place = property("location_id");
            let bus = place >> 8 & 0xff;
            let slot = place >> 3 & 0x1f;
            let function = place & 7;
            let pci = format!("{:04x}:{bus:02x}:{slot:02x}.{function}", property("domain"));
            if property("cpu_cores_count") > 0 {
                nodes.with_processor.push(pci.clone());
            }
            nodes.gpus.insert(pci, id);
        }
        nodes
    }
}

/// Reads the VRAM of HIP programs on one card, by the pid that KFD reports.
pub(super) fn kfd_processes(sys: &Path, card: &DrmCard) -> Vec<(u32, u64)> {
    let Some(gpu) = card.kfd else { return Vec::new() };
    folders(&sys.join("class/kfd/kfd/proc"))
        .filter_map(|(pid, folder)| {
            Some((pid.parse().ok()?, read_number(&folder.join(format!("vram_{gpu}")))?))
        })
        .collect()
}

#[derive(Debug, Default)]
pub(super) struct DrmClients {
    clients: Vec<DrmClient>,
    /// Error of the last file that could not be read.
    refused: Option<String>,
}

impl DrmClients {
    pub(super) fn read_child(proc: &Path, child: ChildProcesses<'_>) -> Self {
        let mut all = Self::default();
        let outside = child.outside.iter().filter_map(|pid| i32::try_from(*pid).ok());
        for pid in host::group_members(proc, child.leader).into_iter().chain(outside) {
            all.read(&proc.join(pid.to_string()));
        }
        all
    }

    fn read(&mut self, process: &Path) {
        let open = match fs::read_dir(process.join("fd")) {
            Ok(open) => open,
            // An ended process holds no memory.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return,
            Err(error) => {
                self.refused = Some(format!("{}: {error}", process.join("fd").display()));
                return;
            }
        };
        for file in open.filter_map(Result::ok) {
            // Most files are no GPU, and reading a link is cheaper than reading the fdinfo.
            let target = fs::read_link(file.path()).unwrap_or_default();
            if target.starts_with("/dev/dri") {
                let text = fs::read_to_string(process.join("fdinfo").join(file.file_name()));
                self.clients.extend(text.ok().as_deref().and_then(fdinfo::parse));
            }
        }
    }

    /// Returns the bytes on a card, if a process has opened it; the error says why they are unknown.
    pub(super) fn bytes_on(&self, card: &DrmCard) -> Result<Option<u64>, String> {
        let mut counted = Vec::new();
        let mut sum = None;
        for client in self.clients.iter().filter(|client| client.pci.as_deref() == Some(&card.pci)) {
            if client.id.is_some() && counted.contains(&client.id) {
                continue;
            }
            counted.push(client.id);
            let Some(bytes) = client.vram else {
                return Err(format!("this {} driver does not tell (Linux 5.19 and newer do)", client.driver));
            };
            sum = Some(sum.unwrap_or(0_u64).saturating_add(bytes));
        }
        match (sum, &self.refused) {
            (None, Some(refused)) => Err(refused.clone()),
            (sum, _) => Ok(sum),
        }
    }
}
