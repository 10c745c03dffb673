//! Asks the instance, beside the screen: pictures every second, events as they come, the log that is looked at, and actions. An instance
//! that is frozen, gone or another one than before holds nothing up; it is asked and looked for again.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::tz::TimeZone;
use reqwest::Method;
use serde::de::IgnoredAny;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::task::TaskTracker;
use warden_supervisor::{Event, LogLine, ReclaimEntry};

use super::input::{Action, Input};
use super::look::Tone;
use super::picture::Picture;
use super::state::EVENTS;
use super::stored::{Span, Stored};
use super::text::tame;
use super::told;
use crate::admin::answer::Status;
use crate::admin::client::Client;
use crate::cli::control::InstanceArgs;
use crate::exit::Failure;
use crate::series::answer::MemoryData;
use crate::sync::lock;

/// What waits to be shown, at most. Lines of a log that find no room are counted instead.
const WAITING: usize = 1024;
/// Events that are known, so that none is told twice when the connection was broken.
const KNOWN: usize = 5000;
/// Points of what was kept: those that a wide terminal has columns for, twice.
const COLUMNS: u32 = 360;
/// Actions that run at a time.
const ACTIONS: usize = 16;

/// When the screen began, by both clocks, and where its viewer lives.
#[derive(Clone)]
pub(super) struct Began {
    pub(super) at: Instant,
    /// Seconds since 1970.
    pub(super) unix: i64,
    pub(super) zone: TimeZone,
}

impl Began {
    pub(super) fn now() -> Self {
        Self { at: Instant::now(), unix: crate::clock::now().as_second(), zone: TimeZone::system() }
    }

    pub(super) fn since(&self) -> Duration {
        self.at.elapsed()
    }
}

/// Whoever asks.
pub(super) struct Feed {
    out: mpsc::Sender<Input>,
    client: watch::Receiver<Arc<Client>>,
    tasks: TaskTracker,
    running: usize,
    log: Option<AbortHandle>,
    past: Option<AbortHandle>,
    /// When the screen began, in seconds since 1970.
    began: i64,
}

impl Feed {
    /// Begins to ask; what comes is received from the other end.
    pub(super) fn begin(
        args: InstanceArgs,
        client: Client,
        every: Duration,
        began: &Began,
    ) -> (Self, mpsc::Receiver<Input>) {
        let (out, receiver) = mpsc::channel(WAITING);
        let (found, client) = watch::channel(Arc::new(client));
        let tasks = TaskTracker::new();
        tasks.spawn(pictures(args, found, every, began.clone(), out.clone()));
        tasks.spawn(events(client.clone(), every, began.clone(), out.clone()));
        (Self { out, client, tasks, running: 0, log: None, past: None, began: began.unix }, receiver)
    }

    fn current(&self) -> Arc<Client> {
        Arc::clone(&self.client.borrow())
    }

    /// Begins an action; what comes of it is told.
    pub(super) fn act(&mut self, action: Action, model: String) -> Result<(), &'static str> {
        if self.running >= ACTIONS {
            return Err("too much runs at a time: wait until one is done");
        }
        self.running += 1;
        let (client, out) = (self.current(), self.out.clone());
        self.tasks.spawn(async move {
            let (words, tone) = match act(&client, action, &model).await {
                Ok(words) => (words, Tone::Good),
                Err(failure) => (failure.to_string(), Tone::Bad),
            };
            let line = tame(&format!("{} of {model}: {words}", action.route()));
            drop(out.send(Input::Done(line, tone)).await);
        });
        Ok(())
    }

    /// One of them is done.
    pub(super) fn done(&mut self) {
        self.running = self.running.saturating_sub(1);
    }

    /// Begins to follow a log, and leaves the one before.
    pub(super) fn follow(&mut self, model: String) {
        self.unfollow();
        self.log = Some(self.tasks.spawn(log(self.current(), model, self.out.clone())).abort_handle());
    }

    /// Begins to ask what was kept of a model's memories, and leaves what was asked before.
    pub(super) fn recall(&mut self, model: String, span: Span) {
        if let Some(past) = self.past.take() {
            past.abort();
        }
        if let Some(seconds) = span.seconds() {
            let asking = past(self.client.clone(), model, span, seconds, self.began, self.out.clone());
            self.past = Some(self.tasks.spawn(asking).abort_handle());
        }
    }

    pub(super) fn unfollow(&mut self) {
        if let Some(log) = self.log.take() {
            log.abort();
        }
    }
}

/// How long an answer may take: that of a thousand models takes a fraction of it, and a frozen instance gives none.
const PATIENCE: Duration = Duration::from_secs(5);

/// One picture, for whoever needs no more.
///
/// # Errors
/// The instance does not answer.
pub(super) async fn picture(client: &Client) -> Result<Picture, Failure> {
    match timeout(PATIENCE, client.json::<Status>(Method::GET, &["status"])).await {
        Ok(answer) => answer.map(|status| Picture::of(&status)),
        Err(_late) => {
            let seconds = PATIENCE.as_secs();
            Err(Failure::failed(format!("no answer within {seconds} s: it is frozen, or has no time")))
        }
    }
}

