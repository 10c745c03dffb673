//! Behaviour of a llama-server program, independent of its model and settings. A build made by llama-warden
//! is measured when it is verified, another program at its first start.
//!
//! Unknown facts, the default, are handled as the behaviour that does the least harm if the guess is wrong.

use serde::{Deserialize, Serialize};

/// Behaviour of a llama-server. By default all facts are unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerFacts {
    /// Time at which the head of a streamed answer is sent.
    pub stream_head: StreamHeadTime,
    /// True if the server can listen on a Unix socket, as llama.cpp can since about b5000. `None`: unknown.
    pub unix_sockets: Option<bool>,
    /// Number of connections served at a time, 1 or more; further ones wait.
    /// [`ServerFacts::THREADS_ON_DEMAND`] if threads are created as needed, as in llama.cpp since about
    /// b8485. `None`: unknown.
    pub http_threads: Option<u32>,
    /// True if the server's slot directory can be set and only clients that may save slots can list it.
    /// False for `ik_llama.cpp`, which lists slot files for all clients. `None`: unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot_files: Option<bool>,
    /// True if the server discards the unread body of an answered request or closes the connection.
    /// cpp-httplib before 0.40 (llama.cpp until about b8570) parses the rest of the body as the next request.
    /// `None`: unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discards_bodies: Option<bool>,
}

/// Time at which the head (status line and headers) of a streamed answer is sent. Decides if a connection
/// that breaks before the head shows that nothing was computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamHeadTime {
    /// As soon as a slot takes the request, before its prompt is computed. A missing head proves that
    /// nothing was computed. Behaviour of llama.cpp since 0821c5fcf (about b9425).
    BeforeFirstToken,
    /// Together with the first token, after the whole prompt was computed. A missing head proves nothing.
    AfterFirstToken,
    /// Not measured, or measured without a clear result; treated as [`StreamHeadTime::AfterFirstToken`].
    #[default]
    Unknown,
}

impl ServerFacts {
    /// Value of [`http_threads`](Self::http_threads) for threads as needed: the limit in llama.cpp itself.
    pub const THREADS_ON_DEMAND: u32 = 1024;

    /// Fills unknown facts from `other`.
    #[must_use]
    pub const fn fill_from(self, other: Self) -> Self {
        const fn either<T: Copy>(one: Option<T>, other: Option<T>) -> Option<T> {
            if one.is_some() { one } else { other }
        }
        Self {
            stream_head: match self.stream_head {
                StreamHeadTime::Unknown => other.stream_head,
                known => known,
            },
            unix_sockets: either(self.unix_sockets, other.unix_sockets),
            http_threads: either(self.http_threads, other.http_threads),
            slot_files: either(self.slot_files, other.slot_files),
            discards_bodies: either(self.discards_bodies, other.discards_bodies),
        }
    }

    /// Returns true if a connection that ended without any byte of an answer shows that nothing was computed.
    pub const fn no_head_means_not_begun(&self) -> bool {
        matches!(self.stream_head, StreamHeadTime::BeforeFirstToken)
    }

    /// Returns true if the server may parse the rest of a body as another request. Then a request with a body
    /// must be the last on its connection and say so (`Connection: close`).
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
        let after = ServerFacts { stream_head: StreamHeadTime::AfterFirstToken, ..unknown };
        assert!(!after.no_head_means_not_begun());
        let before = ServerFacts { stream_head: StreamHeadTime::BeforeFirstToken, ..unknown };
        assert!(before.no_head_means_not_begun());
        let reads = |discards_bodies| ServerFacts { discards_bodies, ..unknown }.may_read_body_as_request();
        assert_eq!([None, Some(false), Some(true)].map(reads), [true, true, false]);
    }

    #[test]
    fn what_is_measured_newly_comes_before_what_was_known() {
        let before = ServerFacts {
            stream_head: StreamHeadTime::AfterFirstToken,
            unix_sockets: Some(true),
            slot_files: Some(false),
            ..ServerFacts::default()
        };
        let now =
            ServerFacts { unix_sockets: Some(false), discards_bodies: Some(true), ..ServerFacts::default() };
        let both = ServerFacts { unix_sockets: Some(false), discards_bodies: Some(true), ..before };
        assert_eq!(now.fill_from(before), both);
        assert_eq!(before.fill_from(ServerFacts::default()), before);
    }

    #[test]
    fn facts_are_kept_in_words() {
        let facts = ServerFacts {
            stream_head: StreamHeadTime::BeforeFirstToken,
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
