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

use super::request::{NoContinuationReason, body_bytes};
use super::said::CallBeginning;
use super::short_chat::short_chat;
use crate::answer::AnswerFormat;

/// Limit of the short call: its name, a few special tokens, and the beginning of its arguments.
const SHORT_CALL_TOKENS: u64 = 64;

/// Type of a grammar trigger that is a text.
const TRIGGER_WORD: u64 = 1;

/// A tool call with which an answer breaks off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PartialCall {
    name: String,
    before: String,
    arguments: String,
}

impl PartialCall {
    /// `before` is the text before the call.
    pub(super) fn from_beginning(before: &str, call: CallBeginning<'_>) -> Self {
        let CallBeginning { name, arguments } = call;
        Self { name: name.to_owned(), before: before.to_owned(), arguments: arguments.to_owned() }
    }

    /// Builds the short chat whose answer reports how a call begins.
    pub(super) fn trigger_request(
        &self,
        kind: AnswerFormat,
        body: &Map<String, Value>,
    ) -> Result<Vec<u8>, NoContinuationReason> {
        let chat = short_chat(kind, body, "a", None);
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
        let begun = json!({ "role": "assistant", "content": trigger });
        let begun = Some(&begun).filter(|_| !trigger.is_empty());
        let chat = short_chat(kind, body, &format!("Call `{}`.", self.name), begun);
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

/// Returns the client's functions in the words of chats.
pub(super) fn chat_tools(kind: AnswerFormat, body: &Map<String, Value>) -> Vec<Value> {
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
