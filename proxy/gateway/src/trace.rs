//! What is told of a request while traces are exported: its parts, each with when it began and ended. Never a text.
//!
//! ```text
//!  request ─┬─ queue
//!           ├─ attempt ─┬─ prefill
//!           │           └─ generation
//!           ├─ attempt …                    the last one answered nothing, or its server died before the answer
//!           └─ continuation ─┬─ queue       its server died in the middle: all that follows, to the end
//!                            └─ attempt ─ …
//! ```
//!
//! A request of which nothing is exported has none of this: its [`crate::Record`] holds nothing, and each place that would note
//! something asks for that and goes on.

use std::time::Duration;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::trace_context::{Context, Given, SpanId, is_sound_state};
use warden_supervisor::{Address, Endpoint};

use crate::clock;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Parts that are noted of a request, at most: one that is tried more often is told with its first parts.
const MOST: usize = 48;

/// A request in its trace.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Which trace, and the request's own span in it.
    pub context: Context,
    /// What others have noted of the trace, as it came and goes on.
    pub state: Option<String>,
    /// When the request's head had come, in nanoseconds since 1970.
    pub began_unix_nanos: u64,
    /// Its path, if it is one of those that we know: whatever else clients write there may be anything.
    pub path: Option<&'static str>,
    /// Whether it came over TLS.
    pub tls: bool,
    /// Its parts, in the order in which they began. Empty if it is not recorded.
    pub parts: Vec<Part>,
    /// Tokens of the prompt, those that were cached included, if the answer told.
    pub prompt: Option<u64>,
    started: Instant,
    numbered: u32,
}

/// A part of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its span.
    pub span: SpanId,
    /// The span that it is a part of.
    pub parent: SpanId,
    /// What was done.
    pub kind: Kind,
    /// When it began, since the request's head had come.
    pub begin: Duration,
    /// When it ended; `None` while it goes on.
    pub end: Option<Duration>,
    /// Why it came to nothing, one of a bounded set of words.
    pub failed: Option<&'static str>,
}

/// What a part is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It waited for a backend.
    Queue,
    /// It was sent to one.
    Attempt(Peer),
    /// The prompt was evaluated, up to the first token.
    Prefill,
    /// Tokens were generated.
    Generation,
    /// Its server was gone in the middle of the answer, and another one computes the rest.
    Continuation,
}

/// To whom a request was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Which process.
    pub generation: GenerationId,
    /// Whether that is of a build which is only tried.
    pub canary: bool,
    /// Host, or the path of a socket.
    pub address: String,
    /// Port, where it has one.
    pub port: Option<u16>,
}

impl Peer {
    /// A process at this address.
    pub(crate) fn of(generation: GenerationId, canary: bool, address: &Address) -> Self {
        let (address, port) = match address {
            Address::Process(Endpoint::Unix(path)) => (path.to_string_lossy().into_owned(), None),
            Address::Process(Endpoint::Tcp(at)) => (at.ip().to_string(), Some(at.port())),
            Address::Remote(origin) => (origin.host().to_owned(), Some(origin.port())),
        };
        Self { generation, canary, address, port }
    }
}

