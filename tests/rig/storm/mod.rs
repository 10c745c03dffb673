//! Runs a storm: many clients, some of whom leave, while backends are killed, crash, hang, are restarted,
//! drained, recycled and reconfigured. The clients' results must agree with the executions in the ledger.
//!
//! ```text
//!   clients --requests--> llama-warden --> three fake-llamas --> ledger of executions
//!      |                       ^                 ^                    |
//!      |                  restart, drain,    kill, faults             |
//!      |                  reload, change                              |
//!      `--- what each was told -----------> books <-------------------'
//! ```
//!
//! A storm follows from a seed, which a failure shows. The order of events still differs from run to run, so
//! no check depends on it.

mod books;
mod clients;
mod disturb;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::StatusCode;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::process::ProcessId;
use crate::warden::{SOON, Setup, chat};
use crate::{Context as _, Trouble, Warden, wait_for, wait_until};

pub use books::{Execution, audit, executions};
pub use clients::{Sent, Told, one};

/// Longest time that a request may take.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The model `sequence` is replaced in sequence; `overlap` has two replicas that are replaced by overlap.
const MODELS: [&str; 2] = ["sequence", "overlap"];

/// Kind of disturbances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weather {
    /// Actions of operators and policies, under which no request may fail.
    Fair,
    /// These actions, and faults: backends are killed and misbehave.
    Foul,
}

/// Parameters of a storm.
#[derive(Clone, Debug)]
pub struct Storm {
    /// Seed of the storm.
    pub seed: u64,
    /// Kind of disturbances.
    pub weather: Weather,
    /// Number of concurrent clients.
    pub clients: u64,
    /// Requests of each client, one after the other.
    pub each: u64,
    /// Fewest tokens of an answer, and how many more it may have.
    pub tokens: (u64, u64),
    /// Milliseconds per token.
    pub ms_per_token: f64,
    /// A client that leaves does so within this time.
    pub leaves_within_ms: u64,
    /// How often each fault may happen to each model, and one in how many requests asks for a fault.
    pub faults: (u64, u64),
    /// Deadline in foul weather, after which a hanging request is cut.
    pub hangs_for: &'static str,
    /// Further lines of configuration, before the models.
    pub top: &'static str,
    /// Moment when backends send the head of a stream: `slot` or `first_token`.
    pub stream_head: &'static str,
    /// True if a request whose backend dies is executed once more (`on_death`).
    pub continues: bool,
}

impl Storm {
    /// Storm of 288 requests for every run of the tests.
    pub fn small(weather: Weather, seed: u64) -> Self {
        Self {
            seed,
            weather,
            clients: 12,
            each: 24,
            tokens: (3, 18),
            ms_per_token: 3.0,
            leaves_within_ms: 60,
            faults: (1, 8),
            hangs_for: "2s",
            top: "",
            stream_head: "slot",
            continues: false,
        }
    }

    /// Storm with 16 clients, short answers and many faults, to check the ledger.
    pub fn large(requests: u64, seed: u64) -> Self {
        Self {
            seed,
            weather: Weather::Foul,
            clients: 16,
            each: requests.div_ceil(16),
            tokens: (1, 8),
            ms_per_token: 0.5,
            leaves_within_ms: 12,
            faults: (5, 60),
            hangs_for: "500ms",
            top: "log.level = \"error\"",
            // Both orders alternate.
            stream_head: if seed.is_multiple_of(2) { "first_token" } else { "slot" },
            continues: seed % 4 < 2,
        }
    }

    /// Returns the configuration of both models, apart from how they are replaced.
    pub fn settings(&self) -> String {
        let deadline = if self.weather == Weather::Foul { self.hangs_for } else { "60s" };
        let on_death = if self.continues { "continue" } else { "error" };
        format!(
            "{}on_death = \"{on_death}\"\nlifecycle.drain_deadline = \"{deadline}\"\n{SETTINGS}",
            disturb::args(1024)
        )
    }

    fn script(&self, setup: &Setup, model: &str) -> Value {
        let mut all = Vec::new();
        for (n, fault) in faults().into_iter().enumerate() {
            for k in 0..self.faults.0 {
                let mut fault = fault.clone();
                fault["body_has"] = json!(format!("fault-{n}-{k}."));
                fault["once"] = json!(setup.home.path().join(format!("once-{model}-{n}-{k}")));
                all.push(fault);
            }
        }
        json!({
            "ms_per_token": self.ms_per_token, "load_ms": 20, "faults": all, "stream_head": self.stream_head,
        })
    }

