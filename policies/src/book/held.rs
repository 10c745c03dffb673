//! Memory measured in processes with the same command. Measured values replace predicted values.

use serde::{Deserialize, Serialize};

use crate::sample::MemoryKind;

/// Measured bytes of processes with the same command, in one kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldMemory {
    /// Kind of memory that was measured.
    pub series: MemoryKind,
    /// Bytes when the latest process was ready.
    pub ready: u64,
    /// Most bytes of any process while it did not leak.
    pub most: u64,
}

/// A change is stored if it exceeds the value divided by this.
const SMALL_CHANGE_DIVISOR: u64 = 64;

/// Records a process's present bytes. The maximum rises only if `sound`: no part is known to be a leak.
pub fn record_held(held: &mut Vec<HeldMemory>, series: MemoryKind, bytes: u64, sound: bool) {
    match held.iter_mut().find(|held| held.series == series) {
        Some(held) if sound => held.most = held.most.max(bytes),
        Some(_) => {}
        None => held.push(HeldMemory { series, ready: bytes, most: bytes }),
    }
}

/// Merges a further process's measurements into the known ones; `None` if no value changes significantly.
pub fn merge_held(known: &[HeldMemory], shown: &[HeldMemory]) -> Option<Vec<HeldMemory>> {
    let mut all = known.to_vec();
    // If the latest process used other GPUs, the values of GPUs that it did not use are obsolete.
    let on_gpus = |held: &HeldMemory| held.series != MemoryKind::Host;
    if shown.iter().any(on_gpus) {
        all.retain(|known| !on_gpus(known) || shown.iter().any(|now| now.series == known.series));
    }
    let mut news = all.len() != known.len();
    for now in shown {
        let Some(known) = all.iter_mut().find(|known| known.series == now.series) else {
            all.push(*now);
            news = true;
            continue;
        };
        let next = HeldMemory { series: now.series, ready: now.ready, most: known.most.max(now.most) };
        let differs = |one: u64, other: u64| one.abs_diff(other) > one.max(other) / SMALL_CHANGE_DIVISOR;
        if differs(known.ready, next.ready) || differs(known.most, next.most) {
            *known = next;
            news = true;
        }
    }
    all.sort_by_key(|held| held.series);
    news.then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::GpuIndex;

    const HOST: MemoryKind = MemoryKind::Host;

    #[test]
    fn the_first_reading_counts_as_ready_and_a_leak_raises_nothing() {
        let mut held = Vec::new();
        for (bytes, sound) in [(100, true), (150, true), (120, true), (900, false)] {
            record_held(&mut held, HOST, bytes, sound);
        }
        assert_eq!(held, [HeldMemory { series: HOST, ready: 100, most: 150 }]);
    }

    #[test]
    fn the_latest_start_and_the_most_of_all_are_kept_and_small_differences_are_not() {
        let gpu = MemoryKind::Vram(GpuIndex(0));
        let one = |ready, most| HeldMemory { series: HOST, ready, most };
        let known = merge_held(&[], &[one(1000, 2000)]).unwrap();
        assert_eq!(merge_held(&known, &[one(1005, 1900)]), None);
        assert_eq!(merge_held(&known, &[one(800, 900)]), Some(vec![one(800, 2000)]));
        let both = merge_held(&known, &[HeldMemory { series: gpu, ready: 5, most: 6 }]).unwrap();
        assert_eq!(both.len(), 2);
        assert_eq!(both[0], one(1000, 2000), "what was not read stays");
        let moved =
            merge_held(&both, &[HeldMemory { series: MemoryKind::Vram(GpuIndex(1)), ready: 5, most: 6 }])
                .unwrap();
        let series: Vec<MemoryKind> = moved.iter().map(|held| held.series).collect();
        assert_eq!(series, [HOST, MemoryKind::Vram(GpuIndex(1))], "it is on another GPU now");
    }
}
