//! Determines the number of prompt tokens for admission: none if admission is off; an upper bound from the
//! size of the body if that bound fits; else the backend's own count.
//!
//! ```text
//!   [ admission on? ] --no--> not counted
//!        | yes
//!   bytes of text --> [ fits for sure? ] --yes--> the bound
//!                          | no
//!                     whole body read --> texts --> `/tokenize` of the backend --> its count
//!                                                            | no answer in time, or too large
//!                                                            v
//!                                                        the bound
//! ```
//!
//! Images and recordings do not count as text: the size of their base64 text has no relation to their tokens.
//! The count lacks the few tokens per message that a chat template adds, far less than admission's reserve.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, StatusCode, Uri};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::json;
use tokio::time::timeout;
use warden_policies::dispatch::LeaseKind;
use warden_policies::quarantine::{RequestFingerprint, RequestStanding};
use warden_supervisor::{PromptFacts, PromptFit, PromptSize};

use crate::backend::{
    BackendSearch, LeaseDemand, LeaseMode, RequestBody, UpstreamSendError, close_after_unread_body,
    connect_to_generation,
};
use crate::body::{BodyIntake, MAX_TEXT_BYTES, PromptTexts, SentBody};
use crate::refusal::RequestRefusal;

/// Counting takes about a second for the longest text, so a slower backend is busy.
const COUNT_TIMEOUT: Duration = Duration::from_secs(5);

/// Bytes of the answer per byte of text: at most one token, of six digits and a comma.
const ANSWER_BYTES_PER_BYTE: usize = 8;

#[derive(Deserialize)]
struct TokenizeCount {
    tokens: Vec<IgnoredAny>,
}

/// Returns the number of prompt tokens if admission needs it. May read the rest of the body.
pub(super) async fn prompt_tokens(
    search: &BackendSearch,
    headers: &HeaderMap,
    intake: &mut BodyIntake,
) -> Result<Option<u64>, RequestRefusal> {
    let backends = &search.upstream.backends;
    let model = &search.model;
    if search.kind != LeaseKind::Slot {
        return Ok(None);
    }
    for last in [false, true] {
        let Some(bytes) = intake.text_bytes() else { return Ok(None) };
        match backends.weigh_prompt(model, PromptSize::Bytes(bytes)) {
            PromptFit::NotChecked => return Ok(None),
            PromptFit::Fits { tokens } if last || intake.is_measured() => return Ok(Some(tokens)),
            PromptFit::Unclear { tokens } if last || intake.is_whole() => {
                // A parsed body takes many times its size, so a body that is too long to be counted is not
                // parsed. Nor are a suspect's tokens counted: counting would run next to other requests.
                let print = intake.sent.fingerprint();
                let suspect = print
                    .is_some_and(|print| backends.request_standing(model, print) != RequestStanding::Clear);
                let countable = bytes <= MAX_TEXT_BYTES as u64 && !suspect;
                let counted = match countable.then(|| intake.texts()).flatten() {
                    Some(texts) => {
                        // Boxed because counting is rare, and the future of every request would grow.
                        let counting = Box::pin(count_tokens(search, headers, texts, print));
                        timeout(COUNT_TIMEOUT, counting).await.ok().flatten()
                    }
                    None => None,
                };
                return Ok(Some(counted.unwrap_or(tokens)));
            }
            // The unread rest may be an image or, in a chunked body, a text of any length.
            PromptFit::Fits { .. } | PromptFit::Unclear { .. } => {
                if !intake.take_all().await? {
                    return Ok(None);
                }
            }
        }
    }
    Ok(None)
}

/// Asks the backend to count tokens. If that kills the process, the client's request is blamed.
async fn count_tokens(
    search: &BackendSearch,
    headers: &HeaderMap,
    texts: PromptTexts,
    print: Option<RequestFingerprint>,
) -> Option<u64> {
    let model = &search.model;
    let mode = if search.may_load { LeaseMode::First } else { LeaseMode::IfLoaded };
    let demand = LeaseDemand { kind: LeaseKind::Aux, prompt: PromptFacts::default(), mode };
    let lease = search.upstream.backends.lease(model, demand).await.ok()??;
    let pool = search.upstream.pool(&*lease);
    let length = texts.text.len();
    let body = Bytes::from(json!({ "content": texts.text }).to_string());
    let mut request =
        Request::new(RequestBody::from_held(VecDeque::from([body]), Arc::new(SentBody::default())));
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
    close_after_unread_body(&mut request, lease.server_facts());
    let mut conn = connect_to_generation(&*lease, &pool).await.ok()?;
    let response = match conn.send(request).await {
        Ok(response) => response,
        Err(error) => {
            if let (UpstreamSendError::Sent(_) | UpstreamSendError::Begun(_), Some(print)) = (error, print) {
                lease.report_broken(print);
            }
            lease.doubt();
            return None;
        }
    };
    if response.status() != StatusCode::OK {
        tracing::debug!(%model, status = %response.status(), "the backend does not count tokens");
        return None;
    }
    let limit = length.saturating_mul(ANSWER_BYTES_PER_BYTE).saturating_add(1024);
    let answer = conn.read_all(response.into_body(), limit).await.ok()?;
    let counted: TokenizeCount = serde_json::from_slice(&answer).ok()?;
    Some((counted.tokens.len() as u64).saturating_add(texts.tokens))
}
