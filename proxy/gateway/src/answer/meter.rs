//! Reads counters and errors from an answer while it is passed on: the objects `usage`, `timings`,
//! `prompt_progress` and `error`, in a JSON body or in the events of a stream. Skips an object larger than
//! its limit. Never delays or changes a byte.
//!
//! The last value of a repeated field counts, because a stream repeats its counters as they grow. So the
//! answer to an array of prompts, which repeats them per prompt, is undercounted.

use std::sync::LazyLock;
use std::time::Duration;

use aho_corasick::Span;
use aho_corasick::packed::{Config, Searcher};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Deserializer;
use warden_policies::WorkDone;
use warden_policies::health::AnswerSigns;
use warden_supervisor::ExchangeOutcome;

use crate::answer::text_tail::TextTail;
use crate::answer::vector_scan::VectorScan;
use crate::trace::GatewayTrace;

const OBJECT_NAMES: [&str; 4] = ["\"usage\"", "\"timings\"", "\"error\"", "\"prompt_progress\""];

/// Finds all [`OBJECT_NAMES`] in one pass, sixteen bytes at a time where the CPU supports that.
static NAME_SEARCHER: LazyLock<Searcher> = LazyLock::new(|| searcher_of(&OBJECT_NAMES));

/// Builds a searcher for a few short words.
pub(super) fn searcher_of(words: &[&str]) -> Searcher {
    let plain = || Config::new().only_rabin_karp(true).builder().extend(words).build();
    Searcher::new(words).or_else(plain).unwrap_or_else(|| unreachable!("a few short words"))
}

/// Beginnings of llama-server's messages about its own failures to compute, in lower case: results of
/// `llama_decode`, and failures with an image or a recording. Any other answer with status 500 may be due to
/// the client's mistake. The rest of a message may quote the request.
const COMPUTE_ERRORS: [&str; 4] =
    ["compute error", "invalid input batch", "failed to decode", "failed to process mtmd chunk"];

/// Length of the longest name, plus the byte before it.
const NAME_SEAM_BYTES: usize = 18;

#[derive(Debug, Default)]
pub(crate) struct AnswerMeter {
    limit: usize,
    carry: Vec<u8>,
    /// The byte before the next byte to search.
    before: Option<u8>,
    usage: ReportedUsage,
    timings: ReportedTimings,
    /// Prompt tokens processed at the last progress report, and the cached ones among them.
    evaluated: Option<(u64, u64)>,
    compute_error: bool,
    scan: Option<ContentScan>,
}

/// Content of an answer that is looked at for faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchedContent {
    /// Generated text.
    Text,
    /// Vectors or scores.
    Numbers,
    Unwatched,
}

