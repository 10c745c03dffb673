//! Form of the answers of each working route, whole and as events.

use serde_json::{Value, json};

use crate::{clock, goes_on};

/// API of a working request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    Chat,
    Text,
    Native,
    /// `/infill`: answers like `/completion`.
    Infill,
    /// `/v1/messages`, Anthropic's.
    Messages,
    Embeddings,
    /// `/v1/audio/transcriptions`: multipart; the answer has the body's size and hash.
    Transcription,
}

/// Figures and names of a generation, as its answer reports them.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) id: String,
    pub(crate) model: String,
    pub(crate) prompt_tokens: u64,
    /// Tokens of the prompt that the slot had already.
    pub(crate) cached: u64,
    pub(crate) tokens: u64,
    /// True if the limit ended the text.
    pub(crate) by_limit: bool,
    pub(crate) slot: usize,
    pub(crate) prompt_ms: f64,
    pub(crate) predicted_ms: f64,
    /// Log-probability of each generated token; `None` if the request does not want any.
    pub(crate) chosen: Option<f64>,
}

impl Facts {
    fn finish(&self) -> &'static str {
        if self.by_limit { "length" } else { "stop" }
    }

    fn usage(&self) -> Value {
        json!({"completion_tokens": self.tokens, "prompt_tokens": self.prompt_tokens,
               "total_tokens": self.prompt_tokens + self.tokens, "prompt_tokens_details": {"cached_tokens": self.cached}})
    }

    fn timings(&self) -> Value {
        json!({"cache_n": self.cached, "prompt_n": self.prompt_tokens - self.cached, "prompt_ms": self.prompt_ms,
               "predicted_n": self.tokens, "predicted_ms": self.predicted_ms})
    }
}

impl Shape {
    pub(crate) fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/v1/chat/completions" | "/chat/completions" => Self::Chat,
            "/v1/completions" | "/completions" => Self::Text,
            "/completion" => Self::Native,
            "/infill" => Self::Infill,
            "/v1/messages" => Self::Messages,
            "/v1/embeddings" | "/embeddings" | "/embedding" => Self::Embeddings,
            "/v1/audio/transcriptions" => Self::Transcription,
            _ => return None,
        })
    }

    /// Returns the field that a request of this shape needs.
    pub(crate) fn required(self) -> Option<&'static str> {
        match self {
            Self::Chat | Self::Messages => Some("messages"),
            Self::Infill => Some("input_prefix"),
            Self::Text | Self::Native => Some("prompt"),
            Self::Embeddings => Some("input"),
            Self::Transcription => None,
        }
    }

    pub(crate) fn streams(self) -> bool {
        matches!(self, Self::Chat | Self::Text | Self::Native | Self::Infill | Self::Messages)
    }

    fn frame(self, facts: &Facts, choices: &Value, chunk: bool) -> Value {
        let object = match (self, chunk) {
            (Self::Chat, true) => "chat.completion.chunk",
            (Self::Chat, false) => "chat.completion",
            _ => "text_completion",
        };
        json!({"choices": choices, "created": clock::unix_ms() / 1000, "id": facts.id, "model": facts.model,
               "system_fingerprint": "b1-000000000", "object": object})
    }

    pub(crate) fn opening(self, facts: &Facts) -> String {
        if self == Self::Messages {
            let usage = json!({"input_tokens": facts.prompt_tokens, "cache_read_input_tokens": 0, "output_tokens": 0});
            return event(
                &json!({"type": "message_start", "message": {"role": "assistant", "usage": usage}}),
            );
        }
        if self != Self::Chat {
            return String::new();
        }
        let delta = json!({"role": "assistant", "content": null});
        event(&self.frame(facts, &json!([{"finish_reason": null, "index": 0, "delta": delta}]), true))
    }

    pub(crate) fn token(self, facts: &Facts, text: &str) -> String {
        match self {
            Self::Messages => event(&json!({"type": "content_block_delta", "index": 0,
                "delta": {"type": "text_delta", "text": text}})),
            Self::Native | Self::Infill => {
                let id = goes_on::token_id(text);
                let mut said = json!({"index": 0, "content": text, "tokens": [id], "stop": false,
                    "id_slot": -1, "tokens_predicted": facts.tokens, "tokens_evaluated": facts.prompt_tokens});
                if let Some(chosen) = facts.chosen {
                    let other = json!({"id": id + 1, "token": "?", "bytes": [63], "logprob": -3.5});
                    let own = json!({"id": id, "token": text, "bytes": text.as_bytes(), "logprob": chosen});
                    let mut token = own.clone();
                    token["top_logprobs"] = json!([own, other]);
                    said["completion_probabilities"] = json!([token]);
                }
                event(&said)
            }
            Self::Chat => {
                let choice = json!([{"finish_reason": null, "index": 0, "delta": {"content": text}}]);
                event(&self.frame(facts, &choice, true))
            }
            _ => {
                let choice = json!([{"text": text, "index": 0, "logprobs": null, "finish_reason": null}]);
                event(&self.frame(facts, &choice, true))
            }
        }
    }

    pub(crate) fn closing(self, facts: &Facts, include_usage: bool) -> String {
        if matches!(self, Self::Native | Self::Infill) {
            return event(&Self::native(facts, ""));
        }
        if self == Self::Messages {
            let usage = json!({"output_tokens": facts.tokens});
            return event(&json!({"type": "message_delta", "delta": {}, "usage": usage}))
                + &event(&json!({"type": "message_stop"}));
        }
        let choice = match self {
            Self::Chat => json!([{"finish_reason": facts.finish(), "index": 0, "delta": {}}]),
            _ => json!([{"text": "", "index": 0, "logprobs": null, "finish_reason": facts.finish()}]),
        };
        let mut last = self.frame(facts, &choice, true);
        let mut text = String::new();
        if include_usage {
            text.push_str(&event(&last));
            last = self.frame(facts, &json!([]), true);
            last["usage"] = facts.usage();
        }
        last["timings"] = facts.timings();
        text.push_str(&event(&last));
        text.push_str("data: [DONE]\n\n");
        text
    }

    pub(crate) fn whole(self, facts: &Facts, text: &str) -> Value {
        let choice = match self {
            Self::Native | Self::Infill => return Self::native(facts, text),
            Self::Messages => {
                return json!({"type": "message", "role": "assistant", "model": facts.model,
                    "content": [{"type": "text", "text": text}], "usage": {"input_tokens": facts.prompt_tokens,
                    "cache_read_input_tokens": 0, "output_tokens": facts.tokens}});
            }
            Self::Chat => json!([{"finish_reason": facts.finish(), "index": 0,
                                  "message": {"role": "assistant", "content": text}}]),
            _ => json!([{"text": text, "index": 0, "logprobs": null, "finish_reason": facts.finish()}]),
        };
        let mut whole = self.frame(facts, &choice, false);
        whole["usage"] = facts.usage();
        whole["timings"] = facts.timings();
        whole
    }

    fn native(facts: &Facts, text: &str) -> Value {
        json!({"index": 0, "content": text, "tokens": [], "generation_settings": goes_on::settings(), "id_slot": facts.slot, "stop": true, "model": facts.model,
               "tokens_predicted": facts.tokens, "tokens_evaluated": facts.prompt_tokens,
               "stop_type": if facts.by_limit { "limit" } else { "eos" }, "truncated": false,
               "timings": facts.timings()})
    }
}

pub(crate) fn event(data: &Value) -> String {
    format!("data: {data}\n\n")
}
