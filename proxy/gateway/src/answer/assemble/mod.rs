//! Assembles non-streaming answers from streams (`cancel = "assemble"`), for builds of llama-server that
//! notice a client's leaving only during a stream.
//!
//! ```text
//!   request, no stream --[ does a stream have all of its answer? ]-- no --> passes as it is
//!           | yes: "stream":true spliced in
//!           v
//!   llama-server --> refuses --> passes as it is, with its status
//!           | events, each processed when it arrives, none kept
//!           v
//!   whole --> the object that llama-server would have sent
//!           | error event --> its status and error, as without a stream
//!           | cut, too large, not understood --> 502
//! ```
//!
//! Streaming requests, and models without the rule, are never touched. docs/cancellation.md lists the
//! differences from llama-server's own answers.

use bytes::Bytes;
use http::StatusCode;
use serde_json::{Map, Value};

use crate::body::StringSpelling;
use crate::protocol::EventSplitter;
use crate::route::BodyShape;

pub(crate) use self::ask::request_stream;
pub(crate) use self::gather::gather_stream;
pub(crate) use crate::protocol::headers::is_events;

mod ask;
mod completions;
mod gather;
mod messages;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerFormat {
    Chat,
    Text,
    /// llama-server's own `/completion`.
    Native,
    Responses,
    Messages,
}

impl AnswerFormat {
    pub(crate) fn from_shape(shape: BodyShape) -> Option<Self> {
        Some(match shape {
            BodyShape::Chat => Self::Chat,
            BodyShape::Completion => Self::Text,
            BodyShape::Native => Self::Native,
            BodyShape::Responses => Self::Responses,
            BodyShape::Messages => Self::Messages,
            BodyShape::ChatCount | BodyShape::ResponsesCount | BodyShape::MessagesCount => return None,
        })
    }
}

#[derive(Debug, PartialEq)]
enum AssemblyError {
    /// The backend reported this error in its stream.
    Reported(StatusCode, Bytes),
    UnknownForm(&'static str),
    TooLarge,
}

#[derive(Debug)]
struct AnswerAssembly {
    cutter: EventSplitter,
    parts: FormatAssembly,
    veil: NumberMask,
    events: u64,
    held: usize,
    limit: usize,
}

#[derive(Debug)]
enum FormatAssembly {
    Chat(completions::ChatAssembly),
    Text(completions::CompletionAssembly),
    Responses(messages::ResponsesAssembly),
    Messages(messages::MessagesAssembly),
}

impl AnswerAssembly {
    /// Creates an assembly that holds about `limit` bytes at most.
    pub(crate) fn new(kind: AnswerFormat, limit: usize) -> Self {
        let parts = match kind {
            AnswerFormat::Chat => FormatAssembly::Chat(completions::ChatAssembly::default()),
            AnswerFormat::Text => FormatAssembly::Text(completions::CompletionAssembly::new(true)),
            AnswerFormat::Native => FormatAssembly::Text(completions::CompletionAssembly::new(false)),
            AnswerFormat::Responses => FormatAssembly::Responses(messages::ResponsesAssembly::default()),
            AnswerFormat::Messages => FormatAssembly::Messages(messages::MessagesAssembly::default()),
        };
        Self { cutter: EventSplitter::new(limit), parts, veil: NumberMask::new(), events: 0, held: 0, limit }
    }

    pub(crate) fn feed(&mut self, piece: Bytes) -> Result<(), AssemblyError> {
        let whole = self.cutter.push(piece);
        if self.cutter.is_torn() { Err(AssemblyError::TooLarge) } else { self.add_events(&whole) }
    }

    /// Handles the end of the stream; the remaining bytes are an event without its blank line.
    pub(crate) fn end_stream(&mut self) -> Result<(), AssemblyError> {
        let rest = self.cutter.finish();
        self.add_events(&rest)
    }

    fn add_events(&mut self, whole: &[u8]) -> Result<(), AssemblyError> {
        for_each_event(whole, |event| {
            self.events += 1;
            self.held = self.held.saturating_add(self.parts.add_event(&event, &self.veil)?);
            if self.held > self.limit { Err(AssemblyError::TooLarge) } else { Ok(()) }
        })
    }

