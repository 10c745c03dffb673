//! Leaks of known size, added to the memory movement of servers without a leak.

use warden_policies::growth::WorkUnit;
use warden_policies::world::SplitMix;
use warden_policies::{BackendSample, GpuIndex, MemoryKind};

use crate::recorded::{Extra, MIB, real};

pub(crate) const HOST: MemoryKind = MemoryKind::Host;
pub(crate) const VRAM: MemoryKind = MemoryKind::Vram(GpuIndex(0));

/// Recorded server whose memory movement a run uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Base {
    /// Text and images on three slots, hardly ever idle.
    Mixed,
    /// Like `Mixed`, over six minutes.
    MixedLong,
    /// Like `Mixed`, with all readings shuffled.
    Shuffled,
    /// Like `MixedLong`, with all readings shuffled.
    ShuffledLong,
    /// Like `Mixed`, with five times as many slots, read by a timer.
    Busy,
    /// Text of varying length on one slot.
    Text,
    /// Growing conversations on three slots.
    Conversations,
    /// One image in each request.
    Images,
    /// Text and images on three slots of a newer build, whose heap hardly moves.
    StillMixed,
}

/// Additional bytes at each reading.
pub(crate) type Course = Box<dyn FnMut(&BackendSample) -> Extra>;

pub(crate) struct Leaking {
    pub(crate) name: &'static str,
    pub(crate) base: Base,
    pub(crate) series: MemoryKind,
    /// Units of work that cause the leak, each with its share of the growth; empty if no counted unit does.
    pub(crate) pays: &'static [(WorkUnit, f64)],
    pub(crate) requests: u64,
    pub(crate) declared: u64,
    pub(crate) course: fn(u64) -> Course,
}

impl Leaking {
    const fn new(
        name: &'static str,
        base: Base,
        pays: &'static [(WorkUnit, f64)],
        course: fn(u64) -> Course,
    ) -> Self {
        Self { name, base, series: HOST, pays, requests: 2000, declared: 0, course }
    }

    const fn requests(self, requests: u64) -> Self {
        Self { requests, ..self }
    }

    const fn declared(self, declared: u64) -> Self {
        Self { declared, ..self }
    }

    const fn on_vram(self) -> Self {
        Self { series: VRAM, ..self }
    }
}

fn host(mut bytes: impl FnMut(&BackendSample) -> f64 + 'static) -> Course {
    Box::new(move |now| Extra { host: bytes(now), ..Extra::default() })
}

fn vram(mut bytes: impl FnMut(&BackendSample) -> f64 + 'static) -> Course {
    Box::new(move |now| Extra { vram: bytes(now), ..Extra::default() })
}

/// Approximate tokens per request in the mixed recordings, so that leaks of all units are about as large.
const PROMPT_TOKENS: f64 = 200.0;
const OUTPUT_TOKENS: f64 = 64.0;

const REQUEST: &[(WorkUnit, f64)] = &[(WorkUnit::Request, 1.0)];
const PROMPT: &[(WorkUnit, f64)] = &[(WorkUnit::PromptToken, 1.0)];
const OUTPUT: &[(WorkUnit, f64)] = &[(WorkUnit::OutputToken, 1.0)];
const IMAGE: &[(WorkUnit, f64)] = &[(WorkUnit::Image, 1.0)];
/// 28 of 100 requests have an image.
const BOTH: &[(WorkUnit, f64)] = &[(WorkUnit::Request, 0.52), (WorkUnit::Image, 0.48)];

/// Returns the seed's factor on the size of a leak, between 0.5 and 2.
fn size(seed: u64) -> f64 {
    2.0_f64.powf(SplitMix::new(seed ^ 0x51_2E).between(-1.0, 1.0))
}

fn requests(now: &BackendSample) -> f64 {
    real(now.work.requests)
}

fn images(now: &BackendSample) -> f64 {
    real(now.work.images)
}

fn by_request(seed: u64) -> Course {
    host(move |now| 2.0 * MIB * size(seed) * requests(now))
}

