//! Harmless growth, added to the memory movement of servers without a leak.

use std::ops::Range;

use warden_policies::BackendSample;
use warden_policies::world::SplitMix;

use crate::leaks::{Base, Course};
use crate::recorded::{Extra, MIB, real};

pub(crate) struct Healthy {
    pub(crate) name: &'static str,
    pub(crate) base: Base,
    pub(crate) requests: u64,
    pub(crate) declared: u64,
    pub(crate) course: fn(u64) -> Course,
}

impl Healthy {
    const fn new(name: &'static str, base: Base, course: fn(u64) -> Course) -> Self {
        Self { name, base, requests: 4000, declared: 0, course }
    }

    const fn declared(self, declared: u64) -> Self {
        Self { declared, ..self }
    }
}

fn host(mut bytes: impl FnMut(&BackendSample) -> f64 + 'static) -> Course {
    Box::new(move |now| Extra { host: bytes(now), ..Extra::default() })
}

fn requests(now: &BackendSample) -> f64 {
    real(now.work.requests)
}

fn nothing(_: u64) -> Course {
    Box::new(|_| Extra::default())
}

/// Draws a value from a range for each seed.
fn drawn(seed: u64, low: f64, high: f64) -> f64 {
    SplitMix::new(seed ^ 0x0DD5).between(low, high)
}

pub(crate) fn all() -> Vec<Healthy> {
    use Base::{Busy, Conversations, Images, Mixed, MixedLong, Text};
    vec![
        Healthy::new("nothing, mixed", Mixed, nothing),
        Healthy::new("nothing, mixed long", MixedLong, nothing),
        Healthy::new("nothing, many busy slots", Busy, nothing),
        Healthy::new("nothing, text", Text, nothing),
        Healthy::new("nothing, conversations", Conversations, nothing),
        Healthy::new("nothing, images only", Images, nothing),
        Healthy::new("a declared cache fills, mixed", MixedLong, |seed| {
            host(move |now| (drawn(seed, 1.0, 8.0) * MIB * requests(now)).min(2048.0 * MIB))
        })
        .declared(2 << 30),
        Healthy::new("a declared cache fills, many busy slots", Busy, |seed| {
            host(move |now| (drawn(seed, 1.0, 8.0) * MIB * requests(now)).min(2048.0 * MIB))
        })
        .declared(2 << 30),
        Healthy::new("a small cache fills, mixed", Mixed, |seed| {
            host(move |now| (3.0 * MIB * real(now.work.images)).min(drawn(seed, 50.0, 170.0) * MIB))
        }),
        Healthy::new("settles by 100 to 400 MiB, mixed", MixedLong, |seed| {
            settling(seed, 100.0..400.0, 50.0..600.0)
        }),
        Healthy::new("settles by 100 to 400 MiB, text", Text, |seed| {
            settling(seed, 100.0..400.0, 50.0..600.0)
        }),
        Healthy::new("settles by 400 to 1,200 MiB, mixed", MixedLong, |seed| {
            settling(seed, 400.0..1200.0, 50.0..600.0)
        }),
        Healthy::new("settles by 400 to 1,200 MiB, text", Text, |seed| {
            settling(seed, 400.0..1200.0, 50.0..600.0)
        }),
        Healthy::new("settles by 400 to 1,200 MiB, conversations", Conversations, |seed| {
            settling(seed, 400.0..1200.0, 50.0..600.0)
        }),
        Healthy::new("settles slowly by 400 to 1,200 MiB, text", Text, |seed| {
            settling(seed, 400.0..1200.0, 600.0..1500.0)
        }),
        Healthy::new("settles with images by 400 to 1,200 MiB, mixed", MixedLong, |seed| {
            let mut random = SplitMix::new(seed ^ 0x5E77);
            let (all, half) = (random.between(400.0, 1200.0) * MIB, random.between(15.0, 150.0));
            host(move |now| all * (1.0 - 0.5_f64.powf(real(now.work.images) / half)))
        }),
        Healthy::new("ever slower by 400 to 1,200 MiB, text", Text, slower),
        Healthy::new("ever slower by 400 to 1,200 MiB, mixed", MixedLong, slower),
        Healthy::new("plateaus, mixed", MixedLong, plateaus),
        Healthy::new("plateaus, text", Text, plateaus),
        Healthy::new("a buffer for the largest prompt, text", Text, |seed| {
            let mut random = SplitMix::new(seed);
            let (mut largest, mut known) = (0.0_f64, 0);
            host(move |now| {
                for _ in known..now.work.requests {
                    largest = largest.max(random.unit().powi(6));
                }
                known = now.work.requests;
                largest * drawn(seed, 100.0, 1000.0) * MIB
            })
        }),
        Healthy::new("swings with the images, mixed", Mixed, |seed| {
            host(move |now| {
                let phase = real(now.work.images) / drawn(seed, 30.0, 90.0);
                40.0 * MIB * (phase + real(seed)).sin()
            })
        }),
        Healthy::new("wanders, text", Text, |seed| {
            let mut random = SplitMix::new(seed);
            let (mut at, mut known) = (0.0, 0);
            host(move |now| {
                for _ in known..now.work.requests {
                    at = 0.999 * at + 0.67 * MIB * random.normal();
                }
                known = now.work.requests;
                at
            })
        }),
        Healthy::new("VRAM, pools for the largest batch, mixed", MixedLong, |seed| {
            let mut random = SplitMix::new(seed);
            let (mut largest, mut known) = (0.0_f64, 0);
            Box::new(move |now| {
                for _ in known..now.work.requests {
                    largest = largest.max(random.unit().powi(4));
                }
                known = now.work.requests;
                Extra { vram: largest * drawn(seed, 50.0, 400.0) * MIB, ..Extra::default() }
            })
        }),
        Healthy::new("VRAM, graphs that are swept, text", Text, |seed| {
            Box::new(move |now| {
                let saw = (requests(now) / drawn(seed, 20.0, 120.0)).fract();
                Extra { vram: saw * drawn(seed, 8.0, 22.0) * MIB, ..Extra::default() }
            })
        }),
    ]
}

/// A settling heap: after each `half` requests, half of the remaining growth has happened.
fn settling(seed: u64, size: Range<f64>, halves: Range<f64>) -> Course {
    let mut random = SplitMix::new(seed ^ 0x5E77);
    let (all, half) = (random.between(size.start, size.end) * MIB, random.between(halves.start, halves.end));
    host(move |now| all * (1.0 - 0.5_f64.powf(requests(now) / half)))
}

/// A heap that grows equally whenever the requests grow by a factor of e, until it is full.
fn slower(seed: u64) -> Course {
    let mut random = SplitMix::new(seed ^ 0x10_6A);
    let (all, half) = (random.between(400.0, 1200.0) * MIB, random.between(20.0, 200.0));
    host(move |now| all * (1.0 + requests(now) / half).ln() / (1.0 + 4000.0 / half).ln())
}

/// Twelve permanent jumps of 32 to 256 MiB within the first 4,000 requests.
fn plateaus(seed: u64) -> Course {
    let mut random = SplitMix::new(seed ^ 0x91A7);
    let jumps: Vec<(f64, f64)> =
        (0..12).map(|_| (random.between(0.0, 4000.0), random.between(32.0, 256.0) * MIB)).collect();
    host(move |now| jumps.iter().filter(|(at, _)| *at <= requests(now)).map(|(_, high)| *high).sum())
}
