//! Every default number of the product, read from the compiled-in `defaults.toml`.
//!
//! The file carries the sentence that justifies each number; this module only gives it types. Crates take their
//! numbers from here, so that none hides in code.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use crate::admission::AdmissionMode;
use crate::hosts::Names;
use crate::origins::Origins;
use crate::recycle::GrowthMode;
use crate::units::ByteSize;

/// The text of `defaults.toml`, with its reasons, for `llama-warden config show --defaults`.
pub const TEXT: &str = include_str!("defaults.toml");

static DEFAULTS: LazyLock<Defaults> = LazyLock::new(|| match toml::from_str(TEXT) {
    Ok(defaults) => defaults,
    // Compiled in and covered by a test, so this cannot happen in a build that passed its tests.
    Err(error) => unreachable!("defaults.toml: {error}"),
});

/// The defaults.
pub fn defaults() -> &'static Defaults {
    &DEFAULTS
}

/// A duration written as `300s`, `30ms`, `12h`, `10m`.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    let error = || DurationError { text: text.to_owned() };
    let trimmed = text.trim();
    let mut total = Duration::ZERO;
    let mut rest = trimmed;
    if rest.is_empty() {
        return Err(error());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(error)?;
        let number: f64 = rest[..digits].parse().map_err(|_| error())?;
        let unit_end = rest[digits..].find(|c: char| c.is_ascii_digit()).map_or(rest.len(), |i| digits + i);
        let seconds = match rest[digits..unit_end].trim() {
            "ms" => 0.001,
            "s" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            "d" => 86_400.0,
            _ => return Err(error()),
        };
        let part = Duration::try_from_secs_f64(number * seconds).map_err(|_| error())?;
        total = total.checked_add(part).ok_or_else(error)?;
        rest = &rest[unit_end..];
    }
    Ok(total)
}

