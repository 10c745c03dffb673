//! Assembles Anthropic's messages and OpenAI's responses. Pure.
//!
//! The first event of a message has most fields, and deltas extend its blocks. A response is the object in
//! its last event; fields that differ from a non-streaming answer are corrected.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::{append_text, order_fields};

#[derive(Debug, Default)]
pub(super) struct MessagesAssembly {
    message: Option<Map<String, Value>>,
    thinking: String,
    text: String,
    tools: Vec<ToolUseBlock>,
    /// Index of the tool in `tools`, by index of its content block.
    places: HashMap<u64, usize>,
    /// Fields of `message_delta`, the event before the last.
    end: Option<Map<String, Value>>,
}

#[derive(Debug)]
struct ToolUseBlock {
    block: Map<String, Value>,
    input: String,
}

impl MessagesAssembly {
    pub(super) fn add_event(&mut self, mut event: Map<String, Value>) -> usize {
        let at = super::answer_index(&event);
        match event.get("type").and_then(Value::as_str) {
            Some("message_start") => {
                if let Some(Value::Object(message)) = event.remove("message") {
                    self.message = Some(message);
                }
                0
            }
            Some("content_block_start") => {
                let Some(Value::Object(block)) = event.remove("content_block") else { return 0 };
                if block.get("type").is_some_and(|kind| kind == "tool_use") {
                    self.places.insert(at, self.tools.len());
                    self.tools.push(ToolUseBlock { block, input: String::new() });
                }
                0
            }
            Some("content_block_delta") => {
                let delta = &event["delta"];
                append_text(&mut self.thinking, &delta["thinking"])
                    + append_text(&mut self.text, &delta["text"])
                    + match self.places.get(&at).and_then(|place| self.tools.get_mut(*place)) {
                        Some(tool) => append_text(&mut tool.input, &delta["partial_json"]),
                        None => 0,
                    }
            }
            Some("message_delta") => {
                self.end = Some(event);
                0
            }
            _ => 0,
        }
    }

    pub(super) fn finish(self) -> Option<Value> {
        let mut message = self.message?;
        let mut end = self.end?;
        let mut content = Vec::new();
        if !self.thinking.is_empty() {
            content.push(json!({ "type": "thinking", "thinking": self.thinking, "signature": "" }));
        }
        if !self.text.is_empty() {
            content.push(json!({ "type": "text", "text": self.text }));
        }
        content.extend(self.tools.into_iter().map(ToolUseBlock::into_block));
        message.insert("content".to_owned(), Value::Array(content));
        if let Some(Value::Object(delta)) = end.remove("delta") {
            message.extend(delta);
        }
        if let (Some(Value::Object(usage)), Some(Value::Object(last))) =
            (message.get_mut("usage"), end.remove("usage"))
        {
            usage.extend(last);
        }
        Some(Value::Object(message))
    }
}

impl ToolUseBlock {
    fn into_block(mut self) -> Value {
        let input = serde_json::from_str(&self.input).unwrap_or_else(|_| json!({}));
        self.block.insert("input".to_owned(), input);
        Value::Object(self.block)
    }
}

#[derive(Debug, Default)]
pub(super) struct ResponsesAssembly {
    response: Option<Value>,
}

impl ResponsesAssembly {
    pub(super) fn add_event(&mut self, mut event: Map<String, Value>, size: usize) -> usize {
        if event.get("type").is_some_and(|kind| kind == "response.completed") {
            self.response = event.remove("response");
            return size;
        }
        0
    }

    pub(super) fn finish(self) -> Option<Value> {
        let Value::Object(mut response) = self.response? else { return None };
        if let Some(created) = response.get("created_at").cloned() {
            response.entry("completed_at").or_insert(created);
        }
        for item in response.get_mut("output").and_then(Value::as_array_mut).into_iter().flatten() {
            if let Value::Object(fields) = item.take() {
                *item = Value::Object(complete_item(fields));
            }
        }
        let order = ["completed_at", "created_at", "id", "model", "object", "output", "status", "usage"];
        Some(Value::Object(order_fields(response, &order)))
    }
}

fn complete_item(mut item: Map<String, Value>) -> Map<String, Value> {
    match item.get("type").and_then(Value::as_str) {
        Some("reasoning") => {
            item.entry("status").or_insert(json!("completed"));
            item
        }
        Some("message") => order_fields(item, &["content", "id", "role", "status", "type"]),
        _ => item,
    }
}
