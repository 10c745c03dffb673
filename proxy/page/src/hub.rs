//! State shared by all viewers of the page: a snapshot ("picture") of the fleet, made at most a few times a
//! second and only while there are viewers; the form token of this instance; notices of actions and their
//! outcomes.
//!
//! ```text
//!   fleet changes ────┐
//!   each second ──────┼─> picture, if it differs: number + 1 ──> watch ──> each viewer, as fast as it reads
//!   action finished ──┘                                            └─> views, rendered once per query
//! ```
//!
//! A viewer that reads slowly skips pictures. No other viewer waits for it, and nothing is queued for it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use warden_admin::clock;
use warden_admin::memory_use::PlannedModels;
use warden_admin::state::AdminState;
use warden_admin::status::AdminStatus;
use warden_policies::secrets;
use warden_supervisor::sync::lock;

use crate::pace::{RateTracker, RequestRates};
use crate::token::FormToken;

/// Least time between pictures: a person cannot follow faster changes.
const MIN_SNAPSHOT_INTERVAL: Duration = Duration::from_millis(200);
/// Interval at which counters are read while there are viewers.
const WATCHED_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which counters are read without viewers, so that the first picture has rates.
const UNWATCHED_INTERVAL: Duration = Duration::from_secs(5);
const MAX_NOTICES: usize = 20;
/// Most rendered views kept of one picture; each filter and each part of a list is a view.
const MAX_RENDERED_VIEWS: usize = 64;

/// Data about the fleet at one moment from which all views are made.
#[derive(Clone, Debug)]
pub(crate) struct PageSnapshot {
    /// Number of the picture, which grows whenever the content differs.
    pub(crate) number: u64,
    pub(crate) status: AdminStatus,
    pub(crate) plans: PlannedModels,
    pub(crate) paces: BTreeMap<String, RequestRates>,
    pub(crate) notices: Vec<ActionNotice>,
    pub(crate) event: u64,
}

impl PageSnapshot {
    #[cfg(test)]
    pub(crate) fn numbered(number: u64) -> Self {
        let plans = PlannedModels::new();
        let paces = BTreeMap::new();
        Self { number, status: AdminStatus::default(), plans, paces, notices: Vec::new(), event: 0 }
    }

