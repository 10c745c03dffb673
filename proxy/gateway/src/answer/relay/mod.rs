//! Body of the response that passes a backend's answer to the client. This body owns the lease, the backend's
//! connection and the request's record, and releases them however it ends.
//!
//! ```text
//!   Passing --end--> done: work counted, connection kept if reusable, lease returned
//!      | backend died or was stopped before the first event of a stream that may be executed again
//!      |---- `ResumeSearch`: comments, until another backend answers --> Passing
//!      | such a loss after the first event, if another backend can continue from there (see `continuation`)
//!      |---- `ResumeSearch` --> Passing, with the ids and counters of the first stream
//!      | backend died, stalled, was stopped, took too long
//!      |---- event stream --> error event, then a proper end (without [DONE])
//!      |---- anything else -> the client's connection breaks off, so that the client sees the cut
//!      | dropped (client left)
//!      +---> connection closed at once, lease returned
//! ```
//!
//! | file | job |
//! |---|---|
//! | `terms` | limits and modes of a relay |
//! | `onward` | moves an answer to another backend when its first backend is lost |
//! | `ending` | counts the work, releases connection and lease, reports the request |
//!
//! The relay requests the next piece when the client has taken the previous piece, or reads ahead as far as
//! [`super::unread`] has room. So a slow client slows down only its own backend connection.

mod ending;
mod onward;
mod terms;

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep_until};
use warden_policies::ModelName;

use self::onward::check_stream;
pub(crate) use self::terms::{ContinuationTerms, EventTerms, RelayTerms};
use crate::answer::continuation::{self, AnswerStage, AnswerTranscript, EventTranslator, StreamCut};
use crate::answer::flight::InFlightRequest;
use crate::answer::meter::AnswerMeter;
use crate::answer::remember::TurnRecorder;
use crate::answer::resuming::ResumeSearch;
use crate::backend::again::{BackendSearch, RepeatableRequest};
use crate::backend::attempts::AnsweringBackend;
use crate::backend::backends::{BackendLease, BoxFuture};
use crate::backend::pool::ConnectionPool;
use crate::backend::upstream_conn::UpstreamConn;
use crate::body::sent::SentBody;
use crate::observe::RequestOutcome;
use crate::protocol::sse::EventSplitter;
use crate::refusal::ErrorDialect;

pub(crate) struct AnswerRelay {
    incoming: Incoming,
    /// Pieces of the body that were read before the response head was passed to the client.
    read_ahead: VecDeque<Bytes>,
    flight: Box<InFlightRequest>,
    lease: Option<Arc<dyn BackendLease>>,
    revoked: BoxFuture<'static, ()>,
    conn: Option<UpstreamConn>,
    pool: Arc<ConnectionPool>,
    sent: Arc<SentBody>,
    meter: Option<AnswerMeter>,
    tail_bytes: Option<usize>,
    generates: bool,
    events: Option<EventSplitter>,
    terms: Option<EventTerms>,
    /// The request, as long as it may be executed again or its answer continued elsewhere.
    again: Option<Box<RepeatableRequest>>,
    /// Parameters of a search for another server, kept for the death of a server that replaces a canary.
    spare_search: Option<Box<BackendSearch>>,
    /// Request and answer, recorded so that the next process can be given the conversation.
    remember: Option<Box<TurnRecorder>>,
    /// The part of a stream that the client has, if the stream may be continued elsewhere.
    transcript: Option<Box<AnswerTranscript>>,
    /// Translates the events of a second backend.
    voice: Option<Box<EventTranslator>>,
    resuming: Option<Box<ResumeSearch>>,
    /// Start of the wait for the next piece; `None` while the client handles the last piece. A slow client is
    /// therefore never mistaken for a silent backend.
    waiting_since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
    /// Time of the next keep-alive while another backend repeats content that the client has.
    comment: Option<Pin<Box<Sleep>>>,
    deadline: Instant,
    /// Deadline for the first event of a canary.
    begins_by: Option<Instant>,
    dialect: ErrorDialect,
    reusable: bool,
    ended: bool,
    last_words: Option<Bytes>,
    /// Error that closes the client's connection after all bytes queued before have been sent.
    pending_error: Option<io::Error>,
}

