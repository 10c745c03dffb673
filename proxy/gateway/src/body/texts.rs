//! The texts of a prompt, taken out of a JSON body. Images and recordings are no text: their base64 says nothing about tokens.

use serde_json::Value;

/// Texts beyond this are not sent to be counted: they are longer than any context, and the bound says enough.
pub(crate) const TEXT: usize = 8 << 20;

/// Where requests carry their prompts, on all routes.
const PROMPTS: [&str; 12] = [
    "messages",
    "prompt",
    "input",
    "system",
    "instructions",
    "tools",
    "content",
    "query",
    "documents",
    "input_prefix",
    "input_suffix",
    "input_extra",
];

/// The prompt of a request, as far as it is text.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Texts {
    pub(crate) text: String,
    /// Tokens that the request gives as numbers.
    pub(crate) tokens: u64,
}

impl Texts {
    /// Of a JSON body; `None` if it is none, or holds too much text.
    pub(crate) fn of(body: &[u8]) -> Option<Self> {
        let body: Value = serde_json::from_slice(body).ok()?;
        let mut texts = Self::default();
        for name in PROMPTS {
            if let Some(value) = body.get(name) {
                texts.add(value, name == "tools");
            }
        }
        (texts.text.len() <= TEXT).then_some(texts)
    }

    fn add(&mut self, value: &Value, keys: bool) {
        match value {
            Value::String(text) => self.push(text),
            Value::Number(_) => self.tokens += 1,
            Value::Array(items) => items.iter().for_each(|item| self.add(item, keys)),
            Value::Object(fields) => {
                for (name, value) in fields {
                    if keys {
                        self.push(name);
                    }
                    // Of an image or a recording.
                    let media =
                        matches!(name.as_str(), "data" | "url" | "image_url" | "input_audio" | "source");
                    if !media || keys {
                        self.add(value, keys);
                    }
                }
            }
            Value::Bool(_) | Value::Null => {}
        }
    }

    fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn texts(body: &Value) -> (String, u64) {
        let texts = Texts::of(body.to_string().as_bytes()).unwrap();
        (texts.text.replace('\n', "|"), texts.tokens)
    }

    #[test]
    fn prompts_are_found_on_every_route_and_media_are_left_out() {
        for (body, text, tokens) in [
            (json!({"prompt": "one two", "n_predict": 5, "grammar": "no"}), "one two|", 0),
            (json!({"prompt": [1, 22, "three"], "model": "m"}), "three|", 2),
            (json!({"input": ["a", "b"]}), "a|b|", 0),
            (
                json!({"system": "be brief", "messages": [{"role": "user", "content": [
                    {"type": "text", "text": "see"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                    {"type": "input_audio", "input_audio": {"data": "AAAA"}},
                    {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
                ]}]}),
                "user|text|see|image_url|input_audio|image|be brief|",
                0,
            ),
            (
                json!({"tools": [{"function": {"parameters": {"url": {"type": "string"}}}}], "messages": []}),
                "function|parameters|url|type|string|",
                0,
            ),
            (json!({"query": "q", "documents": [{"text": "d"}]}), "q|d|", 0),
        ] {
            assert_eq!(texts(&body), (text.to_owned(), tokens), "{body}");
        }
    }

    #[test]
    fn what_is_no_json_or_too_long_is_not_counted() {
        assert_eq!(Texts::of(b"{\"prompt\":"), None);
        let long = json!({"prompt": "x".repeat(TEXT + 1)});
        assert_eq!(Texts::of(long.to_string().as_bytes()), None);
    }
}
