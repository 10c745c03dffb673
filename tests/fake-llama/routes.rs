//! Routes requests. All answers here are immediate; [`generate`] handles working requests.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::header::AUTHORIZATION;
use hyper::{Method, Request, StatusCode};
use serde_json::{Value, json};

use crate::engine::Engine;
use crate::reply::{Reply, error, full, ok, reply};
use crate::shape::Shape;
use crate::slots::{self, FileFault, Kept};
use crate::wire::Wire;
use crate::{clock, control};
use crate::{generate, goes_on};

pub(crate) async fn answer(engine: Arc<Engine>, wire: Wire, request: Request<Incoming>) -> Reply {
    let (head, body) = request.into_parts();
    let path = head.uri.path().to_owned();
    if let Some(what) = path.strip_prefix("/fake/") {
        let Ok(body) = body.collect().await else { return error(400, "invalid_request_error", "body cut") };
        return control::answer(&engine, what, &head, &body.to_bytes());
    }
    if engine.wedged_health.is_set() {
        engine.hang().await;
    }
    if !engine.ready.is_set() {
        return error(503, "unavailable_error", "Loading model");
    }
    if head.method == Method::OPTIONS {
        return reply(StatusCode::OK, "text/plain", full(""));
    }
    let health = matches!(path.as_str(), "/health" | "/v1/health");
    if !health && !admitted(&engine, &head) {
        return error(401, "authentication_error", "Invalid API Key");
    }
    if engine.script().hangs_on.contains(&path) {
        engine.hang().await;
    }
    if head.method == Method::POST {
        if let Some(slot) = path.strip_prefix("/slots/") {
            return slot_action(&engine, slot, head.uri.query().unwrap_or_default(), body).await;
        }
        let Some(shape) = Shape::of(&path) else { return small_post(&engine, &path, body).await };
        // An incomplete body keeps the connection, and SIGTERM, waiting.
        let Ok(body) = body.collect().await else { return error(400, "invalid_request_error", "body cut") };
        return generate::work(engine, wire, shape, &head, body.to_bytes()).await;
    }
    if head.method != Method::GET && head.method != Method::HEAD {
        return not_found();
    }
    // llama-server's computing loop answers these routes between two batches.
    let of_loop = matches!(path.as_str(), "/slots" | "/metrics");
    if of_loop && (engine.stalled.is_set() || engine.wedged.is_set()) {
        engine.hang().await;
    }
    match path.as_str() {
        "/health" | "/v1/health" => ok(&json!({"status": "ok"})),
        "/v1/models" | "/models" => ok(&models(&engine)),
        "/props" => ok(&props(&engine)),
        "/lora-adapters" => ok(&engine.is_set("/lora-adapters").unwrap_or_else(|| json!([]))),
        "/slots" => ok(&slots(&engine)),
        "/metrics" if engine.args.metrics => {
            reply(StatusCode::OK, "text/plain; version=0.0.4", full(metrics(&engine)))
        }
        "/metrics" => error(
            501,
            "not_supported_error",
            "This server does not support metrics endpoint. Start it with `--metrics`",
        ),
        _ => not_found(),
    }
}

fn not_found() -> Reply {
    error(404, "not_found_error", "File Not Found")
}

fn admitted(engine: &Engine, head: &hyper::http::request::Parts) -> bool {
    let Some(key) = &engine.args.api_key else { return true };
    let text = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    text("x-api-key") == key || text(AUTHORIZATION.as_str()).strip_prefix("Bearer ") == Some(key)
}

async fn small_post(engine: &Engine, path: &str, body: Incoming) -> Reply {
    let Ok(body) = body.collect().await else { return error(400, "invalid_request_error", "body cut") };
    let body: Bytes = body.to_bytes();
    match path {
        // A list of adapters with their scales, or fields of the properties.
        "/lora-adapters" | "/props" => match serde_json::from_slice::<Value>(&body) {
            Ok(value) => {
                engine.set(path, value);
                ok(&json!({"success": true}))
            }
            Err(wrong) => generate::bad_json(&wrong),
        },
        "/tokenize" => match serde_json::from_slice::<Value>(&body) {
            Ok(value) if engine.script().kept != Kept::Nothing && value["with_pieces"] != true => {
                ok(&json!({ "tokens": slots::spelled(&json!({ "prompt": value["content"] })) }))
            }
            Ok(value) => ok(&goes_on::tokens(&value)),
            Err(wrong) => generate::bad_json(&wrong),
        },
        "/apply-template" => match serde_json::from_slice::<Value>(&body) {
            Ok(value) if engine.script().kept != Kept::Nothing => {
                ok(&json!({ "prompt": slots::rendered(&value["messages"]) }))
            }
            Ok(value) => ok(&goes_on::rendered(&value)),
            Err(wrong) => generate::bad_json(&wrong),
        },
        _ => not_found(),
    }
}

