//! Assembles completions of OpenAI's and llama-server's own routes. The last event of each answer has all
//! its fields except the whole text and the probabilities, which are collected from the other events. Pure.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{AssemblyError, answer_index, append_text, clear_stream_setting};

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
