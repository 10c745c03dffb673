//! Identifies a conversation across its turns, for clients and load balancers.
//!
//! ```text
//!   X-Warden-Ask: conversation    --> X-Warden-Conversation: 16 digits   keyed hash of its beginning
//!   X-Warden-Conversation: WORD   --> the same word                      for a balancer that routes by it
//!   neither                       --> nothing, and nothing is computed
//! ```
//!
//! A load balancer cannot read bodies. The identifier lets it send the next turn to the instance whose prompt
//! cache is warm. The identifier reveals no text: even a guess cannot be verified without the key.

use std::hash::{DefaultHasher, Hash, Hasher};

use bytes::Bytes;
use http::Method;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::state::HttpExchange;
use crate::body::{BodyIntake, FingerprintKey, MAX_TEXT_BYTES};
use crate::protocol::CONVERSATION;
use crate::refusal::RequestRefusal;

/// Header by which a client requests the identifier of its conversation.
const ASK_HEADER: HeaderName = HeaderName::from_static("x-warden-ask");

/// Longest identifier accepted from a client, in bytes.
const MAX_ID_BYTES: usize = 64;

/// Identifier that a client requests or gives for its conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ConversationHint {
    None,
    Given(HeaderValue),
    Computed,
}

/// Removes both headers, which no backend needs. Ignores an identifier unfit as a routing key.
pub(super) fn conversation_hint(headers: &mut HeaderMap) -> ConversationHint {
    let given = headers.remove(CONVERSATION);
    let ask = headers.remove(ASK_HEADER);
    let is_fit = |word: &HeaderValue| {
        let bytes = word.as_bytes();
        (1..=MAX_ID_BYTES).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic)
    };
    match (given.filter(is_fit), ask) {
        (Some(word), _) => ConversationHint::Given(word),
        (None, Some(ask)) if ask.as_bytes().eq_ignore_ascii_case(b"conversation") => {
            ConversationHint::Computed
        }
        _ => ConversationHint::None,
    }
}

/// Returns the identifier. To compute one, reads the whole body, if the budget has room for it.
pub(super) async fn conversation_id(
    exchange: &HttpExchange,
    wish: ConversationHint,
    intake: &mut BodyIntake,
) -> Result<Option<HeaderValue>, RequestRefusal> {
    match wish {
        ConversationHint::None => Ok(None),
        ConversationHint::Given(word) => Ok(Some(word)),
        ConversationHint::Computed if !exchange.route.generates => Ok(None),
        ConversationHint::Computed => {
            let most = exchange.shared.config.upstream.replay_bytes.0;
            if !intake.take_all().await? || !intake.is_whole() || intake.len() > most {
                return Ok(None);
            }
            Ok(intake.json().and_then(|body| keyed_hash(&exchange.shared.prints, &body)))
        }
    }
}

/// Returns the conversation key: a hash of the client's identifier, or of the conversation's beginning. `None`
/// if the body has no messages, has not arrived, or is too long.
pub(super) fn conversation_key(exchange: &HttpExchange, intake: &BodyIntake) -> Option<u64> {
    let mut hasher = DefaultHasher::new();
    if let Some(word) = &exchange.conversation {
        word.hash(&mut hasher);
        return Some(hasher.finish());
    }
    let body = short_json(intake)?;
    visit_beginning(&body, |text| text.hash(&mut hasher)).then(|| hasher.finish())
}

/// Returns true if a sound answer may have no text: the request allows one token at most, or has stop words. An
/// answer to another body may too, but not to many requests.
pub(super) fn may_be_empty(intake: &BodyIntake) -> bool {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct AnswerLimits<'a> {
        #[serde(borrow)]
        stop: Option<&'a RawValue>,
        #[serde(borrow)]
        stop_sequences: Option<&'a RawValue>,
        #[serde(borrow)]
        max_tokens: Option<&'a RawValue>,
        #[serde(borrow)]
        max_completion_tokens: Option<&'a RawValue>,
        #[serde(borrow)]
        n_predict: Option<&'a RawValue>,
    }
    let Some(body) = short_json(intake) else { return false };
    let limits = serde_json::from_slice::<AnswerLimits<'_>>(&body).unwrap_or_default();
    let tokens = [limits.max_tokens, limits.max_completion_tokens, limits.n_predict].into_iter().flatten();
    let allows_one =
        |value: &RawValue| value.get().parse().is_ok_and(|most: f64| (0.0..=1.0).contains(&most));
    let stops = [limits.stop, limits.stop_sequences].into_iter().flatten();
    let has_words = |value: &RawValue| !matches!(value.get(), "null" | "[]" | "\"\"");
    tokens.map(allows_one).chain(stops.map(has_words)).any(|empties| empties)
}

/// Returns a JSON body that has arrived as a whole; `None` if it is too long to be read for this.
fn short_json(intake: &BodyIntake) -> Option<Bytes> {
    if intake.len() > MAX_TEXT_BYTES as u64 { None } else { intake.json() }
}

/// Computes 64 bits of a hash with a key that only this process has.
fn keyed_hash(key: &FingerprintKey, body: &[u8]) -> Option<HeaderValue> {
    // No request has the path `conversation`, so the hash never equals a request's fingerprint.
    let mut printer = key.begin(&Method::POST, "conversation");
    let _messages = visit_beginning(body, |text| {
        printer.add(&(text.len() as u64).to_le_bytes());
        printer.add(text);
    });
    let digits = hex::encode(&printer.finish().0.to_be_bytes()[..8]);
    HeaderValue::try_from(digits).ok()
}

