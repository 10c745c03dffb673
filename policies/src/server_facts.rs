//! What is known of how a llama-server behaves, apart from what it is asked for: facts of the program, the same for every
//! model that it serves. A build of ours was measured when it was verified, another program at its first start.
//!
//! Each fact may be unknown, and unknown always means the careful answer: whoever decides by a fact takes the behaviour
//! that hurts least if the guess is wrong. So a default value is always safe to decide by.

use serde::{Deserialize, Serialize};

/// How a llama-server behaves. The default knows nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerFacts {
    /// When the head of a streamed answer is sent.
    pub stream_head: StreamHead,
    /// Whether it can listen on a Unix socket. Upstream can since about b5000. `None`: unknown.
    pub unix_sockets: Option<bool>,
    /// How many connections it serves at a time, 1 or more: a further one, be it idle or busy, waits until one of them is
    /// closed. [`ServerFacts::THREADS_ON_DEMAND`] where threads are made as connections come, which upstream does since
    /// about b8485. A server that is started with more slots than when it was measured may serve more, never fewer.
    /// `None`: unknown.
    pub http_threads: Option<u32>,
    /// Whether it can be told where to save slots, and lets nobody but who may save them see what is there. Not so `ik_llama.cpp`, which
    /// lists them for everybody. `None`: unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot_files: Option<bool>,
    /// Whether a body that it answers without reading is read and thrown away, or its connection closed. cpp-httplib
    /// before 0.40, which upstream had until about b8570, does neither: it reads the rest of such a body as the next
    /// request. `None`: unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discards_bodies: Option<bool>,
}

/// When the head of a streamed answer is sent: what a connection that ends without one proves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamHead {
    /// As soon as a slot takes the request, before its prompt is computed. No head proves that nothing was computed.
    /// Upstream since 0821c5fcf (about b9425).
    BeforeFirstToken,
    /// With the first token, when the whole prompt was computed. No head proves nothing.
    AfterFirstToken,
    /// Not measured, or not clearly: to be treated as [`StreamHead::AfterFirstToken`].
    #[default]
    Unknown,
}

impl ServerFacts {
    /// What [`http_threads`](Self::http_threads) is for a server that makes a thread for each connection that needs one:
    /// upstream's own limit of them.
    pub const THREADS_ON_DEMAND: u32 = 1024;

    /// These facts, and where one of them is unknown, that of `other`.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        const fn either<T: Copy>(one: Option<T>, other: Option<T>) -> Option<T> {
            if one.is_some() { one } else { other }
        }
        Self {
            stream_head: match self.stream_head {
                StreamHead::Unknown => other.stream_head,
                known => known,
            },
            unix_sockets: either(self.unix_sockets, other.unix_sockets),
            http_threads: either(self.http_threads, other.http_threads),
            slot_files: either(self.slot_files, other.slot_files),
            discards_bodies: either(self.discards_bodies, other.discards_bodies),
        }
    }

    /// Whether a streamed request whose connection ended before any byte of an answer was certainly not begun.
    pub const fn no_head_means_not_begun(&self) -> bool {
        matches!(self.stream_head, StreamHead::BeforeFirstToken)
    }

    /// Whether what it leaves of a request's body may be read as another request. A request with a body then has to
    /// be the last one of its connection, and has to say so.
    pub const fn may_read_body_as_request(&self) -> bool {
        !matches!(self.discards_bodies, Some(true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_not_taken_for_proof() {
        let unknown: ServerFacts = serde_json::from_str("{}").unwrap();
        assert_eq!(unknown, ServerFacts::default());
        assert!(!unknown.no_head_means_not_begun());
        let after = ServerFacts { stream_head: StreamHead::AfterFirstToken, ..unknown };
        assert!(!after.no_head_means_not_begun());
        let before = ServerFacts { stream_head: StreamHead::BeforeFirstToken, ..unknown };
        assert!(before.no_head_means_not_begun());
        let reads = |discards_bodies| ServerFacts { discards_bodies, ..unknown }.may_read_body_as_request();
        assert_eq!([None, Some(false), Some(true)].map(reads), [true, true, false]);
    }

    #[test]
    fn what_is_measured_newly_comes_before_what_was_known() {
        let before = ServerFacts {
            stream_head: StreamHead::AfterFirstToken,
            unix_sockets: Some(true),
            slot_files: Some(false),
            ..ServerFacts::default()
        };
        let now =
            ServerFacts { unix_sockets: Some(false), discards_bodies: Some(true), ..ServerFacts::default() };
        let both = ServerFacts { unix_sockets: Some(false), discards_bodies: Some(true), ..before };
        assert_eq!(now.or(before), both);
        assert_eq!(before.or(ServerFacts::default()), before);
    }

    #[test]
    fn facts_are_kept_in_words() {
        let facts = ServerFacts {
            stream_head: StreamHead::BeforeFirstToken,
            unix_sockets: Some(true),
            http_threads: Some(3),
            slot_files: None,
            discards_bodies: None,
        };
        let text = serde_json::to_string(&facts).unwrap();
        assert_eq!(text, r#"{"stream_head":"before_first_token","unix_sockets":true,"http_threads":3}"#);
        assert_eq!(serde_json::from_str::<ServerFacts>(&text).unwrap(), facts);
    }
}
