//! The worlds that detectors are measured in: those without a leak, and those with one.
//!
//! Each seed makes another world of the kind: its sizes are drawn too, not only its noise.

use std::time::Duration;

use warden_policies::growth::WorkUnit;
use warden_policies::world::{MemoryBackground, SimulatedWorld, SplitMix, WorldLeak, WorldLoad, WorldNoise};

const KIB: f64 = 1024.0;
const MIB: f64 = 1024.0 * KIB;

/// Slow drift that comes back: 15 MiB over a thousand requests.
const WANDER: WorldNoise = WorldNoise { sigma: 15.0 * MIB, phi: 0.999, spikes: 0.05, spike: 80.0 * MIB };

/// A world, and what its server is told to keep on the host.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Case {
    /// The world.
    pub(crate) world: SimulatedWorld,
    /// Bytes of declared pools.
    pub(crate) declared: u64,
}

/// A kind of world without a leak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Harmless {
    /// A heap that moves, and peaks.
    Flat,
    /// Slow drift that comes back.
    Wander,
    /// Fragmentation that slows down.
    Ratchet,
    /// A buffer for the largest prompt so far.
    RunningMax,
    /// Twelve jumps of 32 to 256 MiB.
    Plateaus,
    /// Up and down by 40 MiB within a day.
    Diurnal,
    /// A declared cache that fills, and then stays full.
    Cache,
    /// A busy server: readings by a timer only, each with requests in flight.
    Busy,
}

impl Harmless {
    /// All kinds.
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

    /// The name in tables.
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

    /// One world of this kind, for runs of some ten thousand requests.
    pub(crate) fn case(self, seed: u64) -> Case {
        let mut draw = SplitMix::new(seed ^ 0x5EED);
        let mut world = SimulatedWorld::quiet(seed);
        let mut declared = 0;
        match self {
            Self::Flat => {}
            Self::Wander => world.noise = WANDER,
            Self::Ratchet => {
                let half = draw.between(20.0, 200.0);
                // It adds as much again whenever the number of requests grows by a factor of e.
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

/// A leak of so many bytes per request, in the movement of a real heap.
pub(crate) fn leaking(seed: u64, bytes_per_request: f64) -> SimulatedWorld {
    SimulatedWorld {
        leaks: vec![WorldLeak::per_unit(WorkUnit::Request, bytes_per_request)],
        ..SimulatedWorld::quiet(seed)
    }
}

/// One request in ten leaks so many bytes.
pub(crate) fn leaking_now_and_then(seed: u64, bytes: f64) -> SimulatedWorld {
    let leak = WorldLeak { chance: 0.1, ..WorldLeak::per_unit(WorkUnit::Request, bytes) };
    SimulatedWorld { leaks: vec![leak], ..SimulatedWorld::quiet(seed) }
}
