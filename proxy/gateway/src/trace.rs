//! Spans of a request for exported traces: its parts with their start and end, without any text of prompts or
//! answers.
//!
//! ```text
//!  request ─┬─ queue
//!           ├─ attempt ─┬─ prefill
//!           │           └─ generation
//!           ├─ attempt …                  if the previous attempt failed before the answer
//!           └─ continuation ─┬─ queue     after a server died in the middle of the answer: all later parts
//!                            └─ attempt ─ …
//! ```
//!
//! Without exported traces, a request's [`crate::RequestRecord`] has no trace, and all code that would record
//! a span checks that first.

use std::time::Duration;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::trace_context::{IncomingContext, RequestTraceContext, SpanId, is_sound_state};
use warden_supervisor::{LeaseAddress, ListenAddress};

use crate::clock;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Maximum number of recorded parts of a request; later parts are dropped.
const MAX_PARTS: usize = 48;

/// Trace data of a request.
#[derive(Clone, Debug)]
pub struct GatewayTrace {
    /// Trace id, and the span of the request itself.
    pub context: RequestTraceContext,
    /// `tracestate` of other participants, passed on as received.
    pub state: Option<String>,
    /// Arrival of the request's head, in nanoseconds since 1970.
    pub began_unix_nanos: u64,
    /// Path, if llama-server has it; any other path may contain private data.
    pub path: Option<&'static str>,
    /// True if the request came over TLS.
    pub tls: bool,
    /// Parts in the order of their beginning; empty if the request is not sampled.
    pub parts: Vec<TracePart>,
    /// Number of prompt tokens, including cached ones, if the answer reported it.
    pub prompt: Option<u64>,
    started: Instant,
    numbered: u32,
}

/// A part of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracePart {
    /// Span id.
    pub span: SpanId,
    /// Id of the parent span.
    pub parent: SpanId,
    /// Kind of the part.
    pub kind: TracePartKind,
    /// Begin, since the arrival of the request's head.
    pub begin: Duration,
    /// End; `None` while it is running.
    pub end: Option<Duration>,
    /// Reason of a failure, from a bounded set of words.
    pub failed: Option<&'static str>,
}

/// Kind of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TracePartKind {
    /// Waiting for a backend.
    Queue,
    /// Request and answer at a backend.
    Attempt(TracePeer),
    /// Evaluation of the prompt, up to the first token.
    Prefill,
    /// Generation of tokens.
    Generation,
    /// Computation of the rest by another server, after the first died in the middle of the answer.
    Continuation,
}

/// Backend of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracePeer {
    /// Generation of the process.
    pub generation: GenerationId,
    /// True if the process is a canary.
    pub canary: bool,
    /// Host name or IP address, or path of a socket.
    pub address: String,
    /// Port, if the address has one.
    pub port: Option<u16>,
}

impl TracePeer {
    pub(crate) fn from_address(generation: GenerationId, canary: bool, address: &LeaseAddress) -> Self {
        let (address, port) = match address {
            LeaseAddress::Process(ListenAddress::Unix(path)) => (path.to_string_lossy().into_owned(), None),
            LeaseAddress::Process(ListenAddress::Tcp(at)) => (at.ip().to_string(), Some(at.port())),
            LeaseAddress::Remote(origin) => (origin.host().to_owned(), Some(origin.port())),
        };
        Self { generation, canary, address, port }
    }
}

impl GatewayTrace {
    /// Starts the trace of a request. Removes invalid trace headers, so that they are not passed on.
    pub(crate) fn begin(
        headers: &mut HeaderMap,
        ratio: f64,
        path: Option<&'static str>,
        tls: bool,
    ) -> Box<Self> {
        let mut all = headers.get_all(&TRACEPARENT).iter();
        let given = match (all.next(), all.next()) {
            (Some(one), None) => IncomingContext::parse(one.as_bytes()),
            _ => None,
        };
        let states = headers.get_all(&TRACESTATE);
        let is_sound = given.is_some() && is_sound_state(states.iter().map(HeaderValue::as_bytes));
        let state = is_sound.then(|| {
            let values: Vec<&str> = states.iter().filter_map(|value| value.to_str().ok()).collect();
            values.join(",")
        });
        if !is_sound {
            headers.remove(&TRACESTATE);
        }
        let context = RequestTraceContext::derive(given, (rand::random(), rand::random()), ratio);
        Box::new(Self {
            context,
            state: state.filter(|state| !state.is_empty()),
            began_unix_nanos: clock::unix_nanos(),
            path,
            tls,
            parts: Vec::new(),
            prompt: None,
            started: Instant::now(),
            numbered: 0,
        })
    }

    fn open_part(&mut self, is: fn(&TracePartKind) -> bool) -> Option<&mut TracePart> {
        self.parts.iter_mut().rev().find(|part| part.end.is_none() && is(&part.kind))
    }

    /// Returns the parent of the next spans.
    fn parent_span(&mut self) -> SpanId {
        let own = self.context.span;
        self.open_part(|kind| *kind == TracePartKind::Continuation).map_or(own, |part| part.span)
    }

