//! Queries the instance while the screen runs: pictures, events, the viewed memory or log, and actions. If
//! the instance is frozen, gone or replaced, the feed keeps searching for an instance.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::tz::TimeZone;
use reqwest::Method;
use serde::de::IgnoredAny;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_util::task::TaskTracker;
use warden_admin::client::AdminClient;
use warden_admin::error::AdminError;
use warden_admin::series::answer::MemoryData;
use warden_admin::status::AdminStatus;
use warden_supervisor::sync::lock;
use warden_supervisor::{FleetEvent, LogLine, ReclaimEntry};

use super::look::{BAD, GOOD, WARN, sanitize};
use super::picture::{EventLine, InstancePicture};
use super::plot::{MemoryHistory, TimeSpan};
use super::state::{ModelAction, ScreenInput, WatchedDetail};
use crate::cli::control::{InstanceArgs, ProcessEntries};
use crate::exit::CommandError;

const MAX_WAITING_INPUTS: usize = 4096;
/// Even with a thousand models, a healthy instance needs a fraction of this.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

const RETRY_DELAY: Duration = Duration::from_secs(2);

/// Time since 1970 that never jumps, even if the system clock is set.
#[derive(Clone, Copy)]
pub(super) struct ScreenClock {
    start: Instant,
    unix: Duration,
}

impl ScreenClock {
    pub(super) fn start() -> Self {
        Self { start: Instant::now(), unix: warden_admin::clock::now().as_duration().unsigned_abs() }
    }

    pub(super) fn now(&self) -> Duration {
        self.unix + self.start.elapsed()
    }
}

/// Inputs for the screen. If inputs arrive faster than the screen draws, drops and counts the oldest log
/// lines.
#[derive(Default)]
pub(super) struct InputQueue {
    waiting: Mutex<(VecDeque<ScreenInput>, u64)>,
    filled: Notify,
}

impl InputQueue {
    pub(super) fn push(&self, input: ScreenInput) {
        let mut waiting = lock(&self.waiting);
        if waiting.0.len() >= MAX_WAITING_INPUTS {
            // Drop a log line rather than a key or an action's result.
            let line = waiting.0.iter().position(|one| matches!(one, ScreenInput::Log(_)));
            waiting.0.remove(line.unwrap_or(0));
            waiting.1 += 1;
        }
        waiting.0.push_back(input);
        self.filled.notify_one();
    }

    /// Redraws the screen without an input.
    pub(super) fn wake(&self) {
        self.filled.notify_one();
    }

    pub(super) async fn take_all(&self) -> VecDeque<ScreenInput> {
        self.filled.notified().await;
        let (mut inputs, dropped) = std::mem::take(&mut *lock(&self.waiting));
        if dropped > 0 {
            inputs.push_front(ScreenInput::Log(format!("({dropped} lines came too fast to be shown)")));
        }
        inputs
    }
}

pub(super) struct InstanceFeed {
    asker: InstanceAsker,
    tasks: TaskTracker,
    watched: WatchedDetail,
    watching: Option<AbortHandle>,
}

impl InstanceFeed {
    pub(super) fn start(asker: InstanceAsker, args: InstanceArgs, every: Duration) -> Self {
        let tasks = TaskTracker::new();
        tasks.spawn(asker.clone().ask_pictures(args, every));
        tasks.spawn(asker.clone().follow_events(every));
        Self { asker, tasks, watched: WatchedDetail::Nothing, watching: None }
    }

    pub(super) fn run_action(&self, action: &'static ModelAction, model: String) {
        self.tasks.spawn(self.asker.clone().act(action, model));
    }

    pub(super) fn watch(&mut self, wanted: WatchedDetail) {
        if wanted == self.watched {
            return;
        }
        if let Some(task) = self.watching.take() {
            task.abort();
        }
        let asker = self.asker.clone();
        let task = match wanted.clone() {
            WatchedDetail::Nothing => None,
            WatchedDetail::Memory(model, span) => Some(self.tasks.spawn(asker.ask_memory(model, span))),
            WatchedDetail::Log(model) => Some(self.tasks.spawn(asker.follow_log(model))),
        };
        (self.watched, self.watching) = (wanted, task.map(|task| task.abort_handle()));
    }
}

#[derive(Clone)]
pub(super) struct InstanceAsker {
    client: Arc<Mutex<Arc<AdminClient>>>,
    clock: ScreenClock,
    queue: Arc<InputQueue>,
}

impl InstanceAsker {
    pub(super) fn new(client: AdminClient, clock: ScreenClock, queue: Arc<InputQueue>) -> Self {
        Self { client: Arc::new(Mutex::new(Arc::new(client))), clock, queue }
    }

    fn client(&self) -> Arc<AdminClient> {
        Arc::clone(&lock(&self.client))
    }

