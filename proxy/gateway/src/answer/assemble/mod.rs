//! Assembles non-streaming answers from streams (`cancel = "assemble"`), for a llama-server that does not
//! notice when the client of a non-streaming request leaves. With a stream, llama-server does notice.
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
//! differences from llama-server's own answers and the comparison that was made.

mod ask;
mod chat;
mod events;
mod gather;
mod messages;
mod numbers;
mod responses;
mod text;

use bytes::Bytes;
use http::StatusCode;
use serde_json::{Map, Value};

pub(crate) use self::ask::request_stream;
use self::events::{SseEvent, for_each_event};
pub(crate) use self::gather::gather_stream;
use self::numbers::NumberMask;
pub(crate) use crate::protocol::headers::is_events;
use crate::protocol::sse::EventSplitter;
use crate::route::BodyShape;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerFormat {
    Chat,
    /// OpenAI's text completions.
    Text,
    /// llama-server's own `/completion`.
    Native,
    Responses,
    Messages,
}

impl AnswerFormat {
    /// Returns the dialect of a route that generates text.
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

/// Reasons why no answer could be assembled.
#[derive(Debug, PartialEq)]
enum AssemblyError {
    /// The backend reported this error in its stream.
    Reported(StatusCode, Bytes),
    /// The stream has an unknown form.
    UnknownForm(&'static str),
    /// The answer exceeds the memory limit.
    TooLarge,
}

/// State of one stream that is being assembled.
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
    Chat(chat::ChatAssembly),
    Text(text::CompletionAssembly),
    Responses(responses::ResponsesAssembly),
    Messages(messages::MessagesAssembly),
}

impl AnswerAssembly {
    /// Creates an assembly that holds at most about `limit` bytes.
    pub(crate) fn new(kind: AnswerFormat, limit: usize) -> Self {
        let parts = match kind {
            AnswerFormat::Chat => FormatAssembly::Chat(chat::ChatAssembly::default()),
            AnswerFormat::Text => FormatAssembly::Text(text::CompletionAssembly::new(true)),
            AnswerFormat::Native => FormatAssembly::Text(text::CompletionAssembly::new(false)),
            AnswerFormat::Responses => FormatAssembly::Responses(responses::ResponsesAssembly::default()),
            AnswerFormat::Messages => FormatAssembly::Messages(messages::MessagesAssembly::default()),
        };
        Self { cutter: EventSplitter::new(limit), parts, veil: NumberMask::new(), events: 0, held: 0, limit }
    }

    pub(crate) fn feed(&mut self, piece: Bytes) -> Result<(), AssemblyError> {
        let whole = self.cutter.push(piece);
        if self.cutter.is_torn() { Err(AssemblyError::TooLarge) } else { self.add_events(&whole) }
    }

    /// Handles the end of the stream: the remaining bytes are an event without its blank line.
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

    pub(crate) fn events(&self) -> u64 {
        self.events
    }

    /// Returns the answer, once the stream has ended.
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
    /// Adds an event; returns by how many bytes the held state has grown, roughly.
    fn add_event(&mut self, event: &SseEvent<'_>, veil: &NumberMask) -> Result<usize, AssemblyError> {
        // If a request has several answers, the data of all events but the first may begin with `null`.
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

/// Converts an error event into the response that llama-server would have sent without a stream.
fn reported_error(error: Value, veil: &NumberMask) -> AssemblyError {
    let status = error["code"].as_u64().and_then(|code| StatusCode::from_u16(u16::try_from(code).ok()?).ok());
    let status = status.filter(|status| status.is_client_error() || status.is_server_error());
    let body = Map::from_iter([("error".to_owned(), error)]);
    AssemblyError::Reported(
        status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
        Bytes::from(veil.unmask_numbers(&Value::Object(body).to_string())),
    )
}

/// Returns the fields named in `order`, in that order, followed by all others.
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

/// Appends a text value; returns its length in bytes.
fn append_text(to: &mut String, value: &Value) -> usize {
    let text = value.as_str().unwrap_or_default();
    to.push_str(text);
    text.len()
}

/// Returns the member `index`: the number of the answer within its request, 0 if absent.
fn answer_index(fields: &Map<String, Value>) -> u64 {
    fields.get("index").and_then(Value::as_u64).unwrap_or(0)
}

/// Sets `stream` to false in the settings that a verbose answer reports, because the client asked for no
/// stream.
fn clear_stream_setting(settings: Option<&mut Value>) {
    if let Some(stream) = settings.and_then(|settings| settings.get_mut("stream")) {
        *stream = Value::Bool(false);
    }
}
