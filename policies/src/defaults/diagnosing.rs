//! Defaults of experiments: `llama-warden diagnose`.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{Key, Section, Takes};
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
        /// Readings of one leg of `diagnose`, at most, each after one request or after one on each slot; more find slower leaks (`--requests`).
        pub requests: u64 where Takes::Whole(1, i64::MAX),
        /// A leg is not ended early before this many readings.
        decide_after: u64,
        /// A leak is measured well enough when the interval of its slope is narrower than this share of it.
        tight: f64,
        /// Growth beside the pools that the server is told to keep.
        allowance_slack: ByteSize,
        /// From the end of a request to its reading.
        settle: Duration = "duration",
        /// A leg takes no longer; from 1 second to 365 days.
        pub leg_limit: Duration = "duration" where Takes::Within("1s", "365d"),
        /// One request takes no longer; from 1 second to 365 days.
        pub request_limit: Duration = "duration" where Takes::Within("1s", "365d"),
        /// A question to the server that is no work (how many tokens a text has) takes no longer.
        question_limit: Duration = "duration",
        /// A request with more bytes than this is not recorded (`record_requests`).
        recording_body: ByteSize,
        /// Bytes of a file of recorded requests.
        recording_bytes: ByteSize,
        /// Requests in a row that may fail before a leg is given up.
        failures: u32,
        /// Within this time after a broken connection the end of a process is known.
        noticed: Duration = "duration",
        /// A leg ends when the machine has less memory available than this share of it.
        least_memory: f64,
        /// Tokens of a short prompt.
        short_prompt: u64,
        /// Tokens of a long prompt.
        long_prompt: u64,
        /// Tokens of a prompt that was never sent before.
        distinct_prompt: u64,
        /// Tokens of an answer, where the workload does not vary them.
        answer: u64,
        /// Tokens of an answer to an image.
        image_answer: u64,
        /// Lengths of answers.
        answers: Vec<u64>,
        /// Width and height of the image that is repeated, in pixels.
        image: (u32, u32),
        /// Widths and heights of images of different sizes.
        images: Vec<(u32, u32)>,
        /// Seconds of an audio clip.
        audio_seconds: u32,
        /// Conversations at a time, at most; fewer where the server has fewer slots.
        conversations: u32,
        /// Tokens that each turn of a conversation adds.
        turn: u64,
        /// Turns after which a conversation begins anew; earlier where the context is full.
        turns: u64,
        /// Prompts of a prefill sweep, as shares of the context of a slot.
        sweep: Vec<f64>,
        /// Tokens of a prompt in a prefill sweep, at most.
        sweep_most: u64,
        /// Which switches stop the growth.
        cure: Cure,
        /// How crashes are repeated, and switches are tried that may stop them.
        crash: Crash,
        /// What the largest prompts take.
        headroom: Headroom,
        /// Which call sites the growth is put down to.
        attribution: Attribution,
        /// What is told of call sites.
        trace: Trace,
        /// A tool around the server.
        wrap: Wrap,
    }
);

section!(
    /// How switches are tried.
    Cure of "diagnose.cure" {
        /// Chance that a switch which leaves `stops_share` of the growth or more is said to stop it.
        false_cure: f64,
        /// Chance that a switch which leaves less than that is said to leave more.
        missed_cure: f64,
        /// What leaves less than this share of the growth stops it.
        stops_share: f64,
        /// What leaves less than this share of it halves it; what leaves more does nothing.
        halves_share: f64,
        /// Processes with a switch before it may be called a cure.
        legs_least: u32,
        /// Processes with a switch after which it stays undecided.
        legs_most: u32,
        /// The interval of a process's growth is widened by this factor.
        widen: f64,
        /// The growth of a process is never known better than to this many bytes per request.
        least_noise: f64,
        /// Processes without switches before the first one with them.
        baseline_least: usize,
        /// Processes with switches in a row before one without them.
        baseline_every: u32,
        /// The latest processes without switches that count.
        baseline_kept: usize,
        /// Processes without switches that may fail in a row.
        baseline_failures: u32,
        /// A switch that costs more than this share of the tokens per second is dear: others are tried, too.
        dear: f64,
        /// Sets of switches that are tried before one is taken away after the other.
        sets_most: u32,
        /// The largest set that is tried on the way up.
        set_size: usize,
        /// Sets of one size that are considered.
        sets_listed: usize,
        /// What a mitigation that needs a value is tried with.
        values: BTreeMap<String, String>,
    }
);

