//! The requests of one thread. Its lock is held for a moment when a request begins and ends, and for one portion by who lists.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::{GenerationId, Work};

use super::Told;
use super::entry::{Begun, Entry, Progress};
use crate::clock;
use crate::observe::Record;
use crate::protocol::conn_state::ConnState;

/// Requests that are looked at while the lock is held: some microseconds.
const PORTION: usize = 256;

/// Places for requests in flight that are kept when none is.
const KEPT: usize = 1024;

/// How many that ended are kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Of those that were let in.
    pub(super) ended: usize,
    /// Of those that were turned away before a model was known: they are anybody's, and must not drive out the others.
    pub(super) turned_away: usize,
}

/// The requests of one thread.
#[derive(Debug)]
pub(super) struct Shard {
    sizes: Sizes,
    /// From one number to the next, so that no two shards give the same.
    step: u64,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    next: u64,
    live: Vec<Option<Live>>,
    free: Vec<usize>,
    ended: VecDeque<Ended>,
    turned_away: VecDeque<Ended>,
    /// Nobody else has them.
    spare: Vec<Arc<Entry>>,
    /// How many have ended.
    ends: u64,
    wall: Wall,
}

#[derive(Debug)]
struct Live {
    entry: Arc<Entry>,
    conn: Arc<ConnState>,
}

/// One that is over.
#[derive(Clone, Debug)]
struct Ended {
    entry: Arc<Entry>,
    end: End,
}

/// How it ended.
#[derive(Clone, Debug)]
pub(super) struct End {
    pub(super) status: u16,
    pub(super) outcome: &'static str,
    pub(super) stream: bool,
    pub(super) queued: Duration,
    pub(super) total: Duration,
    pub(super) work: Work,
    pub(super) attempts: u32,
    pub(super) continued: bool,
    pub(super) generation: Option<GenerationId>,
    /// When, by the clock of then.
    pub(super) unix_ms: u64,
}

/// What the clock on the wall says, without a look at it for each request.
#[derive(Debug)]
pub(super) struct Wall {
    pub(super) at: Instant,
    pub(super) unix_ms: u64,
}

impl Wall {
    /// For how long it is believed: who sets the clock is followed as soon as that.
    const LASTS: Duration = Duration::from_secs(1);

    /// Milliseconds since 1970 at this moment, by a look of `look` if the last one is too old.
    pub(super) fn at(&mut self, now: Instant, look: impl FnOnce() -> u64) -> u64 {
        let since = now.saturating_duration_since(self.at);
        if since < Self::LASTS {
            return self.unix_ms.saturating_add(u64::from(since.subsec_millis()));
        }
        *self = Self { at: now, unix_ms: look() };
        self.unix_ms
    }
}

/// One that was looked at.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) entry: Arc<Entry>,
    pub(super) end: Option<End>,
}

/// Where a request in flight is; another one may be there later.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    index: usize,
    pub(super) number: u64,
}

impl Seen {
    /// Those in flight before those that ended; of the first the oldest before others, of the second the last one.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        let by_time = match (self.ended(), other.ended()) {
            (None, None) => self.entry.began.cmp(&other.entry.began),
            (Some(one), Some(other)) => other.cmp(&one),
            (one, other) => one.is_some().cmp(&other.is_some()),
        };
        by_time.then(self.entry.number.cmp(&other.entry.number))
    }

    fn ended(&self) -> Option<Instant> {
        self.end.as_ref().map(|end| self.entry.began + end.total)
    }
}

/// The place of a request in flight. It is given back by [`Ticket::end`].
#[derive(Debug)]
pub(crate) struct Ticket {
    shard: Arc<Shard>,
    place: usize,
}

