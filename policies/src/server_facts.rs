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

    /// Whether a streamed request whose connection ended before any byte of an answer was certainly not begun.
    pub const fn no_head_means_not_begun(&self) -> bool {
        matches!(self.stream_head, StreamHead::BeforeFirstToken)
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
    }

    #[test]
    fn facts_are_kept_in_words() {
        let facts = ServerFacts {
            stream_head: StreamHead::BeforeFirstToken,
            unix_sockets: Some(true),
            http_threads: Some(3),
            slot_files: None,
        };
        let text = serde_json::to_string(&facts).unwrap();
        assert_eq!(text, r#"{"stream_head":"before_first_token","unix_sockets":true,"http_threads":3}"#);
        assert_eq!(serde_json::from_str::<ServerFacts>(&text).unwrap(), facts);
    }
}
