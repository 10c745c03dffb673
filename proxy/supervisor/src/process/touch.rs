//! Builds requests that evaluate the prompt of a conversation, or show whether it is cached. Each one repeats
//! the conversation's last request with its answer appended, and generates no answer.

use bytes::Bytes;
use serde_json::{Map, Value, json};

/// Answer to a request.
#[derive(Clone, PartialEq, Eq)]
pub enum AnswerText {
    /// Nothing can be appended to the request.
    Nothing,
    /// Text of the answer.
    Text(String),
    /// The whole JSON answer, parsed when its text is needed.
    Whole(Bytes),
}

impl AnswerText {
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Text(text) => text.len(),
            Self::Whole(json) => json.len(),
        }
    }

    /// Returns `None` if the answer contains more than text.
    pub(crate) fn text(&self) -> Option<String> {
        let json = match self {
            Self::Nothing => return None,
            Self::Text(text) => return Some(text.clone()).filter(|text| !text.is_empty()),
            Self::Whole(json) => serde_json::from_slice::<Value>(json).ok()?,
        };
        let choice = &json["choices"][0];
        let message = &choice["message"];
        let is_more =
            |name: &str| !(message[name].is_null() || message[name] == "" || message[name] == json!([]));
        if ["reasoning_content", "tool_calls"].into_iter().any(is_more) {
            return None;
        }
        let text =
            [&message["content"], &choice["text"], &json["content"]].into_iter().find_map(Value::as_str)?;
        Some(text.to_owned()).filter(|text| !text.is_empty())
    }
}

impl std::fmt::Debug for AnswerText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AnswerText({} bytes)", self.bytes())
    }
}

/// Fields about sampling and output format, which do not affect the prompt.
const DROPPED_FIELDS: [&str; 24] = [
    "best_of",
    "echo",
    "grammar",
    "id_slot",
    "ignore_eos",
    "json_schema",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "metadata",
    "mirostat",
    "n",
    "n_probs",
    "response_fields",
    "return_progress",
    "return_tokens",
    "samplers",
    "seed",
    "stop",
    "stream_options",
    "timings_per_token",
    "top_logprobs",
    "user",
    "verbose",
];

/// Builds a request that evaluates the conversation in `slot`, or in any slot. `None` if the form of the
/// prompt is unknown.
pub(crate) fn touch_body(request: &[u8], said: &AnswerText, slot: Option<u32>) -> Option<Vec<u8>> {
    let Ok(Value::Object(mut body)) = serde_json::from_slice(request) else { return None };
    body.retain(|name, _| !DROPPED_FIELDS.contains(&name.as_str()));
    if let Some(text) = said.text() {
        append_answer(&mut body, text);
    }
    for (name, value) in [
        ("stream", json!(true)),
        ("cache_prompt", json!(true)),
        ("n_predict", json!(0)),
        ("max_tokens", json!(0)),
    ] {
        body.insert(name.to_owned(), value);
    }
    if let Some(slot) = slot {
        body.insert("id_slot".to_owned(), json!(slot));
    }
    Some(Value::Object(body).to_string().into_bytes())
}

fn append_answer(body: &mut Map<String, Value>, text: String) {
    if let Some(Value::Array(messages)) = body.get_mut("messages") {
        messages.push(json!({ "role": "assistant", "content": text }));
        return;
    }
    match body.get_mut("prompt") {
        Some(Value::String(prompt)) => prompt.push_str(&text),
        Some(Value::Array(parts)) if parts.iter().all(|part| part.is_u64() || part.is_string()) => {
            parts.push(Value::String(text));
        }
        _ => {}
    }
}

