//! What all generations of the fleet hold, so that they can be judged together: shared budgets, and whether memory came
//! back when one of them had ended.
//!
//! ```text
//!   free before its spawn + what our others held then   ─┐
//!                                                        ├─ missing? ── a driver's leak, after some exits in a row
//!   free after its exit   + what our others hold now    ─┘
//! ```
//!
//! Our others come and go meanwhile, which is no leak. While one of them has not been read since it became ready, its
//! share is not known, and nothing is concluded.

use std::collections::BTreeMap;
use std::sync::Mutex;

use warden_policies::share::{self, Chosen, Member, SharedBudget};
use warden_policies::{ByteSize, GenerationId, GpuIndex, MemoryKind, MemoryLimit, cooldown};

use crate::process::MachineMemory;
use crate::spec::SharedBudgets;
use crate::sync::lock;
use crate::view::ledger::AfterExit;

/// Where a generation is on its way out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Stays,
    /// It drains or was told to end.
    Leaves,
    /// Its process is gone: it holds nothing any more, and what came back of it is looked for.
    Dead,
}

#[derive(Clone, Debug, Default)]
struct Part {
    /// What anybody could have taken before it was made, with what our others held.
    before: Vec<(MemoryKind, u64)>,
    /// It was read since it became ready, so that `members` is all of it.
    settled: bool,
    vram_known: bool,
    members: Vec<(MemoryKind, Member)>,
    /// The most that it held of each GPU's memory.
    peaks: BTreeMap<GpuIndex, u64>,
    stage: Stage,
    /// What had come back when another one was about to be made.
    looked: Option<Returned>,
}

impl Part {
    fn holds(&self, series: MemoryKind) -> u64 {
        let found = self.members.iter().find(|(of, _)| *of == series);
        found.and_then(|(_, member)| member.charged).unwrap_or(0)
    }

    fn knows(&self, series: MemoryKind) -> bool {
        self.settled && (series == MemoryKind::Host || self.vram_known)
    }
}

/// What came back after an exit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Returned {
    /// Bytes missing of each memory that could be judged; `None` if nothing is.
    pub(crate) missing: Vec<(MemoryKind, Option<u64>)>,
    /// The figures of the GPUs.
    pub(crate) gpus: Vec<AfterExit>,
}

impl Returned {
    pub(crate) fn is_complete(&self) -> bool {
        self.missing.iter().all(|(_, missing)| missing.is_none())
    }
}

#[derive(Debug, Default)]
pub(crate) struct FleetMemory {
    parts: Mutex<BTreeMap<GenerationId, Part>>,
}

impl FleetMemory {
    /// A generation is about to be made; this much was free before.
    pub(crate) fn born(&self, id: GenerationId, free: &MachineMemory) {
        let mut parts = lock(&self.parts);
        let before = with_others(&parts, id, free);
        // Afterwards it is not known what the new one holds.
        let dead: Vec<GenerationId> =
            parts.iter().filter(|(_, part)| part.stage == Stage::Dead).map(|(id, _)| *id).collect();
        for dead in dead {
            let found = look(&parts, dead, free);
            if let Some(part) = parts.get_mut(&dead) {
                part.looked = found.or_else(|| part.looked.take());
            }
        }
        parts.insert(id, Part { before, ..Part::default() });
    }

    /// Its process is gone, and what comes back of its memory is not known yet.
    pub(crate) fn died(&self, id: GenerationId) {
        if let Some(part) = lock(&self.parts).get_mut(&id) {
            part.stage = Stage::Dead;
        }
    }

