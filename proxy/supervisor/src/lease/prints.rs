//! Hashes of a request's prompt. They identify its conversation and reveal nothing of its text.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Bytes of a text, or members of a list, per hash.
const BLOCK_SIZE: usize = 256;

/// Leading messages that identify a conversation: a system prompt, a question and an answer. Fewer may be
/// common to many conversations.
const MIN_SHARED_MESSAGES: usize = 3;

/// Hashes of a prompt, each from its beginning to the end of one message or block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PromptHashes {
    all: Vec<u64>,
    /// True if the hashes end at messages; a later request may then edit the last message.
    messages: bool,
}

impl PromptHashes {
    /// Returns `None` for an unknown form, or if the request disables the cache or selects its own adapters.
    pub(crate) fn from_body(body: &[u8]) -> Option<Self> {
        let body: PromptBody = serde_json::from_slice(body).ok()?;
        if body.cache_prompt == Some(false) || body.lora.is_some() {
            return None;
        }
        let messages = body.messages.is_some();
        let all = body.messages.or(body.prompt)?.0;
        (!all.is_empty()).then_some(Self { all, messages })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.all.len() * size_of::<u64>()
    }

    /// True if this request continues or repeats the other's conversation.
    pub(crate) fn continues(&self, other: &Self) -> bool {
        let begins = |with: &[u64]| !with.is_empty() && self.all.starts_with(with);
        let but_last = other.all.split_last().map_or(&[][..], |(_, rest)| rest);
        self.messages == other.messages
            && (begins(&other.all)
                || (self.messages && but_last.len() >= MIN_SHARED_MESSAGES && begins(but_last)))
    }

    /// True if this request contains the other's whole prompt, unedited.
    pub(crate) fn contains_prompt(&self, other: &Self) -> bool {
        self.messages == other.messages && !other.all.is_empty() && self.all.starts_with(&other.all)
    }
}

#[derive(Deserialize)]
struct PromptBody {
    messages: Option<PromptBlocks>,
    prompt: Option<PromptBlocks>,
    cache_prompt: Option<bool>,
    lora: Option<IgnoredAny>,
}

/// Hashes of a list's members or a text's blocks.
struct PromptBlocks(Vec<u64>);

impl<'de> Deserialize<'de> for PromptBlocks {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Of;
        impl<'de> Visitor<'de> for Of {
            type Value = PromptBlocks;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a prompt")
            }

            fn visit_str<E>(self, text: &str) -> Result<PromptBlocks, E> {
                let mut hasher = DefaultHasher::new();
                let (whole, _) = text.as_bytes().as_chunks::<BLOCK_SIZE>();
                Ok(PromptBlocks(whole.iter().map(|block| hash_step(&mut hasher, block.as_slice())).collect()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PromptBlocks, A::Error> {
                let mut hasher = DefaultHasher::new();
                let mut all = Vec::new();
                let mut numbers = 0;
                let mut newest = 0;
                while let Some(JsonHash(print, is_number)) = list.next_element()? {
                    newest = hash_step(&mut hasher, print);
                    // A list of numbers is a prompt of many tokens: one hash per block. Other lists have few
                    // members.
                    numbers = if is_number { numbers + 1 } else { 0 };
                    if numbers % BLOCK_SIZE == 0 {
                        all.push(newest);
                    }
                }
                if all.is_empty() && numbers > 0 {
                    all.push(newest);
                }
                Ok(PromptBlocks(all))
            }
        }
        from.deserialize_any(Of)
    }
}

fn hash_step(hasher: &mut DefaultHasher, what: impl Hash) -> u64 {
    what.hash(hasher);
    hasher.finish()
}

/// Hash of a JSON value, and true for a number.
struct JsonHash(u64, bool);

impl<'de> Deserialize<'de> for JsonHash {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Of;
        impl<'de> Visitor<'de> for Of {
            type Value = JsonHash;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }

