//! Counters of limits that end or refuse a connection, for which there is no request record. The reason for
//! refusing a request is its outcome instead ([`crate::RequestOutcome`]).

use std::sync::atomic::{AtomicU64, Ordering};

/// A limit that ends or refuses a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatewayLimit {
    /// `server.connections`: a connection was refused.
    Connections,
    /// `server.connections_per_peer`: a connection was refused.
    ConnectionsPerPeer,
    /// `server.refusals`: a connection was closed without an answer.
    Refusals,
    /// `server.header_timeout`: a head, or the beginning of a connection, did not come in time.
    HeadTime,
    /// `server.header_bytes`, `server.header_count`: a head was too large.
    HeadSize,
    /// A head was not HTTP.
    HeadInvalid,
    /// `server.keep_alive`: an idle connection was closed. Normal for every client, and harmless.
    KeepAlive,
    /// `server.send_timeout`: the connection of a client that does not read was cut.
    SendTime,
    /// `upstream.exchange_timeout`: an answer was cut because its client had still not read it long after
    /// that time.
    Overdue,
    /// `server.tls_handshake_timeout`: a TLS handshake took too long.
    HandshakeTime,
    /// A TLS handshake failed.
    Handshake,
    /// `server.h2_resets`, `server.h2_pending_resets`, `server.h2_local_resets`: too many streams were reset.
    H2Resets,
    /// Frames were not HTTP/2.
    H2Invalid,
    /// `server.h2_ping_timeout`: the client did not answer a ping in time.
    H2Ping,
}

impl GatewayLimit {
    /// All limits.
    pub const ALL: [Self; 14] = [
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
        Self::H2Resets,
        Self::H2Invalid,
        Self::H2Ping,
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
            Self::H2Resets => "h2_resets",
            Self::H2Invalid => "h2_invalid",
            Self::H2Ping => "h2_ping",
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
