//! Asks a process a few fixed prompts, to see whether its computation has changed. Dropping the future closes the
//! connection, and the server stops after the token that it computes.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use warden_policies::health::{HealthSymptom, ProbeBaseline, ProbePrint, TokenChance};

use crate::process::{BackendProcess, BackendRequest};

/// Plain text, a list and code: any model of text has clear expectations here.
const PROMPTS: [&str; 3] = ["The capital of France is", "1, 2, 3, 4, 5, 6,", "def add(a, b):\n    return"];
/// Tokens generated for each prompt.
const PROBE_TOKENS: u32 = 4;
/// Candidates per token.
const CANDIDATES: u32 = 20;
#[derive(Debug)]
pub(crate) enum ProbeFinding {
    /// First answers of the process.
    Learnt(Arc<ProbeBaseline>),
    Equal,
    Altered(HealthSymptom),
    /// A request arrived, or the process is to end.
    Interrupted,
    /// No slot is free.
    NoSlot,
    /// The server gives no usable answers.
    Unusable,
}

/// Returns the symptom if two answers in a row differ from the baseline. The outer `None`: no usable answer.
pub(crate) async fn find_alteration(
    process: &dyn BackendProcess,
    baseline: &ProbeBaseline,
    slot: Option<u32>,
    timeout: Duration,
) -> Option<Option<HealthSymptom>> {
    let first = ask_prompts(process, slot, timeout).await?;
    if baseline.find_alteration(&first).is_none() {
        return Some(None);
    }
    let second = ask_prompts(process, slot, timeout).await?;
    Some(baseline.find_alteration(&second))
}

/// Returns the answers; `None` if one is unusable.
pub(crate) async fn ask_prompts(
    process: &dyn BackendProcess,
    slot: Option<u32>,
    timeout: Duration,
) -> Option<ProbePrint> {
    let mut answers = Vec::new();
    // One after another: each ends within the time of a few tokens.
    for prompt in PROMPTS {
        let mut body = json!({
            "prompt": prompt, "n_predict": PROBE_TOKENS, "temperature": 0, "seed": 1, "cache_prompt": false,
            "ignore_eos": true, "n_probs": CANDIDATES, "stream": true,
        });
        if let Some(slot) = slot {
            body["id_slot"] = json!(slot);
        }
        let request = BackendRequest::post("/completion", body.to_string().into_bytes());
        let (status, answer) = process.send_request(request, timeout).await?;
        answers.push(read_chances(&answer).filter(|_| status == 200)?);
    }
    Some(ProbePrint(answers))
}

/// Reads the candidates of each token from an event stream. `None` if the server reports none.
fn read_chances(answer: &[u8]) -> Option<Vec<Vec<TokenChance>>> {
    let chance = |value: &Value| {
        let log = match &value["logprob"] {
            Value::Null if value.get("logprob").is_some() => f64::NAN,
            number => number.as_f64()?,
        };
        Some(TokenChance { token: value["id"].as_u64()?, log })
    };
    let mut tokens = Vec::new();
    for event in std::str::from_utf8(answer).ok()?.lines().filter_map(|line| line.strip_prefix("data: ")) {
        let Ok(event) = serde_json::from_str::<Value>(event) else { continue };
        if event["error"].is_object() {
            return None;
        }
        for token in event["completion_probabilities"].as_array().into_iter().flatten() {
            let others = token["top_logprobs"].as_array()?.iter().filter(|other| other["id"] != token["id"]);
            let chances: Vec<_> = std::iter::once(token).chain(others).map(chance).collect::<Option<_>>()?;
            // A token of a draft has no candidates, and its probability is always 1.
            tokens.push(Some(chances).filter(|chances| chances.len() > 1)?);
        }
    }
    (!tokens.is_empty()).then_some(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_are_read_with_the_generated_token_first_and_null_as_nan() {
        let event = |logprob: Value| {
            let other = json!({ "id": 5, "token": "b", "logprob": -2.5 });
            let own = json!({ "id": 7, "token": "a", "logprob": logprob });
            let mut token = own.clone();
            token["top_logprobs"] = json!([other, own]);
            format!("data: {}\n\n", json!({ "content": "a", "completion_probabilities": [token] }))
        };
        let end = format!("data: {}\n\n", json!({ "content": "", "stop": true }));
        let read = |text: &str| read_chances(text.as_bytes());
        let found = read(&(event(json!(-0.5)) + &event(Value::Null) + &end)).unwrap();
        let chance = |token, log| TokenChance { token, log };
        assert_eq!(found[0], [chance(7, -0.5), chance(5, -2.5)]);
        assert!(found[1][0].log.is_nan());
        assert_eq!(found.len(), 2);
        // Older builds report probabilities of texts.
        let old = json!({ "completion_probabilities": [{ "content": "a", "probs": [{ "tok_str": "a", "prob": 0.5 }] }] });
        let failed = json!({ "error": { "code": 500 } });
        let mut draft = json!({ "id": 7, "token": "a", "logprob": 0.0, "top_logprobs": [] });
        draft = json!({ "completion_probabilities": [draft] });
        for unusable in [
            end,
            format!("data: {draft}\n\n"),
            format!("data: {old}\n\n"),
            event(json!(-0.5)) + &format!("data: {failed}\n\n"),
        ] {
            assert_eq!(read(&unusable), None, "{unusable}");
        }
    }
}