fn by_prompt_token(seed: u64) -> Course {
    host(move |now| 2.0 * MIB * size(seed) * real(now.work.prompt_tokens) / PROMPT_TOKENS)
}

fn by_output_token(seed: u64) -> Course {
    host(move |now| 2.0 * MIB * size(seed) * real(now.work.output_tokens) / OUTPUT_TOKENS)
}

fn by_image(seed: u64) -> Course {
    host(move |now| 6.0 * MIB * size(seed) * images(now))
}

/// A leak per request, while a cache of 2 GiB fills.
fn beside_cache(seed: u64, measured: bool) -> Course {
    Box::new(move |now| Extra {
        host: 2.0 * MIB * size(seed) * requests(now),
        cache: (4.0 * MIB * requests(now)).min(2048.0 * MIB),
        measured,
        vram: 0.0,
    })
}

/// A leak per request next to images whose freed buffers leave holes of this size. Leaked blocks fill the
/// holes, so memory rises only when an image finds its hole taken.
fn under_images(each: f64, hole: f64) -> Course {
    let (mut height, mut known) = (0.0_f64, 0);
    host(move |now| {
        let leaked = each * requests(now);
        let taken = if now.work.images > known { leaked + hole } else { leaked };
        known = now.work.images;
        height = height.max(taken);
        height
    })
}

