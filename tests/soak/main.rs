//! Soak: one llama-warden with six models for any time, with all events that happen in a year.
//!
//! ```text
//!   clients ──requests──> llama-warden ──> fake-llamas, one of which leaks ──> ledger of executions
//!      │                    ^      │ ^           ^                                   │
//!      │        upgrade, reload,   │ restart,   kill                                 │
//!      │        restart of it all  │ drain                                           │
//!      │                           └─ readings: memory, files, threads ──> our own detector
//!      └── what each was told ──────────────────────────────────────────> books <────┘
//! ```
//!
//! One model has trained weights on a real llama-server, if available; a client checks its answers for
//! sentences.
//!
//! No request fails, and none is executed twice unless its server was killed. llama-warden's own memory is
//! steady by its own detector (`policy replay`). Its events and its ledger account for each process, each
//! replacement and each kill. Its socket is held as by systemd, so that a restart refuses no client.
//!
//! ```text
//! WARDEN_SOAK_SECONDS=7200 cargo test --profile release -p warden-tests --locked --test soak -- --nocapture
//! ```
//!
//! | variable | default | |
//! |---|---|---|
//! | `WARDEN_SOAK_SECONDS` | 60 | time for which clients send requests |
//! | `WARDEN_SOAK_SEED` | any | seed of the disturbances; the order of events still differs |
//! | `WARDEN_SOAK_PAUSE_MS` | 2500 | mean pause between two disturbances |
//! | `WARDEN_SOAK_CLIENTS` | 10 | concurrent clients |
//! | `WARDEN_SOAK_ONE` | 0 | 1: one program serves to the end, without upgrades and restarts |
//! | `WARDEN_SOAK_KEEP` | none | folder for the recordings |

mod books;
mod clients;
mod disturb;
mod instance;
mod judge;
mod own;
mod reader;
mod readings;

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use warden_rig::dice::Dice;
use warden_rig::warden::SOON;
use warden_rig::{Context as _, Outcome, Trouble, binaries, real_weights, wait_until};

use books::Books;
use clients::{Asked, Progress};
use instance::Instance;
use readings::Readings;

#[derive(Clone, Debug)]
struct Soak {
    length: Duration,
    seed: u64,
    pause_ms: u64,
    clients: u64,
    /// True if one program serves from beginning to end.
    one: bool,
    keep: Option<PathBuf>,
}

impl Soak {
    fn told() -> Result<Self, Trouble> {
        let number = |name: &str, default: u64| match std::env::var(name) {
            Ok(text) => text.parse().context(format!("{name}={text}")),
            Err(_) => Ok(default),
        };
        let any = RandomState::new().build_hasher().finish();
        Ok(Self {
            length: Duration::from_secs(number("WARDEN_SOAK_SECONDS", 60)?),
            seed: number("WARDEN_SOAK_SEED", any)?,
            pause_ms: number("WARDEN_SOAK_PAUSE_MS", 2500)?,
            clients: number("WARDEN_SOAK_CLIENTS", 10)?,
            one: number("WARDEN_SOAK_ONE", 0)? > 0,
            keep: std::env::var_os("WARDEN_SOAK_KEEP").map(PathBuf::from),
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn under_everything_that_happens_nothing_fails_and_nothing_grows() -> Outcome {
    let soak = Soak::told()?;
    binaries::llama_warden()?;
    binaries::fake_llama()?;
    say(&format!("{soak:?}"));
    let seed = soak.seed;
    run(soak).await.context(format!("WARDEN_SOAK_SEED={seed}"))
}

async fn run(soak: Soak) -> Outcome {
    let weights = real_weights::smollm2().await?;
    let mut instance = Instance::start(weights.as_deref()).await?;
    let mut readings = Readings::new(instance.warden().home().path().join("readings"), soak.one)?;
    let blown = blow(&mut instance, &mut readings, &soak).await;
    if let Some(keep) = &soak.keep {
        readings.keep(keep)?;
        let home = instance.warden().home().path();
        for file in [
            "ledger.jsonl",
            "warden.log",
            "state/llama-warden/events.jsonl",
            "state/llama-warden/ledger.jsonl",
        ] {
            // After an early failure some files are missing.
            let _copied = std::fs::copy(home.join(file), keep.join(file.replace('/', "-")));
        }
    }
    let killed = blown?;
    instance.end().await?;
    own::audit(&instance.warden().home().path().join("state/llama-warden"), &killed)
}

/// Runs the soak; returns the PIDs of killed processes.
async fn blow(instance: &mut Instance, readings: &mut Readings, soak: &Soak) -> Result<Vec<i32>, Trouble> {
    let books = Books::of(&instance.warden().ledger());
    let progress = Arc::new(Progress::new(soak.clients + u64::from(instance.has_trained())));
    let (ended, results) = mpsc::unbounded_channel();
    let mut asking = JoinSet::new();
    for number in 0..soak.clients {
        let dice = Dice::new(soak.seed ^ (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let client = Asked::new(number, instance.http(), progress.clone(), ended.clone());
        asking.spawn(client.ask(dice));
    }
    drop(ended);
    let mut reading = JoinSet::new();
    if instance.has_trained() {
        reading.spawn(reader::read_sentences(soak.clients, instance.http(), progress.clone()));
    }
    let until = Instant::now() + soak.length;
    let mut audit = JoinSet::new();
    audit.spawn(books.keep(results));
    let done = disturb::disturb(instance, soak, &progress, readings, until).await;
    progress.end();
    asking.join_all().await;
    let sentences = match reading.join_next().await {
        Some(read) => read?.context("the model with trained weights")?,
        None => 0,
    };
    let account = audit.join_next().await.context("the books")???;
    let counts = done.as_ref().map(|done| &done.counts);
    say(&format!("{}; {sentences} sentences; {counts:?}", account.words()));
    // Report on the memory even if the executions show a problem.
    let steady = judged(instance, readings, &progress).await;
    if let Some(problem) = account.problem() {
        return Err(Trouble::new(format!("{problem}; {counts:?}")));
    }
    let done = done?;
    steady?;
    if instance.has_trained() && sentences == 0 {
        return Err(Trouble::new("no sentence was read"));
    }
    Ok(done.killed)
}

async fn judged(instance: &Instance, readings: &mut Readings, progress: &Progress) -> Outcome {
    still(instance).await?;
    readings.take(instance, progress);
    readings.files_and_threads_are_steady()?;
    judge::judge(instance, readings).await
}

/// Waits until no request runs, and old programs have ended.
async fn still(instance: &Instance) -> Outcome {
    let warden = instance.warden();
    wait_until("nothing runs, and one program serves", SOON, async || {
        let Ok(Ok(status)) = warden.admin().get("/status").await.map(|answer| answer.json()) else {
            return false;
        };
        let models = status["fleet"]["models"].as_array().cloned().unwrap_or_default();
        let running: u64 = models
            .iter()
            .flat_map(|model| model["backends"].as_array().cloned().unwrap_or_default())
            .filter_map(|one| one["in_flight"].as_u64())
            .sum();
        running == 0 && instance.programs().len() <= 2
    })
    .await
}

#[derive(Debug, Default)]
struct Done {
    counts: BTreeMap<&'static str, usize>,
    killed: Vec<i32>,
}

#[expect(clippy::print_stderr, reason = "the seed and figures are what a run is for")]
fn say(line: &str) {
    eprintln!("{line}");
}