            fn visit_bool<E>(self, value: bool) -> Result<JsonHash, E> {
                Ok(JsonHash(hash_value(value), false))
            }

            fn visit_i64<E>(self, value: i64) -> Result<JsonHash, E> {
                Ok(JsonHash(hash_value(value), true))
            }

            fn visit_u64<E>(self, value: u64) -> Result<JsonHash, E> {
                Ok(JsonHash(hash_value(value), true))
            }

            fn visit_f64<E>(self, value: f64) -> Result<JsonHash, E> {
                Ok(JsonHash(hash_value(value.to_bits()), true))
            }

            fn visit_str<E>(self, value: &str) -> Result<JsonHash, E> {
                Ok(JsonHash(hash_value(value), false))
            }

            fn visit_unit<E>(self) -> Result<JsonHash, E> {
                Ok(JsonHash(hash_value(()), false))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<JsonHash, A::Error> {
                let mut hasher = DefaultHasher::new();
                b'['.hash(&mut hasher);
                while let Some(JsonHash(print, _)) = list.next_element()? {
                    print.hash(&mut hasher);
                }
                Ok(JsonHash(hasher.finish(), false))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonHash, A::Error> {
                let mut hasher = DefaultHasher::new();
                b'{'.hash(&mut hasher);
                while let Some((JsonHash(name, _), JsonHash(value, _))) = map.next_entry()? {
                    (name, value).hash(&mut hasher);
                }
                Ok(JsonHash(hasher.finish(), false))
            }
        }
        from.deserialize_any(Of)
    }
}

fn hash_value(what: impl Hash) -> u64 {
    hash_step(&mut DefaultHasher::new(), what)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(body: &Value) -> Option<PromptHashes> {
        PromptHashes::from_body(body.to_string().as_bytes())
    }

    #[test]
    fn what_goes_on_begins_with_what_was() {
        let say = |texts: &[&str]| json!({ "messages": texts }).clone();
        let pairs = [
            (say(&["s", "a"]), say(&["s", "a", "b", "c"]), true),
            (say(&["s", "a"]), say(&["s", "a"]), true),
            (say(&["s", "a"]), say(&["s", "b"]), false),
            (say(&["s", "a", "b", "c"]), say(&["s", "a", "b", "d"]), true),
            (say(&["s", "a", "b", "c"]), say(&["s", "a"]), false),
            (say(&["a", "b"]), say(&["ab"]), false),
            (json!({ "prompt": "x".repeat(600) }), json!({ "prompt": "x".repeat(600) + "y" }), true),
            (json!({ "prompt": "x".repeat(600) }), json!({ "prompt": "y".repeat(600) }), false),
            (json!({ "prompt": vec![7; 600] }), json!({ "prompt": vec![7; 700] }), true),
            (json!({ "prompt": vec![7; 20] }), json!({ "prompt": vec![7; 20] }), true),
            (json!({ "prompt": "x".repeat(600) }), say(&["x"]), false),
        ];
        for (old, new, expected) in pairs {
            let (old, new) = (of(&old).unwrap(), of(&new).unwrap());
            assert_eq!(new.continues(&old), expected, "{old:?} {new:?}");
        }
        assert!(!PromptHashes::default().continues(&PromptHashes::default()), "nothing is known of either");
    }

    #[test]
    fn what_wants_no_cache_or_adapters_of_its_own_or_has_no_prompt_is_not_kept() {
        for body in [
            json!({ "messages": ["a"], "cache_prompt": false }),
            json!({ "messages": ["a"], "lora": [{ "id": 0, "scale": 0.5 }] }),
            json!({ "input": "a" }),
            json!({ "messages": [] }),
            json!({ "prompt": 7 }),
            json!([1]),
        ] {
            assert_eq!(of(&body), None, "{body}");
        }
        assert!(
            of(&json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "n": null }] }] }))
                .is_some()
        );
    }
}
