//! Body of the response that passes a backend's answer to the client. Owns the lease, the backend's
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
//! The relay requests the next piece when the client has taken the previous one, or reads ahead as far as
//! [`super::answer_body`] has room. So a slow client slows down only its own backend connection.

use std::collections::VecDeque;
use std::io;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep_until};

use self::onward::AnswerContinuation;
use crate::answer::{
    AnswerFormat, AnswerMeter, AnswerStage, EventTranslator, InFlightRequest, PolledFrame, TurnRecorder,
    WatchedContent, continuation, frame,
};
use crate::backend::{AnsweringBackend, RepeatableRequest};
use crate::observe::RequestOutcome;
use crate::protocol::EventSplitter;
use crate::refusal::ErrorDialect;

mod ending;
mod onward;

pub(crate) struct RelayTerms {
    /// Number of bytes that may be held to read an answer's counters; `None` if they are not read.
    pub(crate) tail_bytes: Option<usize>,
    pub(crate) generates: bool,
    pub(crate) content: WatchedContent,
    pub(crate) events: Option<EventTerms>,
    pub(crate) dialect: ErrorDialect,
    /// True if the connection may carry another request after this answer.
    pub(crate) reusable: bool,
}

impl RelayTerms {
    fn new_meter(&self) -> Option<AnswerMeter> {
        self.tail_bytes.map(|limit| AnswerMeter::new(limit).with_content(self.content))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct EventTerms {
    /// Maximum number of bytes held of an incomplete event.
    pub(crate) limit: usize,
    /// Maximum time without data from the backend.
    pub(crate) max_silence: Duration,
    /// Interval of keep-alives during the search for another backend.
    pub(crate) comment_interval: Duration,
    /// Terms for a continuation by another backend; `None` if there must be none.
    pub(crate) continuation: Option<ContinuationTerms>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ContinuationTerms {
    pub(crate) kind: AnswerFormat,
    pub(crate) max_bytes: usize,
    /// True if the generated text is inserted into another text.
    pub(crate) fills_in: bool,
}

pub(crate) struct AnswerRelay {
    incoming: Incoming,
    /// Pieces of the body that were read before the client got the head.
    read_ahead: VecDeque<Bytes>,
    flight: Box<InFlightRequest>,
    /// `None` after the end of the answer, and during the search for another backend.
    backend: Option<Box<AnsweringBackend>>,
    terms: RelayTerms,
    meter: Option<AnswerMeter>,
    events: Option<EventSplitter>,
    /// Recorder of request and answer, from which the next process gets the conversation.
    remember: Option<Box<TurnRecorder>>,
    onward: AnswerContinuation,
    timers: RelayTimers,
    tail: RelayTail,
}

#[derive(Default)]
struct RelayTimers {
    /// Start of the wait for the backend's next piece; `None` while the client takes the last one.
    waiting_since: Option<Instant>,
    limit: Option<Pin<Box<Sleep>>>,
    /// Time of the next keep-alive while another backend repeats content that the client has.
    comment: Option<Pin<Box<Sleep>>>,
}

/// The end of an answer that the backend did not send.
#[derive(Default)]
struct RelayTail {
    ended: bool,
    last_words: Option<Bytes>,
    /// Error that closes the client's connection after the queued bytes were sent.
    pending_error: Option<io::Error>,
}

impl AnswerRelay {
    pub(crate) fn new(
        (incoming, read_ahead): (Incoming, VecDeque<Bytes>),
        flight: Box<InFlightRequest>,
        backend: Box<AnsweringBackend>,
        again: Option<Box<RepeatableRequest>>,
        remember: Option<Box<TurnRecorder>>,
        terms: RelayTerms,
    ) -> Box<Self> {
        // Built in place on the heap.
        let place = Box::new_uninit();
        let mut relay = Box::write(
            place,
            Self {
                incoming,
                read_ahead,
                flight,
                backend: Some(backend),
                meter: terms.new_meter(),
                events: terms.events.map(|terms| EventSplitter::new(terms.limit)),
                remember,
                onward: AnswerContinuation::new(again, terms.events),
                terms,
                timers: RelayTimers::default(),
                tail: RelayTail::default(),
            },
        );
        relay.begin();
        relay
    }

    /// Starts an answer. A part of its request may still be in transit.
    fn begin(&mut self) {
        if self.incoming.is_end_stream() && self.read_ahead.is_empty() {
            self.end(RequestOutcome::Ok);
        } else if let Some(backend) = &mut self.backend
            && !backend.sent.is_whole()
        {
            // The relay is polled only while the client reads, and the rest of the request must not wait.
            backend.conn.detach(&backend.pool.tracker);
        }
    }

    pub(super) fn is_over(&self) -> bool {
        let RelayTail { ended, last_words, pending_error } = &self.tail;
        *ended && last_words.is_none() && pending_error.is_none()
    }

    /// Announces no size for event streams: an error event would make a cut stream longer.
    pub(super) fn size_hint(&self) -> SizeHint {
        if self.tail.ended || self.events.is_some() {
            return SizeHint::new();
        }
        let ahead: u64 = self.read_ahead.iter().map(|piece| piece.len() as u64).sum();
        match self.incoming.size_hint().exact() {
            Some(rest) => SizeHint::with_exact(ahead + rest),
            None => SizeHint::new(),
        }
    }

    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> PolledFrame {
        loop {
            if let Some(words) = self.tail.last_words.take() {
                return frame(words);
            }
            if let Some(error) = self.tail.pending_error.take() {
                return Poll::Ready(Some(Err(error)));
            }
            if self.tail.ended {
                return Poll::Ready(None);
            }
            if self.onward.search.is_some() {
                match ready!(self.poll_search(context)) {
                    Some(comment) => return frame(comment),
                    None => continue,
                }
            }
            if self.is_comment_due(context) {
                return frame(self.keep_alive("no other process is ready yet"));
            }
            if let Some(ahead) = self.read_ahead.pop_front()
                && let Ok(piece) = self.handle_piece(ahead)
            {
                return frame(piece);
            }
            // Without a backend, the answer has ended.
            let Some(backend) = &mut self.backend else { return Poll::Ready(None) };
            let polled = backend.conn.poll_piece(&mut self.incoming, context);
            if let ControlFlow::Break(polled) = self.handle_polled(polled, context) {
                return polled;
            }
        }
    }

    /// Breaks with the result for the client, or continues if the relay has to be polled again.
    fn handle_polled(
        &mut self,
        polled: Poll<Option<Result<Bytes, hyper::Error>>>,
        context: &mut Context<'_>,
    ) -> ControlFlow<PolledFrame> {
        match polled {
            Poll::Ready(Some(Ok(piece))) => match self.handle_piece(piece) {
                Ok(piece) if piece.is_empty() => ControlFlow::Continue(()),
                Ok(piece) => ControlFlow::Break(frame(piece)),
                Err(why) if matches!(self.onward.translator.as_deref(), Some(EventTranslator::Repeat(_))) => {
                    if !self.try_otherwise() {
                        self.cut_different(why);
                    }
                    ControlFlow::Continue(())
                }
                Err(_) if self.is_from_canary() && self.try_continue(RequestOutcome::UpstreamDied) => {
                    ControlFlow::Continue(())
                }
                Err(why) => self.cut_or_defer(RequestOutcome::UpstreamGarbled, why, context),
            },
            Poll::Ready(Some(Err(error))) => {
                tracing::debug!(%error, "a backend's answer broke off");
                self.handle_broken(context)
            }
            Poll::Ready(None) => self.handle_end(context),
            Poll::Pending => match self.check_deadlines(context) {
                None => ControlFlow::Break(Poll::Pending),
                Some((end @ (RequestOutcome::Revoked | RequestOutcome::UpstreamDied), _))
                    if self.try_continue(end) =>
                {
                    ControlFlow::Continue(())
                }
                // Replace a silent canary at once: the client does not wait for the end of its process.
                Some((RequestOutcome::UpstreamStalled, _))
                    if self.is_from_canary() && self.try_continue(RequestOutcome::UpstreamDied) =>
                {
                    ControlFlow::Continue(())
                }
                Some((outcome, why)) => self.cut_or_defer(outcome, why, context),
            },
        }
    }

    fn handle_broken(&mut self, context: &Context<'_>) -> ControlFlow<PolledFrame> {
        // While the request is still being sent, its body may be the cause, not the backend.
        if let Some(fault) = self.backend.as_ref().and_then(|backend| backend.sent.fault()) {
            return self.cut_or_defer(fault.outcome(), &fault.to_string(), context);
        }
        let outcome = RequestOutcome::UpstreamDied;
        if self.try_continue(outcome) {
            return ControlFlow::Continue(());
        }
        self.cut_or_defer(outcome, continuation::describe_server_end(outcome), context)
    }

    fn handle_end(&mut self, context: &Context<'_>) -> ControlFlow<PolledFrame> {
        if self.onward.translator.as_ref().is_some_and(|translator| !translator.has_ended()) {
            return self.cut_or_defer(RequestOutcome::UpstreamDied, "its continuation has no end", context);
        }
        // A canary's stream that ends too early counts as the canary's death.
        if self.is_unfinished() && self.try_continue(RequestOutcome::UpstreamDied) {
            return ControlFlow::Continue(());
        }
        // Drop an incomplete last event of a continuation.
        if let Some(events) = &mut self.events
            && self.onward.translator.is_none()
        {
            let rest = events.finish();
            self.tail.last_words = (!rest.is_empty()).then_some(rest);
        }
        self.end(RequestOutcome::Ok);
        ControlFlow::Continue(())
    }

    fn handle_piece(&mut self, piece: Bytes) -> Result<Bytes, &'static str> {
        if let Some(backend) = &self.backend {
            backend.lease.note_progress(piece.len());
        }
        self.timers.waiting_since = None;
        if let Some(meter) = &mut self.meter {
            meter.feed(&piece);
        }
        let piece = if self.events.is_some() {
            self.handle_events(piece)?
        } else {
            if let Some(remember) = &mut self.remember {
                remember.add_piece(&piece);
            }
            piece
        };
        if !piece.is_empty() {
            self.flight.count_passed(piece.len());
        }
        // hyper may never poll again after the last byte of a body of known length.
        if self.events.is_none() && self.incoming.is_end_stream() && self.read_ahead.is_empty() {
            self.end(RequestOutcome::Ok);
        }
        Ok(piece)
    }

    /// Handles a piece of an event stream; returns its whole events for the client.
    fn handle_events(&mut self, piece: Bytes) -> Result<Bytes, &'static str> {
        let is_canarys = self.is_from_canary();
        let Some(events) = &mut self.events else { return Ok(piece) };
        let before = events.event_count();
        let piece = events.push(piece);
        let seen = events.event_count();
        if let Some(backend) = &self.backend {
            backend.lease.note_events(seen - before);
        }
        let begins = before == 0 && seen > 0;
        if begins {
            self.flight.note_first_event(self.terms.generates);
        }
        let translator = self.onward.translator.as_mut();
        if self.terms.generates {
            let total = translator.as_ref().map_or(seen, |translator| translator.total_tokens(seen));
            self.flight.progress.note_generated(total);
        }
        let is_torn = events.is_torn();
        if is_canarys && (before == 0 || self.onward.transcript.is_some()) && has_error(&piece) {
            // Neither the client nor the transcript gets this piece.
            events.reset_count(before);
            return Err("it ended with an error");
        }
        match translator {
            Some(translator) if !piece.is_empty() => {
                let translated = translator.translate(&piece);
                if translated.is_ok() && !translator.may_continue_otherwise() {
                    self.onward.other_way = None;
                }
                translated
            }
            Some(_) => Ok(piece),
            None => {
                self.onward.record_events(&piece, begins, is_torn);
                Ok(piece)
            }
        }
    }

    /// Returns whether a canary's stream would be incomplete if it ended now.
    fn is_unfinished(&self) -> bool {
        let is_empty = self.events.as_ref().is_some_and(|events| events.event_count() == 0);
        let transcript = self.onward.transcript.as_ref();
        let is_going = transcript.is_some_and(|heard| heard.stage == AnswerStage::Unfinished);
        self.is_from_canary() && (is_empty || is_going)
    }

    fn is_from_canary(&self) -> bool {
        self.backend.as_ref().is_some_and(|backend| backend.lease.is_canary())
    }

    /// Returns outcome and reason if a time limit has passed while the backend sends nothing.
    fn check_deadlines(&mut self, context: &mut Context<'_>) -> Option<(RequestOutcome, &'static str)> {
        let backend = self.backend.as_mut()?;
        if backend.revoked.as_mut().poll(context).is_ready() {
            let stopped = backend.lease.was_stopped();
            let outcome = if stopped { RequestOutcome::Revoked } else { RequestOutcome::UpstreamDied };
            return Some((outcome, continuation::describe_server_end(outcome)));
        }
        let mut due = backend.deadline;
        if let (Some(terms), Some(events)) = (&self.terms.events, &self.events) {
            let since = *self.timers.waiting_since.get_or_insert_with(Instant::now);
            backend.lease.note_waiting(since);
            // Before its first event, the backend may evaluate a prompt; the supervisor limits that time.
            if events.has_passed_any() {
                due = due.min(since + terms.max_silence);
            }
            // A canary has its own deadline, which is about the usual time.
            if let Some(by) = backend.first_event_deadline
                && events.event_count() == 0
            {
                due = due.min(by);
            }
        }
        // Resetting the timer for every piece would cost work, so reset it only for an earlier deadline.
        let timer = self.timers.limit.get_or_insert_with(|| Box::pin(sleep_until(due)));
        if timer.deadline() > due {
            timer.as_mut().reset(due);
        }
        while timer.as_mut().poll(context).is_ready() {
            let now = Instant::now();
            if now >= backend.deadline {
                return Some((
                    RequestOutcome::TimedOut,
                    "the answer took longer than it may (`upstream.exchange_timeout`, or an endpoint's own \
                     `timeout`)",
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
        let Some(EventTerms { comment_interval: interval, .. }) = self.terms.events else { return false };
        if !self.onward.translator.as_ref().is_some_and(|translator| translator.is_catching_up()) {
            self.timers.comment = None;
            return false;
        }
        let start = || Box::pin(sleep_until(Instant::now() + interval));
        let is_due = self.timers.comment.get_or_insert_with(start).as_mut().poll(context).is_ready();
        if is_due {
            self.timers.comment = None;
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
