//! The way of one request whose answer is put together: asked for as a stream before it is sent, read to its end before
//! anything goes to the client. Dropping the future, which is what happens when the client leaves, closes the backend's
//! connection at once, and llama-server ends a stream whose connection is closed.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::Response;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};
use warden_policies::{ModelName, Work};

use super::{Assembly, Fault, Kind, ask};
use crate::attempts::Relayed;
use crate::backends::Right;
use crate::client_io::Busy;
use crate::errors::Refusal;
use crate::exchange::Exchange;
use crate::headers;
use crate::intake::Intake;
use crate::link::Link;
use crate::meter::Meter;
use crate::observe::Outcome;
use crate::relay::{AnswerBody, Backend};
use crate::request_body::Sent;
use crate::wire;

/// Says to proxies that a stream must not be held.
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// What a stream has told so far. It is counted once, also when its client leaves in the middle.
struct Tally<'a> {
    meter: Meter,
    events: u64,
    counted: bool,
    right: Arc<dyn Right>,
    sent: Arc<Sent>,
    work: &'a mut Work,
}

impl Tally<'_> {
    /// The stream is over. What it told, to say how it went.
    fn end(mut self, whole: bool) -> Meter {
        self.count(whole);
        std::mem::take(&mut self.meter)
    }

    fn count(&mut self, whole: bool) {
        if !std::mem::replace(&mut self.counted, true) {
            let (images, audio) = self.sent.media();
            *self.work = Work { images, audio, ..self.meter.work((!whole).then_some(self.events)) };
            self.right.add_work(*self.work);
        }
    }
}

impl Drop for Tally<'_> {
    fn drop(&mut self) {
        self.count(false);
    }
}

/// The next piece of the stream.
async fn next(link: &mut Link, incoming: &mut Incoming) -> Option<Result<Bytes, hyper::Error>> {
    // The connection moves only while it is asked.
    poll_fn(|context| link.poll_piece(incoming, context)).await
}

impl Exchange {
    /// Turns a request for an answer that can be put together into one for a stream. Says whose dialect it is, if it was
    /// turned.
    pub(crate) async fn ask_for_a_stream(
        &self,
        model: &ModelName,
        intake: &mut Intake,
    ) -> Result<Option<Kind>, Refusal> {
        let wanted = self.live.models.get(model).is_some_and(|rules| rules.assemble);
        // Of the one table of paths, which knows every spelling of them; only a `POST` has a shape.
        let kind = self.route.shape.and_then(Kind::of).filter(|_| wanted);
        let Some(kind) = kind else { return Ok(None) };
        if !intake.take_all().await? || intake.is_stream() {
            return Ok(None);
        }
        let asked = intake.json().and_then(|body| ask::streamed(kind, &body));
        Ok(asked.filter(|body| intake.replace(body)).map(|_| kind))
    }

    /// Gives the client the backend's answer: as it comes, or put together.
    pub(crate) async fn deliver(self, relayed: Relayed, busy: Busy) -> Response<AnswerBody> {
        match self.assemble {
            // What is no stream is a refusal.
            Some(kind) if is_events(&relayed.response) => {
                // Rare and large: not a part of every request's future.
                Box::pin(self.put_together(kind, relayed, busy)).await
            }
            _ => self.relay(relayed, busy),
        }
    }

    async fn put_together(mut self, kind: Kind, relayed: Relayed, busy: Busy) -> Response<AnswerBody> {
        let Relayed { response, backend } = relayed;
        let Backend { right, mut revoked, mut link, sent, deadline, .. } = backend;
        let (mut parts, mut incoming) = response.into_parts();
        let model = self.flight.record.model.clone().unwrap_or_else(|| ModelName::new(""));
        let config = &self.shared.clone().config;
        let mut tally = Tally {
            meter: Meter::new(config.tail_bytes),
            events: 0,
            counted: false,
            right: right.clone(),
            sent: sent.clone(),
            work: &mut self.flight.record.work,
        };
        let mut assembly = Assembly::new(kind, config.assembled_bytes);
        right.note_progress(0);
        right.note_answered(true, true);
        let read = {
            let mut reading = pin!(async {
                loop {
                    right.note_waiting(Instant::now());
                    let Some(piece) = next(&mut link, &mut incoming).await else { break };
                    let piece = piece.map_err(|error| {
                        tracing::debug!(%error, "a backend's answer broke off");
                        if let Some(print) = sent.whole_print() {
                            right.broke(print);
                        }
                        right.doubt();
                        Refusal::Died { model: model.clone() }
                    })?;
                    right.note_progress(piece.len());
                    tally.meter.feed(&piece);
                    let fed = assembly.feed(&piece);
                    right.note_events(assembly.events().saturating_sub(tally.events));
                    tally.events = assembly.events();
                    if let Err(fault) = fed {
                        return Ok(Some(fault));
                    }
                }
                Ok(None)
            });
            tokio::select! {
                biased;
                read = timeout_at(deadline, &mut reading) => read.unwrap_or_else(|_| {
                    Err(Refusal::TimedOut { model: model.clone(), after: config.exchange_timeout })
                }),
                () = &mut revoked => Err(Refusal::Revoked { model: model.clone() }),
            }
        };
        // The backend is done, or is given up.
        drop((incoming, link));
        let meter = tally.end(matches!(read, Ok(None)));
        if let Err(Refusal::Revoked { .. }) = read
            && let Some(print) = sent.whole_print()
        {
            right.lost(print);
        }
        if read.is_ok() {
            right.answered(sent.print());
        }
        self.flight.record.bytes_in = sent.bytes.load(Ordering::Relaxed);
        let strange = |why: &str| Refusal::Garbled { model: model.clone(), why: why.to_owned() };
        let (status, body) = match read.and_then(|fault| match fault {
            None => assembly.finish().map(|body| (parts.status, body)).map_err(|fault| match fault {
                Fault::Strange(why) => strange(why),
                _ => strange("it cannot be put together"),
            }),
            Some(Fault::Told(status, body)) => Ok((status, body)),
            Some(Fault::Strange(why)) => Err(strange(why)),
            Some(Fault::TooLarge) => Err(strange(&format!(
                "it is larger than {} bytes (`upstream.assembled_bytes`), so it can only be had as a stream",
                config.assembled_bytes
            ))),
        }) {
            Ok(answer) => answer,
            Err(refusal) => return self.refuse(&refusal, busy),
        };
        right.note_outcome(&meter.outcome(status.as_u16()));
        drop(right);
        let version = parts.version;
        headers::to_client(&mut parts.headers, &self.request_id, true);
        wire::sign(&mut parts.headers, version);
        for name in [CACHE_CONTROL, ACCEL_BUFFERING] {
            parts.headers.remove(name);
        }
        parts.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json; charset=utf-8"));
        self.reply(status, parts.headers, body, Outcome::Ok, busy)
    }
}

fn is_events(response: &Response<Incoming>) -> bool {
    let kind = response.headers().get(CONTENT_TYPE).map(|value| value.as_bytes().to_ascii_lowercase());
    kind.is_some_and(|kind| kind.starts_with(b"text/event-stream"))
}
