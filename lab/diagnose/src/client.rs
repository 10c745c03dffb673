//! Sends one request to the server under test, over its Unix socket, and reads the answer.
//!
//! No request is retried and no connection is kept alive, so that a leg counts only the server's own work.

use std::time::Duration;

use reqwest::Method;
use serde_json::Value;
use tokio::time::Instant;
use warden_supervisor::{ListenAddress, SoloProcess};

use crate::error::DiagnoseError;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LabRequest {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) body: Option<Value>,
    pub(crate) images: u64,
    pub(crate) audio: u64,
}

impl LabRequest {
    pub(crate) fn post(path: &str, body: Value) -> Self {
        Self { method: Method::POST, path: path.to_owned(), body: Some(body), images: 0, audio: 0 }
    }
}

/// Answer of the server, as far as it was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LabAnswer {
    /// Evaluated prompt tokens, without those from a cache.
    pub(crate) prompt_tokens: u64,
    /// Tokens of the whole prompt, cached or not.
    pub(crate) prompt_size: u64,
    pub(crate) output_tokens: u64,
    /// Milliseconds for the generated tokens, as reported by the server.
    pub(crate) output_ms: Option<f64>,
    /// Milliseconds for the evaluated prompt tokens, as reported by the server.
    pub(crate) prompt_ms: Option<f64>,
    /// Time from sending the request to the first token.
    pub(crate) first_token: Option<Duration>,
    pub(crate) text: String,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LabRequestError {
    /// The server refused.
    #[error("{status}: {message}")]
    Refused { status: u16, message: String },
    /// The connection broke, most likely because the server has ended.
    #[error("the connection broke: {0}")]
    Broken(String),
    #[error("no answer within {} s", .0.as_secs())]
    Late(Duration),
}

impl From<reqwest::Error> for LabRequestError {
    fn from(error: reqwest::Error) -> Self {
        Self::Broken(error_chain(&error))
    }
}

async fn within<T>(
    limit: Duration,
    exchange: impl Future<Output = Result<T, LabRequestError>>,
) -> Result<T, LabRequestError> {
    tokio::time::timeout(limit, exchange).await.unwrap_or(Err(LabRequestError::Late(limit)))
}

#[derive(Debug)]
pub(crate) struct LabClient {
    http: reqwest::Client,
    host: String,
    key: Option<String>,
}

impl LabClient {
    pub(crate) fn new(solo: &SoloProcess) -> Result<Self, DiagnoseError> {
        let (builder, host) = match solo.endpoint() {
            ListenAddress::Unix(socket) => {
                (reqwest::Client::builder().unix_socket(socket.as_path()), "server".to_owned())
            }
            ListenAddress::Tcp(address) => (reqwest::Client::builder(), address.to_string()),
        };
        let http = builder
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            // On a stop signal, llama-server waits for open connections.
            .pool_max_idle_per_host(0)
            .build();
        let http =
            http.map_err(|error| DiagnoseError::Own { what: "making a client", why: error_chain(&error) })?;
        Ok(Self { http, host, key: solo.api_key().map(str::to_owned) })
    }

    /// Dropping the future closes the connection.
    pub(crate) async fn send(&self, ask: &LabRequest, limit: Duration) -> Result<LabAnswer, LabRequestError> {
        within(limit, self.exchange(ask)).await
    }

    pub(crate) async fn send_json(
        &self,
        ask: &LabRequest,
        limit: Duration,
    ) -> Result<Value, LabRequestError> {
        let exchange = async {
            let response = self.send_accepted(ask).await?;
            Ok(response.json().await?)
        };
        within(limit, exchange).await
    }

    pub(crate) async fn send_head(&self, ask: &LabRequest, limit: Duration) -> Result<(), LabRequestError> {
        within(limit, self.send_accepted(ask)).await.map(drop)
    }

    /// Returns the number of tokens of a text; 0 if the server's answer has no tokens.
    pub(crate) async fn count_tokens(&self, text: &str, limit: Duration) -> Result<u32, LabRequestError> {
        let body = serde_json::json!({ "content": text });
        let json = self.send_json(&LabRequest::post("/tokenize", body), limit).await?;
        let tokens = json["tokens"].as_array().map_or(0, Vec::len);
        Ok(u32::try_from(tokens).unwrap_or(u32::MAX))
    }

