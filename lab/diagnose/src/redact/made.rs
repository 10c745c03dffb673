//! Replaces texts, names, numbers and values by others of the same length; equal originals get equal
//! replacements.

use std::borrow::Cow;
use std::hash::{BuildHasher as _, RandomState};
use std::io;

use serde_json::{Map, Value, json};

use crate::workload::TextGenerator;

/// Texts are replaced in pieces of this many characters. Replacements of texts with a common beginning share
/// its whole pieces.
const PIECE_CHARS: usize = 48;
/// Shorter names would not be distinct.
const MIN_NAME_CHARS: usize = 6;
/// Longer texts are no identifiers.
const MAX_ID_CHARS: usize = 256;
/// Earlier tokens stand for the beginning, the end and unknown text.
const FIRST_TOKEN: u64 = 3;
/// Beginning of the first text in Claude Code's requests.
const BILLING_PREFIX: &str = "x-anthropic-billing-header:";
/// Replacements for letters of two, three and four UTF-8 bytes, with about as many tokens.
const WIDE_LETTERS: [&str; 3] =
    ["аеиностврклмпуяд", "的一是不了人我在有他这中大来上国", "😀😃😄😁😆😅😂🙂🙃😉😊😇😍😘😗😙"];

/// Maker of replacements, with random keys that are stored nowhere. Without the keys, a reader of a recording
/// cannot test guesses of its texts.
#[derive(Debug, Default)]
pub(super) struct ReplacementMaker {
    keys: RandomState,
}

impl ReplacementMaker {
    /// Replaces a text by one of the same length. JSON stays JSON, because a template may parse it.
    pub(super) fn replace_text(&self, text: &str) -> String {
        if text.trim_start().starts_with(['{', '[']) {
            self.replace_json(text)
        } else {
            self.replace_words(&without_checksum(text))
        }
    }

    /// Replaces a text that should be JSON. If the text is no JSON, neither is the replacement.
    pub(super) fn replace_json(&self, text: &str) -> String {
        let Ok(json) = serde_json::from_str::<Value>(text) else { return self.replace_words(text) };
        let json = self.replace_value(&json);
        let lines = || indent_json(&json, text.len().saturating_mul(2));
        let written = if text.contains('\n') { lines() } else { None };
        written.unwrap_or_else(|| json.to_string())
    }

    /// Each piece of the replacement depends on all earlier pieces.
    pub(super) fn replace_words(&self, text: &str) -> String {
        let letters: Vec<char> = text.chars().collect();
        let mut made = String::with_capacity(text.len());
        let mut before = 0;
        for piece in letters.chunks(PIECE_CHARS) {
            before = self.keys.hash_one((before, piece));
            self.replace_piece(before, piece, &mut made);
        }
        made
    }

    fn replace_piece(&self, seed: u64, piece: &[char], made: &mut String) {
        let own = TextGenerator::new(1.0).text(seed, u64::try_from(piece.len() / 3 + 8).unwrap_or(8));
        let mut own = own.chars();
        for (at, letter) in piece.iter().enumerate() {
            let wide = letter.len_utf8().checked_sub(2).and_then(|size| WIDE_LETTERS.get(size));
            made.push(match wide {
                Some(all) => pick_letter(all, self.keys.hash_one((seed, at))),
                None => own.next().unwrap_or(' '),
            });
        }
    }

    /// Replaces tokens by as many of the first thousand, which every vocabulary has. Each replacement depends
    /// on all earlier tokens: lists keep common beginnings, and token frequencies reveal nothing.
    pub(super) fn replace_tokens(&self, items: &[Value]) -> Value {
        let mut before = 0;
        let next = |item: &Value| {
            before = self.keys.hash_one((before, item.as_u64()));
            json!(before % 1000 + FIRST_TOKEN)
        };
        items.iter().map(next).collect()
    }

    pub(super) fn replace_token(&self, item: &Value) -> Value {
        json!(self.keys.hash_one(("token", item.as_u64())) % 1000 + FIRST_TOKEN)
    }

    /// Replaces a name by letters, digits and `_`, of about the same length.
    pub(super) fn replace_name(&self, name: &str) -> String {
        let seed = self.keys.hash_one(("name", name));
        let length = name.chars().count().clamp(MIN_NAME_CHARS, MAX_ID_CHARS);
        let words =
            TextGenerator::new(1.0).text(seed, u64::try_from(length / 3 + 2).unwrap_or(2)).replace(' ', "_");
        let own: String = words.chars().take(length - 3).collect();
        // Keeps names distinct whose first words are equal.
        own + &self.replace_id("abc", seed)
    }

    /// `salt` is a further input of the hash.
    pub(super) fn replace_id(&self, id: &str, salt: u64) -> String {
        let seed = self.keys.hash_one((id, salt));
        let letters = id.chars().take(MAX_ID_CHARS).enumerate();
        letters
            .map(|(at, _)| {
                pick_letter("abcdefghijklmnopqrstuvwxyz0123456789", self.keys.hash_one((seed, at)))
            })
            .collect()
    }

    /// Replaces a value by one with as many digits, letters and items.
    pub(super) fn replace_value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.replace_words(text)),
            Value::Number(number) => self.replace_number(&number.to_string()),
            Value::Array(items) => items.iter().map(|item| self.replace_value(item)).collect(),
            Value::Object(fields) => {
                let made =
                    fields.iter().map(|(name, value)| (self.replace_name(name), self.replace_value(value)));
                Value::Object(made.collect::<Map<_, _>>())
            }
            Value::Bool(_) | Value::Null => value.clone(),
        }
    }

    pub(super) fn replace_number(&self, number: &str) -> Value {
        // The exponent stays, so that the text remains a number.
        let (digits, exponent) = number.split_at(number.find(['e', 'E']).unwrap_or(number.len()));
        let other = |(at, letter): (usize, char)| match letter {
            '0'..='9' => pick_letter("123456789", self.keys.hash_one((number, at))),
            sign => sign,
        };
        let made: String = digits.chars().enumerate().map(other).collect();
        serde_json::from_str(&(made + exponent)).unwrap_or_else(|_| json!(1))
    }
}

