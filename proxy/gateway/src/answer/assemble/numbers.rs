//! Keeps the digits of fractional numbers through a JSON parser: before parsing, the numbers become strings
//! with an unguessable mark; afterwards they become numbers again. Pure.

use crate::body::spelling::StringSpelling;

/// Random mark used for the numbers of one answer.
#[derive(Debug)]
pub(super) struct NumberMask(String);

impl NumberMask {
    pub(super) fn new() -> Self {
        Self(format!("{:032x}:", rand::random::<u128>()))
    }

    /// Replaces the fractional numbers of valid JSON by marked strings.
    pub(super) fn mask_numbers(&self, json: &str) -> String {
        let bytes = json.as_bytes();
        let mut all = String::with_capacity(json.len() + 64);
        let (mut at, mut told) = (0, 0);
        let mut text = StringSpelling::new();
        while at < bytes.len() {
            match bytes[at] {
                b'"' => {
                    text.begin(0);
                    at = text.read(bytes, at + 1).0;
                }
                b'-' | b'0'..=b'9' => {
                    let is_part = |byte: &u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
                    let length = bytes[at..].iter().position(|byte| !is_part(byte));
                    let end = length.map_or(bytes.len(), |length| at + length);
                    if bytes[at..end].iter().any(|byte| matches!(byte, b'.' | b'e' | b'E')) {
                        all.push_str(&json[told..at]);
                        all.push('"');
                        all.push_str(&self.0);
                        all.push_str(&json[at..end]);
                        all.push('"');
                        told = end;
                    }
                    at = end;
                }
                _ => at += 1,
            }
        }
        all.push_str(&json[told..]);
        all
    }

    /// Turns marked strings back into numbers.
    pub(super) fn unmask_numbers(&self, json: &str) -> String {
        let mark = format!("\"{}", self.0);
        let mut all = String::with_capacity(json.len());
        let mut parts = json.split(mark.as_str());
        all.push_str(parts.next().unwrap_or_default());
        for part in parts {
            let (number, rest) = part.split_once('"').unwrap_or((part, ""));
            all.push_str(number);
            all.push_str(rest);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_come_out_as_they_went_in() {
        let veil = NumberMask::new();
        for json in [
            r#"{"a":-1.4600032567977905,"b":[1.0e-05,2,-3],"c":"1.5 \"2.5\" -","d":0.0}"#,
            "1.10",
            "[]",
            r#"{"ü1.5":1e5}"#,
        ] {
            let veiled = veil.mask_numbers(json);
            let value: serde_json::Value = serde_json::from_str(&veiled).unwrap();
            assert_eq!(veil.unmask_numbers(&value.to_string()), json);
        }
    }
}
