//! Defaults of renewing builds: `llama-warden update`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{Key, Section, Takes};

section!(
    /// How llama-server is renewed.
    Update of "update" {
        /// How often `serve` runs `llama-warden update` by itself; `0s`: never.
        pub every: Duration = "duration",
        /// What counts as new in a repository: tags that fit this pattern, such as `b*`, or a branch.
        pub track: String,
        /// All processes of a running instance are of the new build within this time after they were told, or it is taken back.
        within: Duration = "duration",
        /// A new build is watched for this time after it was brought in; if one of its processes dies or does not start, it is taken back.
        watch: Duration = "duration",
        /// A canary of a new build is waited for so long; what is not known by then keeps nobody out.
        canary: Duration = "duration",
        /// Pause between two looks at an instance.
        look: Duration = "duration",
        /// A build that is proved with the sample model may be slower by this share.
        sample_slower: f64,
        /// Readings of a workload for a build that is proved with the sample model, at most.
        sample_requests: u64,
        /// Commits that are listed.
        listed: usize,
    }
);
