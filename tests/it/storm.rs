//! Everything at once, and then the books: many clients, some of whom leave, while backends are killed, crash, hang, are
//! restarted, drained, recycled and reconfigured. What the clients were told must agree with what was executed.
//!
//! The storm is drawn from a seed, which a failure shows; `WARDEN_STORM_SEED` brings the same one again. The order in
//! which things meet still differs from run to run, so nothing is asserted that depends on it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use warden_rig::ledger::{End, Line};
use warden_rig::process::ProcessId;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Answer, Context as _, Fake, Http, Outcome, Trouble, Warden, wait_until};

/// Clients at a time.
const CLIENTS: u64 = 12;
/// Requests of each, one after the other.
const EACH: u64 = 24;
/// The longest that any request may take, with everything that happens to it.
const PATIENCE: Duration = Duration::from_secs(60);
/// A process killed this soon after a request began may not have told the client's side that it had.
const BLINK_MS: u64 = 100;

/// Things fail often here and are forgiven fast.
const SETTINGS: &str = "lifecycle.backoff_first = \"10ms\"\nlifecycle.backoff_cap = \"30ms\"\n\
    lifecycle.breaker_failures = 1000\nlifecycle.probe_interval = \"100ms\"\n\
    lifecycle.probe_timeout = \"200ms\"\nlifecycle.suspect_timeout = \"300ms\"\n\
    lifecycle.stop_grace = \"1s\"\n\
    policy.max_requests = 40\npolicy.jitter = 0.5\npolicy.quiet_for = \"1ms\"\npolicy.quiet_within = \"50ms\"\n\
    policy.min_interval = \"300ms\"\npolicy.min_interval_hard = \"300ms\"\n";

/// What blows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weather {
    /// What operators and policies do: nothing may fail.
    Fair,
    /// Backends are killed and misbehave as well.
    Foul,
}

impl Weather {
    fn settings(self) -> String {
        // What hangs is cut soon; what runs well is never cut.
        let deadline = if self == Self::Foul { "2s" } else { "60s" };
        format!("{}lifecycle.drain_deadline = \"{deadline}\"\n{SETTINGS}", args(1024))
    }
}

/// Small, fast, the same everywhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Less than `sides`.
    fn below(&mut self, sides: u64) -> u64 {
        self.roll() % sides.max(1)
    }
}

/// What goes wrong with single requests: each once per model, at the first request that has its word.
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

fn script(setup: &Setup, model: &str) -> Value {
    let with_word = |(n, mut fault): (usize, Value)| {
        fault["body_has"] = json!(format!("fault-{n}."));
        fault["once"] = json!(setup.home.path().join(format!("once-{model}-{n}")));
        fault
    };
    let faults: Vec<Value> = faults().into_iter().enumerate().map(with_word).collect();
    json!({"ms_per_token": 3, "load_ms": 20, "faults": faults})
}

fn args(context: u32) -> String {
    format!("args = [\"-np\", \"2\", \"--metrics\", \"-c\", \"{context}\"]\n")
}

/// How a request ended for its client.
#[derive(Debug)]
enum Told {
    /// A complete answer.
    Whole(Box<Answer>),
    /// An error in place of an answer, and whether it says that nothing was executed.
    Refused { nothing_ran: bool, words: String },
    /// The answer broke off in a way that can be seen.
    Cut,
    /// Nothing: the client left.
    Left,
}

struct Sent {
    id: String,
    request: Value,
    told: Result<Told, Trouble>,
}

async fn one(http: &Http, request: &Value, leave_after: Option<Duration>) -> Result<Told, Trouble> {
    let whole = async {
        let flow = http.stream(CHAT, request).await.context("no answer at all")?;
        let status = flow.status();
        if !status.is_success() {
            let whole = flow.whole().await?;
            let words = format!("{status} {}", whole.text());
            whole.json()?["error"].as_object().context(format!("an error without `error`: {words}"))?;
            return Ok(Told::Refused { nothing_ran: whole.header("x-warden-executed") == "no", words });
        }
        let Ok(whole) = flow.whole().await else { return Ok(Told::Cut) };
        let answer = whole.answer()?;
        match answer.is_whole() {
            true => Ok(Told::Whole(Box::new(answer))),
            false if answer.error.is_some() => Ok(Told::Cut),
            false => Err(Trouble::new(format!("ended as if whole, and is not: {answer:?}"))),
        }
    };
    match leave_after {
        Some(after) => timeout(after, whole).await.unwrap_or(Ok(Told::Left)),
        None => timeout(PATIENCE, whole).await.context("answered in time")?,
    }
}