/// Cached and evaluated prompt tokens; `None` without counts or for an error.
pub(crate) fn answer_counts(answer: &[u8]) -> Option<(u64, u64)> {
    let text = std::str::from_utf8(answer).ok()?;
    let events =
        text.lines().filter_map(|line| line.strip_prefix("data: ").or(line.starts_with('{').then_some(line)));
    let mut found = None;
    for event in events {
        let Ok(event) = serde_json::from_str::<Value>(event) else { continue };
        if event["error"].is_object() {
            return None;
        }
        found = event_counts(&event).or(found);
    }
    found
}

fn event_counts(event: &Value) -> Option<(u64, u64)> {
    let timings = &event["timings"];
    let evaluated = timings["prompt_n"].as_u64()?;
    let usage = &event["usage"];
    // Older builds report the length of the prompt, but not its cached part.
    let all = || event["tokens_evaluated"].as_u64().or(usage["prompt_tokens"].as_u64());
    let cached = timings["cache_n"].as_u64().or_else(|| Some(all()?.saturating_sub(evaluated)))?;
    Some((cached, evaluated))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touched(request: &Value, said: &AnswerText, slot: Option<u32>) -> Value {
        serde_json::from_slice(&touch_body(request.to_string().as_bytes(), said, slot).unwrap()).unwrap()
    }

    #[test]
    fn the_answer_stands_behind_the_request_and_nothing_is_generated() {
        let asked = json!({ "model": "m", "messages": [{ "role": "user", "content": "a" }], "tools": [1], "max_tokens": 9,
            "stream": false, "stop": ["x"], "max_completion_tokens": 9, "user": "u", "temperature": 0.5 });
        assert_eq!(
            touched(&asked, &AnswerText::Text("b".to_owned()), Some(3)),
            json!({ "model": "m", "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }],
                "tools": [1], "max_tokens": 0, "stream": true, "temperature": 0.5, "cache_prompt": true, "n_predict": 0, "id_slot": 3 })
        );
        let whole = |json: Value| AnswerText::Whole(json.to_string().into());
        let text = json!({ "choices": [{ "message": { "content": "b", "reasoning_content": "", "tool_calls": null } }] });
        assert_eq!(touched(&asked, &whole(text), None)["messages"][1]["content"], "b");
        for more in [
            json!({ "choices": [{ "message": { "content": "b", "reasoning_content": "hm" } }] }),
            json!({ "choices": [{ "message": { "content": null, "tool_calls": [{}] } }] }),
            json!({ "choices": [{ "message": { "content": "" } }] }),
            json!([]),
        ] {
            assert_eq!(touched(&asked, &whole(more), None)["messages"], asked["messages"]);
        }
        assert_eq!(
            touched(&json!({ "prompt": "a" }), &AnswerText::Text("b".to_owned()), None)["prompt"],
            "ab"
        );
        assert_eq!(
            touched(&json!({ "prompt": [1, 2] }), &whole(json!({ "content": "b" })), None)["prompt"],
            json!([1, 2, "b"])
        );
        assert_eq!(touch_body(b"[1]", &AnswerText::Nothing, None), None);
    }

    #[test]
    fn the_counters_are_found_in_every_dialect() {
        for (answer, expected) in [
            (
                "data: {\"choices\":[],\"timings\":{\"cache_n\":7,\"prompt_n\":2}}\n\ndata: [DONE]\n\n",
                Some((7, 2)),
            ),
            ("data: {\"stop\":true,\"tokens_evaluated\":9,\"timings\":{\"prompt_n\":2}}\n\n", Some((7, 2))),
            ("{\"usage\":{\"prompt_tokens\":9},\"timings\":{\"prompt_n\":9}}", Some((0, 9))),
            (
                "data: {\"timings\":{\"cache_n\":1,\"prompt_n\":1}}\n\ndata: {\"error\":{\"code\":500}}\n\n",
                None,
            ),
            ("data: {\"choices\":[]}\n\n", None),
            ("", None),
        ] {
            assert_eq!(answer_counts(answer.as_bytes()), expected, "{answer}");
        }
        assert_eq!(answer_counts(b"\xff"), None);
    }
}
