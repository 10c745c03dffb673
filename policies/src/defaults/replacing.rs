//! Defaults of when a backend is replaced, and of what is looked at to decide that.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{Key, Section, Takes};
use crate::admission::AdmissionMode;
use crate::recycle::GrowthMode;
use crate::units::ByteSize;

section!(
    /// When a backend is replaced.
    #[derive(Copy)]
    Recycle of "recycle" {
        /// Share by which request and age limits vary, 0 to 1.
        pub jitter: f64 where Takes::Share,
        /// Quiet is: nothing in flight for this long.
        pub quiet_for: Duration = "duration",
        /// A recycle that waits for quiet waits no longer.
        pub quiet_within: Duration = "duration",
        /// Least time between recycles of one model.
        pub min_interval: Duration = "duration",
        /// Least time between recycles at the hard budget; never more than `min_interval`, and none while the machine itself is
        /// short of memory.
        pub min_interval_hard: Duration = "duration",
        /// Least time between recycles of one model, as a multiple of the time that it takes to load.
        load_factor: f64,
        /// Futile recycles in a row that switch the policy off.
        pub max_futile: u32,
        /// A budget that is passed within so many requests is passed by work, not by growth.
        budget_requests: u64,
        /// The same for a budget that is passed within this multiple of the time that a load takes.
        budget_loads: f64,
        /// What is done about memory that grows without bound: `off`, `observe` or `recycle`.
        pub growth: GrowthMode where Takes::OneOf(&["off", "observe", "recycle"]),
        /// Recycles because of growth ...
        growth_recycles: u32,
        /// ... within this time end recycling because of growth.
        growth_window: Duration = "duration",
        /// Growth that reaches a budget within this time calls for a recycle when quiet.
        pub growth_quiet: Duration = "duration",
        /// Growth that reaches a hard limit within this time calls for a drain now.
        pub growth_drain: Duration = "duration",
        /// Ask a process to give back what it hoards before it is replaced for its memory. Only a build with the fix
        /// `reclaim-heap` or `reclaim-cuda` can be asked. A change takes a new process.
        pub reclaim: bool,
        /// What is as far again sooner than this after it gave memory back is replaced.
        reclaim_again: Duration = "duration",
        /// Share of the way from a fresh process to the limit that has to be free after it.
        reclaim_room: f64 where Takes::Share,
        /// A process may look for so long for a good moment ...
        reclaim_wait: Duration = "duration",
        /// ... and at a hard budget for so long.
        reclaim_wait_hard: Duration = "duration",
        /// What has not answered, and was not read again, within this time is replaced ...
        reclaim_limit: Duration = "duration",
        /// ... and at a hard budget within this.
        reclaim_limit_hard: Duration = "duration",
        /// What is done about a prompt for which there is not enough memory: `off`, `warn` or `enforce`.
        pub admission: AdmissionMode where Takes::OneOf(&["off", "warn", "enforce"]),
        /// For `auto`: memory that must be available, as a multiple of what the backend holds.
        overlap_headroom: f64,
        /// Smallest memory that `overlap_headroom` is applied to.
        overlap_floor: ByteSize,
    }
);

section!(
    /// At which level of memory a backend is replaced or ended.
    #[derive(Copy)]
    Levels of "levels" {
        /// For `host.soft = "auto"`: the settled size and what the server is told to keep, times this.
        host_soft: f64,
        /// For `host.soft = "auto"`: at least this much above the settled size.
        host_room: ByteSize,
        /// For `host.soft = "auto"`: at most this share of the machine's memory.
        host_soft_most: f64,
        /// For `host.hard = "auto"`: the soft budget, times this.
        host_hard: f64,
        /// For `host.hard = "auto"`: at most this share of the machine's memory.
        host_hard_most: f64,
        /// For `vram.soft = "auto"`: this share of what the device can give to the process.
        vram_soft: f64,
        /// For `vram.hard = "auto"`: this share of what the device can give to the process.
        vram_hard: f64,
        /// For `vram.soft = "auto"` where the settled size leaves little: this share of what is left above it.
        vram_soft_left: f64,
        /// For `vram.hard = "auto"` where the settled size leaves little: this share of what is left above it.
        vram_hard_left: f64,
        /// A backend over the hard budget times this is ended without draining ...
        kill_over: f64,
        /// ... once draining has been wanted for this long.
        kill_after: Duration = "duration",
        /// Memory is short below this many times of what is the end of it: only then a budget cuts requests.
        short: f64,
        /// A backend is ended when the machine has less memory available than this share of it ...
        kill_host_share: f64,
        /// ... and less than this.
        kill_host: ByteSize,
        /// A backend is ended when its GPU has less memory free than this and it still grows.
        kill_vram: ByteSize,
        /// After a backend was ended because a memory was almost gone, the others are spared for this long.
        kill_pause: Duration = "duration",
        /// Memory that does not come back after a process has exited is a driver's leak from this size on ...
        unreturned: ByteSize,
        /// ... after this many exits in a row.
        unreturned_exits: u32,
    }
);

section!(
    /// The cheapest moment of a replacement.
    #[derive(Copy)]
    Moment of "moment" {
        /// Lulls in the memory: older ones are forgotten.
        lulls: usize,
        /// A backend that has never been watched for long is expected to have a lull within this time.
        first_lull: Duration = "duration",
    }
);

