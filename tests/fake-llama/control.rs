//! fake-llama's own routes: `/fake/state`, `/fake/script`, `/fake/echo`. They work in every phase.

use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::engine::Engine;
use crate::reply::{Reply, error, json_reply, ok};

pub(crate) fn answer(engine: &Engine, what: &str, head: &Parts, body: &[u8]) -> Reply {
    match what {
        "state" => ok(&state(engine)),
        "script" if head.method == Method::POST => {
            let patched = serde_json::from_slice::<Value>(body).map_err(|wrong| wrong.to_string());
            match patched.and_then(|patch| engine.script().merged(patch)) {
                Ok(script) => {
                    engine.set_script(script);
                    ok(&state(engine))
                }
                Err(wrong) => error(400, "invalid_request_error", &wrong),
            }
        }
        _ if what == "echo" || what.starts_with("echo/") => echo(head, body),
        _ => error(404, "not_found_error", "File Not Found"),
    }
}

fn state(engine: &Engine) -> Value {
    json!({
        "pid": std::process::id(), "arrivals": engine.arrivals(), "busy": engine.slots().iter().flatten().count(),
        "waiting": engine.waiting(), "leaked_bytes": engine.leak.bytes(),
        "cached_bytes": engine.cache.bytes(), "script": *engine.script(),
    })
}

/// Returns the request as received, for tests of proxies. `?status=418` chooses the status.
fn echo(head: &Parts, body: &[u8]) -> Reply {
    let headers: Vec<(String, String)> = head
        .headers
        .iter()
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
        .collect();
    let status =
        head.uri.query().and_then(|query| query.split('&').find_map(|pair| pair.strip_prefix("status=")));
    let status =
        status.and_then(|text| text.parse::<u16>().ok()).and_then(|code| StatusCode::from_u16(code).ok());
    let seen = json!({
        "method": head.method.as_str(), "target": head.uri.to_string(), "headers": headers,
        "body_bytes": body.len(), "body_sha256": hex::encode(Sha256::digest(body)),
    });
    json_reply(status.unwrap_or(StatusCode::OK), &seen)
}
