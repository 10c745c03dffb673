//! Extracts the texts of a prompt, without media: their base64 text says nothing about their tokens.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Maximum text that is counted exactly. A longer text exceeds any context, so its upper bound is enough.
pub(crate) const MAX_TEXT_BYTES: usize = 8 << 20;

/// Members that hold the prompt, over all routes.
const PROMPT_MEMBERS: [&str; 12] = [
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

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PromptTexts {
    pub(crate) text: String,
    /// Number of tokens that the request gives as ids.
    pub(crate) tokens: u64,
}

impl PromptTexts {
    /// Returns `None` if invalid or too long. Builds no values: they would take many times the body.
    pub(crate) fn from_body(body: &[u8]) -> Option<Self> {
        let mut texts = Self::default();
        let mut reader = serde_json::Deserializer::from_slice(body);
        PromptMembers { texts: &mut texts }.deserialize(&mut reader).ok()?;
        reader.end().ok()?;
        (texts.text.len() <= MAX_TEXT_BYTES).then_some(texts)
    }

    fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.text.push('\n');
    }
}

struct PromptMembers<'t> {
    texts: &'t mut PromptTexts,
}

impl<'de> DeserializeSeed<'de> for PromptMembers<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for PromptMembers<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        while let Some(name) = members.next_key::<String>()? {
            if PROMPT_MEMBERS.contains(&name.as_str()) {
                members.next_value_seed(PromptPart { texts: &mut *self.texts, keys: name == "tools" })?;
            } else {
                members.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

/// Visitor of a part of a prompt: adds its texts and numbers.
struct PromptPart<'t> {
    texts: &'t mut PromptTexts,
    /// True if names of members count as text, too.
    keys: bool,
}

impl<'de> DeserializeSeed<'de> for PromptPart<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for PromptPart<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        self.texts.tokens += 1;
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        self.texts.tokens += 1;
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        self.texts.tokens += 1;
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.texts.push(text);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(PromptPart { texts: &mut *self.texts, keys: self.keys })?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        while let Some(name) = members.next_key::<String>()? {
            if self.keys {
                self.texts.push(&name);
            }
            let is_media = matches!(name.as_str(), "data" | "url" | "image_url" | "input_audio" | "source");
            if is_media && !self.keys {
                members.next_value::<IgnoredAny>()?;
            } else {
                members.next_value_seed(PromptPart { texts: &mut *self.texts, keys: self.keys })?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn texts(body: &Value) -> (String, u64) {
        let texts = PromptTexts::from_body(body.to_string().as_bytes()).unwrap();
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
                "be brief|user|text|see|image_url|input_audio|image|",
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
        assert_eq!(PromptTexts::from_body(b"{\"prompt\":"), None);
        let long = json!({"prompt": "x".repeat(MAX_TEXT_BYTES + 1)});
        assert_eq!(PromptTexts::from_body(long.to_string().as_bytes()), None);
    }
}
