//! Chooses between sequential and overlapping replacement by the available memory, and explains the choice.

use warden_policies::lifecycle::BackendPhase;
use warden_policies::sample::HostMemory;
use warden_policies::units::scale_bytes;
use warden_policies::{ByteSize, MemoryKind};

use super::ModelTask;
use super::loading::LoadState;
use super::recipe::process_recipe;
use super::unit::ProcessUnit;
use crate::spec::ReplaceMode;
use crate::view::ledger::ReplacementMode;

impl ModelTask {
    /// Replacement mode, and an explanation for people.
    pub(super) fn choose_mode(&self, unit: &ProcessUnit) -> (ReplacementMode, Option<String>) {
        self.replace_mode(unit, || self.context.world.available_memory())
    }

    /// True if a replacement now would overlap. Called at every sample: available memory is taken from the
    /// sample, and read again only if the sample has none.
    pub(super) fn would_overlap(&self, unit: &ProcessUnit) -> bool {
        let sampled = unit.live.as_ref().and_then(|live| live.memory.totals).map(|totals| totals.available);
        self.replace_mode(unit, || sampled.or_else(|| self.context.world.available_memory())).0
            == ReplacementMode::Overlap
    }

    fn replace_mode(
        &self,
        unit: &ProcessUnit,
        available: impl FnOnce() -> Option<u64>,
    ) -> (ReplacementMode, Option<String>) {
        if unit.phase() != BackendPhase::Ready {
            return (
                ReplacementMode::Sequential,
                Some(format!("sequential: the process is {}", unit.phase())),
            );
        }
        match self.spec.run.replace {
            ReplaceMode::Sequential => {
                (ReplacementMode::Sequential, Some("sequential: as configured".to_owned()))
            }
            ReplaceMode::Overlap => (ReplacementMode::Overlap, Some("overlap: as configured".to_owned())),
            ReplaceMode::Auto if !self.fits_next_to_old(unit) => {
                let why = "sequential: with its new settings it has no room beside the process that is there";
                (ReplacementMode::Sequential, Some(why.to_owned()))
            }
            ReplaceMode::Auto => {
                let (mode, note) = self.mode_by_memory(unit, available);
                (mode, Some(note))
            }
        }
    }

    /// False if the loader said that a process with the latest settings does not fit next to an older
    /// process.
    fn fits_next_to_old(&self, unit: &ProcessUnit) -> bool {
        let is_older = || unit.live.as_ref().is_some_and(|live| live.recipe != process_recipe(&self.spec));
        !matches!(self.load_state, LoadState::Granted { beside: false, .. }) || !is_older()
    }

    fn mode_by_memory(
        &self,
        unit: &ProcessUnit,
        available: impl FnOnce() -> Option<u64>,
    ) -> (ReplacementMode, String) {
        let sequential = |why: String| (ReplacementMode::Sequential, format!("sequential: {why}"));
        let Some(live) = &unit.live else { return sequential("nothing is known of its memory".to_owned()) };
        let memory = &live.memory;
        if let Some(no_vram) = memory.no_vram.as_ref().filter(|no_vram| !no_vram.is_normal) {
            return sequential(format!("a GPU is present, and {}", no_vram.why));
        }
        let devices = memory.devices.as_ref().filter(|devices| !devices.readings.is_empty());
        if devices.is_none() && self.context.world.has_gpu() {
            return sequential("a GPU is present, and its memory might not hold two".to_owned());
        }
        let Some(available) = available() else {
            return sequential("the available memory is unknown".to_owned());
        };
        let held = live.memory.host.map_or(0, HostMemory::charged);
        let needed = scale_bytes(
            held.max(self.spec.recycle.common.overlap_floor.0),
            self.spec.recycle.common.overlap_headroom,
        );
        let promised = |memory| self.context.loading.promised_to_others(&self.who, memory);
        let available = available.saturating_sub(promised(MemoryKind::Host));
        let mut words = vec![format!("{} available, {} needed", ByteSize(available), ByteSize(needed))];
        let mut fits = available >= needed;
        for vram in &memory.vram {
            // Count the peak: the next process will reach it too. Also count memory that present processes
            // gave back, because they may take it again.
            let all = &self.context.fleet_memory;
            let needed = scale_bytes(
                vram.bytes.max(all.vram_peak(live.id, vram.gpu)),
                self.spec.recycle.common.overlap_headroom,
            );
            // Memory reserved for models that are being loaded still looks free.
            let reserved =
                all.reserved_vram(None, vram.gpu).saturating_add(promised(MemoryKind::Vram(vram.gpu)));
            let free = devices.and_then(|devices| devices.reading(vram.gpu)?.free);
            fits &= free.is_some_and(|free| free.saturating_sub(reserved) >= needed);
            let free = free.map_or_else(|| "an unknown amount".to_owned(), |free| ByteSize(free).to_string());
            let reserved = match reserved {
                0 => String::new(),
                bytes => format!(
                    ", {} of it reserved for others and for pools that were given back",
                    ByteSize(bytes)
                ),
            };
            words.push(format!("{free} free on GPU {}{reserved}, {} needed", vram.gpu.0, ByteSize(needed)));
        }
        let mode = if fits { ReplacementMode::Overlap } else { ReplacementMode::Sequential };
        (mode, format!("{}: {}", mode.as_str(), words.join(", ")))
    }
}
