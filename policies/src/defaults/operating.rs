//! Defaults of work next to serving: exports, kept history, canaries, updates of builds.

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
        /// Time to a memory limit within which an instance gets less weight.
        horizon: Duration = "duration",
    }
);

section!(
    /// History of readings: buckets of four widths, each kept for some time.
    #[derive(Copy)]
    Series of "series" {
        /// Width of the finest buckets.
        first: Duration = "duration" where AcceptedValues::AtLeast("1s"),
        /// Width of the second buckets.
        second: Duration = "duration" where AcceptedValues::AtLeast("1s"),
        /// Width of the third buckets.
        third: Duration = "duration" where AcceptedValues::AtLeast("1s"),
        /// Width of the widest buckets.
        fourth: Duration = "duration" where AcceptedValues::AtLeast("1s"),
        /// Time for which a reading counts as the present value.
        fresh: Duration = "duration",
        /// Pause between writes to disk.
        flush: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Total size of all series files; those written longest ago are deleted first.
        bytes: ByteSize,
        /// Most memories read at a time.
        live: usize,
        /// Most buckets waiting for the disk.
        waiting: usize,
        /// Most marks (events shown in charts) of one model.
        marks_of_model: usize,
        /// Most marks (events shown in charts) of all models.
        marks: usize,
        /// Most bytes of a mark's text.
        mark_bytes: usize,
        /// Default number of points in an answer.
        points: usize,
        /// Most points in an answer.
        points_most: usize,
        /// Pause between checks of the fleet's state.
        look: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Pause between attempts to take over the files that another instance writes.
        retry: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Longest wait of an answer for the disk.
        patience: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
    }
);

section!(
    /// Canaries: another build tried next to the serving one.
    #[derive(Copy)]
    Canary of "canary" {
        /// Default share of conversations for the canary.
        share: f64 where AcceptedValues::Share,
        /// Largest share that can be requested.
        share_most: f64 where AcceptedValues::Share,
        /// Requests after which the trial ends.
        requests: u64,
        /// Time after which the trial ends.
        time: Duration = "duration",
        /// Share by which the canary may be slower.
        slower: f64,
        /// Largest probability that an equally good build is called worse.
        wrong: f64 where AcceptedValues::Share,
        /// Excess failures, as a share of requests, that must be ruled out before a build counts as good.
        failing: f64 where AcceptedValues::Share,
        /// Most requests of the serving build that one canary request is compared with.
        beside: usize,
        /// Latencies kept for the displayed medians.
        shown: usize,
        /// Answered requests before the canary's memory can show that it does not leak.
        memory_requests: u64,
        /// Least tokens of an answer whose speed is compared.
        pace_tokens: u64,
        /// Wait for the canary's first byte, as a multiple of the serving build's longest wait.
        patience: f64,
        /// Shortest wait for the canary's first byte.
        patience_least: Duration = "duration",
    }
);

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