/// Why a text is not a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a duration: write a number and a unit, like `300s`, `30ms`, `12h` or `1h30m`")]
pub struct DurationError {
    text: String,
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    parse_duration(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
}

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

section!(
    /// All sections.
    Defaults {
        /// Where we listen and what a client may cost.
        server: Server,
        /// The queue in front of each model.
        queue: Queue,
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
    }
);

section!(
    /// The public listener. See `defaults.toml` for the reason behind each value.
    Server {
        /// Address.
        host: String,
        /// Port.
        port: u16,
        /// Threads that serve clients; 0 for one on each core that we may use, at most four.
        threads: usize,
        /// Time to send a complete request head.
        header_timeout: Duration = "duration",
        /// Bytes in a request head.
        header_bytes: ByteSize,
        /// Fields in a request head.
        header_count: usize,
        /// Bytes in a request body.
        body_bytes: ByteSize,
        /// Bytes in the form of a transcription.
        audio_body_bytes: ByteSize,
        /// Bytes in a body that holds text alone, as for `/tokenize` and `/rerank`; never more than `body_bytes`.
        text_body_bytes: ByteSize,
        /// Bytes in a body that tells the server itself something, as for `/slots` and `/props`; never more than
        /// `body_bytes`.
        control_body_bytes: ByteSize,
        /// Bytes of bodies held in memory while their model is looked for, all requests together.
        buffered_bytes: ByteSize,
        /// Bytes of a body read in search of `model`.
        model_scan_bytes: ByteSize,
        /// A request body without a byte for this long is given up.
        body_timeout: Duration = "duration",
        /// An idle connection is closed after this.
        keep_alive: Duration = "duration",
        /// A connection closed with unread bytes is read for this long, so that the client sees its answer.
        linger: Duration = "duration",
        /// Pause after a failure to accept.
        accept_pause: Duration = "duration",
        /// Connections in all.
        connections: usize,
        /// Connections from one address.
        connections_per_peer: usize,
        /// Bytes a second with which a client earns back the time that it let us wait for its body: a pause is forgiven, a trickle ends like silence after `body_timeout`. 0: any byte earns it all back.
        body_rate: ByteSize,
        /// A client that takes no byte of a waiting answer for this long is cut.
        send_timeout: Duration = "duration",
        /// Bytes that may wait in the kernel for a client that does not take them, beside those that are under way to it.
        unsent_bytes: ByteSize,
        /// Connections beyond the limits that are told so at a time; further ones are closed without a word.
        refusals: usize,
        /// PEM file with the certificate and those that lead to its authority; empty: no TLS. Relative to the configuration file.
        tls_cert: String,
        /// PEM file with the private key of `tls_cert`.
        tls_key: String,
        /// How often the two files are looked at for a new certificate.
        tls_check: Duration = "duration",
        /// A certificate that ends sooner than this is warned of in the log.
        tls_warn: Duration = "duration",
        /// Time for a TLS handshake.
        tls_handshake_timeout: Duration = "duration",
        /// Whether clients may choose HTTP/2 over TLS.
        h2: bool,
        /// Whether clients on this machine may speak HTTP/2 without TLS and without asking (prior knowledge).
        h2c: bool,
        /// Requests at a time on one HTTP/2 connection.
        h2_streams: u32,
        /// Bytes of a request body that a client may send ahead on one stream.
        h2_stream_window: ByteSize,
        /// The same for all streams of one connection.
        h2_connection_window: ByteSize,
        /// Bytes of an answer held per stream for a client that does not take them.
        h2_send_buffer: ByteSize,
        /// Streams that a client may reset before we have looked at them; more closes the connection.
        h2_pending_resets: usize,
        /// Streams of one connection that we may have to reset for errors of the client; more closes the connection.
        h2_local_resets: usize,
        /// Requests of one connection that its client may give up within `h2_reset_window`; more closes the connection.
        h2_resets: usize,
        /// Time over which they are counted.
        h2_reset_window: Duration = "duration",
        /// A connection without a frame for this long is asked whether it is alive.
        h2_ping: Duration = "duration",
        /// Time to answer that; a client that does not read cannot.
        h2_ping_timeout: Duration = "duration",
        /// After SIGTERM, running requests may take this long.
        shutdown_deadline: Duration = "duration",
        /// File of API keys, relative to the configuration file; empty: no key is asked for, and what clients send passes on.
        keys: String,
        /// Whose web pages may call: `"mirror"` (everybody's), `"off"`, or a list of origins.
        cors: Origins,
        /// By which host names we may be reached, beside addresses and `localhost`: `"auto"`, `"any"`, or a list.
        names: Names,
        /// How long a browser may keep the answer that a page may call.
        cors_max_age: Duration = "duration",
    }
);

section!(
    /// The queue of a model.
    Queue {
        /// Callers that may wait.
        depth: usize,
        /// How long a caller waits.
        wait: Duration = "duration",
    }
);

section!(
    /// How a model runs.
    Model {
        /// Processes.
        replicas: u32,
        /// Started at once instead of at the first request.
        preload: bool,
        /// `auto`, `sequential` or `overlap`.
        replace: String,
        /// Whether a process is asked for a report of its GPU memory.
        memory_report: bool,
        /// What a process listens on: `unix` or `tcp`.
        socket: String,
        /// Whether what is read about a process is written to a file for `policy replay`.
        record: bool,
        /// `auto`, `assemble` or `off`.
        cancel: String,
    }
);

section!(
    /// Our own log.
    Log {
        /// `text` or `json`.
        format: String,
        /// A level, or a filter such as `info,warden_gateway=debug`.
        level: String,
        /// Whether the lines of the children are repeated in it.
        children: bool,
        /// File for the access log, relative to the configuration file, opened anew at SIGHUP; empty: it is part of the log.
        access: String,
        /// Lines that may wait for a slow reader; what comes beyond them is left out, and counted.
        buffered_lines: usize,
    }
);

section!(
    /// A backend's life.
    Lifecycle {
        /// A backend has to be ready within this time.
        start_timeout: Duration = "duration",
        /// Pause between probes while a backend starts.
        start_probe_interval: Duration = "duration",
        /// Pause between probes of a ready backend.
        probe_interval: Duration = "duration",
        /// A probe without an answer for this long is lost.
        probe_timeout: Duration = "duration",
        /// Lost probes in a row that make a backend suspect.
        probes_lost: u32,
        /// A suspect backend is replaced after this.
        suspect_timeout: Duration = "duration",
        /// Running requests of a backend that is replaced may take this long.
        drain_deadline: Duration = "duration",
        /// From SIGTERM to SIGKILL.
        stop_grace: Duration = "duration",
        /// The same for a process that is ended without draining, because memory is almost gone.
        kill_grace: Duration = "duration",
        /// First pause after a crash.
        backoff_first: Duration = "duration",
        /// Longest pause after a crash.
        backoff_cap: Duration = "duration",
        /// Crashes ...
        breaker_failures: u32,
        /// ... within this time open the breaker.
        breaker_window: Duration = "duration",
        /// Ready for this long forgets earlier crashes.
        stable_after: Duration = "duration",
        /// Start failures in a row after which waiting requests are told.
        failures_told: u32,
        /// Requests of the slot kind on one backend when its slots are unknown.
        unknown_slots: u32,
    }
);

section!(
    /// When a backend is replaced.
    Recycle {
        /// Share by which request and age limits vary, 0 to 1.
        jitter: f64,
        /// Quiet is: nothing in flight for this long.
        quiet_for: Duration = "duration",
        /// A recycle that waits for quiet waits no longer.
        quiet_within: Duration = "duration",
        /// Least time between recycles of one model.
        min_interval: Duration = "duration",
        /// Least time between recycles at the hard budget.
        min_interval_hard: Duration = "duration",
        /// Least time between recycles of one model, as a multiple of the time that it takes to load.
        load_factor: f64,
        /// Futile recycles in a row that switch the policy off.
        max_futile: u32,
        /// What is done about memory that grows without bound: `off`, `observe` or `recycle`.
        growth: GrowthMode,
        /// Recycles because of growth ...
        growth_recycles: u32,
        /// ... within this time end recycling because of growth.
        growth_window: Duration = "duration",
        /// Growth that reaches a budget within this time calls for a recycle when quiet.
        growth_quiet: Duration = "duration",
        /// Growth that reaches a hard limit within this time calls for a drain now.
        growth_drain: Duration = "duration",
        /// What is done about a prompt for which there is not enough memory: `off`, `warn` or `enforce`.
        admission: AdmissionMode,
        /// For `auto`: memory that must be available, as a multiple of what the backend holds.
        overlap_headroom: f64,
        /// Smallest memory that `overlap_headroom` is applied to.
        overlap_floor: ByteSize,
    }
);

section!(
    /// At which level of memory a backend is replaced or ended.
    Levels {
        /// For `host.soft = "auto"`: the settled size and what the server is told to keep, times this.
        host_soft: f64,
        /// For `host.soft = "auto"`: at least this much above the settled size.
        host_room: ByteSize,
        /// For `host.soft = "auto"`: at most this share of the machine's memory.
        host_soft_most: f64,
        /// For `host.hard = "auto"`: the soft budget, times this.
        host_hard: f64,
        /// For `host.hard = "auto"`: at most this share of the machine's memory.
        host_hard_most: f64,
        /// For `vram.soft = "auto"`: this share of what the device can give to the process.
        vram_soft: f64,
        /// For `vram.hard = "auto"`: this share of what the device can give to the process.
        vram_hard: f64,
        /// For `vram.soft = "auto"` where the settled size leaves little: this share of what is left above it.
        vram_soft_left: f64,
        /// For `vram.hard = "auto"` where the settled size leaves little: this share of what is left above it.
        vram_hard_left: f64,
        /// A backend over the hard budget times this is ended without draining ...
        kill_over: f64,
        /// ... once draining has been wanted for this long.
        kill_after: Duration = "duration",
        /// A backend is ended when the machine has less memory available than this share of it ...
        kill_host_share: f64,
        /// ... and less than this.
        kill_host: ByteSize,
        /// A backend is ended when its GPU has less memory free than this and it still grows.
        kill_vram: ByteSize,
        /// After a backend was ended because a memory was almost gone, the others are spared for this long.
        kill_pause: Duration = "duration",
        /// Memory that does not come back after a process has exited is a driver's leak from this size on ...
        unreturned: ByteSize,
        /// ... after this many exits in a row.
        unreturned_exits: u32,
    }
);

section!(
    /// The cheapest moment of a replacement.
    Moment {
        /// A request that fails costs as much as one that waits for this long.
        failed_request: Duration = "duration",
        /// Lulls in the memory: older ones are forgotten.
        lulls: usize,
        /// A backend that has never been watched for long is expected to have a lull within this time.
        first_lull: Duration = "duration",
        /// Growth calls for a recycle when it leaves less time than so many mean times between lulls.
        lulls_ahead: f64,
    }
);

section!(
    /// Signs of illness other than memory.
    Health {
        /// Work in flight without any progress for this long is a wedge ...
        wedged_after: Duration = "duration",
        /// ... and for this long where only bytes of answers could show progress.
        wedged_unseen: Duration = "duration",
        /// Answers in a row that say that computing failed, with no success in between.
        compute_errors: u32,
        /// Time over which a median speed is taken.
        speed_window: Duration = "duration",
        /// Readings of the speed that a median needs.
        speed_readings: usize,
        /// Medians that make the backend's own baseline.
        speed_baseline: usize,
        /// A median below the baseline times this is slow.
        speed_slow: f64,
        /// Slow medians in a row that make slow decoding a symptom.
        speed_persists: usize,
    }
);

section!(
    /// Prompts that would not fit into memory.
    Admission {
        /// Prompts larger than all before them that the estimate needs.
        evidence: usize,
        /// Quantile of the observed bytes per token that is reckoned with, 0 to 1.
        quantile: f64,
        /// Kept free beyond what a prompt is expected to need.
        reserve: ByteSize,
        /// Bytes of text per token where the backend was not asked.
        bytes_per_token: f64,
        /// Shortest `Retry-After`.
        retry_least: Duration = "duration",
        /// Longest `Retry-After`.
        retry_most: Duration = "duration",
    }
);

section!(
    /// How growth of memory is judged.
    Growth {
        /// Half-life of the average rate of requests.
        rate_half_life: Duration = "duration",
        /// Requests before the first judgement.
        warmup_requests: u64,
        /// A start that still slows down after this many requests is judged all the same.
        warmup_limit: u64,
        /// Short floors in each of the three groups that show whether the start is over.
        settle_floors: usize,
        /// Share of the least rise below which a start needs no settling.
        settle_share: f64,
        /// Short floors after the start whose median is the baseline.
        baseline_floors: usize,
        /// Lengths of stretches: 1, 2, 4, … steps of work.
        scales: u32,
        /// Floors kept for each length.
        kept: usize,
        /// Floors in a test.
        window: usize,
        /// Floors from one test to the next.
        test_every: u64,
        /// Tests of one length that make a verdict.
        tests: usize,
        /// The last slope of these tests, as a share of the first, has to be at least this.
        persist_ratio: f64,
        /// Rise of all floors of a length that makes a verdict, as a multiple of the least rise ...
        long_effect: f64,
        /// ... unless they lie on a line: deviations from it are at most this share of the rise, and ...
        straight_scatter: f64,
        /// ... its later half has at least this share of the slope of its earlier half.
        straight_ratio: f64,
        /// A line that rose by this multiple of the least rise needs only two tests.
        swift_effect: f64,
        /// Growth that is no line but rose by this multiple, and does not slow down, needs only two tests too.
        steep_effect: f64,
        /// Such a rise settles only if its later half has less than this share of the slope of its earlier half.
        steep_ratio: f64,
        /// A line that is so much straighter than it has to be needs as much less of a rise.
        straight_share: f64,
        /// Any rise settles if its later half is slower by more than this multiple of its scatter ...
        pace_noise: f64,
        /// ... and has less than this share of the slope of its earlier half.
        pace_limit: f64,
        /// So many longer scales are asked whether it settles, and the last of them whether it fell before.
        past_scales: usize,
        /// A fall before by this share of the rise makes it a movement, not a leak.
        fall_share: f64,
        /// Rise of all floors in deviations of a random walk with steps of their size.
        drift_z: f64,
        /// The same over four floors at a time, where only what wanders goes far.
        drift_far_z: f64,
        /// Deviations from no trend that a test needs.
        trend_z: f64,
        /// Deviations to each side of the slope that its interval has.
        bound_z: f64,
        /// Least rise within a test that counts on the host.
        host_effect: ByteSize,
        /// The same as a share of the baseline; the larger one counts.
        host_effect_share: f64,
        /// Least rise within a test that counts on a GPU.
        vram_effect: ByteSize,
        /// Memory of a GPU is taken in pieces of this size.
        vram_grain: ByteSize,
        /// Least rise within a test in deviations of the floors about their line.
        effect_noise: f64,
        /// Least slope of the end of a test's stretch, as a share of the whole stretch's.
        brake_ratio: f64,
        /// A floor this many deviations from both of its neighbours is no step.
        peak_noise: f64,
        /// Largest single steps of a stretch that are taken off ...
        jumps: usize,
        /// ... and the share of the rise that has to remain.
        jump_rest: f64,
        /// Latest short floors whose least one is shown as the floor.
        floor_steps: usize,
        /// Bytes beyond what a server is told to keep, or beyond its measured pools, that count as kept.
        allowance_slack: ByteSize,
        /// Readings without the pools that were measured before, until they count as no longer measured.
        unmeasured: u32,
        /// Least requests without growth after which a leak is over.
        calm_requests: u64,
        /// The same as a multiple of the requests that a new height takes at the present slope.
        calm_factor: f64,
        /// Share of the least rise that makes a new height.
        height_share: f64,
        /// Share of the slope of an earlier generation's leak at which it counts as the same leak.
        prior_ratio: f64,
        /// Least floors for blame.
        blame_floors: usize,
        /// By how much the blamed unit has to explain the growth better than every other, in units of the chi-squared
        /// statistic.
        blame_margin: f64,
        /// Least variation of the rate of requests at which an hour can be blamed, as a share of the rate.
        blame_uneven: f64,
        /// Least share of the growth that the blamed unit pays for.
        blame_share: f64,
    }
);

section!(
    /// The connection to a backend.
    Upstream {
        /// Time to connect.
        connect_timeout: Duration = "duration",
        /// An idle connection is not used again after this.
        idle_timeout: Duration = "duration",
        /// Idle connections kept per generation.
        idle_connections: usize,
        /// Longest life of one exchange.
        exchange_timeout: Duration = "duration",
        /// A body without a byte for this long is dead.
        stream_idle: Duration = "duration",
        /// Attempts to find a backend that takes a request, each with proof that the last one executed nothing.
        attempts: u32,
        /// Bytes at the end of an answer in which `usage` and `timings` are looked for.
        tail_bytes: ByteSize,
        /// Bytes of a request body that are read before it is sent, and kept so that it can be sent again.
        replay_bytes: ByteSize,
        /// Bytes of an incomplete event of a stream that are held until the event is complete.
        event_bytes: ByteSize,
        /// Bytes of one answer that is put together from a stream.
        assembled_bytes: ByteSize,
    }
);

section!(
    /// Reading numbers.
    Sensors {
        /// Pause between readings.
        interval: Duration = "duration",
        /// After the last request ended, memory is read this much later.
        idle_settle: Duration = "duration",
        /// Growth of host memory is confirmed by a slow and exact reading, at most this often.
        confirm_interval: Duration = "duration",
        /// Share of the growth that the exact reading has to show, too, 0 to 1.
        confirm_share: f64,
        /// A reading of the GPUs serves all backends for this long.
        gpu_age: Duration = "duration",
        /// A driver, or a backend's own counters, that takes longer is left out of a reading.
        read_limit: Duration = "duration",
        /// Memory that seems missing after an exit is looked for again after this.
        return_wait: Duration = "duration",
        /// Bytes of one recording (`record = true`).
        trace_bytes: ByteSize,
        /// Slopes of earlier generations that are remembered, by build, model and arguments.
        priors_kept: usize,
    }
);

section!(
    /// The child process.
    Child {
        /// Added to the child's `oom_score_adj`, -1000 to 1000.
        oom_score_adj: i32,
        /// Lines of output kept per backend.
        log_lines: usize,
        /// Bytes of one line kept; the rest of it is cut.
        log_line_bytes: usize,
        /// Lines of output shown with a failed start.
        failure_lines: usize,
        /// `llama-server --version` has to answer within this time.
        version_timeout: Duration = "duration",
        /// Events kept for late listeners.
        events_kept: usize,
    }
);

section!(
    /// Building llama-server.
    Build {
        /// Release of llama-cpp-python whose source archive `quickstart` uses.
        sdist_version: String,
        /// SHA-256 of that archive, in hex.
        sdist_sha256: String,
        /// Free disk that a build needs.
        min_disk: ByteSize,
        /// Free memory that a build needs.
        min_memory: ByteSize,
        /// Memory of one compiler at its peak.
        memory_per_job: ByteSize,
        /// Memory of one compiler for CUDA or HIP at its peak.
        memory_per_gpu_job: ByteSize,
        /// A sample request of the verification has to be answered within this time.
        verify_timeout: Duration = "duration",
        /// Builds that `builds gc` keeps.
        keep: usize,
        /// The repository that `build` takes when no source is given: a name of `[build.sources]`, a URL or a path.
        source: String,
        /// Repositories with a name, each a URL or an absolute path, with `#` and a tag, a branch or a commit at its end.
        sources: BTreeMap<String, String>,
    }
);

#[cfg(test)]
mod tests {
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

    #[test]
    fn durations_read_as_people_write_them() {
        for (text, ms) in [
            ("300s", 300_000),
            ("30ms", 30),
            ("1h30m", 5_400_000),
            ("1.5s", 1500),
            ("2 min", 120_000),
            ("0s", 0),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "5", "s", "5 years", "-1s", "1s2"] {
            let error = parse_duration(text).expect_err(text).to_string();
            assert!(error.contains(&format!("`{text}`")), "{error}");
        }
    }
}
