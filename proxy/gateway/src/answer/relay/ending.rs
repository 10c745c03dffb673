//! Ends a relayed answer: counts its work, releases connection and lease, and tells the client if the
//! answer is incomplete.

use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;
use warden_policies::WorkDone;

use super::AnswerRelay;
use crate::answer::continuation;
use crate::answer::life_sign::keep_alive;
use crate::backend::backends::BackendLease;
use crate::body::sent::SentBody;
use crate::observe::RequestOutcome;
use crate::protocol::sse::EventSplitter;
use crate::refusal::{CANCELLED, StreamEnd, stream_error};

impl AnswerRelay {
    /// Cuts an answer that cannot continue. An event stream gets an error event; any other body breaks off.
    pub(super) fn cut(&mut self, outcome: RequestOutcome, why: &str) -> io::Result<()> {
        self.reusable = false;
        let model = self.flight.record.model.as_ref().map_or("", |model| model.as_str());
        let died = matches!(outcome, RequestOutcome::UpstreamDied | RequestOutcome::Revoked);
        let words = match self.transcript.as_ref().and_then(|heard| heard.loss_reason()).filter(|_| died) {
            Some(lost) => format!("model `{model}`: {}", continuation::rest_error_text(why, lost)),
            None => format!("model `{model}`: {why}"),
        };
        let end = if outcome == RequestOutcome::Cancelled { StreamEnd::Cancelled } else { StreamEnd::Fault };
        self.queue_end_event(end, &words);
        let in_band = self.last_words.is_some();
        self.end(outcome);
        if in_band { Ok(()) } else { Err(io::Error::new(io::ErrorKind::ConnectionAborted, why.to_owned())) }
    }

    /// Ends the answer for an operator's cancel request: releases everything as if the client had left, and
    /// records the cancellation. The body breaks off only in the next poll, as after any cut: hyper may have
    /// taken the head just now, and would discard it on an error.
    pub(in crate::answer) fn cancel<T>(&mut self, context: &Context<'_>) -> Option<Poll<T>> {
        if self.ended {
            return None;
        }
        // Stop looking for another backend.
        self.resuming = None;
        let cut = self.cut(RequestOutcome::Cancelled, CANCELLED);
        // While another backend is searched for, there is no lease, and `cut` reports nothing.
        self.flight.finish(RequestOutcome::Cancelled);
        cut.err().map(|error| self.defer_error(error, context))
    }

    /// Cuts the stream because another backend's answer to the same request differs. The backend is not at
    /// fault.
    pub(super) fn cut_different(&mut self, why: &str) {
        self.reusable = false;
        let model = self.flight.record.model.as_ref().map_or("", |model| model.as_str());
        let died = continuation::describe_server_end(RequestOutcome::UpstreamDied);
        let words = format!("model `{model}`: {}", continuation::rest_error_text(died, why));
        self.queue_error_event(&words);
        self.close(RequestOutcome::UpstreamGarbled, RequestOutcome::UpstreamDied);
    }

    /// Queues an error event for a stream that cannot continue; does nothing for any other answer.
    pub(super) fn queue_error_event(&mut self, message: &str) {
        self.queue_end_event(StreamEnd::Fault, message);
    }

    fn queue_end_event(&mut self, end: StreamEnd, message: &str) {
        let Some(events) = &mut self.events else { return };
        let last = self.voice.as_ref().and_then(|voice| voice.sequence());
        let end =
            stream_error(end, message, self.dialect, last.map_or(events.event_count(), |last| last + 1));
        let words = format!("{}{end}", events.drop_held());
        self.flight.count_passed(words.len());
        self.last_words = Some(Bytes::from(words));
    }

    /// Returns an SSE comment, which clients skip.
    pub(super) fn comment_bytes(&mut self, words: &'static str) -> Bytes {
        self.flight.count_passed(words.len());
        Bytes::from_static(words.as_bytes())
    }

    /// Returns a keep-alive: clients ignore its content, but clients and proxies reset their timeouts.
    pub(super) fn keep_alive(&mut self, comment: &'static str) -> Bytes {
        let sign = keep_alive(self.dialect, true, comment);
        self.flight.count_passed(sign.len());
        sign
    }

