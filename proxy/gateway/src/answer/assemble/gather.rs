//! Reads a backend's stream to its end, before the client gets the assembled answer.
//!
//! hyper drops the future when the client leaves. The drop closes the connection, which ends the stream.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::StatusCode;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderValue};
use http::response::Parts;
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};
use warden_policies::defaults::Upstream;
use warden_policies::{ModelName, WorkDone};

use super::{AnswerAssembly, AnswerFormat, AssemblyError};
use crate::answer::{AnswerMeter, InFlightRequest};
use crate::backend::{AnsweringBackend, RelayedAnswer, SharedLease, UpstreamConn};
use crate::body::SentBody;
use crate::protocol::{headers, wire};
use crate::refusal::RequestRefusal;
use crate::requests::ProgressHandle;

/// Counters that the stream has reported so far. Recorded once: at the end, or on drop if the client leaves.
struct StreamTally<'a> {
    meter: AnswerMeter,
    events: u64,
    counted: bool,
    lease: SharedLease,
    sent: Arc<SentBody>,
    work: &'a mut WorkDone,
}

impl StreamTally<'_> {
    fn end(mut self, whole: bool) -> AnswerMeter {
        self.record(whole);
        std::mem::take(&mut self.meter)
    }

    fn record(&mut self, whole: bool) {
        if !std::mem::replace(&mut self.counted, true) {
            let (images, audio) = self.sent.media();
            *self.work = WorkDone { images, audio, ..self.meter.work((!whole).then_some(self.events)) };
            self.lease.add_work(*self.work);
        }
    }
}

impl Drop for StreamTally<'_> {
    fn drop(&mut self) {
        self.record(false);
    }
}

struct StreamGathering<'a> {
    incoming: Incoming,
    conn: UpstreamConn,
    /// Deadline for the first event, if a canary answers.
    begins_by: Option<Instant>,
    model: &'a ModelName,
    tally: StreamTally<'a>,
    assembly: AnswerAssembly,
    progress: &'a ProgressHandle,
    first_event: Option<Instant>,
}

impl StreamGathering<'_> {
    /// Reads the stream to its end. Returns the reason if the answer cannot be assembled.
    async fn read(&mut self) -> Result<Option<AssemblyError>, RequestRefusal> {
        loop {
            self.tally.lease.note_waiting(Instant::now());
            let Some(piece) = self.next_piece().await? else { return Ok(self.assembly.end_stream().err()) };
            if let Err(fault) = self.add_piece(piece) {
                return Ok(Some(fault));
            }
        }
    }

    async fn next_piece(&mut self) -> Result<Option<Bytes>, RequestRefusal> {
        let died = || RequestRefusal::Died { model: self.model.clone() };
        // The connection has no task, so only polling makes progress.
        let piece = poll_fn(|context| self.conn.poll_piece(&mut self.incoming, context));
        let piece = match self.begins_by {
            Some(by) if self.tally.events == 0 => timeout_at(by, piece).await.map_err(|_| {
                tracing::debug!("a canary did not begin its answer in time");
                died()
            })?,
            _ => piece.await,
        };
        piece.transpose().map_err(|error| {
            tracing::debug!(%error, "a backend's answer broke off");
            let StreamTally { lease, sent, .. } = &self.tally;
            if let Some(print) = sent.sent_fingerprint() {
                lease.report_broken(print);
            }
            lease.doubt();
            died()
        })
    }

    fn add_piece(&mut self, piece: Bytes) -> Result<(), AssemblyError> {
        let Self { tally, assembly, progress, .. } = self;
        tally.lease.note_progress(piece.len());
        tally.meter.feed(&piece);
        let fed = assembly.feed(piece);
        tally.lease.note_events(assembly.events.saturating_sub(tally.events));
        if tally.events == 0 && assembly.events > 0 {
            let now = Instant::now();
            self.first_event = Some(now);
            progress.note_answer(now);
        }
        tally.events = assembly.events;
        progress.note_generated(tally.events);
        fed
    }

    /// Closes the connection, because the backend has finished or is abandoned, and records the counters.
    fn end(self, whole: bool) -> (AnswerMeter, AnswerAssembly, Option<Instant>) {
        let Self { incoming, conn, tally, assembly, first_event, .. } = self;
        drop((incoming, conn));
        (tally.end(whole), assembly, first_event)
    }
}

