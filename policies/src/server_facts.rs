//! Behaviour of a llama-server program, independent of its model and settings. Own builds are measured when
//! verified, other programs at their first start.
//!
//! Each fact may be unknown. Unknown stands for the cautious answer: the behaviour that does the least harm
//! if the guess is wrong. So the default value is always safe.

use serde::{Deserialize, Serialize};

/// Behaviour of a llama-server. By default all facts are unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerFacts {
    /// Time at which the head of a streamed answer is sent.
    pub stream_head: StreamHeadTime,
    /// True if it can listen on a Unix socket, as upstream since about b5000. `None`: unknown.
    pub unix_sockets: Option<bool>,
    /// Number of connections served at a time, 1 or more: a further one, idle or busy, waits until another
    /// is closed. [`ServerFacts::THREADS_ON_DEMAND`] if threads are created as needed, as upstream does
    /// since about b8485. With more slots than at the measurement a server may serve more, never fewer.
    /// `None`: unknown.
    pub http_threads: Option<u32>,
    /// True if its slot directory can be set and its listing is restricted to clients that may save slots.
    /// False for `ik_llama.cpp`, which lists slot files for all clients. `None`: unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot_files: Option<bool>,
    /// True if it reads and discards the body of a request that it answers early, or closes the connection.
    /// cpp-httplib before 0.40, in upstream until about b8570, does neither: it parses the rest of the body
    /// as the next request. `None`: unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discards_bodies: Option<bool>,
}

/// Time at which the head of a streamed answer is sent; decides what a connection that ends without a head
/// proves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamHeadTime {
    /// As soon as a slot takes the request, before its prompt is computed. A missing head proves that
    /// nothing was computed. Upstream since 0821c5fcf (about b9425).
    BeforeFirstToken,
    /// With the first token, after the whole prompt was computed. A missing head proves nothing.
    AfterFirstToken,
    /// Not measured, or not clearly; treated as [`StreamHeadTime::AfterFirstToken`].
    #[default]
    Unknown,
}

impl ServerFacts {
    /// Value of [`http_threads`](Self::http_threads) for a server that creates threads as needed:
    /// upstream's own limit.
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

    /// Returns true if a streamed request whose connection ended without any byte of an answer was
    /// certainly not begun.
    pub const fn no_head_means_not_begun(&self) -> bool {
        matches!(self.stream_head, StreamHeadTime::BeforeFirstToken)
    }

    /// Returns true if the rest of a request's body may be parsed as another request. Then a request with a
    /// body must be the last one on its connection, and announce that.
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
