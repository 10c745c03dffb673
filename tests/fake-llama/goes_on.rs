//! Routes with which another process can compute the rest of an answer: settings, rendered chats, tokens.
//! Every token has a number of its own, so that wrong tokens after a prompt are detected.

use serde_json::{Value, json};
use warden_rig::words::{Key, count_words};

const BEGIN: &str = "<fake ";

pub(crate) struct Begun {
    pub(crate) key: Key,
    /// Name of the request, if the prompt has it.
    pub(crate) id: Option<String>,
    /// Words of the prompt, without the answer's tokens.
    pub(crate) words: u64,
    /// Tokens of the answer after the prompt.
    pub(crate) said: u64,
}

/// Renders a chat as a prompt: meaning, length, name and last words.
pub(crate) fn rendered(request: &Value) -> Value {
    let key = Key::of(request).long();
    let messages = &request["messages"];
    let last = messages
        .as_array()
        .and_then(|all| all.last())
        .map_or("", |one| one["content"].as_str().unwrap_or(""));
    let id = request["user"].as_str().unwrap_or("-");
    json!({ "prompt": format!("{BEGIN}{key} {} {} {id}>{last}", count_words(messages), last.len()) })
}

pub(crate) fn token_id(text: &str) -> u32 {
    text.bytes().fold(7, |sum: u32, byte| sum.wrapping_mul(31).wrapping_add(u32::from(byte))) & 0xff_ffff
}

/// Returns the tokens of a text, or of each of several.
pub(crate) fn tokens(request: &Value) -> Value {
    let content = &request["content"];
    let tokens: Vec<Value> = match content.as_array().filter(|_| request["with_pieces"] == true) {
        Some(pieces) => pieces
            .iter()
            .filter_map(Value::as_str)
            .map(|piece| json!({ "id": token_id(piece), "piece": piece }))
            .collect(),
        // One token per word, as everywhere here; the numbers do not matter.
        None => (0..count_words(content)).map(Value::from).collect(),
    };
    json!({ "tokens": tokens })
}

pub(crate) fn settings() -> Value {
    json!({ "grammar": "", "mirostat": 0, "n_probs": 0, "stop": [], "preserved_tokens": [] })
}

/// Returns the request that a completion continues.
///
/// # Errors
/// The tokens after the prompt are not those of the answer.
pub(crate) fn begun(request: &Value) -> Result<Begun, String> {
    let (text, ids) = match &request["prompt"] {
        Value::Array(parts)
            if parts.first().is_some_and(Value::is_string) && parts.iter().skip(1).all(Value::is_u64) =>
        {
            (parts[0].as_str(), &parts[1..])
        }
        other => (other.as_str(), &[][..]),
    };
    let Some(text) = text.filter(|text| text.starts_with(BEGIN) || !ids.is_empty()) else {
        return Ok(Begun {
            key: Key::of(request),
            id: None,
            words: count_words(&request["prompt"]),
            said: 0,
        });
    };
    let mut begun = chat(text).unwrap_or_else(|| {
        let mut own = request.clone();
        own["prompt"] = json!(text);
        Begun { key: Key::of(&own), id: None, words: count_words(&own["prompt"]), said: 0 }
    });
    for (index, id) in (0_u64..).zip(ids) {
        let own = begun.key.token(index, 0);
        if id.as_u64() != Some(u64::from(token_id(&own))) {
            return Err(format!("token {index} of the answer is not {id} but {} ({own:?})", token_id(&own)));
        }
        begun.said = index + 1;
    }
    Ok(begun)
}

fn chat(text: &str) -> Option<Begun> {
    let (head, _) = text.strip_prefix(BEGIN)?.split_once('>')?;
    let mut words = head.splitn(4, ' ');
    let key = Key::of_long(words.next()?)?;
    let count = words.next()?.parse().ok()?;
    let _last = words.next()?;
    Some(Begun { key, id: words.next().map(str::to_owned), words: count, said: 0 })
}
