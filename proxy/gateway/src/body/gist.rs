//! Summary of a JSON value, for rules: a list of ten million numbers becomes "a non-empty list".

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Maximum length of a text that is kept; all keywords of the API are shorter.
const MAX_WORD_BYTES: usize = 32;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ValueGist {
    Null,
    Bool(bool),
    Number(f64),
    /// A text; `None` if it exceeds [`MAX_WORD_BYTES`].
    Text(Option<Box<str>>),
    List {
        is_empty: bool,
    },
    /// An object, reduced to its members `type` and `format`.
    Object {
        kind: Option<Box<ValueGist>>,
        format: Option<Box<ValueGist>>,
    },
}

impl ValueGist {
    /// Returns whether the value switches a feature on: it is not `false`, null, zero or empty.
    pub(crate) fn is_on(&self) -> bool {
        match self {
            Self::Null | Self::Bool(false) => false,
            Self::Number(number) => *number != 0.0,
            Self::List { is_empty } => !is_empty,
            Self::Text(Some(text)) => !text.is_empty(),
            Self::Bool(true) | Self::Text(None) | Self::Object { .. } => true,
        }
    }

    pub(crate) fn is_word(&self, word: &str) -> bool {
        matches!(self, Self::Text(Some(text)) if **text == *word)
    }

    pub(crate) fn kind(&self) -> Option<&Self> {
        match self {
            Self::Object { kind, .. } => kind.as_deref(),
            _ => None,
        }
    }

    pub(crate) fn format(&self) -> Option<&Self> {
        match self {
            Self::Object { format, .. } => format.as_deref(),
            _ => None,
        }
    }
}

struct GistVisitor;

impl<'de> Visitor<'de> for GistVisitor {
    type Value = ValueGist;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<ValueGist, E> {
        Ok(ValueGist::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<ValueGist, E> {
        Ok(ValueGist::Bool(value))
    }

    #[expect(clippy::cast_precision_loss, reason = "only 0 and 1 are told apart from others")]
    fn visit_u64<E>(self, value: u64) -> Result<ValueGist, E> {
        Ok(ValueGist::Number(value as f64))
    }

    #[expect(clippy::cast_precision_loss, reason = "only 0 and 1 are told apart from others")]
    fn visit_i64<E>(self, value: i64) -> Result<ValueGist, E> {
        Ok(ValueGist::Number(value as f64))
    }

    fn visit_f64<E>(self, value: f64) -> Result<ValueGist, E> {
        Ok(ValueGist::Number(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<ValueGist, E> {
        Ok(ValueGist::Text((value.len() <= MAX_WORD_BYTES).then(|| value.into())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<ValueGist, A::Error> {
        let is_empty = items.next_element::<IgnoredAny>()?.is_none();
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(ValueGist::List { is_empty })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<ValueGist, A::Error> {
        let mut kind = None;
        let mut format = None;
        while let Some(name) = members.next_key::<ShortText>()? {
            match name.0.as_deref() {
                // llama-server's parser uses the last of repeated members, too.
                Some("type") => kind = Some(Box::new(members.next_value()?)),
                Some("format") => format = Some(Box::new(members.next_value()?)),
                _ => drop(members.next_value::<IgnoredAny>()?),
            }
        }
        Ok(ValueGist::Object { kind, format })
    }
}

impl<'de> Deserialize<'de> for ValueGist {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(GistVisitor)
    }
}

struct ShortText(Option<Box<str>>);

impl<'de> Deserialize<'de> for ShortText {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match ValueGist::deserialize(from)? {
            ValueGist::Text(word) => Ok(Self(word)),
            _ => Ok(Self(None)),
        }
    }
}

/// Role of the last message of a list; `None` if the message has no role, or the value is no list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LastRole(pub(crate) Option<Box<str>>);

impl<'de> Deserialize<'de> for LastRole {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = <&RawValue>::deserialize(from)?;
        if !value.get().starts_with('[') {
            return Ok(Self(None));
        }
        let mut list = serde_json::Deserializer::from_str(value.get());
        let role = list.deserialize_seq(LastRoleVisitor).map_err(D::Error::custom)?;
        Ok(Self(role))
    }
}

struct LastRoleVisitor;

impl<'de> Visitor<'de> for LastRoleVisitor {
    type Value = Option<Box<str>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of messages")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut messages: A) -> Result<Self::Value, A::Error> {
        let mut last = None;
        while let Some(MessageRole(role)) = messages.next_element()? {
            last = role;
        }
        Ok(last)
    }
}

struct MessageRole(Option<Box<str>>);

impl<'de> Deserialize<'de> for MessageRole {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(MessageRoleVisitor)
    }
}

struct MessageRoleVisitor;

impl<'de> Visitor<'de> for MessageRoleVisitor {
    type Value = MessageRole;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a message")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<MessageRole, A::Error> {
        let mut role = None;
        while let Some(name) = members.next_key::<ShortText>()? {
            if name.0.as_deref() == Some("role") {
                role = members.next_value::<ShortText>()?.0;
            } else {
                members.next_value::<IgnoredAny>()?;
            }
        }
        Ok(MessageRole(role))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gist(json: &str) -> ValueGist {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_value_is_told_by_what_it_asks_for() {
        for off in ["null", "false", "0", "0.0", "-0", "[]", "\"\""] {
            assert!(!gist(off).is_on(), "{off}");
        }
        for on in ["true", "1", "-1", "1e300", "18446744073709551616", "[0]", "[[]]", "\"x\"", "{}"] {
            assert!(gist(on).is_on(), "{on}");
        }
        assert!(gist(&format!("\"{}\"", "x".repeat(100))).is_on());
        assert!(gist("\"au\\u0074o\"").is_word("auto") && !gist("\"none\"").is_word("auto"));
        let object =
            gist(r#"{"x":[{"type":1}],"type":"json_object","format":{"type":"text"},"t\u0079pe":"any"}"#);
        assert!(object.kind().is_some_and(|kind| kind.is_word("any")), "{object:?}");
        assert!(
            object.format().and_then(ValueGist::kind).is_some_and(|kind| kind.is_word("text")),
            "{object:?}"
        );
        assert_eq!(gist("{}").kind(), None);
        assert!(serde_json::from_str::<ValueGist>("[1,").is_err());
    }

    #[test]
    fn the_last_message_says_its_role_and_what_is_no_list_has_none() {
        let last =
            |json: &str| serde_json::from_str::<LastRole>(json).ok().map(|last| last.0.map(String::from));
        for (json, role) in [
            (r#"[{"role":"user"},{"content":[1,{"role":"x"}],"role":"assistant"}]"#, Some("assistant")),
            (r#"[{"role":"assistant"},{}]"#, None),
            (r#"[{"role":null}]"#, None),
            ("[]", None),
            (r#""text""#, None),
            ("7", None),
            (r#"{"role":"assistant"}"#, None),
            ("null", None),
        ] {
            assert_eq!(last(json), Some(role.map(str::to_owned)), "{json}");
        }
        assert_eq!(last("[1]"), None, "no list of messages");
    }
}