pub(crate) async fn gather_stream(
    kind: AnswerFormat,
    relayed: RelayedAnswer,
    flight: &mut InFlightRequest,
    request_id: &HeaderValue,
    config: &Upstream,
) -> Result<(StatusCode, HeaderMap, Bytes), RequestRefusal> {
    let RelayedAnswer { response, backend, .. } = relayed;
    let AnsweringBackend { lease, mut revoked, conn, sent, deadline, first_event_deadline, .. } = *backend;
    let (parts, incoming) = response.into_parts();
    let model = flight.record.model.clone().unwrap_or_else(|| ModelName::new(""));
    lease.note_progress(0);
    lease.note_answered(true, true);
    let mut gathering = StreamGathering {
        incoming,
        conn,
        begins_by: first_event_deadline,
        model: &model,
        tally: StreamTally {
            meter: AnswerMeter::new(config.tail_bytes.in_memory()),
            events: 0,
            counted: false,
            lease: lease.clone(),
            sent: sent.clone(),
            work: &mut flight.record.work,
        },
        assembly: AnswerAssembly::new(kind, config.assembled_bytes.in_memory()),
        progress: &flight.progress,
        first_event: None,
    };
    let read = tokio::select! {
        biased;
        read = timeout_at(deadline, gathering.read()) => read.unwrap_or_else(|_| {
            Err(RequestRefusal::TimedOut { model: model.clone() })
        }),
        () = &mut revoked => {
            if let Some(print) = sent.sent_fingerprint() {
                lease.report_lost(print);
            }
            Err(lease.revoked_refusal(&model))
        }
    };
    let (meter, assembly, first_event) = gathering.end(matches!(read, Ok(None)));
    if read.is_ok() {
        lease.note_whole_answer(sent.fingerprint());
    }
    if let Some(first) = first_event {
        flight.note_first_token(first);
    }
    if let Some(trace) = &mut flight.record.trace {
        meter.add_to_trace(trace, false);
    }
    flight.record.bytes_in = sent.bytes.load(Ordering::Relaxed);
    let assembled = match read? {
        None => assembly.finish().map(|body| (parts.status, body)),
        Some(AssemblyError::Reported(status, body)) => Ok((status, body)),
        Some(fault) => Err(fault),
    };
    let (status, body) = assembled.map_err(|fault| {
        let why = match fault {
            AssemblyError::UnknownForm(why) => why.to_owned(),
            AssemblyError::Reported(..) => "it cannot be put together".to_owned(),
            AssemblyError::TooLarge => format!(
                "it is larger than {} bytes (`upstream.assembled_bytes`), so it is available only as a stream",
                config.assembled_bytes.0
            ),
        };
        RequestRefusal::Garbled { model: model.clone(), why }
    })?;
    let ended = meter.outcome(status.as_u16());
    flight.progress.note_times(&ended);
    lease.note_outcome(&ended);
    drop(lease);
    Ok((status, answer_headers(parts, request_id), body))
}

/// Turns the head of the stream into the head of a non-streaming answer.
fn answer_headers(mut parts: Parts, request_id: &HeaderValue) -> HeaderMap {
    let version = parts.version;
    headers::prepare_for_client(&mut parts.headers, request_id, true);
    wire::add_via(&mut parts.headers, version);
    for name in [CACHE_CONTROL, headers::ACCEL_BUFFERING] {
        parts.headers.remove(name);
    }
    parts.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json; charset=utf-8"));
    parts.headers
}
