//! Rewrites the events of a continuation to fit the first stream: ids, names, indices, counters. Pure.
//!
//! llama-server's own `/completion` route continues a chat, without roles and reasoning; its events become
//! chat chunks. Other answers are continued in their own dialect.

use bytes::Bytes;
use serde_json::{Map, Value, json};
use warden_policies::WorkDone;

use super::voice::{DONE, MismatchReason, SHARED_MEMBERS, set_member, set_shared_members, write_event};
use crate::answer::AnswerFormat;

#[derive(Debug)]
pub(crate) struct RestTranslator {
    pub(super) kind: AnswerFormat,
    pub(super) frame: Map<String, Value>,
    /// Number of tokens that the client had before the continuation.
    pub(super) delivered: u64,
    /// Number of prompt tokens of the client's request, without the client's text.
    pub(super) prompt: u64,
    /// Text that the client had before the continuation.
    pub(super) text: String,
    /// Token limit of the whole answer.
    pub(super) limit: Option<u64>,
    pub(super) wants_usage: bool,
    pub(super) ended: bool,
}

impl RestTranslator {
    /// Returns the work of the whole answer, given the work of the continuation.
    pub(crate) fn work(&self, continued: WorkDone) -> WorkDone {
        let output_tokens = continued.output_tokens + self.delivered;
        let prompt_tokens = continued.prompt_tokens.min(self.prompt);
        WorkDone { prompt_tokens, output_tokens, ..continued }
    }

    pub(crate) fn translate(&mut self, whole: &[u8]) -> Result<Bytes, MismatchReason> {
        let mut out = Vec::with_capacity(whole.len() + whole.len() / 2);
        for event in whole.split_inclusive(|byte| *byte == b'\n') {
            let line = event.trim_ascii_end();
            if line.starts_with(b":") {
                out.extend_from_slice(line);
                out.extend_from_slice(b"\n\n");
                continue;
            }
            let data = match line.strip_prefix(b"data: ") {
                Some(data) if !self.ended => data,
                _ => continue,
            };
            if data == b"[DONE]" {
                return Err("its continuation ended before its last event");
            }
            let Ok(Value::Object(event)) = serde_json::from_slice(data) else {
                return Err("its continuation is not written as llama-server writes one");
            };
            if event.contains_key("error") {
                // Pass on an error event with the server's text.
                write_event(&mut out, &event);
                self.ended = true;
                continue;
            }
            match self.kind {
                AnswerFormat::Native => self.write_native(&mut out, event)?,
                AnswerFormat::Text => self.write_text(&mut out, event)?,
                _ => self.write_chat(&mut out, event)?,
            }
        }
        Ok(out.into())
    }

    /// Returns whether the client has as many tokens as it requested.
    fn is_full(&self) -> bool {
        self.limit.is_some_and(|limit| self.delivered >= limit)
    }

    /// Checks the server's count of prompt tokens: the client's prompt plus the tokens of the client's text.
    fn check_prompt_count(&self, counted: Option<u64>) -> Result<(), MismatchReason> {
        match counted {
            Some(counted) if counted != self.prompt + self.delivered => {
                Err("its continuation would not begin where it ended")
            }
            _ => Ok(()),
        }
    }

    fn write_native(
        &mut self,
        out: &mut Vec<u8>,
        mut event: Map<String, Value>,
    ) -> Result<(), MismatchReason> {
        self.check_prompt_count(event.get("tokens_evaluated").and_then(Value::as_u64))?;
        let stops = event.get("stop") == Some(&Value::Bool(true));
        if self.is_full() {
            if !stops {
                return Ok(());
            }
            set_member(&mut event, "content", json!(""));
            set_member(&mut event, "tokens", json!([]));
            set_member(&mut event, "stop_type", json!("limit"));
            set_member(&mut event, "tokens_predicted", json!(0));
        }
        set_member(&mut event, "tokens_evaluated", json!(self.prompt));
        self.set_timings(&mut event);
        if let Some(predicted) = event.get("tokens_predicted").and_then(Value::as_u64) {
            set_member(&mut event, "tokens_predicted", json!(predicted + self.delivered));
        }
        if stops {
            if let Some(Value::String(prompt)) = event.get_mut("prompt")
                && let Some(own) = prompt.strip_suffix(&self.text).map(str::to_owned)
            {
                *prompt = own;
            }
            if let (Some(Value::Object(settings)), Some(limit)) =
                (event.get_mut("generation_settings"), self.limit)
            {
                set_member(settings, "max_tokens", json!(limit));
                set_member(settings, "n_predict", json!(limit));
            }
            self.ended = true;
        }
        write_event(out, &event);
        Ok(())
    }

