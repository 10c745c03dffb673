//! Defaults of what is told to other programs: traces of requests, and what probes and balancers ask.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{Key, Section, Takes};
use crate::units::ByteSize;

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

section!(
    /// What probes, collectors and balancers ask of one instance of several.
    Probe of "probe" {
        /// `host:port` for `/livez`, `/readyz` and `/metrics`, which others may reach: nothing can be done there, and no key is asked for. Empty: none.
        pub address: String,
        /// `host:port` at which `agent-check` of `HAProxy` gets its line. Empty: none.
        pub agent: String,
        /// After SIGTERM, requests are still taken for this long while `/readyz` already says 503: the time in which whoever sends them notices.
        pub drain_delay: Duration = "duration",
        /// Whether `/metrics` has the gauges for an endpoint picker under the names of vLLM, too.
        pub vllm: bool,
        /// How often it is looked whether requests can be taken.
        look: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Metrics that are younger than this are not made anew.
        metrics_age: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Share of one core that looking and making metrics may take.
        share: f64 where Takes::Share,
        /// The program counts as stuck when nothing has been looked at for so long.
        stuck: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Connections at a time; for a further one the oldest is closed.
        connections: usize,
        /// Bytes in a request head.
        head_bytes: ByteSize,
        /// Time to send a head.
        head_timeout: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Longest life of a connection.
        connection_age: Duration = "duration" where Takes::AtLeast("1ms"),
        /// How long fresh metrics are waited for.
        patience: Duration = "duration",
        /// An answer to a probe that takes us this long counts as late.
        late: Duration = "duration",
        /// A limit of memory that will be reached within this time takes weight from an instance.
        horizon: Duration = "duration",
    }
);