/// Computes the hash that assigns a conversation to a canary. The hash is never shown, so it needs no key.
pub(super) fn conversation_hash(body: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    let _messages = visit_beginning(body, |text| text.hash(&mut hasher));
    hasher.finish()
}

/// Calls `each` with the parts that stay the same over all turns: the system prompt, and the messages up to
/// the first user message. A body without messages is one part. Returns true if the body has messages.
fn visit_beginning(body: &[u8], mut each: impl FnMut(&[u8])) -> bool {
    #[derive(Deserialize)]
    struct ConversationBody<'a> {
        #[serde(borrow)]
        system: Option<&'a RawValue>,
        #[serde(borrow)]
        instructions: Option<&'a RawValue>,
        #[serde(borrow)]
        messages: Option<Vec<&'a RawValue>>,
        #[serde(borrow)]
        input: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct ConversationMessage<'a> {
        #[serde(borrow)]
        role: Option<&'a RawValue>,
    }
    let mut as_whole = || {
        each(body);
        false
    };
    let is_users = |message: &&RawValue| {
        let role = serde_json::from_str::<ConversationMessage<'_>>(message.get())
            .ok()
            .and_then(|message| message.role);
        role.is_some_and(|role| role.get() == "\"user\"")
    };
    let Ok(parsed) = serde_json::from_slice::<ConversationBody<'_>>(body) else {
        return as_whole();
    };
    // The Responses API names the list of messages `input`, which may also be a single text.
    let listed = parsed.input.and_then(|input| serde_json::from_str::<Vec<&RawValue>>(input.get()).ok());
    let Some(messages) = parsed.messages.or(listed) else { return as_whole() };
    let first = messages.iter().position(is_users).map_or(messages.len(), |first| first + 1);
    let texts = messages[..first].iter().map(|message| message.get());
    let around = [parsed.system, parsed.instructions].into_iter().flatten().map(RawValue::get);
    around.chain(texts).for_each(|text| each(text.as_bytes()));
    true
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(body: &Value) -> u64 {
        conversation_hash(body.to_string().as_bytes())
    }

    fn said(role: &str, text: &str) -> Value {
        json!({ "role": role, "content": text })
    }

    #[test]
    fn a_conversation_is_known_at_each_of_its_turns() {
        let (system, first) = (said("system", "be brief"), said("user", "a"));
        let begins = of(&json!({ "messages": [system, first], "temperature": 0 }));
        let goes_on = json!({ "messages": [system, first, said("assistant", "b"), said("user", "c")] });
        assert_eq!(begins, of(&goes_on));
        assert_ne!(begins, of(&json!({ "messages": [system, said("user", "b")] })));
        assert_ne!(begins, of(&json!({ "messages": [said("system", "be long"), first] })));
        let responses =
            |instructions: &str, input: Value| of(&json!({ "instructions": instructions, "input": input }));
        assert_eq!(
            responses("x", json!([first])),
            responses("x", json!([first, said("assistant", "b"), said("user", "c")]))
        );
        assert_ne!(responses("x", json!([first])), responses("y", json!([first])));
        assert_ne!(responses("x", json!("a")), responses("x", json!("b")));
        assert_ne!(of(&json!({ "prompt": "a" })), of(&json!({ "prompt": "b" })));
        assert_ne!(conversation_hash(b"no json"), conversation_hash(b"other"));
    }

    #[test]
    fn its_word_is_short_the_same_at_each_turn_and_another_one_under_another_key() {
        let key = FingerprintKey::new();
        let word = |key: &FingerprintKey, body: &Value| {
            keyed_hash(key, body.to_string().as_bytes()).unwrap().to_str().unwrap().to_owned()
        };
        let first = json!({ "messages": [said("user", "a secret")] });
        let next =
            json!({ "messages": [said("user", "a secret"), said("assistant", "b"), said("user", "c")] });
        assert_eq!(word(&key, &first), word(&key, &next));
        assert_eq!(word(&key, &first).len(), 16);
        assert_ne!(word(&key, &first), word(&key, &json!({ "messages": [said("user", "a secre")] })));
        assert_ne!(word(&key, &first), word(&FingerprintKey::new(), &first));
        let split = |one: &str, two: &str| json!({ "messages": [said("system", one), said("user", two)] });
        assert_ne!(word(&key, &split("ab", "c")), word(&key, &split("a", "bc")));
    }

    #[test]
    fn a_wish_is_taken_out_of_the_head_and_a_word_that_fits_no_table_is_none() {
        let of = |fields: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in fields {
                headers.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
            }
            let wish = conversation_hint(&mut headers);
            assert!(headers.is_empty(), "{headers:?}");
            wish
        };
        let word = |text: &'static str| ConversationHint::Given(HeaderValue::from_static(text));
        assert_eq!(of(&[]), ConversationHint::None);
        assert_eq!(of(&[("x-warden-ask", "Conversation")]), ConversationHint::Computed);
        assert_eq!(of(&[("x-warden-ask", "the time")]), ConversationHint::None);
        assert_eq!(of(&[("x-warden-conversation", "abc"), ("x-warden-ask", "conversation")]), word("abc"));
        for unfit in ["", "a b", "\u{e4}", &"x".repeat(65)] {
            assert_eq!(of(&[("x-warden-conversation", unfit)]), ConversationHint::None, "{unfit:?}");
            let both = [("x-warden-conversation", unfit), ("x-warden-ask", "conversation")];
            assert_eq!(of(&both), ConversationHint::Computed, "{unfit:?}");
        }
    }
}
