//! Assembles non-streaming answers from streams (`cancel = "assemble"`), for a llama-server that does not
//! notice when the client of a non-streaming request leaves. With a stream, llama-server does notice.
//!
//! ```text
//!   request, no stream --[ does a stream have all of its answer? ]-- no --> passes as it is
//!           | yes: "stream":true spliced in
//!           v
//!   llama-server --> refuses --> passes as it is, with its status
//!           | events, read as they come, none kept
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

pub(crate) use self::ask::ask;
use self::events::{Event, each};
pub(crate) use self::gather::gather;
use self::numbers::Veil;
pub(crate) use crate::protocol::headers::is_events;
use crate::protocol::sse::Events;
use crate::route::Shape;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Chat,
    /// OpenAI's text completions.
    Text,
    /// llama-server's own `/completion`.
    Native,
    Responses,
    Messages,
}

impl Kind {
    /// Returns the dialect of a route that generates text.
    pub(crate) fn of(shape: Shape) -> Option<Self> {
        Some(match shape {
            Shape::Chat => Self::Chat,
            Shape::Completion => Self::Text,
            Shape::Native => Self::Native,
            Shape::Responses => Self::Responses,
            Shape::Messages => Self::Messages,
            Shape::ChatCount | Shape::ResponsesCount | Shape::MessagesCount => return None,
        })
    }
}

/// Reasons why no answer could be assembled.
#[derive(Debug, PartialEq)]
enum Fault {
    /// The backend reported this error in its stream.
    Told(StatusCode, Bytes),
    /// The stream has an unknown form.
    Strange(&'static str),
    /// The answer exceeds the memory limit.
    TooLarge,
}

/// State of one stream that is being assembled.
#[derive(Debug)]
struct Assembly {
    cutter: Events,
    parts: Parts,
    veil: Veil,
    events: u64,
    held: usize,
    limit: usize,
}

#[derive(Debug)]
enum Parts {
    Chat(chat::Chat),
    Text(text::Text),
    Responses(responses::Responses),
    Messages(messages::Messages),
}

impl Assembly {
    /// Creates an assembly that holds at most about `limit` bytes.
    pub(crate) fn new(kind: Kind, limit: usize) -> Self {
        let parts = match kind {
            Kind::Chat => Parts::Chat(chat::Chat::default()),
            Kind::Text => Parts::Text(text::Text::new(true)),
            Kind::Native => Parts::Text(text::Text::new(false)),
            Kind::Responses => Parts::Responses(responses::Responses::default()),
            Kind::Messages => Parts::Messages(messages::Messages::default()),
        };
        Self { cutter: Events::new(limit), parts, veil: Veil::new(), events: 0, held: 0, limit }
    }

    pub(crate) fn feed(&mut self, piece: Bytes) -> Result<(), Fault> {
        let whole = self.cutter.pass(piece);
        if self.cutter.is_torn() { Err(Fault::TooLarge) } else { self.take(&whole) }
    }

    /// Handles the end of the stream: the remaining bytes are an event without its blank line.
    pub(crate) fn end(&mut self) -> Result<(), Fault> {
        let rest = self.cutter.finish();
        self.take(&rest)
    }

    fn take(&mut self, whole: &[u8]) -> Result<(), Fault> {
        each(whole, |event| {
            self.events += 1;
            self.held = self.held.saturating_add(self.parts.event(&event, &self.veil)?);
            if self.held > self.limit { Err(Fault::TooLarge) } else { Ok(()) }
        })
    }

    pub(crate) fn events(&self) -> u64 {
        self.events
    }

    /// Returns the answer, once the stream has ended.
    pub(crate) fn finish(self) -> Result<Bytes, Fault> {
        let answer = match self.parts {
            Parts::Chat(chat) => chat.finish(),
            Parts::Text(text) => text.finish(),
            Parts::Responses(responses) => responses.finish(),
            Parts::Messages(messages) => messages.finish(),
        };
        let answer = answer.ok_or(Fault::Strange("it ended before its last event"))?;
        Ok(Bytes::from(self.veil.take_off(&answer.to_string())))
    }
}

impl Parts {
    /// Adds an event; returns by how many bytes the held state has grown, roughly.
    fn event(&mut self, event: &Event<'_>, veil: &Veil) -> Result<usize, Fault> {
        // With several answers, all but the first begin with a `null`.
        if matches!(event.data, "[DONE]" | "null") {
            return Ok(0);
        }
        let Ok(Value::Object(mut data)) = serde_json::from_str(&veil.put_on(event.data)) else {
            return Err(Fault::Strange("an event is no JSON object"));
        };
        if event.name == "error" {
            // Anthropic's dialect sends the error object bare.
            let error = data.remove("error").unwrap_or(Value::Object(data));
            return Err(told(error, veil));
        }
        if let Some(error) = data.remove("error") {
            return Err(told(error, veil));
        }
        let size = event.data.len();
        match self {
            Self::Chat(chat) => chat.event(data, size),
            Self::Text(text) => text.event(data, size),
            Self::Responses(responses) => Ok(responses.event(data, size)),
            Self::Messages(messages) => Ok(messages.event(data)),
        }
    }
}

/// Converts an error event into the response that llama-server would have sent without a stream.
fn told(error: Value, veil: &Veil) -> Fault {
    let status = error["code"].as_u64().and_then(|code| StatusCode::from_u16(u16::try_from(code).ok()?).ok());
    let status = status.filter(|status| status.is_client_error() || status.is_server_error());
    let body = Map::from_iter([("error".to_owned(), error)]);
    Fault::Told(
        status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
        Bytes::from(veil.take_off(&Value::Object(body).to_string())),
    )
}

/// Returns the fields in this order, followed by all others.
fn ordered(mut fields: Map<String, Value>, order: &[&str]) -> Map<String, Value> {
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
fn append(to: &mut String, value: &Value) -> usize {
    let text = value.as_str().unwrap_or_default();
    to.push_str(text);
    text.len()
}

/// Returns `index`, the number of the answer within its request.
fn index(fields: &Map<String, Value>) -> u64 {
    fields.get("index").and_then(Value::as_u64).unwrap_or(0)
}

/// Sets `stream` to false in the settings of a verbose answer, which otherwise show the stream that was
/// requested.
fn no_stream(settings: Option<&mut Value>) {
    if let Some(stream) = settings.and_then(|settings| settings.get_mut("stream")) {
        *stream = Value::Bool(false);
    }
}
