//! Simulated worlds: memory readings of a server with a known leak, or without one.
//!
//! ```text
//!  load ──> work ──┬─> background (plateaus, caches, high-water marks) ─┐
//!                  └─> leak (bytes per unit of work) ───────────────────┼─> BackendSample
//!  seed ──> random numbers ──> noise, peaks of requests in flight ──────┘
//! ```
//!
//! Used for tests, benchmarks and `policy simulate`. Equal seeds give equal worlds on every machine.

use std::time::Duration;

use crate::growth::WorkUnit;
use crate::sample::{BackendSample, GpuIndex, HostMemory, SampleEdge, VramReading, VramSource, WorkDone};
use crate::units::{as_f64, truncate_to_u64};

mod random;

pub use random::SplitMix;

const MIB: f64 = 1024.0 * 1024.0;
const DAY_SECONDS: f64 = 86_400.0;

/// Memory behaviour other than leaks. All amounts are in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryBackground {
    /// No change.
    Flat,
    /// Heap fragmentation: every request adds a random amount whose mean falls as `first / (1 + n / half)`.
    Ratchet {
        /// Mean at the first request.
        first: f64,
        /// Number of requests after which the mean is half of `first`.
        half: f64,
    },
    /// A buffer as large as the largest prompt so far.
    RunningMax {
        /// Bytes per prompt token.
        per_token: f64,
    },
    /// Permanent jumps at random requests.
    Plateaus {
        /// Number of jumps.
        count: u32,
        /// Smallest jump.
        low: f64,
        /// Largest jump.
        high: f64,
        /// Number of requests within which the jumps happen.
        within: u64,
    },
    /// Oscillation with the hour of the day.
    Diurnal {
        /// Half of the difference between the highest and the lowest value.
        amplitude: f64,
    },
    /// A cache that grows with every request until it is full, then replaces old entries.
    Cache {
        /// Mean bytes per request; the amounts are uniformly distributed between zero and twice the mean.
        per_request: f64,
        /// Size at which the cache is full.
        cap: f64,
    },
}

/// Random movement added to all other memory. Amounts are in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorldNoise {
    /// Standard deviation of the movement as a whole, not of its single steps.
    pub sigma: f64,
    /// Correlation of consecutive readings, from 0 to below 1: an AR(1) process.
    pub phi: f64,
    /// Share of the readings that catch a transient peak.
    pub spikes: f64,
    /// Mean height of such a peak; heights are exponentially distributed.
    pub spike: f64,
}

impl WorldNoise {
    /// A typical heap: 6 MiB of correlated movement, and one reading in twenty with a peak of 80 MiB.
    pub const HEAP: Self = Self { sigma: 6.0 * MIB, phi: 0.7, spikes: 0.05, spike: 80.0 * MIB };
}

/// A simulated leak.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorldLeak {
    /// Unit of work that causes the leak.
    pub per: WorkUnit,
    /// Bytes per leaking unit.
    pub bytes: f64,
    /// Share of the requests whose units leak, 0 to 1.
    pub chance: f64,
    /// Allocation granularity in bytes; 0 for none. A CUDA pool takes 2 MiB at a time.
    pub step: u64,
    /// Number of requests before the first request that leaks.
    pub after: u64,
}

impl WorldLeak {
    /// Creates a leak of this many bytes per unit, from the first request on.
    pub const fn per_unit(per: WorkUnit, bytes: f64) -> Self {
        Self { per, bytes, chance: 1.0, step: 0, after: 0 }
    }
}

/// Simulated traffic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorldLoad {
    /// Mean requests per second; pauses are exponentially distributed unless `steady`.
    pub per_second: f64,
    /// Requests arrive at a constant rate.
    pub steady: bool,
    /// Least and most prompt tokens; most prompts are short.
    pub prompt_tokens: (u64, u64),
    /// Least and most output tokens.
    pub output_tokens: (u64, u64),
    /// Share of the requests with an image.
    pub images: f64,
    /// Interval of readings, with requests in flight; `None`: one after each request, with none in flight.
    pub ticks: Option<Duration>,
}

impl Default for WorldLoad {
    /// Half a request per second, prompts of 20 to 4,000 tokens, every fourth request with an image.
    fn default() -> Self {
        Self {
            per_second: 0.5,
            steady: false,
            prompt_tokens: (20, 4000),
            output_tokens: (16, 512),
            images: 0.25,
            ticks: None,
        }
    }
}

