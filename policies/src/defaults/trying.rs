//! Defaults of canaries: another llama-server build tried next to the serving one.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{AcceptedValues, DefaultsKey, DefaultsSection};

section!(
    /// Canaries: another build tried next to the serving one.
    #[derive(Copy)]
    Canary of "canary" {
        /// Default share of conversations for the canary.
        share: f64 where AcceptedValues::Share,
        /// Largest share that can be requested.
        share_most: f64 where AcceptedValues::Share,
        /// Requests after which the trial ends.
        requests: u64,
        /// Time after which the trial ends.
        time: Duration = "duration",
        /// Share by which the canary may be slower.
        slower: f64,
        /// Largest probability that an equally good build is called worse.
        wrong: f64 where AcceptedValues::Share,
        /// Excess failures, as a share of requests, ruled out before a build is called as good.
        failing: f64 where AcceptedValues::Share,
        /// Most requests of the serving build that one canary request is compared with.
        beside: usize,
        /// Latencies kept for the displayed medians.
        shown: usize,
        /// Answered requests before the canary's memory can show that it does not leak.
        memory_requests: u64,
        /// Least tokens of an answer for a speed.
        pace_tokens: u64,
        /// Wait for the canary's first byte, as a multiple of the serving build's longest ...
        patience: f64,
        /// ... and at least this.
        patience_least: Duration = "duration",
    }
);
