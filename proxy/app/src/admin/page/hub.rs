//! What all who look at the page share: one picture, made at most a few times a second, and only while somebody looks; the
//! token of this instance; what was asked here and what came of it.
//!
//! ```text
//!   fleet changes ─┐
//!   a second ──────┼─> picture, if it differs: number + 1 ──> watch ──> each viewer, as fast as it reads
//!   an outcome ────┘                                            └─> views, rendered once for each number and query
//! ```
//!
//! A viewer that reads slowly skips pictures: nothing waits for it, and nothing is kept for it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use warden_policies::secrets;

use super::holds::Plans;
use super::pace::{Pace, Paces};
use super::token::Token;
use crate::admin::answer::{Admin, Status};
use crate::clock;
use crate::sync::lock;

/// Pictures are at least so far apart: what changes faster nobody reads.
const LEAST: Duration = Duration::from_millis(200);
/// What only counters tell is looked at so often while somebody looks,
const LOOKED_AT: Duration = Duration::from_secs(1);
/// and so often while nobody does, so that the first picture has rates.
const UNSEEN: Duration = Duration::from_secs(5);
/// Outcomes of what was asked here that are kept.
const NOTICES: usize = 20;
/// Views of one picture that are kept rendered: each filter and each part of a list is one.
const VIEWS: usize = 64;

/// Everything that views show of the fleet, at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Picture {
    /// Grows with every picture that differs.
    pub(crate) number: u64,
    pub(crate) status: Status,
    pub(crate) plans: Plans,
    pub(crate) paces: BTreeMap<String, Pace>,
    pub(crate) notices: Vec<Notice>,
    /// The number of the last event.
    pub(crate) event: u64,
}

impl Picture {
    #[cfg(test)]
    pub(crate) fn numbered(number: u64) -> Self {
        let (plans, paces) = (Plans::new(), BTreeMap::new());
        Self { number, status: Status::default(), plans, paces, notices: Vec::new(), event: 0 }
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

/// Something that was asked here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Notice {
    pub(crate) id: u64,
    /// When it was asked, RFC 3339.
    pub(crate) at: String,
    /// What, and of what: `restart of qwen`.
    pub(crate) what: String,
    pub(crate) outcome: Outcome,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It is being done.
    Pending,
    /// It was done; more about it, if there is.
    Done(String),
    /// It was not, and why.
    Failed(String),
}

/// A view of one picture, ready to be sent.
#[derive(Clone, Debug)]
pub(crate) struct Rendered {
    pub(crate) plain: Bytes,
    pub(crate) gzip: Bytes,
    pub(crate) tag: String,
}

/// Shared by all who look. One for each instance.
#[derive(Debug)]
pub(crate) struct Desk {
    pub(crate) token: Token,
    /// The same behind one mask, for forms in what is refreshed: with another mask each time nothing would ever be unchanged.
    pub(crate) shown_token: String,
    /// Tells this run of the program from others.
    pub(crate) boot: String,
    began: Instant,
    pictures: watch::Sender<Option<Arc<Picture>>>,
    paces: Mutex<Paces>,
    /// One picture is made at a time: of two, the one that looked first must not be published last.
    renewing: Mutex<()>,
    /// When a picture was made last.
    made: Mutex<Option<Instant>>,
    notices: Mutex<(u64, VecDeque<Notice>)>,
    views: Mutex<(u64, HashMap<String, Rendered>)>,
    /// Somebody has come, or something was done.
    wake: tokio::sync::Notify,
    /// What was asked here and goes on.
    pub(crate) work: TaskTracker,
}

impl Default for Desk {
    fn default() -> Self {
        let token = Token::draw();
        Self {
            shown_token: token.masked(),
            token,
            boot: hex::encode(rand::random::<[u8; 8]>()),
            began: Instant::now(),
            pictures: watch::Sender::new(None),
            paces: Mutex::default(),
            renewing: Mutex::default(),
            made: Mutex::default(),
            notices: Mutex::default(),
            views: Mutex::default(),
            wake: tokio::sync::Notify::new(),
            work: TaskTracker::new(),
        }
    }
}

impl Desk {
    /// Makes pictures while somebody looks, until the end.
    pub(crate) async fn run(&self, admin: &Admin) {
        let mut views = admin.fleet.subscribe();
        loop {
            let seen = self.pictures.receiver_count() > 0;
            let pause = if seen { LOOKED_AT } else { UNSEEN };
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
                // What comes within the pause is in the next picture.
                tokio::select! {
                    () = admin.stop.cancelled() => return,
                    () = tokio::time::sleep_until(self.next()) => {}
                }
                self.renew(admin);
            } else {
                self.count(admin);
            }
        }
    }