    fn push_part(
        &mut self,
        kind: TracePartKind,
        parent: SpanId,
        begin: Duration,
        end: Option<Duration>,
    ) -> SpanId {
        if !self.context.is_sampled() || self.parts.len() >= MAX_PARTS {
            return self.context.span;
        }
        let span = self.context.span.child_id(self.numbered);
        self.numbered += 1;
        self.parts.push(TracePart { span, parent, kind, begin, end, failed: None });
        span
    }

    pub(crate) fn note_waiting(&mut self) {
        let parent = self.parent_span();
        let now = self.started.elapsed();
        self.push_part(TracePartKind::Queue, parent, now, None);
    }

    /// Records that a lease was granted after `waited`. A request that did not wait gets no queue span.
    pub(crate) fn note_granted(&mut self, waited: Duration) {
        let now = self.started.elapsed();
        let begin = now.saturating_sub(waited);
        if let Some(at) =
            self.parts.iter().rposition(|part| part.end.is_none() && part.kind == TracePartKind::Queue)
        {
            if waited.is_zero() {
                self.parts.remove(at);
            } else {
                self.parts[at].end = Some(now);
            }
        } else if !waited.is_zero() {
            let parent = self.parent_span();
            self.push_part(TracePartKind::Queue, parent, begin, Some(now));
        }
    }

    /// Records the start of an attempt and returns its `traceparent`.
    pub(crate) fn start_attempt(&mut self, peer: impl FnOnce() -> TracePeer) -> Option<HeaderValue> {
        let mut span = self.context.span;
        if self.context.is_sampled() {
            self.end_attempt(None);
            let parent = self.parent_span();
            let now = self.started.elapsed();
            span = self.push_part(TracePartKind::Attempt(peer()), parent, now, None);
        }
        HeaderValue::from_str(&self.context.traceparent(span)).ok()
    }

    /// The continuation is the parent of a gateway's own request, not the dead server's attempt.
    pub(crate) fn side_traceparent(&mut self) -> Option<HeaderValue> {
        let span = self.parent_span();
        HeaderValue::from_str(&self.context.traceparent(span)).ok()
    }

    pub(crate) fn end_attempt(&mut self, failed: Option<&'static str>) {
        let now = self.started.elapsed();
        let is_of_it = |kind: &TracePartKind| {
            matches!(kind, TracePartKind::Attempt(_) | TracePartKind::Prefill | TracePartKind::Generation)
        };
        for part in self.parts.iter_mut().filter(|part| part.end.is_none() && is_of_it(&part.kind)) {
            part.end = Some(now);
            if matches!(part.kind, TracePartKind::Attempt(_)) {
                part.failed = part.failed.or(failed);
            }
        }
    }

    pub(crate) fn note_first_token(&mut self, at: Instant) {
        let now = at.saturating_duration_since(self.started);
        let Some(attempt) = self.open_part(|kind| matches!(kind, TracePartKind::Attempt(_))) else { return };
        let span = attempt.span;
        let begin = attempt.begin;
        if self.parts.iter().any(|part| part.parent == span && part.kind == TracePartKind::Generation) {
            return;
        }
        self.push_part(TracePartKind::Prefill, span, begin, Some(now.max(begin)));
        self.push_part(TracePartKind::Generation, span, now.max(begin), None);
    }

    /// Records the times for prompt and tokens that a non-streaming answer reports.
    pub(crate) fn note_times(&mut self, prompt: Option<Duration>, tokens: Option<Duration>) {
        let now = self.started.elapsed();
        let Some(attempt) = self.open_part(|kind| matches!(kind, TracePartKind::Attempt(_))) else { return };
        let span = attempt.span;
        let begin = attempt.begin;
        let (Some(prompt), Some(tokens)) = (prompt, tokens) else { return };
        if self.parts.iter().any(|part| part.parent == span) {
            return;
        }
        let middle = now.saturating_sub(tokens).max(begin);
        self.push_part(TracePartKind::Prefill, span, middle.saturating_sub(prompt).max(begin), Some(middle));
        self.push_part(TracePartKind::Generation, span, middle, Some(now));
    }

    /// Records the loss of the server in the middle of the answer; later parts belong to the continuation.
    pub(crate) fn start_continuation(&mut self, failed: &'static str) {
        self.end_attempt(Some(failed));
        let now = self.started.elapsed();
        if self.open_part(|kind| *kind == TracePartKind::Continuation).is_none() {
            self.push_part(TracePartKind::Continuation, self.context.span, now, None);
        }
    }

    pub(crate) fn end(&mut self, total: Duration, failed: Option<&'static str>) {
        for part in self.parts.iter_mut().filter(|part| part.end.is_none()) {
            part.end = Some(total.max(part.begin));
            if !matches!(part.kind, TracePartKind::Prefill | TracePartKind::Generation) {
                part.failed = part.failed.or(failed);
            }
        }
        // The clock was read several times, so limit the parts to the total.
        for part in &mut self.parts {
            part.begin = part.begin.min(total);
            part.end = part.end.map(|end| end.min(total));
        }
    }
}

pub(crate) fn set_traceparent(headers: &mut HeaderMap, parent: Option<HeaderValue>) {
    if let Some(parent) = parent {
        headers.insert(TRACEPARENT, parent);
    }
}

#[cfg(test)]
#[path = "trace_tests.rs"]
mod tests;
