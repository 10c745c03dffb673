//! The routes that are ours: health, the list of models, and the question of a browser whether it may call.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    CONTENT_TYPE, HeaderMap, HeaderValue,
};
use serde_json::{Value, json};
use warden_supervisor::{FleetView, ModelView};

/// Headers and body of an answer with status 200.
pub(crate) type Words = (HeaderMap, Bytes);

fn words(body: &Value) -> Words {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json; charset=utf-8"));
    (headers, Bytes::from(body.to_string()))
}

/// `/health`: we can take requests.
pub(crate) fn health() -> Words {
    words(&json!({ "status": "ok" }))
}

/// `/v1/models`: every configured model, whatever its state.
pub(crate) fn models(view: &Arc<FleetView>, created: u64) -> Words {
    let data: Vec<Value> = view.models.iter().map(|model| one(model, created)).collect();
    words(&json!({ "object": "list", "data": data }))
}

/// `/v1/models/{id}`, by name or alias.
pub(crate) fn model(view: &Arc<FleetView>, name: &str, created: u64) -> Option<Words> {
    view.models.iter().find(|model| model.name.as_str() == name).map(|model| words(&one(model, created)))
}

/// As llama-server lists a model, and with its state as llama-server's router does.
fn one(model: &ModelView, created: u64) -> Value {
    let mut entry = json!({
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "llamacpp",
        "aliases": model.aliases,
        "status": { "value": model.state.as_str() },
    });
    if let Some(n_ctx) = model.n_ctx {
        entry["meta"] = json!({ "n_ctx": n_ctx });
    }
    entry
}

/// The answer to a preflight, as llama-server gives it.
pub(crate) fn preflight() -> Words {
    let mut headers = HeaderMap::new();
    headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("*"));
    (headers, Bytes::new())
}
