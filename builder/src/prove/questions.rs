//! Requests for comparing two servers, and the fields of an answer that must be equal.
//!
//! The sample model's answers are nonsense but reproducible: greedy, or sampled with a fixed seed.

use serde_json::{Value, json};

use crate::verify::ServerAddress;

/// Words in the prompt of each request; varied, so that graphs and pools of several sizes are created.
const PROMPT_WORDS: [usize; 8] = [1, 7, 30, 3, 90, 12, 200, 2];
const ANSWER_TOKENS: u64 = 24;

pub(super) fn all_requests() -> Vec<Value> {
    let ask = |(number, words): (usize, &usize)| {
        let prompt: Vec<String> = (0..*words).map(|word| format!("w{}", (word * 7 + number) % 50)).collect();
        json!({
            "prompt": prompt.join(" "), "n_predict": ANSWER_TOKENS, "n_probs": 2, "seed": 7,
            "temperature": if number % 2 == 0 { 0.0 } else { 0.9 },
            "cache_prompt": false,
        })
    };
    PROMPT_WORDS.iter().enumerate().map(ask).collect()
}

/// Sends all requests in sequence. Returns the comparable part of each answer, or why one is missing.
pub(super) async fn collect_answers(door: &ServerAddress) -> Result<Vec<Value>, String> {
    let client = door.client().map_err(|error| error.to_string())?;
    let mut answers = Vec::new();
    for body in all_requests() {
        let sent = client.post(door.url("/completion")).json(&body).send().await;
        let response = sent.map_err(|error| error.to_string())?;
        let status = response.status();
        let text = response.text().await.map_err(|error| error.to_string())?;
        if !status.is_success() {
            let shown: String = text.chars().take(200).collect();
            return Err(format!("/completion answered {status}: {shown}"));
        }
        let answer: Value = serde_json::from_str(&text).map_err(|error| format!("no JSON: {error}"))?;
        answers.push(json!({
            "content": answer["content"],
            "tokens": answer["tokens_predicted"],
            "probabilities": answer["completion_probabilities"],
        }));
    }
    Ok(answers)
}

pub(super) fn first_difference(one: &[Value], other: &[Value]) -> Option<String> {
    let number = one.iter().zip(other).position(|(one, other)| one != other);
    let number = number.or_else(|| (one.len() != other.len()).then(|| one.len().min(other.len())))?;
    let words =
        |all: &[Value]| all.get(number).map(|answer| answer["content"].to_string()).unwrap_or_default();
    let (one, other) = (words(one), words(other));
    Some(if one == other {
        format!("answer {} has other probabilities", number + 1)
    } else {
        format!("answer {}: {one} and {other}", number + 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_differ_by_their_text_their_probabilities_and_their_number() {
        let answer =
            |content: &str, probability: f64| json!({ "content": content, "probabilities": [probability] });
        let one = [answer("a", 0.5), answer("b", 0.5)];
        assert_eq!(first_difference(&one, &one), None);
        assert_eq!(
            first_difference(&one, &[answer("a", 0.5), answer("c", 0.5)]).unwrap(),
            "answer 2: \"b\" and \"c\""
        );
        assert_eq!(
            first_difference(&one, &[answer("a", 0.4), answer("b", 0.5)]).unwrap(),
            "answer 1 has other probabilities"
        );
        assert!(first_difference(&one, &one[..1]).is_some());
        let prompts: std::collections::BTreeSet<String> =
            all_requests().iter().map(|body| body["prompt"].to_string()).collect();
        assert_eq!(prompts.len(), PROMPT_WORDS.len(), "each request is another one");
    }
}