    async fn start(&self) -> Result<Warden, Trouble> {
        let setup = Setup::new()?
            .top(
                "sensors.interval = \"50ms\"\nlog.children = false\ninternal.lifecycle.failures_told = 1000\n\
                 internal.lifecycle.breaker_failures = 100000",
            )
            .top(self.top);
        let (sequence, overlap) = (self.script(&setup, MODELS[0]), self.script(&setup, MODELS[1]));
        let settings = self.settings();
        let setup = setup.fake(MODELS[0], &sequence, &format!("replace = \"sequential\"\n{settings}"))?;
        let overlapping = format!("replace = \"overlap\"\nreplicas = 2\n{settings}");
        let warden = setup.fake(MODELS[1], &overlap, &overlapping)?.start().await?;
        warden.until_ready(3).await?;
        Ok(warden)
    }

    /// Runs the storm and checks its results.
    ///
    /// # Errors
    /// A result contradicts the ledger, or something was left behind; the error shows the seed.
    pub async fn run(self) -> Result<Report, Trouble> {
        let seed = self.seed;
        self.blow().await.context(format!("storm of seed {seed}"))
    }

    async fn blow(self) -> Result<Report, Trouble> {
        let mut warden = self.start().await?;
        let calm = Arc::new(AtomicBool::new(false));
        let http = warden.http.clone();
        let load = async {
            let mut clients = JoinSet::new();
            for number in 0..self.clients {
                clients.spawn(clients::client(http.clone(), number, self.clone()));
            }
            let all: Vec<Sent> = clients.join_all().await.into_iter().flatten().collect();
            calm.store(true, Ordering::SeqCst);
            all
        };
        let begun = Instant::now();
        let (all, disturbed) = tokio::join!(load, disturb::disturb(&mut warden, &calm, &self));
        let disturbances = disturbed?;
        let took = begun.elapsed();
        let backends = as_good_as_new(&warden).await?;

        let executed = executions(&warden.ledger().lines()?);
        let mut report =
            Report { took, disturbances, processes: warden.ledger().generations()?, ..Report::default() };
        let mut wrong = Vec::new();
        for sent in &all {
            let these = executed.get(&sent.id).map_or(&[][..], Vec::as_slice);
            if let Err(why) = audit(sent, these, self.continues) {
                wrong.push(format!("{} {}: {why}", sent.id, sent.request));
            }
            *report.counts.entry(sent.label()).or_default() += 1;
            if let Ok(Told::Refused { words, .. }) = &sent.told {
                let words = words.split("model `").next().unwrap_or_default();
                *report.refusals.entry(words.chars().take(120).collect()).or_default() += 1;
            }
        }
        let ours: BTreeSet<&String> = all.iter().map(|sent| &sent.id).collect();
        let foreign = executed.keys().filter(|id| !ours.contains(id) && !id.starts_with("after-"));
        wrong.extend(foreign.map(|id| format!("{id}: executed, and nobody asked for it")));
        if !wrong.is_empty() {
            let count = wrong.len();
            wrong.truncate(8);
            return Err(Trouble::new(format!("{report:?}\n{count} contradictions:\n{}", wrong.join("\n"))));
        }
        end(&mut warden, &backends).await.context(format!("{report:?}"))?;
        Ok(report)
    }
}

/// Report on a storm.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of requests by result.
    pub counts: BTreeMap<&'static str, usize>,
    /// Number of refusals by their words.
    pub refusals: BTreeMap<String, usize>,
    /// Number of disturbances by kind.
    pub disturbances: BTreeMap<&'static str, usize>,
    /// Number of processes that executed a request.
    pub processes: usize,
    /// Time from the first request to the last answer.
    pub took: Duration,
}

impl Report {
    /// Number of requests.
    pub fn requests(&self) -> usize {
        self.counts.values().sum()
    }
}

/// Failures are frequent, so backoffs are short.
const SETTINGS: &str = "lifecycle.backoff_first = \"10ms\"\nlifecycle.backoff_cap = \"30ms\"\n\
    lifecycle.probe_interval = \"100ms\"\n\
    lifecycle.probe_timeout = \"200ms\"\nlifecycle.suspect_timeout = \"300ms\"\n\
    lifecycle.stop_grace = \"1s\"\n\
    policy.max_requests = 40\npolicy.jitter = 0.5\npolicy.quiet_for = \"1ms\"\npolicy.quiet_within = \"50ms\"\n\
    policy.min_interval = \"300ms\"\npolicy.min_interval_hard = \"300ms\"\n";

