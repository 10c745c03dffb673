//! Measured facts about a server's behaviour, and their derivation from single tries. Pure functions.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Measured behaviour of a server. `None`: not measured, or unclear.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerBehaviour {
    /// Time at which the head of a streamed answer is sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream_head: Option<StreamHead>,
    /// The server can listen on a Unix socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unix_sockets: Option<bool>,
    /// Number of threads for connections: fixed, or growing on demand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_threads: Option<HttpThreads>,
    /// `/` is a web page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub web_page: Option<bool>,
    /// An unread body is never parsed as a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discards_bodies: Option<bool>,
}

/// Time at which the head of a streamed answer is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamHead {
    /// Before the prompt is processed.
    BeforeFirstToken,
    /// After the prompt was processed.
    AfterFirstToken,
}

/// Allocation of threads to connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HttpThreads {
    /// A fixed number (`--threads-http`); each thread keeps its connection, and further ones wait.
    Fixed,
    /// More threads are created when connections need them.
    OnDemand,
}

impl fmt::Display for ServerBehaviour {
    /// Formats one line, such as `head of a stream before the first token, Unix sockets, web page`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unknown = |what: &str| format!("{what} not known");
        let either = |fact: Option<bool>, yes: &str, no: &str, what: &str| match fact {
            Some(true) => yes.to_owned(),
            Some(false) => no.to_owned(),
            None => unknown(what),
        };
        let parts = [
            match self.stream_head {
                Some(StreamHead::BeforeFirstToken) => "head of a stream before the first token".to_owned(),
                Some(StreamHead::AfterFirstToken) => "head of a stream with the first token".to_owned(),
                None => unknown("head of a stream"),
            },
            either(self.unix_sockets, "Unix sockets", "no Unix sockets", "Unix sockets"),
            match self.http_threads {
                Some(HttpThreads::Fixed) => "a fixed number of HTTP threads".to_owned(),
                Some(HttpThreads::OnDemand) => "HTTP threads on demand".to_owned(),
                None => unknown("HTTP threads"),
            },
            either(self.web_page, "a web page", "no web page", "web page"),
            either(
                self.discards_bodies,
                "unread bodies are discarded",
                "unread bodies are read as requests",
                "what becomes of unread bodies",
            ),
        ];
        f.write_str(&parts.join(", "))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamTiming {
    pub(super) head: Duration,
    pub(super) token: Duration,
    /// Prompt processing time as reported by the server.
    pub(super) prompt: Option<Duration>,
}

/// Minimum prompt processing time of a usable try; a shorter one could be a delay in reading the answer.
pub(super) const MIN_PROMPT_TIME: Duration = Duration::from_millis(150);
pub(super) const REQUIRED_AGREEMENT: usize = 3;

impl StreamTiming {
    fn total(&self) -> Duration {
        self.head + self.token
    }

    pub(super) fn is_long(&self) -> bool {
        self.prompt.is_some_and(|prompt| prompt >= MIN_PROMPT_TIME)
    }

    /// Returns the result of this try, if it is clear.
    ///
    /// A head that is sent after prompt processing arrives no sooner than the processing time that the server
    /// reports. If that time is most of the whole, a head in the first quarter was sent before. On a busy
    /// machine, a head may be sent early and read late; the result is then [`StreamHead::AfterFirstToken`].
    fn evaluate(&self) -> Option<StreamHead> {
        let (whole, prompt) = (self.total(), self.prompt?);
        if !self.is_long() || prompt < whole / 2 || prompt > whole {
            return None;
        }
        if self.head <= whole / 4 {
            return Some(StreamHead::BeforeFirstToken);
        }
        (self.token <= whole / 4).then_some(StreamHead::AfterFirstToken)
    }
}

/// Returns the common result of the tries; `None` if too few are clear, or if two contradict each other.
pub(super) fn stream_head(tries: &[StreamTiming]) -> Option<StreamHead> {
    let mut clear = tries.iter().filter_map(StreamTiming::evaluate);
    let first = clear.next()?;
    let mut count = 1;
    for other in clear {
        if other != first {
            return None;
        }
        count += 1;
    }
    (count >= REQUIRED_AGREEMENT).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(head: u64, token: u64, prompt: u64) -> StreamTiming {
        let [head, token, prompt] = [head, token, prompt].map(Duration::from_millis);
        StreamTiming { head, token, prompt: Some(prompt) }
    }

    #[test]
    fn the_order_is_known_when_three_long_tries_show_it() {
        let before = tried(2, 400, 390);
        let after = tried(400, 1, 390);
        assert_eq!(stream_head(&[before; 3]), Some(StreamHead::BeforeFirstToken));
        assert_eq!(stream_head(&[after; 3]), Some(StreamHead::AfterFirstToken));
        assert_eq!(stream_head(&[before; 2]), None, "too few");
        assert_eq!(stream_head(&[before, before, before, after]), None, "they contradict");
        assert_eq!(stream_head(&[]), None);
    }

    #[test]
    fn a_busy_machine_gives_no_answer_or_the_careful_one() {
        // A fast prompt, with long waits for a processor.
        assert_eq!(stream_head(&[tried(10, 900, 100); 3]), None, "short by the server's clock");
        assert_eq!(stream_head(&[tried(10, 900, 300); 3]), None, "most of the time was not the prompt");
        assert_eq!(stream_head(&[tried(300, 300, 400); 3]), None, "neither early nor late");
        // The head was sent early and read late.
        assert_eq!(stream_head(&[tried(390, 10, 380); 3]), Some(StreamHead::AfterFirstToken));
        // A wrong server clock.
        assert_eq!(stream_head(&[tried(10, 300, 5000); 3]), None);
        let mute = StreamTiming { prompt: None, ..tried(2, 400, 0) };
        assert_eq!(stream_head(&[mute; 3]), None, "the server does not say what the prompt took");
    }

    #[test]
    fn what_is_measured_is_kept_and_told_in_words() {
        let measured = ServerBehaviour {
            stream_head: Some(StreamHead::AfterFirstToken),
            unix_sockets: Some(false),
            http_threads: Some(HttpThreads::Fixed),
            web_page: None,
            discards_bodies: Some(false),
        };
        let text = serde_json::to_string(&measured).unwrap();
        assert_eq!(
            text,
            r#"{"stream_head":"after_first_token","unix_sockets":false,"http_threads":"fixed","discards_bodies":false}"#
        );
        assert_eq!(serde_json::from_str::<ServerBehaviour>(&text).unwrap(), measured);
        assert_eq!(
            measured.to_string(),
            "head of a stream with the first token, no Unix sockets, a fixed number of HTTP threads, web page not known, \
             unread bodies are read as requests"
        );
        assert_eq!(serde_json::from_str::<ServerBehaviour>("{}").unwrap(), ServerBehaviour::default());
    }
}
