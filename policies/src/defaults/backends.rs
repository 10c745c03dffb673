//! Defaults of a backend's life: its build, its process, its probes, what is read of it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{Key, Section, Takes};
use crate::units::ByteSize;

section!(
    /// A backend's life.
    #[derive(Copy)]
    Lifecycle of "lifecycle" {
        /// A backend has to be ready within this time.
        pub start_timeout: Duration = "duration" where Takes::AtLeast("1ms"),
        /// A backend that starts and does nothing for this long (it writes nothing, reads nothing, computes nothing) is ended, too.
        pub start_stall: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Pause between probes while a backend starts.
        start_probe_interval: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Pause between probes of a ready backend.
        pub probe_interval: Duration = "duration" where Takes::AtLeast("1ms"),
        /// A probe without an answer for this long is lost.
        pub probe_timeout: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Lost probes in a row that make a backend suspect.
        probes_lost: u32,
        /// A suspect backend is replaced after this.
        pub suspect_timeout: Duration = "duration",
        /// The same for one that has logged that it crashed: it need not be waited for.
        crash_ends: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Running requests of a backend that is replaced may take this long. A policy that wants it replaced for its size, age
        /// or speed cuts nothing while the machine has memory: the process then serves on and is drained again later.
        pub drain_deadline: Duration = "duration",
        /// From SIGTERM to SIGKILL.
        pub stop_grace: Duration = "duration",
        /// The same for a process that is ended without draining, because memory is almost gone.
        kill_grace: Duration = "duration",
        /// First pause after a failure; each further one in a row is twice as long.
        pub backoff_first: Duration = "duration",
        /// Longest pause after a start that failed.
        pub backoff_cap: Duration = "duration",
        /// Longest pause after the crash of a process that had been ready.
        pub crash_cap: Duration = "duration",
        /// Unexpected ends ...
        breaker_failures: u32,
        /// ... within this time are told as a crash loop. Starts go on.
        breaker_window: Duration = "duration" where Takes::AtLeast("1ms"),
        /// A backend that cannot start before a flag or a file changes is tried this often all the same.
        recheck: Duration = "duration",
        /// How often the files that such a backend needs are looked at; a change starts it.
        look_interval: Duration = "duration",
        /// A slot that was restored has this long, at least, to show that it is used. One that does not counts as unproven.
        slot_shows_within: Duration = "duration",
        /// Ready for this long forgets earlier crashes.
        stable_after: Duration = "duration",
        /// Start failures in a row after which waiting requests are told.
        failures_told: u32,
        /// Requests of the slot kind on one backend when its slots are unknown.
        unknown_slots: u32,
    }
);

section!(
    /// The search for a switch that starts a server which dies while it loads.
    #[derive(Copy)]
    StartSearch of "start_search" {
        /// Deaths in a row, as configured, before a switch is tried.
        deaths: u32,
        /// Starts of one search, at most.
        starts: u32,
        /// Time of one search, at most.
        time: Duration = "duration" where Takes::AtLeast("1ms"),
    }
);

section!(
    /// Reading numbers.
    #[derive(Copy)]
    Sensors of "sensors" {
        /// Pause between readings.
        pub interval: Duration = "duration" where Takes::AtLeast("1ms"),
        /// After the last request ended, memory is read this much later.
        idle_settle: Duration = "duration",
        /// Growth of host memory is confirmed by a slow and exact reading, at most this often.
        confirm_interval: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Share of the growth that the exact reading has to show, too, 0 to 1.
        confirm_share: f64,
        /// A reading of the GPUs serves all backends for this long.
        gpu_age: Duration = "duration",
        /// A driver, or a backend's own counters, that takes longer is left out of a reading.
        read_limit: Duration = "duration" where Takes::AtLeast("1ms"),
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
    #[derive(Copy)]
    Child of "child" {
        /// How often folders of models are looked at for those that have come or gone.
        models_look: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Added to the child's `oom_score_adj`, -1000 to 1000.
        pub oom_score_adj: i32 where Takes::Whole(-1000, 1000),
        /// Lines of output kept per backend.
        log_lines: usize,
        /// Bytes of one line kept; the rest of it is cut.
        log_line_bytes: usize,
        /// Lines of output shown with a failed start, to clients too; 0 for none.
        pub failure_lines: usize,
        /// `llama-server --version` has to answer within this time.
        version_timeout: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Whether a llama-server that we did not build is measured once, at its first start: a second process of it runs for
        /// some seconds, on the CPU, with a tiny model.
        pub measure: bool,
        /// Measuring ends within this time.
        measure_timeout: Duration = "duration",
        /// Events kept for late listeners.
        events_kept: usize,
    }
);

section!(
    /// Building llama-server.
    Build of "build" {
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
        /// npm has to make the web page within this time; after that the build goes on without one.
        pub page_timeout: Duration = "duration" where Takes::AtLeast("1ms"),
        /// A sample request of the verification has to be answered within this time.
        verify_timeout: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Builds that `builds gc` keeps.
        pub keep: usize,
        /// The repository that `build` takes when no source is given: a name of `[build.sources]`, a URL or a path.
        pub source: String,
        /// Repositories with a name, each a URL or an absolute path, with `#` and a tag, a branch or a commit at its end.
        pub sources: BTreeMap<String, String> where Takes::Sources,
    }
);

section!(
    /// Which models are loaded, and who leaves for whom.
    Loading of "loading" {
        /// A model is started where memory has room for it, and others are unloaded for it. `false`: every model is started when it is asked for, whatever it needs.
        pub make_room: bool,
        /// At most so many models are loaded at a time; 0: as many as fit.
        pub max_loaded: u32,
        /// A model that is in use stays for so many times as long as its load took ...
        turn_loads: f64,
        /// ... but at least for this time ...
        turn_least: Duration = "duration",
        /// ... and at most for this one.
        turn_most: Duration = "duration",
        /// An idle model has its turn, too, while its next request is expected within so many times as long as its load took.
        turn_soon: f64,
        /// What a model that leaks is worth, as a share of what it would be: its next start is a cure, too.
        leaker: f64,
        /// A model whose start found too little memory needs so many times as much as was thought.
        short: f64,
        /// For so long after the last such start.
        short_for: Duration = "duration",
        /// A model that serves and was not read for so long has what it was promised.
        first_reading: Duration = "duration",
        /// Room is kept for so long for a model that is to come along with another one and does not ask.
        called: Duration = "duration",
        /// Who is asked to give back what it hoards is waited for so long before others leave ...
        give_back: Duration = "duration",
        /// The share of the host's memory that is left to the system.
        host_kept: f64,
        /// The share of each GPU's memory that is left to its display, and for what fragments.
        gpu_kept: f64,
        /// While somebody waits for room it is looked for this often ...
        look: Duration = "duration",
        /// ... and this often while what an ended process held comes back, which a driver gives in steps.
        look_closely: Duration = "duration",
        /// How often it is noted who was asked how often.
        noted: Duration = "duration",
    }
);
