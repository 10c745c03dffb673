//! Finds the text that a model generated for a tool call, from the call's name and arguments. Pure.
//!
//! ```text
//!   the client has:          call `weather`, arguments {"city": "Par
//!   the next server reports: a call begins with <tool_call>
//!   a short chat with the same tool and that beginning, so the next server must call the tool:
//!      generated text        <tool_call>\n{"name": "weather", "arguments": {"city": "x
//!      as a call             `weather`, arguments                         {"city": "x
//!   so the text is           <tool_call>\n{"name": "weather", "arguments": {"city": "Par
//! ```
//!
//! Streams show a call as its server's parser read it. The text before the arguments depends only on the
//! chat template and the tool. If a template changes the arguments, too, they are not found in the generated
//! text, and the call is not continued.

use serde_json::{Map, Value, json};

use super::request::{self, NoContinuationReason, body_bytes};
use super::said::BegunCall;
use crate::answer::AnswerFormat;

/// Limit of the short call: its name, a few special tokens, and the beginning of its arguments.
const SHORT_CALL_TOKENS: u64 = 96;

/// Type of a grammar trigger that is a text.
const TRIGGER_WORD: u64 = 1;

/// Members that decide how a chat is rendered and how the answer is parsed.
const RENDERING_MEMBERS: [&str; 5] =
    ["chat_template_kwargs", "model", "parallel_tool_calls", "reasoning_effort", "reasoning_format"];

/// A tool call with which an answer breaks off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PartialCall {
    name: String,
    before: String,
    arguments: String,
}

impl PartialCall {
    pub(super) fn from_begun(call: BegunCall<'_>) -> Self {
        let BegunCall { before, name, arguments } = call;
        Self { name: name.to_owned(), before: before.to_owned(), arguments: arguments.to_owned() }
    }

    /// Builds the short chat whose answer reports how a call begins.
    pub(super) fn trigger_request(
        &self,
        kind: AnswerFormat,
        body: &Map<String, Value>,
    ) -> Result<Vec<u8>, NoContinuationReason> {
        let chat = short_chat(body, "a", None);
        Ok(body_bytes(self.with_tool(kind, body, chat, ("auto", 1))?))
    }

    /// Builds the short chat in which the server must call the same tool. Its answer begins with `trigger`,
    /// because a model may write a text first.
    pub(super) fn short_call_request(
        &self,
        kind: AnswerFormat,
        body: &Map<String, Value>,
        trigger: &str,
    ) -> Result<Vec<u8>, NoContinuationReason> {
        let begun = Some(trigger).filter(|trigger| !trigger.is_empty());
        let chat = short_chat(body, &format!("Call `{}`.", self.name), begun);
        Ok(body_bytes(self.with_tool(kind, body, chat, ("required", SHORT_CALL_TOKENS))?))
    }

    fn with_tool(
        &self,
        kind: AnswerFormat,
        body: &Map<String, Value>,
        mut chat: Map<String, Value>,
        (choice, limit): (&str, u64),
    ) -> Result<Map<String, Value>, NoContinuationReason> {
        let mut tools = chat_tools(kind, body);
        tools.retain(|tool| tool["function"]["name"] == *self.name);
        let [tool] = &tools[..] else { return Err("its tool is not known".to_owned()) };
        chat.insert("tools".to_owned(), json!([tool]));
        chat.insert("tool_choice".to_owned(), json!(choice));
        chat.insert("max_tokens".to_owned(), json!(limit));
        Ok(chat)
    }

    /// Returns the text that the model generated for the call so far, and for the text before it. `answer` is
    /// the answer to [`Self::short_call_request`].
    pub(super) fn generated_text(
        &self,
        trigger: &str,
        answer: &[u8],
    ) -> Result<String, NoContinuationReason> {
        let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
        let message = &answer["choices"][0]["message"];
        let call = &message["tool_calls"][0]["function"];
        let raw = format!("{trigger}{}", answer["__verbose"]["content"].as_str().unwrap_or_default());
        let (Some(name), Some(arguments)) = (call["name"].as_str(), call["arguments"].as_str()) else {
            return Err("its build does not call the same tool in a short chat".to_owned());
        };
        let is_text = |member: &str| message[member].as_str().is_some_and(|text| !text.is_empty());
        // Braces alone would be found somewhere else in the text.
        if name != self.name || arguments.len() < 3 || is_text("reasoning_content") || is_text("content") {
            return Err("its build calls the tool in another way in a short chat".to_owned());
        }
        match raw.rfind(arguments).and_then(|at| raw.get(..at)).filter(|head| head.contains(name)) {
            Some(head) => Ok(format!("{}{head}{}", self.before, self.arguments)),
            None => Err("its template writes the arguments of tools in another form".to_owned()),
        }
    }
}

/// Reads the answer to [`PartialCall::trigger_request`]. Empty if no text begins a call.
pub(super) fn read_trigger(answer: &[u8]) -> String {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    let triggers = &answer["__verbose"]["generation_settings"]["grammar_triggers"];
    let is_text = |trigger: &&Value| trigger["type"] == TRIGGER_WORD || trigger["token"].is_number();
    let trigger = triggers.as_array().into_iter().flatten().find(is_text);
    trigger.and_then(|trigger| trigger["value"].as_str()).unwrap_or_default().to_owned()
}

