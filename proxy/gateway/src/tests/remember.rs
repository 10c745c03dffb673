//! Requests and answers recorded for the next process, and slot saving reserved for that.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use warden_policies::modes::OnDeath;
use warden_supervisor::AnswerText;

use super::peer::{EVENTS, Upstream, json_answer, post};
use super::{Plan, Rig, eventually};
use crate::RequestOutcome;

const CHAT: &str = "/v1/chat/completions";

/// A gateway that records exchanges.
async fn rig(upstream: &Upstream, on_death: OnDeath) -> Rig {
    let rig = Rig::with(Plan { on_death, ..Plan::default() }, &[upstream]).await;
    rig.backends.keeps_turns.store(true, Ordering::SeqCst);
    rig
}

/// A backend that answers a chat as a stream or as a whole.
fn answering() -> Upstream {
    Upstream::answering(|_, body| {
        let asked: Value = serde_json::from_slice(body).unwrap_or_default();
        let timings = json!({ "cache_n": 300, "prompt_n": 10, "prompt_ms": 5.0, "predicted_n": 2 });
        if asked["stream"] != true {
            let message = json!({ "role": "assistant", "content": "Hello" });
            return json_answer(
                &json!({ "choices": [{ "message": message }], "timings": timings }).to_string(),
            );
        }
        let chunk = |delta: Value, finish: Value| json!({ "id": "c", "choices": [{ "index": 0, "delta": delta, "finish_reason": finish }] });
        let last = json!({ "id": "c", "choices": [], "timings": timings });
        let events = [
            chunk(json!({ "content": "Hel" }), Value::Null),
            chunk(json!({ "content": "lo" }), Value::Null),
            chunk(json!({}), json!("stop")),
            last,
        ];
        let events: Vec<String> = events.iter().map(|event| format!("data: {event}\n\n")).collect();
        let events = events.concat() + "data: [DONE]\n\n";
        let mut all = EVENTS.to_vec();
        all.extend_from_slice(format!("{:x}\r\n{events}\r\n0\r\n\r\n", events.len()).as_bytes());
        all
    })
}

#[tokio::test]
async fn a_conversation_is_remembered_with_its_answer_however_it_was_asked_for() {
    for (body, on_death, said) in [
        (r#"{"messages":[1],"stream":true}"#, OnDeath::Continue, AnswerText::Text("Hello".to_owned())),
        // The text of a stream is recorded only if it may have to be continued.
        (r#"{"messages":[1],"stream":true}"#, OnDeath::Error, AnswerText::Nothing),
        (r#"{"messages":[1]}"#, OnDeath::Continue, AnswerText::Nothing),
        (r#"{"messages":[1]}"#, OnDeath::Error, AnswerText::Nothing),
    ] {
        let upstream = answering();
        let rig = rig(&upstream, on_death).await;
        let (head, answer) = rig.ask(&post(CHAT, body)).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        eventually("it is remembered", || !rig.backends.turns.lock().unwrap().is_empty()).await;
        let turn = rig.backends.turns.lock().unwrap().pop().unwrap();
        assert_eq!((turn.path.as_str(), turn.body.as_deref()), (CHAT, Some(body.as_bytes())));
        assert_eq!((turn.tokens, turn.prefill, turn.has_media), (312, Some((10, 5.0)), false));
        let said = if body.contains("stream") { said } else { AnswerText::Whole(answer.into()) };
        assert_eq!(turn.said, said, "{body} {on_death:?}");
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn what_cannot_be_given_to_another_process_is_known_and_not_kept() {
    let picture =
        r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,"}}]}]}"#;
    for (path, body, has_media) in [
        (CHAT, picture, true),
        ("/v1/messages", r#"{"messages":[1]}"#, false),
        ("/infill", r#"{"prompt":"x"}"#, false),
    ] {
        let upstream = answering();
        let rig = rig(&upstream, OnDeath::Continue).await;
        rig.ask(&post(path, body)).await;
        eventually("it is known", || !rig.backends.turns.lock().unwrap().is_empty()).await;
        let turn = rig.backends.turns.lock().unwrap().pop().unwrap();
        assert_eq!((turn.body, turn.tokens, turn.has_media), (None, 312, has_media), "{path}");
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn refusals_other_routes_and_a_model_that_keeps_nothing_are_not_remembered() {
    let refusing =
        Upstream::answering(|_, _| b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}".to_vec());
    let refused = rig(&refusing, OnDeath::Continue).await;
    refused.ask(&post(CHAT, r#"{"messages":[1]}"#)).await;
    assert_eq!(refused.record(0).await.outcome, RequestOutcome::Ok);
    let answering = answering();
    let other = rig(&answering, OnDeath::Continue).await;
    other.ask(&post("/v1/embeddings", r#"{"input":"x"}"#)).await;
    other.backends.keeps_turns.store(false, Ordering::SeqCst);
    other.ask(&post(CHAT, r#"{"messages":[1]}"#)).await;
    other.record(1).await;
    for rig in [refused, other] {
        assert!(rig.backends.turns.lock().unwrap().is_empty());
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn slots_that_are_saved_for_us_alone_are_saved_for_no_client() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let rig = rig(&upstream, OnDeath::Error).await;
    let paths = [
        "/slots/0?action=save",
        "/upstream/m/slots/0?action=erase",
        "/slots%2F0",
        "/%73lots/1?action=restore",
    ];
    for (saves_for_us, status) in [(true, "501"), (false, "200")] {
        rig.backends.saves_for_us.store(saves_for_us, Ordering::SeqCst);
        for path in paths {
            let (head, body) = rig.ask(&post(path, r#"{"filename":"x"}"#)).await;
            assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{path}: {head}{body}");
        }
        let (head, _) = rig.ask(b"GET /slots HTTP/1.1\r\nHost: h\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    }
    rig.is_clean().await;
}
