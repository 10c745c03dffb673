//! Moves an answer to another backend when its own is lost.

use bytes::Bytes;
use http::StatusCode;
use warden_policies::{ModelName, WorkDone};

use super::AnswerRelay;
use super::ending::blame_request;
use crate::answer::assemble::is_events;
use crate::answer::continuation::{self, AnswerStage, DONE, EventTranslator, RepeatTranslator, StreamCut};
use crate::answer::meter::AnswerMeter;
use crate::answer::resuming::ResumeSearch;
use crate::backend::again::RepeatableRequest;
use crate::backend::attempts::{AnsweringBackend, RelayedAnswer};
use crate::observe::RequestOutcome;
use crate::protocol::sse::EventSplitter;
use crate::protocol::wire;
use crate::refusal::RequestRefusal;

impl AnswerRelay {
    /// Handles the loss of the backend. Returns whether the stream goes on, or the client already has all
    /// of it.
    pub(super) fn try_continue(&mut self, outcome: RequestOutcome) -> bool {
        if self.voice.as_ref().is_some_and(|voice| voice.has_ended()) {
            self.finish_complete(Bytes::new());
            return true;
        }
        let begun = self.events.as_ref().is_some_and(|events| events.event_count() > 0);
        let heard = if begun {
            match self.transcript.take_if(|heard| heard.loss_reason().is_none() && self.again.is_some()) {
                Some(heard) => Some(heard),
                None => return false,
            }
        } else {
            None
        };
        let (Some(again), Some(terms)) = (self.again.take(), self.terms) else { return false };
        let is_one = heard.as_ref().is_some_and(|heard| continuation::has_single_answer(&again, heard));
        if let Some(heard) = heard.as_ref().filter(|_| is_one) {
            let wants = || continuation::wants_usage(&again);
            let ends = match heard.stage() {
                AnswerStage::Done => Some(Bytes::new()),
                AnswerStage::Finished { counted } if counted || !wants() => Some(Bytes::from_static(DONE)),
                AnswerStage::Unfinished | AnswerStage::Finished { .. } => None,
            };
            if let Some(words) = ends {
                self.finish_complete(words);
                return true;
            }
        }
        let Some(lease) = self.lease.take() else { return false };
        blame_request(&*lease, &self.sent, outcome);
        // The work done so far counts even if the rest never arrives.
        if begun && let Some(meter) = &self.meter {
            let (images, audio) = self.sent.media();
            let seen = self.events.as_ref().map(EventSplitter::event_count);
            self.flight.record.work = WorkDone { images, audio, ..meter.work(seen) };
        }
        self.conn = None;
        self.revoked = Box::pin(std::future::pending());
        self.flight.record.continued = true;
        if let Some(trace) = &mut self.flight.record.trace {
            trace.start_continuation(outcome.as_str());
        }
        self.flight.progress.note_continuing();
        self.spare_search = (lease.is_canary() && heard.is_none()).then(|| Box::new(again.search.clone()));
        let model = again.search.model.clone();
        let died = match outcome {
            RequestOutcome::Revoked => RequestRefusal::Revoked { model },
            _ => RequestRefusal::Died { model },
        };
        let mut record = self.flight.record.clone();
        let paid = record.work;
        let looking = async move {
            let found = match heard {
                None => {
                    let found = again.run(&mut record, lease, died).await;
                    found.map(|relayed| (relayed, None)).map_err(StreamCut::from)
                }
                // The client has no content yet, so any answer is acceptable: start again under the same ids.
                Some(heard) if heard.has_no_token() && is_one => {
                    let voice = RepeatTranslator::from_transcript(*heard, paid).map(EventTranslator::Repeat);
                    let found = again.run(&mut record, lease, died).await;
                    found.map(|relayed| (relayed, voice)).map_err(StreamCut::from)
                }
                Some(heard) => {
                    let found =
                        continuation::continue_answer(*again, heard, &mut record, lease, died, paid).await;
                    found.map(|(relayed, voice)| (relayed, Some(voice)))
                }
            };
            (record, found)
        };
        self.resuming = Some(Box::new(ResumeSearch::new(Box::pin(looking), terms.comment_interval)));
        true
    }

    /// Starts to relay another backend's answer to the same request, or that backend's rest of the first
    /// answer.
    pub(super) fn resume(&mut self, relayed: RelayedAnswer, voice: Option<EventTranslator>) {
        let RelayedAnswer { response, backend, message: kept, .. } = relayed;
        let AnsweringBackend { lease, revoked, conn, pool, sent, deadline, first_event_deadline: begins_by } =
            *backend;
        lease.note_progress(0);
        lease.note_answered(true, true);
        self.incoming = response.into_body();
        (self.lease, self.conn) = (Some(lease), Some(conn));
        (self.revoked, self.pool, self.sent, self.deadline) = (revoked, pool, sent, deadline);
        // An incomplete event of the first backend is dropped.
        self.events = self.terms.map(|terms| EventSplitter::new(terms.limit));
        self.meter = self.tail_bytes.map(AnswerMeter::new);
        self.voice = voice.map(Box::new);
        (self.waiting_since, self.timer, self.begins_by) = (None, None, begins_by);
        // If this backend dies, too, the request may be moved again, because the first backend was only a
        // canary.
        if let Some((search, message)) = self.spare_search.take().zip(kept) {
            self.again = Some(Box::new(RepeatableRequest { search: *search, message }));
            self.transcript = self
                .terms
                .and_then(|terms| terms.continuation)
                .map(|continues| Box::new(continues.transcript()));
        }
        self.begin();
    }
}

/// Checks that the answer of a second backend is an event stream that can replace the first.
pub(super) fn check_stream(
    relayed: RelayedAnswer,
    model: &ModelName,
) -> Result<RelayedAnswer, RequestRefusal> {
    let (status, headers) = (relayed.response.status(), relayed.response.headers());
    let why = match wire::check_answer(status, headers) {
        Err(why) => why.to_owned(),
        Ok(()) if status == StatusCode::OK && is_events(headers) => return Ok(relayed),
        Ok(()) => format!("the process that followed the one that died answers with {status} and no stream"),
    };
    Err(RequestRefusal::Garbled { model: model.clone(), why })
}
