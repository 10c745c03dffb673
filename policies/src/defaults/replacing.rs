//! Defaults of backend replacement, and of the measurements behind it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{AcceptedValues, DefaultsKey, DefaultsSection};
use crate::modes::{AdmissionMode, AnswersMode, GrowthMode};
use crate::units::ByteSize;

section!(
    /// Replacement of backends.
    #[derive(Copy)]
    Recycle of "recycle" {
        /// Share by which request and age limits vary, 0 to 1.
        pub jitter: f64 where AcceptedValues::Share,
        /// Time with nothing in flight that counts as quiet.
        pub quiet_for: Duration = "duration",
        /// Longest time that a recycle waits for quiet; then the process is drained anyway.
        pub quiet_within: Duration = "duration",
        /// Least time between recycles of one model.
        pub min_interval: Duration = "duration",
        /// Least time between recycles at the hard budget; never more than `min_interval`, and zero while
        /// the machine itself is short of memory.
        pub min_interval_hard: Duration = "duration",
        /// Least time between recycles of one model, as a multiple of its load time.
        load_factor: f64,
        /// Consecutive futile recycles after which the policy is switched off.
        pub max_futile: u32,
        /// A process that exceeds a budget within its first requests, up to this many, needs it for its work.
        budget_requests: u64,
        /// A process that exceeds a budget below this age, in multiples of its load time, needs it for its work.
        budget_loads: f64,
        /// Action on memory that grows without bound: `off`, `observe` or `recycle`.
        pub growth: GrowthMode where AcceptedValues::OneOf(&["off", "observe", "recycle"]),
        /// Action on a process whose answers have become faulty (endless repetitions, no text, null numbers):
        /// `off`, `observe` or `replace`.
        pub answers: AnswersMode where AcceptedValues::OneOf(&["off", "observe", "replace"]),
        /// Number of recycles within `growth_window` after which growth causes no more.
        growth_recycles: u32,
        /// Time window of `growth_recycles`.
        growth_window: Duration = "duration",
        /// Time to a budget within which growth calls for a recycle when quiet.
        pub growth_quiet: Duration = "duration",
        /// Time to a hard limit within which growth calls for an immediate drain.
        pub growth_drain: Duration = "duration",
        /// Asks a process to give back hoarded memory before it is replaced for its memory. Needs a build
        /// with the fix `reclaim-heap` or `reclaim-cuda`. A change takes a new process.
        pub reclaim: bool,
        /// A process that reaches its limit again within this time after a reclaim is replaced.
        reclaim_again: Duration = "duration",
        /// Share of the range from a fresh process to the limit that must be free after a reclaim.
        reclaim_room: f64 where AcceptedValues::Share,
        /// Time for a process to find a good moment for a reclaim.
        reclaim_wait: Duration = "duration",
        /// Time for a process to find a good moment for a reclaim at a hard budget.
        reclaim_wait_hard: Duration = "duration",
        /// Time for an answer and a new reading, after which the process is replaced.
        reclaim_limit: Duration = "duration",
        /// Time for an answer and a new reading at a hard budget.
        reclaim_limit_hard: Duration = "duration",
        /// Action on a prompt for which memory is insufficient: `off`, `warn` or `enforce`.
        pub admission: AdmissionMode where AcceptedValues::OneOf(&["off", "warn", "enforce"]),
        /// For `auto`: memory that must be available, as a multiple of the backend's.
        overlap_headroom: f64,
        /// Smallest memory that `overlap_headroom` is applied to.
        overlap_floor: ByteSize,
    }
);