async fn client(http: Http, number: u64, seed: u64, weather: Weather) -> Vec<Sent> {
    let mut dice = Dice(seed ^ (number << 32));
    let mut all = Vec::new();
    for n in 0..EACH {
        let id = format!("c{number}-{n}");
        let model = if dice.below(3) == 0 { "sequence" } else { "overlap" };
        let fault = dice.below(8) == 0 && weather == Weather::Foul;
        let words = if fault { format!("fault-{}.", dice.below(faults().len() as u64)) } else { id.clone() };
        let request = chat(&id, model, &words, 3 + dice.below(18), dice.below(2) == 0);
        let leaves = (dice.below(7) == 0).then(|| Duration::from_millis(dice.below(60)));
        let told = one(&http, &request, leaves).await;
        all.push(Sent { id, request, told });
    }
    all
}

/// Disturbs until told to stop; returns the process ids that were killed from outside, and when, and what was done.
async fn disturb(
    warden: &mut Warden,
    calm: &AtomicBool,
    seed: u64,
    weather: Weather,
) -> Result<(BTreeSet<i32>, Vec<&'static str>), Trouble> {
    let mut dice = Dice(seed);
    let (mut killed, mut done) = (BTreeSet::new(), Vec::new());
    let mut contexts = [1024, 1024];
    let mut orders = JoinSet::new();
    while !calm.load(Ordering::SeqCst) {
        sleep(Duration::from_millis(20 + dice.below(150))).await;
        let model = if dice.below(2) == 0 { "sequence" } else { "overlap" };
        let order = |orders: &mut JoinSet<_>, what: &str| {
            let (admin, path) = (warden.admin(), format!("/models/{model}/{what}"));
            orders.spawn(async move {
                let answer = timeout(PATIENCE, admin.post(&path, &json!({}))).await;
                answer.context(format!("{path} ends"))?.map(drop)
            });
        };
        done.push(match dice.below(8) {
            0 | 1 if weather == Weather::Foul => {
                let backends = warden.backends();
                let chosen = dice.below(backends.len() as u64);
                if let Some(backend) = usize::try_from(chosen).ok().and_then(|n| backends.get(n)) {
                    killed.insert(backend.pid);
                    backend.signal(Signal::KILL);
                }
                "kill"
            }
            0..=3 => {
                order(&mut orders, "restart");
                "restart"
            }
            4 => {
                order(&mut orders, "drain");
                "drain"
            }
            5 => {
                warden.kid.signal(Signal::HUP);
                "reload"
            }
            6 => {
                let which = usize::from(model == "overlap");
                contexts[which] = 3072 - contexts[which];
                let config = configuration(&warden.setup, contexts);
                warden.reload(&config)?;
                "change"
            }
            _ => {
                let ran = warden.cli(&["restart", model]).await?;
                if !matches!(ran.code, 0 | 1) || ran.all().contains("panicked") {
                    return Err(Trouble::new(format!("restart: {ran:?}")));
                }
                "command"
            }
        });
    }
    while let Some(ended) = orders.join_next().await {
        ended??;
    }
    Ok((killed, done))
}

fn configuration(setup: &Setup, contexts: [u32; 2]) -> String {
    let mut text = String::new();
    for (n, part) in setup.config().split(&args(1024)).enumerate() {
        if n > 0 {
            text.push_str(&args(contexts[n - 1]));
        }
        text.push_str(part);
    }
    text
}

/// Executions of each request that count: one that a kill from outside overtook before the head of its stream was out
/// is none that anybody could have known of.
fn executions(lines: &[Line], killed: &BTreeSet<i32>) -> BTreeMap<String, Vec<(End, bool)>> {
    let last = |pid: i32| lines.iter().filter(|line| line.pid == pid).map(|line| line.at_ms).max();
    let mut all: BTreeMap<String, Vec<(End, bool)>> = BTreeMap::new();
    for line in lines.iter().filter(|line| line.event == "begun") {
        let same = |other: &&Line| (other.pid, other.ordinal) == (line.pid, line.ordinal);
        let end = lines.iter().filter(same).find_map(|other| match other.event.as_str() {
            "finished" => Some(End::Finished),
            "cancelled" => Some(End::Cancelled),
            _ => None,
        });
        let end = end.unwrap_or(End::Open);
        let blink = end == End::Open
            && killed.contains(&line.pid)
            && last(line.pid).is_some_and(|last| line.at_ms + BLINK_MS >= last);
        all.entry(line.id.clone()).or_default().push((end, blink));
    }
    all
}