impl Trace {
    /// Of a request with these fields. What of them is not sound is taken out, so that it goes no further.
    pub(crate) fn begin(
        headers: &mut HeaderMap,
        ratio: f64,
        path: Option<&'static str>,
        tls: bool,
    ) -> Box<Self> {
        let mut all = headers.get_all(&TRACEPARENT).iter();
        let given = match (all.next(), all.next()) {
            (Some(one), None) => Given::parse(one.as_bytes()),
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
        let context = Context::of(given, (rand::random(), rand::random()), ratio);
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

    /// The part that is open now and of this kind, the last one first.
    fn open(&mut self, is: fn(&Kind) -> bool) -> Option<&mut Part> {
        self.parts.iter_mut().rev().find(|part| part.end.is_none() && is(&part.kind))
    }

    /// What others are asked for now is a part of this.
    fn parent(&mut self) -> SpanId {
        let own = self.context.span;
        self.open(|kind| *kind == Kind::Continuation).map_or(own, |part| part.span)
    }

    fn push(&mut self, kind: Kind, parent: SpanId, begin: Duration, end: Option<Duration>) -> SpanId {
        if !self.context.is_sampled() || self.parts.len() >= MOST {
            return self.context.span;
        }
        let span = self.context.span.part(self.numbered);
        self.numbered += 1;
        self.parts.push(Part { span, parent, kind, begin, end, failed: None });
        span
    }

    /// It asks for a backend.
    pub(crate) fn waits(&mut self) {
        let (parent, now) = (self.parent(), self.started.elapsed());
        self.push(Kind::Queue, parent, now, None);
    }

    /// It got one, for which it had waited so long. Who has not waited was in no queue.
    pub(crate) fn granted(&mut self, waited: Duration) {
        let now = self.started.elapsed();
        let begin = now.saturating_sub(waited);
        if let Some(at) = self.parts.iter().rposition(|part| part.end.is_none() && part.kind == Kind::Queue) {
            if waited.is_zero() {
                self.parts.remove(at);
            } else {
                self.parts[at].end = Some(now);
            }
        } else if !waited.is_zero() {
            let parent = self.parent();
            self.push(Kind::Queue, parent, begin, Some(now));
        }
    }

    /// It is sent to a backend. Gives the `traceparent` for that.
    pub(crate) fn asks(&mut self, peer: impl FnOnce() -> Peer) -> Option<HeaderValue> {
        let mut span = self.context.span;
        if self.context.is_sampled() {
            self.answered(None);
            let (parent, now) = (self.parent(), self.started.elapsed());
            span = self.push(Kind::Attempt(peer()), parent, now, None);
        }
        HeaderValue::from_str(&self.context.traceparent(span)).ok()
    }

    /// The `traceparent` for a question of ours beside what the client asked: it belongs to the continuation that it is for, and not to
    /// the server that is gone.
    pub(crate) fn asks_beside(&mut self) -> Option<HeaderValue> {
        let span = self.parent();
        HeaderValue::from_str(&self.context.traceparent(span)).ok()
    }

    /// The attempt that is under way is over.
    pub(crate) fn answered(&mut self, failed: Option<&'static str>) {
        let now = self.started.elapsed();
        let is_of_it = |kind: &Kind| matches!(kind, Kind::Attempt(_) | Kind::Prefill | Kind::Generation);
        for part in self.parts.iter_mut().filter(|part| part.end.is_none() && is_of_it(&part.kind)) {
            part.end = Some(now);
            part.failed = part.failed.or(failed.filter(|_| matches!(part.kind, Kind::Attempt(_))));
        }
    }

    /// The first token of the attempt that is under way has come.
    pub(crate) fn speaks(&mut self, at: Instant) {
        let now = at.saturating_duration_since(self.started);
        let Some(attempt) = self.open(|kind| matches!(kind, Kind::Attempt(_))) else { return };
        let (span, begin) = (attempt.span, attempt.begin);
        if self.parts.iter().any(|part| part.parent == span && part.kind == Kind::Generation) {
            return;
        }
        self.push(Kind::Prefill, span, begin, Some(now.max(begin)));
        self.push(Kind::Generation, span, now.max(begin), None);
    }

    /// What the server tells of an answer that came in one piece: how long the prompt and the tokens took it.
    pub(crate) fn timed(&mut self, prompt: Option<Duration>, tokens: Option<Duration>) {
        let now = self.started.elapsed();
        let Some(attempt) = self.open(|kind| matches!(kind, Kind::Attempt(_))) else { return };
        let (span, begin) = (attempt.span, attempt.begin);
        let (Some(prompt), Some(tokens)) = (prompt, tokens) else { return };
        if self.parts.iter().any(|part| part.parent == span) {
            return;
        }
        let middle = now.saturating_sub(tokens).max(begin);
        self.push(Kind::Prefill, span, middle.saturating_sub(prompt).max(begin), Some(middle));
        self.push(Kind::Generation, span, middle, Some(now));
    }

    /// Its server is gone in the middle of the answer: what follows is to be the rest.
    pub(crate) fn goes_on(&mut self, failed: &'static str) {
        self.answered(Some(failed));
        let now = self.started.elapsed();
        if self.open(|kind| *kind == Kind::Continuation).is_none() {
            self.push(Kind::Continuation, self.context.span, now, None);
        }
    }

    /// It is over.
    pub(crate) fn end(&mut self, total: Duration, failed: Option<&'static str>) {
        for part in self.parts.iter_mut().filter(|part| part.end.is_none()) {
            part.end = Some(total.max(part.begin));
            let is_judged = !matches!(part.kind, Kind::Prefill | Kind::Generation);
            part.failed = part.failed.or(failed.filter(|_| is_judged));
        }
        // Both clocks are read one after the other.
        for part in &mut self.parts {
            part.begin = part.begin.min(total);
            part.end = part.end.map(|end| end.min(total));
        }
    }
}

/// Makes a request one of this span.
pub(crate) fn follow(headers: &mut HeaderMap, parent: Option<HeaderValue>) {
    if let Some(parent) = parent {
        headers.insert(TRACEPARENT, parent);
    }
}

#[cfg(test)]
#[path = "trace_tests.rs"]
mod tests;
