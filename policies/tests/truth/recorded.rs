//! Recorded load of real servers without its leak: memory movement, work and readings with requests in
//! flight, in shuffled blocks. Tests add a known leak or harmless growth.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its recordings has failed")]

use std::path::Path;
use std::time::Duration;

use warden_policies::sample::{HostMemory, WorkDone};
use warden_policies::world::SplitMix;
use warden_policies::{BackendSample, MemoryKind, trace};

pub(crate) const MIB: f64 = 1_048_576.0;
/// Number of consecutive readings that stay together, unless they are shuffled.
const BLOCK: usize = 12;
/// Allocation granularity of GPU memory.
const PIECE: f64 = 2.0 * MIB;

/// Bytes to add to the recorded movement.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Extra {
    pub(crate) host: f64,
    /// Bytes in a cache, in addition to `host`; `measured`: the readings report them.
    pub(crate) cache: f64,
    pub(crate) measured: bool,
    pub(crate) vram: f64,
}

pub(crate) struct RecordedLoad {
    /// For each reading: work since the previous one, and movement of the heap in bytes.
    steps: Vec<(BackendSample, f64)>,
    /// Bytes around which the heap moves.
    base: f64,
    /// Number of readings that stay together.
    block: usize,
}

impl RecordedLoad {
    /// Reads a recording. `per_image`: bytes that the recorded server leaked per image.
    pub(crate) fn read(name: &str, per_image: f64) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces").join(format!("{name}.jsonl"));
        let all = trace::parse_recording(&std::fs::read_to_string(path).unwrap()).unwrap();
        // Leave out the start, whose growth does not continue.
        let all: Vec<BackendSample> = all.into_iter().filter(|sample| sample.work.requests > 30).collect();
        let level = |sample: &BackendSample| {
            real(sample.host.map_or(0, HostMemory::charged)) - per_image * real(sample.work.images)
        };
        // A remaining trend is not part of the movement.
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

    /// Shuffles single readings instead of blocks.
    pub(crate) fn shuffled(self) -> Self {
        Self { block: 1, ..self }
    }

    /// Simulates `times` as many slots: their work and their movements add up in each reading.
    pub(crate) fn busier(&self, times: usize) -> Self {
        let mut steps = Vec::new();
        for at in 0..self.steps.len() {
            let mut joined = self.steps[at].0.clone();
            let mut movement = self.steps[at].1;
            for more in 1..times {
                // Take distant readings, so that slots do not move in step.
                let (other, moved) = &self.steps[(at + more * 37) % self.steps.len()];
                joined.work += other.work;
                movement += moved;
            }
            steps.push((joined, movement));
        }
        Self { steps, base: self.base * real(times as u64), block: self.block }
    }

    /// Runs this many requests in randomly drawn blocks. `extra`: bytes to add for the work done; a GPU takes
    /// them in pieces of 2 MiB.
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