    pub(crate) fn finish(self) -> Result<Bytes, AssemblyError> {
        let answer = match self.parts {
            FormatAssembly::Chat(chat) => chat.finish(),
            FormatAssembly::Text(text) => text.finish(),
            FormatAssembly::Responses(responses) => responses.finish(),
            FormatAssembly::Messages(messages) => messages.finish(),
        };
        let answer = answer.ok_or(AssemblyError::UnknownForm("it ended before its last event"))?;
        Ok(Bytes::from(self.veil.unmask_numbers(&answer.to_string())))
    }
}

impl FormatAssembly {
    /// Adds an event; returns the approximate number of bytes by which the held state grew.
    fn add_event(&mut self, event: &SseEvent<'_>, veil: &NumberMask) -> Result<usize, AssemblyError> {
        // In a request with several answers, llama-server may begin the data of later events with `null`.
        if matches!(event.data, "[DONE]" | "null") {
            return Ok(0);
        }
        let Ok(Value::Object(mut data)) = serde_json::from_str(&veil.mask_numbers(event.data)) else {
            return Err(AssemblyError::UnknownForm("an event is no JSON object"));
        };
        if event.name == "error" {
            // In Anthropic's dialect the event itself is the error object.
            let error = data.remove("error").unwrap_or(Value::Object(data));
            return Err(reported_error(error, veil));
        }
        if let Some(error) = data.remove("error") {
            return Err(reported_error(error, veil));
        }
        let size = event.data.len();
        match self {
            Self::Chat(chat) => chat.add_event(data, size),
            Self::Text(text) => text.add_event(data, size),
            Self::Responses(responses) => Ok(responses.add_event(data, size)),
            Self::Messages(messages) => Ok(messages.add_event(data)),
        }
    }
}

/// Converts an error event into llama-server's response without a stream.
fn reported_error(error: Value, veil: &NumberMask) -> AssemblyError {
    let status = error["code"].as_u64().and_then(|code| StatusCode::from_u16(u16::try_from(code).ok()?).ok());
    let status = status.filter(|status| status.is_client_error() || status.is_server_error());
    let body = Map::from_iter([("error".to_owned(), error)]);
    AssemblyError::Reported(
        status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
        Bytes::from(veil.unmask_numbers(&Value::Object(body).to_string())),
    )
}

/// Puts the fields named in `order` first.
fn order_fields(mut fields: Map<String, Value>, order: &[&str]) -> Map<String, Value> {
    let mut all = Map::new();
    for name in order {
        if let Some(value) = fields.shift_remove(*name) {
            all.insert((*name).to_owned(), value);
        }
    }
    all.append(&mut fields);
    all
}

fn append_text(to: &mut String, value: &Value) -> usize {
    let text = value.as_str().unwrap_or_default();
    to.push_str(text);
    text.len()
}

/// Returns the number of the answer within its request; 0 without a member `index`.
fn answer_index(fields: &Map<String, Value>) -> u64 {
    fields.get("index").and_then(Value::as_u64).unwrap_or(0)
}

/// Sets `stream` to false in the settings of a verbose answer, as the client requested no stream.
fn clear_stream_setting(settings: Option<&mut Value>) {
    if let Some(stream) = settings.and_then(|settings| settings.get_mut("stream")) {
        *stream = Value::Bool(false);
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct SseEvent<'a> {
    /// Event name; empty if the event has none.
    pub(super) name: &'a str,
    pub(super) data: &'a str,
}

/// Calls `take` for each event until it fails. llama-server writes the data of an event on one line.
pub(super) fn for_each_event<E>(
    whole: &[u8],
    mut take: impl FnMut(SseEvent<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let text = String::from_utf8_lossy(whole);
    let mut name = "";
    for line in text.lines() {
        if let Some(data) = line.strip_prefix("data:") {
            take(SseEvent { name: std::mem::take(&mut name), data: data.trim_start() })?;
        } else if let Some(said) = line.strip_prefix("event:") {
            name = said.trim();
        }
    }
    Ok(())
}

/// Random prefix of strings that stand in for fractional numbers, so that the numbers keep their spelling.
#[derive(Debug)]
pub(super) struct NumberMask(String);

impl NumberMask {
    pub(super) fn new() -> Self {
        Self(format!("{:032x}:", rand::random::<u128>()))
    }

    pub(super) fn mask_numbers(&self, json: &str) -> String {
        let bytes = json.as_bytes();
        let mut all = String::with_capacity(json.len() + 64);
        let mut at = 0;
        let mut told = 0;
        let mut text = StringSpelling::default();
        while at < bytes.len() {
            match bytes[at] {
                b'"' => {
                    text.begin(0);
                    at = text.read(bytes, at + 1).0;
                }
                b'-' | b'0'..=b'9' => {
                    let is_part = |byte: &u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
                    let length = bytes[at..].iter().position(|byte| !is_part(byte));
                    let end = length.map_or(bytes.len(), |length| at + length);
                    if bytes[at..end].iter().any(|byte| matches!(byte, b'.' | b'e' | b'E')) {
                        all.push_str(&json[told..at]);
                        all.push('"');
                        all.push_str(&self.0);
                        all.push_str(&json[at..end]);
                        all.push('"');
                        told = end;
                    }
                    at = end;
                }
                _ => at += 1,
            }
        }
        all.push_str(&json[told..]);
        all
    }

    pub(super) fn unmask_numbers(&self, json: &str) -> String {
        let mark = format!("\"{}", self.0);
        let mut all = String::with_capacity(json.len());
        let mut parts = json.split(mark.as_str());
        all.push_str(parts.next().unwrap_or_default());
        for part in parts {
            let (number, rest) = part.split_once('"').unwrap_or((part, ""));
            all.push_str(number);
            all.push_str(rest);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::protocol::sse::EventSplitter;

    #[test]
    fn events_come_out_whole_however_the_stream_is_cut() {
        let stream = "event: a\ndata: {\"ü\":1}\n\n:\n\ndata: 2\r\n\r\nevent: b\ndata:3\n\ndata: [DONE]\n\n";
        for size in 1..stream.len() {
            let mut cutter = EventSplitter::new(100);
            let mut all = Vec::new();
            for piece in stream.as_bytes().chunks(size) {
                let taken = for_each_event(&cutter.push(Bytes::copy_from_slice(piece)), |event| {
                    all.push(format!("{}={}", event.name, event.data));
                    Ok::<_, ()>(())
                });
                assert_eq!(taken, Ok(()));
            }
            assert_eq!(all, ["a={\"ü\":1}", "=2", "b=3", "=[DONE]"], "{size}");
            assert_eq!(cutter.finish(), "");
        }
    }
}

#[cfg(test)]
mod numbers_tests {
    use super::*;

    #[test]
    fn digits_come_out_as_they_went_in() {
        let veil = NumberMask::new();
        for json in [
            r#"{"a":-1.4600032567977905,"b":[1.0e-05,2,-3],"c":"1.5 \"2.5\" -","d":0.0}"#,
            "1.10",
            "[]",
            r#"{"ü1.5":1e5}"#,
        ] {
            let veiled = veil.mask_numbers(json);
            let value: Value = serde_json::from_str(&veiled).unwrap();
            assert_eq!(veil.unmask_numbers(&value.to_string()), json);
        }
    }
}
