//! Mode of a replacement by the available memory, with an explanation for people.

use warden_policies::lifecycle::BackendPhase;
use warden_policies::sample::HostMemory;
use warden_policies::share::ReplacementReach;
use warden_policies::units::scale_bytes;
use warden_policies::{ByteSize, MemoryKind};

use crate::model::context::ReplacementPermit;
use crate::model::environment::TaskEnvironment;
use crate::model::generation::{LiveGeneration, process_recipe};
use crate::model::loading::room::{LoadState, ModelRoom};
use crate::model::unit::ProcessUnit;
use crate::spec::ReplaceMode;
use crate::view::ledger::ReplacementMode;

impl ModelRoom {
    pub(crate) fn choose_mode(
        &self,
        env: &TaskEnvironment,
        unit: &ProcessUnit,
    ) -> (ReplacementMode, Option<String>) {
        self.replace_mode(env, unit, || env.context.world.available_memory())
    }

    /// True if a replacement now would overlap. Uses the available memory of the last sample, and reads it
    /// only if there is none.
    pub(crate) fn would_overlap(&self, env: &TaskEnvironment, unit: &ProcessUnit) -> bool {
        let sampled = unit.live.as_ref().and_then(|live| live.memory.last.totals);
        let available =
            || sampled.map(|totals| totals.available).or_else(|| env.context.world.available_memory());
        self.replace_mode(env, unit, available).0 == ReplacementMode::Overlap
    }

    /// Permit for a replacement that the policy has decided.
    pub(crate) fn policy_permit(
        &self,
        env: &TaskEnvironment,
        unit: &ProcessUnit,
    ) -> Option<ReplacementPermit> {
        // Two overlapping replacements would count the same free memory twice.
        let overlaps = self.would_overlap(env, unit);
        let reach = if overlaps { ReplacementReach::Machine } else { ReplacementReach::Gpus };
        env.replacement_permit(unit.replica, &unit.live.as_ref()?.memory.used_gpus(), reach)
    }

    fn replace_mode(
        &self,
        env: &TaskEnvironment,
        unit: &ProcessUnit,
        available: impl FnOnce() -> Option<u64>,
    ) -> (ReplacementMode, Option<String>) {
        if unit.phase() != BackendPhase::Ready {
            return (
                ReplacementMode::Sequential,
                Some(format!("sequential: the process is {}", unit.phase())),
            );
        }
        match env.spec.run.replace {
            ReplaceMode::Sequential => {
                (ReplacementMode::Sequential, Some("sequential: as configured".to_owned()))
            }
            ReplaceMode::Overlap => (ReplacementMode::Overlap, Some("overlap: as configured".to_owned())),
            ReplaceMode::Auto if !self.fits_next_to_old(env, unit) => {
                let why = "sequential: with its new settings it has no room beside the process that is there";
                (ReplacementMode::Sequential, Some(why.to_owned()))
            }
            ReplaceMode::Auto => {
                let (mode, note) = self.mode_by_memory(env, unit, available);
                (mode, Some(note))
            }
        }
    }

    /// True if a process with the latest settings has room next to the old one.
    fn fits_next_to_old(&self, env: &TaskEnvironment, unit: &ProcessUnit) -> bool {
        let is_older = || unit.live.as_ref().is_some_and(|live| live.recipe != process_recipe(&env.spec));
        !matches!(self.state, LoadState::Granted { beside: false, .. }) || !is_older()
    }

    fn mode_by_memory(
        &self,
        env: &TaskEnvironment,
        unit: &ProcessUnit,
        available: impl FnOnce() -> Option<u64>,
    ) -> (ReplacementMode, String) {
        let sequential = |why: String| (ReplacementMode::Sequential, format!("sequential: {why}"));
        let Some(live) = &unit.live else { return sequential("nothing is known of its memory".to_owned()) };
        let last = &live.memory.last;
        if let Some(no_vram) = last.no_vram.as_ref().filter(|no_vram| !no_vram.is_normal) {
            return sequential(format!("a GPU is present, and {}", no_vram.why));
        }
        if last.devices.as_ref().is_none_or(|devices| devices.readings.is_empty())
            && env.context.world.has_gpu()
        {
            return sequential("a GPU is present, and its memory might not hold two".to_owned());
        }
        match available() {
            Some(available) => self.mode_by_room(env, live, available),
            None => sequential("the available memory is unknown".to_owned()),
        }
    }

    fn mode_by_room(
        &self,
        env: &TaskEnvironment,
        live: &LiveGeneration,
        available: u64,
    ) -> (ReplacementMode, String) {
        let policy = &env.spec.recycle.common;
        let held = live.memory.history.host.map_or(0, HostMemory::charged);
        let needed = scale_bytes(held.max(policy.overlap_floor.0), policy.overlap_headroom);
        let promised = |memory| self.desk.promised_to_others(&self.who, memory);
        let available = available.saturating_sub(promised(MemoryKind::Host));
        let mut words = vec![format!("{} available, {} needed", ByteSize(available), ByteSize(needed))];
        let mut fits = available >= needed;
        for vram in &live.memory.history.vram {
            // The next process will reach the same peak. Memory that present processes gave back counts too,
            // because they may take it again.
            let all = &env.context.fleet_memory;
            let peak = vram.bytes.max(all.vram_peak(live.id, vram.gpu));
            let needed = scale_bytes(peak, policy.overlap_headroom);
            // Memory reserved for models that are being loaded still looks free.
            let reserved =
                all.reserved_vram(None, vram.gpu).saturating_add(promised(MemoryKind::Vram(vram.gpu)));
            let devices = live.memory.last.devices.as_ref();
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
