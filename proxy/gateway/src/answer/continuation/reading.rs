//! Reads the events of a streamed answer in the dialect of each route. Pure.
//!
//! An unknown event is a reason not to continue the stream: the client could get its content twice or not
//! at all.

use serde_json::{Map, Value};

use super::said::{Channel, Item, What};
use crate::answer::assemble::Kind;

/// Progress of an answer that one event reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    On,
    /// The answer has its finish reason; `counted`: its counters, too.
    Finished {
        counted: bool,
    },
    /// The event has counters.
    Counted,
    Done,
}

/// Content of one event.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Reading {
    pub(super) items: Vec<Item>,
    pub(super) step: Step,
}

impl Reading {
    const NOTHING: Self = Self { items: Vec::new(), step: Step::On };

    fn text(channel: Channel, text: &str) -> Self {
        Self { items: vec![Item::Text(channel, text.to_owned())], step: Step::On }
    }

    fn mark(mark: String, names: Vec<String>) -> Self {
        Self { items: vec![Item::Mark(mark, names)], step: Step::On }
    }

    fn done() -> Self {
        Self { items: Vec::new(), step: Step::Done }
    }
}

/// Reason why a stream cannot be continued elsewhere.
pub(super) type Why = &'static str;

/// Splits an event into its name, if any, and its data.
pub(super) fn parts(event: &[u8]) -> Result<(Option<&[u8]>, &[u8]), Why> {
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

/// Reads the JSON object that is the data of an event.
pub(super) fn read(kind: Kind, event: &Map<String, Value>) -> Result<Reading, Why> {
    if event.get("error").is_some_and(|error| !error.is_null()) {
        return Err("its server reported an error");
    }
    match kind {
        Kind::Native => native(event),
        Kind::Chat | Kind::Text => choice(kind, event),
        Kind::Messages => messages(event),
        Kind::Responses => responses(event),
    }
}

/// Returns whether an event reports prompt progress.
pub(super) fn is_progress(event: &Map<String, Value>) -> bool {
    event.get("prompt_progress").is_some_and(|progress| !progress.is_null())
}

/// Reads an event in llama-server's own dialect.
fn native(event: &Map<String, Value>) -> Result<Reading, Why> {
    if event.contains_key("completion_probabilities") {
        return Err("it has probabilities");
    }
    if event.get("index").and_then(Value::as_u64).is_some_and(|index| index > 0) {
        return Err("there are several answers");
    }
    let Some(Value::String(text)) = event.get("content") else { return Err("an event has no text") };
    let mut reading = Reading::text(Channel::CONTENT, text);
    if event.get("stop") == Some(&Value::Bool(true)) {
        reading.step = Step::Done;
    }
    Ok(reading)
}

/// Reads an event in `OpenAI`'s dialect.
fn choice(kind: Kind, event: &Map<String, Value>) -> Result<Reading, Why> {
    if event.contains_key("__verbose") {
        return Err("it tells what debugging needs");
    }
    let counted = event.get("usage").is_some_and(Value::is_object);
    let Some(Value::Array(choices)) = event.get("choices") else { return Err("an event has no choices") };
    let choice = match &choices[..] {
        [] if counted => return Ok(Reading { items: Vec::new(), step: Step::Counted }),
        [] => return Ok(Reading::NOTHING),
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
        Kind::Chat => Reading { items: delta(choice.get("delta"))?, step: Step::On },
        _ => match choice.get("text") {
            Some(Value::String(text)) => Reading::text(Channel::CONTENT, text),
            _ => return Err("an event has no text"),
        },
    };
    if let Some(reason) = choice.get("finish_reason").filter(|reason| !reason.is_null()) {
        reading.items.push(Item::Mark(format!("finish {reason}"), Vec::new()));
        reading.step = Step::Finished { counted };
    }
    Ok(reading)
}

/// Returns the items that a chat chunk adds.
fn delta(delta: Option<&Value>) -> Result<Vec<Item>, Why> {
    let Some(Value::Object(delta)) = delta else { return Err("an event has no delta") };
    let mut items = Vec::new();
    for (name, value) in delta {
        match (name.as_str(), value) {
            ("role", _) | (_, Value::Null) => {}
            ("content", Value::String(text)) => items.push(Item::Text(Channel::CONTENT, text.clone())),
            ("reasoning_content", Value::String(text)) => {
                items.push(Item::Text(Channel::REASONING, text.clone()));
            }
            ("tool_calls", Value::Array(calls)) => match &calls[..] {
                [] => {}
                [call] => tool_call(call, &mut items)?,
                _ => return Err("an event has several calls of tools"),
            },
            _ => return Err("it has more than text, reasoning and calls of tools"),
        }
    }
    Ok(items)
}

fn tool_call(call: &Value, items: &mut Vec<Item>) -> Result<(), Why> {
    let odd = "a call of a tool is not written as llama-server writes one";
    let Some(index) = call["index"].as_u64() else { return Err(odd) };
    let function = &call["function"];
    let text = |value: &Value| match value {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        _ => Err(odd),
    };
    let (id, name) = (text(&call["id"])?, text(&function["name"])?);
    if id.is_some() || name.is_some() {
        let named = format!("call {index} {}", name.as_deref().unwrap_or_default());
        items.push(Item::Mark(named, id.into_iter().collect()));
    }
    if let Some(arguments) = text(&function["arguments"])? {
        items.push(Item::Text(Channel { what: What::Arguments, index }, arguments));
    }
    Ok(())
}

/// Returns the string values of these members, as far as they exist.
fn names<const N: usize>(of: &Value, members: [&str; N]) -> Vec<String> {
    members.into_iter().filter_map(|member| Some(of[member].as_str()?.to_owned())).collect()
}

fn messages(event: &Map<String, Value>) -> Result<Reading, Why> {
    let member = |name: &str| event.get(name).unwrap_or(&Value::Null);
    let index = member("index").as_u64();
    let numbered = || index.ok_or("a block of it has no number");
    Ok(match member("type").as_str().unwrap_or_default() {
        "message_start" => Reading::mark("start".to_owned(), names(member("message"), ["id"])),
        "content_block_start" => {
            let block = member("content_block");
            if ["text", "thinking"]
                .iter()
                .any(|text| block[*text].as_str().is_some_and(|text| !text.is_empty()))
            {
                return Err("a block of it begins with a text");
            }
            let (kind, name) = (block["type"].as_str(), block["name"].as_str());
            let mark =
                format!("block {} {} {}", numbered()?, kind.unwrap_or_default(), name.unwrap_or_default());
            Reading::mark(mark, names(block, ["id"]))
        }
        "content_block_delta" => {
            let (delta, index) = (member("delta"), numbered()?);
            let (what, text) = match delta["type"].as_str().unwrap_or_default() {
                "text_delta" => (What::Content, &delta["text"]),
                "thinking_delta" => (What::Reasoning, &delta["thinking"]),
                "input_json_delta" => (What::Arguments, &delta["partial_json"]),
                "signature_delta" => return Ok(Reading::mark(format!("signature {index}"), Vec::new())),
                _ => return Err("it has more than text, thoughts and calls of tools"),
            };
            let Some(text) = text.as_str() else { return Err("an event has no text") };
            Reading::text(Channel { what, index }, text)
        }
        "content_block_stop" => Reading::mark(format!("stop {}", numbered()?), Vec::new()),
        "message_delta" => Reading::mark(format!("end {}", member("delta")["stop_reason"]), Vec::new()),
        "message_stop" => Reading::done(),
        "ping" => Reading::NOTHING,
        _ => return Err("it has events that are not known"),
    })
}

fn responses(event: &Map<String, Value>) -> Result<Reading, Why> {
    let member = |name: &str| event.get(name).unwrap_or(&Value::Null);
    let kind = member("type").as_str().unwrap_or_default();
    let what = match kind {
        "response.output_text.delta" => What::Content,
        "response.reasoning_text.delta" => What::Reasoning,
        "response.function_call_arguments.delta" => What::Arguments,
        "response.created" => {
            return Ok(Reading::mark("created".to_owned(), names(member("response"), ["id"])));
        }
        "response.in_progress" | "response.queued" => return Ok(Reading::NOTHING),
        "response.output_item.added" => {
            let item = member("item");
            let name = item["name"].as_str().unwrap_or_default();
            return Ok(Reading::mark(
                format!("item {} {name}", item["type"]),
                names(item, ["id", "call_id"]),
            ));
        }
        "response.content_part.added" => {
            return Ok(Reading::mark(format!("part {}", member("part")["type"]), Vec::new()));
        }
        "response.output_text.done"
        | "response.reasoning_text.done"
        | "response.function_call_arguments.done"
        | "response.content_part.done"
        | "response.output_item.done" => return Ok(Reading::mark(kind.to_owned(), Vec::new())),
        "response.completed" | "response.incomplete" => return Ok(Reading::done()),
        "error" | "response.failed" => return Err("its server reported an error"),
        _ => return Err("it has events that are not known"),
    };
    let Some(text) = member("delta").as_str() else { return Err("an event has no text") };
    Ok(Reading::text(Channel { what, index: member("output_index").as_u64().unwrap_or(0) }, text))
}