    fn write_text(&mut self, out: &mut Vec<u8>, mut event: Map<String, Value>) -> Result<(), MismatchReason> {
        set_shared_members(&mut event, &self.frame);
        self.set_timings(&mut event);
        let Some(Value::Array(choices)) = event.get_mut("choices") else {
            return Err("its continuation has no choices");
        };
        let Some(Value::Object(choice)) = choices.first_mut() else {
            return Err("its continuation has no choices");
        };
        let ends = choice.get("finish_reason").is_some_and(|reason| !reason.is_null());
        let is_full = self.limit.is_some_and(|limit| self.delivered >= limit);
        if is_full {
            if !ends {
                return Ok(());
            }
            set_member(choice, "text", json!(""));
            set_member(choice, "finish_reason", json!("length"));
        }
        if let Some(Value::Object(usage)) = event.get_mut("usage") {
            self.check_prompt_count(usage.get("prompt_tokens").and_then(Value::as_u64))?;
            let made = usage.get("completion_tokens").and_then(Value::as_u64).unwrap_or(0);
            let all = self.delivered + if is_full { 0 } else { made };
            set_member(usage, "completion_tokens", json!(all));
            set_member(usage, "prompt_tokens", json!(self.prompt));
            set_member(usage, "total_tokens", json!(self.prompt + all));
            if let Some(Value::Object(details)) = usage.get_mut("prompt_tokens_details") {
                let cached = details.get("cached_tokens").and_then(Value::as_u64).unwrap_or(0);
                set_member(details, "cached_tokens", json!(cached.min(self.prompt)));
            }
        }
        write_event(out, &event);
        if ends {
            out.extend_from_slice(DONE);
            self.ended = true;
        }
        Ok(())
    }

    fn write_chat(&mut self, out: &mut Vec<u8>, mut event: Map<String, Value>) -> Result<(), MismatchReason> {
        self.check_prompt_count(event.get("tokens_evaluated").and_then(Value::as_u64))?;
        let Some(Value::String(text)) = event.get_mut("content").map(Value::take) else {
            return Err("its continuation has no text");
        };
        let stops = event.get("stop") == Some(&Value::Bool(true));
        let is_full = self.is_full();
        let cached = event.get("timings").and_then(|timings| timings["cache_n"].as_u64()).unwrap_or(0);
        self.set_timings(&mut event);
        let timings = event.get("timings").filter(|timings| timings.is_object()).cloned();
        if !text.is_empty() && !is_full {
            let choice = json!({ "finish_reason": null, "index": 0, "delta": { "content": text } });
            let beside = if stops { None } else { timings.clone().map(|timings| ("timings", timings)) };
            write_event(out, &self.chunk(json!([choice]), beside));
        }
        if !stops {
            return Ok(());
        }
        self.ended = true;
        let is_limit = is_full || event.get("stop_type").is_some_and(|kind| kind == "limit");
        let reason = if is_limit { "length" } else { "stop" };
        let choices = json!([{ "finish_reason": reason, "index": 0, "delta": {} }]);
        let made =
            if is_full { 0 } else { event.get("tokens_predicted").and_then(Value::as_u64).unwrap_or(0) };
        if !self.wants_usage {
            write_event(out, &self.chunk(choices, timings.map(|timings| ("timings", timings))));
            out.extend_from_slice(DONE);
            return Ok(());
        }
        let all = self.delivered + made;
        let usage = json!({
            "completion_tokens": all, "prompt_tokens": self.prompt, "total_tokens": self.prompt + all,
            "prompt_tokens_details": { "cached_tokens": cached.min(self.prompt) },
        });
        write_event(out, &self.chunk(choices, None));
        let mut last = self.chunk(json!([]), Some(("usage", usage)));
        if let Some(timings) = timings {
            last.insert("timings".to_owned(), timings);
        }
        write_event(out, &last);
        out.extend_from_slice(DONE);
        Ok(())
    }

    /// Sets the token counts of the whole answer. Times and speeds stay those of this process.
    fn set_timings(&self, event: &mut Map<String, Value>) {
        let Some(Value::Object(timings)) = event.get_mut("timings") else { return };
        let told = |name: &str| timings.get(name).and_then(Value::as_u64).unwrap_or(0);
        let cached = told("cache_n").min(self.prompt);
        let counts = [
            ("cache_n", cached),
            ("prompt_n", told("prompt_n").min(self.prompt - cached)),
            ("predicted_n", told("predicted_n") + self.delivered),
        ];
        for (name, count) in counts {
            if timings.contains_key(name) {
                timings.insert(name.to_owned(), json!(count));
            }
        }
    }

    /// Builds a chunk like the first one of the stream.
    fn chunk(&self, choices: Value, beside: Option<(&str, Value)>) -> Map<String, Value> {
        let mut chunk = self.frame.clone();
        // Prompt progress and timings belong to the first event only.
        chunk.retain(|name, _| {
            SHARED_MEMBERS.contains(&name.as_str()) || ["choices", "object"].contains(&name.as_str())
        });
        set_member(&mut chunk, "choices", choices);
        if let Some((name, value)) = beside {
            chunk.insert(name.to_owned(), value);
        }
        chunk
    }
}

#[cfg(test)]
#[path = "rest_tests.rs"]
mod tests;
