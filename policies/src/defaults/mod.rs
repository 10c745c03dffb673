//! Every default number of the product, read from the compiled-in `defaults.toml`.
//!
//! The file carries the sentence that justifies each number; this module only gives it types. Crates take their
//! numbers from here, so that none hides in code.
//!
//! | module | sections |
//! |---|---|
//! | `serving` | between a client and a backend |
//! | `backends` | a backend's life |
//! | `diagnosing` | experiments |
//! | `replacing` | when a backend is replaced |
//! | `duration` | how durations are written |

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

macro_rules! section {
    ($(#[$meta:meta])* $name:ident { $($(#[doc = $doc:literal])* $field:ident : $type:ty $(= $with:literal)?),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name { $($(#[doc = $doc])* $(#[serde(deserialize_with = $with)])? pub $field: $type),* }

        impl $name {
            /// Each key and what it means, for the JSON Schema and the documentation.
            pub const KEYS: &'static [(&'static str, &'static str)] = &[$((stringify!($field), concat!($($doc),*))),*];
        }
    };
}

mod backends;
mod diagnosing;
mod duration;
mod replacing;
mod serving;

pub use backends::{Build, Child, Lifecycle, Sensors};
pub use diagnosing::{Attribution, Crash, Cure, Diagnose, DiagnoseKeys, Headroom, Trace, Wrap};
pub use duration::{DurationError, parse_duration};
pub use replacing::{Admission, Growth, Health, Levels, Moment, Recycle};
pub use serving::{Log, Model, Quarantine, Queue, Server, Upstream};

/// The text of `defaults.toml`, with its reasons, for `llama-warden config show --defaults`.
pub const TEXT: &str = include_str!("../defaults.toml");

static DEFAULTS: LazyLock<Defaults> = LazyLock::new(|| match toml::from_str(TEXT) {
    Ok(defaults) => defaults,
    // Compiled in and covered by a test, so this cannot happen in a build that passed its tests.
    Err(error) => unreachable!("defaults.toml: {error}"),
});

/// The defaults.
pub fn defaults() -> &'static Defaults {
    &DEFAULTS
}

section!(
    /// All sections.
    Defaults {
        /// Where we listen and what a client may cost.
        server: Server,
        /// The queue in front of each model.
        queue: Queue,
        /// Requests that kill their server.
        quarantine: Quarantine,
        /// How a model runs.
        model: Model,
        /// Our own log.
        log: Log,
        /// Start, probe, drain, stop.
        lifecycle: Lifecycle,
        /// When a backend is replaced.
        recycle: Recycle,
        /// At which level of memory a backend is replaced or ended.
        levels: Levels,
        /// The cheapest moment of a replacement.
        moment: Moment,
        /// Signs of illness other than memory.
        health: Health,
        /// Prompts that would not fit into memory.
        admission: Admission,
        /// How growth of memory is judged.
        growth: Growth,
        /// The connection to a backend.
        upstream: Upstream,
        /// Reading numbers.
        sensors: Sensors,
        /// The child process.
        child: Child,
        /// Building llama-server.
        build: Build,
        /// Experiments with fresh servers.
        diagnose: Diagnose,
    }
);

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_compiled_in_defaults_parse() {
        let parsed: Defaults = toml::from_str(TEXT).unwrap();
        assert_eq!(parsed.server.port, 8080);
        assert!(parsed.lifecycle.backoff_first > Duration::ZERO);
        assert!(
            parsed.upstream.idle_timeout < Duration::from_secs(5),
            "llama-server closes idle connections after 5 s"
        );
    }

    #[test]
    fn every_default_carries_its_reason() {
        let mut comment = false;
        for line in TEXT.lines().map(str::trim) {
            if line.is_empty() || line.starts_with('[') {
                comment = false;
            } else if line.starts_with('#') {
                comment = true;
            } else {
                assert!(comment, "no reason above `{line}`");
                comment = false;
            }
        }
    }
}
