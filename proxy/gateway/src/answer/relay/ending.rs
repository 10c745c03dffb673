//! Ends a relayed answer: counts its work, releases connection and lease, reports an incomplete answer.

use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use bytes::Bytes;
use warden_policies::WorkDone;

use super::AnswerRelay;
use crate::answer::{AnswerMeter, PolledFrame, continuation, keep_alive};
use crate::backend::{AnsweringBackend, BackendLease, SharedLease};
use crate::body::SentBody;
use crate::observe::RequestOutcome;
use crate::protocol::EventSplitter;
use crate::refusal::{CANCELLED, StreamEnd, stream_error};

impl AnswerRelay {
    /// Cuts an answer that cannot continue: an event stream gets an error event, any other body breaks off.
    fn cut(&mut self, outcome: RequestOutcome, why: &str) -> io::Result<()> {
        let model = self.flight.record.model.as_ref().map_or("", |model| model.as_str());
        let died = matches!(outcome, RequestOutcome::UpstreamDied | RequestOutcome::Revoked);
        let lost = self.onward.transcript.as_ref().and_then(|heard| heard.lost);
        let words = match lost {
            Some(lost) if died => format!("model `{model}`: {}", continuation::rest_error_text(why, lost)),
            _ => format!("model `{model}`: {why}"),
        };
        let end = if outcome == RequestOutcome::Cancelled { StreamEnd::Cancelled } else { StreamEnd::Fault };
        self.queue_end_event(end, &words);
        let in_band = self.tail.last_words.is_some();
        self.end(outcome);
        if in_band { Ok(()) } else { Err(io::Error::new(io::ErrorKind::ConnectionAborted, why.to_owned())) }
    }

