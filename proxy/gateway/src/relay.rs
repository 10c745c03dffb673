//! The body of an answer on its way to the client. The lease, the backend's connection and the record live in it and end
//! with it, however it ends.
//!
//! ```text
//!   Passing --end--> done: work counted, connection kept if it may be, lease given back
//!      | backend died, stalled, was stopped, took too long
//!      |---- event stream --> error event, then a proper end (without [DONE])
//!      |---- anything else -> the client's connection breaks off, so that the cut is seen
//!      | dropped (client left)
//!      +---> connection closed at once, lease given back
//! ```
//!
//! It asks for the next piece only when the client has taken the last one, so a slow reader stalls its own backend.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep_until};
use warden_policies::Work;

use crate::backends::{BoxFuture, Right};
use crate::client_io::Busy;
use crate::errors::{Dialect, stream_error};
use crate::link::Link;
use crate::meter::Meter;
use crate::observe::{Flight, Outcome};
use crate::pool::Pool;
use crate::request_body::Sent;
use crate::sse::Events;

/// Our own words go out in portions of this size: with the last one the exchange is over for us, and the clock of an idle
/// connection runs. What is put together can be large, and a slow client needs its time for it.
const PORTION: usize = 64 * 1024;

/// The body of any answer.
pub(crate) struct AnswerBody {
    kind: Kind,
    _busy: Option<Busy>,
}

enum Kind {
    /// Our own words.
    Fixed { bytes: Option<Bytes>, flight: Option<Box<Flight>>, outcome: Outcome },
    /// A backend's.
    Relay(Box<Relay>),
}

impl AnswerBody {
    /// Our own words.
    pub(crate) fn fixed(bytes: Bytes, flight: Flight, outcome: Outcome, busy: Busy) -> Self {
        let bytes = (!bytes.is_empty()).then_some(bytes);
        Self { kind: Kind::Fixed { bytes, flight: Some(Box::new(flight)), outcome }, _busy: Some(busy) }
    }

