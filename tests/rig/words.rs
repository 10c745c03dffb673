//! Text that fake-llama "generates": a function of the request's meaning and the token's index.
//!
//! Equal requests get equal answers from any process at any time, so a comparison shows if a proxy loses,
//! doubles or swaps a piece. `stream`, `stream_options` and `model` do not change the meaning.

use serde_json::Value;
use sha2::{Digest as _, Sha256};

const WORDS: [&str; 32] = [
    "amber", "brook", "cedar", "dusk", "ember", "fjord", "grove", "hazel", "inlet", "jade", "kelp", "larch",
    "mist", "north", "ochre", "pine", "quartz", "reed", "slate", "tide", "umber", "vale", "willow", "xylem",
    "yarrow", "zephyr", "ash", "birch", "clay", "dew", "elm", "fern",
];

/// Fields that affect the form or length of an answer, not its words.
const MANNER: [&str; 13] = [
    "stream",
    "stream_options",
    "model",
    "user",
    "timings_per_token",
    "return_progress",
    "verbose",
    "max_tokens",
    "n_predict",
    "n_probs",
    "cache_prompt",
    "stop",
    "id_slot",
];

/// Hash of a request's meaning.
#[derive(Debug, Clone, Copy)]
pub struct Key([u8; 32]);

impl Key {
    /// Key of a JSON body; the order of its fields has no effect.
    pub fn of(body: &Value) -> Self {
        let mut hash = Sha256::new();
        feed(&mut hash, body, true);
        Self(hash.finalize().into())
    }

    /// Key from the result of [`Self::long`].
    pub fn of_long(long: &str) -> Option<Self> {
        hex::decode(long).ok()?.try_into().ok().map(Self)
    }

    /// Key of bytes that are not JSON.
    pub fn of_bytes(body: &[u8]) -> Self {
        Self(Sha256::digest(body).into())
    }

    /// Text of token `index` (from 0), at least `bytes` long, with a leading space from the second token on.
    pub fn token(self, index: u64, bytes: usize) -> String {
        let mut hash = Sha256::new();
        hash.update(self.0);
        hash.update(index.to_le_bytes());
        let pick = hash.finalize();
        let mut text = String::new();
        if index > 0 {
            text.push(' ');
        }
        text.push_str(WORDS[usize::from(pick[0]) % WORDS.len()]);
        while text.len() < bytes {
            text.push('.');
        }
        text
    }

    /// Answer of this number of tokens.
    pub fn text(self, tokens: u64) -> String {
        (0..tokens).map(|index| self.token(index, 0)).collect()
    }

    /// The whole key in hexadecimal.
    pub fn long(self) -> String {
        hex::encode(self.0)
    }

    /// Short name of the key, for identifiers.
    pub fn short(self) -> String {
        hex::encode(&self.0[..8])
    }

    /// Embedding of `len` dimensions, with numbers in -1..1.
    pub fn vector(self, len: usize) -> Vec<f64> {
        (0..len).map(|i| f64::from(self.0[i % 32]) / 127.5 - 1.0).collect()
    }
}

fn feed(hash: &mut Sha256, value: &Value, top: bool) {
    match value {
        Value::Object(map) => {
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort();
            for key in keys {
                if top && MANNER.contains(&key.as_str()) {
                    continue;
                }
                hash.update(key.as_bytes());
                hash.update([0]);
                feed(hash, &map[key], false);
            }
            hash.update([1]);
        }
        Value::Array(items) => {
            for item in items {
                feed(hash, item, false);
            }
            hash.update([2]);
        }
        other => {
            hash.update(other.to_string().as_bytes());
            hash.update([3]);
        }
    }
}

/// Number of words in a prompt, messages or input, which are fake-llama's tokens.
pub fn count_words(value: &Value) -> u64 {
    match value {
        Value::String(text) => text.split_whitespace().count() as u64,
        Value::Array(items) => items.iter().map(count_words).sum(),
        Value::Object(map) => map
            .iter()
            .filter(|(key, _)| !["image_url", "input_audio", "source"].contains(&key.as_str()))
            .map(|(_, v)| count_words(v))
            .sum(),
        Value::Number(_) => 1,
        Value::Bool(_) | Value::Null => 0,
    }
}

/// Number of parts with this key (`image_url`, `input_audio`) in a request.
pub fn count_parts(value: &Value, part: &str) -> u64 {
    match value {
        Value::Array(items) => items.iter().map(|item| count_parts(item, part)).sum(),
        Value::Object(map) => {
            map.iter().map(|(key, v)| if key == part { 1 } else { count_parts(v, part) }).sum()
        }
        _ => 0,
    }
}