    fn build_request(&self, ask: &LabRequest) -> reqwest::RequestBuilder {
        let mut request = self.http.request(ask.method.clone(), format!("http://{}{}", self.host, ask.path));
        if let Some(body) = &ask.body {
            // Recorded bodies are a client's text. On a kept connection, a server that answers without
            // reading the body would parse it as a request.
            request = request.json(body).header(reqwest::header::CONNECTION, "close");
        }
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        request
    }

    /// A refusal is an error.
    async fn send_accepted(&self, ask: &LabRequest) -> Result<reqwest::Response, LabRequestError> {
        let response = self.build_request(ask).send().await?;
        let status = response.status();
        if !status.is_success() {
            let text = response.text().await.unwrap_or_default();
            return Err(LabRequestError::Refused { status: status.as_u16(), message: error_message(&text) });
        }
        Ok(response)
    }

    async fn exchange(&self, ask: &LabRequest) -> Result<LabAnswer, LabRequestError> {
        let sent = Instant::now();
        let mut response = self.send_accepted(ask).await?;
        let kind = response.headers().get(reqwest::header::CONTENT_TYPE);
        let streams = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        if !streams {
            let text = response.text().await?;
            let mut answer = LabAnswer::default();
            if let Ok(json) = serde_json::from_str(&text) {
                answer.add_event(&json);
            }
            return Ok(answer);
        }
        let mut events = EventParser::default();
        let mut answer = LabAnswer::default();
        while let Some(piece) = response.chunk().await? {
            for event in events.feed(&piece) {
                if let Some(error) = event.get("error") {
                    let message = error["message"].as_str().unwrap_or("an error without a message");
                    return Err(LabRequestError::Refused { status: 200, message: message.to_owned() });
                }
                if answer.add_event(&event) && answer.first_token.is_none() {
                    answer.first_token = Some(sent.elapsed());
                }
            }
        }
        if !events.done {
            return Err(LabRequestError::Broken("the answer ended before its end".to_owned()));
        }
        Ok(answer)
    }
}

impl LabAnswer {
    /// Adds an event or a whole answer; returns true if it contained output.
    fn add_event(&mut self, json: &Value) -> bool {
        // Anthropic's messages and OpenAI's responses nest the usage in the event's object.
        let about = ["message", "response"].iter().map(|name| &json[*name]["usage"]);
        let usage = about.chain([&json["usage"]]).find(|usage| usage.is_object()).unwrap_or(&Value::Null);
        if let Some(tokens) = usage["input_tokens"].as_u64() {
            // Anthropic's counts exclude tokens from a cache, OpenAI's include them.
            let read = usage["cache_read_input_tokens"].as_u64().unwrap_or(0);
            let cached = usage["input_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
            self.prompt_size = tokens + read;
            self.prompt_tokens = tokens.saturating_sub(cached);
        }
        if let Some(tokens) = usage["output_tokens"].as_u64() {
            self.output_tokens = tokens;
        }
        if let Some(tokens) = usage["prompt_tokens"].as_u64() {
            self.prompt_size = tokens;
            let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
            self.prompt_tokens = tokens.saturating_sub(cached);
        }
        if let Some(tokens) = usage["completion_tokens"].as_u64() {
            self.output_tokens = tokens;
        }
        let timings = &json["timings"];
        if let Some(tokens) = timings["prompt_n"].as_u64() {
            self.prompt_tokens = tokens;
            self.prompt_ms = timings["prompt_ms"].as_f64();
            self.prompt_size = self.prompt_size.max(tokens + timings["cache_n"].as_u64().unwrap_or(0));
        }
        if let Some(tokens) = timings["predicted_n"].as_u64() {
            self.output_tokens = tokens;
            self.output_ms = timings["predicted_ms"].as_f64();
        }
        let choice = &json["choices"][0];
        let delta = &choice["delta"];
        let texts = [&delta["content"], &choice["text"], &choice["message"]["content"], &json["content"]];
        for text in texts.iter().filter_map(|text| text.as_str()) {
            self.text.push_str(text);
        }
        let some = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
        let event = &json["delta"];
        texts.iter().any(|text| some(text))
            || [event, &event["text"], &event["thinking"], &event["partial_json"]]
                .iter()
                .any(|text| some(text))
            || some(&delta["reasoning_content"])
            || delta["tool_calls"].is_array()
    }
}

#[derive(Debug, Default)]
struct EventParser {
    buffer: Vec<u8>,
    /// True after `[DONE]`, or after the last event of a native completion.
    done: bool,
}

impl EventParser {
    fn feed(&mut self, piece: &[u8]) -> Vec<Value> {
        self.buffer.extend_from_slice(piece);
        let mut events = Vec::new();
        let mut from = 0;
        while let Some(end) = self.buffer[from..].iter().position(|byte| *byte == b'\n') {
            let line = &self.buffer[from..from + end];
            from += end + 1;
            let Some(data) = line.strip_prefix(b"data:") else { continue };
            let data = data.trim_ascii();
            if data == b"[DONE]" {
                self.done = true;
            } else if let Ok(event) = serde_json::from_slice::<Value>(data) {
                // Anthropic's and the native route end without `[DONE]`.
                self.done |= event["stop"] == Value::Bool(true)
                    || matches!(event["type"].as_str(), Some("message_stop" | "response.completed"));
                events.push(event);
            }
        }
        self.buffer.drain(..from);
        events
    }
}

fn error_message(text: &str) -> String {
    let json: Option<Value> = serde_json::from_str(text).ok();
    let said = json.as_ref().and_then(|json| json["error"]["message"].as_str());
    said.map_or_else(|| text.trim().chars().take(200).collect(), str::to_owned)
}

/// Returns an error with its causes, which reqwest's own text leaves out.
fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_wherever_the_pieces_are_cut() {
        let text = b"data: {\"a\":1}\n\n: ping\n\ndata: {\"a\":2}\r\n\r\ndata: [DONE]\n\n";
        for cut in 0..text.len() {
            let mut events = EventParser::default();
            let mut found = events.feed(&text[..cut]);
            found.extend(events.feed(&text[cut..]));
            let numbers: Vec<u64> = found.iter().filter_map(|event| event["a"].as_u64()).collect();
            assert_eq!((numbers, events.done), (vec![1, 2], true), "cut at {cut}");
        }
    }

