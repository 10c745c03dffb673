//! Reads the events of a streamed answer in the dialect of each route. Pure.
//!
//! A stream with an unknown event is not continued: the client could get its content twice or never.

use serde_json::{Map, Value};

use super::said::{AnswerItem, ChannelKind, TextChannel};
use crate::answer::AnswerFormat;

/// Progress of an answer according to one event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerStep {
    Continues,
    /// The event has the finish reason and, if `counted`, the counters.
    Finished {
        counted: bool,
    },
    Counted,
    Done,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct EventReading {
    pub(super) items: Vec<AnswerItem>,
    pub(super) step: AnswerStep,
}

impl EventReading {
    const NOTHING: Self = Self { items: Vec::new(), step: AnswerStep::Continues };

    fn text(channel: TextChannel, text: &str) -> Self {
        Self { items: vec![AnswerItem::Text(channel, text.to_owned())], step: AnswerStep::Continues }
    }

    fn mark(mark: String, names: Vec<String>) -> Self {
        Self { items: vec![AnswerItem::Mark(mark, names)], step: AnswerStep::Continues }
    }

    fn done() -> Self {
        Self { items: Vec::new(), step: AnswerStep::Done }
    }
}

/// Reason why a stream cannot be continued elsewhere.
pub(super) type UnreadableReason = &'static str;

pub(super) fn split_event(event: &[u8]) -> Result<(Option<&[u8]>, &[u8]), UnreadableReason> {
    let odd = "its events are not written as llama-server writes them";
    let (name, line) = match event.strip_prefix(b"event: ") {
        Some(rest) => {
            let end = memchr::memchr(b'\n', rest).ok_or(odd)?;
            (Some(&rest[..end]), &rest[end + 1..])
        }
        None => (None, event),
    };
    let data = line.strip_prefix(b"data: ").filter(|data| !data.contains(&b'\n'));
    data.map(|data| (name, data)).ok_or(odd)
}

pub(super) fn read_event(
    kind: AnswerFormat,
    event: &Map<String, Value>,
) -> Result<EventReading, UnreadableReason> {
    if event.get("error").is_some_and(|error| !error.is_null()) {
        return Err("its server reported an error");
    }
    match kind {
        AnswerFormat::Native => read_native(event),
        AnswerFormat::Chat | AnswerFormat::Text => read_choice(kind, event),
        AnswerFormat::Messages => read_messages_event(event),
        AnswerFormat::Responses => read_responses_event(event),
    }
}

pub(super) fn is_progress(event: &Map<String, Value>) -> bool {
    event.get("prompt_progress").is_some_and(|progress| !progress.is_null())
}

fn read_native(event: &Map<String, Value>) -> Result<EventReading, UnreadableReason> {
    if event.contains_key("completion_probabilities") {
        return Err("it has probabilities");
    }
    if event.get("index").and_then(Value::as_u64).is_some_and(|index| index > 0) {
        return Err("there are several answers");
    }
    let Some(Value::String(text)) = event.get("content") else { return Err("an event has no text") };
    let mut reading = EventReading::text(TextChannel::CONTENT, text);
    if event.get("stop") == Some(&Value::Bool(true)) {
        reading.step = AnswerStep::Done;
    }
    Ok(reading)
}

/// Reads an event in `OpenAI`'s dialect.
fn read_choice(kind: AnswerFormat, event: &Map<String, Value>) -> Result<EventReading, UnreadableReason> {
    if event.contains_key("__verbose") {
        return Err("it has debugging fields (`__verbose`)");
    }
    let counted = event.get("usage").is_some_and(Value::is_object);
    let Some(Value::Array(choices)) = event.get("choices") else { return Err("an event has no choices") };
    let choice = match &choices[..] {
        [] if counted => return Ok(EventReading { items: Vec::new(), step: AnswerStep::Counted }),
        [] => return Ok(EventReading::NOTHING),
        [Value::Object(choice)] => choice,
        _ => return Err("there are several answers"),
    };
    if choice.get("index").and_then(Value::as_u64).is_some_and(|index| index > 0) {
        return Err("there are several answers");
    }
    if choice.get("logprobs").is_some_and(|told| !told.is_null()) {
        return Err("it has probabilities");
    }
    let mut reading = match kind {
        AnswerFormat::Chat => {
            EventReading { items: delta_items(choice.get("delta"))?, step: AnswerStep::Continues }
        }
        _ => match choice.get("text") {
            Some(Value::String(text)) => EventReading::text(TextChannel::CONTENT, text),
            _ => return Err("an event has no text"),
        },
    };
    if let Some(reason) = choice.get("finish_reason").filter(|reason| !reason.is_null()) {
        reading.items.push(AnswerItem::Mark(format!("finish {reason}"), Vec::new()));
        reading.step = AnswerStep::Finished { counted };
    }
    Ok(reading)
}

