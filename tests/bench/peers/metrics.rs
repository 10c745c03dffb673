//! Names of the metrics in the tables.

use crate::figures::Metric;

pub(crate) const RATE: Metric = "requests/s, one core, 64 connections";
pub(crate) const RATE_CPU: Metric = "CPU µs a request";
pub(crate) const LATENCY_50: Metric = "latency p50 µs, 1 connection, one CPU";
pub(crate) const LATENCY_99: Metric = "latency p99 µs, 1 connection, one CPU";
pub(crate) const PACED_50: Metric = "latency p50 µs, 2,000 requests/s, 64 connections";
pub(crate) const PACED_99: Metric = "latency p99 µs, 2,000 requests/s, 64 connections";
pub(crate) const FIRST_50: Metric = "first event of a stream p50 µs, one CPU";
pub(crate) const FIRST_STALLS: Metric = "first events later than 30 ms";
pub(crate) const SPACED_50: Metric = "event delay p50 µs, 1,000 streams of 20/s";
pub(crate) const SPACED_99: Metric = "event delay p99 µs, 1,000 streams of 20/s";
pub(crate) const SPACED_MERGED: Metric = "spaced events merged, %";
pub(crate) const SPACED_CPU: Metric = "CPU µs a spaced event";
pub(crate) const FLOOD: Metric = "events/s, 1,000 streams flat out";
pub(crate) const FLOOD_CPU: Metric = "CPU µs an event flat out";
pub(crate) const BODIES_FIRST: Metric = "5 MB bodies, 4 at once, MB/s, model first";
pub(crate) const BODIES_LAST: Metric = "5 MB bodies, 4 at once, MB/s, model last";
pub(crate) const PEAK_FIRST: Metric = "peak RSS MiB, 16 bodies of 5 MB, model first";
pub(crate) const PEAK_LAST: Metric = "peak RSS MiB, 16 bodies of 5 MB, model last";
pub(crate) const IDLE: Metric = "PSS MiB, idle";
pub(crate) const IDLE_CONNECTIONS: Metric = "PSS MiB, 1,000 idle connections";
pub(crate) const OPEN_STREAMS: Metric = "PSS MiB, 1,000 streams";
pub(crate) const START: Metric = "start to first answer, ms";
pub(crate) const INSTRUCTIONS: Metric = "instructions a small request";
pub(crate) const CALLS_REQUEST: Metric = "system calls a small request";
pub(crate) const CALLS_PLAIN: Metric = "the same without futex and write";
pub(crate) const CALLS_EVENT: Metric = "system calls a spaced event";
pub(crate) const RECONNECTS: Metric = "client connections closed in 10,000 requests";
pub(crate) const UPSTREAMS: Metric = "new upstream connections per client connection, 10,000 requests";
