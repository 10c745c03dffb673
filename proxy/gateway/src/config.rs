//! What the gateway is told: plain numbers and an address. It reads no file and no environment.

use std::time::Duration;

use warden_policies::ByteSize;
use warden_policies::defaults::{Defaults, Server};

use crate::pace::Pace;
use crate::request_body::Limits;
use crate::routes::BodySize;
use crate::tls_files::TlsFiles;

/// Address, limits and deadlines. The reason for each default is in `defaults.toml`, sections `[server]` and
/// `[upstream]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayConfig {
    /// Host name or address to listen on; an IPv6 address with or without brackets.
    pub host: String,
    /// Port to listen on, 0 for any free one.
    pub port: u16,
    /// Threads that serve clients; 0 for one on each core that we may use, at most four.
    pub threads: usize,
    /// Path under which all routes are: begins with a slash and does not end with one, or is empty.
    pub api_prefix: String,
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
    /// All of a request body has to come within this time, waiting for a backend not counted.
    pub body_deadline: Duration,
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
    /// Bytes per second of a request body with which a client earns back what it let us wait; 0: any byte does.
    pub body_rate: u64,
    /// A client that takes no byte of a waiting answer for this long is cut.
    pub send_timeout: Duration,
    /// Bytes that wait in the kernel for a client that does not take them.
    pub unsent_bytes: u32,
    /// Connections beyond the limits that are told so at a time.
    pub refusals: usize,
    /// Certificate and key, for TLS.
    pub tls: Option<TlsFiles>,
    /// Time for a TLS handshake.
    pub tls_handshake_timeout: Duration,
    /// HTTP/2: whether, and how much of it.
    pub h2: H2Limits,
    /// Time to connect to a backend.
    pub connect_timeout: Duration,
    /// An idle backend connection is not used again after this.
    pub idle_timeout: Duration,
    /// Idle backend connections kept per generation.
    pub idle_connections: usize,
    /// The same of a backend of which it is not known how many connections it serves at a time.
    pub idle_connections_unknown: usize,
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
    /// Bytes of one answer that is put together from a stream.
    pub assembled_bytes: usize,
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
        Limits { bytes, key, pace: Pace::new(self.body_timeout, self.body_rate, self.body_deadline) }
    }
}

/// HTTP/2 towards clients. The reasons are in `defaults.toml`, keys `h2…` of `[server]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct H2Limits {
    /// Offered over TLS.
    pub over_tls: bool,
    /// Taken without TLS from clients on this machine that begin with its preface.
    pub prior_knowledge: bool,
    /// Requests at a time on one connection.
    pub streams: u32,
    /// Bytes that a client may send ahead on one stream.
    pub stream_window: u32,
    /// The same for all streams of a connection.
    pub connection_window: u32,
    /// Bytes of an answer held per stream.
    pub send_buffer: usize,
    /// Streams reset before we have looked at them.
    pub pending_resets: usize,
    /// Streams that we had to reset.
    pub local_resets: usize,
    /// Requests given up by the client within `reset_window`.
    pub resets: usize,
    /// Time over which those are counted.
    pub reset_window: Duration,
    /// Silence after which we ask whether a client is there.
    pub ping: Duration,
    /// Time to answer that.
    pub ping_timeout: Duration,
}

impl From<&Server> for H2Limits {
    fn from(server: &Server) -> Self {
        Self {
            over_tls: server.h2,
            prior_knowledge: server.h2c,
            streams: server.h2_streams,
            stream_window: window(server.h2_stream_window),
            connection_window: window(server.h2_connection_window),
            send_buffer: bytes(server.h2_send_buffer),
            pending_resets: server.h2_pending_resets,
            local_resets: server.h2_local_resets,
            resets: server.h2_resets,
            reset_window: server.h2_reset_window,
            ping: server.h2_ping,
            ping_timeout: server.h2_ping_timeout,
        }
    }
}

/// RFC 9113 section 6.9.1: a window is at most 2^31-1.
fn window(size: ByteSize) -> u32 {
    u32::try_from(size.0.min(0x7fff_ffff)).unwrap_or(0x7fff_ffff)
}

impl From<&Defaults> for GatewayConfig {
    fn from(defaults: &Defaults) -> Self {
        let (server, upstream) = (&defaults.server, &defaults.upstream);
        Self {
            host: server.host.clone(),
            port: server.port,
            threads: server.threads,
            api_prefix: prefix(&server.api_prefix),
            header_timeout: server.header_timeout,
            header_bytes: bytes(server.header_bytes),
            header_count: server.header_count,
            body_bytes: server.body_bytes.0,
            audio_body_bytes: server.audio_body_bytes.0,
            text_body_bytes: server.text_body_bytes.0,
            control_body_bytes: server.control_body_bytes.0,
            body_timeout: server.body_timeout,
            body_deadline: server.body_deadline,
            buffered_bytes: bytes(server.buffered_bytes),
            model_scan_bytes: bytes(server.model_scan_bytes),
            keep_alive: server.keep_alive,
            linger: server.linger,
            accept_pause: server.accept_pause,
            connections: server.connections,
            connections_per_peer: server.connections_per_peer,
            body_rate: server.body_rate.0,
            send_timeout: server.send_timeout,
            unsent_bytes: u32::try_from(server.unsent_bytes.0).unwrap_or(u32::MAX),
            refusals: server.refusals,
            tls: TlsFiles::of(&server.tls_cert, &server.tls_key),
            tls_handshake_timeout: server.tls_handshake_timeout,
            h2: H2Limits::from(server),
            connect_timeout: upstream.connect_timeout,
            idle_timeout: upstream.idle_timeout,
            idle_connections: upstream.idle_connections,
            idle_connections_unknown: upstream.idle_connections_unknown,
            exchange_timeout: upstream.exchange_timeout,
            stream_idle: upstream.stream_idle,
            attempts: upstream.attempts,
            tail_bytes: bytes(upstream.tail_bytes),
            replay_bytes: bytes(upstream.replay_bytes),
            assembled_bytes: bytes(upstream.assembled_bytes),
            event_bytes: bytes(upstream.event_bytes),
        }
    }
}

/// However it is written: `llm`, `/llm`, `/llm/`.
fn prefix(text: &str) -> String {
    match text.trim().trim_matches('/') {
        "" => String::new(),
        inner => format!("/{inner}"),
    }
}

fn bytes(size: ByteSize) -> usize {
    usize::try_from(size.0).unwrap_or(usize::MAX)
}
