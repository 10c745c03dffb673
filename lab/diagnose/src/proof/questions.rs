//! Questions to both builds, and the parsing of their answers. Generated text uses temperature 0 and no
//! cached prompt.

use serde_json::{Value, json};
use warden_experiment::proof::{BuildReply, ReplyToken};
use warden_policies::defaults::{Diagnose, Proof};
use warden_supervisor::ServerProps;

use crate::client::{LabRequest, LabRequestError};
use crate::workload::{ServerLimits, TextGenerator, media};

#[derive(Clone, Debug)]
pub(super) struct ProofQuestion {
    pub(super) name: String,
    pub(super) ask: LabRequest,
    kind: QuestionKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QuestionKind {
    /// `/completion`.
    Native,
    /// `/v1/chat/completions`.
    Chat,
    /// `/tokenize`.
    Tokens,
    /// `/apply-template`.
    Prompt,
    /// `/v1/embeddings`.
    Vector,
}

/// Hard for tokenizers: numbers, scripts, spaces, code.
const HARD_TEXT: &str =
    "Ça va?  3.14159e-10 kg/m²\n\tfn main() { let x = \"日本語\"; } // 1,234,567 — ﷽ 🦙🏽";

pub(super) fn all_questions(
    numbers: &Diagnose,
    proof: &Proof,
    facts: ServerLimits,
    props: ServerProps,
) -> Result<Vec<ProofQuestion>, LabRequestError> {
    let words = TextGenerator::new(facts.tokens_per_word);
    let answer = proof.answer;
    let top = proof.top;
    let of = |name: &str, kind, ask| ProofQuestion { name: name.to_owned(), ask, kind };
    let native = |name: &str, which, tokens| {
        let text = words.text(which, facts.limit_prompt(tokens, answer));
        let body = json!({
            "prompt": text,
            "n_predict": answer,
            "temperature": 0,
            "seed": 1,
            "cache_prompt": false,
            "n_probs": top,
        });
        of(name, QuestionKind::Native, LabRequest::post("/completion", body))
    };
    let mut all: Vec<ProofQuestion> =
        (1..=4).map(|which| native(&format!("text {which}"), which, numbers.short_prompt)).collect();
    all.push(native("long text", 5, proof.prompt));
    let mut talk = chat_request(&words.text(6, numbers.short_prompt), answer, false);
    add_fields(&mut talk, &json!({ "logprobs": true, "top_logprobs": top }));
    all.push(of("chat", QuestionKind::Chat, talk));
    let mut schema = chat_request(&words.text(7, numbers.short_prompt), answer, false);
    let object = json!({ "type": "object", "properties": { "n": { "type": "integer" } }, "required": ["n"] });
    let form = json!({ "type": "json_object", "schema": object });
    add_fields(&mut schema, &json!({ "response_format": form, "logprobs": true, "top_logprobs": top }));
    all.push(of("schema", QuestionKind::Chat, schema));
    all.push(of(
        "tokens",
        QuestionKind::Tokens,
        LabRequest::post("/tokenize", json!({ "content": HARD_TEXT, "add_special": true })),
    ));
    let messages =
        json!([{ "role": "system", "content": "Be brief." }, { "role": "user", "content": "Hello" }]);
    all.push(of(
        "template",
        QuestionKind::Prompt,
        LabRequest::post("/apply-template", json!({ "messages": messages })),
    ));
    all.push(of(
        "embedding",
        QuestionKind::Vector,
        LabRequest::post("/v1/embeddings", json!({ "input": words.text(8, 16) })),
    ));
    if props.modalities.is_some_and(|modalities| modalities.vision) {
        let (width, height) = numbers.image;
        let url =
            media::picture_url(width, height).map_err(|error| LabRequestError::Broken(error.to_string()))?;
        let content = json!([
            { "type": "image_url", "image_url": { "url": url } },
            { "type": "text", "text": "What is in this picture?" },
        ]);
        let mut seen = chat_request("", answer, false);
        add_fields(
            &mut seen,
            &json!({ "messages": [{ "role": "user", "content": content }], "logprobs": true, "top_logprobs": top }),
        );
        all.push(of("picture", QuestionKind::Chat, LabRequest { images: 1, ..seen }));
    }
    Ok(all)
}

pub(super) fn chat_request(text: &str, answer: u64, stream: bool) -> LabRequest {
    let body = json!({
        "messages": [{ "role": "system", "content": "Be brief." }, { "role": "user", "content": text }],
        "max_tokens": answer,
        "temperature": 0,
        "seed": 1,
        "cache_prompt": false,
        "stream": stream,
    });
    LabRequest::post("/v1/chat/completions", body)
}

fn add_fields(ask: &mut LabRequest, more: &Value) {
    let fields = ask.body.as_mut().and_then(Value::as_object_mut).zip(more.as_object());
    if let Some((body, more)) = fields {
        body.extend(more.clone());
    }
}

impl ProofQuestion {
    pub(super) fn parse_reply(&self, json: &Value) -> BuildReply {
        let request = self.name.clone();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match self.kind {
            QuestionKind::Native => parse_native(request, json),
            QuestionKind::Chat => {
                let choice = &json["choices"][0];
                let message = &choice["message"];
                let said = [&message["reasoning_content"], &message["content"]].map(text).concat();
                let calls =
                    message["tool_calls"].as_array().map(|calls| Value::from(calls.clone()).to_string());
                let tokens = choice["logprobs"]["content"].as_array().map_or(&[][..], Vec::as_slice);
                let tokens = tokens
                    .iter()
                    .map(|token| parse_token(token, "token", "top_logprobs", "logprob"))
                    .collect();
                BuildReply {
                    request,
                    text: said + &calls.unwrap_or_default(),
                    tokens,
                    ..BuildReply::default()
                }
            }
            QuestionKind::Tokens => {
                BuildReply { request, text: json["tokens"].to_string(), ..BuildReply::default() }
            }
            QuestionKind::Prompt => {
                BuildReply { request, text: text(&json["prompt"]), ..BuildReply::default() }
            }
            QuestionKind::Vector => {
                let numbers = json["data"][0]["embedding"].as_array().map_or(&[][..], Vec::as_slice);
                let vector = numbers.iter().filter_map(Value::as_f64).collect();
                BuildReply { request, vector, ..BuildReply::default() }
            }
        }
    }
}

/// Parses an answer of `/completion`.
pub(crate) fn parse_native(request: String, json: &Value) -> BuildReply {
    let text = json["content"].as_str().unwrap_or_default().to_owned();
    let tokens = json["completion_probabilities"].as_array().map_or(&[][..], Vec::as_slice);
    let tokens = tokens.iter().map(native_token).collect();
    BuildReply { request, text, tokens, ..BuildReply::default() }
}

/// Builds list logarithms, or probabilities: those after sampling, and until about b4400 under other names.
fn native_token(token: &Value) -> ReplyToken {
    let (name, list) = if token.get("probs").is_some() {
        ("content", "probs")
    } else if token.get("top_probs").is_some() {
        ("token", "top_probs")
    } else {
        return parse_token(token, "token", "top_logprobs", "logprob");
    };
    let mut found = parse_token(token, name, list, "prob");
    // A probability of 0 has no logarithm.
    found.top.retain(|(_, chance)| *chance > 0.0);
    for (_, chance) in &mut found.top {
        *chance = chance.ln();
    }
    found
}

fn parse_token(token: &Value, name: &str, list: &str, number: &str) -> ReplyToken {
    let text = |value: &Value| {
        let own = value.get("tok_str").or_else(|| value.get(name)).or_else(|| value.get("token"));
        own.and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let top = token[list].as_array().map_or(&[][..], Vec::as_slice);
    let top = top.iter().filter_map(|one| Some((text(one), one[number].as_f64()?)));
    ReplyToken { text: text(token), top: top.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(kind: QuestionKind) -> ProofQuestion {
        ProofQuestion { name: "q".to_owned(), ask: LabRequest::post("/", json!({})), kind }
    }

    #[test]
    fn tokens_are_read_as_new_and_old_builds_tell_them() {
        let new = json!({ "content": "ab", "completion_probabilities": [
            { "id": 1, "token": "a", "logprob": -0.5, "top_logprobs": [{ "token": "a", "logprob": -0.5 }, { "token": "c", "logprob": -1.5 }] },
        ] });
        let old = json!({ "content": "ab", "completion_probabilities": [
            { "content": "a", "probs": [{ "tok_str": "a", "prob": 0.5 }, { "tok_str": "c", "prob": 0.25 }] },
        ] });
        let (new, old) = (
            question(QuestionKind::Native).parse_reply(&new),
            question(QuestionKind::Native).parse_reply(&old),
        );
        assert_eq!((new.text.as_str(), new.tokens[0].text.as_str()), ("ab", "a"));
        assert_eq!(new.tokens[0].top, [("a".to_owned(), -0.5), ("c".to_owned(), -1.5)]);
        assert_eq!(old.tokens[0].text, "a");
        assert!((old.tokens[0].top[1].1 - 0.25_f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn probabilities_after_sampling_become_logarithms() {
        let sampled = json!({ "content": "ab", "completion_probabilities": [
            { "id": 1, "token": "a", "bytes": [97], "prob": 0.75, "top_probs": [
                { "id": 1, "token": "a", "bytes": [97], "prob": 0.75 },
                { "id": 2, "token": "c", "bytes": [99], "prob": 0.25 },
                { "id": 3, "token": "d", "bytes": [100], "prob": 0.0 },
            ] },
        ] });
        let reply = question(QuestionKind::Native).parse_reply(&sampled);
        assert_eq!((reply.tokens.len(), reply.tokens[0].text.as_str()), (1, "a"));
        let expected = [("a".to_owned(), 0.75_f64.ln()), ("c".to_owned(), 0.25_f64.ln())];
        assert_eq!(reply.tokens[0].top, expected);
    }

    #[test]
    fn a_chat_is_what_it_thinks_says_and_calls() {
        let json = json!({ "choices": [{
            "message": { "reasoning_content": "so ", "content": "yes", "tool_calls": [{ "id": "x" }] },
            "logprobs": { "content": [{ "token": "yes", "logprob": -0.1, "top_logprobs": [{ "token": "yes", "logprob": -0.1 }] }] },
        }] });
        let reply = question(QuestionKind::Chat).parse_reply(&json);
        assert_eq!(reply.text, "so yes[{\"id\":\"x\"}]");
        assert_eq!(reply.tokens.len(), 1);
    }
}