section!(
    /// Memory levels at which a backend is replaced or ended.
    #[derive(Copy)]
    Levels of "levels" {
        /// For `host.soft = "auto"`: multiple of the settled size plus declared caches.
        host_soft: f64,
        /// For `host.soft = "auto"`: least distance above the settled size.
        host_room: ByteSize,
        /// For `host.soft = "auto"`: largest share of the machine's memory.
        host_soft_most: f64,
        /// For `host.hard = "auto"`: multiple of the soft budget.
        host_hard: f64,
        /// For `host.hard = "auto"`: largest share of the machine's memory.
        host_hard_most: f64,
        /// For `vram.soft = "auto"`: share of the device memory available to the process.
        vram_soft: f64,
        /// For `vram.hard = "auto"`: share of the device memory available to the process.
        vram_hard: f64,
        /// For `vram.soft = "auto"` if the settled size leaves little: share of the rest above it.
        vram_soft_left: f64,
        /// For `vram.hard = "auto"` if the settled size leaves little: share of the rest above it.
        vram_hard_left: f64,
        /// Multiple of the hard budget above which a backend is ended without draining, after `kill_after`.
        kill_over: f64,
        /// Time for which a drain must have been due before `kill_over` applies.
        kill_after: Duration = "duration",
        /// Multiple of the critical level below which memory is short; only then a budget cuts requests.
        short: f64,
        /// Available share of the machine's memory below which a backend is ended, if also below `kill_host`.
        kill_host_share: f64,
        /// Available bytes of the machine below which a backend is ended, if also below `kill_host_share`.
        kill_host: ByteSize,
        /// Free GPU memory below which a backend that still grows is ended.
        kill_vram: ByteSize,
        /// Time for which other backends are spared after one was ended for exhausted memory.
        kill_pause: Duration = "duration",
        /// Bytes missing after `unreturned_exits` exits from which they count as a driver leak.
        unreturned: ByteSize,
        /// Consecutive exits with missing memory that show a driver leak.
        unreturned_exits: u32,
    }
);

section!(
    /// Best moment of a replacement.
    #[derive(Copy)]
    Moment of "moment" {
        /// Number of remembered lulls in traffic.
        lulls: usize,
        /// Time within which a backend without a long history is expected to have a lull.
        first_lull: Duration = "duration",
    }
);

section!(
    /// Symptoms of illness other than memory.
    Health of "health" {
        /// Time without progress on waiting requests that is a wedge, if the speed is unknown, or if the
        /// server answers queries but computes nothing.
        pub wedged_after: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Limit like `wedged_after` for an answer in one piece whose progress the server does not report.
        wedged_unseen: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Least silence between tokens that is a wedge.
        token_least: Duration = "duration",
        /// Tokens without an event that are normal, if the server does not report its progress.
        silent_tokens: u64,
        /// Least silence allowed for `silent_tokens`.
        silent_least: Duration = "duration",
        /// Least silence during prefill that is a wedge.
        prefill_least: Duration = "duration",
        /// Prompt tokens per batch; between batches the server answers queries.
        prefill_step: u64,
        /// Extra time before a wedge per waiting image or recording; for one at a time if the server
        /// reports its progress.
        media_patience: Duration = "duration",
        /// Pages per second read from disk for the process; time with more is not counted.
        paging: u64,
        /// Share of a similar process's GPU layers below which a process is degraded.
        offload_layers: f64 where AcceptedValues::Share,
        /// Share of a similar process's VRAM below which a process is degraded.
        offload_vram: f64 where AcceptedValues::Share,
        /// First pause before a degraded process is restarted; doubles up to `offload_retry_most`.
        offload_retry: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Longest pause before a degraded process is restarted.
        offload_retry_most: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Consecutive answers reporting failed computation, without a success in between.
        compute_errors: u32 where AcceptedValues::Whole(1, 1024),
    }
);

section!(
    /// Admission of prompts that may not fit into memory.
    Admission of "admission" {
        /// Number of record-size prompts that the estimate needs.
        evidence: usize,
        /// Quantile of the observed bytes per token that is used, 0 to 1.
        quantile: f64,
        /// Memory kept free beyond the estimated need of a prompt.
        reserve: ByteSize,
        /// Bytes of text per token, if the backend was not asked.
        bytes_per_token: f64,
        /// Shortest `Retry-After`.
        retry_least: Duration = "duration",
        /// Longest `Retry-After`.
        retry_most: Duration = "duration",
    }
);

