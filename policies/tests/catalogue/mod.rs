//! Simulated worlds with and without a leak. Each seed draws the sizes of its world, not only the noise.

use std::time::Duration;

use warden_policies::growth::WorkUnit;
use warden_policies::world::{MemoryBackground, SimulatedWorld, SplitMix, WorldLeak, WorldLoad, WorldNoise};

const KIB: f64 = 1024.0;
const MIB: f64 = 1024.0 * KIB;

/// Slow drift that returns: 15 MiB over a thousand requests.
const WANDER: WorldNoise = WorldNoise { sigma: 15.0 * MIB, phi: 0.999, spikes: 0.05, spike: 80.0 * MIB };

/// A world, and the declared pools of its server.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Case {
    pub(crate) world: SimulatedWorld,
    pub(crate) declared: u64,
}

/// World without a leak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Harmless {
    /// A heap with movement and peaks.
    Flat,
    /// Slow drift that returns.
    Wander,
    /// Fragmentation that slows down.
    Ratchet,
    /// A buffer for the largest prompt so far.
    RunningMax,
    /// Twelve jumps of 32 to 256 MiB.
    Plateaus,
    /// Oscillation by 40 MiB with the hour of the day.
    Diurnal,
    /// A declared cache that fills and stays full.
    Cache,
    /// A busy server: timer readings only, all with requests in flight.
    Busy,
}

impl Harmless {
    pub(crate) const ALL: [Self; 8] = [
        Self::Flat,
        Self::Wander,
        Self::Ratchet,
        Self::RunningMax,
        Self::Plateaus,
        Self::Diurnal,
        Self::Cache,
        Self::Busy,
    ];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Flat => "flat",
            Self::Wander => "wander",
            Self::Ratchet => "ratchet",
            Self::RunningMax => "running maximum",
            Self::Plateaus => "plateaus",
            Self::Diurnal => "diurnal",
            Self::Cache => "declared cache",
            Self::Busy => "busy",
        }
    }

    /// Creates a world of this kind, for runs of some ten thousand requests.
    pub(crate) fn case(self, seed: u64) -> Case {
        let mut draw = SplitMix::new(seed ^ 0x5EED);
        let mut world = SimulatedWorld::quiet(seed);
        let mut declared = 0;
        match self {
            Self::Flat => {}
            Self::Wander => world.noise = WANDER,
            Self::Ratchet => {
                let half = draw.between(20.0, 200.0);
                // The growth is the same whenever the number of requests grows by a factor of e.
                let first = draw.between(10.0, 300.0) * MIB / half;
                world.backgrounds.push(MemoryBackground::Ratchet { first, half });
            }
            Self::RunningMax => {
                let longest = 1000 << draw.below(6);
                world.load.prompt_tokens = (20, longest);
                let largest = draw.between(100.0, 1000.0) * MIB;
                #[expect(clippy::cast_precision_loss, reason = "a small number")]
                world.backgrounds.push(MemoryBackground::RunningMax { per_token: largest / longest as f64 });
            }
            Self::Plateaus => world.backgrounds.push(MemoryBackground::Plateaus {
                count: 12,
                low: 32.0 * MIB,
                high: 256.0 * MIB,
                within: 10_000,
            }),
            Self::Diurnal => {
                world.load.per_second = draw.between(0.1, 2.0);
                world.backgrounds.push(MemoryBackground::Diurnal { amplitude: 40.0 * MIB });
            }
            Self::Cache => {
                let megabytes = 512 << draw.below(5);
                declared = megabytes << 20;
                #[expect(clippy::cast_precision_loss, reason = "a small number")]
                let cap = megabytes as f64 * MIB;
                world
                    .backgrounds
                    .push(MemoryBackground::Cache { per_request: draw.between(1.0, 30.0) * MIB, cap });
            }
            Self::Busy => {
                world.load = WorldLoad {
                    per_second: draw.between(1.0, 20.0),
                    ticks: Some(Duration::from_secs(5)),
                    ..world.load
                };
            }
        }
        Case { world, declared }
    }
}

/// Creates a leak of this many bytes per request on a typical heap.
pub(crate) fn leaking(seed: u64, bytes_per_request: f64) -> SimulatedWorld {
    SimulatedWorld {
        leaks: vec![WorldLeak::per_unit(WorkUnit::Request, bytes_per_request)],
        ..SimulatedWorld::quiet(seed)
    }
}

/// Creates a leak of this many bytes in one request of ten.
pub(crate) fn leaking_now_and_then(seed: u64, bytes: f64) -> SimulatedWorld {
    let leak = WorldLeak { chance: 0.1, ..WorldLeak::per_unit(WorkUnit::Request, bytes) };
    SimulatedWorld { leaks: vec![leak], ..SimulatedWorld::quiet(seed) }
}
