//! What the gateway is told: plain numbers and an address. It reads no file and no environment.

use std::time::Duration;

use warden_policies::ByteSize;
use warden_policies::defaults::Defaults;

use crate::request_body::Limits;
use crate::routes::BodySize;

/// Address, limits and deadlines. The reason for each default is in `defaults.toml`, sections `[server]` and
/// `[upstream]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayConfig {
    /// Host name or address to listen on; an IPv6 address with or without brackets.
    pub host: String,
    /// Port to listen on, 0 for any free one.
    pub port: u16,
    /// From the first byte of a request head to its last.
    pub header_timeout: Duration,
    /// Bytes in a request head, at least 8 KiB.
    pub header_bytes: usize,
    /// Fields in a request head.
    pub header_count: usize,
    /// Bytes in a request body.
    pub body_bytes: u64,
    /// Bytes in the form of a transcription.
    pub audio_body_bytes: u64,
    /// Bytes in a body that holds text alone: `/tokenize`, `/rerank` and their like; no more than `body_bytes`.
    pub text_body_bytes: u64,
    /// Bytes in a body that tells the server itself something: `/slots/0`, `/props` and their like; no more than
    /// `body_bytes`.
    pub control_body_bytes: u64,
    /// A request body without a byte for this long is given up.
    pub body_timeout: Duration,
    /// Bytes of request bodies held in memory, all requests together.
    pub buffered_bytes: usize,
    /// Bytes of one body read in search of `model`.
    pub model_scan_bytes: usize,
    /// An idle client connection is closed after this.
    pub keep_alive: Duration,
    /// A connection closed with unread bytes is read for this long, so that the client sees its answer.
    pub linger: Duration,
    /// Pause after a failure to accept.
    pub accept_pause: Duration,
    /// Client connections in all.
    pub connections: usize,
    /// Client connections from one address.
    pub connections_per_peer: usize,
    /// Time to connect to a backend.
    pub connect_timeout: Duration,
    /// An idle backend connection is not used again after this.
    pub idle_timeout: Duration,
    /// Idle backend connections kept per generation.
    pub idle_connections: usize,
    /// Longest life of one exchange, from the moment it has its lease.
    pub exchange_timeout: Duration,
    /// An event stream without a byte for this long is dead.
    pub stream_idle: Duration,
    /// Attempts to find a backend that takes a request, 1 or more.
    pub attempts: u32,
    /// Bytes kept of an answer in search of `usage` and `timings`.
    pub tail_bytes: usize,
    /// Bytes of a request body that are read before it is sent, and kept so that it can be sent again.
    pub replay_bytes: usize,
    /// Bytes of an incomplete event of a stream that are held until the event is complete.
    pub event_bytes: usize,
}

impl GatewayConfig {
    /// What a body of this class may be.
    pub(crate) fn limits(&self, size: BodySize) -> Limits {
        let (bytes, key) = match size {
            BodySize::Prompt => (self.body_bytes, "server.body_bytes"),
            BodySize::Audio => (self.audio_body_bytes, "server.audio_body_bytes"),
            BodySize::Text => (self.text_body_bytes, "server.text_body_bytes"),
            BodySize::Control => (self.control_body_bytes, "server.control_body_bytes"),
        };
        let narrower = matches!(size, BodySize::Text | BodySize::Control) && self.body_bytes < bytes;
        let (bytes, key) = if narrower { (self.body_bytes, "server.body_bytes") } else { (bytes, key) };
        Limits { bytes, key, silence: self.body_timeout }
    }
}

impl From<&Defaults> for GatewayConfig {
    fn from(defaults: &Defaults) -> Self {
        let (server, upstream) = (&defaults.server, &defaults.upstream);
        Self {
            host: server.host.clone(),
            port: server.port,
            header_timeout: server.header_timeout,
            header_bytes: bytes(server.header_bytes),
            header_count: server.header_count,
            body_bytes: server.body_bytes.0,
            audio_body_bytes: server.audio_body_bytes.0,
            text_body_bytes: server.text_body_bytes.0,
            control_body_bytes: server.control_body_bytes.0,
            body_timeout: server.body_timeout,
            buffered_bytes: bytes(server.buffered_bytes),
            model_scan_bytes: bytes(server.model_scan_bytes),
            keep_alive: server.keep_alive,
            linger: server.linger,
            accept_pause: server.accept_pause,
            connections: server.connections,
            connections_per_peer: server.connections_per_peer,
            connect_timeout: upstream.connect_timeout,
            idle_timeout: upstream.idle_timeout,
            idle_connections: upstream.idle_connections,
            exchange_timeout: upstream.exchange_timeout,
            stream_idle: upstream.stream_idle,
            attempts: upstream.attempts,
            tail_bytes: bytes(upstream.tail_bytes),
            replay_bytes: bytes(upstream.replay_bytes),
            event_bytes: bytes(upstream.event_bytes),
        }
    }
}

fn bytes(size: ByteSize) -> usize {
    usize::try_from(size.0).unwrap_or(usize::MAX)
}
