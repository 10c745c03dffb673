//! Runs one request whose answer is assembled: reads the backend's stream to its end before anything is
//! sent to the client.
//!
//! The future is dropped when the client leaves. The drop closes the backend connection at once, and
//! llama-server ends a stream whose connection is closed.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::StatusCode;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};
use warden_policies::defaults::Upstream;
use warden_policies::{ModelName, WorkDone};

use super::{AnswerAssembly, AnswerFormat, AssemblyError};
use crate::answer::flight::InFlightRequest;
use crate::answer::meter::AnswerMeter;
use crate::backend::attempts::{AnsweringBackend, RelayedAnswer};
use crate::backend::backends::BackendLease;
use crate::backend::upstream_conn::UpstreamConn;
use crate::body::sent::SentBody;
use crate::protocol::{headers, wire};
use crate::refusal::RequestRefusal;

/// Counters reported by the stream so far. They are recorded once, on drop if the client leaves early.
struct StreamTally<'a> {
    meter: AnswerMeter,
    events: u64,
    counted: bool,
    lease: Arc<dyn BackendLease>,
    sent: Arc<SentBody>,
    work: &'a mut WorkDone,
}

impl StreamTally<'_> {
    /// Records the counters at the end of the stream and returns the meter, for the outcome.
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

async fn next_piece(conn: &mut UpstreamConn, incoming: &mut Incoming) -> Option<Result<Bytes, hyper::Error>> {
    // The connection has no task of its own: it makes progress only while it is polled.
    poll_fn(|context| conn.poll_piece(incoming, context)).await
}

/// Reads a stream to its end and returns status, head and body of the assembled answer.
pub(crate) async fn gather_stream(
    kind: AnswerFormat,
    relayed: RelayedAnswer,
    flight: &mut InFlightRequest,
    request_id: &HeaderValue,
    config: &Upstream,
) -> Result<(StatusCode, HeaderMap, Bytes), RequestRefusal> {
    let RelayedAnswer { response, backend, .. } = relayed;
    let AnsweringBackend {
        lease,
        mut revoked,
        mut conn,
        sent,
        deadline,
        first_event_deadline: begins_by,
        ..
    } = *backend;
    let (mut parts, mut incoming) = response.into_parts();
    let model = flight.record.model.clone().unwrap_or_else(|| ModelName::new(""));
    let mut tally = StreamTally {
        meter: AnswerMeter::new(config.tail_bytes.in_memory()),
        events: 0,
        counted: false,
        lease: lease.clone(),
        sent: sent.clone(),
        work: &mut flight.record.work,
    };
    let progress = &flight.progress;
    let mut assembly = AnswerAssembly::new(kind, config.assembled_bytes.in_memory());
    lease.note_progress(0);
    lease.note_answered(true, true);
    let mut first = None;
    let read = {
        let mut reading = pin!(async {
            loop {
                lease.note_waiting(Instant::now());
                let piece = next_piece(&mut conn, &mut incoming);
                let piece = match begins_by.filter(|_| tally.events == 0) {
                    None => piece.await,
                    Some(by) => timeout_at(by, piece).await.map_err(|_| {
                        tracing::debug!("a canary did not begin its answer in time");
                        RequestRefusal::Died { model: model.clone() }
                    })?,
                };
                let Some(piece) = piece else { break };
                let piece = piece.map_err(|error| {
                    tracing::debug!(%error, "a backend's answer broke off");
                    if let Some(print) = sent.sent_fingerprint() {
                        lease.report_broken(print);
                    }
                    lease.doubt();
                    RequestRefusal::Died { model: model.clone() }
                })?;
                lease.note_progress(piece.len());
                tally.meter.feed(&piece);
                let fed = assembly.feed(piece);
                lease.note_events(assembly.events().saturating_sub(tally.events));
                if tally.events == 0 && assembly.events() > 0 {
                    let now = Instant::now();
                    first = Some(now);
                    progress.note_answer(now);
                }
                tally.events = assembly.events();
                progress.note_generated(tally.events);
                if let Err(fault) = fed {
                    return Ok(Some(fault));
                }
            }
            Ok(assembly.end_stream().err())
        });
        tokio::select! {
            biased;
            read = timeout_at(deadline, &mut reading) => read.unwrap_or_else(|_| {
                Err(RequestRefusal::TimedOut { model: model.clone() })
            }),
            () = &mut revoked => {
                if let Some(print) = sent.sent_fingerprint() {
                    lease.report_lost(print);
                }
                Err(lease.revoked_refusal(&model))
            }
        }
    };
    // The backend has finished or is abandoned.
    drop((incoming, conn));
    let meter = tally.end(matches!(read, Ok(None)));
    if read.is_ok() {
        lease.note_whole_answer(sent.fingerprint());
    }
    if let Some(first) = first {
        flight.note_first_token(first);
    }
    if let Some(trace) = &mut flight.record.trace {
        meter.add_to_trace(trace, false);
    }
    flight.record.bytes_in = sent.bytes.load(Ordering::Relaxed);
    let strange = |why: &str| RequestRefusal::Garbled { model: model.clone(), why: why.to_owned() };
    let (status, body) = read.and_then(|fault| match fault {
        None => assembly.finish().map(|body| (parts.status, body)).map_err(|fault| match fault {
            AssemblyError::UnknownForm(why) => strange(why),
            _ => strange("it cannot be put together"),
        }),
        Some(AssemblyError::Reported(status, body)) => Ok((status, body)),
        Some(AssemblyError::UnknownForm(why)) => Err(strange(why)),
        Some(AssemblyError::TooLarge) => Err(strange(&format!(
            "it is larger than {} bytes (`upstream.assembled_bytes`), so it is available only as a stream",
            config.assembled_bytes.0
        ))),
    })?;
    let ended = meter.outcome(status.as_u16());
    let ms = |took: Option<(u64, f64)>| took.map(|(_, ms)| ms);
    flight.progress.note_times(ms(ended.prefill), ms(ended.decode));
    lease.note_outcome(&ended);
    drop(lease);
    let version = parts.version;
    headers::prepare_for_client(&mut parts.headers, request_id, true);
    wire::add_via(&mut parts.headers, version);
    for name in [CACHE_CONTROL, headers::ACCEL_BUFFERING] {
        parts.headers.remove(name);
    }
    parts.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json; charset=utf-8"));
    Ok((status, parts.headers, body))
}