/// Compares what one client was told with what was executed.
fn audit(sent: &Sent, ends: &[(End, bool)]) -> Result<(), String> {
    let known = ends.iter().filter(|(_, blink)| !blink).count();
    let finished = ends.iter().filter(|(end, _)| *end == End::Finished).count();
    let told = sent.told.as_ref().map_err(|why| format!("{why:?}"))?;
    let streams = sent.request["stream"] == json!(true);
    // What nobody may send again is counted without leniency.
    let all = if streams { known } else { ends.len() };
    match told {
        Told::Whole(_) if all == 1 && finished == 1 => Ok(()),
        Told::Refused { nothing_ran: true, .. } if all == 0 => Ok(()),
        Told::Refused { nothing_ran: false, .. } | Told::Cut | Told::Left if all <= 1 => Ok(()),
        other => Err(format!("told {other:?}, executed {ends:?}")),
    }
}

async fn until_still(warden: &Warden) -> Result<Vec<ProcessId>, Trouble> {
    wait_until("nothing runs and nobody waits", SOON, async || {
        for model in ["overlap", "sequence"] {
            let Ok(status) = warden.status(model).await else { return false };
            let backends = status["backends"].as_array().cloned().unwrap_or_default();
            let still = backends.iter().all(|one| one["in_flight"] == 0 && one["phase"] == "ready");
            if status["waiting"] != 0 || !still || status["state"] != "loaded" {
                return false;
            }
        }
        true
    })
    .await?;
    warden.until_ready(3).await
}

