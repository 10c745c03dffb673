//! The record of a request in flight. The observer gets it exactly once, however the request ends.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::{Method, Version};
use tokio::time::Instant;
use warden_policies::WorkDone;

use crate::access::ConcurrencyPass;
use crate::observe::{GatewayGauges, GatewayObserver, RequestOutcome, RequestRecord};
use crate::requests::{ProgressHandle, ShardTicket};

/// A request in flight. Dropping it without [`InFlightRequest::finish`] records that the client left.
pub(crate) struct InFlightRequest {
    pub(crate) record: RequestRecord,
    pub(crate) pass: Option<ConcurrencyPass>,
    /// Bytes of prompt and answer without a reported token count.
    pub(crate) uncounted_bytes: u64,
    /// Bytes of prompt text sent to a backend, until the backend reports the number of prompt tokens.
    pub(crate) prompt_bytes: u64,
    pub(crate) progress: ProgressHandle,
    ticket: Option<ShardTicket>,
    started: Instant,
    observer: Arc<dyn GatewayObserver>,
    gauges: Arc<GatewayGauges>,
    is_reported: bool,
}

impl InFlightRequest {
    /// Creates the record on the heap, because it is moved often until the last byte of the answer.
    pub(crate) fn begin(
        observer: Arc<dyn GatewayObserver>,
        gauges: Arc<GatewayGauges>,
        request_id: String,
        peer: IpAddr,
        (method, protocol): (Method, Version),
        route: &'static str,
        shown: impl FnOnce(&RequestRecord, Instant) -> (Option<ShardTicket>, ProgressHandle),
    ) -> Box<Self> {
        gauges.in_flight.fetch_add(1, Ordering::Relaxed);
        let record = RequestRecord {
            request_id,
            peer,
            method,
            protocol,
            user_agent: None,
            key: None,
            route,
            model: None,
            generation: None,
            status: 0,
            late_status: None,
            outcome: RequestOutcome::ClientGone,
            stream: false,
            queued: Duration::ZERO,
            first_byte: None,
            first_token: None,
            total: Duration::ZERO,
            bytes_in: 0,
            bytes_out: 0,
            work: WorkDone::default(),
            retries: 0,
            continued: false,
            canary_part: None,
            trace: None,
        };
        let started = Instant::now();
        let (ticket, progress) = shown(&record, started);
        Box::new(Self {
            record,
            pass: None,
            uncounted_bytes: 0,
            prompt_bytes: 0,
            progress,
            ticket,
            started,
            observer,
            gauges,
            is_reported: false,
        })
    }

    pub(crate) fn count_passed(&mut self, bytes: usize) {
        self.record.bytes_out += bytes as u64;
        if self.record.first_byte.is_none() {
            let now = Instant::now();
            self.record.first_byte = Some(now.saturating_duration_since(self.started));
            if !self.record.stream {
                self.progress.note_answer(now);
            }
        }
    }

    /// Records the first event of a stream; called once for each backend that serves the request.
    pub(crate) fn note_first_event(&mut self, generates: bool) {
        let now = Instant::now();
        self.progress.note_answer(now);
        if generates {
            self.note_first_token(now);
        }
    }

    /// Records the first generated content. Only the first call has an effect.
    pub(crate) fn note_first_token(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.started);
        self.record.first_token.get_or_insert(since);
        if let Some(trace) = &mut self.record.trace {
            trace.note_first_token(now);
        }
    }

    /// Reports the request to the observer. Only the first call has an effect.
    pub(crate) fn finish(&mut self, outcome: RequestOutcome) {
        if !std::mem::replace(&mut self.is_reported, true) {
            self.record.outcome = match outcome {
                // The body was dropped because the gateway could not inform the client of the cancellation.
                RequestOutcome::ClientGone if self.progress.is_cancelled() => RequestOutcome::Cancelled,
                outcome => outcome,
            };
            self.record.total = self.started.elapsed();
            if let Some(trace) = &mut self.record.trace {
                let failed =
                    (self.record.outcome != RequestOutcome::Ok).then(|| self.record.outcome.as_str());
                trace.end(self.record.total, failed);
            }
            self.gauges.in_flight.fetch_sub(1, Ordering::Relaxed);
            if let Some(pass) = self.pass.take() {
                // Charge the prompt even if the backend has not counted it yet: the backend evaluated it.
                let uncounted =
                    if self.record.outcome == RequestOutcome::ClientGone { self.prompt_bytes } else { 0 };
                pass.charge_request(self.record.work, self.uncounted_bytes.saturating_add(uncounted));
            }
            if let Some(ticket) = self.ticket.take() {
                ticket.end(&self.record);
            }
            self.observer.request_done(&self.record);
        }
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        self.finish(RequestOutcome::ClientGone);
    }
}