/// Builds the request that shows the grammar for an answer which begins with `text`, with the client's tools.
pub(super) fn grammar_request(kind: AnswerFormat, body: &Map<String, Value>, text: &str) -> Vec<u8> {
    let mut chat = short_chat(body, "a", Some(text));
    chat.insert("tools".to_owned(), Value::Array(chat_tools(kind, body)));
    chat.insert("tool_choice".to_owned(), json!("required"));
    chat.insert("max_tokens".to_owned(), json!(1));
    body_bytes(chat)
}

/// Reads the answer to [`grammar_request`]. `None` if the form of the answer is free. Otherwise returns the
/// text that the grammar reads before the rest, which must end with `text`.
pub(super) fn grammar_start(answer: &[u8], text: &str) -> Result<Option<String>, NoContinuationReason> {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    let settings = &answer["__verbose"]["generation_settings"];
    let Some(grammar) = settings["grammar"].as_str() else { return Err(request::settings_unknown()) };
    if grammar.is_empty() {
        return Ok(None);
    }
    match settings["generation_prompt"].as_str() {
        Some(start) if start.ends_with(text) && settings["grammar_lazy"] == false => {
            Ok(Some(start.to_owned()))
        }
        _ => Err("its build does not apply the grammar of tools from that text on".to_owned()),
    }
}

/// Text that a server repeats if it repeats the beginning of an answer; no single token spells it.
const ECHO_TEXT: &str = "One, two, three, four";

/// Builds the request that shows whether the build repeats the beginning of an answer.
pub(super) fn echo_request(body: &Map<String, Value>) -> Vec<u8> {
    let mut chat = short_chat(body, "a", Some(ECHO_TEXT));
    chat.insert("max_tokens".to_owned(), json!(1));
    body_bytes(chat)
}

/// Reads the answer to [`echo_request`].
pub(super) fn is_echoed(answer: &[u8]) -> bool {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    answer["choices"][0]["message"]["content"].as_str().is_some_and(|text| text.starts_with(ECHO_TEXT))
}

/// Builds a short chat, with `text` as the beginning of its answer, that reports the settings.
fn short_chat(body: &Map<String, Value>, question: &str, text: Option<&str>) -> Map<String, Value> {
    let mut chat = template_chat(body, question, text);
    for (name, value) in [
        ("stream", json!(false)),
        ("verbose", json!(true)),
        ("temperature", json!(0)),
    ] {
        chat.insert(name.to_owned(), value);
    }
    chat
}

fn template_chat(body: &Map<String, Value>, question: &str, text: Option<&str>) -> Map<String, Value> {
    let mut turns = vec![json!({ "role": "user", "content": question })];
    turns.extend(text.map(|text| json!({ "role": "assistant", "content": text })));
    let mut chat = Map::new();
    for name in RENDERING_MEMBERS {
        if let Some(value) = body.get(name) {
            chat.insert(name.to_owned(), value.clone());
        }
    }
    chat.insert("messages".to_owned(), Value::Array(turns));
    chat
}

/// Builds two requests for a rendered prompt: of a chat, and of the same chat whose answer begins with `text`.
pub(super) fn template_requests(kind: AnswerFormat, body: &Map<String, Value>, text: &str) -> [Vec<u8>; 2] {
    let tools = chat_tools(kind, body);
    [None, Some(text)].map(|text| {
        let mut chat = match kind {
            AnswerFormat::Chat => body.clone(),
            _ => template_chat(body, "a", None),
        };
        if kind != AnswerFormat::Chat && !tools.is_empty() {
            chat.insert("tools".to_owned(), Value::Array(tools.clone()));
        }
        if let (Some(Value::Array(turns)), Some(text)) = (chat.get_mut("messages"), text) {
            turns.push(json!({ "role": "assistant", "content": text }));
        }
        body_bytes(chat)
    })
}

/// Returns the client's functions in the words of chats.
fn chat_tools(kind: AnswerFormat, body: &Map<String, Value>) -> Vec<Value> {
    let tools = body.get("tools").and_then(Value::as_array).into_iter().flatten();
    let function = |tool: &Value, schema: &str| {
        let parameters = if tool[schema].is_null() { json!({}) } else { tool[schema].clone() };
        let description = tool["description"].as_str().unwrap_or_default();
        let function = json!({ "name": tool["name"], "description": description, "parameters": parameters });
        json!({ "type": "function", "function": function })
    };
    tools
        .filter_map(|tool| match kind {
            AnswerFormat::Messages => Some(function(tool, "input_schema")),
            AnswerFormat::Responses if tool["type"] == "function" => Some(function(tool, "parameters")),
            AnswerFormat::Responses => None,
            _ => Some(tool.clone()),
        })
        .collect()
}

#[cfg(test)]
#[path = "tool_call_tests.rs"]
mod tests;