/// A simulated world; [`SimulatedWorld::run`] starts it.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedWorld {
    /// Seed of all random numbers.
    pub seed: u64,
    /// Host memory of a fresh server in bytes.
    pub host: u64,
    /// VRAM of a fresh server in bytes; `None` for a server without a GPU.
    pub vram: Option<u64>,
    /// Other changes of host memory; all of them apply at once.
    pub backgrounds: Vec<MemoryBackground>,
    /// Random movement of host memory.
    pub noise: WorldNoise,
    /// Leaks of host memory.
    pub leaks: Vec<WorldLeak>,
    /// Leaks of VRAM.
    pub vram_leaks: Vec<WorldLeak>,
    /// Traffic of the world.
    pub load: WorldLoad,
}

impl SimulatedWorld {
    /// Creates a server with 400 MiB on the host, the movement of a typical heap, and no leak.
    pub fn quiet(seed: u64) -> Self {
        Self {
            seed,
            host: 400 << 20,
            vram: None,
            backgrounds: vec![],
            noise: WorldNoise::HEAP,
            leaks: vec![],
            vram_leaks: vec![],
            load: WorldLoad::default(),
        }
    }

    /// Starts the world. The returned iterator is endless: one reading per request, or per tick.
    pub fn run(&self) -> WorldRun {
        WorldRun::new(self.clone())
    }
}

/// A running world.
#[derive(Clone, Debug)]
pub struct WorldRun {
    world: SimulatedWorld,
    random: SplitMix,
    /// Seconds since the world began, across restarts.
    clock: f64,
    /// Time on `clock` at which the present process was spawned.
    spawned: f64,
    generation: WorldGeneration,
}

#[derive(Clone, Debug, Default)]
struct WorldGeneration {
    work: WorkDone,
    largest_prompt: u64,
    /// Bytes leaked by each leak of host memory; `vram`: by each leak of VRAM.
    host: Vec<f64>,
    vram: Vec<f64>,
    background: Vec<f64>,
    /// Request numbers at which plateaus begin, and their heights in bytes.
    plateaus: Vec<(u64, f64)>,
    /// State of the AR(1) process.
    wander: f64,
}

impl WorldRun {
    fn new(world: SimulatedWorld) -> Self {
        let random = SplitMix::new(world.seed);
        let mut run =
            Self { world, random, clock: 0.0, spawned: 0.0, generation: WorldGeneration::default() };
        run.restart();
        run
    }

    /// Returns the seconds since the world began, across restarts.
    pub fn clock(&self) -> f64 {
        self.clock
    }

    /// Lets time pass without a request, in seconds.
    pub fn wait(&mut self, seconds: f64) {
        self.pass_time(seconds.max(0.0));
    }

    /// Replaces the process: memory and counters restart, the hour of the day continues.
    pub fn restart(&mut self) {
        let mut fresh = WorldGeneration {
            host: vec![0.0; self.world.leaks.len()],
            vram: vec![0.0; self.world.vram_leaks.len()],
            background: vec![0.0; self.world.backgrounds.len()],
            ..WorldGeneration::default()
        };
        for background in &self.world.backgrounds {
            if let MemoryBackground::Plateaus { count, low, high, within } = *background {
                for _ in 0..count {
                    let at = self.random.below(within.max(1));
                    fresh.plateaus.push((at, self.random.between(low, high)));
                }
            }
        }
        fresh.wander = self.world.noise.sigma * self.random.normal();
        self.spawned = self.clock;
        self.generation = fresh;
    }