section!(
    /// How crashes are repeated, and switches are tried that may stop them.
    Crash of "diagnose.crash" {
        /// A crash that comes with this chance or a greater one comes always.
        always: f64,
        /// One that comes with this chance or a smaller one does not.
        seldom: f64,
        /// Chance that one which comes with a chance of `seldom` is said to come always.
        false_always: f64,
        /// Chance that one which comes with a chance of `always` is said not to.
        false_seldom: f64,
        /// Chance that a switch without effect is said to stop a crash.
        false_cure: f64,
        /// Survivors with a switch after which it stays undecided.
        runs_most: usize,
        /// Processes without switches that may tell nothing in a row.
        baseline_failures: u32,
        /// Lines of a server that are kept of a crash.
        lines: usize,
    }
);

section!(
    /// When a build may take the place of another.
    Proof of "proof" {
        /// A new build may be slower than the one in use by this share: prefill, decode and the first token.
        pub slower: f64 where Takes::Share,
        /// Which differing answers keep a new build out: `near` those that differ by more than another order of additions makes them, `equal` all, `any` none.
        pub answers: Strictness where Takes::OneOf(&["near", "equal", "any"]),
        /// Answers are near each other up to this many nats.
        distance: f64,
        /// Memory may be more by this share.
        more_memory: f64,
        /// And by this beside it.
        memory_slack: ByteSize,
        /// Chance that a build which keeps to a limit is said not to, for each figure.
        false_worse: f64,
        /// Rounds before anything is said; a round is a process of each build.
        rounds_least: usize,
        /// Rounds after which a figure stays unknown.
        rounds_most: usize,
        /// The ratio of a round is never known better than to this share.
        least_noise: f64,
        /// Requests of a kind whose median is the pace of a process.
        repeats: usize,
        /// Tokens of an answer that is compared or timed.
        answer: u64,
        /// Tokens of the prompt that is timed, at most.
        prompt: u64,
        /// Likeliest tokens that are asked for.
        top: u32,
    }
);

section!(
    /// How the worst case is touched.
    Headroom of "diagnose.headroom" {
        /// Lengths of prompts as shares of the context of a slot.
        lengths: Vec<f64>,
        /// Tokens of the context that a prompt leaves free.
        spare: u64,
        /// Pause between two readings while a prompt is evaluated.
        interval: Duration = "duration",
        /// Bytes that stay free, on the host and on each GPU.
        reserve: ByteSize,
        /// With smaller micro-batches only lengths from this share of the context on are measured again.
        again_from: f64,
        /// The share of the context with which it is started once more, where the whole one does not fit.
        less_context: f64,
        /// Tokens of the shortest prompt.
        least_prompt: u64,
        /// A prompt that is refused is made shorter to this share.
        shorter: f64,
        /// Attempts with one length.
        attempts: u32,
        /// A smaller context is proposed in steps of the whole one divided by this, rounded down to a power of two.
        context_steps: u64,
        /// The least such step, in tokens.
        context_grain: u64,
        /// A buffer of a pool that hoards, as a multiple of what is asked for.
        look_ahead: f64,
    }
);

section!(
    /// What is told of call sites.
    Trace of "diagnose.trace" {
        /// Snapshots of a leg that are kept.
        kept: usize,
        /// Places that are named for each memory.
        named: usize,
        /// Names of a call chain that are shown.
        chain: usize,
        /// Places that grow by less than this share of the memory's growth are left out.
        least_part: f64,
        /// Counts that are above what was measured by more than this share are no noise.
        untouched: f64,
    }
);

section!(
    /// How long is waited for a tool around the server.
    Wrap of "diagnose.wrap" {
        /// From its start until the server is ready, and for one request.
        start: Duration = "duration",
        /// From the end of the server until the tool has written what it knows.
        report: Duration = "duration",
        /// From the end of the tool until what it left behind is killed.
        rest: Duration = "duration",
    }
);

section!(
    /// When growth is put down to call sites and handles.
    Attribution of "diagnose.attribution" {
        /// Share of the growth that counted allocations have to make up to explain it.
        explained: f64,
        /// The least correlation of memory and handles at which one follows the other.
        follows: f64,
        /// The least correlation at which handles that become more are evidence that a suspected memory leaks.
        proves: f64,
        /// Least share of the slope that counted allocations keep in the last third to count as kept by every request.
        goes_on: f64,
        /// Handles more per request from which on they can be followed.
        least_handles: f64,
        /// Readings below which nothing is said.
        fewest: usize,
    }
);