section!(
    /// Signs of illness other than memory.
    Health of "health" {
        /// Waiting requests without any progress for this long are a wedge where nothing is known of its speed, or where it answers questions and computes nothing ...
        pub wedged_after: Duration = "duration" where Takes::AtLeast("1ms"),
        /// ... and for this long where an answer comes in one piece and the server cannot be asked how far it is.
        wedged_unseen: Duration = "duration" where Takes::AtLeast("1ms"),
        /// ... but nothing shorter than this.
        token_least: Duration = "duration",
        /// Where the server cannot be asked how far it is, so many tokens may give no event ...
        silent_tokens: u64,
        /// ... and nothing shorter than this is a wedge.
        silent_least: Duration = "duration",
        /// ... but nothing shorter than this.
        prefill_least: Duration = "duration",
        /// Tokens of prompt that are evaluated at a time, between which the server answers questions.
        prefill_step: u64,
        /// A wedge is found so much later for each image or recording that waits; for one at a time where the server can be asked.
        media_patience: Duration = "duration",
        /// Pages a second that are read from a disk for the process: time in which it reads more is not held against it.
        paging: u64,
        /// A process with less than this share of the layers on GPUs that one like it had is degraded ...
        offload_layers: f64 where Takes::Share,
        /// ... and so is one with less than this share of its VRAM.
        offload_vram: f64 where Takes::Share,
        /// First pause before a degraded process is started again; it doubles ...
        offload_retry: Duration = "duration" where Takes::AtLeast("1ms"),
        /// ... up to this.
        offload_retry_most: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Answers in a row that say that computing failed, with no success in between.
        compute_errors: u32 where Takes::Whole(1, 1024),
    }
);

section!(
    /// Prompts that would not fit into memory.
    Admission of "admission" {
        /// Prompts larger than all before them that the estimate needs.
        evidence: usize,
        /// Quantile of the observed bytes per token that is reckoned with, 0 to 1.
        quantile: f64,
        /// Kept free beyond what a prompt is expected to need.
        reserve: ByteSize,
        /// Bytes of text per token where the backend was not asked.
        bytes_per_token: f64,
        /// Shortest `Retry-After`.
        retry_least: Duration = "duration",
        /// Longest `Retry-After`.
        retry_most: Duration = "duration",
    }
);

section!(
    /// How growth of memory is judged.
    Growth of "growth" {
        /// Half-life of the average rate of requests.
        rate_half_life: Duration = "duration",
        /// Requests before the first judgement.
        warmup_requests: u64,
        /// Share of the least rise below which a start needs no settling.
        settle_share: f64,
        /// Short floors after the start whose median is the baseline.
        baseline_floors: usize where Takes::Whole(1, 1024),
        /// Lengths of stretches: 1, 2, 4, … steps of work.
        scales: u32 where Takes::Whole(1, 16),
        /// Floors kept for each length.
        kept: usize where Takes::Whole(8, 1024),
        /// Floors in a test.
        window: usize where Takes::Whole(8, 1024),
        /// Floors from one test to the next.
        test_every: u64 where Takes::Whole(1, 1024),
        /// Tests of one length that make a verdict.
        tests: usize where Takes::Whole(1, 1024),
        /// The last slope of these tests, as a share of the first, has to be at least this.
        persist_ratio: f64 where Takes::Share,
        /// ... unless they lie on a line: deviations from it are at most this share of the rise, and ...
        straight_scatter: f64,
        /// ... its later half has at least this share of the slope of its earlier half.
        straight_ratio: f64,
        /// A line that rose by this multiple of the least rise needs only two tests.
        swift_effect: f64,
        /// Growth that is no line but rose by this multiple, and does not slow down, needs only two tests too.
        steep_effect: f64,
        /// Such a rise settles only if its later half has less than this share of the slope of its earlier half.
        steep_ratio: f64,
        /// A line that is so much straighter than it has to be needs as much less of a rise.
        straight_share: f64,
        /// A line that is up to so many times less straight has to rise by the square of that.
        broad_scatter: f64,
        /// ... the rise has to be at least so many times the least that counts, ...
        paid_effect: f64,
        /// ... with at least this share of the slope, along that work, in the later half: then it leaks.
        paid_pace: f64,
        /// A rise of so many times the least that counts, nearly along a line, needs one test only.
        far_effect: f64,
        /// So many longer scales are asked whether it settles, and the last of them whether it fell before.
        past_scales: usize,
        /// A fall before by this share of the rise makes it a movement, not a leak.
        fall_share: f64,
        /// The same over four floors at a time, where only what wanders goes far.
        drift_far_z: f64,
        /// Deviations from no trend that a test needs.
        trend_z: f64,
        /// Deviations to each side of the slope that its interval has.
        bound_z: f64,
        /// Least rise within a test that counts on the host.
        host_effect: ByteSize,
        /// The same as a share of the baseline; the larger one counts.
        host_effect_share: f64,
        /// Least rise within a test that counts on a GPU.
        vram_effect: ByteSize,
        /// Memory of a GPU is taken in pieces of this size.
        vram_grain: ByteSize,
        /// Least slope of the end of a test's stretch, as a share of the whole stretch's.
        brake_ratio: f64 where Takes::Share,
        /// Largest single steps of a stretch that are taken off ...
        jumps: usize,
        /// Least number of large steps without a fall that are suspected.
        stairs: u32,
        /// Bytes beyond what a server is told to keep, or beyond its measured pools, that count as kept.
        allowance_slack: ByteSize,
        /// Readings without the pools that were measured before, until they count as no longer measured.
        unmeasured: u32,
        /// Share of the least rise that makes a new height.
        height_share: f64,
        /// Least floors for blame.
        blame_floors: usize,
        /// By how much the blamed unit has to explain the growth better than every other, in units of the chi-squared
        /// statistic.
        blame_margin: f64,
        /// Least variation of the rate of requests at which an hour can be blamed, as a share of the rate.
        blame_uneven: f64,
        /// Least share of the growth that the blamed unit pays for.
        blame_share: f64 where Takes::Share,
    }
);
