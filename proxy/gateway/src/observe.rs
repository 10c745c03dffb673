//! What the gateway reports of its work: one record for each request, and gauges. Never a prompt, a body or a key.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::time::Duration;

use http::{Method, Version};
use warden_policies::canary::{Arm, Exchange};
use warden_policies::{GenerationId, ModelName, Work};

use crate::limits::Limited;
use crate::trace::Trace;

/// Told about every request when it has ended, however it ended. Called in the request's task: it must not block.
pub trait Observer: Send + Sync + 'static {
    /// A request has ended.
    fn request_done(&self, record: &Record);
}

/// One request.
#[derive(Clone, Debug)]
pub struct Record {
    /// The client's `X-Request-Id`, or ours.
    pub request_id: String,
    /// The client's address.
    pub peer: IpAddr,
    /// The method.
    pub method: Method,
    /// The protocol on the client's side.
    pub protocol: Version,
    /// What the client calls itself: the first 200 characters, without control characters.
    pub user_agent: Option<Box<str>>,
    /// Name of the client's key, where keys are asked for and it brought a right one.
    pub key: Option<Arc<str>>,
    /// Label of the route, one of a bounded set: `chat`, `embeddings`, `health`, `other` ...
    pub route: &'static str,
    /// The model, once it is known.
    pub model: Option<ModelName>,
    /// The generation that answered, or the last one tried.
    pub generation: Option<GenerationId>,
    /// The status sent to the client; 0 if the client left before there was one.
    pub status: u16,
    /// Status of the backend's answer, or of our refusal, where the head of a stream with status 200 was sent before
    /// either was there. An error is an event of that stream then.
    pub late_status: Option<u16>,
    /// How it ended.
    pub outcome: Outcome,
    /// Whether the answer was an event stream.
    pub stream: bool,
    /// Time spent in queues, all attempts together.
    pub queued: Duration,
    /// From the end of the request head to the first byte of the answer's body, if there was one.
    pub first_byte: Option<Duration>,
    /// From the end of the request head to the first event of an answer that is generated as a stream: its first token.
    pub first_token: Option<Duration>,
    /// From the end of the request head to the end.
    pub total: Duration,
    /// Bytes of the request body taken.
    pub bytes_in: u64,
    /// Bytes of the answer's body passed on.
    pub bytes_out: u64,
    /// Work that the answer reported.
    pub work: Work,
    /// Attempts after the first.
    pub retries: u32,
    /// Whether it was executed again because its server had died.
    pub continued: bool,
    /// Its part in the trial of a canary, if its model has one and could have given it to that.
    pub tried: Option<Tried>,
    /// Its parts in time, while traces are exported.
    pub trace: Option<Box<Trace>>,
}

/// The part of a request in the trial of a canary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tried {
    /// What its conversation is known by.
    pub conversation: u64,
    /// Who was to answer it.
    pub arm: Arm,
    /// Why the model's own build answers it although the canary was to; `None`: it does not.
    pub left: Option<&'static str>,
}

impl Record {
    /// What it tells of a canary, or of the build that the canary is compared with.
    pub fn exchange(&self) -> Option<Exchange> {
        let Tried { conversation, arm, left } = self.tried?;
        let mut exchange = Exchange { arm, conversation, failed: false, latency_ms: None, token_ms: None };
        let broke = matches!(
            self.outcome,
            Outcome::UpstreamDied | Outcome::UpstreamGarbled | Outcome::UpstreamStalled | Outcome::TimedOut
        );
        let failed = broke || (self.outcome == Outcome::Ok && self.answer_status() >= 500);
        if left.is_some() {
            // What fails with both is the fault of the request, and counts as it does for those that the other build gets alone.
            let answered = self.outcome == Outcome::Ok && self.answer_status() < 400;
            exchange.failed = answered || failed || self.outcome == Outcome::ClientGone;
            let refused = self.outcome == Outcome::Ok && !exchange.failed;
            return (exchange.failed || refused).then_some(exchange);
        }
        if failed || self.continued {
            exchange.failed = true;
            return Some(exchange);
        }
        if self.outcome != Outcome::Ok {
            return None;
        }
        // A stream may begin with a comment long before it says anything.
        let first = if self.stream { self.first_token } else { self.first_byte };
        if let Some(first) = first.filter(|_| self.answer_status() == 200) {
            let begins = if self.stream { first } else { self.queued };
            let tokens = self.work.output_tokens;
            exchange.latency_ms = Some(first.saturating_sub(self.queued).as_secs_f64() * 1e3);
            exchange.token_ms = (tokens >= warden_policies::defaults().canary.pace_tokens).then(|| {
                self.total.saturating_sub(begins).as_secs_f64() * 1e3 / warden_policies::units::exact(tokens)
            });
        }
        Some(exchange)
    }

    /// Status of the answer, whether it is in the head or came behind one that had been sent.
    pub fn answer_status(&self) -> u16 {
        self.late_status.unwrap_or(self.status)
    }

    /// Notes the head of the answer: for the client, unless the client has one.
    pub(crate) fn note_head(&mut self, status: u16, stream: bool) {
        if let Some(late) = &mut self.late_status {
            *late = status;
        } else {
            (self.status, self.stream) = (status, stream);
        }
    }

    /// Notes that the client is given the head of a stream before there is an answer.
    pub(crate) fn note_early_head(&mut self) {
        (self.status, self.stream, self.late_status) = (200, true, Some(200));
    }

    /// What further attempts have cost, from a copy on which they were counted.
    pub(crate) fn spent(&mut self, copy: Self) {
        self.queued = copy.queued;
        self.generation = copy.generation;
        self.retries = copy.retries;
        self.continued = copy.continued;
        self.tried = copy.tried;
        self.trace = copy.trace;
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The backend's answer was passed on whole, whatever its status; or we answered ourselves, as asked.
    Ok,
    /// The client left first.
    ClientGone,
    /// The backend's connection ended before its answer did.
    UpstreamDied,
    /// The backend's answer was not HTTP, or its end could be seen in two places.
    UpstreamGarbled,
    /// The backend's event stream was silent for too long.
    UpstreamStalled,
    /// The exchange took longer than allowed.
    TimedOut,
    /// The generation was stopped while it answered.
    Revoked,
    /// An operator ended it.
    Cancelled,
    /// No backend took it; the label says why.
    Denied(&'static str),
    /// The request was refused; the label says why.
    Rejected(&'static str),
}

impl Outcome {
    /// A label for logs and metrics, one of a bounded set.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ClientGone => "client_gone",
            Self::UpstreamDied => "upstream_died",
            Self::UpstreamGarbled => "upstream_garbled",
            Self::UpstreamStalled => "upstream_stalled",
            Self::TimedOut => "timed_out",
            Self::Revoked => "revoked",
            Self::Cancelled => "cancelled_by_operator",
            Self::Denied(why) | Self::Rejected(why) => why,
        }
    }
}

/// What is going on now.
#[derive(Debug, Default)]
pub struct Gauges {
    /// Client connections open.
    pub connections: AtomicUsize,
    /// Requests between their head and the end of their answer.
    pub in_flight: AtomicUsize,
    /// Bytes of request bodies, and of answers that their clients do not read, held in memory.
    pub held_bytes: AtomicUsize,
    /// When the certificate ends, seconds since 1970; 0 without TLS.
    pub tls_not_after: AtomicU64,
    /// Whether `/health` sends balancers elsewhere already, while requests are still taken. Whoever serves us says so.
    pub draining: AtomicBool,
    /// How often each limit of connections was reached, of which no request has a record.
    pub limited: Limited,
}