async fn slot_action(engine: &Engine, slot: &str, query: &str, body: Incoming) -> Reply {
    let Ok(body) = body.collect().await else { return error(400, "invalid_request_error", "body cut") };
    let Some(directory) = &engine.args.slot_save_path else {
        let why = "This server does not support slots action. Start it with `--slot-save-path`";
        return error(501, "not_supported_error", why);
    };
    let Some(slot) = slot.parse().ok().filter(|slot| *slot < engine.args.slots as usize) else {
        return error(400, "invalid_request_error", "Invalid slot ID");
    };
    let script = engine.script();
    if query == "action=erase" {
        return ok(&json!({ "id_slot": slot, "n_erased": engine.held.erase(slot) }));
    }
    let asked: Value = serde_json::from_slice(&body.to_bytes()).unwrap_or_default();
    let name = asked["filename"].as_str().filter(|name| !name.is_empty() && !name.contains('/'));
    let Some(name) = name else { return error(400, "invalid_request_error", "Invalid filename") };
    let path = directory.join(name);
    // Deferred while the slot is busy.
    while engine.slots()[slot].is_some() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let saves = query == "action=save";
    let fault = if saves { script.save_fault } else { script.restore_fault };
    match fault {
        Some(FileFault::Error) => return error(400, "invalid_request_error", "Unable to do that"),
        Some(FileFault::Garbage) => return reply(StatusCode::OK, "text/plain", full("what?")),
        _ => {}
    }
    if saves {
        tokio::time::sleep(Duration::from_millis(script.save_ms)).await;
        let (file, tokens) = engine.held.save(slot);
        let written = if fault.is_some() { &file[..file.len() / 2] } else { &file };
        if std::fs::write(&path, written).is_err() {
            return error(500, "server_error", "Unable to write");
        }
        if slots::has_checkpoints(script.kept)
            && std::fs::write(slots::checkpoint_path(&path), slots::checkpoints_of(&file)).is_err()
        {
            return error(500, "server_error", "Unable to write");
        }
        return ok(&json!({ "id_slot": slot, "filename": name, "n_saved": tokens, "n_written": file.len() }));
    }
    tokio::time::sleep(Duration::from_millis(script.restore_ms)).await;
    let restored = std::fs::read(&path).ok().and_then(|file| {
        let beside = std::fs::read(slots::checkpoint_path(&path)).unwrap_or_default();
        let fits = slots::has_checkpoints(script.kept) && beside == slots::checkpoints_of(&file);
        let kept = if fits { Kept::Dense } else { script.kept };
        engine.held.restore(kept, slot, &file)
    });
    match restored {
        Some(tokens) => ok(&json!({ "id_slot": slot, "filename": name, "n_restored": tokens, "n_read": 1 })),
        None => error(400, "invalid_request_error", "Unable to restore slot"),
    }
}

fn models(engine: &Engine) -> Value {
    let args = &engine.args;
    json!({"object": "list", "data": [{
        "id": args.alias, "aliases": [args.alias], "tags": [], "object": "model",
        "created": clock::unix_ms() / 1000, "owned_by": "llamacpp",
        "meta": {"vocab_type": 2, "n_vocab": 670, "n_ctx": args.context, "n_ctx_train": 32768, "n_embd": 64,
                 "n_params": 196_800, "size": 787_200, "ftype": "all F32"},
    }]})
}

fn props(engine: &Engine) -> Value {
    let args = &engine.args;
    json!({
        "default_generation_settings": {"params": {}, "n_ctx": args.context / u64::from(args.slots)},
        "total_slots": args.slots, "model_alias": args.alias, "model_path": args.model,
        "modalities": {"vision": args.mmproj, "video": false, "audio": args.mmproj},
        "endpoint_slots": true, "endpoint_metrics": args.metrics,
        "build_info": "b1-000000000", "is_sleeping": false, "set": engine.is_set("/props"),
    })
}

fn slots(engine: &Engine) -> Value {
    let held = engine.held.told();
    let one = |(id, task): (usize, Option<u64>)| {
        let (tokens, used) = held[id];
        let mut slot = json!({"id": id, "n_ctx": engine.args.context / u64::from(engine.args.slots), "speculative": false,
               "is_processing": task.is_some(), "id_task": task.or((used > 0).then_some(used)),
               "next_token": [{"n_decoded": engine.predicted_tokens.load(Ordering::Relaxed)}]});
        if used > 0 {
            slot["n_prompt_tokens"] = tokens.into();
        }
        slot
    };
    engine.slots().into_iter().enumerate().map(one).collect()
}

fn metrics(engine: &Engine) -> String {
    let busy = engine.slots().iter().flatten().count();
    let prompt = engine.prompt_tokens.load(Ordering::Relaxed);
    let predicted = engine.predicted_tokens.load(Ordering::Relaxed);
    let waiting = engine.waiting();
    let mut text = String::new();
    for (name, kind, value) in [
        ("prompt_tokens_total", "counter", prompt),
        ("tokens_predicted_total", "counter", predicted),
        ("n_decode_total", "counter", predicted),
        ("requests_processing", "gauge", busy as u64),
        ("requests_deferred", "gauge", waiting),
    ] {
        text.push_str("# TYPE llamacpp:");
        text.push_str(name);
        text.push(' ');
        text.push_str(kind);
        text.push_str("\nllamacpp:");
        text.push_str(name);
        text.push(' ');
        text.push_str(&value.to_string());
        text.push('\n');
    }
    text
}
