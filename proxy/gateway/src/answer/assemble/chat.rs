//! Assembles an OpenAI chat completion: adds the deltas of each choice to its message, by index. Pure.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{AssemblyError, answer_index, append_text, clear_stream_setting, order_fields};

#[derive(Debug, Default)]
pub(super) struct ChatAssembly {
    choices: BTreeMap<u64, ChatChoice>,
    /// Top-level fields of the chunk that ends the choice with the lowest index, and of later chunks.
    last: Map<String, Value>,
    /// Index of the choice that ended last; the usage chunk that follows has no index.
    ended: Option<u64>,
}

#[derive(Debug, Default)]
struct ChatChoice {
    role: Option<Value>,
    content: String,
    reasoning: String,
    tools: BTreeMap<u64, ChatToolCall>,
    /// Unknown fields of the message.
    other: Map<String, Value>,
    finish: Option<Value>,
}

#[derive(Debug, Default)]
struct ChatToolCall {
    id: String,
    name: String,
    arguments: String,
}

impl ChatAssembly {
    pub(super) fn add_event(
        &mut self,
        mut chunk: Map<String, Value>,
        size: usize,
    ) -> Result<usize, AssemblyError> {
        let Some(Value::Array(choices)) = chunk.remove("choices") else {
            return Err(AssemblyError::UnknownForm("an event has no choices"));
        };
        let mut grown = 0;
        let mut ends = choices.is_empty();
        for choice in choices {
            let Value::Object(mut choice) = choice else { continue };
            let at = answer_index(&choice);
            let own = self.choices.entry(at).or_default();
            if let Some(Value::Object(delta)) = choice.remove("delta") {
                grown += own.add_delta(delta);
            }
            if let Some(finish) = choice.remove("finish_reason").filter(|finish| !finish.is_null()) {
                own.finish = Some(finish);
                self.ended = Some(at);
                ends = true;
            }
        }
        // Chunks other than the last may have `timings` and prompt progress, which a whole answer lacks.
        let is_debug = chunk.contains_key("__verbose");
        if (ends && self.ended == self.choices.keys().next().copied()) || is_debug {
            grown += size;
            for (name, value) in chunk {
                if name != "prompt_progress" && (ends || name == "__verbose") {
                    self.last.insert(name, value);
                }
            }
        }
        Ok(grown)
    }

    pub(super) fn finish(mut self) -> Option<Value> {
        if self.choices.is_empty() || self.choices.values().any(|choice| choice.finish.is_none()) {
            return None;
        }
        if let Some(Value::Object(verbose)) = self.last.get_mut("__verbose") {
            clear_stream_setting(verbose.get_mut("generation_settings"));
        }
        let choices = self.choices.into_iter().map(|(at, choice)| choice.into_choice(at)).collect();
        let mut all = self.last;
        all.insert("choices".to_owned(), Value::Array(choices));
        all.insert("object".to_owned(), json!("chat.completion"));
        let order = [
            "choices",
            "created",
            "model",
            "system_fingerprint",
            "object",
            "usage",
            "id",
            "__verbose",
            "timings",
        ];
        Some(Value::Object(order_fields(all, &order)))
    }
}

impl ChatChoice {
    fn add_delta(&mut self, delta: Map<String, Value>) -> usize {
        let mut grown = 0;
        for (name, value) in delta {
            match name.as_str() {
                "role" => self.role = Some(value),
                "content" => grown += append_text(&mut self.content, &value),
                "reasoning_content" => grown += append_text(&mut self.reasoning, &value),
                "tool_calls" => {
                    for call in value.as_array().into_iter().flatten() {
                        let Value::Object(call) = call else { continue };
                        let tool = self.tools.entry(answer_index(call)).or_default();
                        let function = call.get("function").unwrap_or(&Value::Null);
                        if let Some(id) = call.get("id").and_then(Value::as_str) {
                            id.clone_into(&mut tool.id);
                            grown += id.len();
                        }
                        if let Some(name) = function["name"].as_str() {
                            name.clone_into(&mut tool.name);
                            grown += name.len();
                        }
                        grown += append_text(&mut tool.arguments, &function["arguments"]);
                    }
                }
                _ => match (self.other.get_mut(&name), value) {
                    (Some(Value::String(text)), value @ Value::String(_)) => {
                        grown += append_text(text, &value);
                    }
                    (_, value) => {
                        grown += name.len() + value.to_string().len();
                        self.other.insert(name, value);
                    }
                },
            }
        }
        grown
    }

    fn into_choice(self, at: u64) -> Value {
        let mut message = Map::new();
        message.insert("role".to_owned(), self.role.unwrap_or_else(|| json!("assistant")));
        message.insert("content".to_owned(), json!(self.content));
        if !self.reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), json!(self.reasoning));
        }
        let calls: Vec<Value> = self.tools.into_values().map(ChatToolCall::into_call).collect();
        if !calls.is_empty() {
            message.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        message.extend(self.other);
        json!({ "finish_reason": self.finish, "index": at, "message": message })
    }
}

impl ChatToolCall {
    fn into_call(self) -> Value {
        let mut call =
            json!({ "type": "function", "function": { "name": self.name, "arguments": self.arguments } });
        if !self.id.is_empty() {
            call["id"] = json!(self.id);
        }
        call
    }
}
