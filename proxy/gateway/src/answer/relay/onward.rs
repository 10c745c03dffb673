//! Moves an answer to another backend when its own backend is lost.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use tokio::time::{Instant, Sleep, sleep};
use warden_policies::{ModelName, WorkDone};

use super::ending::blame_request;
use super::{AnswerRelay, ContinuationTerms, EventTerms, RelayTimers};
use crate::answer::{
    AnswerStage, AnswerTranscript, DONE, EventTranslator, RepeatTranslator, StreamCut, continuation,
};
use crate::backend::{AnsweringBackend, BackendSearch, BoxFuture, RelayedAnswer, RepeatableRequest};
use crate::body::BodyIntake;
use crate::observe::{RequestOutcome, RequestRecord};
use crate::protocol::headers::is_events;
use crate::protocol::{EventSplitter, wire};
use crate::refusal::RequestRefusal;

/// State by which another backend can take over a stream.
#[derive(Default)]
pub(super) struct AnswerContinuation {
    /// The request, while it may be executed again or its answer continued elsewhere.
    again: Option<Box<RepeatableRequest>>,
    /// Search parameters for another server, kept for the death of the server that replaces a canary, and for
    /// another way of continuing.
    spare_search: Option<Box<BackendSearch>>,
    /// The request, while another method may continue the answer if its repetition differs.
    pub(super) other_way: Option<Box<RepeatableRequest>>,
    /// The client's part of a stream that may be continued elsewhere.
    pub(super) transcript: Option<Box<AnswerTranscript>>,
    pub(super) translator: Option<Box<EventTranslator>>,
    pub(super) search: Option<Box<ResumeSearch>>,
}

impl ContinuationTerms {
    fn transcript(self) -> Box<AnswerTranscript> {
        let heard = AnswerTranscript::for_stream(self.kind, self.max_bytes);
        let why = "it fills in a gap with text after it";
        Box::new(if self.fills_in { heard.marked_not_plain(why) } else { heard })
    }
}

impl AnswerContinuation {
    pub(super) fn new(again: Option<Box<RepeatableRequest>>, terms: Option<EventTerms>) -> Self {
        let (Some(again), Some(terms)) = (again, terms) else { return Self::default() };
        let transcript = terms.continuation.map(ContinuationTerms::transcript);
        Self { again: Some(again), transcript, ..Self::default() }
    }

    /// Records events of a stream that may be continued elsewhere. Drops the request once that is impossible.
    pub(super) fn record_events(&mut self, whole: &[u8], begins: bool, is_torn: bool) {
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
        if begins && !again.message.held_body().is_some_and(BodyIntake::may_be_held) {
            heard.give_up("its request could not be kept");
        }
        if heard.lost.is_some() {
            self.again = None;
        }
    }
}

/// Result of the search for another backend, with the request's record. With an [`EventTranslator`], that
/// backend continues the first answer.
type ResumeResult = (RequestRecord, Result<(RelayedAnswer, Option<EventTranslator>), StreamCut>);

/// Search for another backend, with a comment to the client at each interval.
pub(super) struct ResumeSearch {
    looking: BoxFuture<'static, ResumeResult>,
    comment: Pin<Box<Sleep>>,
    interval: Duration,
}

impl ResumeSearch {
    fn begin(looking: BoxFuture<'static, ResumeResult>, interval: Duration) -> Self {
        Self { looking, comment: Box::pin(sleep(interval)), interval }
    }

    /// Returns the result; `None` when a comment is due.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<ResumeResult>> {
        if let Poll::Ready(found) = self.looking.as_mut().poll(context) {
            return Poll::Ready(Some(found));
        }
        ready!(self.comment.as_mut().poll(context));
        self.comment.as_mut().reset(Instant::now() + self.interval);
        Poll::Ready(None)
    }
}

impl AnswerRelay {
    /// Polls the search. Returns a comment for the client; `None` if the relay has to be polled again.
    pub(super) fn poll_search(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let Some(search) = &mut self.onward.search else { return Poll::Ready(None) };
        let Some((record, found)) = ready!(search.poll(context)) else {
            return Poll::Ready(Some(self.keep_alive("waiting for another process")));
        };
        self.onward.search = None;
        self.flight.record.take_over_cost(record);
        let model = self.flight.record.model.clone().unwrap_or_else(|| ModelName::new(""));
        let found = found.and_then(|(relayed, translator)| Ok((check_stream(relayed, &model)?, translator)));
        match found {
            Ok((relayed, translator)) => {
                self.resume(relayed, translator);
                Poll::Ready(Some(self.comment_bytes(": continued by another process\n\n")))
            }
            Err(StreamCut { outcome, message }) => {
                self.queue_error_event(&message);
                self.tail.ended = true;
                self.flight.finish(outcome);
                Poll::Ready(None)
            }
        }
    }

