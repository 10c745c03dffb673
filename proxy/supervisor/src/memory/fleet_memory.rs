//! Memory of all generations together: for shared budgets, and to check that an ended process has freed its
//! memory.
//!
//! ```text
//!     free before its spawn + memory of our others then   ─┐
//!                                                          ├─ missing? ── a driver's leak, if repeated
//!     free after its exit   + memory of our others now    ─┘
//! ```
//!
//! Our other processes may start and end meanwhile, which must not look like a leak. While the memory of a
//! new process is unknown, the check gives no result.

use std::collections::BTreeMap;
use std::sync::Mutex;

use warden_policies::share::{self, SharedBudget, SharedChoice, SharedMember};
use warden_policies::{ByteSize, GenerationId, GpuIndex, MemoryKind, MemoryLimit, cooldown};

use crate::process::MachineMemory;
use crate::spec::SharedBudgets;
use crate::sync::lock;
use crate::view::ledger::GpuAfterExit;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ExitStage {
    #[default]
    Running,
    /// The process drains, or was asked to end.
    Leaving,
    /// The process has ended, and its freed memory is being checked.
    Dead,
}

#[derive(Clone, Debug, Default)]
struct GenerationMemory {
    /// Free memory before the spawn, plus the memory of our other processes then.
    free_before: Vec<(MemoryKind, u64)>,
    /// True if `members` is complete: memory was read since the process became ready.
    settled: bool,
    vram_known: bool,
    members: Vec<(MemoryKind, SharedMember)>,
    peaks: BTreeMap<GpuIndex, u64>,
    stage: ExitStage,
    /// Freed memory at the next spawn, which ends the check.
    early_return: Option<ReturnedMemory>,
}

impl GenerationMemory {
    fn held_bytes(&self, series: MemoryKind) -> u64 {
        let found = self.members.iter().find(|(of, _)| *of == series);
        found.and_then(|(_, member)| member.charged).unwrap_or(0)
    }

