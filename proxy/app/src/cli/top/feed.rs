//! Queries the instance while the screen runs: pictures, events and actions. If the instance is frozen, gone
//! or replaced, the feed keeps searching for an instance.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::tz::TimeZone;
use reqwest::Method;
use serde::de::IgnoredAny;
use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_util::task::TaskTracker;
use warden_admin::client::AdminClient;
use warden_admin::error::AdminError;
use warden_admin::status::AdminStatus;
use warden_supervisor::sync::lock;
use warden_supervisor::{FleetEvent, ReclaimEntry};

use super::look::{BAD, GOOD, sanitize};
use super::picture::{EventLine, InstancePicture};
use super::state::{ModelAction, ScreenInput};
use crate::cli::control::{InstanceArgs, ProcessEntries};
use crate::exit::CommandError;

/// Even with a thousand models, a healthy instance needs a fraction of this.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

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

#[derive(Clone)]
pub(super) struct InstanceAsker {
    client: Arc<Mutex<Arc<AdminClient>>>,
    clock: ScreenClock,
    inputs: Sender<ScreenInput>,
    tasks: TaskTracker,
}

impl InstanceAsker {
    pub(super) fn new(client: AdminClient, clock: ScreenClock, inputs: Sender<ScreenInput>) -> Self {
        Self { client: Arc::new(Mutex::new(Arc::new(client))), clock, inputs, tasks: TaskTracker::new() }
    }

    pub(super) fn start(&self, args: InstanceArgs, every: Duration) {
        self.tasks.spawn(self.clone().ask_pictures(args, every));
        self.tasks.spawn(self.clone().follow_events(every));
    }

    pub(super) fn run_action(&self, action: &'static ModelAction, model: String) {
        self.tasks.spawn(self.clone().act(action, model));
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
            drop(self.inputs.send(input).await);
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
                        // A screen that does not keep up misses events rather than keys.
                        drop(self.inputs.try_send(ScreenInput::Event(line)));
                    }
                }
                Ok::<(), AdminError>(())
            };
            drop(self.client().lines(&["events"], &["follow"], take).await);
            sleep(every).await;
        }
    }

    async fn act(self, action: &'static ModelAction, model: String) {
        let (words, tone) = match act(&self.client(), action, &model).await {
            Ok(words) => (words, GOOD),
            Err(failure) => (failure.to_string(), BAD),
        };
        let line = sanitize(&format!("{} of {model}: {words}", action.route));
        drop(self.inputs.send(ScreenInput::Message(line, tone)).await);
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
