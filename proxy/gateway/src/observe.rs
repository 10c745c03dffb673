//! What the gateway reports of its work: one record for each request, and gauges. Never a prompt, a body or a key.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::Duration;

use http::{Method, Version};
use warden_policies::{GenerationId, ModelName, Work};

use crate::limits::Limited;

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
    /// How it ended.
    pub outcome: Outcome,
    /// Whether the answer was an event stream.
    pub stream: bool,
    /// Time spent in queues, all attempts together.
    pub queued: Duration,
    /// From the end of the request head to the first byte of the answer's body, if there was one.
    pub first_byte: Option<Duration>,
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
}

impl Record {
    /// What further attempts have cost, from a copy on which they were counted.
    pub(crate) fn spent(&mut self, copy: &Self) {
        self.queued = copy.queued;
        self.generation = copy.generation;
        self.retries = copy.retries;
        self.continued = copy.continued;
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
    /// Bytes of request bodies held in memory.
    pub held_bytes: AtomicUsize,
    /// When the certificate ends, seconds since 1970; 0 without TLS.
    pub tls_not_after: AtomicU64,
    /// How often each limit of connections was reached, of which no request has a record.
    pub limited: Limited,
}
