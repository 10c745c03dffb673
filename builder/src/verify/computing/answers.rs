//! Requests the probabilities of the next word.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::super::checks::{ServerAddress, post};
use super::judge::TrialOutcome;
use crate::sample_model::{FIRST_WORD_ID, WORD_COUNT};

/// Tokens of the prompt: processed as one batch, and fewer than the 32 from which ggml offloads to a GPU.
const PROMPT_TOKENS: usize = 24;
/// Single tokens after the prompt, each computed alone: enough for a GPU to capture a graph and launch it
/// again.
const SINGLE_TOKENS: usize = 6;

/// Log-probabilities by word, for each prompt.
pub(super) type WordProbabilities = Vec<BTreeMap<String, f64>>;

/// Requests all words' probabilities after the prompt, and after each of the single tokens that follow.
pub(super) async fn request_probabilities(door: &ServerAddress) -> TrialOutcome {
    let mut answers = WordProbabilities::new();
    for length in PROMPT_TOKENS..=PROMPT_TOKENS + SINGLE_TOKENS {
        let prompt: Vec<usize> = (0..length).map(prompt_token).collect();
        let body = json!({
            "prompt": prompt, "n_predict": 1, "n_probs": WORD_COUNT, "cache_prompt": true, "seed": 1,
            // Older servers report only tokens that pass the samplers; these settings let all likely tokens
            // pass.
            "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        });
        let answer = match post(door, "/completion", &body).await {
            Ok(text) => serde_json::from_str::<Value>(&text).unwrap_or_default(),
            Err(fault) => return TrialOutcome::Wrong(fault.to_string()),
        };
        match parse_words(&answer) {
            Some(words) => answers.push(words),
            None if answers.is_empty() => return TrialOutcome::NoProbabilities,
            None => return TrialOutcome::Wrong("an answer without probabilities".to_owned()),
        }
    }
    TrialOutcome::Answered(answers)
}

/// A pseudo-random word of the sample model.
const fn prompt_token(at: usize) -> usize {
    FIRST_WORD_ID + (at * 131 + 17) % WORD_COUNT
}

/// Parses the words with their log-probabilities; `None` if the answer has no probabilities.
fn parse_words(answer: &Value) -> Option<BTreeMap<String, f64>> {
    let first = answer["completion_probabilities"].get(0)?;
    let list = first["top_logprobs"].as_array().or_else(|| first["probs"].as_array())?;
    let words = list.iter().filter_map(|entry| {
        // The first form is current, the second one dates from before 2025.
        let word = entry["token"].as_str().or_else(|| entry["tok_str"].as_str())?;
        let log = entry["logprob"].as_f64().or_else(|| entry["prob"].as_f64().map(f64::ln))?;
        log.is_finite().then(|| (word.to_owned(), log))
    });
    let words: BTreeMap<String, f64> = words.collect();
    (!words.is_empty()).then_some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_read_in_both_forms() {
        let new = json!({"completion_probabilities": [{"id": 1, "top_logprobs": [
            {"id": 1, "token": " ba", "logprob": -0.5}, {"id": 2, "token": " do", "logprob": null}]}]});
        assert_eq!(parse_words(&new), Some([(" ba".to_owned(), -0.5)].into()));
        let old = json!({"completion_probabilities": [{"content": "x", "probs": [{"tok_str": " ba", "prob": 1.0}]}]});
        assert_eq!(parse_words(&old), Some([(" ba".to_owned(), 0.0)].into()));
        assert_eq!(parse_words(&json!({"content": " ba"})), None);
    }
}