    fn next(&self) -> Instant {
        let made = *lock(&self.made);
        made.map_or_else(Instant::now, |made| made + LEAST)
    }

    /// Those who look.
    pub(crate) fn viewers(&self) -> usize {
        self.pictures.receiver_count()
    }

    /// Pictures as they come; `None` before there is one.
    pub(crate) fn look(&self) -> watch::Receiver<Option<Arc<Picture>>> {
        let receiver = self.pictures.subscribe();
        self.wake.notify_one();
        receiver
    }

    /// The picture of this moment, or of a moment ago.
    pub(crate) fn picture(&self, admin: &Admin) -> Arc<Picture> {
        let fresh = lock(&self.made).is_some_and(|made| made.elapsed() < LEAST);
        // Taken out first: whoever renews it waits for everybody who holds it.
        let known = self.pictures.borrow().clone();
        // Whoever asked for something is led to a page that says so, however soon.
        let newest = lock(&self.notices).1.back().map(|notice| notice.id);
        let has_newest = |known: &Arc<Picture>| known.notices.last().map(|notice| notice.id) == newest;
        known.filter(|known| fresh && has_newest(known)).unwrap_or_else(|| self.renew(admin))
    }

    fn count(&self, admin: &Admin) {
        let tallies = admin.metrics.tallies();
        let now = tallies.into_iter().map(|(model, tally)| (model, tally.now())).collect();
        lock(&self.paces).take(self.began.elapsed(), now);
    }

    fn renew(&self, admin: &Admin) -> Arc<Picture> {
        let _alone = lock(&self.renewing);
        self.count(admin);
        let plans = admin.told.borrow().plans.clone();
        // Before the notices are locked: whoever notes what came of one has that to himself.
        let picture = Picture {
            number: 0,
            status: admin.seen(),
            plans,
            paces: lock(&self.paces).now(),
            notices: lock(&self.notices).1.iter().cloned().collect(),
            event: admin.fleet.last_event(),
        };
        *lock(&self.made) = Some(Instant::now());
        let mut shown = None;
        self.pictures.send_if_modified(|last| match last {
            Some(last) if last.shows_the_same(&picture) => {
                shown = Some(Arc::clone(last));
                false
            }
            _ => {
                let number = last.as_ref().map_or(1, |last| last.number + 1);
                let new = Arc::new(Picture { number, ..picture.clone() });
                shown = Some(Arc::clone(&new));
                *last = Some(new);
                true
            }
        });
        shown.unwrap_or_else(|| Arc::new(picture))
    }

    /// A view of a picture, made once for all who ask for the same.
    pub(crate) fn view(&self, picture: &Picture, query: &str, make: impl FnOnce() -> Rendered) -> Rendered {
        if let Some(known) = self.known(picture.number, query) {
            return known;
        }
        let view = make();
        let mut views = lock(&self.views);
        if views.0 < picture.number {
            *views = (picture.number, HashMap::new());
        }
        if views.0 == picture.number && views.1.len() < VIEWS {
            views.1.insert(query.to_owned(), view.clone());
        }
        view
    }

    fn known(&self, number: u64, query: &str) -> Option<Rendered> {
        let views = lock(&self.views);
        views.1.get(query).filter(|_| views.0 == number).cloned()
    }

    /// Notes that something was asked. Returns its number.
    pub(crate) fn note(&self, what: String) -> u64 {
        let mut notices = lock(&self.notices);
        notices.0 += 1;
        let id = notices.0;
        if notices.1.len() >= NOTICES {
            notices.1.pop_front();
        }
        notices.1.push_back(Notice { id, at: clock::now_text(), what, outcome: Outcome::Pending });
        drop(notices);
        self.wake.notify_one();
        id
    }

    /// Notes what came of it.
    pub(crate) fn note_outcome(&self, id: u64, outcome: Outcome) {
        let mut notices = lock(&self.notices);
        if let Some(notice) = notices.1.iter_mut().find(|notice| notice.id == id) {
            notice.outcome = match outcome {
                // What a server said last may have quoted a key.
                Outcome::Failed(why) => Outcome::Failed(secrets::text(&why)),
                outcome => outcome,
            };
        }
        drop(notices);
        self.wake.notify_one();
    }
}
