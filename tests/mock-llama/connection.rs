//! Connection that answers requests without waiting.
//!
//! ```text
//!   head, small body --whole--> answered ---------------------------> next request
//!      | large body: swallowed ----^   \--> a stream, event by event --> closed
//! ```

use std::io::{self, Read as _, Write as _};

use memchr::memmem;
use warden_rig::poll::{Stream, now};

use crate::answers;

/// A body up to this size is parsed; a larger one is discarded.
const READ: usize = 64 << 10;

#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) slots: u64,
    pub(crate) accepted: u64,
    /// Connections that carried at least one generation.
    pub(crate) carriers: u64,
    pub(crate) posts: u64,
    pub(crate) streams: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Go,
    Close,
}

struct Flow {
    left: u64,
    /// Nanoseconds from one event to the next; 0 for no pause.
    pace: u64,
    due: u64,
}

pub(crate) struct Connection {
    stream: Stream,
    input: Vec<u8>,
    /// Bytes of a large body still to discard.
    swallow: usize,
    output: Vec<u8>,
    written: usize,
    flow: Option<Flow>,
    close: bool,
    carried: bool,
    watched: bool,
}

impl Connection {
    pub(crate) fn new(stream: Stream) -> Self {
        Self {
            stream,
            input: Vec::new(),
            swallow: 0,
            output: Vec::new(),
            written: 0,
            flow: None,
            close: false,
            carried: false,
            watched: false,
        }
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(crate) fn has_stream(&self) -> bool {
        self.flow.is_some()
    }

    /// Returns `Some` if a stream has begun since, with true if it is paced.
    pub(crate) fn stream_begun(&self, had_one: bool) -> Option<bool> {
        self.flow.as_ref().filter(|_| !had_one).map(|flow| flow.pace > 0)
    }

    pub(crate) fn is_blocked(&self) -> bool {
        self.written < self.output.len()
    }

    pub(crate) fn is_due(&self, time: u64) -> bool {
        !self.is_blocked() && self.flow.as_ref().is_some_and(|flow| flow.due <= time)
    }

    /// Returns true if the poller must watch for room from now on, false if no more, `None` without a change.
    pub(crate) fn wants_change(&mut self) -> Option<bool> {
        let wants = self.is_blocked();
        (wants != self.watched).then(|| {
            self.watched = wants;
            wants
        })
    }

    /// Reads once and answers complete requests.
    pub(crate) fn read(&mut self, scratch: &mut [u8], counts: &mut Counts) -> Next {
        let count = match self.stream.read(scratch) {
            Ok(0) => return Next::Close,
            Ok(count) => count,
            Err(error) if is_harmless(&error) => return Next::Go,
            Err(_) => return Next::Close,
        };
        let mut bytes = &scratch[..count];
        if self.swallow > 0 {
            let swallowed = self.swallow.min(count);
            self.swallow -= swallowed;
            bytes = &bytes[swallowed..];
            if self.swallow == 0 {
                self.output.extend_from_slice(&answers::CHAT);
            }
        }
        self.input.extend_from_slice(bytes);
        while self.swallow == 0 && self.flow.is_none() && !self.close && self.request(counts) {}
        self.flush()
    }

    fn request(&mut self, counts: &mut Counts) -> bool {
        let Some(end) = memmem::find(&self.input, b"\r\n\r\n") else { return false };
        let body = end + 4;
        let mut fields = [httparse::EMPTY_HEADER; 64];
        let mut head = httparse::Request::new(&mut fields);
        let parsed = head.parse(&self.input[..body]).is_ok();
        let (true, Some(method), Some(path)) = (parsed, head.method, head.path) else {
            return self.refuse("400 Bad Request");
        };
        let field = |name: &str| {
            head.headers.iter().find(|field| field.name.eq_ignore_ascii_case(name)).map(|field| field.value)
        };
        let length = field("content-length").and_then(|value| std::str::from_utf8(value).ok()?.parse().ok());
        if length.is_none() && method == "POST" {
            // Benchmarks need no bodies without a length.
            return self.refuse("411 Length Required");
        }
        let length: usize = length.unwrap_or(0);
        // llama-server answers these without reading the body, which is not parsed as a request afterwards.
        let is_answered_early =
            method == "OPTIONS" || field("accept").is_some_and(|value| value.starts_with(b";"));
        if length > 0 && is_answered_early {
            return self.refuse("400 Bad Request");
        }
        if length <= READ && self.input.len() < body + length {
            return false;
        }
        if method == "POST" && !path.starts_with("/tokenize") {
            counts.posts += 1;
            counts.carriers += u64::from(!self.carried);
            self.carried = true;
            if length > READ {
                let here = self.input.len() - body;
                self.swallow = length.saturating_sub(here);
                self.input.clear();
                if self.swallow == 0 {
                    self.output.extend_from_slice(&answers::CHAT);
                }
                return false;
            }
            let asks = &self.input[body..body + length];
            if memmem::find(asks, b"\"stream\":true").is_some() {
                counts.streams += 1;
                let number = |name: &str| number(asks, name);
                let pace =
                    number("\"per_second\":").filter(|rate| *rate > 0).map_or(0, |rate| 1_000_000_000 / rate);
                self.flow = Some(Flow { left: number("\"max_tokens\":").unwrap_or(16), pace, due: 0 });
                self.output.extend_from_slice(answers::STREAM_HEAD);
                self.begin(counts.streams);
            } else {
                self.output.extend_from_slice(&answers::CHAT);
            }
        } else {
            let answer = own(path, counts);
            self.output.extend_from_slice(&answer);
        }
        self.input.drain(..body + length);
        !self.input.is_empty()
    }

    fn refuse(&mut self, status: &str) -> bool {
        self.output.extend_from_slice(&answers::whole(status, "text/plain", ""));
        self.close = true;
        false
    }

    /// Sends the first event with the head, because nothing is computed. The phase of the other events
    /// depends on `nth`.
    fn begin(&mut self, nth: u64) {
        let time = now();
        if let Some(flow) = &mut self.flow {
            flow.due = due(time, flow.pace, nth);
            flow.left = flow.left.saturating_sub(1);
            answers::event(&mut self.output, time);
        }
    }

    pub(crate) fn event(&mut self, time: u64) -> Next {
        let Some(flow) = &mut self.flow else { return Next::Go };
        if flow.left == 0 {
            self.output.extend_from_slice(&answers::STREAM_END);
            self.flow = None;
            self.close = true;
        } else {
            flow.left -= 1;
            flow.due += flow.pace;
            answers::event(&mut self.output, time);
        }
        self.flush()
    }

    pub(crate) fn flush(&mut self) -> Next {
        while self.is_blocked() {
            match self.stream.write(&self.output[self.written..]) {
                Ok(count) => self.written += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Next::Go,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Next::Close,
            }
        }
        self.output.clear();
        self.written = 0;
        if self.close { Next::Close } else { Next::Go }
    }
}

fn is_harmless(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn number(text: &[u8], name: &str) -> Option<u64> {
    let start = memmem::find(text, name.as_bytes())? + name.len();
    let digits = text[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&text[start..start + digits]).ok()?.parse().ok()
}

/// Answers llama-warden's own requests to a backend.
fn own(path: &str, counts: &Counts) -> Vec<u8> {
    let path = path.split('?').next().unwrap_or(path);
    let json = |body: &str| answers::whole("200 OK", "application/json; charset=utf-8", body);
    match path {
        "/health" => json(r#"{"status":"ok"}"#),
        "/props" => json(&format!(
            r#"{{"default_generation_settings":{{"n_ctx":4096}},"total_slots":{},"build_info":"b1-000000000","model_path":"mock"}}"#,
            counts.slots
        )),
        "/slots" => json("[]"),
        "/metrics" => answers::whole(
            "200 OK",
            "text/plain; version=0.0.4",
            "# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 0\n",
        ),
        "/mock/counts" => json(&format!(
            r#"{{"accepted":{},"carriers":{},"posts":{},"streams":{}}}"#,
            counts.accepted, counts.carriers, counts.posts, counts.streams
        )),
        "/tokenize" => json(r#"{"tokens":[1,2,3]}"#),
        _ => answers::whole(
            "404 Not Found",
            "application/json; charset=utf-8",
            r#"{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}"#,
        ),
    }
}

/// Returns the due time of the second event of stream `nth`: within one `pace` of `time`, at a phase that
/// depends only on the number. So a thousand streams never send at once; multiples of the golden ratio spread
/// any number of them evenly.
fn due(time: u64, pace: u64, nth: u64) -> u64 {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    if pace == 0 {
        return time;
    }
    let phase = (u128::from(nth.wrapping_mul(GOLDEN)) * u128::from(pace)) >> 64;
    let phase = u64::try_from(phase).unwrap_or_default();
    let due = time - time % pace + phase;
    if due > time { due } else { due + pace }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_that_begin_together_have_phases_that_are_spread_over_the_pace() {
        let (pace, streams, begun) = (50_000_000, 1000, 1_234_567_890_123);
        let mut phases: Vec<u64> = (1..=streams).map(|nth| due(begun, pace, nth) % pace).collect();
        phases.sort_unstable();
        let gaps = phases.windows(2).map(|two| two[1] - two[0]);
        assert!(gaps.max().is_some_and(|gap| gap < 4 * pace / streams), "{phases:?}");
        for nth in 0..100 {
            let at = due(begun, pace, nth);
            assert!(at > begun && at <= begun + pace);
        }
        assert_eq!(due(7, 0, 3), 7);
    }

    #[test]
    fn a_request_says_what_its_stream_is_like() {
        let asks = br#"{"model":"m","stream":true,"max_tokens":120,"per_second":20}"#;
        assert_eq!(number(asks, "\"max_tokens\":"), Some(120));
        assert_eq!(number(asks, "\"per_second\":"), Some(20));
        assert_eq!(number(asks, "\"n\":"), None);
    }
}