/// The sockets in the runtime directory.
fn sockets(directory: PathBuf) -> Vec<PathBuf> {
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
fn zombies(pid: i32) -> usize {
    let Ok(all) = procfs::process::all_processes() else { return 0 };
    let stats = all.flatten().filter_map(|process| process.stat().ok());
    stats.filter(|stat| stat.ppid == pid && stat.state == 'Z').count()
}

fn open_files(pid: i32) -> Result<usize, Trouble> {
    Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

async fn storm(weather: Weather) -> Outcome {
    let seed = std::env::var("WARDEN_STORM_SEED").ok().and_then(|text| text.parse().ok());
    let seed: u64 = seed.unwrap_or(20_260_801);
    let setup = Setup::new()?
        .top("sensors.interval = \"50ms\"\nlog.children = false\ndefaults.lifecycle.failures_told = 1000");
    let (sequence, overlap) = (script(&setup, "sequence"), script(&setup, "overlap"));
    let settings = weather.settings();
    let setup = setup.fake("sequence", &sequence, &format!("replace = \"sequential\"\n{settings}"))?;
    let setup =
        setup.fake("overlap", &overlap, &format!("replace = \"overlap\"\nreplicas = 2\n{settings}"))?;
    let mut warden = setup.start().await?;
    warden.until_ready(3).await?;

    let calm = Arc::new(AtomicBool::new(false));
    let http = warden.http.clone();
    let load = async {
        let mut clients = JoinSet::new();
        for number in 0..CLIENTS {
            clients.spawn(client(http.clone(), number, seed, weather));
        }
        let all = clients.join_all().await.into_iter().flatten().collect::<Vec<_>>();
        calm.store(true, Ordering::SeqCst);
        all
    };
    let begun = Instant::now();
    let (all, disturbed) = tokio::join!(load, disturb(&mut warden, &calm, seed, weather));
    let (killed, done) = disturbed?;

    // The fleet is as good as new.
    for model in ["overlap", "sequence"] {
        for n in 0..6_u32 {
            let request = chat(&format!("after-{model}-{n}"), model, "hi", 4, n.is_multiple_of(2));
            let told = one(&warden.http, &request, None).await?;
            assert!(matches!(told, Told::Whole(_)), "{told:?}");
        }
    }
    let backends = until_still(&warden).await?;
    assert_eq!(zombies(warden.kid.pid()), 0, "ended children are not reaped");
    let run = warden.home().path().join("run");
    assert_eq!(sockets(run.clone()).len(), backends.len(), "sockets: {:?}", sockets(run.clone()));

    // The books.
    let lines = warden.ledger().lines()?;
    let executed = executions(&lines, &killed);
    let none = Vec::new();
    let (mut wrong, mut counts) = (Vec::new(), BTreeMap::<&str, u32>::new());
    let undisturbed = Fake::start(&json!({}), &["-np", "4"]).await?;
    for sent in &all {
        if let Err(why) = audit(sent, executed.get(&sent.id).unwrap_or(&none)) {
            wrong.push(format!("{} {}: {why}", sent.id, sent.request));
        }
        let label = match &sent.told {
            Ok(Told::Whole(answer)) => {
                let wanted = undisturbed.http.post(CHAT, &sent.request).await?.answer()?;
                if (&wanted.text, &wanted.finish) != (&answer.text, &answer.finish) {
                    wrong.push(format!("{}: {:?} instead of {:?}", sent.id, answer.text, wanted.text));
                }
                "whole"
            }
            Ok(Told::Refused { nothing_ran: true, .. }) => "refused",
            Ok(Told::Refused { .. }) => "refused, maybe executed",
            Ok(Told::Cut) => "cut",
            Ok(Told::Left) => "left",
            Err(_) => "wrong",
        };
        *counts.entry(label).or_default() += 1;
    }
    let refused = all.iter().filter_map(|sent| match &sent.told {
        Ok(Told::Refused { words, nothing_ran }) => {
            Some(format!("{} {nothing_ran} {}", sent.id, words.chars().take(160).collect::<String>()))
        }
        _ => None,
    });
    let summary = format!(
        "{weather:?}, seed {seed}: {counts:?} by {} processes, {} disturbances {done:?} in {:?}; {:#?}",
        warden.ledger().generations()?,
        done.len(),
        begun.elapsed(),
        refused.collect::<Vec<_>>()
    );
    show(&summary);
    assert!(wrong.is_empty(), "{summary}\n{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(counts.get("whole").copied().unwrap_or(0) * 2 > counts.values().sum(), "{summary}");

    if weather == Weather::Fair {
        let failed = counts.keys().find(|label| !matches!(**label, "whole" | "left"));
        assert_eq!(failed, None, "{summary}");
    }

    // The end.
    assert_eq!(warden.terminate(SOON).await?, 0);
    Warden::until_gone(&backends, Duration::from_secs(2)).await?;
    assert!(sockets(run.clone()).is_empty(), "left behind: {:?}", sockets(run));
    assert!(!warden.kid.output().contains("panicked"), "a panic in the log");
    Ok(())
}

/// Prints for whoever reads a failed test.
#[expect(clippy::print_stderr, reason = "captured by the test harness, which shows it with a failure only")]
fn show(text: &str) {
    eprintln!("{text}");
}

#[tokio::test]
async fn in_a_storm_every_request_is_answered_and_what_was_told_is_what_was_executed() -> Outcome {
    storm(Weather::Foul).await
}

#[tokio::test]
async fn restarts_drains_recycles_and_reloads_all_at_once_fail_no_request() -> Outcome {
    storm(Weather::Fair).await
}

#[tokio::test]
async fn many_restarts_and_kills_leave_no_file_no_socket_and_no_zombie_behind() -> Outcome {
    let setup = Setup::new()?.top("log.children = false\ndefaults.lifecycle.failures_told = 1000");
    let toml = format!("replace = \"overlap\"\n{}", Weather::Foul.settings());
    let mut warden = setup.fake("m", &json!({}), &toml)?.start().await?;
    warden.until_ready(1).await?;
    let admin = warden.admin();
    let round = async |warden: &Warden, n: u32| {
        if n.is_multiple_of(5) {
            for backend in warden.backends() {
                backend.signal(Signal::KILL);
            }
        } else {
            admin.post("/models/m/restart", &json!({})).await?;
        }
        let answer =
            warden.http.post(CHAT, &chat(&format!("r-{n}"), "m", "hi", 2, n.is_multiple_of(2))).await?;
        // A kill may be noticed only by the next request, which then has been sent.
        if answer.status.is_success() || n.is_multiple_of(5) {
            Ok(())
        } else {
            Err(Trouble::new(answer.text()))
        }
    };
    for n in 0..10 {
        round(&warden, n).await?;
    }
    warden.until_ready(1).await?;
    let before = open_files(warden.kid.pid())?;
    for n in 10..60 {
        round(&warden, n).await?;
    }
    warden.until_ready(1).await?;
    wait_until("as few files are open as before", SOON, async || {
        open_files(warden.kid.pid()).is_ok_and(|now| now <= before + 4)
    })
    .await
    .context(format!("before: {before}, now: {:?}", open_files(warden.kid.pid())))?;
    assert_eq!(zombies(warden.kid.pid()), 0, "ended children are not reaped");
    assert_eq!(sockets(warden.home().path().join("run")).len(), 1);
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}