section!(
    /// Detection of memory growth.
    Growth of "growth" {
        /// Half-life of the average request rate.
        rate_half_life: Duration = "duration",
        /// Requests before the first judgement.
        warmup_requests: u64,
        /// Share of the least rise below which a start needs no settling.
        settle_share: f64,
        /// Short floors after the start whose median is the baseline.
        baseline_floors: usize where AcceptedValues::Whole(1, 1024),
        /// Number of stretch lengths: 1, 2, 4, … steps of work.
        scales: u32 where AcceptedValues::Whole(1, 16),
        /// Floors kept per length.
        kept: usize where AcceptedValues::Whole(8, 1024),
        /// Floors per test.
        window: usize where AcceptedValues::Whole(8, 1024),
        /// Floors between tests.
        test_every: u64 where AcceptedValues::Whole(1, 1024),
        /// Tests of one length needed for a verdict.
        tests: usize where AcceptedValues::Whole(1, 1024),
        /// Least ratio of the last to the first slope of these tests, unless the floors form a line.
        persist_ratio: f64 where AcceptedValues::Share,
        /// Largest scatter about a line, as a share of the rise.
        straight_scatter: f64,
        /// Least slope of a line's later half, as a share of the earlier half's slope.
        straight_ratio: f64,
        /// Multiple of the least rise from which a line needs only two tests.
        swift_effect: f64,
        /// Multiple of the least rise from which growth that is no line and does not slow down needs only
        /// two tests.
        steep_effect: f64,
        /// A rise above `steep_effect` settles only if its later half has less than this share of the slope.
        steep_ratio: f64,
        /// Least factor on the required rise for a line straighter than required.
        straight_share: f64,
        /// Factor of scatter up to which a less straight line counts, with a rise larger by the square.
        broad_scatter: f64,
        /// Multiple of the least rise from which growth along a blamed unit may be a leak.
        paid_effect: f64,
        /// Least slope of the later half of such growth along its unit, as a share of the earlier half's.
        paid_pace: f64,
        /// Multiple of the least rise, nearly along a line, from which one test suffices.
        far_effect: f64,
        /// Number of longer scales checked for settling; the last one is checked for an earlier fall.
        past_scales: usize,
        /// Earlier fall, as a share of the rise, that makes it a fluctuation and no leak.
        fall_share: f64,
        /// Required rise in deviations of a random walk, measured over four floors at a time.
        drift_far_z: f64,
        /// Deviations from no trend that a test needs.
        trend_z: f64,
        /// Deviations to each side in the slope's interval.
        bound_z: f64,
        /// Least rise on the host within a test.
        host_effect: ByteSize,
        /// Least rise on the host as a share of the baseline; the larger of this and `host_effect` counts.
        host_effect_share: f64,
        /// Least rise on a GPU within a test.
        vram_effect: ByteSize,
        /// Allocation granularity of GPU memory.
        vram_grain: ByteSize,
        /// Least slope of a stretch's end, as a share of the whole slope.
        brake_ratio: f64 where AcceptedValues::Share,
        /// Number of largest single steps that are subtracted from a stretch.
        jumps: usize,
        /// Least number of large steps without a fall that are suspected.
        stairs: u32,
        /// Bytes beyond the declared caches or measured pools that count as kept.
        allowance_slack: ByteSize,
        /// Consecutive readings without pools after which they count as no longer measured.
        unmeasured: u32,
        /// Share of the least rise that makes a new height.
        height_share: f64,
        /// Least floors for blame.
        blame_floors: usize,
        /// Lead of the blamed unit over every other in explaining the growth, in units of the chi-squared
        /// statistic.
        blame_margin: f64,
        /// Least variation of the request rate, as a share, at which an hour can be blamed.
        blame_uneven: f64,
        /// Least share of the growth that the blamed unit pays for.
        blame_share: f64 where AcceptedValues::Share,
    }
);
