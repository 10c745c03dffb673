//! Questions to both builds, and the parsing of their answers. All at temperature 0, and nothing from a
//! cache.

use serde_json::{Value, json};
use warden_experiment::proof::{Reply, Token};
use warden_policies::defaults::{Diagnose, Proof};
use warden_supervisor::SoloProps;

use crate::client::{Ask, AskError};
use crate::workload::{Facts, Words, picture};

/// A request, and the kind of its answer.
#[derive(Clone, Debug)]
pub(super) struct Question {
    pub(super) name: String,
    pub(super) ask: Ask,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
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

/// A text that is hard for tokenizers: numbers, scripts, spaces, code.
const ODD: &str = "Ça va?  3.14159e-10 kg/m²\n\tfn main() { let x = \"日本語\"; } // 1,234,567 — ﷽ 🦙🏽";

/// All questions.
pub(super) fn all(
    numbers: &Diagnose,
    proof: &Proof,
    facts: Facts,
    props: SoloProps,
) -> Result<Vec<Question>, AskError> {
    let words = Words::new(facts.tokens_per_word);
    let (answer, top) = (proof.answer, proof.top);
    let of = |name: &str, kind, ask| Question { name: name.to_owned(), ask, kind };
    let native = |name: &str, which, tokens| {
        let text = words.text(which, facts.fitting(tokens, answer));
        let body = json!({
            "prompt": text,
            "n_predict": answer,
            "temperature": 0,
            "seed": 1,
            "cache_prompt": false,
            "n_probs": top,
        });
        of(name, Kind::Native, Ask::post("/completion", body))
    };
    let mut all: Vec<Question> =
        (1..=4).map(|which| native(&format!("text {which}"), which, numbers.short_prompt)).collect();
    all.push(native("long text", 5, proof.prompt));
    let mut talk = chat(&words.text(6, numbers.short_prompt), answer, false);
    with(&mut talk, &json!({ "logprobs": true, "top_logprobs": top }));
    all.push(of("chat", Kind::Chat, talk));
    let mut schema = chat(&words.text(7, numbers.short_prompt), answer, false);
    let object = json!({ "type": "object", "properties": { "n": { "type": "integer" } }, "required": ["n"] });
    with(
        &mut schema,
        &json!({ "response_format": { "type": "json_object", "schema": object }, "logprobs": true, "top_logprobs": top }),
    );
    all.push(of("schema", Kind::Chat, schema));
    all.push(of(
        "tokens",
        Kind::Tokens,
        Ask::post("/tokenize", json!({ "content": ODD, "add_special": true })),
    ));
    let messages =
        json!([{ "role": "system", "content": "Be brief." }, { "role": "user", "content": "Hello" }]);
    all.push(of("template", Kind::Prompt, Ask::post("/apply-template", json!({ "messages": messages }))));
    all.push(of(
        "embedding",
        Kind::Vector,
        Ask::post("/v1/embeddings", json!({ "input": words.text(8, 16) })),
    ));
    if props.modalities.is_some_and(|modalities| modalities.vision) {
        let (width, height) = numbers.image;
        let url = picture::url(width, height).map_err(|error| AskError::Broken(error.to_string()))?;
        let content = json!([
            { "type": "image_url", "image_url": { "url": url } },
            { "type": "text", "text": "What is in this picture?" },
        ]);
        let mut seen = chat("", answer, false);
        with(
            &mut seen,
            &json!({ "messages": [{ "role": "user", "content": content }], "logprobs": true, "top_logprobs": top }),
        );
        all.push(of("picture", Kind::Chat, Ask { images: 1, ..seen }));
    }
    Ok(all)
}

/// A chat request.
pub(super) fn chat(text: &str, answer: u64, stream: bool) -> Ask {
    let body = json!({
        "messages": [{ "role": "system", "content": "Be brief." }, { "role": "user", "content": text }],
        "max_tokens": answer,
        "temperature": 0,
        "seed": 1,
        "cache_prompt": false,
        "stream": stream,
    });
    Ask::post("/v1/chat/completions", body)
}

fn with(ask: &mut Ask, more: &Value) {
    let fields = ask.body.as_mut().and_then(Value::as_object_mut).zip(more.as_object());
    if let Some((body, more)) = fields {
        body.extend(more.clone());
    }
}

impl Question {
    /// The compared part of an answer.
    pub(super) fn read(&self, json: &Value) -> Reply {
        let request = self.name.clone();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match self.kind {
            Kind::Native => {
                let tokens = json["completion_probabilities"].as_array().map_or(&[][..], Vec::as_slice);
                let tokens = tokens.iter().map(native_token).collect();
                Reply { request, text: text(&json["content"]), tokens, ..Reply::default() }
            }
            Kind::Chat => {
                let choice = &json["choices"][0];
                let message = &choice["message"];
                let said = [&message["reasoning_content"], &message["content"]].map(text).concat();
                let calls =
                    message["tool_calls"].as_array().map(|calls| Value::from(calls.clone()).to_string());
                let tokens = choice["logprobs"]["content"].as_array().map_or(&[][..], Vec::as_slice);
                let tokens =
                    tokens.iter().map(|token| of(token, "token", "top_logprobs", "logprob")).collect();
                Reply { request, text: said + &calls.unwrap_or_default(), tokens, ..Reply::default() }
            }
            // Other fields of the answer are not compared.
            Kind::Tokens => Reply { request, text: json["tokens"].to_string(), ..Reply::default() },
            Kind::Prompt => Reply { request, text: text(&json["prompt"]), ..Reply::default() },
            Kind::Vector => {
                let numbers = json["data"][0]["embedding"].as_array().map_or(&[][..], Vec::as_slice);
                let vector = numbers.iter().filter_map(Value::as_f64).collect();
                Reply { request, vector, ..Reply::default() }
            }
        }
    }
}

/// Parses a token. Builds have three forms: logarithms, probabilities (when sampling), and, until about
/// b4400, other names.
fn native_token(token: &Value) -> Token {
    if token.get("probs").is_some() {
        let mut old = of(token, "content", "probs", "prob");
        // A probability of 0 has no logarithm.
        old.top.retain(|(_, chance)| *chance > 0.0);
        for (_, chance) in &mut old.top {
            *chance = chance.ln();
        }
        return old;
    }
    of(token, "token", "top_logprobs", "logprob")
}

fn of(token: &Value, name: &str, list: &str, number: &str) -> Token {
    let text = |value: &Value| {
        let own = value.get("tok_str").or_else(|| value.get(name)).or_else(|| value.get("token"));
        own.and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let top = token[list].as_array().map_or(&[][..], Vec::as_slice);
    let top = top.iter().filter_map(|one| Some((text(one), one[number].as_f64()?)));
    Token { text: text(token), top: top.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(kind: Kind) -> Question {
        Question { name: "q".to_owned(), ask: Ask::post("/", json!({})), kind }
    }

    #[test]
    fn tokens_are_read_as_new_and_old_builds_tell_them() {
        let new = json!({ "content": "ab", "completion_probabilities": [
            { "id": 1, "token": "a", "logprob": -0.5, "top_logprobs": [{ "token": "a", "logprob": -0.5 }, { "token": "c", "logprob": -1.5 }] },
        ] });
        let old = json!({ "content": "ab", "completion_probabilities": [
            { "content": "a", "probs": [{ "tok_str": "a", "prob": 0.5 }, { "tok_str": "c", "prob": 0.25 }] },
        ] });
        let (new, old) = (question(Kind::Native).read(&new), question(Kind::Native).read(&old));
        assert_eq!((new.text.as_str(), new.tokens[0].text.as_str()), ("ab", "a"));
        assert_eq!(new.tokens[0].top, [("a".to_owned(), -0.5), ("c".to_owned(), -1.5)]);
        assert_eq!(old.tokens[0].text, "a");
        assert!((old.tokens[0].top[1].1 - 0.25_f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn a_chat_is_what_it_thinks_says_and_calls() {
        let json = json!({ "choices": [{
            "message": { "reasoning_content": "so ", "content": "yes", "tool_calls": [{ "id": "x" }] },
            "logprobs": { "content": [{ "token": "yes", "logprob": -0.1, "top_logprobs": [{ "token": "yes", "logprob": -0.1 }] }] },
        }] });
        let reply = question(Kind::Chat).read(&json);
        assert_eq!(reply.text, "so yes[{\"id\":\"x\"}]");
        assert_eq!(reply.tokens.len(), 1);
    }
}
