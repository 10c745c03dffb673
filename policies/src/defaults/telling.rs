//! Defaults of what is told to other programs: traces of requests.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{Key, Section, Takes};

section!(
    /// Traces of requests, for a collector of OpenTelemetry.
    Telemetry of "telemetry" {
        /// The collector's address for OTLP over HTTP, such as `http://127.0.0.1:4318`; `/v1/traces` is added. Empty: none, unless the
        /// variables of OpenTelemetry name one.
        pub endpoint: String,
        /// A file of headers that the collector wants, one `Name: value` on a line. Empty: none.
        pub headers: String where Takes::Path,
        /// The share of traces that are recorded, of those that begin here. Requests that bring a trace are recorded if their parent is.
        pub ratio: f64 where Takes::Share,
        /// Requests whose spans wait to be sent, at most; those of more are counted and dropped.
        queue: usize,
        /// Spans sent at a time, at most.
        batch: usize,
        /// How long spans are gathered before they are sent.
        interval: Duration = "duration",
        /// How long one attempt to send may take.
        timeout: Duration = "duration",
        /// Pause before the second attempt; each further one is twice as long.
        retry_pause: Duration = "duration",
        /// The longest pause between two attempts where the collector names none.
        retry_pause_cap: Duration = "duration",
        /// The longest time for which a collector that names one is left alone.
        retry_after_cap: Duration = "duration",
        /// Spans that could not be sent for so long are dropped.
        retry_for: Duration = "duration",
        /// How long the end of the program waits for the last spans to be sent.
        flush: Duration = "duration",
    }
);