fn delta_items(delta: Option<&Value>) -> Result<Vec<AnswerItem>, UnreadableReason> {
    let Some(Value::Object(delta)) = delta else { return Err("an event has no delta") };
    let mut items = Vec::new();
    for (name, value) in delta {
        match (name.as_str(), value) {
            ("role", _) | (_, Value::Null) => {}
            ("content", Value::String(text)) => {
                items.push(AnswerItem::Text(TextChannel::CONTENT, text.clone()));
            }
            ("reasoning_content", Value::String(text)) => {
                items.push(AnswerItem::Text(TextChannel::REASONING, text.clone()));
            }
            ("tool_calls", Value::Array(calls)) => match &calls[..] {
                [] => {}
                [call] => read_tool_call(call, &mut items)?,
                _ => return Err("an event has several calls of tools"),
            },
            _ => return Err("it has more than text, reasoning and calls of tools"),
        }
    }
    Ok(items)
}

fn read_tool_call(call: &Value, items: &mut Vec<AnswerItem>) -> Result<(), UnreadableReason> {
    let odd = "a call of a tool is not written as llama-server writes one";
    let Some(index) = call["index"].as_u64() else { return Err(odd) };
    let function = &call["function"];
    let text = |value: &Value| match value {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        _ => Err(odd),
    };
    let id = text(&call["id"])?;
    let name = text(&function["name"])?;
    if id.is_some() || name.is_some() {
        let named = format!("call {index} {}", name.as_deref().unwrap_or_default());
        items.push(AnswerItem::Mark(named, id.into_iter().collect()));
    }
    if let Some(arguments) = text(&function["arguments"])? {
        items.push(AnswerItem::Text(TextChannel { kind: ChannelKind::Arguments, index }, arguments));
    }
    Ok(())
}

fn string_members<const N: usize>(of: &Value, members: [&str; N]) -> Vec<String> {
    members.into_iter().filter_map(|member| Some(of[member].as_str()?.to_owned())).collect()
}

fn read_messages_event(event: &Map<String, Value>) -> Result<EventReading, UnreadableReason> {
    let member = |name: &str| event.get(name).unwrap_or(&Value::Null);
    let index = member("index").as_u64();
    let numbered = || index.ok_or("a block of it has no number");
    Ok(match member("type").as_str().unwrap_or_default() {
        "message_start" => EventReading::mark("start".to_owned(), string_members(member("message"), ["id"])),
        "content_block_start" => {
            let block = member("content_block");
            if ["text", "thinking"]
                .iter()
                .any(|text| block[*text].as_str().is_some_and(|text| !text.is_empty()))
            {
                return Err("a block of it begins with a text");
            }
            let kind = block["type"].as_str();
            let name = block["name"].as_str();
            let mark =
                format!("block {} {} {}", numbered()?, kind.unwrap_or_default(), name.unwrap_or_default());
            EventReading::mark(mark, string_members(block, ["id"]))
        }
        "content_block_delta" => {
            let delta = member("delta");
            let index = numbered()?;
            let (what, text) = match delta["type"].as_str().unwrap_or_default() {
                "text_delta" => (ChannelKind::Content, &delta["text"]),
                "thinking_delta" => (ChannelKind::Reasoning, &delta["thinking"]),
                "input_json_delta" => (ChannelKind::Arguments, &delta["partial_json"]),
                "signature_delta" => return Ok(EventReading::mark(format!("signature {index}"), Vec::new())),
                _ => return Err("it has more than text, thoughts and calls of tools"),
            };
            let Some(text) = text.as_str() else { return Err("an event has no text") };
            EventReading::text(TextChannel { kind: what, index }, text)
        }
        "content_block_stop" => EventReading::mark(format!("stop {}", numbered()?), Vec::new()),
        "message_delta" => EventReading::mark(format!("end {}", member("delta")["stop_reason"]), Vec::new()),
        "message_stop" => EventReading::done(),
        "ping" => EventReading::NOTHING,
        _ => return Err("it has events that are not known"),
    })
}

fn read_responses_event(event: &Map<String, Value>) -> Result<EventReading, UnreadableReason> {
    let member = |name: &str| event.get(name).unwrap_or(&Value::Null);
    let kind = member("type").as_str().unwrap_or_default();
    let what = match kind {
        "response.output_text.delta" => ChannelKind::Content,
        "response.reasoning_text.delta" => ChannelKind::Reasoning,
        "response.function_call_arguments.delta" => ChannelKind::Arguments,
        "response.created" => {
            return Ok(EventReading::mark("created".to_owned(), string_members(member("response"), ["id"])));
        }
        "response.in_progress" | "response.queued" => return Ok(EventReading::NOTHING),
        "response.output_item.added" => {
            let item = member("item");
            let name = item["name"].as_str().unwrap_or_default();
            return Ok(EventReading::mark(
                format!("item {} {name}", item["type"]),
                string_members(item, ["id", "call_id"]),
            ));
        }
        "response.content_part.added" => {
            return Ok(EventReading::mark(format!("part {}", member("part")["type"]), Vec::new()));
        }
        "response.output_text.done"
        | "response.reasoning_text.done"
        | "response.function_call_arguments.done"
        | "response.content_part.done"
        | "response.output_item.done" => return Ok(EventReading::mark(kind.to_owned(), Vec::new())),
        "response.completed" | "response.incomplete" => return Ok(EventReading::done()),
        "error" | "response.failed" => return Err("its server reported an error"),
        _ => return Err("it has events that are not known"),
    };
    let Some(text) = member("delta").as_str() else { return Err("an event has no text") };
    Ok(EventReading::text(
        TextChannel { kind: what, index: member("output_index").as_u64().unwrap_or(0) },
        text,
    ))
}