    pub(super) fn cut_or_defer(
        &mut self,
        outcome: RequestOutcome,
        why: &str,
        context: &Context<'_>,
    ) -> ControlFlow<PolledFrame> {
        match self.cut(outcome, why) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => ControlFlow::Break(self.defer_error(error, context)),
        }
    }

    /// Defers the error to the next poll: by then hyper has sent the data that an error would discard.
    fn defer_error(&mut self, error: io::Error, context: &Context<'_>) -> PolledFrame {
        self.tail.pending_error = Some(error);
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Ends the answer for an operator: releases everything as if the client had left, and records the
    /// cancellation. The body breaks off in the next poll: hyper may have just taken the head, and would
    /// discard it on an error.
    pub(in crate::answer) fn cancel(&mut self, context: &Context<'_>) -> Option<PolledFrame> {
        if self.tail.ended {
            return None;
        }
        self.onward.search = None;
        let cut = self.cut(RequestOutcome::Cancelled, CANCELLED);
        // During the search for another backend there is no lease, and `cut` reports nothing.
        self.flight.finish(RequestOutcome::Cancelled);
        cut.err().map(|error| self.defer_error(error, context))
    }

    /// Cuts the stream because another backend's answer differs, without blame for that backend.
    pub(super) fn cut_different(&mut self, why: &str) {
        let model = self.flight.record.model.as_ref().map_or("", |model| model.as_str());
        let died = continuation::describe_server_end(RequestOutcome::UpstreamDied);
        let words = format!("model `{model}`: {}", continuation::rest_error_text(died, why));
        self.queue_error_event(&words);
        self.close(RequestOutcome::UpstreamGarbled, RequestOutcome::UpstreamDied);
    }

    /// Queues an error event if the answer is a stream.
    pub(super) fn queue_error_event(&mut self, message: &str) {
        self.queue_end_event(StreamEnd::Fault, message);
    }

    fn queue_end_event(&mut self, end: StreamEnd, message: &str) {
        let Some(events) = &mut self.events else { return };
        let last = self.onward.translator.as_ref().and_then(|translator| translator.sequence());
        let seen = last.map_or(events.event_count(), |last| last + 1);
        let end = stream_error(end, message, self.terms.dialect, seen);
        let words = format!("{}{end}", events.drop_held());
        self.flight.count_passed(words.len());
        self.tail.last_words = Some(Bytes::from(words));
    }

    pub(super) fn comment_bytes(&mut self, words: &'static str) -> Bytes {
        self.flight.count_passed(words.len());
        Bytes::from_static(words.as_bytes())
    }

    /// Returns a keep-alive. Clients ignore its content, but clients and proxies reset their timeouts.
    pub(super) fn keep_alive(&mut self, comment: &'static str) -> Bytes {
        let sign = keep_alive(self.terms.dialect, true, comment);
        self.flight.count_passed(sign.len());
        sign
    }

    /// Finishes an answer whose backend died after the client had received all output.
    pub(super) fn finish_complete(&mut self, words: Bytes) {
        self.terms.reusable = false;
        if let Some(backend) = &self.backend {
            backend.lease.doubt();
        }
        if !words.is_empty() {
            self.flight.count_passed(words.len());
            self.tail.last_words = Some(words);
        }
        self.end(RequestOutcome::Ok);
    }

    pub(super) fn end(&mut self, outcome: RequestOutcome) {
        self.close(outcome, outcome);
    }

    /// Counts the work, releases connection and lease, and reports the request. Only the first call has an
    /// effect. `outcome` is for the current backend, `whole` for the whole answer, which may have failed at
    /// an earlier backend.
    pub(super) fn close(&mut self, outcome: RequestOutcome, whole: RequestOutcome) {
        self.tail.ended = true;
        let Some(backend) = self.backend.take() else { return };
        let AnsweringBackend { lease, revoked, conn, pool, sent, .. } = *backend;
        let is_ok = outcome == RequestOutcome::Ok;
        blame_request(&*lease, &sent, outcome);
        if is_ok {
            lease.note_whole_answer(sent.fingerprint());
        }
        // Once the lease is gone, the generation may be stopped, so release the connection before.
        if is_ok && self.terms.reusable && sent.is_whole() {
            pool.put_back(conn, lease.server_facts());
        } else {
            drop(conn);
        }
        drop(revoked);
        self.flight.record.bytes_in = sent.bytes.load(Ordering::Relaxed);
        if let Some(meter) = self.meter.take() {
            self.record_work(&meter, &lease, &sent, outcome);
        } else {
            self.flight.prompt_bytes = 0;
        }
        drop(lease);
        self.flight.finish(whole);
    }

    fn record_work(
        &mut self,
        meter: &AnswerMeter,
        lease: &SharedLease,
        sent: &SentBody,
        outcome: RequestOutcome,
    ) {
        let is_ok = outcome == RequestOutcome::Ok;
        let generates = self.terms.generates;
        let record = &mut self.flight.record;
        let status = record.answer_status();
        if let Some(trace) = &mut record.trace {
            meter.add_to_trace(trace, is_ok && generates);
        }
        if is_ok {
            // Only a complete answer shows that the backend is healthy; a cut answer is recorded elsewhere.
            let ended = meter.outcome(status);
            lease.note_outcome(&ended);
            self.flight.progress.note_times(&ended);
            if let Some(remember) = self.remember.take()
                && status == 200
            {
                remember.note_turn(&**lease, meter, &ended, self.onward.transcript.as_deref());
            }
        }
        if !(200..300).contains(&status) {
            // The backend did not evaluate the prompt of a request that it refused.
            self.flight.prompt_bytes = 0;
            return;
        }
        // Judge cancelled answers, too: the client may have left because of a repetition.
        let mut signs = meter.answer_signs(is_ok);
        if self.onward.translator.is_some() {
            // Nothing may be left to generate.
            signs.empty = None;
        } else if sent.may_be_empty() {
            // An answer without text is no fault here, but one with text shows that the process is sound.
            signs.empty = signs.empty.filter(|is_empty| !is_empty);
        }
        if signs.is_judged() {
            lease.record_answer(signs, sent.answer_keys());
        }
        let counts = meter.has_counters();
        let events = self.events.as_ref().map(EventSplitter::event_count);
        let seen = (!is_ok || !counts).then_some(events.unwrap_or(0));
        let (images, audio) = sent.media();
        let work = WorkDone { images, audio, ..meter.work(seen) };
        lease.add_work(work);
        record.work = self.onward.translator.as_ref().map_or(work, |translator| translator.work(work));
        let is_stream = events.is_some();
        let output = if !counts && !is_stream && generates { record.bytes_out } else { 0 };
        let prompt = std::mem::take(&mut self.flight.prompt_bytes);
        let is_paid = !meter.has_prompt_size() && (is_ok || outcome == RequestOutcome::ClientGone);
        self.flight.uncounted_bytes = output + if is_paid { prompt } else { 0 };
    }
}

impl Drop for AnswerRelay {
    fn drop(&mut self) {
        self.end(RequestOutcome::ClientGone);
    }
}

/// Records the loss of a backend for the backend, and for the request, which may be the cause.
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
