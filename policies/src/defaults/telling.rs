//! Defaults of exports to other programs: traces of requests, probes and load balancers.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{AcceptedValues, DefaultsKey, DefaultsSection};
use crate::units::ByteSize;

section!(
    /// Traces of requests for an OpenTelemetry collector.
    Telemetry of "telemetry" {
        /// Address of the OTLP/HTTP collector, such as `http://127.0.0.1:4318`; `/v1/traces` is added.
        /// Empty: none, unless the variables of OpenTelemetry set one.
        pub endpoint: String,
        /// File of headers for the collector, one `Name: value` per line. Empty: none.
        pub headers: String where AcceptedValues::Path,
        /// Share of new traces that are recorded. A request with a trace is recorded if its parent is.
        pub ratio: f64 where AcceptedValues::Share,
        /// Most requests whose spans wait to be sent; further ones are counted and dropped.
        queue: usize,
        /// Most spans sent at a time.
        batch: usize,
        /// Time for which spans are gathered before they are sent.
        interval: Duration = "duration",
        /// Time limit of one attempt to send.
        timeout: Duration = "duration",
        /// Pause before the second attempt; doubles with each further one.
        retry_pause: Duration = "duration",
        /// Longest pause between attempts without a `Retry-After` of the collector.
        retry_pause_cap: Duration = "duration",
        /// Longest respected `Retry-After` of the collector.
        retry_after_cap: Duration = "duration",
        /// Age at which unsent spans are dropped.
        retry_for: Duration = "duration",
        /// Time at program exit for sending the last spans.
        flush: Duration = "duration",
    }
);

section!(
    /// Probes, collectors and load balancers.
    Probe of "probe" {
        /// Address `host:port` of `/livez`, `/readyz` and `/metrics`, read-only and without a key. Empty:
        /// none.
        pub address: String,
        /// Address `host:port` of the `HAProxy` `agent-check`. Empty: none.
        pub agent: String,
        /// Time after SIGTERM in which requests are still accepted while `/readyz` already answers 503, so
        /// that balancers notice.
        pub drain_delay: Duration = "duration",
        /// Adds the endpoint-picker gauges under their vLLM names to `/metrics`.
        pub vllm: bool,
        /// Interval of readiness checks.
        look: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Age up to which metrics are reused.
        metrics_age: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Largest share of one core for checks and metrics.
        share: f64 where AcceptedValues::Share,
        /// Time without a check after which the program counts as stuck.
        stuck: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Most connections; a further one closes the oldest.
        connections: usize,
        /// Largest request head.
        head_bytes: ByteSize,
        /// Time to send a request head.
        head_timeout: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Longest life of a connection.
        connection_age: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Longest wait for fresh metrics.
        patience: Duration = "duration",
        /// Time above which an answer to a probe counts as late.
        late: Duration = "duration",
        /// Time to a memory limit within which an instance gets less weight.
        horizon: Duration = "duration",
    }
);
