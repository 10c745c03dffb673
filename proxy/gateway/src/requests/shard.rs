//! The requests of one thread, locked briefly when one begins or ends, or for reading a portion.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::{GenerationId, WorkDone};

use super::CancelledRequest;
use super::entry::{ProgressHandle, RequestEntry, RequestStart};
use crate::clock;
use crate::observe::RequestRecord;
use crate::protocol::ConnState;

/// Number of requests read under one lock, which takes some microseconds.
const LIST_PORTION: usize = 256;

/// Number of positions whose memory is kept when no request is in flight.
const KEPT_ENTRIES: usize = 1024;

#[derive(Clone, Copy, Debug)]
pub(super) struct ShardSizes {
    /// Maximum number of ended requests whose model is known.
    pub(super) ended: usize,
    /// Maximum for requests without a model, which anyone can cause: they displace no admitted ones.
    pub(super) turned_away: usize,
}

#[derive(Debug)]
pub(super) struct RequestShard {
    sizes: ShardSizes,
    /// Increment between request numbers, so that all shards assign different ones.
    step: u64,
    inner: Mutex<ShardInner>,
}

#[derive(Debug)]
struct ShardInner {
    next: u64,
    live: Vec<Option<LiveRequest>>,
    free: Vec<usize>,
    ended: VecDeque<EndedRequest>,
    turned_away: VecDeque<EndedRequest>,
    /// Entries for reuse, held by the shard alone.
    spare: Vec<Arc<RequestEntry>>,
    ends: u64,
    wall: WallClock,
}

#[derive(Debug)]
struct LiveRequest {
    entry: Arc<RequestEntry>,
    conn: Arc<ConnState>,
}

#[derive(Clone, Debug)]
struct EndedRequest {
    entry: Arc<RequestEntry>,
    end: RequestEnd,
}

#[derive(Clone, Debug)]
pub(super) struct RequestEnd {
    pub(super) status: u16,
    pub(super) outcome: &'static str,
    pub(super) stream: bool,
    pub(super) queued: Duration,
    pub(super) total: Duration,
    pub(super) work: WorkDone,
    pub(super) attempts: u32,
    pub(super) continued: bool,
    pub(super) generation: Option<GenerationId>,
    /// Time of the end, in milliseconds since 1970.
    pub(super) unix_ms: u64,
}

/// Cached time of day, which saves reading the clock for each request.
#[derive(Debug)]
pub(super) struct WallClock {
    pub(super) at: Instant,
    pub(super) unix_ms: u64,
}

impl WallClock {
    /// Validity of a reading. A change of the system clock takes effect after that time.
    const LASTS: Duration = Duration::from_secs(1);

    /// Returns the milliseconds since 1970. Calls `look` to read the clock if the last reading is too old.
    pub(super) fn unix_ms_at(&mut self, now: Instant, look: impl FnOnce() -> u64) -> u64 {
        let since = now.saturating_duration_since(self.at);
        if since < Self::LASTS {
            return self.unix_ms.saturating_add(u64::from(since.subsec_millis()));
        }
        *self = Self { at: now, unix_ms: look() };
        self.unix_ms
    }
}

#[derive(Clone, Debug)]
pub(super) struct ListedRequest {
    pub(super) entry: Arc<RequestEntry>,
    pub(super) end: Option<RequestEnd>,
}

/// Position of a request in flight. Another request may have it later, with another `number`.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShardPlace {
    index: usize,
    pub(super) number: u64,
}

impl ListedRequest {
    /// Orders requests in flight (oldest first) before ended ones (latest first).
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

/// Owns the position of a request in flight; [`ShardTicket::end`] frees it.
#[derive(Debug)]
pub(crate) struct ShardTicket {
    shard: Arc<RequestShard>,
    place: usize,
}

impl RequestShard {
    pub(super) fn new(thread: usize, threads: usize, sizes: ShardSizes) -> Self {
        let inner = ShardInner {
            next: thread as u64 + 1,
            live: Vec::new(),
            free: Vec::new(),
            ended: VecDeque::new(),
            turned_away: VecDeque::new(),
            spare: Vec::new(),
            ends: 0,
            wall: WallClock { at: Instant::now(), unix_ms: clock::unix_ms() },
        };
        Self { sizes, step: threads as u64, inner: Mutex::new(inner) }
    }

    fn lock(&self) -> MutexGuard<'_, ShardInner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(
        shard: &Arc<Self>,
        begun: &RequestStart<'_>,
        conn: &Arc<ConnState>,
    ) -> (ShardTicket, ProgressHandle) {
        let conn = conn.clone();
        let mut inner = shard.lock();
        let number = inner.next;
        inner.next += shard.step;
        let mut spare = inner.spare.pop();
        let entry = match spare.as_mut().and_then(Arc::get_mut) {
            Some(own) => {
                own.reuse(number, begun);
                spare
            }
            None => None,
        };
        let entry = entry.unwrap_or_else(|| Arc::new(RequestEntry::new(number, begun)));
        let live = Some(LiveRequest { entry: entry.clone(), conn });
        let place = if let Some(place) = inner.free.pop() {
            inner.live[place] = live;
            place
        } else {
            inner.live.push(live);
            inner.live.len() - 1
        };
        drop(inner);
        (ShardTicket { shard: shard.clone(), place }, ProgressHandle(Some(entry)))
    }