    /// A backend's answer.
    pub(crate) fn relay(relay: Relay, busy: Busy) -> Self {
        Self { kind: Kind::Relay(Box::new(relay)), _busy: Some(busy) }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match &mut self.kind {
            Kind::Fixed { bytes, flight, .. } => {
                let portion = bytes.as_mut().map(|left| left.split_to(left.len().min(PORTION)));
                if bytes.as_ref().is_some_and(Bytes::is_empty) {
                    *bytes = None;
                }
                if let (Some(portion), Some(flight)) = (&portion, flight) {
                    flight.passed(portion.len());
                }
                Poll::Ready(portion.map(|portion| Ok(Frame::data(portion))))
            }
            Kind::Relay(relay) => relay.poll(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Fixed { bytes, .. } => bytes.is_none(),
            Kind::Relay(relay) => relay.ended && relay.last_words.is_none() && relay.breaking.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Fixed { bytes, .. } => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            // A stream that is cut gets more bytes than its backend meant to send.
            Kind::Relay(relay) if relay.ended || relay.events.is_some() => SizeHint::new(),
            Kind::Relay(relay) => relay.incoming.size_hint(),
        }
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        if let Kind::Fixed { flight: Some(flight), outcome, .. } = &mut self.kind {
            // A client that leaves before our own few bytes is of no interest.
            flight.finish(*outcome);
        }
    }
}

/// Numbers and manner of a relay.
pub(crate) struct RelayTerms {
    /// Count the work that the answer tells of.
    pub(crate) tail_bytes: Option<usize>,
    /// The answer is text that was generated.
    pub(crate) generates: bool,
    /// For an event stream: bytes held of an incomplete event, and the longest silence.
    pub(crate) events: Option<(usize, Duration)>,
    /// How errors are spelled.
    pub(crate) dialect: Dialect,
    /// The connection may carry another request afterwards.
    pub(crate) reusable: bool,
}

/// What the answer comes by, and what ends with it.
pub(crate) struct Backend {
    pub(crate) right: Arc<dyn Right>,
    /// Resolves when `right` is taken away.
    pub(crate) revoked: BoxFuture<'static, ()>,
    pub(crate) link: Link,
    pub(crate) pool: Arc<Pool>,
    pub(crate) sent: Arc<Sent>,
    /// When the exchange must be over.
    pub(crate) deadline: Instant,
}

/// A backend's answer.
pub(crate) struct Relay {
    incoming: Incoming,
    flight: Flight,
    right: Option<Arc<dyn Right>>,
    revoked: BoxFuture<'static, ()>,
    link: Option<Link>,
    pool: Arc<Pool>,
    sent: Arc<Sent>,
    meter: Option<Meter>,
    generates: bool,
    events: Option<Events>,
    silence: Option<Duration>,
    /// Since when the next piece is awaited; `None` while the client is at work on the last one. So a client that does
    /// not read is never taken for the backend's silence.
    waiting: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
    deadline: Instant,
    dialect: Dialect,
    reusable: bool,
    ended: bool,
    last_words: Option<Bytes>,
    /// How the client's connection is broken off once it has what was passed before.
    breaking: Option<io::Error>,
}

impl Relay {
    pub(crate) fn new(incoming: Incoming, flight: Flight, backend: Backend, terms: &RelayTerms) -> Self {
        let Backend { right, revoked, link, pool, sent, deadline } = backend;
        let mut relay = Self {
            incoming,
            flight,
            revoked,
            right: Some(right),
            link: Some(link),
            pool,
            sent,
            meter: terms.tail_bytes.map(Meter::new),
            generates: terms.generates,
            events: terms.events.map(|(limit, _)| Events::new(limit)),
            silence: terms.events.map(|(_, silence)| silence),
            waiting: None,
            timer: None,
            deadline,
            dialect: terms.dialect,
            reusable: terms.reusable,
            ended: false,
            last_words: None,
            breaking: None,
        };
        if relay.incoming.is_end_stream() {
            relay.end(Outcome::Ok);
        } else if !relay.sent.is_whole()
            && let Some(link) = &mut relay.link
        {
            // We are polled only while the client reads; the rest of its request must not wait for that.
            link.detach(relay.pool.tracker());
        }
        relay
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        loop {
            if let Some(words) = self.last_words.take() {
                return Poll::Ready(Some(Ok(Frame::data(words))));
            }
            if let Some(error) = self.breaking.take() {
                return Poll::Ready(Some(Err(error)));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            // The connection is dropped only when the answer has ended, so a missing one means that nothing is left.
            let Some(link) = &mut self.link else { return Poll::Ready(None) };
            let piece = match link.poll_piece(&mut self.incoming, context) {
                Poll::Ready(Some(Ok(piece))) => self.piece(piece),
                Poll::Ready(Some(Err(error))) => {
                    tracing::debug!(%error, "a backend's answer broke off");
                    // A request that is still being sent may have failed instead, which is no fault of the backend's.
                    let cut = match self.sent.fault() {
                        Some(fault) => self.cut(fault.outcome(), &fault.to_string()),
                        None => {
                            self.cut(Outcome::UpstreamDied, "its process ended in the middle of the answer")
                        }
                    };
                    if let Err(error) = cut {
                        return self.break_off(error, context);
                    }
                    continue;
                }
                Poll::Ready(None) => {
                    self.last_words =
                        self.events.as_mut().map(Events::finish).filter(|rest| !rest.is_empty());
                    self.end(Outcome::Ok);
                    continue;
                }
                Poll::Pending => match self.overdue(context) {
                    None => return Poll::Pending,
                    Some((outcome, why)) => {
                        if let Err(error) = self.cut(outcome, why) {
                            return self.break_off(error, context);
                        }
                        continue;
                    }
                },
            };
            if !piece.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
        }
    }

    /// The error comes with the next poll: hyper throws away what it has not sent yet when it meets one, and it sends
    /// before it polls again.
    fn break_off<T>(&mut self, error: io::Error, context: &Context<'_>) -> Poll<T> {
        self.breaking = Some(error);
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// A piece came: what of it may pass now.
    fn piece(&mut self, piece: Bytes) -> Bytes {
        if let Some(right) = &self.right {
            right.note_progress(piece.len());
        }
        self.waiting = None;
        if let Some(meter) = &mut self.meter {
            meter.feed(&piece);
        }
        let piece = match &mut self.events {
            Some(events) => {
                let before = events.seen();
                let piece = events.pass(piece);
                if let Some(right) = &self.right {
                    right.note_events(events.seen() - before);
                }
                piece
            }
            None => piece,
        };
        if !piece.is_empty() {
            self.flight.passed(piece.len());
        }
        // A body of known length ends with its last byte: the client's side may never ask for more.
        if self.events.is_none() && self.incoming.is_end_stream() {
            self.end(Outcome::Ok);
        }
        piece
    }

    /// Nothing came: whether that has lasted too long, or has no end to wait for.
    fn overdue(&mut self, context: &mut Context<'_>) -> Option<(Outcome, &'static str)> {
        if self.revoked.as_mut().poll(context).is_ready() {
            return Some((Outcome::Revoked, "its process was stopped in the middle of the answer"));
        }
        let due = match self.silence {
            Some(silence) => {
                let since = *self.waiting.get_or_insert_with(Instant::now);
                if let Some(right) = &self.right {
                    right.note_waiting(since);
                }
                // Before the first sign of a stream that is kept open by comments, or of its first token, a prompt may be
                // evaluated: how long that may take is judged by what it takes elsewhere.
                let told = self.events.as_ref().is_some_and(Events::has_spoken);
                if told { (since + silence).min(self.deadline) } else { self.deadline }
            }
            None => self.deadline,
        };
        // The timer is set anew only when it has fired too early, not for every piece; and once the stream has spoken, when it
        // was set before that for the end of everything.
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
        if timer.deadline() > due {
            timer.as_mut().reset(due);
        }
        while timer.as_mut().poll(context).is_ready() {
            let now = Instant::now();
            if now >= self.deadline {
                return Some((Outcome::TimedOut, "the answer took longer than `upstream.exchange_timeout`"));
            }
            if now >= due {
                return Some((
                    Outcome::UpstreamStalled,
                    "nothing came for longer than `upstream.stream_idle`",
                ));
            }
            timer.as_mut().reset(due);
        }
        None
    }

    /// The answer cannot go on. An event stream gets an error event; everything else breaks off.
    fn cut(&mut self, outcome: Outcome, why: &str) -> io::Result<()> {
        self.reusable = false;
        if let Some(events) = &mut self.events {
            let model = self.flight.record.model.as_ref().map_or("", |model| model.as_str());
            let message = format!("model `{model}`: {why}");
            let end = stream_error(&message, self.dialect, events.seen());
            let words = format!("{}{end}", events.cut());
            self.flight.passed(words.len());
            self.last_words = Some(Bytes::from(words));
        }
        let in_band = self.last_words.is_some();
        self.end(outcome);
        if in_band { Ok(()) } else { Err(io::Error::new(io::ErrorKind::ConnectionAborted, why.to_owned())) }
    }

    /// Counts, gives everything back, tells. The first call counts.
    fn end(&mut self, outcome: Outcome) {
        self.ended = true;
        let Some(right) = self.right.take() else { return };
        if outcome == Outcome::UpstreamDied {
            if let Some(print) = self.sent.whole_print() {
                right.broke(print);
            }
            right.doubt();
        }
        if outcome == Outcome::Revoked
            && let Some(print) = self.sent.whole_print()
        {
            right.lost(print);
        }
        if outcome == Outcome::Ok {
            right.answered(self.sent.print());
        }
        // The connection first: once the lease is back, its generation may be stopped.
        if let Some(link) = self.link.take()
            && outcome == Outcome::Ok
            && self.reusable
            && self.sent.is_whole()
        {
            self.pool.put(link, right.facts());
        }
        self.revoked = Box::pin(std::future::pending());
        let bytes_in = self.sent.bytes.load(std::sync::atomic::Ordering::Relaxed);
        let record = &mut self.flight.record;
        record.bytes_in = bytes_in;
        if let Some(meter) = &self.meter
            && outcome == Outcome::Ok
        {
            // Only a whole answer says how its backend fares; one that was cut is told by other signs.
            right.note_outcome(&meter.outcome(record.status));
        }
        if let Some(meter) = &self.meter
            && (200..300).contains(&record.status)
        {
            let told = meter.is_told();
            let events = self.events.as_ref().map(Events::seen);
            let seen = (outcome != Outcome::Ok || !told).then_some(events.unwrap_or(0));
            let (images, audio) = self.sent.media();
            record.work = Work { images, audio, ..meter.work(seen) };
            right.add_work(record.work);
            if !told && events.is_none() {
                let prompt = if images + audio > 0 { 0 } else { bytes_in };
                self.flight.untold = prompt + if self.generates { self.flight.record.bytes_out } else { 0 };
            }
        }
        drop(right);
        self.flight.finish(outcome);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.reusable = false;
        self.end(Outcome::ClientGone);
    }
}
