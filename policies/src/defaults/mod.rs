//! Typed defaults from the compiled-in `defaults.toml`: numbers that a configuration or a test sets, or
//! that several places read. The file justifies each number; this module gives it a type and a meaning.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// Defines a section: each key with its meaning and type. `pub`: a configuration may set it; otherwise it
/// is compiled in. `where`: accepted values, if the default does not determine them.
macro_rules! section {
    ($(#[$meta:meta])* $name:ident of $section:literal {
        $($(#[doc = $doc:literal])* $vis:vis $field:ident : $type:ty $(= $with:literal)? $(where $takes:expr)?),* $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name { $($(#[doc = $doc])* $(#[serde(deserialize_with = $with)])? pub $field: $type),* }

        impl DefaultsSection for $name {
            const NAME: &'static str = $section;
            const KEYS: &'static [DefaultsKey] = &[$(DefaultsKey {
                name: stringify!($field),
                meaning: concat!($($doc),*),
                is_public: !stringify!($vis).is_empty(),
                takes: takes!($($takes)?),
            }),*];
        }
    };
}

macro_rules! takes {
    () => {
        AcceptedValues::Usual
    };
    ($takes:expr) => {
        $takes
    };
}

mod backends;
mod diagnosing;
mod duration;
mod key;
mod operating;
mod replacing;
mod serving;

pub use backends::{Build, Child, Lifecycle, Loading, Sensors, StartSearch};
pub use diagnosing::{Attribution, Crash, Cure, Diagnose, Proof, Strictness, Trace};
pub use duration::{DurationError, parse_duration};
pub use key::{AcceptedValues, DefaultsKey, DefaultsSection};
pub use operating::{Canary, Probe, Series, Telemetry, Update};
pub use replacing::{Admission, Growth, Health, Levels, Moment, Recycle};
pub use serving::{Log, Model, Quarantine, Queue, Remote, Server, Upstream, Warmth};

/// Text of `defaults.toml` with its reasons, for `llama-warden config show --defaults`.
pub const DEFAULTS_TEXT: &str = include_str!("../defaults.toml");

static DEFAULTS: LazyLock<Defaults> = LazyLock::new(|| match toml::from_str(DEFAULTS_TEXT) {
    Ok(defaults) => defaults,
    // Compiled in and covered by a test, so a tested build never gets here.
    Err(error) => unreachable!("defaults.toml: {error}"),
});

/// Returns the compiled-in defaults.
pub fn defaults() -> &'static Defaults {
    &DEFAULTS
}

section!(
    /// All sections.
    Defaults of "" {
        /// Public listener and limits on clients.
        server: Server,
        /// Queue in front of each model.
        queue: Queue,
        /// Requests that kill their server.
        quarantine: Quarantine,
        /// Settings of a model's processes.
        model: Model,
        /// Warm state carried over to a new process.
        warmth: Warmth,
        /// Log of llama-warden.
        log: Log,
        /// Start, probe, drain, stop.
        lifecycle: Lifecycle,
        /// Servers that die while they load.
        start_search: StartSearch,
        /// Replacement of backends.
        recycle: Recycle,
        /// Memory levels at which a backend is replaced or ended.
        levels: Levels,
        /// Best moment of a replacement.
        moment: Moment,
        /// Symptoms of illness other than memory.
        health: Health,
        /// Admission of prompts that may not fit into memory.
        admission: Admission,
        /// Detection of memory growth.
        growth: Growth,
        /// Connections to a backend.
        upstream: Upstream,
        /// Readings of memory and counters.
        sensors: Sensors,
        /// Kept history of readings.
        series: Series,
        /// Child processes.
        child: Child,
        /// Loading and unloading of models.
        loading: Loading,
        /// Models served by remote endpoints.
        remote: Remote,
        /// Canaries: another build tried next to the serving one.
        canary: Canary,
        /// Builds of llama-server.
        build: Build,
        /// Experiments with fresh servers.
        diagnose: Diagnose,
        /// Replacement of one build by another.
        proof: Proof,
        /// Updates of llama-server.
        update: Update,
        /// Traces of requests.
        telemetry: Telemetry,
        /// Probes and load balancers.
        probe: Probe,
    }
);

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_compiled_in_defaults_parse() {
        let parsed: Defaults = toml::from_str(DEFAULTS_TEXT).unwrap();
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
        for line in DEFAULTS_TEXT.lines().map(str::trim) {
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