    pub(super) async fn picture(&self) -> Result<ScreenInput, CommandError> {
        let client = self.client();
        let asking = client.json::<AdminStatus>(Method::GET, &["status"]);
        let status = timeout(ANSWER_TIMEOUT, asking).await.map_err(|_late| timeout_failure())??;
        Ok(ScreenInput::Picture(self.clock.now(), Box::new(InstancePicture::from_status(&status))))
    }

    pub(super) async fn memory(&self, model: &str, span: TimeSpan) -> Result<ScreenInput, CommandError> {
        let client = self.client();
        let query = span.query(model, self.clock.now().as_secs());
        let asking = client.json_with::<MemoryData>(Method::GET, &["series"], &query);
        let data = timeout(ANSWER_TIMEOUT, asking).await.map_err(|_late| timeout_failure())??;
        Ok(ScreenInput::History(Box::new(MemoryHistory::from_answer(span, &data))))
    }

    async fn ask_pictures(self, args: InstanceArgs, every: Duration) {
        let mut ticks = interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let input = self.picture().await.unwrap_or_else(|failure| {
                // The next instance may have another socket.
                let why = match args.client() {
                    Ok(other) => {
                        *lock(&self.client) = Arc::new(other);
                        failure.to_string()
                    }
                    Err(gone) => gone.to_string(),
                };
                ScreenInput::Silent(self.clock.now(), sanitize(why.lines().next().unwrap_or_default()))
            });
            self.queue.push(input);
        }
    }

    async fn follow_events(self, every: Duration) {
        let zone = TimeZone::system();
        // After a reconnect the instance sends all kept events again, so skip the known ones.
        let mut last = (f64::MIN, 0);
        loop {
            let take = |_line: &str, event: Option<FleetEvent>| {
                if let Some(event) = event {
                    let line = EventLine::from_event(&event, &zone);
                    if (line.at, event.id) > last {
                        last = (line.at, event.id);
                        self.queue.push(ScreenInput::Event(line));
                    }
                }
                Ok::<(), AdminError>(())
            };
            drop(self.client().lines(&["events"], &["follow"], take).await);
            sleep(every).await;
        }
    }

    async fn follow_log(self, model: String) {
        let mut said = String::new();
        loop {
            // After a reconnect the instance sends all kept lines again.
            let mut begins = true;
            let take = |line: &str, log: Option<LogLine>| {
                if std::mem::take(&mut begins) {
                    self.queue.push(ScreenInput::LogBegins);
                }
                let text =
                    log.map_or_else(|| line.to_owned(), |log| format!("{} {}", log.generation, log.text));
                self.queue.push(ScreenInput::Log(sanitize(&text)));
                Ok::<(), AdminError>(())
            };
            let ended = self.client().lines(&["models", &model, "logs"], &["follow"], take).await;
            let why = ended.err().map_or_else(|| "the log ended".to_owned(), |failure| failure.to_string());
            if !begins || why != said {
                self.queue.push(ScreenInput::Log(sanitize(&format!("({why}; retrying)"))));
            }
            said = why;
            sleep(RETRY_DELAY).await;
        }
    }

    async fn ask_memory(self, model: String, span: TimeSpan) {
        let mut failing = false;
        loop {
            let input = self.memory(&model, span).await.unwrap_or_else(|failure| {
                ScreenInput::Message(sanitize(&format!("{}: {failure}", span.words)), WARN)
            });
            let fails = matches!(input, ScreenInput::Message(..));
            if !(fails && failing) {
                self.queue.push(input);
            }
            failing = fails;
            sleep(if fails { RETRY_DELAY } else { Duration::from_secs(span.refresh()) }).await;
        }
    }

    async fn act(self, action: &'static ModelAction, model: String) {
        let (words, tone) = match act(&self.client(), action, &model).await {
            Ok(words) => (words, GOOD),
            Err(failure) => (failure.to_string(), BAD),
        };
        let line = sanitize(&format!("{} of {model}: {words}", action.route));
        self.queue.push(ScreenInput::Message(line, tone));
    }
}

fn timeout_failure() -> CommandError {
    let seconds = ANSWER_TIMEOUT.as_secs();
    CommandError::failed(format!("no answer within {seconds} s: it is frozen or overloaded"))
}

async fn act(client: &AdminClient, action: &ModelAction, model: &str) -> Result<String, CommandError> {
    let route = ["models", model, action.route];
    if action.route != "reclaim" {
        client.json::<IgnoredAny>(Method::POST, &route).await?;
        return Ok("done".to_owned());
    }
    let answer: ProcessEntries<ReclaimEntry> = client.json(Method::POST, &route).await?;
    let words: Vec<String> = answer.entries.iter().map(ReclaimEntry::sentence).collect();
    let gave = answer.entries.iter().any(|entry| entry.outcome.has_freed());
    if gave { Ok(words.join("; ")) } else { Err(CommandError::failed(words.join("; "))) }
}