impl AnswerRelay {
    pub(crate) fn new(
        (incoming, ahead): (Incoming, VecDeque<Bytes>),
        flight: Box<InFlightRequest>,
        backend: AnsweringBackend,
        again: Option<Box<RepeatableRequest>>,
        remember: Option<Box<TurnRecorder>>,
        terms: &RelayTerms,
    ) -> Box<Self> {
        let AnsweringBackend { lease, revoked, conn, pool, sent, deadline, first_event_deadline: begins_by } =
            backend;
        let again = again.filter(|_| terms.events.is_some());
        let continues = again.as_ref().and(terms.events).and_then(|terms| terms.continuation);
        let heard = continues.map(|continues| Box::new(continues.transcript()));
        // Built in place on the heap.
        let place = Box::new_uninit();
        let mut relay = Box::write(
            place,
            Self {
                incoming,
                read_ahead: ahead,
                flight,
                revoked,
                lease: Some(lease),
                conn: Some(conn),
                pool,
                sent,
                meter: terms.tail_bytes.map(AnswerMeter::new),
                tail_bytes: terms.tail_bytes,
                generates: terms.generates,
                events: terms.events.map(|terms| EventSplitter::new(terms.limit)),
                terms: terms.events,
                again,
                spare_search: None,
                remember,
                transcript: heard,
                voice: None,
                resuming: None,
                waiting_since: None,
                timer: None,
                comment: None,
                deadline,
                begins_by,
                dialect: terms.dialect,
                reusable: terms.reusable,
                ended: false,
                last_words: None,
                pending_error: None,
            },
        );
        relay.begin();
        relay
    }

    /// Starts an answer. A part of its request may still be in transit.
    fn begin(&mut self) {
        if self.incoming.is_end_stream() && self.read_ahead.is_empty() {
            self.end(RequestOutcome::Ok);
        } else if !self.sent.is_whole()
            && let Some(conn) = &mut self.conn
        {
            // The relay is polled only while the client reads. Sending the rest of the request must not
            // wait for the client.
            conn.detach(self.pool.tracker());
        }
    }

    /// Returns whether no more frames follow.
    pub(super) fn is_over(&self) -> bool {
        self.ended && self.last_words.is_none() && self.pending_error.is_none()
    }

    /// Gives no size for event streams: a stream that is cut gets an error event, and is then longer than
    /// announced.
    pub(super) fn size_hint(&self) -> SizeHint {
        if self.ended || self.events.is_some() {
            return SizeHint::new();
        }
        let ahead: u64 = self.read_ahead.iter().map(|piece| piece.len() as u64).sum();
        match self.incoming.size_hint().exact() {
            Some(rest) => SizeHint::with_exact(ahead + rest),
            None => SizeHint::new(),
        }
    }