impl Shard {
    /// The shard of this thread of so many.
    pub(super) fn new(thread: usize, threads: usize, sizes: Sizes) -> Self {
        let inner = Inner {
            next: thread as u64 + 1,
            live: Vec::new(),
            free: Vec::new(),
            ended: VecDeque::new(),
            turned_away: VecDeque::new(),
            spare: Vec::new(),
            ends: 0,
            wall: Wall { at: Instant::now(), unix_ms: clock::unix_ms() },
        };
        Self { sizes, step: threads as u64, inner: Mutex::new(inner) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(shard: &Arc<Self>, begun: &Begun<'_>, conn: &Arc<ConnState>) -> (Ticket, Progress) {
        let conn = conn.clone();
        let mut inner = shard.inner();
        let number = inner.next;
        inner.next += shard.step;
        let mut spare = inner.spare.pop();
        let entry = match spare.as_mut().and_then(Arc::get_mut) {
            Some(own) => {
                own.anew(number, begun);
                spare
            }
            None => None,
        };
        let entry = entry.unwrap_or_else(|| Arc::new(Entry::new(number, begun)));
        let live = Some(Live { entry: entry.clone(), conn });
        let place = if let Some(place) = inner.free.pop() {
            inner.live[place] = live;
            place
        } else {
            inner.live.push(live);
            inner.live.len() - 1
        };
        drop(inner);
        (Ticket { shard: shard.clone(), place }, Progress(Some(entry)))
    }

    /// How many are in flight.
    pub(super) fn in_flight(&self) -> usize {
        let inner = self.inner();
        inner.live.len() - inner.free.len()
    }

    /// Those in flight, a portion at a time, and then those that ended: who ends meanwhile is in it by its end.
    pub(super) fn list(&self) -> Vec<Seen> {
        self.with_ended(self.live())
    }

    /// Those in flight, each in the moment in which it was looked at.
    pub(super) fn live(&self) -> Vec<Seen> {
        let mut seen: Vec<Seen> = Vec::new();
        let mut from = 0;
        loop {
            let inner = self.inner();
            let portion = inner.live.get(from..).unwrap_or_default();
            if portion.is_empty() {
                return seen;
            }
            let live = portion.iter().take(PORTION).flatten();
            seen.extend(live.map(|live| Seen { entry: live.entry.clone(), end: None }));
            from += PORTION;
        }
    }

    /// Those of them that still are, and those that ended.
    pub(super) fn with_ended(&self, mut seen: Vec<Seen>) -> Vec<Seen> {
        let (ended, ends): (Vec<Ended>, u64) = {
            let inner = self.inner();
            (inner.ended.iter().chain(&inner.turned_away).cloned().collect(), inner.ends)
        };
        // Who has ended until then is among those that ended, or was driven out there already.
        seen.retain(|one| one.entry.was_in_flight(ends));
        seen.extend(ended.into_iter().map(|Ended { entry, end }| Seen { entry, end: Some(end) }));
        seen
    }

    /// Where those in flight are that are meant.
    pub(super) fn places(&self, is_meant: impl Fn(&str, u64) -> bool) -> Vec<Place> {
        let mut places = Vec::new();
        let mut from = 0;
        loop {
            let inner = self.inner();
            let portion = inner.live.get(from..).unwrap_or_default();
            if portion.is_empty() {
                return places;
            }
            for (index, live) in portion.iter().enumerate().take(PORTION) {
                let entry = live.as_ref().map(|live| &live.entry);
                if let Some(one) = entry.filter(|one| is_meant(&one.id, one.number)) {
                    places.push(Place { index: from + index, number: one.number });
                }
            }
            from += PORTION;
        }
    }

    /// How the last one ended that is meant.
    pub(super) fn outcome(&self, is_meant: impl Fn(&str, u64) -> bool) -> Option<&'static str> {
        let inner = self.inner();
        let ended = inner.ended.iter().rev().chain(inner.turned_away.iter().rev());
        ended.into_iter().find(|one| is_meant(&one.entry.id, one.entry.number)).map(|one| one.end.outcome)
    }

    /// Tells a request to end; `None` if it is not in flight any more. Under the lock, without which it cannot end: its connection
    /// may have another request a moment later.
    pub(super) fn cancel(&self, place: Place) -> Option<Told> {
        let (now, wall) = (Instant::now(), clock::unix_ms());
        let inner = self.inner();
        let live = inner.live.get(place.index)?.as_ref().filter(|live| live.entry.number == place.number)?;
        // As it was before it was told.
        let mut request = Seen { entry: live.entry.clone(), end: None }.view(now, wall);
        let again = live.entry.cancel();
        live.conn.cancelling.ask();
        request.cancelled = true;
        Some(Told { request, again })
    }

    fn end(&self, place: usize, mut end: End) {
        let mut inner = self.inner();
        let Some(Live { entry, conn }) = inner.live.get_mut(place).and_then(Option::take) else { return };
        inner.free.push(place);
        if inner.free.len() == inner.live.len() && inner.live.len() > KEPT {
            // A storm is over.
            (inner.live, inner.free) = (Vec::new(), Vec::new());
        }
        let inner = &mut *inner;
        inner.ends += 1;
        entry.ends(inner.ends);
        end.unix_ms = inner.wall.at(entry.began + end.total, clock::unix_ms);
        let (kept, most) = match entry.model.get() {
            Some(_) => (&mut inner.ended, self.sizes.ended),
            None => (&mut inner.turned_away, self.sizes.turned_away),
        };
        kept.push_back(Ended { entry, end });
        if kept.len() > most
            && let Some(Ended { mut entry, .. }) = kept.pop_front()
            && Arc::get_mut(&mut entry).is_some()
            && inner.spare.len() < most
        {
            inner.spare.push(entry);
        }
        drop(conn);
    }
}

impl Ticket {
    /// The request is over: from now on nobody finds it among those in flight.
    pub(crate) fn end(self, record: &Record) {
        self.shard.end(
            self.place,
            End {
                status: record.answer_status(),
                outcome: record.outcome.as_str(),
                stream: record.stream,
                queued: record.queued,
                total: record.total,
                work: record.work,
                attempts: record.retries + u32::from(record.generation.is_some()),
                continued: record.continued,
                generation: record.generation,
                unix_ms: 0,
            },
        );
    }
}