#[derive(Debug)]
enum ContentScan {
    Text(TextTail),
    Numbers(VectorScan),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ReportedUsage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    cache_read_input_tokens: Option<u64>,
    prompt_tokens_details: Option<TokenDetails>,
    input_tokens_details: Option<TokenDetails>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct TokenDetails {
    cached_tokens: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ReportedTimings {
    cache_n: Option<u64>,
    prompt_n: Option<u64>,
    prompt_ms: Option<f64>,
    predicted_n: Option<u64>,
    predicted_ms: Option<f64>,
}

/// Prompt progress, which a client can request with `return_progress`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PromptProgress {
    processed: u64,
    cache: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ReportedFailure {
    message: String,
}

impl AnswerMeter {
    /// Creates a meter that keeps at most `limit` bytes of an answer.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Also looks at the content.
    pub(crate) fn with_content(mut self, content: WatchedContent) -> Self {
        self.scan = match content {
            WatchedContent::Text => Some(ContentScan::Text(TextTail::default())),
            WatchedContent::Numbers => Some(ContentScan::Numbers(VectorScan::default())),
            WatchedContent::Unwatched => None,
        };
        self
    }

    pub(crate) fn feed(&mut self, piece: &[u8]) {
        match &mut self.scan {
            Some(ContentScan::Text(text)) => text.feed(piece),
            Some(ContentScan::Numbers(numbers)) => numbers.feed(piece),
            None => {}
        }
        let mut carry = std::mem::take(&mut self.carry);
        let room = self.limit.saturating_sub(carry.len()).max(NAME_SEAM_BYTES).min(piece.len());
        if carry.is_empty() {
            let from = self.keep_from(piece);
            carry.extend_from_slice(&piece[from..]);
        } else {
            // An object or its name began in an earlier piece.
            let last = carry.last().copied();
            carry.extend_from_slice(&piece[..room]);
            let from = self.keep_from(&carry);
            if room == piece.len() {
                carry.drain(..from);
            } else {
                carry.clear();
                self.before = last;
                let from = self.keep_from(piece);
                carry.extend_from_slice(&piece[from..]);
            }
        }
        self.carry = carry;
    }

    /// Reads `bytes` and returns the offset from which to keep them for the next piece: the beginning of an
    /// incomplete object, or of bytes that may be part of a name.
    fn keep_from(&mut self, bytes: &[u8]) -> usize {
        let seam = bytes.len().saturating_sub(NAME_SEAM_BYTES);
        let from = match self.read_objects(bytes) {
            Some(from) if bytes.len() - from <= self.limit => from.min(seam),
            _ => seam,
        };
        if from > 0 {
            self.before = Some(bytes[from - 1]);
        }
        from
    }

    /// Returns the work that the answer reports. `events` is the number of events of a stream. Without
    /// counters, each event counts as one token, because llama-server sends an event per token.
    pub(crate) fn work(&self, events: Option<u64>) -> WorkDone {
        let cached =
            |details: &Option<TokenDetails>| details.as_ref().map_or(0, |details| details.cached_tokens);
        let usage = &self.usage;
        let prompt = self
            .timings
            .prompt_n
            .or_else(|| Some(usage.prompt_tokens?.saturating_sub(cached(&usage.prompt_tokens_details))))
            .or_else(|| Some(usage.input_tokens?.saturating_sub(cached(&usage.input_tokens_details))))
            .or_else(|| self.evaluated.map(|(processed, cached)| processed.saturating_sub(cached)));
        WorkDone {
            requests: 1,
            prompt_tokens: prompt.unwrap_or(0),
            output_tokens: self.generated_tokens().unwrap_or(0).max(events.unwrap_or(0)),
            images: 0,
            audio: 0,
        }
    }

    fn generated_tokens(&self) -> Option<u64> {
        self.timings.predicted_n.or(self.usage.completion_tokens).or(self.usage.output_tokens)
    }

    /// Returns what the content shows about faults.
    pub(crate) fn answer_signs(&self, is_complete: bool) -> AnswerSigns {
        match &self.scan {
            Some(ContentScan::Text(text)) => text.signs(is_complete, self.generated_tokens()),
            Some(ContentScan::Numbers(numbers)) => {
                AnswerSigns { null: numbers.sign(), ..AnswerSigns::default() }
            }
            None => AnswerSigns::default(),
        }
    }

    /// Returns whether the answer reports any work. A client can exclude the counters (`response_fields`).
    pub(crate) fn has_counters(&self) -> bool {
        let usage = &self.usage;
        let timings = &self.timings;
        let told = [timings.prompt_n, timings.predicted_n, usage.prompt_tokens, usage.completion_tokens];
        told.into_iter().chain([usage.input_tokens, usage.output_tokens]).any(|told| told.is_some())
    }

    /// Returns whether the answer reports the size of its prompt, or how much of it was evaluated.
    pub(crate) fn has_prompt_size(&self) -> bool {
        let told = [self.timings.prompt_n, self.usage.prompt_tokens, self.usage.input_tokens];
        self.evaluated.is_some() || told.iter().any(Option::is_some)
    }

    pub(crate) fn outcome(&self, status: u16) -> ExchangeOutcome {
        let usage = &self.usage;
        let timings = &self.timings;
        let all = timings.prompt_n.map(|new| new.saturating_add(timings.cache_n.unwrap_or(0)));
        // Anthropic's counter excludes cached tokens; the others include them.
        let input = || Some(usage.input_tokens?.saturating_add(usage.cache_read_input_tokens.unwrap_or(0)));
        ExchangeOutcome {
            status: Some(status),
            // A refused request was not computed, even if its message looks like a failure to compute.
            compute_error: self.compute_error && !(400..500).contains(&status),
            prompt: all.or(usage.prompt_tokens).or_else(input),
            decode: timings.predicted_n.zip(timings.predicted_ms),
            prefill: timings.prompt_n.zip(timings.prompt_ms),
        }
    }

    /// Adds the prompt size to a trace and, with `whole`, the server's times for prompt and output tokens.
    pub(crate) fn add_to_trace(&self, trace: &mut GatewayTrace, whole: bool) {
        let ended = self.outcome(200);
        trace.prompt = ended.prompt.or(trace.prompt);
        let took = |ms: f64| Duration::try_from_secs_f64(ms / 1e3).ok();
        if whole {
            trace.note_times(self.timings.prompt_ms.and_then(took), self.timings.predicted_ms.and_then(took));
        }
    }

    /// Reads all complete objects in `bytes`; returns the offset of an incomplete one.
    fn read_objects(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut start = 0;
        while let Some(found) = NAME_SEARCHER.find_in(bytes, Span { start, end: bytes.len() }) {
            let at = found.start();
            // In text that is no JSON, the closing quote of a name may open another name. Restarting at that
            // quote makes the result independent of where pieces are cut.
            start = found.end() - 1;
            // A quote in generated text is escaped, so a name after a backslash is no name.
            let before = if at == 0 { self.before } else { Some(bytes[at - 1]) };
            if before == Some(b'\\') {
                continue;
            }
            let rest = &bytes[found.end()..];
            let is_complete = match found.pattern().as_usize() {
                0 => self.read_object(rest, Self::note_usage),
                1 => self.read_object(rest, Self::note_timings),
                2 => self.read_object(rest, Self::note_failure),
                _ => self.read_object(rest, |meter, progress: &PromptProgress| {
                    meter.evaluated = Some((progress.processed, progress.cache));
                }),
            };
            if !is_complete {
                return Some(at.saturating_sub(1));
            }
        }
        None
    }

    /// Reads the object after a name; returns false if it is incomplete.
    fn read_object<T: DeserializeOwned>(&mut self, bytes: &[u8], note: impl FnOnce(&mut Self, &T)) -> bool {
        match parse_object(bytes) {
            ParsedObject::Whole(object) => note(self, &object),
            ParsedObject::Incomplete => return false,
            ParsedObject::None => {}
        }
        true
    }

    fn note_usage(&mut self, new: &ReportedUsage) {
        let old = &mut self.usage;
        old.prompt_tokens = new.prompt_tokens.or(old.prompt_tokens);
        old.completion_tokens = new.completion_tokens.or(old.completion_tokens);
        old.input_tokens = new.input_tokens.or(old.input_tokens);
        old.output_tokens = new.output_tokens.or(old.output_tokens);
        old.cache_read_input_tokens = new.cache_read_input_tokens.or(old.cache_read_input_tokens);
        old.prompt_tokens_details = new.prompt_tokens_details.or(old.prompt_tokens_details);
        old.input_tokens_details = new.input_tokens_details.or(old.input_tokens_details);
    }

    fn note_timings(&mut self, new: &ReportedTimings) {
        let old = &mut self.timings;
        old.cache_n = new.cache_n.or(old.cache_n);
        old.prompt_n = new.prompt_n.or(old.prompt_n);
        old.prompt_ms = new.prompt_ms.or(old.prompt_ms);
        old.predicted_n = new.predicted_n.or(old.predicted_n);
        old.predicted_ms = new.predicted_ms.or(old.predicted_ms);
    }

    fn note_failure(&mut self, failure: &ReportedFailure) {
        let message = failure.message.to_ascii_lowercase();
        self.compute_error |= COMPUTE_ERRORS.iter().any(|words| message.starts_with(words));
    }
}

enum ParsedObject<T> {
    Whole(T),
    Incomplete,
    /// No valid object follows the name.
    None,
}

/// Reads the object after a name, in the form `: {...}`.
fn parse_object<T: DeserializeOwned>(bytes: &[u8]) -> ParsedObject<T> {
    let rest = bytes.trim_ascii_start();
    let rest = match rest.split_first() {
        Some((b':', rest)) => rest.trim_ascii_start(),
        Some(_) => return ParsedObject::None,
        None => return ParsedObject::Incomplete,
    };
    match rest.first() {
        Some(b'{') => {}
        Some(_) => return ParsedObject::None,
        None => return ParsedObject::Incomplete,
    }
    match Deserializer::from_slice(rest).into_iter().next() {
        Some(Ok(object)) => ParsedObject::Whole(object),
        // The parser may report a truncated number as a syntax error instead of an early end.
        Some(Err(error)) if error.is_eof() || !is_whole(rest) => ParsedObject::Incomplete,
        _ => ParsedObject::None,
    }
}

/// Returns whether the bytes include the end of the object that they begin with.
fn is_whole(bytes: &[u8]) -> bool {
    let mut depth = 0_u32;
    let mut text = false;
    let mut escaped = false;
    for byte in bytes {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if text => escaped = true,
            b'"' => text = !text,
            b'{' if !text => depth += 1,
            b'}' if !text => {
                depth -= 1;
                if depth == 0 {
                    return true;
                }
            }
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(body: &str) -> (u64, u64) {
        let mut whole = AnswerMeter::new(512);
        whole.feed(body.as_bytes());
        let answer = whole.work(None);
        for size in [1, 2, 3, 7, 50] {
            let mut meter = AnswerMeter::new(512);
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
            (r#"{"usage"timings":{"prompt_n":3,"predicted_n":4}}"#, (3, 4)),
            // Embeddings and rerank: the counters come before the data or after it.
            (
                r#"{"model":"m","object":"list","data":[{"embedding":[0.5]}],"usage":{"prompt_tokens":6,"total_tokens":6}}"#,
                (6, 0),
            ),
            (
                r#"{"object":"list","usage":{"prompt_tokens":8,"total_tokens":8},"results":[{"index":0,"relevance_score":0.5}]}"#,
                (8, 0),
            ),
            (r#"[{"index":0,"score":0.5}]"#, (0, 0)),
            (r#"[{"index":0,"embedding":[[0.1,0.2]]}]"#, (0, 0)),
            // Infill and completions in llama-server's own dialect.
            (
                r#"{"content":"x","tokens_predicted":4,"tokens_evaluated":9,"timings":{"cache_n":0,"prompt_n":9,"predicted_n":4}}"#,
                (9, 4),
            ),
            // A transcription.
            (
                r#"{"text":"x","usage":{"type":"tokens","input_tokens":40,"output_tokens":6,"total_tokens":46,"input_tokens_details":{"cached_tokens":0}}}"#,
                (40, 6),
            ),
            // Streams that end without `[DONE]`.
            (
                "event: message_start\ndata: {\"message\":{\"usage\":{\"cache_read_input_tokens\":3,\"input_tokens\":5,\"output_tokens\":0}}}\n\nevent: message_delta\ndata: {\"usage\":{\"output_tokens\":7}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
                (5, 7),
            ),
            (
                "event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":5,\"output_tokens\":7,\"total_tokens\":12}}}\n\n",
                (5, 7),
            ),
            // A stream with progress reports that was left before its first token.
            (
                "data: {\"choices\":[],\"prompt_progress\":{\"total\":900,\"cache\":100,\"processed\":300,\"time_ms\":5}}\n\n\
                 data: {\"choices\":[],\"prompt_progress\":{\"total\":900,\"cache\":100,\"processed\":600,\"time_ms\":9}}\n\n",
                (500, 0),
            ),
            (
                r#"{"prompt_progress":{"total":9,"cache":0,"processed":9},"timings":{"prompt_n":8,"predicted_n":1}}"#,
                (8, 1),
            ),
            ("no json", (0, 0)),
        ] {
            assert_eq!(work(body), expected, "{body}");
        }
    }

    #[test]
    fn failures_to_compute_are_told_from_mistakes_of_clients() {
        for (body, failed) in [
            (r#"{"error":{"code":500,"message":"Compute error.","type":"server_error"}}"#, true),
            (
                "data: {\"choices\":[]}\n\ndata: {\"error\":{\"code\":500,\"message\":\"Invalid input batch.\"}}\n\n",
                true,
            ),
            (
                "event: error\ndata: {\"type\":\"error\",\"error\":{\"message\":\"failed to process mtmd chunk\"}}\n\n",
                true,
            ),
            (r#"{"error":{"code":500,"message":"Failed to parse tools: x","type":"server_error"}}"#, false),
            (r#"{"error":{"code":500,"message":"Context size has been exceeded."}}"#, false),
            (r#"{"content":"{\"error\":{\"message\":\"Compute error.\"}}"}"#, false),
            (r#"{"error":{"code":500,"message":"parse error: last read: 'Compute error.'"}}"#, false),
            (r#"{"error":"Compute error."}"#, false),
            (r#"{"message":"Compute error."}"#, false),
        ] {
            for size in [1, 2, 5, 1000] {
                let mut meter = AnswerMeter::new(512);
                body.as_bytes().chunks(size).for_each(|piece| meter.feed(piece));
                assert_eq!(meter.outcome(500).compute_error, failed, "{body} in pieces of {size}");
                assert!(!meter.outcome(400).compute_error, "{body}: a request that was refused");
            }
        }
    }

    #[test]
    fn the_prompt_is_told_with_its_cached_part_and_the_speed_of_decoding_beside_it() {
        for (body, prompt, decode, prefill) in [
            (
                r#"{"usage":{"prompt_tokens":20},"timings":{"cache_n":18,"prompt_n":2,"prompt_ms":9.5,"predicted_n":7,"predicted_ms":35.5}}"#,
                Some(20),
                Some((7, 35.5)),
                Some((2, 9.5)),
            ),
            (
                r#"{"usage":{"completion_tokens":7,"prompt_tokens":20,"prompt_tokens_details":{"cached_tokens":5}}}"#,
                Some(20),
                None,
                None,
            ),
            (
                r#"{"usage":{"input_tokens":9,"cache_read_input_tokens":30,"output_tokens":0}}"#,
                Some(39),
                None,
                None,
            ),
            (r#"{"object":"list"}"#, None, None, None),
        ] {
            let mut meter = AnswerMeter::new(512);
            meter.feed(body.as_bytes());
            let wanted = ExchangeOutcome { status: Some(200), compute_error: false, prompt, decode, prefill };
            assert_eq!(meter.outcome(200), wanted, "{body}");
        }
    }

    #[test]
    fn an_object_that_never_ends_is_given_up_and_later_ones_count() {
        let mut meter = AnswerMeter::new(100);
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
        assert_eq!(AnswerMeter::new(100).work(Some(12)).output_tokens, 12);
    }
}