pub(crate) fn all() -> Vec<Leaking> {
    use Base::{Busy, Conversations, Images, Mixed, MixedLong, Shuffled, ShuffledLong, StillMixed, Text};
    vec![
        Leaking::new("each request, mixed", Mixed, REQUEST, by_request),
        Leaking::new("each request, mixed long", MixedLong, REQUEST, by_request),
        Leaking::new("each prompt token, mixed", Mixed, PROMPT, by_prompt_token),
        Leaking::new("each prompt token, mixed long", MixedLong, PROMPT, by_prompt_token),
        Leaking::new("each output token, mixed", Mixed, OUTPUT, by_output_token),
        Leaking::new("each output token, mixed long", MixedLong, OUTPUT, by_output_token),
        Leaking::new("each image, mixed", Mixed, IMAGE, by_image),
        Leaking::new("each image, mixed long", MixedLong, IMAGE, by_image),
        Leaking::new("each request, shuffled", Shuffled, REQUEST, by_request),
        Leaking::new("each prompt token, shuffled", Shuffled, PROMPT, by_prompt_token),
        Leaking::new("each output token, shuffled", Shuffled, OUTPUT, by_output_token),
        Leaking::new("each image, shuffled", Shuffled, IMAGE, by_image),
        Leaking::new("each request, shuffled long", ShuffledLong, REQUEST, by_request),
        Leaking::new("each prompt token, shuffled long", ShuffledLong, PROMPT, by_prompt_token),
        Leaking::new("each output token, shuffled long", ShuffledLong, OUTPUT, by_output_token),
        Leaking::new("each image, shuffled long", ShuffledLong, IMAGE, by_image),
        Leaking::new("images and requests, shuffled", Shuffled, BOTH, |seed| {
            host(move |now| MIB * size(seed) * (1.5 * requests(now) + 5.0 * images(now)))
        }),
        Leaking::new("images and requests, mixed", MixedLong, BOTH, |seed| {
            host(move |now| MIB * size(seed) * (1.5 * requests(now) + 5.0 * images(now)))
        }),
        // The leak slows down but continues, like CUDA graphs captured for recurring shapes.
        Leaking::new("each image, ever slower, shuffled", Shuffled, IMAGE, |seed| {
            host(move |now| 4.4 * MIB * size(seed).sqrt() * slowing(images(now)))
        }),
        Leaking::new("each image, ever slower, short", Mixed, IMAGE, |seed| {
            host(move |now| 4.4 * MIB * size(seed).sqrt() * slowing(images(now)))
        })
        .requests(1500),
        Leaking::new("each image, ever slower, mixed", MixedLong, IMAGE, |seed| {
            host(move |now| 4.4 * MIB * size(seed).sqrt() * slowing(images(now)))
        }),
        Leaking::new("each image, still heap", StillMixed, IMAGE, |seed| {
            host(move |now| 4.0 * MIB * size(seed) * images(now))
        }),
        Leaking::new("each request, still heap", StillMixed, REQUEST, |seed| {
            host(move |now| MIB * size(seed) * requests(now))
        }),
        Leaking::new("each request in holes of images, still heap", StillMixed, REQUEST, |seed| {
            under_images(MIB * size(seed), 20.0 * MIB)
        }),
        Leaking::new("each request in holes of images, mixed", Mixed, REQUEST, |seed| {
            under_images(2.0 * MIB * size(seed), 40.0 * MIB)
        }),
        Leaking::new("each request, text", Text, REQUEST, |seed| {
            host(move |now| MIB * size(seed) * requests(now))
        }),
        Leaking::new("each prompt token, text", Text, PROMPT, |seed| {
            host(move |now| MIB * size(seed) * real(now.work.prompt_tokens) / 600.0)
        }),
        Leaking::new("each request, conversations", Conversations, REQUEST, |seed| {
            host(move |now| MIB * size(seed) * requests(now))
        }),
        Leaking::new("each image, images only", Images, IMAGE, |seed| {
            host(move |now| 4.0 * MIB * size(seed) * images(now))
        }),
        Leaking::new("one request in ten, text", Text, REQUEST, |seed| {
            let mut random = SplitMix::new(seed);
            let (mut leaked, mut known) = (0.0, 0);
            host(move |now| {
                for _ in known..now.work.requests {
                    leaked += if random.chance(0.1) { 10.0 * MIB * size(seed) } else { 0.0 };
                }
                known = now.work.requests;
                leaked
            })
        })
        .requests(3000),
        Leaking::new("64 MiB at a time, text", Text, REQUEST, |seed| {
            host(move |now| (MIB * size(seed) * requests(now) / (64.0 * MIB)).floor() * 64.0 * MIB)
        })
        .requests(4000),
        Leaking::new("0.1 MiB a request, text", Text, REQUEST, |seed| {
            host(move |now| 0.1 * MIB * size(seed) * requests(now))
        })
        .requests(6000),
        Leaking::new("from request 2,000 on, text", Text, REQUEST, |seed| {
            host(move |now| MIB * size(seed) * (requests(now) - 2000.0).max(0.0))
        })
        .requests(8000),
        Leaking::new("from request 2,000 on, mixed", MixedLong, REQUEST, |seed| {
            host(move |now| 2.0 * MIB * size(seed) * (requests(now) - 2000.0).max(0.0))
        })
        .requests(8000),
        Leaking::new("beside a declared cache, mixed", MixedLong, REQUEST, |seed| beside_cache(seed, false))
            .declared(2 << 30),
        // The log or a memory report shows the size of the cache.
        Leaking::new("beside a measured cache, mixed", MixedLong, REQUEST, |seed| beside_cache(seed, true)),
        Leaking::new("each request, many busy slots", Busy, REQUEST, by_request).requests(4000),
        Leaking::new("each image, many busy slots", Busy, IMAGE, by_image).requests(4000),
        Leaking::new("VRAM, each image, mixed", MixedLong, IMAGE, |seed| {
            vram(move |now| 0.95 * MIB * size(seed) * images(now))
        })
        .on_vram()
        .requests(3000),
        Leaking::new("VRAM, each request, text", Text, REQUEST, |seed| {
            vram(move |now| 0.5 * MIB * size(seed) * requests(now))
        })
        .on_vram(),
        Leaking::new("VRAM, ever slower, mixed", MixedLong, IMAGE, |seed| {
            vram(move |now| 0.95 * MIB * size(seed).sqrt() * slowing(images(now)))
        })
        .on_vram()
        .requests(3000),
    ]
}

/// Returns the growth after `count` units: each adds 1 at first, and 0.5 after some hundred units.
fn slowing(count: f64) -> f64 {
    0.5 * count + 75.0 * (1.0 - (-count / 150.0).exp())
}
