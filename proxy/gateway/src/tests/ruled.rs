//! Request rules in transit: held bodies, streamed bodies, and the bytes that the backend gets.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::json;
use warden_policies::QuickMap;
use warden_policies::modes::ChooseMode;

use super::*;
use crate::{ApiKeys, KeyHash, KeySpec, ListingRules, LiveConfig, ModelRules, RequestRules, VirtualName};

fn echo() -> Upstream {
    Upstream::answering(|head, body| {
        json_answer(&format!("{}|{}", head.lines().next().unwrap(), String::from_utf8_lossy(body)))
    })
}

fn tell(rig: &Rig, model: &str, rules: ModelRules) {
    let models = QuickMap::from_iter([(ModelName::new(model), Arc::new(rules))]);
    rig.control.update(LiveConfig { models, ..LiveConfig::default() });
}

fn most(tokens: u64) -> ModelRules {
    let request = RequestRules { max_tokens: Some(tokens), ..RequestRules::default() };
    ModelRules { request, ..ModelRules::default() }
}

fn renamed(name: &str) -> ModelRules {
    ModelRules { upstream_model: Some(name.to_owned()), ..ModelRules::default() }
}

fn chunked(path: &str, pieces: &[&str]) -> Vec<u8> {
    let mut all = format!("POST {path} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n");
    for piece in pieces.iter().chain([&""]) {
        let _infallible = write!(all, "{:x}\r\n{piece}\r\n", piece.len());
    }
    all.into_bytes()
}

