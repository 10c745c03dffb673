//! Reads from an answer as it passes how much work it was: the objects `usage` and `timings`, in a JSON body and in the
//! events of a stream alike. It may give up (an object larger than its bound), it never delays or changes a byte.
//!
//! A field given several times counts with its last value: a stream repeats its counters as they grow. The answer to an
//! array of prompts repeats them per prompt and is therefore undercounted.

use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Deserialize;
use warden_policies::Work;

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\""));
static TIMINGS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"timings\""));
/// Longest of the two names, and the byte before it.
const SEAM: usize = 10;

/// The counters of one answer.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    limit: usize,
    carry: Vec<u8>,
    usage: Usage,
    timings: Timings,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Usage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
    input_tokens_details: Option<Details>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Details {
    cached_tokens: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Timings {
    prompt_n: Option<u64>,
    predicted_n: Option<u64>,
}

impl Meter {
    /// Keeps at most `limit` bytes of an answer.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Reads the next piece.
    pub(crate) fn feed(&mut self, piece: &[u8]) {
        let mut carry = std::mem::take(&mut self.carry);
        let room = self.limit.saturating_sub(carry.len()).max(SEAM).min(piece.len());
        if carry.is_empty() {
            let from = self.keep_from(piece);
            carry.extend_from_slice(&piece[from..]);
        } else {
            // An object, or its name, began in an earlier piece.
            carry.extend_from_slice(&piece[..room]);
            let from = self.keep_from(&carry);
            if room == piece.len() {
                carry.drain(..from);
            } else {
                carry.clear();
                let from = self.keep_from(piece);
                carry.extend_from_slice(&piece[from..]);
            }
        }
        self.carry = carry;
    }

    /// Reads `bytes` and says from where on they are needed again: from an object that is not complete, else from what
    /// may be the beginning of a name.
    fn keep_from(&mut self, bytes: &[u8]) -> usize {
        let seam = bytes.len().saturating_sub(SEAM);
        match self.search(bytes) {
            Some(from) if bytes.len() - from <= self.limit => from.min(seam),
            _ => seam,
        }
    }

    /// The work, as far as the answer told. `events` is the number of events of a stream: where it was cut before its
    /// counters came, each event stands for one token, as llama-server sends them.
    pub(crate) fn work(&self, events: Option<u64>) -> Work {
        let cached = |details: &Option<Details>| details.as_ref().map_or(0, |details| details.cached_tokens);
        let usage = &self.usage;
        let prompt = self
            .timings
            .prompt_n
            .or_else(|| Some(usage.prompt_tokens?.saturating_sub(cached(&usage.prompt_tokens_details))))
            .or_else(|| Some(usage.input_tokens?.saturating_sub(cached(&usage.input_tokens_details))));
        let told = self.timings.predicted_n.or(usage.completion_tokens).or(usage.output_tokens);
        Work {
            requests: 1,
            prompt_tokens: prompt.unwrap_or(0),
            output_tokens: told.unwrap_or(0).max(events.unwrap_or(0)),
            images: 0,
            audio: 0,
        }
    }

    /// Reads all complete objects in `bytes`; where an incomplete one begins, if there is one.
    fn search(&mut self, bytes: &[u8]) -> Option<usize> {
        let usage = self.find(&USAGE, bytes, |meter, object| {
            if let Ok(new) = serde_json::from_slice::<Usage>(object) {
                let old = &mut meter.usage;
                old.prompt_tokens = new.prompt_tokens.or(old.prompt_tokens);
                old.completion_tokens = new.completion_tokens.or(old.completion_tokens);
                old.input_tokens = new.input_tokens.or(old.input_tokens);
                old.output_tokens = new.output_tokens.or(old.output_tokens);
                old.prompt_tokens_details = new.prompt_tokens_details.or(old.prompt_tokens_details.take());
                old.input_tokens_details = new.input_tokens_details.or(old.input_tokens_details.take());
            }
        });
        let timings = self.find(&TIMINGS, bytes, |meter, object| {
            if let Ok(new) = serde_json::from_slice::<Timings>(object) {
                meter.timings.prompt_n = new.prompt_n.or(meter.timings.prompt_n);
                meter.timings.predicted_n = new.predicted_n.or(meter.timings.predicted_n);
            }
        });
        [usage, timings].into_iter().flatten().min()
    }

    fn find(
        &mut self,
        name: &Finder<'_>,
        bytes: &[u8],
        mut read: impl FnMut(&mut Self, &[u8]),
    ) -> Option<usize> {
        for at in name.find_iter(bytes) {
            // In generated text the quotes are escaped.
            if at > 0 && bytes[at - 1] == b'\\' {
                continue;
            }
            let after = at + name.needle().len();
            match object(&bytes[after..]) {
                Object::Whole { from, to } => read(self, &bytes[after + from..after + to]),
                Object::Incomplete => return Some(at.saturating_sub(1)),
                Object::None => {}
            }
        }
        None
    }
}

enum Object {
    Whole { from: usize, to: usize },
    Incomplete,
    None,
}

/// The object after a name: `: {...}`.
fn object(bytes: &[u8]) -> Object {
    let mut colon = false;
    let mut from = None;
    let (mut depth, mut text, mut escaped) = (0_u32, false, false);
    for (at, byte) in bytes.iter().enumerate() {
        if from.is_none() {
            match byte {
                b' ' | b'\t' | b'\r' | b'\n' => {}
                b':' if !colon => colon = true,
                b'{' if colon => {
                    from = Some(at);
                    depth = 1;
                }
                _ => return Object::None,
            }
        } else if text {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => text = false,
                _ => {}
            }
        } else {
            match byte {
                b'"' => text = true,
                b'{' => depth += 1,
                b'}' => {
                    depth -= 1;
                    if let (0, Some(from)) = (depth, from) {
                        return Object::Whole { from, to: at + 1 };
                    }
                }
                _ => {}
            }
        }
    }
    Object::Incomplete
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(body: &str) -> (u64, u64) {
        let mut whole = Meter::new(512);
        whole.feed(body.as_bytes());
        let answer = whole.work(None);
        for size in [1, 2, 3, 7, 50] {
            let mut meter = Meter::new(512);
            for piece in body.as_bytes().chunks(size) {
                meter.feed(piece);
                assert!(meter.carry.len() <= 512);
            }
            assert_eq!(meter.work(None), answer, "pieces of {size}");
        }
        (answer.prompt_tokens, answer.output_tokens)
    }

    #[test]
    fn counters_are_read_in_every_dialect() {
        for (body, expected) in [
            (
                r#"{"choices":[],"usage":{"completion_tokens":7,"prompt_tokens":20,"prompt_tokens_details":{"cached_tokens":5}}}"#,
                (15, 7),
            ),
            (
                r#"{"usage":{"completion_tokens":7,"prompt_tokens":20},"timings":{"cache_n":18,"prompt_n":2,"predicted_n":7,"x":{"y":"}"}}}"#,
                (2, 7),
            ),
            (r#"{"object":"list","usage":{"prompt_tokens":4,"total_tokens":4},"data":[[0.1,0.2]]}"#, (4, 0)),
            (
                "data: {\"message\":{\"usage\": {\"input_tokens\":9,\"output_tokens\":0}}}\n\ndata: {\"usage\":{\"output_tokens\":30}}\n\n",
                (9, 30),
            ),
            (
                r#"{"response":{"usage":{"input_tokens":9,"output_tokens":3,"input_tokens_details":{"cached_tokens":9}}}}"#,
                (0, 3),
            ),
            (r#"{"content":"\"usage\":{\"prompt_tokens\":99}","usage":null}"#, (0, 0)),
            (r#"{"usage":"none","timings":3}"#, (0, 0)),
            ("no json", (0, 0)),
        ] {
            assert_eq!(work(body), expected, "{body}");
        }
    }

    #[test]
    fn an_object_that_never_ends_is_given_up_and_later_ones_count() {
        let mut meter = Meter::new(100);
        meter.feed(br#"{"usage":{"#);
        for _ in 0..100 {
            meter.feed(&[b' '; 1000]);
            assert!(meter.carry.len() <= 100);
        }
        meter.feed(br#""timings":{"prompt_n":1,"predicted_n":2}"#);
        assert_eq!(meter.work(None).output_tokens, 2);
    }

    #[test]
    fn a_cut_stream_counts_its_events() {
        assert_eq!(Meter::new(100).work(Some(12)).output_tokens, 12);
    }
}
