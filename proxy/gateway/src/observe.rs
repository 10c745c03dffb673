//! Reports about the gateway's work: records and gauges, without any prompt, body or key.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use http::{Method, Version};
use warden_policies::canary::{TrialArm, TrialExchange};
use warden_policies::{GenerationId, ModelName, WorkDone};

use crate::trace::GatewayTrace;

/// Receives the record of each ended request. The request's task calls it, so it must not block.
pub trait GatewayObserver: Send + Sync + 'static {
    /// Receives the record of an ended request.
    fn request_done(&self, record: &RequestRecord);
}

/// Record of one request.
#[derive(Clone, Debug)]
pub struct RequestRecord {
    /// The client's `X-Request-Id`, or a generated one.
    pub request_id: String,
    /// The client's address.
    pub peer: IpAddr,
    /// HTTP method.
    pub method: Method,
    /// HTTP version on the client's side.
    pub protocol: Version,
    /// `User-Agent`: its first 200 characters, without control characters.
    pub user_agent: Option<Box<str>>,
    /// Name of the client's key, if keys are required and the key is valid.
    pub key: Option<Arc<str>>,
    /// Label of the route from a bounded set: `chat`, `embeddings`, `health`, `other` ...
    pub route: &'static str,
    /// The model, once it is known.
    pub model: Option<ModelName>,
    /// The generation that answered, or the last one tried.
    pub generation: Option<GenerationId>,
    /// Status sent to the client; 0 if the client left before.
    pub status: u16,
    /// Status of the backend's answer or of a refusal, if the client already had the head of a stream with
    /// status 200. An error is then an event of that stream.
    pub late_status: Option<u16>,
    /// Outcome of the request.
    pub outcome: RequestOutcome,
    /// True if the answer was an event stream.
    pub stream: bool,
    /// Time spent in queues, over all attempts.
    pub queued: Duration,
    /// Time from the end of the request head to the first byte of the answer's body.
    pub first_byte: Option<Duration>,
    /// Time from the end of the request head to the first token of a generated stream.
    pub first_token: Option<Duration>,
    /// Time from the end of the request head to the end of the request.
    pub total: Duration,
    /// Bytes read of the request body, decoded.
    pub bytes_in: u64,
    /// Bytes sent of the answer's body.
    pub bytes_out: u64,
    /// Work that the answer reported.
    pub work: WorkDone,
    /// Number of attempts after the first.
    pub retries: u32,
    /// True if the request was executed again because its server died.
    pub continued: bool,
    /// Role in the trial of a canary, if the model has one and the request was eligible.
    pub canary_part: Option<CanaryPart>,
    /// Spans of the request; `None` unless traces are exported.
    pub trace: Option<Box<GatewayTrace>>,
}

/// Role of a request in the trial of a canary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CanaryPart {
    /// Hash of the conversation to which the request belongs.
    pub conversation: u64,
    /// Build that was chosen to answer.
    pub arm: TrialArm,
    /// Reason why the normal build answered in place of the chosen canary.
    pub canary_failure: Option<&'static str>,
}

impl RequestRecord {
    /// Returns the result for the comparison of a canary with the model's normal build.
    pub fn trial_exchange(&self) -> Option<TrialExchange> {
        let CanaryPart { conversation, arm, canary_failure: left } = self.canary_part?;
        let mut exchange =
            TrialExchange { arm, conversation, failed: false, latency_ms: None, token_ms: None };
        let broke = matches!(
            self.outcome,
            RequestOutcome::UpstreamDied
                | RequestOutcome::UpstreamGarbled
                | RequestOutcome::UpstreamStalled
                | RequestOutcome::TimedOut
        );
        let failed = broke || (self.outcome == RequestOutcome::Ok && self.answer_status() >= 500);
        if left.is_some() {
            // A request that the normal build refuses (4xx) is itself wrong, and no failure of the canary.
            let answered = self.outcome == RequestOutcome::Ok && self.answer_status() < 400;
            exchange.failed = answered || failed || self.outcome == RequestOutcome::ClientGone;
            let refused = self.outcome == RequestOutcome::Ok && !exchange.failed;
            return (exchange.failed || refused).then_some(exchange);
        }
        if failed || self.continued {
            exchange.failed = true;
            return Some(exchange);
        }
        if self.outcome != RequestOutcome::Ok {
            return None;
        }
        // Comments may begin a stream long before its first token.
        let first = if self.stream { self.first_token } else { self.first_byte };
        if self.answer_status() == 200
            && let Some(first) = first
        {
            let begins = if self.stream { first } else { self.queued };
            let tokens = self.work.output_tokens;
            exchange.latency_ms = Some(first.saturating_sub(self.queued).as_secs_f64() * 1e3);
            exchange.token_ms = (tokens >= warden_policies::defaults().canary.pace_tokens).then(|| {
                self.total.saturating_sub(begins).as_secs_f64() * 1e3 / warden_policies::units::as_f64(tokens)
            });
        }
        Some(exchange)
    }

    /// Returns the status of the answer, even if it followed an early head.
    pub fn answer_status(&self) -> u16 {
        self.late_status.unwrap_or(self.status)
    }