#[tokio::test]
async fn rules_change_the_routes_that_they_mean_and_may_be_told_anew() {
    let upstream = echo();
    let rig = Rig::start(&[&upstream]).await;
    let ask = async |path: &str, body: &str| rig.ask(&post(path, body)).await.1;
    let body = r#"{ "x" : 1e400,"max_tokens":9 }"#;
    assert!(ask("/v1/chat/completions", body).await.ends_with(body), "no rules yet");
    tell(&rig, "m", most(5));
    let ruled = r#"|{ "x" : 1e400,"max_tokens":5 }"#;
    for path in
        ["/v1/chat/completions", "/completion", "/v1/messages?beta=true", "/infill", "/v1/%63ompletions"]
    {
        assert!(ask(path, body).await.ends_with(ruled), "{path}");
    }
    let chunks = chunked("/v1/completions", &["{ \"x\" : 1e", "400,\"max_to", "kens\":9 }"]);
    assert!(rig.ask(&chunks).await.1.ends_with(ruled));
    for path in
        ["/v1/embeddings", "/tokenize", "/apply-template", "/upstream/m/v1/chat/completions", "/other"]
    {
        assert!(ask(path, body).await.ends_with(body), "{path}");
    }
    tell(&rig, "m", most(6));
    assert!(ask("/completion", body).await.ends_with(r#""max_tokens":6 }"#));
    rig.is_clean().await;
}

#[tokio::test]
async fn a_body_that_rules_cannot_read_is_refused() {
    let upstream = echo();
    let rig = Rig::start(&[&upstream]).await;
    tell(&rig, "m", most(5));
    let form = "POST /completion HTTP/1.1\r\nHost: h\r\nContent-Type: multipart/form-data; boundary=X\r\nContent-Length: 5\r\n\r\n--X--";
    for request in [
        post("/completion", "[]"),
        post("/completion", ""),
        post("/completion", r#"{"prompt":"#),
        post("/completion", r#"{"prompt":"x"}}"#),
        form.as_bytes().to_vec(),
        form.replace("multipart/form-data; boundary=X", "Multipart/form-data2")
            .replace("--X--", "{   }")
            .into_bytes(),
    ] {
        let (head, told) = rig.ask(&request).await;
        assert!(head.starts_with("HTTP/1.1 400 ") && told.contains("not a JSON object"), "{head}{told}");
        assert!(told.contains(r#"models.\"m\".request"#), "{told}");
    }
    assert_eq!(rig.record(0).await.outcome.as_str(), "unreadable_body");
    assert_eq!(upstream.accepted(), 0);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_body_with_rules_is_held_under_the_common_budget() {
    let upstream = echo();
    let mut plan = Plan::default();
    plan.config.server.buffered_bytes = ByteSize(300_000);
    plan.config.upstream.replay_bytes = ByteSize(1000);
    let rig = Rig::with(plan, &[&upstream]).await;
    let body = |bytes: usize| format!(r#"{{"model":"m","prompt":"{}"}}"#, "y".repeat(bytes));
    assert!(rig.ask(&post("/completion", &body(400_000))).await.0.starts_with("HTTP/1.1 200 "), "it streams");
    tell(&rig, "m", most(5));
    let (head, _) = rig.ask(&post("/completion", &body(400_000))).await;
    assert!(head.starts_with("HTTP/1.1 503 ") && head.contains("retry-after"), "{head}");
    assert_eq!(rig.record(1).await.outcome.as_str(), "buffers_full");
    let (_, answer) = rig.ask(&post("/completion", &body(100_000))).await;
    assert!(answer.ends_with(r#"y","n_predict":5}"#), "{}", &answer[answer.len() - 40..]);
    rig.is_clean().await;
}

#[tokio::test]
async fn the_backend_gets_its_own_name_of_the_model_wherever_it_is_named() {
    let upstream = echo();
    let mut plan = Plan { models: vec!["a", "m"], ..Plan::default() };
    plan.config.upstream.replay_bytes = ByteSize(1000);
    let rig = Rig::with(plan, &[&upstream]).await;
    tell(&rig, "m", renamed("org/the other"));
    let ask = async |request: &[u8]| {
        let (head, body) = rig.ask(request).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}{body}");
        body
    };
    for (path, body, expected) in [
        (
            "/tokenize",
            r#"{"content":"x", "model" : "alias-of-m"}"#,
            r#"{"content":"x", "model" : "org/the other"}"#,
        ),
        ("/v1/chat/completions?model=m&y", "{}", r#"{"model":"org/the other"}"#),
        ("/lora-adapters?model=m", "[]", "[]"),
        ("/v1/embeddings", r#"{"model":"a"}"#, r#"{"model":"a"}"#),
    ] {
        let answer = ask(&post(path, body)).await;
        assert_eq!(answer.split_once('|').unwrap().1, expected, "{path}");
    }
    let answer = ask(b"GET /props?x=%20&model=m HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert_eq!(answer, "GET /props?x=%20&model=org/the%20other HTTP/1.1|");
    let file = "RIFF".repeat(1000);
    let form = format!(
        "--X\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n{file}\r\n--X\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--X--\r\n"
    );
    let head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: h\r\nContent-Type: multipart/form-data; boundary=X\r\n";
    let answer = ask(format!("{head}Content-Length: {}\r\n\r\n{form}", form.len()).as_bytes()).await;
    assert_eq!(answer.split_once('|').unwrap().1, form.replace("\r\n\r\nm\r\n", "\r\n\r\norg/the other\r\n"));
    rig.is_clean().await;
}

#[tokio::test]
async fn a_large_body_gets_its_new_name_and_streams_on_unless_it_names_a_second() {
    let upstream = echo();
    let mut plan = Plan { models: vec!["a", "m"], ..Plan::default() };
    plan.config.upstream.replay_bytes = ByteSize(1000);
    plan.config.server.buffered_bytes = ByteSize(100_000);
    let rig = Rig::with(plan, &[&upstream]).await;
    tell(&rig, "m", renamed("b"));
    let rest = "y".repeat(300_000);
    let body = format!(r#"{{"stream":false,"model":"m","prompt":"{rest}"}}"#);
    let (head, answer) = rig.ask(&post("/completion", &body)).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_eq!(answer.split_once('|').unwrap().1, body.replace("\"m\"", "\"b\""));
    let twice = format!(r#"{{"model":"m","prompt":"{rest}","model":"c"}}"#);
    let (head, answer) = rig.ask(&post("/completion", &twice)).await;
    assert!(head.starts_with("HTTP/1.1 400 ") && answer.contains("`model` twice"), "{head}{answer}");
    let small = json!({"model": "m"}).to_string().replace('}', r#","model":"a"}"#);
    let (_, answer) = rig.ask(&post("/completion", &small)).await;
    assert_eq!(answer.split_once('|').unwrap().1, r#"{"model":"b","model":"b"}"#);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_name_without_a_process_means_a_model_with_rules_of_its_own() {
    let upstream = echo();
    let rig = Rig::with(Plan { models: vec!["a", "b"], ..Plan::default() }, &[&upstream]).await;
    let of = |name: &str, tokens| (ModelName::new(name), Arc::new(most(tokens)));
    let name = |models| VirtualName { models, choose: ChooseMode::Loaded };
    let by_name = BTreeMap::from([
        ("brief".to_owned(), name(vec![of("b", 7)])),
        ("any".to_owned(), name(vec![of("a", 8), of("b", 9)])),
        // These rules apply only to the name `a` itself.
        ("a".to_owned(), name(vec![of("a", 6)])),
    ]);
    let models = QuickMap::from_iter([of("b", 50)]);
    rig.control.update(LiveConfig { models, by_name, ..LiveConfig::default() });
    for (asked, tokens, model) in [
        ("brief", 7, "b"),
        ("any", 8, "a"),
        ("b", 50, "b"),
        ("alias-of-b", 50, "b"),
        ("a", 6, "a"),
        ("alias-of-a", 90, "a"),
    ] {
        for (path, body) in [
            ("/v1/chat/completions".to_owned(), format!(r#"{{"model":"{asked}","max_tokens":90}}"#)),
            (format!("/v1/chat/completions?model={asked}"), r#"{"max_tokens":90}"#.to_owned()),
        ] {
            let (_, answer) = rig.ask(&post(&path, &body)).await;
            assert!(answer.contains(&format!(r#""max_tokens":{tokens}}}"#)), "{asked}: {answer}");
            let records = rig.records.0.lock().unwrap().len();
            assert_eq!(rig.record(records - 1).await.model, Some(ModelName::new(model)));
        }
    }
    // In a path the name selects the model, and bodies stay unchanged.
    let (_, answer) = rig.ask(&post("/upstream/brief/v1/chat/completions", r#"{"max_tokens":90}"#)).await;
    assert!(answer.contains(r#""max_tokens":90}"#), "{answer}");
    let (_, list) = rig.ask(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n").await;
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let listed = list["data"].as_array().unwrap().iter().map(|model| (&model["id"], &model["means"]));
    let null = json!(null);
    assert_eq!(
        listed.collect::<Vec<_>>(),
        [
            (&json!("a"), &null),
            (&json!("b"), &null),
            (&json!("any"), &json!("a")),
            (&json!("brief"), &json!("b"))
        ]
    );
    let (head, one) = rig.ask(b"GET /v1/models/brief HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 ") && one.contains(r#""id":"brief""#), "{one}");
    let (_, one) = rig.ask(b"GET /v1/models/a HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(one.contains(r#""id":"a""#) && !one.contains("means"), "{one}");
    let (head, none) = rig.ask(&post("/v1/chat/completions", r#"{"model":"none"}"#)).await;
    assert!(head.starts_with("HTTP/1.1 404 ") && none.contains("`any`, `brief`"), "{none}");
}

#[tokio::test]
async fn a_pattern_means_its_model_for_each_name_that_nothing_else_has() {
    let upstream = echo();
    let rig = Rig::with(Plan { models: vec!["a", "b"], ..Plan::default() }, &[&upstream]).await;
    let name = |model: &str, tokens| VirtualName {
        models: vec![(ModelName::new(model), Arc::new(most(tokens)))],
        choose: ChooseMode::Loaded,
    };
    let named = [("claude-*", "b", 7), ("claude-haiku-*", "a", 8), ("exact", "a", 9)];
    let mut by_name = BTreeMap::from(named.map(|(own, model, tokens)| (own.to_owned(), name(model, tokens))));
    rig.control.update(LiveConfig { by_name: by_name.clone(), ..LiveConfig::default() });
    let body =
        |asked: &str| post("/v1/chat/completions", &format!(r#"{{"model":"{asked}","max_tokens":90}}"#));
    for (asked, tokens) in
        [("claude-x", "7"), ("claude-haiku-4", "8"), ("exact", "9"), ("b", "90"), ("alias-of-b", "90")]
    {
        let (_, answer) = rig.ask(&body(asked)).await;
        assert!(answer.contains(&format!(r#""max_tokens":{tokens}}}"#)), "{asked}: {answer}");
    }
    let (head, none) = rig.ask(&body("gpt-5")).await;
    assert!(head.starts_with("HTTP/1.1 404 ") && none.contains("`exact`") && !none.contains('*'), "{none}");
    let (_, list) = rig.ask(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(list.contains("exact") && !list.contains('*'), "{list}");
    by_name.insert("*".to_owned(), name("a", 5));
    rig.control.update(LiveConfig { by_name, ..LiveConfig::default() });
    let (_, answer) = rig.ask(&body("gpt-5")).await;
    assert!(answer.contains(r#""max_tokens":5}"#), "{answer}");
}

#[tokio::test]
async fn lists_of_models_say_what_the_configuration_says_of_them() {
    let upstream = echo();
    let rig = Rig::with(Plan { models: vec!["a", "b"], ..Plan::default() }, &[&upstream]).await;
    let fields =
        json!({ "name": "Big A", "tags": ["x"], "id": "never", "meta": { "llamaswap": { "size": 7 } } });
    let fields = fields.as_object().unwrap().clone();
    let rules = |listing| Arc::new(ModelRules { listing, ..ModelRules::default() });
    let models = QuickMap::from_iter([
        (ModelName::new("a"), rules(ListingRules { hidden: false, fields })),
        (ModelName::new("b"), rules(ListingRules { hidden: true, ..ListingRules::default() })),
    ]);
    let of = |model: &str| VirtualName {
        models: vec![(ModelName::new(model), Arc::default())],
        choose: ChooseMode::Loaded,
    };
    let by_name = BTreeMap::from([("of-a".to_owned(), of("a")), ("of-b".to_owned(), of("b"))]);
    rig.control.update(LiveConfig { models, by_name, ..LiveConfig::default() });
    let (_, list) = rig.ask(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n").await;
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let ids: Vec<_> = list["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!((ids, list["models"].as_array().unwrap().len()), (vec![&json!("a"), &json!("of-a")], 1));
    for entry in list["data"].as_array().unwrap() {
        assert_eq!((&entry["name"], &entry["meta"]["llamaswap"]["size"]), (&json!("Big A"), &json!(7)));
    }
    // A hidden model can be requested by name, and serves.
    let (head, one) = rig.ask(b"GET /v1/models/b HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 ") && one.contains(r#""id":"b""#), "{one}");
    let (head, _) = rig.ask(&post("/v1/chat/completions", r#"{"model":"b"}"#)).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
}

#[tokio::test]
async fn a_key_has_a_right_to_a_name_or_to_models_behind_it() {
    let upstream = echo();
    let rig = Rig::with(Plan { models: vec!["a", "b"], ..Plan::default() }, &[&upstream]).await;
    let of = |name: &str, tokens| (ModelName::new(name), Arc::new(most(tokens)));
    let by_name = BTreeMap::from([(
        "any".to_owned(),
        VirtualName { models: vec![of("a", 8), of("b", 9)], choose: ChooseMode::Loaded },
    )]);
    for (models, answers) in [(vec!["any"], "8"), (vec!["b"], "9"), (vec!["c"], "")] {
        let key = KeySpec {
            name: "k".into(),
            hash: KeyHash::from_key(b"sk-0123456789abcdef"),
            models: Some(models.iter().map(ModelName::new).collect()),
            rate: None,
            tokens: None,
            concurrency: None,
            operator: false,
        };
        let keys = Some(ApiKeys::new(vec![key]));
        rig.control.update(LiveConfig { by_name: by_name.clone(), keys, ..LiveConfig::default() });
        let body = r#"{"model":"any","max_tokens":90}"#;
        let asked = String::from_utf8(post("/v1/chat/completions", body)).unwrap();
        let asked = asked.replacen("\r\n", "\r\nAuthorization: Bearer sk-0123456789abcdef\r\n", 1);
        let (head, answer) = rig.ask(asked.as_bytes()).await;
        if answers.is_empty() {
            assert!(head.starts_with("HTTP/1.1 404 ") && !answer.contains("any,"), "{head}{answer}");
        } else {
            assert!(answer.contains(&format!(r#""max_tokens":{answers}}}"#)), "{answer}");
        }
    }
}
