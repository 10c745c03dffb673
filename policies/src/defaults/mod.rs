//! The default numbers of the product that a configuration or a test sets, or that several places read, from the
//! compiled-in `defaults.toml`. The file carries the sentence that justifies each number; this module gives it types.
//!
//! | module | sections |
//! |---|---|
//! | `serving` | between a client and a backend |
//! | `backends` | a backend's life |
//! | `diagnosing` | experiments |
//! | `updating` | renewing builds |
//! | `telling` | what is told to other programs |
//! | `replacing` | when a backend is replaced |
//! | `showing` | what is kept to be shown |
//! | `trying` | another build beside the one that serves |
//! | `duration` | how durations are written |
//! | `key` | what is written about a key |

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// Defines a section: each key with its meaning and its type. `pub`: a configuration may set it; otherwise it is compiled in.
/// `where`: which values it takes, if its default does not say so.
macro_rules! section {
    ($(#[$meta:meta])* $name:ident of $section:literal {
        $($(#[doc = $doc:literal])* $vis:vis $field:ident : $type:ty $(= $with:literal)? $(where $takes:expr)?),* $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name { $($(#[doc = $doc])* $(#[serde(deserialize_with = $with)])? pub $field: $type),* }

        impl Section for $name {
            const NAME: &'static str = $section;
            const KEYS: &'static [Key] = &[$(Key {
                name: stringify!($field),
                meaning: concat!($($doc),*),
                is_public: !stringify!($vis).is_empty(),
                takes: takes!($($takes)?),
            }),*];
        }
    };
}

/// What a key of a section takes.
macro_rules! takes {
    () => {
        Takes::Usual
    };
    ($takes:expr) => {
        $takes
    };
}

mod backends;
mod diagnosing;
mod duration;
mod key;
mod replacing;
mod serving;
mod showing;
mod telling;
mod trying;
mod updating;

pub use backends::{Build, Child, Lifecycle, Loading, Sensors, StartSearch};
pub use diagnosing::{Attribution, Crash, Cure, Diagnose, Headroom, Proof, Strictness, Trace, Wrap};
pub use duration::{DurationError, parse_duration};
pub use key::{Key, Section, Takes};
pub use replacing::{Admission, Growth, Health, Levels, Moment, Recycle};
pub use serving::{Log, Model, Quarantine, Queue, Remote, Server, Upstream, Warmth};
pub use showing::Series;
pub use telling::{Probe, Telemetry};
pub use trying::Canary;
pub use updating::Update;

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
    Defaults of "" {
        /// Where we listen and what a client may cost.
        server: Server,
        /// The queue in front of each model.
        queue: Queue,
        /// Requests that kill their server.
        quarantine: Quarantine,
        /// How a model runs.
        model: Model,
        /// What goes along when a process is replaced.
        warmth: Warmth,
        /// Our own log.
        log: Log,
        /// Start, probe, drain, stop.
        lifecycle: Lifecycle,
        /// Servers that die while they load.
        start_search: StartSearch,
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
        /// What is kept of readings.
        series: Series,
        /// The child process.
        child: Child,
        /// Which models are loaded.
        loading: Loading,
        /// Models that somebody else's endpoint serves.
        remote: Remote,
        /// Another build that is tried beside the one that serves.
        canary: Canary,
        /// Building llama-server.
        build: Build,
        /// Experiments with fresh servers.
        diagnose: Diagnose,
        /// When one build may take the place of another.
        proof: Proof,
        /// How llama-server is renewed.
        update: Update,
        /// Traces of requests.
        telemetry: Telemetry,
        /// What probes and balancers ask.
        probe: Probe,
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
        assert!(parsed.growth.kept >= parsed.growth.window, "floors that are not kept cannot be tested");
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
