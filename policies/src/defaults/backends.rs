//! Defaults of backends: builds, processes, probes, readings, loading.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{AcceptedValues, DefaultsKey, DefaultsSection};
use crate::units::ByteSize;

section!(
    /// Life of a backend.
    #[derive(Copy)]
    Lifecycle of "lifecycle" {
        /// Time within which a backend must be ready.
        pub start_timeout: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Ends a starting backend that is idle for this long: it writes, reads and computes nothing.
        pub start_stall: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Pause between probes while a backend starts.
        start_probe_interval: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Pause between probes of a ready backend.
        pub probe_interval: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Time after which a probe without an answer counts as lost.
        pub probe_timeout: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Consecutive lost probes that make a backend suspect.
        probes_lost: u32,
        /// Time after which a suspect backend is replaced.
        pub suspect_timeout: Duration = "duration",
        /// Time after which a suspect backend that has logged a crash is replaced.
        crash_ends: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Time that running requests of a replaced backend may take. A replacement by policy (size, age,
        /// speed) cuts no request while the machine has memory: the process then continues to serve and is
        /// drained again later.
        pub drain_deadline: Duration = "duration",
        /// Time from SIGTERM to SIGKILL.
        pub stop_grace: Duration = "duration",
        /// Time from SIGTERM to SIGKILL for a process that is ended because memory is almost exhausted.
        kill_grace: Duration = "duration",
        /// First pause after a failure; doubles with each consecutive failure.
        pub backoff_first: Duration = "duration",
        /// Longest pause after a failed start.
        pub backoff_cap: Duration = "duration",
        /// Longest pause after the crash of a process that had been ready.
        pub crash_cap: Duration = "duration",
        /// Number of unexpected ends within `breaker_window` that is reported as a crash loop.
        breaker_failures: u32,
        /// Time window of `breaker_failures`. Restarts continue during a crash loop.
        breaker_window: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Retry interval of a backend that is expected to fail until a flag or a file changes.
        recheck: Duration = "duration",
        /// Interval of checks for changed files of such a backend; a change starts it.
        look_interval: Duration = "duration",
        /// Time for a restored slot to show that it is used. After that it counts as unproven.
        slot_shows_within: Duration = "duration",
        /// Ready time after which earlier crashes are forgotten.
        stable_after: Duration = "duration",
        /// Consecutive start failures after which waiting requests are answered with an error.
        failures_told: u32,
        /// Concurrent slot requests on one backend whose number of slots is unknown.
        unknown_slots: u32,
    }
);

section!(
    /// Search for a switch that keeps a server from dying while it loads.
    #[derive(Copy)]
    StartSearch of "start_search" {
        /// Consecutive deaths of the configured command before a switch is tried.
        deaths: u32,
        /// Most starts of one search.
        starts: u32,
        /// Longest time of one search.
        time: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
    }
);

section!(
    /// Readings of memory and counters.
    #[derive(Copy)]
    Sensors of "sensors" {
        /// Pause between readings.
        pub interval: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Time from the end of the last request to the memory reading.
        idle_settle: Duration = "duration",
        /// Least pause between exact readings, which are slow and confirm growth of host memory.
        confirm_interval: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Share of the growth that the exact reading must confirm, 0 to 1.
        confirm_share: f64,
        /// Time for which one GPU reading serves all backends.
        gpu_age: Duration = "duration",
        /// Time after which a reading leaves out a driver, or a backend's own counters.
        read_limit: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Time after which memory missing after an exit is checked again.
        return_wait: Duration = "duration",
        /// Size of one recording (`record = true`).
        trace_bytes: ByteSize,
        /// Number of remembered slopes of earlier generations, by build, model and arguments.
        priors_kept: usize,
    }
);

section!(
    /// Child processes.
    #[derive(Copy)]
    Child of "child" {
        /// Interval of checks for added and removed models in model folders.
        models_look: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Value added to the child's `oom_score_adj`, -1000 to 1000.
        pub oom_score_adj: i32 where AcceptedValues::Whole(-1000, 1000),
        /// Output lines kept per backend.
        log_lines: usize,
        /// Bytes kept per line; the rest is cut.
        log_line_bytes: usize,
        /// Output lines shown with a failed start, also to clients; 0 for none.
        pub failure_lines: usize,
        /// Time within which `llama-server --version` must answer.
        version_timeout: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Measures a llama-server not built by llama-warden once, at its first start: a second process of
        /// it runs for some seconds on the CPU, with a tiny model.
        pub measure: bool,
        /// Time limit of the measurement.
        measure_timeout: Duration = "duration",
        /// Events kept for late subscribers.
        events_kept: usize,
    }
);

section!(
    /// Builds of llama-server.
    Build of "build" {
        /// Release of llama-cpp-python whose source archive `quickstart` uses.
        sdist_version: String,
        /// SHA-256 of that archive, in hex.
        sdist_sha256: String,
        /// Free disk space needed for a build.
        min_disk: ByteSize,
        /// Free memory needed for a build.
        min_memory: ByteSize,
        /// Peak memory of one compiler.
        memory_per_job: ByteSize,
        /// Peak memory of one CUDA or HIP compiler.
        memory_per_gpu_job: ByteSize,
        /// Time limit of npm for the web page; after that the build continues without it.
        pub page_timeout: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Time within which a sample request of the verification must be answered.
        verify_timeout: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Number of builds that `builds gc` keeps.
        pub keep: usize,
        /// Repository that `build` uses without a given source: a name of `[build.sources]`, a URL or a path.
        pub source: String,
        /// Named repositories: a URL or an absolute path, with `#` and a tag, branch or commit at its end.
        pub sources: BTreeMap<String, String> where AcceptedValues::Sources,
    }
);

section!(
    /// Loading and unloading of models.
    Loading of "loading" {
        /// Starts a model only where it fits into memory, and unloads others for it. `false` starts each
        /// model on request, at any size.
        pub make_room: bool,
        /// Most models loaded at a time; 0: as many as fit.
        pub max_loaded: u32,
        /// Turn of a model in use (time before others may replace it), as a multiple of its load time.
        turn_loads: f64,
        /// Shortest turn.
        turn_least: Duration = "duration",
        /// Longest turn.
        turn_most: Duration = "duration",
        /// An idle model also keeps its turn if its next request is expected within this multiple of its
        /// load time.
        turn_soon: f64,
        /// Factor on the value of keeping a leaking model loaded: unloading it also ends the leak.
        leaker: f64,
        /// Factor on a model's estimated needs after its start ran out of memory.
        short: f64,
        /// Time for which `short` applies after the last start that ran out of memory.
        short_for: Duration = "duration",
        /// Time after which a serving model without a reading counts with its promised memory.
        first_reading: Duration = "duration",
        /// Time for which room is kept for a companion that does not ask to be loaded.
        called: Duration = "duration",
        /// Time to wait for reclaimed memory before other models are unloaded.
        give_back: Duration = "duration",
        /// Share of host memory left to the system.
        host_kept: f64,
        /// Share of each GPU's memory left to its display and to fragmentation.
        gpu_kept: f64,
        /// Share of the machine's memory for a process's prompt cache, and the same share for its checkpoints.
        cache_share: f64,
        /// Smallest bound of the prompt cache.
        min_prompt_cache: ByteSize,
        /// Smallest bound of checkpoints per slot.
        min_checkpoints: u32,
        /// Interval of decisions while a model waits for room.
        look: Duration = "duration",
        /// Interval of decisions while memory of an ended process returns; drivers return it in steps.
        look_closely: Duration = "duration",
        /// Interval at which request counts are recorded.
        noted: Duration = "duration",
    }
);
