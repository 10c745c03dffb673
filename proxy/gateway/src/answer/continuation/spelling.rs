//! What is asked of a server about texts and tokens, and what its answers mean. Pure.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::{Value, json};

use super::request::Why;
use super::transcript::Transcript;

/// Where a thought ends.
pub(super) const THOUGHT: &str = "</think>";

/// Tokens that a template may want to see in a text and that do not change how it goes on: where reasoning and calls begin
/// and end, of which the answer has none.
const MARKS: [&str; 6] =
    ["<think>", THOUGHT, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"];

/// The rendered prompt of a chat.
pub(super) fn rendered(answer: &[u8]) -> Result<String, Why> {
    match serde_json::from_slice::<Value>(answer).unwrap_or_default()["prompt"].take() {
        Value::String(prompt) => Ok(prompt),
        _ => Err("its build does not render a chat".to_owned()),
    }
}

/// Asks what tokens say.
pub(super) fn detokenize(ids: &[u32]) -> Vec<u8> {
    json!({ "tokens": ids }).to_string().into_bytes()
}

/// The marks, if all of them are of those that do no harm.
pub(super) fn harmless(marks: &[u8]) -> Result<String, Why> {
    let mut told = serde_json::from_slice::<Value>(marks).unwrap_or_default();
    let Value::String(marks) = told["content"].take() else { return Err(unknown_marks()) };
    let mut rest = marks.as_str();
    while !rest.is_empty() {
        rest = MARKS.iter().find_map(|mark| rest.strip_prefix(mark)).ok_or_else(unknown_marks)?;
    }
    Ok(marks)
}

/// Whether a text has what may have been one token of the template's and would be several of the text.
pub(super) fn has_marks(text: &str) -> bool {
    text.contains("<|") || MARKS.iter().any(|mark| text.contains(mark))
}

pub(super) fn unknown_marks() -> Why {
    "its template has marks in the text that are not passed on".to_owned()
}

/// Asks which tokens the pieces of a text are.
pub(super) fn tokenize(heard: &Transcript) -> Vec<u8> {
    let pieces: Vec<&str> = heard.pieces().collect();
    json!({ "content": pieces, "add_special": false, "parse_special": false, "with_pieces": true })
        .to_string()
        .into_bytes()
}

/// Asks how many tokens a text has.
pub(super) fn count(text: &str) -> Vec<u8> {
    json!({ "content": text, "add_special": false, "parse_special": false }).to_string().into_bytes()
}

/// The answer to that.
pub(super) fn counted(answer: &[u8]) -> Result<u64, Why> {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    let tokens = answer["tokens"].as_array().map(|tokens| tokens.len() as u64);
    tokens.filter(|tokens| *tokens > 0).ok_or_else(|| "its build does not spell texts".to_owned())
}

/// The answer to [`tokenize`]. Read as such, and not as any JSON: it has a token for each few bytes of a text that may be long.
#[derive(Deserialize)]
struct Tokenized<'a> {
    #[serde(borrow)]
    tokens: Vec<Token<'a>>,
}

#[derive(Deserialize)]
struct Token<'a> {
    id: u32,
    #[serde(borrow)]
    piece: Piece<'a>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Piece<'a> {
    Text(#[serde(borrow)] Cow<'a, str>),
    /// Of a character that is not whole.
    Bytes(Vec<u8>),
}

/// The tokens of a text, if they are that text to the byte.
pub(super) fn tokens(answer: &[u8], text: &str) -> Option<Vec<u32>> {
    let Tokenized { tokens } = serde_json::from_slice(answer).ok()?;
    let mut rest = text.as_bytes();
    for token in &tokens {
        rest = rest.strip_prefix(match &token.piece {
            Piece::Text(piece) => piece.as_bytes(),
            Piece::Bytes(piece) => piece,
        })?;
    }
    rest.is_empty().then(|| tokens.iter().map(|token| token.id).collect())
}

#[cfg(test)]
#[path = "spelling_tests.rs"]
mod tests;