async fn pictures(
    args: InstanceArgs,
    found: watch::Sender<Arc<Client>>,
    every: Duration,
    began: Began,
    out: mpsc::Sender<Input>,
) {
    let mut clock = interval(every);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        clock.tick().await;
        let client = Arc::clone(&found.borrow());
        let input = match picture(&client).await {
            Ok(picture) => Input::Picture(began.since(), Box::new(picture)),
            Err(failure) => {
                // The next one may listen elsewhere.
                let why = match args.client() {
                    Ok(other) => {
                        found.send_replace(Arc::new(other));
                        failure.to_string()
                    }
                    Err(gone) => gone.to_string(),
                };
                Input::Silent(began.since(), tame(why.lines().next().unwrap_or_default()))
            }
        };
        if out.send(input).await.is_err() {
            return;
        }
    }
}

async fn events(
    client: watch::Receiver<Arc<Client>>,
    every: Duration,
    began: Began,
    out: mpsc::Sender<Input>,
) {
    let mut known: HashSet<(u64, String)> = HashSet::new();
    loop {
        let current = Arc::clone(&client.borrow());
        // An instance that has run for long begins with thousands at once: the newest stay.
        let (kept, come) = (Mutex::new(VecDeque::new()), Notify::new());
        let follow = current.lines(&["events"], &["follow"], |_line, event: Option<Event>| {
            let mut kept = lock(&kept);
            if kept.len() >= EVENTS {
                kept.pop_front();
            }
            kept.extend(event);
            come.notify_one();
            Ok(())
        });
        tokio::pin!(follow);
        let mut ended = false;
        while !ended {
            tokio::select! {
                () = come.notified() => {}
                _broken = &mut follow => ended = true,
            }
            let new = std::mem::take(&mut *lock(&kept));
            for event in new {
                if known.len() >= KNOWN {
                    known.clear();
                }
                let is_new = known.insert((event.id, event.at.clone()));
                let told = || Input::Told(told::told(&event, began.unix, &began.zone));
                if is_new && out.send(told()).await.is_err() {
                    return;
                }
            }
        }
        tokio::time::sleep(every).await;
    }
}

async fn log(client: Arc<Client>, model: String, out: mpsc::Sender<Input>) {
    let mut missed = 0;
    let each = |line: &str, log: Option<LogLine>| {
        let text = log.map_or_else(|| line.to_owned(), |log| format!("{} {}", log.generation, log.text));
        if missed > 0 && out.try_send(Input::Missed(missed)).is_ok() {
            missed = 0;
        }
        match out.try_send(Input::Log(tame(&text))) {
            Ok(()) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => {
                missed += 1;
                Ok(())
            }
            Err(mpsc::error::TrySendError::Closed(_)) => Err(Failure::Pipe),
        }
    };
    let ended = client.lines(&["models", &model, "logs"], &["follow"], each).await;
    let why = ended.err().map_or_else(|| "the log ended".to_owned(), |failure| failure.to_string());
    drop(out.send(Input::Log(tame(&format!("({why})")))).await);
}

/// What was kept of the memories of a model, again and again: as often as a column of a terminal has something new.
async fn past(
    client: watch::Receiver<Arc<Client>>,
    model: String,
    span: Span,
    seconds: u64,
    began: i64,
    out: mpsc::Sender<Input>,
) {
    let pause = Duration::from_secs(seconds / u64::from(COLUMNS));
    let mut told = false;
    loop {
        let current = Arc::clone(&client.borrow());
        let wishes =
            [("model", model.clone()), ("range", span.query().to_owned()), ("points", COLUMNS.to_string())];
        let asking = current.json_with::<MemoryData>(Method::GET, &["series"], &wishes);
        let input = match timeout(PATIENCE, asking).await {
            Ok(Ok(data)) => {
                told = false;
                Some(Input::Stored(Box::new(Stored::of(&model, span, &data, began))))
            }
            // The pictures say that nobody answers.
            Err(_late) => None,
            Ok(Err(failure)) => {
                let words = tame(&format!("{}: {failure}", span.words()));
                (!std::mem::replace(&mut told, true)).then_some(Input::Said(words, Tone::Warn))
            }
        };
        if let Some(input) = input
            && out.send(input).await.is_err()
        {
            return;
        }
        tokio::time::sleep(pause).await;
    }
}

async fn act(client: &Client, action: Action, model: &str) -> Result<String, Failure> {
    #[derive(serde::Deserialize)]
    struct Reclaimed {
        entries: Vec<ReclaimEntry>,
    }
    let route = ["models", model, action.route()];
    if action == Action::Reclaim {
        let answer: Reclaimed = client.json(Method::POST, &route).await?;
        let words: Vec<String> = answer.entries.iter().map(ReclaimEntry::words).collect();
        let gave = answer.entries.iter().any(|entry| entry.outcome.gave());
        return if gave { Ok(words.join("; ")) } else { Err(Failure::failed(words.join("; "))) };
    }
    client.json::<IgnoredAny>(Method::POST, &route).await?;
    Ok("done".to_owned())
}