    #[test]
    fn an_answer_counts_what_was_evaluated_and_notices_its_first_token() {
        let mut answer = LabAnswer::default();
        let parts = [
            (r#"{"choices":[{"delta":{"role":"assistant","content":null}}]}"#, false),
            (r#"{"choices":[{"delta":{"reasoning_content":"so"}}]}"#, true),
            (r#"{"choices":[{"delta":{"content":" word"}}]}"#, true),
            (
                r#"{"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":3,
                    "prompt_tokens_details":{"cached_tokens":30}},
                    "timings":{"cache_n":30,"prompt_n":10,"predicted_n":3,"predicted_ms":1.5}}"#,
                false,
            ),
        ];
        for (part, output) in parts {
            assert_eq!(answer.add_event(&serde_json::from_str(part).unwrap()), output, "{part}");
        }
        assert_eq!((answer.prompt_tokens, answer.prompt_size, answer.output_tokens), (10, 40, 3));
        assert_eq!((answer.output_ms, answer.text.as_str()), (Some(1.5), " word"));
    }

    #[test]
    fn answers_of_other_apis_count_their_tokens_too() {
        let mut answer = LabAnswer::default();
        let parts = [
            (
                r#"{"type":"message_start","message":{"usage":{"input_tokens":10,"cache_read_input_tokens":30,"output_tokens":0}}}"#,
                false,
            ),
            (r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}"#, true),
            (
                r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":3}}"#,
                false,
            ),
        ];
        for (part, output) in parts {
            assert_eq!(answer.add_event(&serde_json::from_str(part).unwrap()), output, "{part}");
        }
        assert_eq!((answer.prompt_tokens, answer.prompt_size, answer.output_tokens), (10, 40, 3));
        let mut answer = LabAnswer::default();
        let parts = [
            (r#"{"type":"response.output_text.delta","delta":"a"}"#, true),
            (
                r#"{"type":"response.completed","response":{"usage":{"input_tokens":40,"output_tokens":3,
                    "input_tokens_details":{"cached_tokens":30}}}}"#,
                false,
            ),
        ];
        for (part, output) in parts {
            assert_eq!(answer.add_event(&serde_json::from_str(part).unwrap()), output, "{part}");
        }
        assert_eq!((answer.prompt_tokens, answer.prompt_size, answer.output_tokens), (10, 40, 3));
    }

    #[test]
    fn a_refusal_is_told_in_the_servers_words() {
        assert_eq!(error_message(r#"{"error":{"message":"no images","code":500}}"#), "no images");
        assert_eq!(error_message(" plain \n"), "plain");
    }
}