    /// Records the head of the answer. The client gets it unless an earlier head was sent.
    pub(crate) fn note_head(&mut self, status: u16, stream: bool) {
        if let Some(late) = &mut self.late_status {
            *late = status;
        } else {
            (self.status, self.stream) = (status, stream);
        }
    }

    /// Records that the client gets the head of a stream before the backend answers.
    pub(crate) fn note_early_head(&mut self) {
        (self.status, self.stream, self.late_status) = (200, true, Some(200));
    }

    /// Takes over the cost of further attempts, counted on a copy of this record.
    pub(crate) fn take_over_cost(&mut self, copy: Self) {
        self.queued = copy.queued;
        self.generation = copy.generation;
        self.retries = copy.retries;
        self.continued = copy.continued;
        self.canary_part = copy.canary_part;
        self.trace = copy.trace;
    }
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestOutcome {
    /// The client has the whole answer of the backend, with any status, or of the gateway itself.
    Ok,
    /// The client left before the answer was complete.
    ClientGone,
    /// The backend's connection ended before the end of the answer.
    UpstreamDied,
    /// The backend's answer was not HTTP, or its end was ambiguous.
    UpstreamGarbled,
    /// The backend's event stream was silent for too long.
    UpstreamStalled,
    /// The exchange took longer than allowed.
    TimedOut,
    /// The generation was stopped while it was answering.
    Revoked,
    /// An operator cancelled the request.
    Cancelled,
    /// No backend accepted the request; the label gives the reason.
    Denied(&'static str),
    /// The gateway refused the request; the label gives the reason.
    Rejected(&'static str),
}

impl RequestOutcome {
    /// Label for logs and metrics, from a bounded set.
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

/// Gauges of current activity.
#[derive(Debug, Default)]
pub struct GatewayGauges {
    /// Number of open client connections.
    pub connections: AtomicUsize,
    /// Number of requests between their head and the end of their answer.
    pub in_flight: AtomicUsize,
    /// Bytes of request bodies and unread answers in memory.
    pub held_bytes: AtomicUsize,
    /// End of the certificate's validity in seconds since 1970; 0 without TLS.
    pub tls_not_after: AtomicU64,
    /// True if `/health` fails, so that load balancers use other instances while requests are still served.
    /// The program sets this before it stops the gateway.
    pub draining: AtomicBool,
    /// Counters of the connection limits, which no request record has.
    pub limited: LimitCounters,
}

/// A limit that ends or refuses a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatewayLimit {
    /// `server.connections`: a connection was refused.
    Connections,
    /// `server.connections_per_peer`: a connection was refused.
    ConnectionsPerPeer,
    /// `server.refusals`: a connection was closed without an answer.
    Refusals,
    /// `server.header_timeout`: a head was late.
    HeadTime,
    /// `server.header_bytes`, `server.header_count`: a head was too large.
    HeadSize,
    /// A head was not HTTP.
    HeadInvalid,
    /// `server.keep_alive`: an idle connection was closed, which is normal for every client.
    KeepAlive,
    /// `server.send_timeout`: the connection of a client that does not read was cut.
    SendTime,
    /// `upstream.exchange_timeout`: an answer was cut whose client had still not read it.
    Overdue,
    /// `server.tls_handshake_timeout`: a TLS handshake took too long.
    HandshakeTime,
    /// A TLS handshake failed.
    Handshake,
}

impl GatewayLimit {
    /// All limits.
    pub const ALL: [Self; 11] = [
        Self::Connections,
        Self::ConnectionsPerPeer,
        Self::Refusals,
        Self::HeadTime,
        Self::HeadSize,
        Self::HeadInvalid,
        Self::KeepAlive,
        Self::SendTime,
        Self::Overdue,
        Self::HandshakeTime,
        Self::Handshake,
    ];

    /// Label for metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::ConnectionsPerPeer => "connections_per_peer",
            Self::Refusals => "refusals",
            Self::HeadTime => "head_time",
            Self::HeadSize => "head_size",
            Self::HeadInvalid => "head_invalid",
            Self::KeepAlive => "keep_alive",
            Self::SendTime => "send_time",
            Self::Overdue => "overdue",
            Self::HandshakeTime => "handshake_time",
            Self::Handshake => "handshake",
        }
    }
}

/// Counters of reached limits since the start.
#[derive(Debug, Default)]
pub struct LimitCounters([AtomicU64; GatewayLimit::ALL.len()]);

impl LimitCounters {
    /// Returns how often a limit was reached.
    pub fn count(&self, limit: GatewayLimit) -> u64 {
        self.0[limit as usize].load(Ordering::Relaxed)
    }

    pub(crate) fn note(&self, limit: GatewayLimit) {
        self.0[limit as usize].fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_has_a_count_and_a_label_of_its_own() {
        let limited = LimitCounters::default();
        for (place, limit) in GatewayLimit::ALL.into_iter().enumerate() {
            assert_eq!(limit as usize, place, "{limit:?}");
            assert_eq!(limited.count(limit), 0);
            limited.note(limit);
            assert_eq!(limited.count(limit), 1);
            let same = GatewayLimit::ALL.iter().filter(|other| other.as_str() == limit.as_str());
            assert_eq!(same.count(), 1, "{limit:?}");
        }
    }
}
