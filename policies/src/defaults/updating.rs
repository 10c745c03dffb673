//! Defaults of build updates: `llama-warden update`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{AcceptedValues, DefaultsKey, DefaultsSection};

section!(
    /// Updates of llama-server.
    Update of "update" {
        /// Interval at which `serve` runs `llama-warden update`; `0s`: never.
        pub every: Duration = "duration",
        /// Revisions that count as new: tags that match a pattern, such as `b*`, or a branch.
        pub track: String,
        /// Time within which all processes of a running instance must use the new build, or it is rolled
        /// back.
        within: Duration = "duration",
        /// Time for which a new build is watched; if one of its processes dies or does not start, it is
        /// rolled back.
        watch: Duration = "duration",
        /// Longest wait for a canary's result; an unknown result does not block the build.
        canary: Duration = "duration",
        /// Pause between checks of an instance.
        look: Duration = "duration",
        /// Share by which a build proved with the sample model may be slower.
        sample_slower: f64,
        /// Most readings per workload for a build proved with the sample model.
        sample_requests: u64,
        /// Number of commits listed.
        listed: usize,
    }
);
