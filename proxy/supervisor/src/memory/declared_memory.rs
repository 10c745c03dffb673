//! Memory that a process keeps on purpose, as declared by its command line and its reports.

use std::collections::BTreeMap;

use warden_policies::declared_memory::DeclaredMemory;
use warden_policies::health::GpuOffload;
use warden_policies::sample::{MemoryKind, VramReading};
use warden_sensors::CudaReport;

use crate::spec::ServerCommand;

pub(crate) fn from_command(command: &ServerCommand, build: Option<u32>) -> DeclaredMemory {
    if !command.kind.is_llama_server() {
        return DeclaredMemory::NONE;
    }
    let of_server = |name: &str| name.starts_with("LLAMA_");
    let inherited = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok().filter(|name| of_server(name))?;
        Some((name, value.into_string().ok()?))
    });
    let mut env: BTreeMap<String, String> = inherited.collect();
    env.extend(command.env.iter().cloned());
    for name in &command.env_remove {
        env.remove(name);
    }
    DeclaredMemory::from_command(&command.args, &env, build)
}

/// Host memory in bytes that the process may keep on purpose and that cannot be measured.
pub(crate) fn allowed_bytes(declared: &DeclaredMemory) -> u64 {
    if declared.measured().is_some() { declared.unmeasured() } else { declared.bytes() }
}

/// Measured pools: the prompt cache from the log, GPU pools from the memory report.
pub(crate) fn measured_pools(
    declared: &DeclaredMemory,
    report: Option<&CudaReport>,
    vram: &[VramReading],
) -> Vec<(MemoryKind, u64)> {
    let host = declared.measured().map(|bytes| (MemoryKind::Host, bytes));
    host.into_iter().chain(report.iter().flat_map(|report| gpu_pools(report, vram))).collect()
}

/// GPU pools by our GPU numbers. ggml may order devices differently, so both sides must count the same number
/// of devices.
fn gpu_pools(report: &CudaReport, vram: &[VramReading]) -> Vec<(MemoryKind, u64)> {
    let devices = report.by_device();
    if devices.len() != vram.len() {
        return Vec::new();
    }
    let pools = devices
        .values()
        .map(|totals| totals.counts.pool_bytes.saturating_add(totals.counts.cublas_workspace_bytes));
    vram.iter().map(|vram| MemoryKind::Vram(vram.gpu)).zip(pools).collect()
}

/// True if an output line reports memory of the server, or its share on GPUs. Called for every line, so the
/// first check is cheap.
pub(crate) fn is_memory_line(line: &str) -> bool {
    if line.contains("offloaded ") {
        return GpuOffload::default().apply_log_line(line);
    }
    ["cache", "checkpoint", "n_slots"].iter().any(|word| line.contains(word))
        && warden_policies::declared_memory::parse_line(line).is_some()
}