    fn shows_the_same(&self, other: &Self) -> bool {
        self.event == other.event
            && self.notices == other.notices
            && self.paces == other.paces
            && self.plans == other.plans
            && self.status.budgets == other.status.budgets
            && self.status.binaries == other.status.binaries
            && self.status.bound == other.status.bound
            && self.status.mitigations == other.status.mitigations
            && self.status.advice == other.status.advice
            && self.status.fleet == other.status.fleet
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ActionNotice {
    pub(crate) id: u64,
    /// Time at which the action was requested, RFC 3339.
    pub(crate) at: String,
    /// Action and model, such as `restart of qwen`.
    pub(crate) what: String,
    pub(crate) outcome: ActionOutcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ActionOutcome {
    Pending,
    Done(String),
    Failed(String),
}

#[derive(Clone, Debug)]
pub(crate) struct RenderedView {
    pub(crate) plain: Bytes,
    pub(crate) gzip: Bytes,
    pub(crate) tag: String,
}

#[derive(Debug)]
pub(crate) struct PageHub {
    pub(crate) token: FormToken,
    /// The token behind a fixed mask: a new mask would change the refreshed part of a page each time.
    pub(crate) shown_token: String,
    /// Id of this run of the program.
    pub(crate) boot: String,
    started_at: Instant,
    pictures: watch::Sender<Option<Arc<PageSnapshot>>>,
    paces: Mutex<RateTracker>,
    /// Held while a picture is made, so that an older picture cannot be published after a newer one.
    renewing: Mutex<()>,
    last_made: Mutex<Option<Instant>>,
    notices: Mutex<(u64, VecDeque<ActionNotice>)>,
    views: Mutex<(u64, HashMap<String, RenderedView>)>,
    /// Notified when there is a new viewer or a new notice.
    wake: tokio::sync::Notify,
    pub(crate) work: TaskTracker,
}

impl Default for PageHub {
    fn default() -> Self {
        let token = FormToken::draw();
        Self {
            shown_token: token.masked(),
            token,
            boot: hex::encode(rand::random::<[u8; 8]>()),
            started_at: Instant::now(),
            pictures: watch::Sender::new(None),
            paces: Mutex::default(),
            renewing: Mutex::default(),
            last_made: Mutex::default(),
            notices: Mutex::default(),
            views: Mutex::default(),
            wake: tokio::sync::Notify::new(),
            work: TaskTracker::new(),
        }
    }
}

impl PageHub {
    /// Makes pictures while there are viewers, until the instance ends.
    pub(crate) async fn run(&self, admin: &AdminState) {
        let mut views = admin.fleet.subscribe();
        loop {
            let seen = self.pictures.receiver_count() > 0;
            let pause = if seen { WATCHED_INTERVAL } else { UNWATCHED_INTERVAL };
            tokio::select! {
                () = admin.stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
                () = self.wake.notified() => {}
                changed = views.changed(), if seen => {
                    if changed.is_err() {
                        return;
                    }
                    views.mark_unchanged();
                }
            }
            if self.viewers() > 0 {
                // Changes within the pause are part of the next picture.
                tokio::select! {
                    () = admin.stop.cancelled() => return,
                    () = tokio::time::sleep_until(self.next_due()) => {}
                }
                self.renew(admin);
            } else {
                self.sample_counters(admin);
            }
        }
    }

    fn next_due(&self) -> Instant {
        let made = *lock(&self.last_made);
        made.map_or_else(Instant::now, |made| made + MIN_SNAPSHOT_INTERVAL)
    }

    pub(crate) fn viewers(&self) -> usize {
        self.pictures.receiver_count()
    }

    /// Subscribes to pictures. The value is `None` before the first picture.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Option<Arc<PageSnapshot>>> {
        let receiver = self.pictures.subscribe();
        self.wake.notify_one();
        receiver
    }

    /// Returns a picture that is at most [`MIN_SNAPSHOT_INTERVAL`] old.
    pub(crate) fn picture(&self, admin: &AdminState) -> Arc<PageSnapshot> {
        let fresh = lock(&self.last_made).is_some_and(|made| made.elapsed() < MIN_SNAPSHOT_INTERVAL);
        // Clone the picture instead of borrowing it, because a renewal waits for every borrow.
        let known = self.pictures.borrow().clone();
        // After an action the browser requests a view at once, and this view must show the new notice.
        let newest = lock(&self.notices).1.back().map(|notice| notice.id);
        let has_newest = |known: &Arc<PageSnapshot>| known.notices.last().map(|notice| notice.id) == newest;
        known.filter(|known| fresh && has_newest(known)).unwrap_or_else(|| self.renew(admin))
    }

    fn sample_counters(&self, admin: &AdminState) {
        let tallies = admin.metrics.tallies();
        let now = tallies.into_iter().map(|(model, tally)| (model, tally.snapshot())).collect();
        lock(&self.paces).add_sample(self.started_at.elapsed(), now);
    }

    fn renew(&self, admin: &AdminState) -> Arc<PageSnapshot> {
        let _alone = lock(&self.renewing);
        self.sample_counters(admin);
        let plans = admin.config.borrow().plans.clone();
        // Build the picture before the notices are locked, because recording an outcome needs that lock.
        let picture = PageSnapshot {
            number: 0,
            status: admin.status_without_processes(),
            plans,
            paces: lock(&self.paces).current_rates(),
            notices: lock(&self.notices).1.iter().cloned().collect(),
            event: admin.fleet.last_event(),
        };
        *lock(&self.last_made) = Some(Instant::now());
        let mut shown = None;
        self.pictures.send_if_modified(|last| match last {
            Some(last) if last.shows_the_same(&picture) => {
                shown = Some(Arc::clone(last));
                false
            }
            _ => {
                let number = last.as_ref().map_or(1, |last| last.number + 1);
                let new = Arc::new(PageSnapshot { number, ..picture.clone() });
                shown = Some(Arc::clone(&new));
                *last = Some(new);
                true
            }
        });
        shown.unwrap_or_else(|| Arc::new(picture))
    }

    /// Returns a view of a picture, rendered once for all viewers with the same query.
    pub(crate) fn render_once(
        &self,
        picture: &PageSnapshot,
        query: &str,
        make: impl FnOnce() -> RenderedView,
    ) -> RenderedView {
        let views = lock(&self.views);
        if views.0 == picture.number
            && let Some(known) = views.1.get(query)
        {
            return known.clone();
        }
        drop(views);
        let view = make();
        let mut views = lock(&self.views);
        if views.0 < picture.number {
            *views = (picture.number, HashMap::new());
        }
        if views.0 == picture.number && views.1.len() < MAX_RENDERED_VIEWS {
            views.1.insert(query.to_owned(), view.clone());
        }
        view
    }

    /// Records a requested action. Returns the number of its notice.
    pub(crate) fn add_notice(&self, what: String) -> u64 {
        let mut notices = lock(&self.notices);
        notices.0 += 1;
        let id = notices.0;
        if notices.1.len() >= MAX_NOTICES {
            notices.1.pop_front();
        }
        notices.1.push_back(ActionNotice {
            id,
            at: clock::now_text(),
            what,
            outcome: ActionOutcome::Pending,
        });
        drop(notices);
        self.wake.notify_one();
        id
    }

    pub(crate) fn set_outcome(&self, id: u64, outcome: ActionOutcome) {
        let mut notices = lock(&self.notices);
        if let Some(notice) = notices.1.iter_mut().find(|notice| notice.id == id) {
            notice.outcome = match outcome {
                // The last output of a server may quote a key, so hide secrets.
                ActionOutcome::Failed(why) => ActionOutcome::Failed(secrets::redact_text(&why)),
                outcome => outcome,
            };
        }
        drop(notices);
        self.wake.notify_one();
    }
}
