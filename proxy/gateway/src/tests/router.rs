//! Requests that only inspect a model load none; the routes of llama-server's router need no process.

use std::collections::HashSet;

use super::*;
use crate::{ApiKeys, KeySpec, LiveConfig, RequestOutcome};

fn get(path: &str, fields: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: h\r\n{fields}\r\n").into_bytes()
}

fn with(key: &str, request: &[u8]) -> Vec<u8> {
    let request = String::from_utf8(request.to_vec()).unwrap();
    request.replacen("Host: h\r\n", &format!("Host: h\r\nAuthorization: Bearer {key}\r\n"), 1).into_bytes()
}

async fn rig(upstream: &Upstream, shown: ModelState) -> Rig {
    let rig = Rig::with(Plan { models: vec!["a", "b", "pinned"], ..Plan::default() }, &[upstream]).await;
    *rig.backends.shown.lock().unwrap() = Some(shown);
    rig
}

fn asked(rig: &Rig) -> usize {
    rig.backends.granted.load(Ordering::SeqCst)
}

#[tokio::test]
async fn what_only_looks_at_a_model_that_is_not_loaded_says_so_and_loads_none() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let rig = rig(&upstream, ModelState::Unloaded).await;
    for path in [
        "/metrics?model=a",
        "/slots?model=a",
        "/props?model=a",
        "/lora-adapters?model=a",
        "/v1/stream?model=a",
        "/upstream/a/health",
        "/upstream/a/v1/models",
        "/upstream/a/metrics",
    ] {
        let (head, answer) = rig.ask(&get(path, "")).await;
        assert!(
            head.starts_with("HTTP/1.1 503 ") && head.contains("x-warden-executed: no"),
            "{path}: {head}"
        );
        let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["error"]["code"], "model_not_loaded", "{path}: {answer}");
    }
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::Denied("not_loaded"));
    // A request that needs a process loads the model if its client says so.
    for (request, status) in [
        (post("/v1/completions?autoload=false", r#"{"model":"a"}"#), "503"),
        (post("/tokenize?model=a&autoload=0", "{}"), "503"),
        (get("/props?model=a&autoload=true", ""), "200"),
        (post("/v1/completions?autoload=", r#"{"model":"a"}"#), "200"),
        (post("/props?model=a", "{}"), "200"),
    ] {
        let before = asked(&rig);
        let (head, _) = rig.ask(&request).await;
        assert!(
            head.starts_with(&format!("HTTP/1.1 {status} ")),
            "{}: {head}",
            String::from_utf8_lossy(&request)
        );
        assert_eq!(asked(&rig) - before, usize::from(status == "200"));
    }
    // No process is started to count its prompt either.
    *rig.backends.room_tokens.lock().unwrap() = Some(1);
    let long = format!(r#"{{"model":"a","prompt":"{}"}}"#, "word ".repeat(1000));
    let before = asked(&rig);
    let (head, _) = rig.ask(&post("/v1/completions?autoload=false", &long)).await;
    assert!(head.starts_with("HTTP/1.1 503 ") && asked(&rig) == before, "{head}");
    *rig.backends.room_tokens.lock().unwrap() = None;
    *rig.backends.shown.lock().unwrap() = Some(ModelState::Loaded);
    for path in ["/metrics?model=a", "/upstream/a/health"] {
        let (head, _) = rig.ask(&get(path, "")).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{path}: {head}");
    }
    rig.is_clean().await;
}

#[tokio::test]
async fn models_are_loaded_and_let_go_as_by_llama_servers_router() {
    let upstream = Upstream::answering(|_, _| panic!("reached a backend"));
    let rig = rig(&upstream, ModelState::Unloaded).await;
    let call = async |path: &str, body: &str| {
        let (head, answer) = rig.ask(&post(path, body)).await;
        let status = head.split(' ').nth(1).unwrap().to_owned();
        (status, serde_json::from_str::<serde_json::Value>(&answer).unwrap())
    };
    let (status, answer) = call("/models/load", r#"{"model":"alias-of-a"}"#).await;
    assert_eq!((status.as_str(), &answer), ("200", &serde_json::json!({ "success": true })));
    eventually("it was asked for as by a request", || asked(&rig) == 1 && rig.live() == 0).await;
    for (path, body, status, message) in [
        ("/models/unload", r#"{"model":"a"}"#, "400", "model is not running"),
        ("/models/unload", r#"{"model":"no"}"#, "404", "`no`"),
        ("/models/load", r#"{"model":"no"}"#, "404", "`no`"),
        ("/models/load", "{}", "400", "`a`, `b`"),
        ("/models/load", "[", "400", "not a JSON object"),
        ("/models", r#"{"model":"org/x"}"#, "501", "neither downloads nor deletes"),
    ] {
        let (told, answer) = call(path, body).await;
        let words = answer["error"]["message"].as_str().unwrap();
        assert!(told == status && words.contains(message), "{path} {body}: {told} {answer}");
    }
    *rig.backends.denied.lock().unwrap() = Some(LeaseDenied::QueueFull { waiting: 3, depth: 3 });
    assert_eq!(call("/models/load", r#"{"model":"a"}"#).await.0, "503", "told at once");
    *rig.backends.denied.lock().unwrap() = None;
    *rig.backends.shown.lock().unwrap() = Some(ModelState::Loaded);
    assert_eq!(call("/models/load", r#"{"model":"a"}"#).await.0, "400", "already running");
    assert_eq!(call("/models/unload", r#"{"model":"a"}"#).await.0, "200");
    assert_eq!(*rig.backends.let_go.lock().unwrap(), ["a by client, 127.0.0.1"]);
    assert_eq!(call("/models/unload?model=pinned", "{}").await.0, "403");
    let (head, answer) = rig.ask(&get("/props", "")).await;
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    assert!(head.starts_with("HTTP/1.1 200 ") && answer["role"] == "router", "{head}{answer}");
    let (head, _) = rig.ask(&get("/models/sse", "")).await;
    assert!(head.starts_with("HTTP/1.1 501 "), "{head}");
    let (head, _) = rig.ask(b"DELETE /models?model=a HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 501 "), "{head}");
    assert_eq!(asked(&rig), 1, "no process for any of it");
    rig.is_clean().await;
}

#[tokio::test]
async fn who_may_use_a_model_may_load_and_let_it_go_and_an_operator_also_a_pinned_one() {
    let upstream = Upstream::answering(|_, _| panic!("reached a backend"));
    let rig = rig(&upstream, ModelState::Loaded).await;
    let some = |names: &[&str]| Some(names.iter().map(ModelName::new).collect::<HashSet<_>>());
    let few = KeySpec { models: some(&["a", "pinned"]), ..KeySpec::unlimited("few", "k") };
    let operator = KeySpec { operator: true, ..KeySpec::unlimited("operator", "o") };
    rig.control.update(LiveConfig { keys: Some(ApiKeys::new(vec![few, operator])), ..LiveConfig::default() });
    for (key, path, model, status) in [
        ("k", "/models/unload", "a", "200"),
        ("k", "/models/unload", "b", "404"),
        ("k", "/models/load", "b", "404"),
        ("k", "/models/unload", "no", "404"),
        ("k", "/models/unload", "pinned", "403"),
        ("o", "/models/unload", "pinned", "200"),
        ("x", "/models/unload", "a", "401"),
    ] {
        let (head, answer) = rig.ask(&with(key, &post(path, &format!(r#"{{"model":"{model}"}}"#)))).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{key} {path} {model}: {head}");
        assert!(!answer.contains("`b`,"), "no names of others: {answer}");
    }
    let let_go = rig.backends.let_go.lock().unwrap().join("; ");
    assert_eq!(let_go, "a by client, key few, 127.0.0.1; pinned by client, key operator, 127.0.0.1");
    // A key with one model sees no router.
    let one = KeySpec { models: some(&["a"]), ..KeySpec::unlimited("one", "1") };
    rig.control.update(LiveConfig { keys: Some(ApiKeys::new(vec![one])), ..LiveConfig::default() });
    *rig.backends.shown.lock().unwrap() = Some(ModelState::Unloaded);
    let (head, _) = rig.ask(&with("1", &get("/props", ""))).await;
    assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
    rig.is_clean().await;
}
