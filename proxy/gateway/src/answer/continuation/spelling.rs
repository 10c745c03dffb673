//! Questions to a server about texts and their tokens, and their answers. Pure.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::{Value, json};

use super::request::NoContinuationReason;
use super::transcript::AnswerTranscript;

pub(super) const THOUGHT_END: &str = "</think>";

/// Special tokens that a template may keep visible in a text without effect on its continuation: begin and
/// end of reasoning and of tool calls. A plain answer has none of them.
const HARMLESS_MARKS: [&str; 6] =
    ["<think>", THOUGHT_END, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"];

pub(super) fn read_rendered(answer: &[u8]) -> Result<String, NoContinuationReason> {
    match serde_json::from_slice::<Value>(answer).unwrap_or_default()["prompt"].take() {
        Value::String(prompt) => Ok(prompt),
        _ => Err("its build does not render a chat".to_owned()),
    }
}

pub(super) fn detokenize_request(ids: &[u32]) -> Vec<u8> {
    json!({ "tokens": ids }).to_string().into_bytes()
}

/// Returns the text of a template's special tokens, if all are in [`HARMLESS_MARKS`].
pub(super) fn read_harmless_marks(marks: &[u8]) -> Result<String, NoContinuationReason> {
    let mut told = serde_json::from_slice::<Value>(marks).unwrap_or_default();
    let Value::String(marks) = told["content"].take() else { return Err(unknown_marks_reason()) };
    let mut rest = marks.as_str();
    while !rest.is_empty() {
        rest = HARMLESS_MARKS
            .iter()
            .find_map(|mark| rest.strip_prefix(mark))
            .ok_or_else(unknown_marks_reason)?;
    }
    Ok(marks)
}

/// Returns whether a text may contain a special token, which as text would become several tokens.
pub(super) fn has_marks(text: &str) -> bool {
    text.contains("<|") || HARMLESS_MARKS.iter().any(|mark| text.contains(mark))
}

pub(super) fn unknown_marks_reason() -> NoContinuationReason {
    "its template has special tokens in the text that are not passed on".to_owned()
}

/// Builds the request that tokenizes the client's text piece by piece.
pub(super) fn tokenize_request(heard: &AnswerTranscript) -> Vec<u8> {
    let pieces: Vec<&str> = heard.pieces().collect();
    json!({ "content": pieces, "add_special": false, "parse_special": false, "with_pieces": true })
        .to_string()
        .into_bytes()
}

pub(super) fn count_request(text: &str) -> Vec<u8> {
    json!({ "content": text, "add_special": false, "parse_special": false }).to_string().into_bytes()
}

/// Like [`count_request`], but marks in the text count as special tokens.
pub(super) fn special_count_request(text: &str) -> Vec<u8> {
    json!({ "content": text, "add_special": false, "parse_special": true }).to_string().into_bytes()
}

/// Builds the request for the number of tokens of a rendered prompt.
pub(super) fn prompt_count_request(prompt: &str) -> Vec<u8> {
    json!({ "content": prompt, "add_special": true, "parse_special": true }).to_string().into_bytes()
}

/// Returns whether a text may end a turn or a thought if a prompt contains it.
pub(super) fn has_turn_marks(text: &str) -> bool {
    ["<|", "<think>", THOUGHT_END].iter().any(|mark| text.contains(mark))
}

pub(super) fn read_count(answer: &[u8]) -> Result<u64, NoContinuationReason> {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    let tokens = answer["tokens"].as_array().map(|tokens| tokens.len() as u64);
    tokens.filter(|tokens| *tokens > 0).ok_or_else(|| "its build does not tokenize texts".to_owned())
}

/// Answer to [`tokenize_request`]. For a long text, a JSON tree would take much memory.
#[derive(Deserialize)]
struct TokenizeAnswer<'a> {
    #[serde(borrow)]
    tokens: Vec<TokenizedToken<'a>>,
}

#[derive(Deserialize)]
struct TokenizedToken<'a> {
    id: u32,
    #[serde(borrow)]
    piece: TokenPiece<'a>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenPiece<'a> {
    Text(#[serde(borrow)] Cow<'a, str>),
    /// Part of a multi-byte character.
    Bytes(Vec<u8>),
}

/// Returns the tokens of `text`; `None` if their joined pieces differ from it.
pub(super) fn read_tokens(answer: &[u8], text: &str) -> Option<Vec<u32>> {
    let TokenizeAnswer { tokens } = serde_json::from_slice(answer).ok()?;
    let mut rest = text.as_bytes();
    for token in &tokens {
        rest = rest.strip_prefix(match &token.piece {
            TokenPiece::Text(piece) => piece.as_bytes(),
            TokenPiece::Bytes(piece) => piece,
        })?;
    }
    rest.is_empty().then(|| tokens.iter().map(|token| token.id).collect())
}

#[cfg(test)]
#[path = "spelling_tests.rs"]
mod tests;
