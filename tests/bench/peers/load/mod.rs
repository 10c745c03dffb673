//! Load generator: one thread, one `epoll`, requests prepared before the clock runs.
//!
//! | module | does |
//! |---|---|
//! | [`requests`] | closed loops, and a fixed number of requests a second |
//! | [`streams`] | streams, spaced and flat out, with the delay of each event |
//! | [`client`], [`response`] | a connection, and what comes back on it |

pub(crate) mod client;
pub(crate) mod requests;
pub(crate) mod response;
pub(crate) mod streams;

use std::net::SocketAddr;
use std::rc::Rc;

#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) address: SocketAddr,
    pub(crate) key: Option<String>,
}

pub(crate) const MODEL: &str = "mock";
pub(crate) const LARGE: usize = 5_000_000;

impl Target {
    fn post(&self, body: &str) -> Rc<[u8]> {
        let key = self.key.as_ref().map_or(String::new(), |key| format!("Authorization: Bearer {key}\r\n"));
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: bench.invalid\r\nUser-Agent: warden-bench/1\r\nAccept: application/json\r\n{key}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        Rc::from((head + body).into_bytes())
    }

    /// Returns a chat request of about 400 bytes, head and body.
    pub(crate) fn small(&self) -> Rc<[u8]> {
        self.post(&format!(
            r#"{{"model":"{MODEL}","messages":[{{"role":"system","content":"You are a helpful assistant."}},{{"role":"user","content":"Tell me in one sentence what the fox does."}}],"temperature":0,"max_tokens":32}}"#
        ))
    }

    /// Returns a request for a stream of this many events; 0 per second means without a pause.
    pub(crate) fn stream(&self, events: u64, per_second: u64) -> Rc<[u8]> {
        self.post(&format!(
            r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"Tell me a story."}}],"stream":true,"max_tokens":{events},"per_second":{per_second}}}"#
        ))
    }

    /// Returns a request with an image of 5 MB, which names the model first or, like the `openai` Python
    /// package, last.
    pub(crate) fn large(&self, model_first: bool) -> Rc<[u8]> {
        let model = format!(r#""model":"{MODEL}""#);
        let image = "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVphYmNkZWZnaGlqa2xtbm9wcXJzdHV2d3h5ejAxMjM0NTY3ODkrLw"
            .repeat(LARGE / 86);
        let messages = format!(
            r#""messages":[{{"role":"user","content":[{{"type":"text","text":"What is this?"}},{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{image}"}}}}]}}],"max_tokens":32"#
        );
        let body =
            if model_first { format!("{{{model},{messages}}}") } else { format!("{{{messages},{model}}}") };
        self.post(&body)
    }
}
