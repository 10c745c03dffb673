//! How many tokens a request's prompt has, as far as admission wants to know: nothing where it is off, an upper bound from
//! the size of the body where that fits in any case, and the backend's own count only where it may not fit.
//!
//! ```text
//!   [ admission on? ] --no--> not looked at
//!        | yes
//!   bytes of text --> [ fits for sure? ] --yes--> the bound
//!                          | no
//!                     body taken in whole --> texts --> `/tokenize` of the backend --> its count
//!                                                            | no answer in time, or too large
//!                                                            v
//!                                                        the bound
//! ```
//!
//! Images and recordings are no text: their base64 says nothing about tokens. The count leaves out what a chat template
//! adds, some tokens per message, which is far below the reserve that admission keeps.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, StatusCode, Uri};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use tokio::time::timeout;
use warden_policies::ModelName;
use warden_policies::dispatch::LeaseKind;
use warden_policies::quarantine::{Fingerprint, Standing};
use warden_supervisor::{Size, Weighed};

use crate::attempts::connect;
use crate::errors::Refusal;
use crate::exchange::Exchange;
use crate::intake::Intake;
use crate::link::SendError;
use crate::request_body::{RequestBody, Sent};

/// Texts beyond this are not sent to be counted: they are longer than any context, and the bound says enough.
const TEXT: usize = 8 << 20;

/// A tokenizer takes about a second for that many bytes; a backend that takes longer is busy with something else.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bytes of an answer per byte of text: a token has at most six digits and a comma, and a byte is at most one token.
const ANSWER_PER_BYTE: usize = 8;

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

#[derive(Deserialize)]
struct Counted {
    tokens: Vec<IgnoredAny>,
}

impl Exchange {
    /// Tokens of the prompt, if somebody wants to know. May take in the rest of the body.
    pub(crate) async fn demand(
        &self,
        model: &ModelName,
        headers: &HeaderMap,
        intake: &mut Intake,
    ) -> Result<Option<u64>, Refusal> {
        let backends = &self.shared.backends;
        if self.route.kind != LeaseKind::Slot {
            return Ok(None);
        }
        for last in [false, true] {
            let Some(bytes) = intake.text_bytes() else { return Ok(None) };
            match backends.weigh(model, Size::Bytes(bytes)) {
                Weighed::Unasked => return Ok(None),
                Weighed::Fits { tokens } if last || intake.is_measured() => return Ok(Some(tokens)),
                Weighed::Unclear { tokens } if last || intake.is_whole() => {
                    // Taken apart, a body is many times as large: one that is too long to be counted stays whole.
                    // And who is suspected of killing its server is tried alone first: counting runs beside others.
                    let print = intake.sent.print();
                    let suspect =
                        print.is_some_and(|print| backends.standing(model, print) != Standing::Clear);
                    let countable = bytes <= TEXT as u64 && !suspect;
                    let counted = match countable.then(|| intake.texts()).flatten() {
                        Some(texts) => {
                            // Rare and large: not a part of every request's future.
                            let counting = Box::pin(self.count(model, headers, texts, print));
                            timeout(PATIENCE, counting).await.ok().flatten()
                        }
                        None => None,
                    };
                    return Ok(Some(counted.unwrap_or(tokens)));
                }
                // What is still to come may be an image, or, in chunks, a text of any length.
                Weighed::Fits { .. } | Weighed::Unclear { .. } => {
                    if !intake.take_all().await? {
                        return Ok(None);
                    }
                }
            }
        }
        Ok(None)
    }

    /// The backend's own count of some texts, for the request that they are of. A tokenizer can die of a text as well as a
    /// computation can.
    async fn count(
        &self,
        model: &ModelName,
        headers: &HeaderMap,
        texts: Texts,
        print: Option<Fingerprint>,
    ) -> Option<u64> {
        let right = self.shared.backends.lease(model, LeaseKind::Aux, None).await.ok()?;
        let pool = right.pool(&|| self.shared.new_pool());
        let length = texts.text.len();
        let body = Bytes::from(json!({ "content": texts.text }).to_string());
        let mut request = Request::new(RequestBody::again(VecDeque::from([body]), Arc::new(Sent::default())));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from_static("/tokenize");
        let fields = request.headers_mut();
        fields.insert(HOST, HeaderValue::from_static("localhost"));
        fields.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        for key in [AUTHORIZATION, HeaderName::from_static("x-api-key")] {
            if let Some(value) = headers.get(&key) {
                fields.insert(key, value.clone());
            }
        }
        let mut link = connect(&*right, &pool).await.ok()?;
        let response = match link.send(request).await {
            Ok(response) => response,
            Err(error) => {
                if let (SendError::Sent(_) | SendError::Begun(_), Some(print)) = (error, print) {
                    right.broke(print);
                }
                right.doubt();
                return None;
            }
        };
        if response.status() != StatusCode::OK {
            tracing::debug!(%model, status = %response.status(), "the backend does not count tokens");
            return None;
        }
        let limit = length.saturating_mul(ANSWER_PER_BYTE).saturating_add(1024);
        let answer = link.all(response.into_body(), limit).await?;
        let counted: Counted = serde_json::from_slice(&answer).ok()?;
        Some((counted.tokens.len() as u64).saturating_add(texts.tokens))
    }
}

/// The prompt of a request, as far as it is text.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Texts {
    text: String,
    /// Tokens that the request gives as numbers.
    tokens: u64,
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