/// Returns `None` above `most` bytes: indentation can make a small, deep text a hundred times larger.
fn indent_json(json: &Value, most: usize) -> Option<String> {
    let mut short = BoundedBuffer { bytes: Vec::new(), max_bytes: most };
    serde_json::to_writer_pretty(&mut short, json).ok()?;
    String::from_utf8(short.bytes).ok()
}

struct BoundedBuffer {
    bytes: Vec<u8>,
    max_bytes: usize,
}

impl io::Write for BoundedBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len().saturating_add(bytes.len()) > self.max_bytes {
            return Err(io::Error::other("too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Removes the checksum with which Claude Code begins each request (`cch=a5145;`). llama-server removes it to
/// keep its cache (`normalize_anthropic_billing_header` in `server-chat.cpp`), but would not find it in a
/// replaced text.
fn without_checksum(text: &str) -> Cow<'_, str> {
    let value = || {
        let rest = text.strip_prefix(BILLING_PREFIX)?;
        let at = BILLING_PREFIX.len() + rest.find("cch=")? + 4;
        let before = text.get(..at)?;
        let after = text.get(at + 5..)?;
        after.starts_with(';').then(|| Cow::Owned(format!("{before}fffff{after}")))
    };
    value().unwrap_or(Cow::Borrowed(text))
}

fn pick_letter(all: &str, seed: u64) -> char {
    let count = u64::try_from(all.chars().count()).unwrap_or(1).max(1);
    all.chars().nth(usize::try_from(seed % count).unwrap_or(0)).unwrap_or('a')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_begin_alike_still_do_and_are_as_long_in_letters_and_bytes() {
        let made = ReplacementMaker::default();
        let long = "a conversation that goes on and on, and is sent whole every time ".repeat(4);
        let (one, other) = (made.replace_text(&long), made.replace_text(&format!("{long}one more turn")));
        assert_eq!(one.len(), long.len());
        assert_eq!(one[..PIECE_CHARS * 4], other[..PIECE_CHARS * 4]);
        assert_ne!(one, long);
        for text in ["Привет, мир", "你好世界", "a😀b", "", " \n\t"] {
            let other = made.replace_text(text);
            assert_eq!((other.chars().count(), other.len()), (text.chars().count(), text.len()), "{other}");
        }
    }

    #[test]
    fn json_in_a_text_stays_json_with_the_same_names_everywhere() {
        let made = ReplacementMaker::default();
        let text =
            made.replace_text(r#"{"qcity": "Paris", "qdays": [1, 22.5, -3], "sure": true, "qcity2": null}"#);
        let value: Value = serde_json::from_str(&text).unwrap();
        let city = value[made.replace_name("qcity")].as_str().unwrap();
        assert_eq!((city.len(), city), (5, made.replace_words("Paris").as_str()));
        let days = value[made.replace_name("qdays")].as_array().unwrap();
        assert!(days[0].as_u64().unwrap() < 10 && days[2].as_i64().unwrap() < 0, "{text}");
        assert!((10.0..100.0).contains(&days[1].as_f64().unwrap()), "{text}");
        for gone in ["qcity", "Paris", "qdays"] {
            assert!(!text.contains(gone), "{gone}: {text}");
        }
        let lines = made.replace_text("{\n  \"qcity\": \"Paris\"\n}");
        assert_eq!(lines.lines().count(), 3, "what is written in lines is written in lines: {lines}");
        assert_eq!(made.replace_text("{broken").len(), 7);
    }

    #[test]
    fn json_in_a_text_stays_about_as_long_however_deep_it_is() {
        let made = ReplacementMaker::default();
        let deep = format!("{}{}1{}\n", "[".repeat(120), "1,".repeat(10_000), "]".repeat(120));
        let text = made.replace_text(&deep);
        assert!(text.len() <= deep.len() * 2, "{} of {}", text.len(), deep.len());
        assert!(serde_json::from_str::<Value>(&text).is_ok());
    }

    #[test]
    fn what_a_server_evens_out_makes_no_difference() {
        let made = ReplacementMaker::default();
        let text =
            |sum: &str| made.replace_text(&format!("{BILLING_PREFIX} cc_version=2.1; cch={sum}; and so on"));
        assert_eq!(text("a5145"), text("00b7f"));
        assert_ne!(text("a5145x"), text("00b7fx"), "another length is none of these");
        for odd in ["", " cch=", " cch=a51", " cch=ф5145;", " cch=aффф"] {
            assert_eq!(without_checksum(&format!("{BILLING_PREFIX}{odd}")), format!("{BILLING_PREFIX}{odd}"));
        }
    }

    #[test]
    fn names_are_told_apart_and_identifiers_keep_their_length() {
        let made = ReplacementMaker::default();
        let all: std::collections::BTreeSet<String> =
            (0..5000).map(|n| made.replace_name(&n.to_string())).collect();
        assert!(all.len() > 4950, "{}", all.len());
        assert_eq!(made.replace_name("get_current_weather").len(), 19);
        let id = made.replace_id("call_0123", 0);
        assert!(id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()), "{id}");
        assert_ne!(made.replace_id("call_0124", 0), id);
        for number in ["1e300", "-0.5", "18446744073709551615", "0"] {
            assert!(made.replace_number(number).is_number(), "{number}");
        }
    }
}
