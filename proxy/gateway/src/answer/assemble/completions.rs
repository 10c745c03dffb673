//! Assembles OpenAI's chat completions, and the completions of OpenAI's and llama-server's own routes. Pure.
//!
//! The deltas of a chat extend the message of their choice. In a stream of completions, the last event of
//! each answer lacks only two fields, which the other events supply: the whole text and the probabilities.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{AssemblyError, answer_index, append_text, clear_stream_setting, order_fields};

#[derive(Debug, Default)]
pub(super) struct ChatAssembly {
    choices: BTreeMap<u64, ChatChoice>,
    /// Top-level fields of the chunk that ends the choice with the lowest index, and of later chunks.
    last: Map<String, Value>,
    /// Index of the choice that ended last, for the usage chunk, which has no index.
    ended: Option<u64>,
}

#[derive(Debug, Default)]
struct ChatChoice {
    role: Option<Value>,
    content: String,
    reasoning: String,
    tools: BTreeMap<u64, ChatToolCall>,
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

#[derive(Debug)]
pub(super) struct CompletionAssembly {
    openai: bool,
    answers: BTreeMap<u64, CompletionAnswer>,
}

#[derive(Debug, Default)]
struct CompletionAnswer {
    text: String,
    probabilities: Vec<Value>,
    last: Option<Map<String, Value>>,
}

impl CompletionAssembly {
    pub(super) fn new(openai: bool) -> Self {
        Self { openai, answers: BTreeMap::new() }
    }

    pub(super) fn add_event(
        &mut self,
        mut event: Map<String, Value>,
        size: usize,
    ) -> Result<usize, AssemblyError> {
        let choice = if self.openai {
            match event.get_mut("choices").and_then(|choices| choices.get_mut(0)) {
                Some(Value::Object(choice)) => choice,
                _ => return Err(AssemblyError::UnknownForm("an event has no choice")),
            }
        } else {
            &mut event
        };
        let answer = self.answers.entry(answer_index(choice)).or_default();
        let (field, probabilities, ends) = if self.openai {
            let of = choice.get_mut("logprobs").and_then(|logprobs| logprobs.get_mut("content"));
            let of = of.map(Value::take);
            let ends = choice.get("finish_reason").is_some_and(|reason| !reason.is_null());
            ("text", of, ends)
        } else {
            let of = choice.remove("completion_probabilities");
            let ends = choice.get("stop").is_some_and(|stop| *stop == Value::Bool(true));
            ("content", of, ends)
        };
        let mut grown = choice.get(field).map_or(0, |value| append_text(&mut answer.text, value));
        if let Some(Value::Array(all)) = probabilities {
            grown += size;
            answer.probabilities.extend(all);
        }
        if ends {
            grown += size;
            answer.last = Some(event);
        }
        Ok(grown)
    }

    pub(super) fn finish(self) -> Option<Value> {
        let openai = self.openai;
        let mut all = Vec::new();
        for answer in self.answers.into_values() {
            all.push(if openai { answer.into_openai()? } else { answer.into_native()? });
        }
        if !openai {
            return if all.len() > 1 { Some(Value::Array(all)) } else { all.pop() };
        }
        let mut all = all.into_iter();
        let mut first = all.next()?;
        let more: Vec<Value> = all.filter_map(|mut one| Some(one["choices"].get_mut(0)?.take())).collect();
        first["choices"].as_array_mut()?.extend(more);
        Some(first)
    }
}

impl CompletionAnswer {
    fn into_openai(self) -> Option<Value> {
        let mut last = Value::Object(self.last?);
        clear_stream_setting(
            last.get_mut("__verbose").and_then(|verbose| verbose.get_mut("generation_settings")),
        );
        let choice = last["choices"].get_mut(0)?;
        choice["text"] = json!(self.text);
        choice["logprobs"] = if self.probabilities.is_empty() {
            Value::Null
        } else {
            json!({ "content": self.probabilities })
        };
        Some(last)
    }

    fn into_native(self) -> Option<Value> {
        let mut last = self.last?;
        last.insert("content".to_owned(), json!(self.text));
        clear_stream_setting(last.get_mut("generation_settings"));
        if !self.probabilities.is_empty() {
            last.insert("completion_probabilities".to_owned(), Value::Array(self.probabilities));
        }
        Some(Value::Object(last))
    }
}