    /// Handles the loss of the backend. Returns whether the stream continues or is already complete.
    pub(super) fn try_continue(&mut self, outcome: RequestOutcome) -> bool {
        let onward = &mut self.onward;
        if onward.translator.as_ref().is_some_and(|translator| translator.has_ended()) {
            self.finish_complete(Bytes::new());
            return true;
        }
        let begun = self.events.as_ref().is_some_and(|events| events.event_count() > 0);
        let may_continue = onward.again.is_some();
        let heard = onward.transcript.take_if(|heard| begun && may_continue && heard.lost.is_none());
        if begun && heard.is_none() {
            return false;
        }
        let (Some(again), Some(terms)) = (onward.again.take(), self.terms.events) else { return false };
        let is_one = heard.as_ref().is_some_and(|heard| continuation::has_single_answer(&again, heard));
        if let Some(heard) = &heard
            && is_one
            && let Some(words) = missing_end(heard, &again)
        {
            self.finish_complete(words);
            return true;
        }
        let Some(backend) = self.backend.take() else { return false };
        let AnsweringBackend { lease, revoked, conn, sent, .. } = *backend;
        blame_request(&*lease, &sent, outcome);
        // The work done so far counts even if the rest never arrives.
        if let Some(meter) = &self.meter
            && begun
        {
            let (images, audio) = sent.media();
            let seen = self.events.as_ref().map(EventSplitter::event_count);
            self.flight.record.work = WorkDone { images, audio, ..meter.work(seen) };
        }
        drop(conn);
        drop(revoked);
        self.flight.record.continued = true;
        if let Some(trace) = &mut self.flight.record.trace {
            trace.start_continuation(outcome.as_str());
        }
        self.flight.progress.note_continuing();
        let spare = heard.is_some() || lease.is_canary();
        self.onward.spare_search = spare.then(|| Box::new(again.search.clone()));
        let model = again.search.model.clone();
        let died = match outcome {
            RequestOutcome::Revoked => RequestRefusal::Revoked { model },
            _ => RequestRefusal::Died { model },
        };
        let mut record = self.flight.record.clone();
        let paid = record.work;
        let looking = Box::pin(async move {
            let found = match heard {
                None => {
                    let found = again.run(&mut record, lease, died).await;
                    found.map(|relayed| (relayed, None)).map_err(StreamCut::from)
                }
                // The client has no content yet, so any answer is acceptable: start again under the same ids.
                Some(heard) if heard.has_no_token() && is_one => {
                    let repeat = RepeatTranslator::from_transcript(*heard, paid).map(EventTranslator::repeat);
                    let found = again.run(&mut record, lease, died).await;
                    found.map(|relayed| (relayed, repeat)).map_err(StreamCut::from)
                }
                Some(heard) => {
                    let found =
                        continuation::continue_answer(*again, heard, &mut record, lease, died, paid).await;
                    found.map(|(relayed, translator)| (relayed, Some(translator)))
                }
            };
            (record, found)
        });
        self.onward.search = Some(Box::new(ResumeSearch::begin(looking, terms.comment_interval)));
        true
    }

    /// Handles a repetition that differs from the client's part of the answer. Returns whether another method
    /// may continue it. The backend keeps its lease, and is not blamed.
    pub(super) fn try_otherwise(&mut self) -> bool {
        let Some(terms) = self.terms.events else { return false };
        let Some(again) = self.onward.other_way.take() else { return false };
        let Some(repeat) = self.onward.translator.as_mut().and_then(|translator| translator.take_answer())
        else {
            return false;
        };
        let Some(backend) = self.backend.take() else { return false };
        let AnsweringBackend { lease, revoked, conn, .. } = *backend;
        // Closing the connection stops the repetition.
        drop(conn);
        drop(revoked);
        let mut record = self.flight.record.clone();
        let looking = Box::pin(async move {
            let found = continuation::continue_otherwise(*again, repeat, &mut record, lease).await;
            (record, found.map(|(relayed, translator)| (relayed, Some(translator))))
        });
        self.onward.search = Some(Box::new(ResumeSearch::begin(looking, terms.comment_interval)));
        true
    }

    /// Relays another backend's answer to the same request, or its rest of the first answer.
    fn resume(&mut self, relayed: RelayedAnswer, translator: Option<EventTranslator>) {
        let RelayedAnswer { response, backend, message: kept, .. } = relayed;
        let deadline = backend.deadline;
        backend.lease.note_progress(0);
        backend.lease.note_answered(true, true);
        self.incoming = response.into_body();
        self.backend = Some(backend);
        // Drop an incomplete event of the first backend.
        self.events = self.terms.events.map(|terms| EventSplitter::new(terms.limit));
        self.meter = self.terms.new_meter();
        self.onward.translator = translator.map(Box::new);
        self.timers = RelayTimers { comment: self.timers.comment.take(), ..RelayTimers::default() };
        if let Some((search, message)) = self.onward.spare_search.take().zip(kept) {
            let request = Box::new(RepeatableRequest { search: *search, message, deadline });
            if let Some(translator) = &self.onward.translator {
                self.onward.other_way = translator.may_continue_otherwise().then_some(request);
            } else {
                // The first backend was only a canary, so the request may be moved again if this one dies.
                self.onward.again = Some(request);
                let terms = self.terms.events.and_then(|terms| terms.continuation);
                self.onward.transcript = terms.map(ContinuationTerms::transcript);
            }
        }
        self.begin();
    }
}

/// Returns the bytes that complete an answer whose content the client has.
fn missing_end(heard: &AnswerTranscript, again: &RepeatableRequest) -> Option<Bytes> {
    match heard.stage {
        AnswerStage::Done => Some(Bytes::new()),
        AnswerStage::Finished { counted } if counted || !continuation::wants_usage(again) => {
            Some(Bytes::from_static(DONE))
        }
        AnswerStage::Unfinished | AnswerStage::Finished { .. } => None,
    }
}

/// Checks that a second backend's answer is an event stream that can replace the first.
fn check_stream(relayed: RelayedAnswer, model: &ModelName) -> Result<RelayedAnswer, RequestRefusal> {
    let status = relayed.response.status();
    let headers = relayed.response.headers();
    let why = match wire::check_answer(status, headers) {
        Err(why) => why.to_owned(),
        Ok(()) if status == StatusCode::OK && is_events(headers) => return Ok(relayed),
        Ok(()) => format!("the process that followed the one that died answers with {status} and no stream"),
    };
    Err(RequestRefusal::Garbled { model: model.clone(), why })
}
