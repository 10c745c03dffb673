//! Load of real servers without its leak: the movement of their memory, the order of their work and their readings with
//! requests in flight, cut into blocks that follow each other in another order. Tests put a leak back, or something else.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its recordings has failed")]

use std::path::Path;
use std::time::Duration;

use warden_policies::sample::{HostMemory, WorkDone};
use warden_policies::world::SplitMix;
use warden_policies::{BackendSample, MemoryKind, trace};

pub(crate) const MIB: f64 = 1_048_576.0;
/// Readings that stay together, unless they are shuffled.
const BLOCK: usize = 12;
/// What a GPU's memory is taken in.
const PIECE: f64 = 2.0 * MIB;

/// Bytes beside the movement of each memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Extra {
    pub(crate) host: f64,
    /// Bytes in a cache, beside those, and whether readings tell them.
    pub(crate) cache: f64,
    pub(crate) measured: bool,
    pub(crate) vram: f64,
}

/// A recording without its leak.
pub(crate) struct RecordedLoad {
    /// For each reading: the work since the one before, and the movement of the heap in bytes.
    steps: Vec<(BackendSample, f64)>,
    /// Bytes around which the heap moves.
    base: f64,
    /// Readings that stay together.
    block: usize,
}

impl RecordedLoad {
    /// `per_image`: bytes that the recorded server leaked for each image.
    pub(crate) fn read(name: &str, per_image: f64) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces").join(format!("{name}.jsonl"));
        let all = trace::parse_recording(&std::fs::read_to_string(path).unwrap()).unwrap();
        // Without the start, which is no part of what goes on for long.
        let all: Vec<BackendSample> = all.into_iter().filter(|sample| sample.work.requests > 30).collect();
        let level = |sample: &BackendSample| {
            real(sample.host.map_or(0, HostMemory::charged)) - per_image * real(sample.work.images)
        };
        // What is left of a trend is not part of the movement.
        let (first, last) = (&all[..20], &all[all.len() - 20..]);
        let mean = |part: &[BackendSample]| part.iter().map(level).sum::<f64>() / 20.0;
        let per_step = (mean(last) - mean(first)) / real(all.len() as u64 - 20);
        let base = mean(first);
        let mut steps = Vec::new();
        for (at, two) in all.windows(2).enumerate() {
            let mut done = two[1].clone();
            done.work = two[1].work - two[0].work;
            done.at = two[1].at.saturating_sub(two[0].at);
            steps.push((done, level(&two[1]) - base - per_step * real(at as u64)));
        }
        Self { steps, base, block: BLOCK }
    }

    /// The same server, each reading on its own.
    pub(crate) fn shuffled(self) -> Self {
        Self { block: 1, ..self }
    }

    /// The same server with `times` as many slots, read so seldom that each reading has the work of `times` of them: their
    /// movements add up.
    pub(crate) fn busier(&self, times: usize) -> Self {
        let mut steps = Vec::new();
        for at in 0..self.steps.len() {
            let mut joined = self.steps[at].0.clone();
            let mut movement = self.steps[at].1;
            for more in 1..times {
                // Far apart, so that slots do not move as one.
                let (other, moved) = &self.steps[(at + more * 37) % self.steps.len()];
                joined.work += other.work;
                movement += moved;
            }
            steps.push((joined, movement));
        }
        Self { steps, base: self.base * real(times as u64), block: self.block }
    }

    /// So many requests, in blocks that are drawn at random. `extra`: bytes of both memories beside the movement, by the work done.
    /// A GPU's come in pieces of 2 MiB.
    pub(crate) fn run(
        &self,
        seed: u64,
        requests: u64,
        mut extra: impl FnMut(&BackendSample) -> Extra,
    ) -> Vec<BackendSample> {
        let mut random = SplitMix::new(seed ^ 0x9E37_79B9_7F4A_7C15);
        let mut now =
            BackendSample { work: WorkDone::default(), at: Duration::ZERO, ..self.steps[0].0.clone() };
        let mut all = Vec::new();
        while now.work.requests < requests {
            let from = usize::try_from(random.below((self.steps.len() - self.block) as u64)).unwrap();
            for (step, movement) in &self.steps[from..from + self.block] {
                now = BackendSample { at: now.at + step.at, work: now.work + step.work, ..step.clone() };
                let beside = extra(&now);
                let bytes = self.base + movement + beside.host + beside.cache;
                let pool = (MemoryKind::Host, whole(beside.cache));
                now.pools = Some(pool).filter(|_| beside.measured).into_iter().collect();
                now.host = now.host.map(|host| HostMemory { anon: whole(bytes), swap: 0, ..host });
                let pieces = whole(beside.vram / PIECE) * whole(PIECE);
                for vram in &mut now.vram {
                    vram.bytes = step.vram.first().map_or(0, |read| read.bytes) + pieces;
                }
                all.push(now.clone());
            }
        }
        all
    }
}

#[expect(clippy::cast_precision_loss, reason = "bytes and counts of one machine")]
pub(crate) fn real(number: u64) -> f64 {
    number as f64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of one machine")]
pub(crate) fn whole(bytes: f64) -> u64 {
    bytes.max(0.0) as u64
}
