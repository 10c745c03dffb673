//! Defaults of experiments: `llama-warden diagnose`.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use crate::units::ByteSize;

section!(
    /// Experiments with fresh servers.
    Diagnose {
        /// Readings of one leg, each after one request, or after one on each slot.
        requests: u64,
        /// A leg is not ended early before this many readings.
        decide_after: u64,
        /// A leak is measured well enough when the interval of its slope is narrower than this share of it.
        tight: f64,
        /// Host memory is still where the last third of a leg rises by less than this for each request.
        still_host: ByteSize,
        /// The same for VRAM.
        still_vram: ByteSize,
        /// It has been still since it came as near to its last level as this share of the least rise that counts.
        near_share: f64,
        /// Growth beside the pools that the server is told to keep.
        allowance_slack: ByteSize,
        /// From the end of a request to its reading.
        settle: Duration = "duration",
        /// A leg takes no longer.
        leg_limit: Duration = "duration",
        /// One request takes no longer.
        request_limit: Duration = "duration",
        /// A request with more bytes than this is not recorded (`record_requests`).
        recording_body: ByteSize,
        /// Bytes of a file of recorded requests.
        recording_bytes: ByteSize,
        /// Requests in a row that may fail before a leg is given up.
        failures: u32,
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
        /// What the largest prompts take.
        headroom: Headroom,
    }
);

section!(
    /// How switches are tried.
    Cure {
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
        /// Processes of the same kind differ by this share of their growth.
        leg_scatter: f64,
        /// The growth of a process is never known better than to this many bytes per request.
        least_noise: f64,
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
    /// How the worst case is touched.
    Headroom {
        /// Lengths of prompts as shares of the context of a slot.
        lengths: Vec<f64>,
        /// Tokens of the context that a prompt leaves free.
        spare: u64,
        /// Pause between two readings while a prompt is evaluated.
        interval: Duration = "duration",
        /// Bytes that stay free, on the host and on each GPU.
        reserve: ByteSize,
    }
);
