//! Defaults of canaries: another build of llama-server that is tried beside the one that serves.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{Key, Section, Takes};

section!(
    /// Another build that is tried beside the one that serves.
    #[derive(Copy)]
    Canary of "canary" {
        /// The share of conversations that it gets, if nobody says another one.
        share: f64 where Takes::Share,
        /// The largest share that can be asked for.
        share_most: f64 where Takes::Share,
        /// After so many requests to it nothing more is expected.
        requests: u64,
        /// Nor after this time.
        time: Duration = "duration",
        /// A build that is slower by no more than this share is not worse.
        slower: f64,
        /// The chance that a build that is as good is called worse, at most.
        wrong: f64 where Takes::Share,
        /// Failures more by this share of requests are ruled out before a build is called as good.
        failing: f64 where Takes::Share,
        /// Requests of the build that serves, at most, that one of the other is compared with.
        beside: usize,
        /// Latencies kept for the medians that are shown.
        shown: usize,
        /// Requests that it must have answered before its memory says that it does not leak.
        memory_requests: u64,
        /// Tokens that an answer must have to tell a speed.
        pace_tokens: u64,
        /// It is waited for so many times as long as the other build ever took until its answer begins ...
        patience: f64,
        /// ... and at least for this time.
        patience_least: Duration = "duration",
    }
);
