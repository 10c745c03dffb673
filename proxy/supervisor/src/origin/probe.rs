//! Whether an endpoint answers, and what it says of its model.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::time::timeout;

use super::{Origin, Wire};

/// Asked for: each endpoint of the kind has it, and it costs nothing.
const LIST: &str = "/v1/models";

/// Bytes of a list. Those who sell thousands of models need a few megabytes.
const MOST: usize = 16 << 20;

/// Where endpoints put the length of a model's context, in tokens.
const CONTEXTS: [&str; 4] = ["/context_length", "/max_model_len", "/context_window", "/meta/n_ctx"];

/// What an endpoint that answers says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Listed {
    /// Tokens in the context of the model, where that is said.
    pub(crate) n_ctx: Option<u32>,
    /// The endpoint lists models, and the model is not among them.
    pub(crate) is_missing: bool,
}

/// Asks for the list of models.
pub(crate) async fn probe(origin: &Origin, model: &str, limit: Duration) -> Result<Listed, String> {
    let asked = timeout(limit, ask(origin)).await;
    let (status, body) = asked.unwrap_or_else(|_| Err(format!("it does not answer within {limit:?}")))?;
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(if origin.has_key() {
            format!("it refuses the key in `key_file` (status {})", status.as_u16())
        } else {
            format!("it wants a key (status {}): name its file in `key_file`", status.as_u16())
        }),
        status if status.is_server_error() => {
            Err(format!("it answers `GET {LIST}` with status {}", status.as_u16()))
        }
        // It need not have such a list.
        status if !status.is_success() => Ok(Listed::default()),
        _ => Ok(listed(&body, model)),
    }
}

async fn ask(origin: &Origin) -> Result<(StatusCode, Bytes), String> {
    let wire = Wire::connect(origin).await.map_err(|error| format!("cannot connect: {error}"))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(wire)).await.map_err(|error| format!("cannot connect: {error}"))?;
    let mut request = Request::new(Empty::<Bytes>::new());
    *request.uri_mut() = http::Uri::from_static(LIST);
    origin.address(&mut request).map_err(|error| error.to_string())?;
    let answered = async {
        let response = sender.send_request(request).await.map_err(|error| format!("no answer: {error}"))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MOST).collect().await;
        Ok((status, body.map_err(|error| format!("no whole answer: {error}"))?.to_bytes()))
    };
    tokio::pin!(answered);
    tokio::select! {
        biased;
        answer = &mut answered => answer,
        // What it said last may still be on its way to us.
        _ = connection => answered.await,
    }
}

fn listed(body: &[u8], model: &str) -> Listed {
    let list: Value = serde_json::from_slice(body).unwrap_or_default();
    let Some(all) = list["data"].as_array().filter(|all| !all.is_empty()) else { return Listed::default() };
    let Some(entry) = all.iter().find(|entry| entry["id"] == model) else {
        return Listed { n_ctx: None, is_missing: true };
    };
    let said = CONTEXTS.iter().find_map(|place| entry.pointer(place)?.as_u64());
    Listed { n_ctx: said.and_then(|tokens| u32::try_from(tokens).ok()), is_missing: false }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_list_says_how_long_a_context_is_or_that_there_is_no_such_model() {
        let of = |list: Value| listed(list.to_string().as_bytes(), "m");
        let some = |n_ctx, is_missing| Listed { n_ctx, is_missing };
        assert_eq!(of(json!({ "data": [{ "id": "m", "context_length": 8192 }] })), some(Some(8192), false));
        assert_eq!(
            of(json!({ "data": [{ "id": "m", "meta": { "n_ctx": 4096 } }] })),
            some(Some(4096), false)
        );
        assert_eq!(of(json!({ "data": [{ "id": "x" }, { "id": "m" }] })), some(None, false));
        assert_eq!(of(json!({ "data": [{ "id": "x" }] })), some(None, true));
        for unclear in [json!({ "data": [] }), json!([1]), json!("text"), json!({ "data": { "id": "x" } })] {
            assert_eq!(of(unclear), Listed::default());
        }
        assert_eq!(listed(b"<html>", "m"), Listed::default());
    }
}
