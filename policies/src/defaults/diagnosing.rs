//! Defaults of experiments: `llama-warden diagnose`.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{AcceptedValues, DefaultsKey, DefaultsSection};
use crate::units::ByteSize;

/// Differences between the answers of two builds that count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Strictness {
    /// Differences larger than another order of floating-point additions causes.
    #[default]
    Near,
    /// All differences.
    Equal,
    /// No difference counts; the report lists them.
    Any,
}

section!(
    /// Experiments with fresh servers.
    Diagnose of "diagnose" {
        /// Most readings of one `diagnose` leg, each after one request or one per slot; more find slower
        /// leaks (`--requests`).
        pub requests: u64 where AcceptedValues::Whole(1, i64::MAX),
        /// Least readings of a leg before it may end early.
        decide_after: u64,
        /// Width of the slope's interval, as a share of the slope, at which a leak is measured well enough.
        tight: f64,
        /// Allowed growth besides the declared pools.
        allowance_slack: ByteSize,
        /// Time from the end of a request to its reading.
        settle: Duration = "duration",
        /// Time limit of a leg, from 1 second to 365 days.
        pub leg_limit: Duration = "duration" where AcceptedValues::Within("1s", "365d"),
        /// Time limit of one request, from 1 second to 365 days.
        pub request_limit: Duration = "duration" where AcceptedValues::Within("1s", "365d"),
        /// Time limit of a query that is not work, such as the number of tokens of a text.
        question_limit: Duration = "duration",
        /// Consecutive failed requests after which a leg is abandoned.
        failures: u32,
        /// Time after a broken connection within which the end of a process is known.
        noticed: Duration = "duration",
        /// Available share of the machine's memory below which a leg ends.
        least_memory: f64,
        /// Tokens of a short prompt.
        short_prompt: u64,
        /// Tokens of a long prompt.
        long_prompt: u64,
        /// Tokens of a distinct prompt.
        distinct_prompt: u64,
        /// Tokens of an answer, unless the workload varies them.
        answer: u64,
        /// Tokens of an answer to an image.
        image_answer: u64,
        /// Answer lengths in tokens, for workloads that vary them.
        answers: Vec<u64>,
        /// Width and height of the repeated image, in pixels.
        image: (u32, u32),
        /// Widths and heights of the images of different sizes.
        images: Vec<(u32, u32)>,
        /// Length of an audio clip in seconds.
        audio_seconds: u32,
        /// Most concurrent conversations; fewer if the server has fewer slots.
        conversations: u32,
        /// Tokens that each turn of a conversation adds.
        turn: u64,
        /// Turns after which a conversation restarts; earlier if the context is full.
        turns: u64,
        /// Prompts of a prefill sweep, as shares of a slot's context.
        sweep: Vec<f64>,
        /// Most tokens of a prompt in a prefill sweep.
        sweep_most: u64,
        /// Search for switches that stop growth.
        cure: Cure,
        /// Repetition of crashes, and search for switches that stop them.
        crash: Crash,
        /// Attribution of growth to call sites.
        attribution: Attribution,
        /// Report on call sites.
        trace: Trace,
    }
);

section!(
    /// Search for switches that stop growth.
    Cure of "diagnose.cure" {
        /// Probability of reporting a cure for a switch that leaves `stops_share` or more of the growth.
        false_cure: f64,
        /// Probability of missing a switch that leaves less than `stops_share` of the growth.
        missed_cure: f64,
        /// Remaining share of the growth below which a switch stops it.
        stops_share: f64,
        /// Remaining share of the growth below which a switch halves it; above, the switch has no effect.
        halves_share: f64,
        /// Least processes with a switch before it is reported as a cure.
        legs_least: u32,
        /// Processes with a switch after which it stays undecided.
        legs_most: u32,
        /// Factor by which the interval of a process's growth is widened.
        widen: f64,
        /// Least uncertainty of a process's growth, in bytes per request.
        least_noise: f64,
        /// Baseline processes before the first one with switches.
        baseline_least: usize,
        /// Consecutive processes with switches before the next baseline process.
        baseline_every: u32,
        /// Number of latest baseline processes that count.
        baseline_kept: usize,
        /// Consecutive baseline processes that may fail.
        baseline_failures: u32,
        /// Loss of tokens per second, as a share, above which a switch is costly and others are tried, too.
        dear: f64,
        /// Number of sets of switches tried before switches are removed one by one.
        sets_most: u32,
        /// Most switches in a set while sets grow.
        set_size: usize,
        /// Sets of one size that are considered.
        sets_listed: usize,
        /// Trial values of mitigations that need a value.
        values: BTreeMap<String, String>,
    }
);

section!(
    /// Repetition of crashes, and search for switches that stop them.
    Crash of "diagnose.crash" {
        /// Death probability from which a crash counts as recurring always.
        always: f64,
        /// Death probability up to which a crash counts as not recurring.
        seldom: f64,
        /// Probability that a crash with death probability `seldom` is reported to recur always.
        false_always: f64,
        /// Probability that a crash with death probability `always` is reported not to recur.
        false_seldom: f64,
        /// Probability that a switch without effect is reported to stop a crash.
        false_cure: f64,
        /// Number of surviving processes with a switch after which the switch stays undecided.
        runs_most: usize,
        /// Consecutive baseline processes that may bring no result.
        baseline_failures: u32,
        /// Output lines kept of a crash.
        lines: usize,
    }
);

section!(
    /// Replacement of one build by another.
    Proof of "proof" {
        /// Share by which a new build may be slower than the one in use: prefill, decode and first token.
        pub slower: f64 where AcceptedValues::Share,
        /// Differing answers that reject a new build: `near`, larger than another order of additions
        /// explains; `equal`, any difference; `any`, none.
        pub answers: Strictness where AcceptedValues::OneOf(&["near", "equal", "any"]),
        /// Distance in nats up to which answers are near each other.
        distance: f64,
        /// Share by which memory may increase, plus `memory_slack`.
        more_memory: f64,
        /// Bytes by which memory may increase beyond `more_memory`.
        memory_slack: ByteSize,
        /// Probability per figure that a build within the limit is reported to exceed it.
        false_worse: f64,
        /// Rounds before the first ruling; a round is one process of each build.
        rounds_least: usize,
        /// Rounds after which a figure stays unknown.
        rounds_most: usize,
        /// Least uncertainty of a round's ratio, as a share.
        least_noise: f64,
        /// Requests of one kind whose median is the speed of a process.
        repeats: usize,
        /// Tokens of a compared or timed answer.
        answer: u64,
        /// Most tokens of the timed prompt.
        prompt: u64,
        /// Number of likeliest tokens requested.
        top: u32,
    }
);

section!(
    /// Report on call sites.
    Trace of "diagnose.trace" {
        /// Snapshots kept per leg.
        kept: usize,
        /// Places listed per memory.
        named: usize,
        /// Names shown of a call chain.
        chain: usize,
        /// Share of a memory's growth below which a place is left out.
        least_part: f64,
        /// Excess of counts over the measurement, as a share, above which it is no noise.
        untouched: f64,
    }
);

section!(
    /// Attribution of growth to call sites and handles.
    Attribution of "diagnose.attribution" {
        /// Share of the growth that counted allocations must make up to explain it.
        explained: f64,
        /// Least correlation at which memory follows handles.
        follows: f64,
        /// Least correlation at which growing handles confirm a suspected leak.
        proves: f64,
        /// Share of the slope that counted allocations must keep in the last third to count as retained.
        goes_on: f64,
        /// Least growth of handles per request.
        least_handles: f64,
        /// Least number of readings.
        fewest: usize,
    }
);
