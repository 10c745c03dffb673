//! The model that a request reaches, and the error if it reaches none.

use super::*;

fn two() -> Plan {
    Plan { models: vec!["a", "org/b"], ..Plan::default() }
}

#[tokio::test]
async fn the_model_is_chosen_by_body_query_or_form() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let rig = Rig::with(two(), &[&upstream]).await;
    let big = format!(r#"{{"messages":"{}","model":"org/b"}}"#, "x".repeat(700_000));
    let form = "--X\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n{\"model\":\"a\"}\r\n--X\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\norg/b\r\n--X--\r\n";
    let form = format!(
        "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: h\r\nContent-Type: multipart/form-data; boundary=X\r\nContent-Length: {}\r\n\r\n{form}",
        form.len()
    );
    let requests: Vec<(Vec<u8>, &str)> = vec![
        (post("/v1/chat/completions", r#"{"model":"a"}"#), "a"),
        (post("/v1/chat/completions", r#"{"messages":[],"model":"alias-of-a"}"#), "a"),
        (post("/v1/chat/completions", &big), "org/b"),
        (post("/lora-adapters?model=org%2Fb", "[]"), "org/b"),
        (post("/x?model=a", r#"{"model":"org/b"}"#), "a"),
        (b"GET /props?model=org/b HTTP/1.1\r\nHost: h\r\n\r\n".to_vec(), "org/b"),
        (form.into_bytes(), "org/b"),
    ];
    for (n, (request, model)) in requests.into_iter().enumerate() {
        let (head, _) = rig.ask(&request).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{n}: {head}");
        assert_eq!(rig.record(n).await.model.unwrap().as_str(), model, "{n}");
    }
    rig.is_clean().await;
}

#[tokio::test]
async fn what_names_no_model_is_told_which_there_are() {
    let upstream = Upstream::answering(|_, _| panic!("reached a backend"));
    let rig = Rig::with(two(), &[&upstream]).await;
    for (request, status, word) in [
        (post("/v1/chat/completions", r#"{"model":"nope"}"#), 404, "`nope`"),
        (post("/v1/chat/completions", r#"{"messages":[]}"#), 400, "no model was named"),
        (post("/v1/chat/completions", r#"{"model":7}"#), 400, "must be a string"),
        (post("/v1/chat/completions", "model=a"), 400, "not a JSON object"),
        (post("/v1/chat/completions", r#"{"messages":["#), 400, "not a JSON object"),
        (post("/v1/chat/completions", ""), 400, "no model was named"),
        (b"GET /slots HTTP/1.1\r\nHost: h\r\n\r\n".to_vec(), 400, "no model was named"),
        (b"GET /props?model=nope HTTP/1.1\r\nHost: h\r\n\r\n".to_vec(), 404, "`nope`"),
    ] {
        let (head, body) = rig.ask(&request).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}{body}");
        assert!(head.contains("x-warden-executed: no\r\n") && head.contains("x-request-id: "), "{head}");
        assert!(body.contains(word) && body.contains("`a`, `org/b`"), "{body}");
        assert!(body.contains(r#""param":"model""#), "{body}");
    }
    assert_eq!(upstream.accepted(), 0);
    rig.is_clean().await;
}

#[tokio::test]
async fn one_model_takes_what_names_none_but_not_what_names_another() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let rig = Rig::start(&[&upstream]).await;
    for (body, status) in
        [("{}", 200), ("not json", 200), (r#"{"model":null}"#, 200), (r#"{"model":"other"}"#, 404)]
    {
        let (head, _) = rig.ask(&post("/v1/completions", body)).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{body}: {head}");
    }
    let any = Rig::with(Plan { any_name: true, ..Plan::default() }, &[&upstream]).await;
    let (head, _) = any.ask(&post("/v1/completions", r#"{"model":"other"}"#)).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    rig.is_clean().await;
}

#[tokio::test]
async fn health_models_and_preflight_are_ours() {
    let upstream = Upstream::answering(|_, _| panic!("reached a backend"));
    let rig = Rig::with(two(), &[&upstream]).await;
    let get =
        |path: &str| format!("GET {path} HTTP/1.1\r\nHost: h\r\nOrigin: http://ui\r\n\r\n").into_bytes();
    let (head, body) = rig.ask(&get("/health")).await;
    assert!(head.starts_with("HTTP/1.1 200 ") && body == r#"{"status":"ok"}"#, "{head}{body}");
    assert!(head.contains("access-control-allow-origin: http://ui\r\n"), "{head}");
    let (_, body) = rig.ask(&get("/v1/models")).await;
    let list: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][1]["id"], "org/b");
    assert_eq!(list["data"][1]["aliases"][0], "alias-of-org/b");
    assert_eq!(list["data"][0]["status"]["value"], "unloaded");
    assert_eq!(list["data"][0]["meta"]["n_ctx"], 4096);
    assert!(list["data"][0]["created"].as_u64().unwrap() > 1_700_000_000);
    for path in ["/v1/models/org/b", "/v1/models/org%2Fb", "/models/alias-of-org/b"] {
        let (_, body) = rig.ask(&get(path)).await;
        assert!(body.contains(r#""id":"org/b""#), "{path}: {body}");
    }
    let (_, body) = rig.ask(&get("/running")).await;
    assert_eq!(body, r#"{"running":[]}"#, "nothing runs");
    let (head, body) = rig.ask(&get("/v1/models/none")).await;
    assert!(head.starts_with("HTTP/1.1 404 ") && body.contains("`none`"), "{head}{body}");
    let (head, _) =
        rig.ask(b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: h\r\nOrigin: http://ui\r\n\r\n").await;
    assert!(
        head.starts_with("HTTP/1.1 200 ") && head.contains("access-control-allow-methods: GET, POST"),
        "{head}"
    );
    assert_eq!(upstream.accepted(), 0);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_denied_lease_is_told_as_it_is() {
    let upstream = Upstream::answering(|_, _| panic!("reached a backend"));
    let rig = Rig::start(&[&upstream]).await;
    *rig.backends.denied.lock().unwrap() = Some(LeaseDenied::QueueFull { waiting: 3, depth: 3 });
    let (head, body) = rig.ask(&post("/v1/messages", "{}")).await;
    assert!(head.starts_with("HTTP/1.1 503 ") && head.contains("retry-after: 1\r\n"), "{head}");
    assert!(body.contains("overloaded_error") && body.contains("queue is full"), "{body}");
    assert_eq!(rig.record(0).await.outcome.as_str(), "queue_full");
    rig.is_clean().await;
}

#[tokio::test]
async fn who_is_denied_after_the_whole_body_was_read_may_go_on_on_the_same_connection() {
    let upstream = Upstream::answering(|_, body| json_answer(&body.len().to_string()));
    let rig = Rig::with(Plan { room: 0, ..Plan::default() }, &[&upstream]).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", &format!(r#"{{"x":"{}"}}"#, "y".repeat(400_000)))).await;
    let kept = || rig.gauges.held_bytes.load(Ordering::SeqCst);
    eventually("all of it is read while it waits", || kept() >= 400_008).await;
    *rig.backends.denied.lock().unwrap() = Some(LeaseDenied::QueueFull { waiting: 3, depth: 3 });
    rig.backends.room.add_permits(1);
    let (head, _) = client.response().await;
    assert!(head.starts_with("HTTP/1.1 503 ") && !head.contains("connection: close"), "{head}");
    *rig.backends.denied.lock().unwrap() = None;
    client.send(&post("/v1/chat/completions", "{}")).await;
    let (head, answer) = client.response().await;
    assert!(head.starts_with("HTTP/1.1 200 ") && answer == b"2", "{head}");
    drop(client);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_path_that_names_its_model_passes_as_it_is() {
    let upstream = Upstream::answering(|head, body| {
        json_answer(&format!("{}|{}", head.lines().next().unwrap(), String::from_utf8_lossy(body)))
    });
    let rig = Rig::with(two(), &[&upstream]).await;
    let body = r#"{"model":"nobody's", "x":1e400 }"#;
    for (n, (path, passed, model, route)) in [
        (
            "/upstream/org/b/v1/chat/completions?x=%20y&model=z",
            "/v1/chat/completions?x=%20y&model=z",
            "org/b",
            "chat",
        ),
        ("/upstream/org%2Fb/no//such/../route", "/no//such/../route", "org/b", "other"),
        ("/upstream/alias-of-a/v1/models", "/v1/models", "a", "other"),
        ("/upstream/a/slots/0?action=save", "/slots/0?action=save", "a", "slots"),
    ]
    .into_iter()
    .enumerate()
    {
        let (head, answer) = rig.ask(&post(path, body)).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{path}: {head}{answer}");
        assert_eq!(answer, format!("POST {passed} HTTP/1.1|{body}"), "{path}");
        let record = rig.record(n).await;
        assert_eq!((record.model.unwrap().as_str(), record.route), (model, route), "{path}");
    }
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n").into_bytes();
    let (_, answer) = rig.ask(&get("/upstream/a/health")).await;
    assert_eq!(answer, "GET /health HTTP/1.1|", "the backend's own health");
    let (head, _) = rig.ask(&get("/upstream/a?x=1")).await;
    assert!(head.starts_with("HTTP/1.1 308 ") && head.contains("location: /upstream/a/?x=1\r\n"), "{head}");
    let (head, answer) = rig.ask(&get("/upstream/none/props")).await;
    assert!(head.starts_with("HTTP/1.1 404 ") && answer.contains("`a`, `org/b`"), "{head}{answer}");
    rig.is_clean().await;
}

#[tokio::test]
async fn a_route_that_nobody_knows_is_asked_of_a_backend_only_if_a_model_is_named() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let rig = Rig::with(two(), &[&upstream]).await;
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n").into_bytes();
    for request in [get("/no/such"), post("/no/such", "{}"), post("/no/such", "text")] {
        let (head, body) = rig.ask(&request).await;
        assert!(head.starts_with("HTTP/1.1 404 "), "{head}");
        assert!(body.contains("File Not Found") && body.contains("not_found_error"), "{body}");
    }
    assert_eq!(rig.record(0).await.outcome.as_str(), "unknown_route");
    for request in [get("/no/such?model=a"), post("/no/such", r#"{"model":"a"}"#)] {
        assert!(rig.ask(&request).await.0.starts_with("HTTP/1.1 200 "));
    }
    rig.is_clean().await;
}

#[tokio::test]
async fn each_class_of_bodies_has_its_own_limit() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let mut plan = Plan::default();
    let config = &mut plan.config;
    (config.server.body_bytes, config.server.audio_body_bytes) = (ByteSize(1000), ByteSize(2000));
    (config.server.text_body_bytes, config.server.control_body_bytes) = (ByteSize(5000), ByteSize(100));
    let rig = Rig::with(plan, &[&upstream]).await;
    for (path, limit, key) in [
        ("/v1/chat/completions", 1000, "server.body_bytes"),
        ("/no/such", 1000, "server.body_bytes"),
        ("/v1/audio/transcriptions", 2000, "server.audio_body_bytes"),
        ("/tokenize", 1000, "server.body_bytes"),
        ("/slots/0?action=erase", 100, "server.control_body_bytes"),
        ("/props", 100, "server.control_body_bytes"),
    ] {
        let body = |bytes: usize| format!("{{\"x\":\"{}\"}}", "y".repeat(bytes - 8));
        assert!(rig.ask(&post(path, &body(limit))).await.0.starts_with("HTTP/1.1 200 "), "{path}");
        // The declared length alone leads to the refusal: not a byte of the body is sent.
        let head = format!("POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", limit + 1);
        let (head, told) = rig.ask(head.as_bytes()).await;
        assert!(head.starts_with("HTTP/1.1 413 ") && told.contains(key), "{path}: {head}{told}");
    }
    rig.is_clean().await;
}
