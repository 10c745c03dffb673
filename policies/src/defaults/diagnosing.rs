//! Defaults of experiments: `llama-warden diagnose`.

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
        /// A memory whose last third rises by less than this share of the least rise that counts is still.
        still_share: f64,
        /// Growth beside the pools that the server is told to keep.
        allowance_slack: ByteSize,
        /// From the end of a request to its reading.
        settle: Duration = "duration",
        /// A leg takes no longer.
        leg_limit: Duration = "duration",
        /// One request takes no longer.
        request_limit: Duration = "duration",
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
    }
);
