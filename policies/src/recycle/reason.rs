//! Actions on a backend, and reasons of replacements.

use serde::{Deserialize, Serialize};

use crate::named::named_enum;

named_enum! {
    /// Action on a backend, in rising urgency.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum RecycleAction {
        /// No action.
        Observe = "observe",
        /// Replace the backend at the next quiet moment, or when the longest wait is over.
        RecycleWhenQuiet = "recycle_when_quiet",
        /// Drain and replace the backend now.
        DrainNow = "drain_now",
        /// Kill the backend without draining.
        KillNow = "kill_now",
    }
}

impl RecycleAction {
    /// Returns a phrase for people.
    pub const fn phrase(self) -> &'static str {
        match self {
            Self::Observe => "nothing",
            Self::RecycleWhenQuiet => "replace it when quiet",
            Self::DrainNow => "drain and replace it now",
            Self::KillNow => "end it now, without draining",
        }
    }
}

macro_rules! reasons {
    ($($name:ident = $text:literal, $phrase:literal,)*) => {
        /// Reason of a replacement. The name is the `reason` label of metrics and the ledger.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Reason { $(#[doc = $phrase] $name,)* }

        impl Reason {
            /// All reasons.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// Returns the name used in the ledger, events and metrics.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// Returns a phrase for people.
            pub const fn phrase(self) -> &'static str {
                match self { $(Self::$name => $phrase,)* }
            }
        }
    };
}

reasons! {
    HostSoft = "host_soft", "host memory passed the soft budget",
    HostHard = "host_hard", "host memory passed the hard budget",
    VramSoft = "vram_soft", "VRAM passed the soft budget",
    VramHard = "vram_hard", "VRAM passed the hard budget",
    Growth = "growth", "memory leaks and would reach a limit before long",
    MaxRequests = "max_requests", "it answered its maximum number of requests",
    MaxAge = "max_age", "it reached its maximum age",
    Wedged = "wedged", "work is in flight and nothing moves",
    ComputeErrors = "compute_errors", "it answers errors only",
    Repeating = "repeating", "its answers are endless repetitions",
    EmptyAnswers = "empty_answers", "its answers have no text",
    NullAnswers = "null_answers", "its answers have null or all-equal numbers",
    Altered = "altered", "its answer to a fixed prompt has changed",
    SlowDecode = "slow_decode", "it has become slower than it was",
    DeviceFault = "device_fault", "its GPU reported a fault",
    MemoryExhausted = "memory_exhausted", "the machine or a GPU has almost no memory left",
    Admission = "admission", "a prompt waits that fits only into a fresh process",
    SharedHost = "shared_host", "all backends together passed their budget of host memory",
    SharedVram = "shared_vram", "all backends together passed their budget on a GPU",
    Room = "room", "another model needs memory",
    Operator = "operator", "an operator requested it",
    Configuration = "configuration", "its configuration changed",
    Unresponsive = "unresponsive", "it stopped answering probes",
    Crashed = "crashed", "it logged a crash, and neither ended nor answered",
    Degraded = "degraded", "it started with much less on GPUs than another process like it",
}

impl Reason {
    /// Returns true if a policy decided the replacement, so that [`crate::cooldown`] applies.
    pub const fn is_policy(self) -> bool {
        !matches!(
            self,
            Self::Room
                | Self::Operator
                | Self::Configuration
                | Self::Unresponsive
                | Self::Crashed
                | Self::Degraded
        )
    }

    /// Returns true if the process answers wrongly: it serves no better than one that does not serve.
    pub const fn is_answers(self) -> bool {
        matches!(self, Self::Repeating | Self::EmptyAnswers | Self::NullAnswers | Self::Altered)
    }

    /// Returns true for memory reasons: such a replacement must reduce memory to count as helpful.
    pub const fn is_memory(self) -> bool {
        matches!(
            self,
            Self::HostSoft
                | Self::HostHard
                | Self::VramSoft
                | Self::VramHard
                | Self::Growth
                | Self::MemoryExhausted
                | Self::Admission
                | Self::SharedHost
                | Self::SharedVram
        )
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}