/// Faults of single requests, each a number of times per model, at requests that contain its word.
fn faults() -> Vec<Value> {
    vec![
        json!({"do": "crash", "signal": 9}),
        json!({"do": "crash", "signal": 11, "after_tokens": 2}),
        json!({"do": "close"}),
        json!({"do": "close", "after_tokens": 2}),
        json!({"do": "stall", "ms": 300, "after_tokens": 2}),
        json!({"do": "error", "after_tokens": 2}),
        json!({"do": "cut_chunk", "after_tokens": 2}),
        json!({"do": "bad_status_line"}),
        json!({"do": "hang", "silent_health": true, "after_tokens": 1}),
        json!({"do": "refuse", "after_tokens": 1}),
        json!({"do": "two_lengths"}),
    ]
}

/// Checks that every model answers, nothing runs, and no process or socket is left over.
async fn as_good_as_new(warden: &Warden) -> Result<Vec<ProcessId>, Trouble> {
    until_well(warden).await?;
    for model in MODELS {
        for n in 0..6_u32 {
            let request = chat(&format!("after-{model}-{n}"), model, "hi", 4, n.is_multiple_of(2));
            let told = one(&warden.http, &request, None).await?;
            if !matches!(told, Told::Whole(_)) {
                return Err(Trouble::new(format!("after the storm: {told:?}")));
            }
        }
    }
    until_still(warden).await?;
    // A policy may recycle at any moment, and then one process and one socket more are right for a while.
    let mut seen = String::new();
    let good = wait_for("no socket and no ended child too many", SOON, async || {
        let backends = warden.until_ready(3).await.ok()?;
        let (zombies, sockets) = (zombies(warden.kid.pid()), sockets(warden.home().path().join("run")));
        seen = format!("{zombies} ended children are not reaped; sockets {sockets:?}");
        (zombies == 0 && sockets.len() == backends.len()).then_some(backends)
    });
    let good = good.await;
    good.context(seen)
}

/// A process that was just killed may still take a request, and only probes find one that hangs. Earlier
/// requests would rightly fail with that process.
async fn until_well(warden: &Warden) -> Result<(), Trouble> {
    wait_until("every process answers for itself", SOON, async || {
        // A drained model has no process until the next request.
        for backend in warden.backends() {
            let Some(http) = backend.http() else { return false };
            let asked = timeout(Duration::from_secs(1), http.get("/health")).await;
            if !matches!(asked, Ok(Ok(answer)) if answer.status == StatusCode::OK) {
                return false;
            }
        }
        true
    })
    .await
}

async fn end(warden: &mut Warden, backends: &[ProcessId]) -> Result<(), Trouble> {
    let code = warden.terminate(SOON).await?;
    Warden::until_gone(backends, Duration::from_secs(2)).await?;
    let left = sockets(warden.home().path().join("run"));
    let panicked = warden.kid.output().contains("panicked");
    if code != 0 || !left.is_empty() || panicked {
        let what = format!("exit code {code}, left behind {left:?}, a panic: {panicked}");
        return Err(Trouble::new(what));
    }
    Ok(())
}

async fn until_still(warden: &Warden) -> Result<(), Trouble> {
    wait_until("nothing runs and nobody waits", SOON, async || {
        for model in MODELS {
            let Ok(status) = warden.status(model).await else { return false };
            let backends = status["backends"].as_array().cloned().unwrap_or_default();
            let still = backends.iter().all(|one| one["in_flight"] == 0 && one["phase"] == "ready");
            if status["waiting"] != 0 || !still || status["state"] != "loaded" {
                return false;
            }
        }
        true
    })
    .await
}

/// Returns the sockets in the runtime directory.
pub fn sockets(directory: PathBuf) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut todo = vec![directory];
    while let Some(directory) = todo.pop() {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => todo.push(entry.path()),
                Ok(kind) if kind.is_file() => {}
                _ => found.push(entry.path()),
            }
        }
    }
    found
}

/// Number of children that have ended and were not reaped.
pub fn zombies(pid: i32) -> usize {
    let Ok(all) = procfs::process::all_processes() else { return 0 };
    let stats = all.flatten().filter_map(|process| process.stat().ok());
    stats.filter(|stat| stat.ppid == pid && stat.state == 'Z').count()
}