    /// Finishes the answer of a backend that died after the client had received all of its output.
    pub(super) fn finish_complete(&mut self, words: Bytes) {
        self.reusable = false;
        if let Some(lease) = &self.lease {
            lease.doubt();
        }
        if !words.is_empty() {
            self.flight.count_passed(words.len());
            self.last_words = Some(words);
        }
        self.end(RequestOutcome::Ok);
    }

    pub(super) fn end(&mut self, outcome: RequestOutcome) {
        self.close(outcome, outcome);
    }

    /// Counts the work, releases connection and lease, and reports the request. Only the first call has an
    /// effect. `outcome` is for the backend; `told` is for the whole answer, which an earlier backend may
    /// have spoiled.
    pub(super) fn close(&mut self, outcome: RequestOutcome, told: RequestOutcome) {
        self.ended = true;
        let Some(lease) = self.lease.take() else { return };
        blame_request(&*lease, &self.sent, outcome);
        if outcome == RequestOutcome::Ok {
            lease.note_whole_answer(self.sent.fingerprint());
        }
        // Release the connection before the lease: once the lease is gone, the generation may be stopped.
        if let Some(conn) = self.conn.take()
            && outcome == RequestOutcome::Ok
            && self.reusable
            && self.sent.is_whole()
        {
            self.pool.put_back(conn, lease.server_facts());
        }
        self.revoked = Box::pin(std::future::pending());
        let bytes_in = self.sent.bytes.load(std::sync::atomic::Ordering::Relaxed);
        let record = &mut self.flight.record;
        record.bytes_in = bytes_in;
        if let (Some(meter), Some(trace)) = (&self.meter, &mut record.trace) {
            meter.add_to_trace(trace, outcome == RequestOutcome::Ok && self.generates);
        }
        if let Some(meter) = &self.meter
            && outcome == RequestOutcome::Ok
        {
            // Only a complete answer shows that the backend is healthy; a cut answer is recorded elsewhere.
            let ended = meter.outcome(record.answer_status());
            lease.note_outcome(&ended);
            let ms = |took: Option<(u64, f64)>| took.map(|(_, ms)| ms);
            self.flight.progress.note_times(ms(ended.prefill), ms(ended.decode));
            if let Some(remember) = self.remember.take().filter(|_| record.answer_status() == 200) {
                remember.note_turn(&*lease, meter, &ended, self.transcript.as_deref());
            }
        }
        if let Some(meter) = &self.meter
            && (200..300).contains(&record.answer_status())
        {
            let counts = meter.has_counters();
            let events = self.events.as_ref().map(EventSplitter::event_count);
            let seen = (outcome != RequestOutcome::Ok || !counts).then_some(events.unwrap_or(0));
            let (images, audio) = self.sent.media();
            let work = WorkDone { images, audio, ..meter.work(seen) };
            lease.add_work(work);
            record.work = self.voice.as_ref().map_or(work, |voice| voice.work(work));
            let is_stream = events.is_some();
            let output = if !counts && !is_stream && self.generates { record.bytes_out } else { 0 };
            let prompt = std::mem::take(&mut self.flight.prompt_bytes);
            let is_paid = !meter.has_prompt_size()
                && matches!(outcome, RequestOutcome::Ok | RequestOutcome::ClientGone);
            self.flight.uncounted_bytes = output + if is_paid { prompt } else { 0 };
        } else {
            // The prompt of a refused request was not evaluated.
            self.flight.prompt_bytes = 0;
        }
        drop(lease);
        self.flight.finish(told);
    }
}

impl Drop for AnswerRelay {
    fn drop(&mut self) {
        self.reusable = false;
        self.end(RequestOutcome::ClientGone);
    }
}

/// Records the loss of a backend for its request, which may be the cause, and for the backend.
pub(super) fn blame_request(lease: &dyn BackendLease, sent: &SentBody, outcome: RequestOutcome) {
    match (outcome, sent.sent_fingerprint()) {
        (RequestOutcome::UpstreamDied, print) => {
            if let Some(print) = print {
                lease.report_broken(print);
            }
            lease.doubt();
        }
        (RequestOutcome::Revoked, Some(print)) => lease.report_lost(print),
        _ => {}
    }
}
