//! The record of a request on its way, which is reported once, however the request ends.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::{Method, Version};
use tokio::time::Instant;
use warden_policies::Work;

use crate::access::keys::Pass;
use crate::observe::{Gauges, Observer, Outcome, Record};
use crate::requests::{Progress, Ticket};

/// A request on its way. Whoever drops it without [`Flight::finish`] was dropped by the client's leaving.
pub(crate) struct Flight {
    pub(crate) record: Record,
    /// The key's place among its requests at a time.
    pub(crate) pass: Option<Pass>,
    /// Bytes of prompt and answer whose tokens nobody has counted.
    pub(crate) untold: u64,
    /// Bytes of text in the prompt that a backend was sent, as long as nobody has said how many tokens it has.
    pub(crate) prompt_bytes: u64,
    /// How it is shown to an operator.
    pub(crate) progress: Progress,
    /// Its place among those in flight.
    ticket: Option<Ticket>,
    started: Instant,
    observer: Arc<dyn Observer>,
    gauges: Arc<Gauges>,
    told: bool,
}

impl Flight {
    /// Boxed: it goes along from the request's head to the last byte of its answer, and each hand would copy it.
    pub(crate) fn begin(
        observer: Arc<dyn Observer>,
        gauges: Arc<Gauges>,
        request_id: String,
        peer: IpAddr,
        (method, protocol): (Method, Version),
        route: &'static str,
        shown: impl FnOnce(&Record, Instant) -> (Option<Ticket>, Progress),
    ) -> Box<Self> {
        gauges.in_flight.fetch_add(1, Ordering::Relaxed);
        let record = Record {
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
            outcome: Outcome::ClientGone,
            stream: false,
            queued: Duration::ZERO,
            first_byte: None,
            first_token: None,
            total: Duration::ZERO,
            bytes_in: 0,
            bytes_out: 0,
            work: Work::default(),
            retries: 0,
            continued: false,
            tried: None,
            trace: None,
        };
        let started = Instant::now();
        let (ticket, progress) = shown(&record, started);
        Box::new(Self {
            record,
            pass: None,
            untold: 0,
            prompt_bytes: 0,
            progress,
            ticket,
            started,
            observer,
            gauges,
            told: false,
        })
    }

    /// Counts bytes of the answer passed on.
    pub(crate) fn passed(&mut self, bytes: usize) {
        self.record.bytes_out += bytes as u64;
        if self.record.first_byte.is_none() {
            let now = Instant::now();
            self.record.first_byte = Some(now.saturating_duration_since(self.started));
            if !self.record.stream {
                self.progress.answers(now);
            }
        }
    }

    /// The first event of a stream has come, from each backend that goes on with it.
    pub(crate) fn begins(&mut self, generates: bool) {
        let now = Instant::now();
        self.progress.answers(now);
        if generates {
            self.speaks(now);
        }
    }

    /// The first event of what is generated has come. Only the first call counts.
    pub(crate) fn speaks(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.started);
        self.record.first_token.get_or_insert(since);
        if let Some(trace) = &mut self.record.trace {
            trace.speaks(now);
        }
    }

    /// Reports to the observer, once.
    pub(crate) fn finish(&mut self, outcome: Outcome) {
        if !std::mem::replace(&mut self.told, true) {
            self.record.outcome = match outcome {
                // It looks as if the client had left where that could not be told.
                Outcome::ClientGone if self.progress.is_cancelled() => Outcome::Cancelled,
                outcome => outcome,
            };
            self.record.total = self.started.elapsed();
            if let Some(trace) = &mut self.record.trace {
                let failed = (self.record.outcome != Outcome::Ok).then(|| self.record.outcome.as_str());
                trace.end(self.record.total, failed);
            }
            self.gauges.in_flight.fetch_sub(1, Ordering::Relaxed);
            if let Some(pass) = self.pass.take() {
                // A client that leaves before its prompt is counted has had it evaluated all the same.
                let uncounted =
                    if self.record.outcome == Outcome::ClientGone { self.prompt_bytes } else { 0 };
                pass.done(self.record.work, self.untold.saturating_add(uncounted));
            }
            if let Some(ticket) = self.ticket.take() {
                ticket.end(&self.record);
            }
            self.observer.request_done(&self.record);
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.finish(Outcome::ClientGone);
    }
}
