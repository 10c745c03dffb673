//! Keys: admitted clients, headers for the backend, visible models, and freed places.

use std::collections::HashSet;

use super::*;
use crate::{ApiKeys, KeySpec, LiveConfig, RequestOutcome};

fn spec(name: &str, key: &str) -> KeySpec {
    KeySpec::unlimited(name, key)
}

async fn rig(specs: Vec<KeySpec>, models: Vec<&'static str>, upstream: &Upstream) -> Rig {
    let rig = Rig::with(Plan { models, ..Plan::default() }, &[upstream]).await;
    rig.control.update(LiveConfig { keys: Some(ApiKeys::new(specs)), ..LiveConfig::default() });
    rig
}

fn with(key: &str, path: &str, body: &str) -> Vec<u8> {
    let request = String::from_utf8(post(path, body)).unwrap();
    request.replacen("Host: h\r\n", &format!("Host: h\r\nAuthorization: Bearer {key}\r\n"), 1).into_bytes()
}

fn get(path: &str, field: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: h\r\n{field}\r\n").into_bytes()
}

/// A backend that answers with the received head.
fn echo() -> Upstream {
    Upstream::answering(|head, _| json_answer(&serde_json::to_string(head).unwrap()))
}

#[tokio::test]
async fn a_right_key_gets_in_and_never_goes_upstream() {
    let upstream = echo();
    let rig = rig(vec![spec("alice", "secret-a"), spec("bob", "secret-b")], vec!["m"], &upstream).await;
    for fields in [
        "Authorization: Bearer secret-b",
        "x-api-key: secret-b",
        "Api-Key: secret-b",
        "Authorization: Basic dTpzZWNyZXQtYg==",
        "Authorization: Bearer placeholder\r\nX-Api-Key: secret-b\r\nProxy-Authorization: Bearer secret-b",
    ] {
        let (head, seen) = rig.ask(&get("/props", &format!("{fields}\r\nX-Kept: 1\r\n"))).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{fields}: {head}");
        let seen = seen.to_ascii_lowercase();
        assert!(seen.contains("x-kept: 1"), "{seen}");
        for word in ["secret", "authorization", "api-key", "placeholder", "dtpz"] {
            assert!(!seen.contains(word), "{word} went upstream: {seen}");
        }
    }
    assert_eq!(rig.record(0).await.key.as_deref(), Some("bob"));
    let counts = rig.control.key_counts();
    assert_eq!(counts.iter().map(|key| key.requests).collect::<Vec<_>>(), [0, 5]);
    rig.is_clean().await;
}

#[tokio::test]
async fn without_keys_what_clients_send_passes_on() {
    let upstream = echo();
    let rig = Rig::start(&[&upstream]).await;
    let (_, seen) = rig.ask(&get("/props", "Authorization: Bearer k\r\nx-api-key: k2\r\n")).await;
    assert!(seen.to_ascii_lowercase().contains("authorization: bearer k"), "{seen}");
    assert!(seen.contains("k2"), "{seen}");
}

#[tokio::test]
async fn a_wrong_key_is_told_before_the_body_is_read() {
    let upstream = echo();
    let rig = rig(vec![spec("alice", "secret-a")], vec!["m"], &upstream).await;
    let mut client = rig.client().await;
    // A megabyte is declared and none of it sent.
    client
        .send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer secret\r\nContent-Length: 1000000\r\n\r\n")
        .await;
    let (head, body) = client.response().await;
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert!(head.starts_with("HTTP/1.1 401 ") && head.contains("www-authenticate: Bearer"), "{head}");
    assert!(head.contains("x-warden-executed: no") && head.contains("x-request-id: "), "{head}");
    assert_eq!(body["error"]["message"], "Invalid API Key");
    assert_eq!(body["error"]["type"], "authentication_error");
    assert_eq!(body["error"]["code"], 401);
    let (head, body) = rig.ask(&post("/v1/messages", "{}")).await;
    assert!(head.starts_with("HTTP/1.1 401 "), "{head}");
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((&body["type"], &body["error"]["type"]), (&"error".into(), &"authentication_error".into()));
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::Rejected("wrong_key"));
    assert_eq!(rig.record(1).await.outcome, RequestOutcome::Rejected("no_key"));
    assert_eq!(upstream.accepted(), 0);
    rig.is_clean().await;
}

#[tokio::test]
async fn health_and_preflights_need_no_key_and_everything_else_does() {
    let upstream = echo();
    let rig = rig(vec![spec("alice", "secret-a")], vec!["m"], &upstream).await;
    for (request, status) in [
        ("GET /health", "200"),
        ("GET /v1/health", "200"),
        ("OPTIONS /v1/chat/completions", "200"),
        ("GET /v1/models", "401"),
        ("GET /v1/models/m", "401"),
        ("GET /props", "401"),
        ("GET /", "401"),
        ("POST /health", "401"),
        ("GET /healthx", "401"),
    ] {
        let (head, _) =
            rig.ask(format!("{request} HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n").as_bytes()).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {head}");
    }
}