    /// It was read when it served.
    pub(crate) fn read(&self, id: GenerationId, vram_known: bool, members: Vec<(MemoryKind, Member)>) {
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

    /// The most that one held of a GPU's memory since it was made; 0 before its first reading.
    pub(crate) fn peak(&self, id: GenerationId, gpu: GpuIndex) -> u64 {
        lock(&self.parts).get(&id).and_then(|part| part.peaks.get(&gpu).copied()).unwrap_or(0)
    }

    /// VRAM that the others held and gave back: pools that were purged, a model that sleeps. It is free by the driver's figures
    /// and nobody's to take, because its owner takes it again with the next large prompt, and dies if it is gone.
    pub(crate) fn reserved(&self, besides: Option<GenerationId>, gpu: GpuIndex) -> u64 {
        let parts = lock(&self.parts);
        // The dead take nothing again.
        let others = parts
            .iter()
            .filter(|(id, part)| Some(**id) != besides && part.stage != Stage::Dead)
            .map(|(_, part)| part);
        let gave = |part: &Part| {
            part.peaks.get(&gpu).copied().unwrap_or(0).saturating_sub(part.holds(MemoryKind::Vram(gpu)))
        };
        others.map(gave).fold(0, u64::saturating_add)
    }

    /// It cannot be replaced now: another one has to give way.
    pub(crate) fn pin(&self, id: GenerationId) {
        if let Some(part) = lock(&self.parts).get_mut(&id) {
            for (_, member) in &mut part.members {
                member.free_to_go = false;
            }
        }
    }

    /// It gives its memory back before long.
    pub(crate) fn leaves(&self, id: GenerationId) {
        if let Some(part) = lock(&self.parts).get_mut(&id) {
            part.stage = Stage::Leaves;
        }
    }

    /// Whether another one than this is giving its memory back: what found no room may find some soon.
    pub(crate) fn is_making_room(&self, besides: GenerationId) -> bool {
        lock(&self.parts).iter().any(|(id, part)| *id != besides && (part.stage != Stage::Stays))
    }

    /// Nothing more is to be known about it.
    pub(crate) fn gone(&self, id: GenerationId) {
        lock(&self.parts).remove(&id);
    }

    /// Whether a shared budget is passed and this is the one to give way. `total` tells the size of a memory.
    pub(crate) fn chosen(
        &self,
        id: GenerationId,
        budgets: &SharedBudgets,
        total: impl Fn(MemoryKind) -> Option<u64>,
    ) -> Option<Chosen> {
        let parts = lock(&self.parts);
        let own = parts.get(&id)?;
        let chosen = own.members.iter().filter_map(|(series, _)| {
            let budget = in_bytes(budgets, *series, total(*series));
            let all = parts.iter().filter(|(_, part)| part.stage != Stage::Dead).filter_map(|(id, part)| {
                let member = part.members.iter().find(|(of, _)| of == series)?.1;
                Some((*id, member))
            });
            let (ids, members): (Vec<GenerationId>, Vec<Member>) = all.unzip();
            let (index, chosen) = share::first(*series, &members, budget)?;
            (ids[index] == id).then_some(chosen)
        });
        chosen.max_by_key(|chosen| chosen.level)
    }

    /// What came back of the memory of a generation that has ended, now that this much is free. `None` if that cannot be told
    /// now, because it is not known what others hold.
    pub(crate) fn returned(&self, id: GenerationId, free: &MachineMemory) -> Option<Returned> {
        let parts = lock(&self.parts);
        let complete = parts.get(&id).and_then(|part| part.looked.clone()).filter(Returned::is_complete);
        complete.or_else(|| look(&parts, id, free))
    }
}

fn look(parts: &BTreeMap<GenerationId, Part>, id: GenerationId, free: &MachineMemory) -> Option<Returned> {
    let Some(part) = parts.get(&id) else { return Some(Returned::default()) };
    let after = with_others(parts, id, free);
    let mut returned = Returned::default();
    for (series, before) in &part.before {
        if !part.knows(*series) || part.holds(*series) == 0 {
            continue;
        }
        // Read then and not now: somebody starts, or a driver does not answer.
        let (_, after) = after.iter().find(|(of, _)| of == series)?;
        let missing = cooldown::unreturned(*before, *after, part.holds(*series));
        returned.missing.push((*series, missing));
        if let MemoryKind::Vram(gpu) = series {
            let (free_before_spawn, free_after_exit) = (*before, *after);
            returned.gpus.push(AfterExit { gpu: *gpu, free_before_spawn, free_after_exit });
        }
    }
    Some(returned)
}

/// Free memory and what our others hold of it, where all of that is known.
fn with_others(
    parts: &BTreeMap<GenerationId, Part>,
    id: GenerationId,
    free: &MachineMemory,
) -> Vec<(MemoryKind, u64)> {
    let host = free.host.map(|bytes| (MemoryKind::Host, bytes));
    let gpus = free.gpus.iter().map(|(gpu, bytes)| (MemoryKind::Vram(*gpu), *bytes));
    let others = || {
        parts.iter().filter(|(other, part)| **other != id && part.stage != Stage::Dead).map(|(_, part)| part)
    };
    let known = |(series, bytes): (MemoryKind, u64)| {
        let held = others().map(|part| part.holds(series)).fold(bytes, u64::saturating_add);
        others().all(|part| part.knows(series)).then_some((series, held))
    };
    host.into_iter().chain(gpus).filter_map(known).collect()
}

fn in_bytes(budgets: &SharedBudgets, series: MemoryKind, total: Option<u64>) -> SharedBudget {
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
    use warden_policies::share::Level;

    use super::*;

    const VRAM: MemoryKind = MemoryKind::Vram(GpuIndex(0));
    const GB: u64 = 1_000_000_000;

    fn free(vram: u64) -> MachineMemory {
        MachineMemory { host: None, gpus: vec![(GpuIndex(0), vram)] }
    }

    fn holding(charged: u64, fresh: u64) -> Vec<(MemoryKind, Member)> {
        let member = Member { charged: Some(charged), fresh: Some(fresh), cost: None, free_to_go: true };
        vec![(VRAM, member)]
    }

    #[test]
    fn what_others_took_and_gave_meanwhile_is_not_missing() {
        let all = FleetMemory::default();
        let [a, b] = [1, 2].map(GenerationId);
        all.born(a, &free(80 * GB));
        all.read(a, true, holding(10 * GB, GB));
        all.born(b, &free(70 * GB));
        assert_eq!(all.returned(a, &free(60 * GB)), None, "nobody knows what b holds");
        all.read(b, true, holding(20 * GB, GB));
        assert!(all.returned(a, &free(60 * GB)).unwrap().is_complete());
        let missing = all.returned(a, &free(54 * GB)).unwrap();
        assert_eq!(missing.missing, [(VRAM, Some(6 * GB))]);
        assert_eq!(missing.gpus[0].free_before_spawn - missing.gpus[0].free_after_exit, 6 * GB);
        all.gone(a);
        assert_eq!(all.returned(a, &free(0)), Some(Returned::default()));
    }

    #[test]
    fn a_start_that_does_not_wait_for_the_look_hides_nothing() {
        let all = FleetMemory::default();
        let [a, b, c] = [1, 2, 3].map(GenerationId);
        all.born(a, &free(80 * GB));
        all.read(a, true, holding(10 * GB, GB));
        all.died(a);
        // All of it is back when the next one is about to be made, whatever that one takes.
        all.born(b, &free(80 * GB));
        assert!(all.returned(a, &free(30 * GB)).unwrap().is_complete());
        all.gone(a);
        all.read(b, true, holding(50 * GB, GB));
        all.died(b);
        // Nothing is back yet: that is looked at again when the next one's share is known, and is no share of anybody.
        all.born(c, &free(30 * GB));
        assert_eq!(all.returned(b, &free(30 * GB)), None);
        all.read(c, true, holding(5 * GB, GB));
        assert_eq!(all.returned(b, &free(25 * GB)).unwrap().missing, [(VRAM, Some(50 * GB))]);
        assert!(all.returned(b, &free(75 * GB)).unwrap().is_complete());
    }

    #[test]
    fn what_one_held_and_gave_back_stays_reserved_for_it_until_it_is_gone() {
        let all = FleetMemory::default();
        let [a, b] = [1, 2].map(GenerationId);
        for id in [a, b] {
            all.born(id, &free(80 * GB));
            all.read(id, true, holding(24 * GB, GB));
        }
        all.read(a, true, holding(20 * GB, GB));
        all.read(a, true, holding(9 * GB, GB));
        assert_eq!(all.peak(a, GpuIndex(0)), 24 * GB);
        assert_eq!(all.reserved(None, GpuIndex(0)), 15 * GB);
        assert_eq!((all.reserved(Some(a), GpuIndex(0)), all.reserved(Some(b), GpuIndex(0))), (0, 15 * GB));
        assert_eq!(all.reserved(None, GpuIndex(1)), 0);
        all.gone(a);
        assert_eq!(all.reserved(None, GpuIndex(0)), 0);
    }

    #[test]
    fn the_one_that_gains_most_is_chosen_and_one_that_is_pinned_is_not() {
        let all = FleetMemory::default();
        let [a, b] = [1, 2].map(GenerationId);
        for (id, charged) in [(a, 10 * GB), (b, 30 * GB)] {
            all.born(id, &free(80 * GB));
            all.read(id, true, holding(charged, 9 * GB));
        }
        let budgets =
            SharedBudgets { vram_soft: Some(MemoryLimit::Percent(40.0)), ..SharedBudgets::default() };
        let ask = |id| all.chosen(id, &budgets, |_| Some(80 * GB));
        assert_eq!(ask(a), None);
        assert_eq!(ask(b), Some(Chosen { series: VRAM, level: Level::Soft, limit: 32 * GB }));
        all.pin(b);
        assert!(ask(a).is_some() && ask(b).is_none());
        assert_eq!(all.chosen(a, &budgets, |_| None), None, "a share of what is not known is no budget");
    }
}