    /// Serves one request, including the pause before it.
    pub fn request(&mut self) {
        let load = self.world.load;
        let mean = 1.0 / load.per_second.max(1e-9);
        let pause = if load.steady { mean } else { self.random.exponential(mean) };
        self.pass_time(pause);
        let (low, high) = load.prompt_tokens;
        // Squaring a uniform number makes most prompts short and a few long.
        let share = self.random.unit().powi(2);
        let prompt = low + truncate_to_u64((share * as_f64(high.saturating_sub(low))).round());
        let (low, high) = load.output_tokens;
        let output = low + self.random.below(high.saturating_sub(low) + 1);
        let images = u64::from(self.random.chance(load.images));
        let work = WorkDone { requests: 1, prompt_tokens: prompt, output_tokens: output, images, audio: 0 };
        let generation = &mut self.generation;
        generation.work += work;
        generation.largest_prompt = generation.largest_prompt.max(prompt);
        let number = generation.work.requests;
        let leaks = self.world.leaks.iter().zip(&mut generation.host);
        for (leak, bytes) in leaks.chain(self.world.vram_leaks.iter().zip(&mut generation.vram)) {
            let units = leak.per.count_in(&work);
            if number > leak.after && units > 0 && self.random.chance(leak.chance) {
                *bytes += leak.bytes * as_f64(units);
            }
        }
        for (background, bytes) in self.world.backgrounds.iter().zip(&mut generation.background) {
            match *background {
                MemoryBackground::Ratchet { first, half } => {
                    *bytes += self.random.exponential(first / (1.0 + as_f64(number) / half));
                }
                MemoryBackground::RunningMax { per_token } => {
                    *bytes = per_token * as_f64(generation.largest_prompt);
                }
                MemoryBackground::Cache { per_request, cap } => {
                    *bytes += self.random.between(0.0, 2.0 * per_request);
                    if *bytes > cap {
                        // The oldest entry is dropped; its size does not depend on the size of the new entry.
                        *bytes = cap - self.random.between(0.0, 2.0 * per_request).min(cap);
                    }
                }
                MemoryBackground::Flat
                | MemoryBackground::Plateaus { .. }
                | MemoryBackground::Diurnal { .. } => {}
            }
        }
        let noise = self.world.noise;
        let fresh = noise.sigma * (1.0 - noise.phi * noise.phi).max(0.0).sqrt();
        generation.wander = noise.phi * generation.wander + fresh * self.random.normal();
    }

    /// Returns a reading of the present state.
    pub fn sample(&mut self) -> BackendSample {
        let busy = self.world.load.ticks.is_some();
        let noise = self.world.noise;
        let mut host = as_f64(self.world.host) + self.generation.wander;
        if busy || self.random.chance(noise.spikes) {
            host += self.random.exponential(noise.spike);
        }
        for (leak, bytes) in self.world.leaks.iter().zip(&self.generation.host) {
            host += round_down_to_step(*bytes, leak.step);
        }
        for (background, bytes) in self.world.backgrounds.iter().zip(&self.generation.background) {
            host += match *background {
                MemoryBackground::Diurnal { amplitude } => {
                    amplitude * (std::f64::consts::TAU * self.clock / DAY_SECONDS).sin()
                }
                MemoryBackground::Plateaus { .. } => {
                    let done = self.generation.work.requests;
                    self.generation.plateaus.iter().filter(|(at, _)| *at <= done).map(|(_, high)| *high).sum()
                }
                _ => *bytes,
            };
        }
        let vram = self.world.vram.map(|fresh| {
            let leaks = self.world.vram_leaks.iter().zip(&self.generation.vram);
            let leaked: f64 = leaks.map(|(leak, bytes)| round_down_to_step(*bytes, leak.step)).sum();
            let bytes = fresh + truncate_to_u64(leaked.round());
            VramReading { gpu: GpuIndex(0), bytes, source: VramSource::Process }
        });
        let bytes = truncate_to_u64(host.round());
        BackendSample {
            at: Duration::from_secs_f64((self.clock - self.spawned).max(0.0)),
            edge: if busy { SampleEdge::Tick } else { SampleEdge::Idle },
            host: Some(HostMemory { anon: bytes, swap: 0, rss: bytes }),
            vram: vram.into_iter().collect(),
            pools: vec![],
            in_flight: u32::from(busy),
            work: self.generation.work,
            largest_prompt: self.generation.largest_prompt,
            reclaims: 0,
        }
    }

    fn pass_time(&mut self, seconds: f64) {
        self.clock += seconds;
        let generation = &mut self.generation;
        let leaks = self.world.leaks.iter().zip(&mut generation.host);
        for (leak, bytes) in leaks.chain(self.world.vram_leaks.iter().zip(&mut generation.vram)) {
            if leak.per == WorkUnit::Hour && generation.work.requests >= leak.after {
                *bytes += leak.bytes * seconds / 3600.0;
            }
        }
    }
}

impl Iterator for WorldRun {
    type Item = BackendSample;

    fn next(&mut self) -> Option<BackendSample> {
        match self.world.load.ticks {
            None => self.request(),
            Some(tick) => {
                let until = self.clock + tick.as_secs_f64();
                while self.clock < until {
                    self.request();
                }
            }
        }
        Some(self.sample())
    }
}

fn round_down_to_step(bytes: f64, step: u64) -> f64 {
    if step == 0 { bytes } else { (bytes / as_f64(step)).floor() * as_f64(step) }
}