#[tokio::test]
async fn a_key_sees_and_uses_its_own_models_only() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let some = |names: &[&str]| Some(names.iter().map(ModelName::new).collect::<HashSet<_>>());
    let few = KeySpec { models: some(&["b", "c"]), ..spec("few", "k2") };
    let one = KeySpec { models: some(&["c"]), ..spec("one", "k1") };
    let rig = rig(vec![few, one, spec("all", "k0")], vec!["a", "b", "c"], &upstream).await;
    let chat = |key: &str, body: &str| with(key, "/v1/chat/completions", body);
    for (key, body, status) in [
        ("k0", r#"{"model":"a"}"#, 200),
        ("k2", r#"{"model":"b"}"#, 200),
        ("k2", r#"{"model":"alias-of-c"}"#, 200),
        ("k2", r#"{"model":"a"}"#, 404),
        ("k2", r#"{"model":"alias-of-a"}"#, 404),
        ("k2", r#"{"model":"no"}"#, 404),
        ("k2", "{}", 400),
        ("k1", "{}", 200),
    ] {
        let (head, answer) = rig.ask(&chat(key, body)).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{key} {body}: {head}");
        if status != 200 {
            let names =
                if body.contains("model") { "`b`, `alias-of-b`, `c`, `alias-of-c`" } else { "`b`, `c`" };
            assert!(answer.contains(names) && !answer.contains("`a`,"), "names are told: {answer}");
        }
    }
    assert_eq!(rig.record(3).await.outcome, RequestOutcome::Rejected("key_model"));
    assert_eq!(rig.record(5).await.outcome, RequestOutcome::Rejected("unknown_model"));
    for rest in ["", "/", "/props"] {
        let ask = async |model: &str| {
            let (head, answer) =
                rig.ask(&get(&format!("/upstream/{model}{rest}"), "x-api-key: k2\r\n")).await;
            (head.lines().next().unwrap().to_owned(), answer)
        };
        assert_eq!(ask("a").await, ask("no").await, "nobody learns that there is an `a`: {rest:?}");
    }
    let listed = rig.ask(&get("/v1/models", "x-api-key: k2\r\n")).await.1;
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let names: Vec<_> = listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str()).collect();
    assert_eq!(names, [Some("b"), Some("c")]);
    assert!(rig.ask(&get("/v1/models/b", "x-api-key: k2\r\n")).await.0.starts_with("HTTP/1.1 200 "));
    assert!(rig.ask(&get("/v1/models/a", "x-api-key: k2\r\n")).await.0.starts_with("HTTP/1.1 404 "));
}

#[tokio::test]
async fn a_place_is_held_to_the_end_of_the_answer_and_free_when_the_client_leaves() {
    let upstream = Upstream::start(|mut peer| async move {
        while peer.request().await.is_some() {
            peer.send(EVENTS).await;
            peer.send_chunk(b"data: {}\n\n").await;
            // The answer never ends.
            peer.rest().await;
        }
    });
    let busy = KeySpec { concurrency: Some(1), ..spec("alice", "k") };
    let rig = rig(vec![busy], vec!["m"], &upstream).await;
    let request = with("k", "/v1/chat/completions", r#"{"stream":true}"#);
    let mut client = rig.client().await;
    client.send(&request).await;
    client.until("data: {}").await;
    let (head, answer) = rig.ask(&request).await;
    assert!(head.starts_with("HTTP/1.1 429 ") && head.contains("retry-after: 1\r\n"), "{head}");
    assert!(answer.contains("rate_limit_error"), "{answer}");
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::Rejected("key_concurrency"));
    let listed = rig.ask(&get("/v1/models", "x-api-key: k\r\n")).await.0;
    assert!(listed.starts_with("HTTP/1.1 200 "), "our own answers take no place: {listed}");
    drop(client);
    eventually("the place is free", || rig.control.key_counts()[0].running == 0).await;
    let mut client = rig.client().await;
    client.send(&request).await;
    client.until("data: {}").await;
    drop(client);
    rig.is_clean().await;
}

#[tokio::test]
async fn an_answer_that_tells_no_tokens_is_paid_for_all_the_same() {
    let upstream = Upstream::answering(|head, _| {
        if head.contains("stream") {
            let events = b"data: {}\n\n".repeat(1200);
            let size = format!("{:x}\r\n", events.len());
            [EVENTS, size.as_bytes(), &events, b"\r\n0\r\n\r\n"].concat()
        } else {
            json_answer(&format!(r#"{{"content":"{}"}}"#, "x".repeat(5000)))
        }
    });
    let poor = |name| KeySpec { tokens: Some("1000/h".parse().unwrap()), ..spec(name, name) };
    let rig = rig(["a", "b", "c", "d"].map(poor).into(), vec!["m"], &upstream).await;
    let long = format!(r#"{{"input":"{}"}}"#, "x".repeat(5000));
    for (key, path, body, next) in [
        ("a", "/completion", r#"{"response_fields":["content"]}"#, "429"),
        ("b", "/completion?stream", "{}", "429"),
        // An evaluation costs its prompt, not its output.
        ("c", "/embedding", r#"{"input":"short"}"#, "200"),
        ("d", "/embedding", long.as_str(), "429"),
    ] {
        let request = with(key, path, body);
        assert!(rig.ask(&request).await.0.starts_with("HTTP/1.1 200 "), "{path}");
        let (head, _) = rig.ask(&request).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {next} ")), "{key} {path}: {head}");
    }
    rig.is_clean().await;
}

#[tokio::test]
async fn a_prompt_is_paid_for_though_its_client_leaves_before_it_is_counted() {
    let upstream = Upstream::start(|mut peer| async move {
        while let Some((head, _)) = peer.request().await {
            if head.contains("silent") {
                return drop(peer.rest().await);
            }
            peer.send(EVENTS).await;
            let event: &[u8] = if head.contains("progress") {
                b"data: {\"prompt_progress\":{\"total\":900,\"cache\":0,\"processed\":600,\"time_ms\":5}}\n\n"
            } else {
                b"data: {\"content\":\"w0\"}\n\n"
            };
            peer.send_chunk(event).await;
            peer.rest().await;
        }
    });
    let poor = |name| KeySpec { tokens: Some("1000/h".parse().unwrap()), ..spec(name, name) };
    let rig = rig(["a", "b", "c", "d", "e"].map(poor).into(), vec!["m"], &upstream).await;
    let long = "word ".repeat(1000);
    let image = "A".repeat(5000);
    let seen = format!(
        r#"{{"stream":true,"messages":[{{"content":[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{image}"}}}}]}}]}}"#
    );
    let streamed = format!(r#"{{"stream":true,"prompt":"{long}"}}"#);
    let plain = format!(r#"{{"prompt":"{long}"}}"#);
    let shown = r#"{"stream":true,"return_progress":true,"prompt":"short"}"#;
    for (key, path, body, next) in [
        ("a", "/completion", streamed.as_str(), "429"),
        // The client had nothing of an answer yet.
        ("b", "/completion?silent", plain.as_str(), "429"),
        ("c", "/v1/chat/completions", seen.as_str(), "200"),
    ] {
        let mut client = rig.client().await;
        client.send(&with(key, path, body)).await;
        if path.contains("silent") {
            eventually("it is sent", || upstream.open() > 0).await;
            eventually("it runs", || rig.live() == 1).await;
            sleep(Duration::from_millis(50)).await;
        } else {
            client.until("data: ").await;
        }
        drop(client);
        rig.is_clean().await;
        let mut client = rig.client().await;
        client.send(&with(key, "/completion", r#"{"stream":true}"#)).await;
        let head = client.until("\r\n\r\n").await;
        assert!(head.starts_with(&format!("HTTP/1.1 {next} ")), "{key} {path}: {head}");
        drop(client);
        rig.is_clean().await;
    }
    // The server's own count of the prompt takes precedence over any estimate.
    let mut client = rig.client().await;
    client.send(&with("d", "/completion?progress", shown)).await;
    client.until("data: ").await;
    drop(client);
    rig.is_clean().await;
    assert_eq!(rig.control.key_counts()[3].prompt_tokens, 600);
    // A client that leaves before the server has the request is charged nothing.
    let mut client = rig.client().await;
    let whole = String::from_utf8(with("e", "/completion", &streamed)).unwrap();
    client.send(&whole.as_bytes()[..whole.len() - 10]).await;
    eventually("it has come so far", || rig.gauges.held_bytes.load(Ordering::SeqCst) > 4000).await;
    drop(client);
    rig.is_clean().await;
    let mut client = rig.client().await;
    client.send(&with("e", "/completion", r#"{"stream":true}"#)).await;
    let head = client.until("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
}

#[tokio::test]
async fn requests_one_after_another_never_meet_the_limit_of_one_at_a_time() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let rig = rig(vec![KeySpec { concurrency: Some(1), ..spec("a", "k") }], vec!["m"], &upstream).await;
    let mut client = rig.client().await;
    for _ in 0..50 {
        client.send(&with("k", "/v1/chat/completions", "{}")).await;
        let (head, _) = client.response().await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    }
    assert_eq!(rig.control.key_counts()[0].requests, 50);
}

#[tokio::test]
async fn a_used_up_rate_is_told_with_the_wait_and_survives_a_reload() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let limited = KeySpec { rate: Some("2/h".parse().unwrap()), ..spec("a", "k") };
    let rig = rig(vec![limited.clone()], vec!["m"], &upstream).await;
    let request = with("k", "/v1/messages", "{}");
    for status in ["200", "200", "429"] {
        let (head, _) = rig.ask(&request).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}");
    }
    rig.control.update(LiveConfig { keys: Some(ApiKeys::new(vec![limited])), ..LiveConfig::default() });
    let (head, answer) = rig.ask(&request).await;
    assert!(head.starts_with("HTTP/1.1 429 "), "{head}");
    let after = head.lines().find_map(|line| line.strip_prefix("retry-after: ")).unwrap();
    assert!((1700..=1800).contains(&after.parse::<u64>().unwrap()), "half an hour a request: {after}");
    assert!(answer.contains(r#""type":"rate_limit_error""#) && answer.contains("2/h"), "{answer}");
    assert_eq!(rig.record(2).await.outcome, RequestOutcome::Rejected("key_rate"));
}
