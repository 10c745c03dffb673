//! Non-streaming answers that are assembled from streams.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use warden_policies::ByteSize;

use super::peer::{EVENTS, Upstream, json_answer, post};
use super::slow::is_alone;
use super::{Plan, Rig, eventually};
use crate::observe::GatewayLimit;
use crate::{LiveConfig, ModelRules, RequestOutcome};

/// A gateway whose model assembles answers.
async fn rig(upstream: &Upstream, limit: usize) -> Rig {
    let mut plan = Plan::default();
    plan.config.upstream.assembled_bytes = ByteSize(limit as u64);
    told(plan, upstream).await
}

async fn told(plan: Plan, upstream: &Upstream) -> Rig {
    let rig = Rig::with(plan, &[upstream]).await;
    let rules = Arc::new(ModelRules { assemble: true, ..ModelRules::default() });
    let models = rig.backends.models.iter().map(|model| (model.clone(), rules.clone())).collect();
    rig.control.update(LiveConfig { models, ..LiveConfig::default() });
    rig
}

fn event(name: &str, data: &Value) -> String {
    let name = if name.is_empty() { String::new() } else { format!("event: {name}\n") };
    format!("{name}data: {data}\n\n")
}

/// A response with these events.
fn stream(events: &str) -> Vec<u8> {
    let mut all = EVENTS.to_vec();
    all.extend_from_slice(format!("{:x}\r\n{events}\r\n0\r\n\r\n", events.len()).as_bytes());
    all
}

