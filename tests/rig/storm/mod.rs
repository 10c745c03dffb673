//! Everything at once, and then the books: many clients, some of whom leave, while backends are killed, crash, hang, are
//! restarted, drained, recycled and reconfigured. What the clients were told must agree with what was executed.
//!
//! ```text
//!   clients --requests--> llama-warden --> three fake-llamas --> ledger of executions
//!      |                       ^                 ^                    |
//!      |                  restart, drain,    kill, faults             |
//!      |                  reload, change                              |
//!      `--- what each was told -----------> books <-------------------'
//! ```
//!
//! A storm is drawn from a seed, which a failure shows. The order in which things meet still differs from run to run, so
//! nothing is claimed that depends on it.

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

/// The longest that any request may take, with everything that happens to it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The models: two replicas that are replaced by overlap, and one that is replaced in sequence.
const MODELS: [&str; 2] = ["sequence", "overlap"];

/// What blows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weather {
    /// What operators and policies do: nothing may fail.
    Fair,
    /// Backends are killed and misbehave as well.
    Foul,
}

/// A storm to be.
#[derive(Clone, Debug)]
pub struct Storm {
    /// What it is drawn from.
    pub seed: u64,
    /// What blows.
    pub weather: Weather,
    /// Clients at a time.
    pub clients: u64,
    /// Requests of each, one after the other.
    pub each: u64,
    /// Fewest tokens of an answer, and how many more it may have.
    pub tokens: (u64, u64),
    /// Time for each.
    pub ms_per_token: f64,
    /// A client that leaves does so within this time.
    pub leaves_within_ms: u64,
    /// How often each fault may happen to each model, and one in how many requests asks for one.
    pub faults: (u64, u64),
    /// What hangs is cut after this, in foul weather; what runs well is never cut.
    pub hangs_for: &'static str,
    /// More lines of configuration, before the models.
    pub top: &'static str,
    /// When the backends send the head of a stream: `slot` or `first_token`.
    pub stream_head: &'static str,
    /// Whether a request whose backend dies is executed once more (`on_death`).
    pub continues: bool,
}

impl Storm {
    /// One for every run of the tests: 288 requests.
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

    /// The ledger check: 16 clients, short answers, and many faults.
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
            // Both orders in turn.
            stream_head: if seed.is_multiple_of(2) { "first_token" } else { "slot" },
            continues: seed % 4 < 2,
        }
    }

    /// The lines of both models, apart from how they are replaced.
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

    /// Lets it blow over, and checks the books.
    ///
    /// # Errors
    /// The seed, what was done, and the first contradictions; or what was left behind.
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

/// How it went.
#[derive(Debug, Default)]
pub struct Report {
    /// How many requests ended how.
    pub counts: BTreeMap<&'static str, usize>,
    /// The words of refusals.
    pub refusals: BTreeMap<String, usize>,
    /// What was done to the backends.
    pub disturbances: BTreeMap<&'static str, usize>,
    /// How many processes executed something.
    pub processes: usize,
    /// From the first request to the last answer.
    pub took: Duration,
}

impl Report {
    /// All requests.
    pub fn requests(&self) -> usize {
        self.counts.values().sum()
    }
}

/// Things fail often here and are forgiven fast.
const SETTINGS: &str = "lifecycle.backoff_first = \"10ms\"\nlifecycle.backoff_cap = \"30ms\"\n\
    lifecycle.probe_interval = \"100ms\"\n\
    lifecycle.probe_timeout = \"200ms\"\nlifecycle.suspect_timeout = \"300ms\"\n\
    lifecycle.stop_grace = \"1s\"\n\
    policy.max_requests = 40\npolicy.jitter = 0.5\npolicy.quiet_for = \"1ms\"\npolicy.quiet_within = \"50ms\"\n\
    policy.min_interval = \"300ms\"\npolicy.min_interval_hard = \"300ms\"\n";

/// What goes wrong with single requests: each a number of times per model, at requests that have its word.
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

/// After the storm every model answers, nothing runs, and no process or socket is left over.
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

/// Who was killed last may still take a request, and who hangs is found by its probes only: what is asked before that shares
/// their fate, and is rightly told so.
async fn until_well(warden: &Warden) -> Result<(), Trouble> {
    wait_until("every process answers for itself", SOON, async || {
        // A model that was drained has none until it is asked for.
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

/// The sockets in the runtime directory.
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

/// Children that have ended and were not reaped.
pub fn zombies(pid: i32) -> usize {
    let Ok(all) = procfs::process::all_processes() else { return 0 };
    let stats = all.flatten().filter_map(|process| process.stat().ok());
    stats.filter(|stat| stat.ppid == pid && stat.state == 'Z').count()
}