    fn knows(&self, series: MemoryKind) -> bool {
        self.settled && (series == MemoryKind::Host || self.vram_known)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReturnedMemory {
    /// Missing bytes of each known kind of memory; `None` if no bytes are missing.
    pub(crate) missing: Vec<(MemoryKind, Option<u64>)>,
    /// Free memory of the GPUs before the spawn and after the end.
    pub(crate) gpus: Vec<GpuAfterExit>,
}

impl ReturnedMemory {
    pub(crate) fn is_complete(&self) -> bool {
        self.missing.iter().all(|(_, missing)| missing.is_none())
    }
}

#[derive(Debug, Default)]
pub(crate) struct FleetMemory {
    parts: Mutex<BTreeMap<GenerationId, GenerationMemory>>,
}

impl FleetMemory {
    /// Adds a generation before its spawn. `free`: free memory at this moment.
    pub(crate) fn add_generation(&self, id: GenerationId, free: &MachineMemory) {
        let mut parts = lock(&self.parts);
        let before = free_with_others(&parts, id, free);
        // The memory of the new process will be unknown for a while, so complete these checks now.
        let dead: Vec<GenerationId> =
            parts.iter().filter(|(_, part)| part.stage == ExitStage::Dead).map(|(id, _)| *id).collect();
        for dead in dead {
            let found = compare_free(&parts, dead, free);
            if let Some(part) = parts.get_mut(&dead) {
                part.early_return = found.or_else(|| part.early_return.take());
            }
        }
        parts.insert(id, GenerationMemory { free_before: before, ..GenerationMemory::default() });
    }

    /// Begins the check of an ended process's memory.
    pub(crate) fn note_dead(&self, id: GenerationId) {
        self.set_stage(id, ExitStage::Dead);
    }

    fn set_stage(&self, id: GenerationId, stage: ExitStage) {
        if let Some(part) = lock(&self.parts).get_mut(&id) {
            part.stage = stage;
        }
    }

    pub(crate) fn note_reading(
        &self,
        id: GenerationId,
        vram_known: bool,
        members: Vec<(MemoryKind, SharedMember)>,
    ) {
        if let Some(part) = lock(&self.parts).get_mut(&id) {
            part.settled = true;
            part.vram_known = vram_known;
            for (series, member) in &members {
                if let (MemoryKind::Vram(gpu), Some(held)) = (series, member.charged) {
                    let peak = part.peaks.entry(*gpu).or_default();
                    *peak = held.max(*peak);
                }
            }
            part.members = members;
        }
    }

    /// Highest VRAM of a generation on a GPU; 0 before its first reading.
    pub(crate) fn vram_peak(&self, id: GenerationId, gpu: GpuIndex) -> u64 {
        lock(&self.parts).get(&id).and_then(|part| part.peaks.get(&gpu).copied()).unwrap_or(0)
    }

    /// VRAM that our other processes gave back (purged pools, a sleeping model). The driver counts it as
    /// free, but its former owner needs it for the next large prompt.
    pub(crate) fn reserved_vram(&self, besides: Option<GenerationId>, gpu: GpuIndex) -> u64 {
        let parts = lock(&self.parts);
        // Dead processes take no memory again.
        let others = parts
            .iter()
            .filter(|(id, part)| Some(**id) != besides && part.stage != ExitStage::Dead)
            .map(|(_, part)| part);
        let gave = |part: &GenerationMemory| {
            part.peaks.get(&gpu).copied().unwrap_or(0).saturating_sub(part.held_bytes(MemoryKind::Vram(gpu)))
        };
        others.map(gave).fold(0, u64::saturating_add)
    }

    /// Excludes a generation from shared budgets, because it cannot be replaced now.
    pub(crate) fn pin(&self, id: GenerationId) {
        if let Some(part) = lock(&self.parts).get_mut(&id) {
            for (_, member) in &mut part.members {
                member.free_to_go = false;
            }
        }
    }

    pub(crate) fn note_leaving(&self, id: GenerationId) {
        self.set_stage(id, ExitStage::Leaving);
    }

    /// True if another generation will soon free its memory.
    pub(crate) fn is_making_room(&self, besides: GenerationId) -> bool {
        lock(&self.parts).iter().any(|(id, part)| *id != besides && (part.stage != ExitStage::Running))
    }

    pub(crate) fn remove_generation(&self, id: GenerationId) {
        lock(&self.parts).remove(&id);
    }

    /// Decision to replace this generation for an exceeded shared budget, unless another one is to be
    /// replaced. `total` returns the size of a memory.
    pub(crate) fn shared_decision(
        &self,
        id: GenerationId,
        budgets: &SharedBudgets,
        total: impl Fn(MemoryKind) -> Option<u64>,
    ) -> Option<SharedChoice> {
        let parts = lock(&self.parts);
        let own = parts.get(&id)?;
        let chosen = own.members.iter().filter_map(|(series, _)| {
            let budget = budget_in_bytes(budgets, *series, total(*series));
            let all =
                parts.iter().filter(|(_, part)| part.stage != ExitStage::Dead).filter_map(|(id, part)| {
                    let member = part.members.iter().find(|(of, _)| of == series)?.1;
                    Some((*id, member))
                });
            let (ids, members): (Vec<GenerationId>, Vec<SharedMember>) = all.unzip();
            let (index, chosen) = share::choose_first(*series, &members, budget)?;
            (ids[index] == id).then_some(chosen)
        });
        chosen.max_by_key(|chosen| chosen.level)
    }

    /// Memory freed by an ended generation. `free`: free memory now. `None` while the memory of our other
    /// processes is unknown.
    pub(crate) fn returned_memory(&self, id: GenerationId, free: &MachineMemory) -> Option<ReturnedMemory> {
        let parts = lock(&self.parts);
        let complete =
            parts.get(&id).and_then(|part| part.early_return.clone()).filter(ReturnedMemory::is_complete);
        complete.or_else(|| compare_free(&parts, id, free))
    }
}

fn compare_free(
    parts: &BTreeMap<GenerationId, GenerationMemory>,
    id: GenerationId,
    free: &MachineMemory,
) -> Option<ReturnedMemory> {
    let Some(part) = parts.get(&id) else { return Some(ReturnedMemory::default()) };
    let after = free_with_others(parts, id, free);
    let mut returned = ReturnedMemory::default();
    for (series, before) in &part.free_before {
        if !part.knows(*series) || part.held_bytes(*series) == 0 {
            continue;
        }
        // There is no figure: another process is starting, or a driver does not answer.
        let (_, after) = after.iter().find(|(of, _)| of == series)?;
        let missing = cooldown::unreturned_bytes(*before, *after, part.held_bytes(*series));
        returned.missing.push((*series, missing));
        if let MemoryKind::Vram(gpu) = series {
            let found = GpuAfterExit { gpu: *gpu, free_before_spawn: *before, free_after_exit: *after };
            returned.gpus.push(found);
        }
    }
    Some(returned)
}

/// Free memory plus the memory of our other processes, where both are known.
fn free_with_others(
    parts: &BTreeMap<GenerationId, GenerationMemory>,
    id: GenerationId,
    free: &MachineMemory,
) -> Vec<(MemoryKind, u64)> {
    let host = free.host.map(|bytes| (MemoryKind::Host, bytes));
    let gpus = free.gpus.iter().map(|(gpu, bytes)| (MemoryKind::Vram(*gpu), *bytes));
    let others = || {
        parts
            .iter()
            .filter(|(other, part)| **other != id && part.stage != ExitStage::Dead)
            .map(|(_, part)| part)
    };
    let known = |(series, bytes): (MemoryKind, u64)| {
        let held = others().map(|part| part.held_bytes(series)).fold(bytes, u64::saturating_add);
        others().all(|part| part.knows(series)).then_some((series, held))
    };
    host.into_iter().chain(gpus).filter_map(known).collect()
}

fn budget_in_bytes(budgets: &SharedBudgets, series: MemoryKind, total: Option<u64>) -> SharedBudget {
    let of_host = |limit: Option<ByteSize>| limit.map(|limit| limit.0);
    let of_gpu = |limit: Option<MemoryLimit>| match limit? {
        MemoryLimit::Bytes(bytes) => Some(bytes.0),
        limit => limit.resolve(ByteSize(total?)).map(|bytes| bytes.0),
    };
    match series {
        MemoryKind::Host => {
            SharedBudget { soft: of_host(budgets.host_soft), hard: of_host(budgets.host_hard) }
        }
        MemoryKind::Vram(_) => {
            SharedBudget { soft: of_gpu(budgets.vram_soft), hard: of_gpu(budgets.vram_hard) }
        }
    }
}

#[cfg(test)]
mod tests {
    use warden_policies::share::BudgetLevel;

    use super::*;

    const VRAM: MemoryKind = MemoryKind::Vram(GpuIndex(0));
    const GB: u64 = 1_000_000_000;

    fn free(vram: u64) -> MachineMemory {
        MachineMemory { host: None, gpus: vec![(GpuIndex(0), vram)] }
    }

    fn holding(charged: u64, fresh: u64) -> Vec<(MemoryKind, SharedMember)> {
        let member =
            SharedMember { charged: Some(charged), fresh: Some(fresh), cost: None, free_to_go: true };
        vec![(VRAM, member)]
    }

    #[test]
    fn what_others_took_and_gave_meanwhile_is_not_missing() {
        let all = FleetMemory::default();
        let [a, b] = [1, 2].map(GenerationId);
        all.add_generation(a, &free(80 * GB));
        all.note_reading(a, true, holding(10 * GB, GB));
        all.add_generation(b, &free(70 * GB));
        assert_eq!(all.returned_memory(a, &free(60 * GB)), None, "nobody knows what b holds");
        all.note_reading(b, true, holding(20 * GB, GB));
        assert!(all.returned_memory(a, &free(60 * GB)).unwrap().is_complete());
        let missing = all.returned_memory(a, &free(54 * GB)).unwrap();
        assert_eq!(missing.missing, [(VRAM, Some(6 * GB))]);
        assert_eq!(missing.gpus[0].free_before_spawn - missing.gpus[0].free_after_exit, 6 * GB);
        all.remove_generation(a);
        assert_eq!(all.returned_memory(a, &free(0)), Some(ReturnedMemory::default()));
    }

    #[test]
    fn a_start_that_does_not_wait_for_the_look_hides_nothing() {
        let all = FleetMemory::default();
        let [a, b, c] = [1, 2, 3].map(GenerationId);
        all.add_generation(a, &free(80 * GB));
        all.note_reading(a, true, holding(10 * GB, GB));
        all.note_dead(a);
        // All of it is back when the next process is about to be made, however much that one takes.
        all.add_generation(b, &free(80 * GB));
        assert!(all.returned_memory(a, &free(30 * GB)).unwrap().is_complete());
        all.remove_generation(a);
        all.note_reading(b, true, holding(50 * GB, GB));
        all.note_dead(b);
        // Nothing is back yet. The check is repeated when the next process's share is known.
        all.add_generation(c, &free(30 * GB));
        assert_eq!(all.returned_memory(b, &free(30 * GB)), None);
        all.note_reading(c, true, holding(5 * GB, GB));
        assert_eq!(all.returned_memory(b, &free(25 * GB)).unwrap().missing, [(VRAM, Some(50 * GB))]);
        assert!(all.returned_memory(b, &free(75 * GB)).unwrap().is_complete());
    }

    #[test]
    fn what_one_held_and_gave_back_stays_reserved_for_it_until_it_is_gone() {
        let all = FleetMemory::default();
        let [a, b] = [1, 2].map(GenerationId);
        for id in [a, b] {
            all.add_generation(id, &free(80 * GB));
            all.note_reading(id, true, holding(24 * GB, GB));
        }
        all.note_reading(a, true, holding(20 * GB, GB));
        all.note_reading(a, true, holding(9 * GB, GB));
        assert_eq!(all.vram_peak(a, GpuIndex(0)), 24 * GB);
        assert_eq!(all.reserved_vram(None, GpuIndex(0)), 15 * GB);
        assert_eq!(
            (all.reserved_vram(Some(a), GpuIndex(0)), all.reserved_vram(Some(b), GpuIndex(0))),
            (0, 15 * GB)
        );
        assert_eq!(all.reserved_vram(None, GpuIndex(1)), 0);
        all.remove_generation(a);
        assert_eq!(all.reserved_vram(None, GpuIndex(0)), 0);
    }

    #[test]
    fn the_one_that_gains_most_is_chosen_and_one_that_is_pinned_is_not() {
        let all = FleetMemory::default();
        let [a, b] = [1, 2].map(GenerationId);
        for (id, charged) in [(a, 10 * GB), (b, 30 * GB)] {
            all.add_generation(id, &free(80 * GB));
            all.note_reading(id, true, holding(charged, 9 * GB));
        }
        let budgets =
            SharedBudgets { vram_soft: Some(MemoryLimit::Percent(40.0)), ..SharedBudgets::default() };
        let ask = |id| all.shared_decision(id, &budgets, |_| Some(80 * GB));
        assert_eq!(ask(a), None);
        assert_eq!(ask(b), Some(SharedChoice { series: VRAM, level: BudgetLevel::Soft, limit: 32 * GB }));
        all.pin(b);
        assert!(ask(a).is_some() && ask(b).is_none());
        assert_eq!(
            all.shared_decision(a, &budgets, |_| None),
            None,
            "a share of what is not known is no budget"
        );
    }
}
