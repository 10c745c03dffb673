//! Serializes a process's memory history for the next instance.

use serde::{Deserialize, Serialize};
use warden_policies::book::held::HeldMemory;
use warden_policies::declared_memory::DeclaredMemory;
use warden_policies::growth::GrowthMonitor;
use warden_policies::health::GpuOffload;
use warden_policies::sample::{HostMemory, VramReading};

use super::MemoryTracker;

/// Data that the next instance could not read from the process.
#[derive(Serialize)]
struct WrittenMemory<'a> {
    begun: u64,
    taken: u64,
    host: Option<HostMemory>,
    host_at_ready: Option<HostMemory>,
    vram: &'a [VramReading],
    vram_at_ready: &'a [VramReading],
    largest_prompt: u64,
    tokens: (u64, u64),
    offload: GpuOffload,
    held: &'a [HeldMemory],
    declared: &'a DeclaredMemory,
    reclaims: u64,
    monitor: &'a GrowthMonitor,
}

#[derive(Deserialize)]
struct ReadMemory {
    begun: u64,
    taken: u64,
    host: Option<HostMemory>,
    host_at_ready: Option<HostMemory>,
    vram: Vec<VramReading>,
    vram_at_ready: Vec<VramReading>,
    largest_prompt: u64,
    tokens: (u64, u64),
    offload: GpuOffload,
    held: Vec<HeldMemory>,
    declared: DeclaredMemory,
    reclaims: u64,
    monitor: serde_json::Value,
}

impl MemoryTracker {
    /// Serializes the tracker for the next instance.
    pub(crate) fn to_record(&self) -> serde_json::Value {
        let written = WrittenMemory {
            begun: self.readings_begun,
            taken: self.last_reading,
            host: self.host,
            host_at_ready: self.host_at_ready,
            vram: &self.vram,
            vram_at_ready: &self.vram_at_ready,
            largest_prompt: self.largest_prompt,
            tokens: self.tokens,
            offload: self.offload,
            held: &self.held,
            declared: &self.declared,
            reclaims: self.reclaims,
            monitor: &self.monitor,
        };
        serde_json::to_value(written).unwrap_or_default()
    }

    /// Restores a serialized tracker. Returns false if another version wrote it in an unknown form or
    /// judges memory differently; then the history begins anew.
    pub(crate) fn restore(&mut self, written: &serde_json::Value) -> bool {
        let Ok(read) = ReadMemory::deserialize(written) else { return false };
        let resumed = self.monitor.resume(&read.monitor);
        self.readings_begun = read.begun.max(read.taken);
        self.last_reading = read.taken;
        (self.host, self.host_at_ready) = (read.host, read.host_at_ready);
        (self.vram, self.vram_at_ready) = (read.vram, read.vram_at_ready);
        (self.largest_prompt, self.tokens) = (read.largest_prompt, read.tokens);
        (self.offload, self.held, self.declared) = (read.offload, read.held, read.declared);
        self.reclaims = read.reclaims;
        self.update_allowance();
        resumed
    }
}