fn answering(events: String) -> Upstream {
    Upstream::answering(move |_, body| {
        let asked: Value = serde_json::from_slice(body).unwrap_or_default();
        if asked["stream"] == true { stream(&events) } else { json_answer(r#"{"as":"it is"}"#) }
    })
}

fn chunk(delta: &Value, finish: &Value) -> Value {
    json!({ "choices": [{ "finish_reason": finish, "index": 0, "delta": delta }], "created": 7, "id": "c",
        "model": "m", "system_fingerprint": "b", "object": "chat.completion.chunk" })
}

#[tokio::test]
async fn a_chat_comes_out_as_without_a_stream_and_is_logged_as_what_it_is() {
    let call = |call: &Value| json!({ "tool_calls": [call] });
    let usage = json!({ "choices": [], "created": 7, "id": "c", "model": "m", "system_fingerprint": "b",
        "object": "chat.completion.chunk", "usage": { "completion_tokens": 5, "prompt_tokens": 3 },
        "timings": { "prompt_n": 3, "predicted_n": 5 }, "new": 1 });
    let none = &Value::Null;
    let events: String = [
        chunk(&json!({ "role": "assistant", "content": null }), none),
        chunk(&json!({ "reasoning_content": "h" }), none),
        chunk(&json!({ "reasoning_content": "m" }), none),
        chunk(&json!({ "content": "Grüße" }), none),
        chunk(&json!({ "content": "\n", "odd": "a" }), none),
        chunk(&json!({ "odd": "b" }), none),
        chunk(&call(&json!({ "index": 0, "id": "x", "type": "function", "function": { "name": "f", "arguments": "{" } })), none),
        chunk(&call(&json!({ "index": 0, "function": { "arguments": "}" } })), none),
        chunk(&json!({}), &json!("tool_calls")),
        usage,
    ]
    .iter()
    .map(|data| event("", data))
    .collect();
    let upstream = answering(format!("{events}:\n\ndata: [DONE]\n\n"));
    let rig = rig(&upstream, 100_000).await;
    let (head, body) = rig.ask(&post("/v1/chat/completions", r#"{"messages":[]}"#)).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let head = head.to_ascii_lowercase();
    assert!(head.contains("content-type: application/json; charset=utf-8"), "{head}");
    assert!(head.contains(&format!("content-length: {}", body.len())), "{head}");
    let message = json!({ "role": "assistant", "content": "Grüße\n", "reasoning_content": "hm",
        "tool_calls": [{ "type": "function", "function": { "name": "f", "arguments": "{}" }, "id": "x" }], "odd": "ab" });
    let whole = json!({ "choices": [{ "finish_reason": "tool_calls", "index": 0, "message": message }],
        "created": 7, "model": "m", "system_fingerprint": "b", "object": "chat.completion",
        "usage": { "completion_tokens": 5, "prompt_tokens": 3 }, "id": "c",
        "timings": { "prompt_n": 3, "predicted_n": 5 }, "new": 1 });
    assert_eq!(body, whole.to_string());
    let record = rig.record(0).await;
    assert_eq!((record.outcome, record.status, record.stream), (RequestOutcome::Ok, 200, false));
    assert_eq!((record.work.prompt_tokens, record.work.output_tokens, record.work.requests), (3, 5, 1));
    assert_eq!(record.bytes_out, body.len() as u64);
    rig.is_clean().await;
}

#[tokio::test]
async fn streams_and_what_a_stream_cannot_tell_and_upstream_paths_pass_as_they_are() {
    let upstream = answering(event("", &json!({ "content": "x", "stop": true })));
    let rig = rig(&upstream, 100_000).await;
    let (head, body) = rig.ask(&post("/completion", r#"{"stream":true}"#)).await;
    assert!(head.contains("text/event-stream") && body.contains("data: "), "{head}{body}");
    for (path, asked) in [
        ("/completion", r#"{"stop":["x"]}"#),
        ("/upstream/m/completion", r#"{"a":1}"#),
        ("/v1/embeddings", r#"{"a":1}"#),
    ] {
        let (_, body) = rig.ask(&post(path, asked)).await;
        assert_eq!(body, r#"{"as":"it is"}"#, "{path}");
    }
    let (_, body) = rig.ask(&post("/completion", r#"{"a":1}"#)).await;
    assert_eq!(body, r#"{"content":"x","stop":true}"#);
    rig.is_clean().await;
}

#[tokio::test]
async fn an_error_in_the_stream_becomes_the_answer_with_its_status() {
    let error = json!({ "code": 503, "message": "no", "type": "unavailable_error" });
    for (path, events) in [
        ("/v1/chat/completions", event("", &json!({ "error": error }))),
        ("/v1/messages", event("error", &error)),
        ("/v1/responses", event("", &json!({ "error": error }))),
    ] {
        let upstream = answering(events);
        let rig = rig(&upstream, 100_000).await;
        let (head, body) = rig.ask(&post(path, r#"{"a":1}"#)).await;
        assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
        assert_eq!(body, json!({ "error": error }).to_string(), "{path}");
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn an_answer_that_is_cut_strange_or_too_large_is_a_502() {
    let text = event("", &json!({ "content": "x".repeat(600), "stop": false }));
    for (events, limit, why) in [
        (text.clone(), 100_000, "ended before its last event"),
        ("data: hm\n\n".to_owned(), 100_000, "no JSON object"),
        (text.repeat(3), 1000, "upstream.assembled_bytes"),
        ("x".repeat(3000), 1000, "upstream.assembled_bytes"),
    ] {
        let upstream = answering(events);
        let rig = rig(&upstream, limit).await;
        let (head, body) = rig.ask(&post("/completion", r#"{"a":1}"#)).await;
        let head = head.to_ascii_lowercase();
        assert!(head.starts_with("http/1.1 502 ") && head.contains("x-warden-executed: maybe"), "{head}");
        assert!(body.contains(why), "{body}");
        rig.is_clean().await;
        eventually("its stream is closed", || upstream.open() == 0).await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_before_its_answer_is_put_together_ends_the_stream() {
    let upstream = Upstream::start(|mut peer| async move {
        let Some(_) = peer.request().await else { return };
        let event = event("", &json!({ "content": "x", "stop": false }));
        peer.send(EVENTS).await;
        peer.send(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes()).await;
        peer.rest().await;
    });
    let rig = rig(&upstream, 100_000).await;
    let mut client = rig.client().await;
    client.send(&post("/completion", r#"{"a":1}"#)).await;
    eventually("it is being answered", || rig.backends.heard.load(Ordering::SeqCst) > 0).await;
    drop(client);
    eventually("the stream is closed", || upstream.open() == 0).await;
    let record = rig.record(0).await;
    assert_eq!(
        (record.outcome, record.work.output_tokens),
        (RequestOutcome::ClientGone, 1),
        "it is paid for"
    );
    rig.is_clean().await;
    eventually("nothing is in flight", || rig.gauges.in_flight.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn a_client_has_its_time_for_a_large_answer() {
    let size = 8 << 20;
    let upstream = answering(event("", &json!({ "content": "x".repeat(size), "stop": true })));
    let mut plan = Plan::default();
    plan.config.upstream.assembled_bytes = ByteSize(4 * size as u64);
    plan.config.server.keep_alive = Duration::from_millis(100);
    let rig = told(plan, &upstream).await;
    let mut client = rig.client().await;
    client.send(&post("/completion", r#"{"a":1}"#)).await;
    eventually("it is put together", || upstream.accepted() == 1 && upstream.open() == 0).await;
    // While this client does not read, other connections exceed their idle time, one after another.
    for _ in 0..5 {
        assert_eq!(rig.client().await.rest().await, b"");
    }
    let (_, body) = client.response().await;
    assert!(body.len() > size && body.ends_with(b"}"));
    assert_eq!(rig.gauges.limited.count(GatewayLimit::Overdue), 0);
    drop(client);
    rig.is_clean().await;
}

#[tokio::test]
async fn no_body_costs_many_times_its_own_bytes_when_it_is_looked_at() {
    if !is_alone(module_path!(), "no_body_costs_many_times_its_own_bytes_when_it_is_looked_at").await {
        return;
    }
    // The backend ignores the bodies, and counts no tokens.
    let upstream = Upstream::answering(|_, _| json_answer(r#"{"tokens":[]}"#));
    let rig = rig(&upstream, 1 << 20).await;
    *rig.backends.room_tokens.lock().unwrap() = Some(1000);
    for (begin, element, end) in [
        (r#"{"stop":["#, "0,", "0]}"),
        (r#"{"messages":["#, "{},", "{}]}"),
        (r#"{"input":["#, "{},", "{}]}"),
        (r#"{"tool_choice":["#, "{},", "{}]}"),
        (r#"{"prompt":["#, "0,", "0]}"),
        (r#"{"tools":["#, "{},", "{}]}"),
    ] {
        // Small enough to have its tokens counted, too.
        let body = format!("{begin}{}{end}", element.repeat(1_000_000 / element.len()));
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let before = resident("VmRSS:");
        let (head, _) = rig.ask(&post("/v1/chat/completions", &body)).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        let cost = resident("VmHWM:").saturating_sub(before);
        // The body is held once, joined twice for parsing, and kept once more by each end in this process.
        // Buffers double as they grow.
        assert!(cost < 14 * body.len(), "{begin}: {} MiB for {} MB", cost >> 20, body.len() / 1_000_000);
    }
    rig.is_clean().await;
}

/// Returns this process's memory (`VmRSS:`) or its peak since the last reset (`VmHWM:`), in bytes.
fn resident(which: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(which)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}