    pub(super) fn in_flight(&self) -> usize {
        let inner = self.lock();
        inner.live.len() - inner.free.len()
    }

    /// Lists the requests in flight, then the ended ones; a request that ends meanwhile is among these.
    pub(super) fn list(&self) -> Vec<ListedRequest> {
        self.with_ended(self.live())
    }

    /// Lists the requests in flight, each in its state when it is read.
    pub(super) fn live(&self) -> Vec<ListedRequest> {
        let mut seen = Vec::new();
        self.visit_live(|_, live| seen.push(ListedRequest { entry: live.entry.clone(), end: None }));
        seen
    }

    /// Visits the requests in flight with their positions, locking for a portion at a time.
    fn visit_live(&self, mut visit: impl FnMut(usize, &LiveRequest)) {
        let mut from = 0;
        loop {
            let inner = self.lock();
            let portion = inner.live.get(from..).unwrap_or_default();
            if portion.is_empty() {
                return;
            }
            for (index, live) in portion.iter().enumerate().take(LIST_PORTION) {
                if let Some(live) = live {
                    visit(from + index, live);
                }
            }
            from += LIST_PORTION;
        }
    }

    /// Removes requests from `seen` that have ended since, and adds the ended ones.
    pub(super) fn with_ended(&self, mut seen: Vec<ListedRequest>) -> Vec<ListedRequest> {
        let (ended, ends): (Vec<EndedRequest>, u64) = {
            let inner = self.lock();
            (inner.ended.iter().chain(&inner.turned_away).cloned().collect(), inner.ends)
        };
        // A request that has ended by now is in `ended`, or was already displaced there.
        seen.retain(|one| one.entry.was_in_flight(ends));
        seen.extend(
            ended.into_iter().map(|EndedRequest { entry, end }| ListedRequest { entry, end: Some(end) }),
        );
        seen
    }

    pub(super) fn find_places(&self, is_meant: impl Fn(&str, u64) -> bool) -> Vec<ShardPlace> {
        let mut places = Vec::new();
        self.visit_live(|index, LiveRequest { entry, .. }| {
            if is_meant(&entry.id, entry.number) {
                places.push(ShardPlace { index, number: entry.number });
            }
        });
        places
    }

    /// Returns the outcome of the last ended request that matches.
    pub(super) fn find_outcome(&self, is_meant: impl Fn(&str, u64) -> bool) -> Option<&'static str> {
        let inner = self.lock();
        let ended = inner.ended.iter().rev().chain(inner.turned_away.iter().rev());
        ended.into_iter().find(|one| is_meant(&one.entry.id, one.entry.number)).map(|one| one.end.outcome)
    }

    /// Cancels a request; `None` if it is no longer in flight. The lock keeps the request from ending:
    /// otherwise the cancellation could hit the next request of its connection.
    pub(super) fn cancel(&self, place: ShardPlace) -> Option<CancelledRequest> {
        let now = Instant::now();
        let wall = clock::unix_ms();
        let inner = self.lock();
        let live = inner.live.get(place.index)?.as_ref().filter(|live| live.entry.number == place.number)?;
        // Build the view before the cancellation changes the request.
        let mut request = ListedRequest { entry: live.entry.clone(), end: None }.view(now, wall);
        let again = live.entry.cancel();
        live.conn.cancelling.request_cancel();
        request.cancelled = true;
        Some(CancelledRequest { request, was_cancelled: again })
    }

    fn end(&self, place: usize, mut end: RequestEnd) {
        let mut inner = self.lock();
        let Some(LiveRequest { entry, conn }) = inner.live.get_mut(place).and_then(Option::take) else {
            return;
        };
        inner.free.push(place);
        if inner.free.len() == inner.live.len() && inner.live.len() > KEPT_ENTRIES {
            // Free the memory after a burst of requests.
            (inner.live, inner.free) = (Vec::new(), Vec::new());
        }
        let inner = &mut *inner;
        inner.ends += 1;
        entry.course.ended.set(inner.ends);
        end.unix_ms = inner.wall.unix_ms_at(entry.began + end.total, clock::unix_ms);
        let (kept, most) = match entry.model.get() {
            Some(_) => (&mut inner.ended, self.sizes.ended),
            None => (&mut inner.turned_away, self.sizes.turned_away),
        };
        kept.push_back(EndedRequest { entry, end });
        if kept.len() > most
            && let Some(EndedRequest { mut entry, .. }) = kept.pop_front()
            && Arc::get_mut(&mut entry).is_some()
            && inner.spare.len() < most
        {
            inner.spare.push(entry);
        }
        drop(conn);
    }
}

impl ShardTicket {
    pub(crate) fn end(self, record: &RequestRecord) {
        self.shard.end(
            self.place,
            RequestEnd {
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