    pub(super) fn poll(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        loop {
            if let Some(words) = self.last_words.take() {
                return Poll::Ready(Some(Ok(Frame::data(words))));
            }
            if let Some(error) = self.pending_error.take() {
                return Poll::Ready(Some(Err(error)));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            if let Some(resuming) = &mut self.resuming {
                match resuming.poll(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(None) => {
                        return Poll::Ready(Some(Ok(Frame::data(
                            self.keep_alive("waiting for another process"),
                        ))));
                    }
                    Poll::Ready(Some((record, found))) => {
                        self.resuming = None;
                        self.flight.record.take_over_cost(record);
                        let model = self.flight.record.model.clone().unwrap_or_else(|| ModelName::new(""));
                        let found =
                            found.and_then(|(relayed, voice)| Ok((check_stream(relayed, &model)?, voice)));
                        match found {
                            Ok((relayed, voice)) => {
                                self.resume(relayed, voice);
                                let comment = self.comment_bytes(": continued by another process\n\n");
                                return Poll::Ready(Some(Ok(Frame::data(comment))));
                            }
                            Err(StreamCut { outcome, message: words }) => {
                                self.queue_error_event(&words);
                                self.ended = true;
                                self.flight.finish(outcome);
                                continue;
                            }
                        }
                    }
                }
            }
            if self.is_comment_due(context) {
                let comment = self.keep_alive("no other process is ready yet");
                return Poll::Ready(Some(Ok(Frame::data(comment))));
            }
            if let Some(ahead) = self.read_ahead.pop_front()
                && let Ok(piece) = self.handle_piece(ahead)
            {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            // Without a connection the answer has ended.
            let Some(conn) = &mut self.conn else { return Poll::Ready(None) };
            let piece = match conn.poll_piece(&mut self.incoming, context) {
                Poll::Ready(Some(Ok(piece))) => match self.handle_piece(piece) {
                    Ok(piece) => piece,
                    Err(why) if matches!(self.voice.as_deref(), Some(EventTranslator::Repeat(_))) => {
                        self.cut_different(why);
                        continue;
                    }
                    Err(_) if self.is_from_canary() && self.try_continue(RequestOutcome::UpstreamDied) => {
                        continue;
                    }
                    Err(why) => {
                        if let Err(error) = self.cut(RequestOutcome::UpstreamGarbled, why) {
                            return self.defer_error(error, context);
                        }
                        continue;
                    }
                },
                Poll::Ready(Some(Err(error))) => {
                    tracing::debug!(%error, "a backend's answer broke off");
                    // If the request is still being sent, the cause may be a failure of the request's body,
                    // not the backend.
                    let cut = match self.sent.fault() {
                        Some(fault) => self.cut(fault.outcome(), &fault.to_string()),
                        None if self.try_continue(RequestOutcome::UpstreamDied) => Ok(()),
                        None => {
                            let outcome = RequestOutcome::UpstreamDied;
                            self.cut(outcome, continuation::describe_server_end(outcome))
                        }
                    };
                    if let Err(error) = cut {
                        return self.defer_error(error, context);
                    }
                    continue;
                }
                Poll::Ready(None) if self.voice.as_ref().is_some_and(|voice| !voice.has_ended()) => {
                    if let Err(error) = self.cut(RequestOutcome::UpstreamDied, "its continuation has no end")
                    {
                        return self.defer_error(error, context);
                    }
                    continue;
                }
                // A canary's stream that ends too early is treated as the canary's death.
                Poll::Ready(None)
                    if self.is_unfinished() && self.try_continue(RequestOutcome::UpstreamDied) =>
                {
                    continue;
                }
                Poll::Ready(None) => {
                    // An incomplete last event is dropped if it belongs to a continuation.
                    let rest =
                        self.events.as_mut().filter(|_| self.voice.is_none()).map(EventSplitter::finish);
                    self.last_words = rest.filter(|rest| !rest.is_empty());
                    self.end(RequestOutcome::Ok);
                    continue;
                }
                Poll::Pending => match self.check_deadlines(context) {
                    None => return Poll::Pending,
                    Some((end @ (RequestOutcome::Revoked | RequestOutcome::UpstreamDied), _))
                        if self.try_continue(end) =>
                    {
                        continue;
                    }
                    // A silent canary is replaced at once; the client does not wait for the canary's
                    // process to end.
                    Some((RequestOutcome::UpstreamStalled, _))
                        if self.is_from_canary() && self.try_continue(RequestOutcome::UpstreamDied) =>
                    {
                        continue;
                    }
                    Some((outcome, why)) => {
                        if let Err(error) = self.cut(outcome, why) {
                            return self.defer_error(error, context);
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

    /// Defers the error to the next poll. On an error hyper discards unsent data; it sends all data before it
    /// polls again.
    pub(super) fn defer_error<T>(&mut self, error: io::Error, context: &Context<'_>) -> Poll<T> {
        self.pending_error = Some(error);
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Handles a piece from the backend; returns the bytes that may be passed on now.
    fn handle_piece(&mut self, piece: Bytes) -> Result<Bytes, &'static str> {
        if let Some(lease) = &self.lease {
            lease.note_progress(piece.len());
        }
        self.waiting_since = None;
        if let Some(meter) = &mut self.meter {
            meter.feed(&piece);
        }
        let is_canarys = self.is_from_canary();
        let piece = if let Some(events) = &mut self.events {
            let before = events.event_count();
            let piece = events.push(piece);
            if let Some(lease) = &self.lease {
                lease.note_events(events.event_count() - before);
            }
            let begins = before == 0 && events.event_count() > 0;
            if begins {
                self.flight.note_first_event(self.generates);
            }
            if self.generates {
                let seen = events.event_count();
                self.flight
                    .progress
                    .note_generated(self.voice.as_ref().map_or(seen, |voice| voice.total_tokens(seen)));
            }
            let is_torn = events.is_torn();
            if is_canarys && (before == 0 || self.transcript.is_some()) && has_error(&piece) {
                // Neither the client nor the transcript gets this piece.
                events.reset_count(before);
                return Err("it ended with an error");
            }
            match &mut self.voice {
                Some(voice) if !piece.is_empty() => voice.translate(&piece)?,
                Some(_) => piece,
                None => {
                    self.record_events(&piece, begins, is_torn);
                    piece
                }
            }
        } else {
            if let Some(remember) = &mut self.remember {
                remember.add_piece(&piece);
            }
            piece
        };
        if !piece.is_empty() {
            self.flight.count_passed(piece.len());
        }
        // End a body of known length at its last byte, because hyper may never poll again.
        if self.events.is_none() && self.incoming.is_end_stream() && self.read_ahead.is_empty() {
            self.end(RequestOutcome::Ok);
        }
        Ok(piece)
    }

    /// Returns whether a canary is answering and its stream would be incomplete if it ended now.
    fn is_unfinished(&self) -> bool {
        let is_empty = || self.events.as_ref().is_some_and(|events| events.event_count() == 0);
        let is_going =
            || self.transcript.as_ref().is_some_and(|heard| heard.stage() == AnswerStage::Unfinished);
        self.is_from_canary() && (is_empty() || is_going())
    }

    /// Returns whether a canary is answering.
    fn is_from_canary(&self) -> bool {
        self.lease.as_ref().is_some_and(|lease| lease.is_canary())
    }

    /// Records events of a stream that may be continued elsewhere. Drops the records once that is impossible.
    fn record_events(&mut self, whole: &[u8], begins: bool, is_torn: bool) {
        let Some(again) = &self.again else { return };
        let Some(heard) = &mut self.transcript else {
            if begins || is_torn {
                self.again = None;
            }
            return;
        };
        if is_torn {
            heard.give_up("one of its events exceeds the size limit");
        } else {
            heard.feed(whole);
        }
        if begins && !again.message.may_be_held() {
            heard.give_up("its request could not be kept");
        }
        if heard.loss_reason().is_some() {
            self.again = None;
        }
    }

    /// Checks the time limits while the backend sends nothing. Returns outcome and reason if a limit has
    /// passed.
    fn check_deadlines(&mut self, context: &mut Context<'_>) -> Option<(RequestOutcome, &'static str)> {
        if self.revoked.as_mut().poll(context).is_ready() {
            let stopped = self.lease.as_ref().is_none_or(|lease| lease.was_stopped());
            let outcome = if stopped { RequestOutcome::Revoked } else { RequestOutcome::UpstreamDied };
            return Some((outcome, continuation::describe_server_end(outcome)));
        }
        let due = match self.terms {
            Some(EventTerms { max_silence: silence, .. }) => {
                let since = *self.waiting_since.get_or_insert_with(Instant::now);
                if let Some(lease) = &self.lease {
                    lease.note_waiting(since);
                }
                // Before the first comment or token of a stream, the backend may be evaluating a prompt.
                // The supervisor's health checks limit that time by the times of other prompts.
                let told = self.events.as_ref().is_some_and(EventSplitter::has_passed_any);
                // A canary has its own deadline, which is about the usual time.
                let begun = self.begins_by.is_none()
                    || self.events.as_ref().is_some_and(|events| events.event_count() > 0);
                let due = if told { (since + silence).min(self.deadline) } else { self.deadline };
                self.begins_by.filter(|_| !begun).map_or(due, |by| due.min(by))
            }
            None => self.deadline,
        };
        // To save work, the timer is not reset for every piece, but when it has fired too early, and when the
        // first event replaces the overall deadline by an earlier one.
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
        if timer.deadline() > due {
            timer.as_mut().reset(due);
        }
        while timer.as_mut().poll(context).is_ready() {
            let now = Instant::now();
            if now >= self.deadline {
                return Some((
                    RequestOutcome::TimedOut,
                    "the answer took longer than it may (`upstream.exchange_timeout`, or an endpoint's own `timeout`)",
                ));
            }
            if now >= due {
                return Some((
                    RequestOutcome::UpstreamStalled,
                    "nothing came for longer than `upstream.stream_idle`",
                ));
            }
            timer.as_mut().reset(due);
        }
        None
    }

    /// Returns whether a keep-alive is due while another backend repeats content that the client has.
    fn is_comment_due(&mut self, context: &mut Context<'_>) -> bool {
        let Some(EventTerms { comment_interval: comment, .. }) = self.terms else { return false };
        if !self.voice.as_ref().is_some_and(|voice| voice.is_catching_up()) {
            self.comment = None;
            return false;
        }
        let timer = self.comment.get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + comment)));
        let is_due = timer.as_mut().poll(context).is_ready();
        if is_due {
            self.comment = None;
        }
        is_due
    }
}

/// Returns whether any of these events reports a failure to compute the answer.
fn has_error(events: &[u8]) -> bool {
    let Ok(events) = std::str::from_utf8(events) else { return false };
    events.contains("error")
        && events.lines().any(|line| {
            let data = line.strip_prefix("data:").or_else(|| line.strip_prefix("error:"));
            let data = data.and_then(|data| serde_json::from_str::<serde_json::Value>(data.trim()).ok());
            data.is_some_and(|data| data["error"].is_object() || data["type"] == "error")
        })
}
