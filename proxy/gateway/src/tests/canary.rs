//! A canary, another build under trial: if it fails in any way, the normal build answers.

use warden_policies::canary::TrialArm;

use super::goes_on::{Odd, dying, next, said};
use super::*;
use crate::RequestOutcome;

const CHAT: &str = "/v1/chat/completions";
const OWN: &str = r#"{"own":true}"#;
const BODY: &str = r#"{"messages":[{"role":"user","content":"hi"}],"temperature":0}"#;
const STREAM: &str =
    r#"{"messages":[{"role":"user","content":"hi"}],"temperature":0,"seed":7,"mirostat":1,"stream":true}"#;

fn plan() -> Plan {
    Plan { on_death: OnDeath::Continue, ..Plan::default() }
}

fn own() -> Upstream {
    Upstream::answering(|_, _| json_answer(OWN))
}

/// A backend that takes a request, answers with these bytes in two pieces, and closes.
fn saying(first: &'static [u8], second: &'static [u8]) -> Upstream {
    Upstream::start(move |mut peer| async move {
        peer.request().await;
        peer.send(first).await;
        peer.send(second).await;
    })
}

/// A rig whose model has a canary that gets every conversation.
async fn rig(plan: Plan, own: &Upstream, canary: Option<&Upstream>) -> Rig {
    let rig = Rig::with(plan, &[own]).await;
    let name = ModelName::new("m@canary");
    let route = CanaryRoute { name, share: 1.0, seed: 0, patience: Duration::from_millis(300) };
    *rig.backends.canary.lock().unwrap() = Some((route, canary.map(|canary| canary.path.clone())));
    rig
}

#[tokio::test]
async fn a_sound_answer_of_a_canary_passes_as_it_is_and_is_counted_for_it() {
    let chunked = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    for canary in [
        Upstream::answering(|_, _| json_answer(r#"{"canary":1}"#)),
        saying(chunked, b"7\r\n{\"canar\r\n5\r\ny\":1}\r\n0\r\n\r\n"),
    ] {
        let own = own();
        let rig = rig(plan(), &own, Some(&canary)).await;
        let (head, body) = rig.ask(&post(CHAT, BODY)).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert!(!head.contains("x-warden-continued"), "{head}");
        assert_eq!(body, r#"{"canary":1}"#);
        let record = rig.record(0).await;
        let exchange = record.trial_exchange().unwrap();
        assert_eq!((exchange.arm, exchange.failed, record.retries), (TrialArm::Canary, false, 0));
        assert!(exchange.latency_ms.is_some(), "{exchange:?}");
        assert_eq!((own.accepted(), record.generation), (0, Some(GenerationId(CANARY))));
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn whatever_a_canary_does_before_its_answer_is_whole_the_models_own_build_answers() {
    let cases: [(&str, Upstream); 8] = [
        ("closes", saying(b"", b"")),
        ("error", saying(b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n", b"{}")),
        ("no HTTP", saying(b"ICY 200 OK\r\n\r\n", b"")),
        ("half a head", saying(b"HTTP/1.1 200 OK\r\nContent-", b"")),
        ("two lengths", saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n", b"{}")),
        ("half a body", saying(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", b"{\"a\"")),
        (
            "an open chunk",
            saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"4\r\n{\"a\"\r\n"),
        ),
        ("silent", Upstream::silent()),
    ];
    for (what, canary) in cases {
        for body in [BODY, STREAM] {
            let own = own();
            let rig = rig(plan(), &own, Some(&canary)).await;
            let (head, answer) = rig.ask(&post(CHAT, body)).await;
            assert!(head.starts_with("HTTP/1.1 200 ") && answer == OWN, "{what}: {head}{answer}");
            let record = rig.record(0).await;
            let exchange = record.trial_exchange().unwrap();
            assert_eq!((exchange.arm, exchange.failed), (TrialArm::Canary, true), "{what}");
            assert_eq!(
                (record.outcome, record.retries, own.accepted()),
                (RequestOutcome::Ok, 1, 1),
                "{what}"
            );
            assert_eq!(record.generation, Some(GenerationId(0)), "{what}");
            // With only one lease, a second attempt would have none: the first one was returned.
            assert_eq!(rig.backends.granted_by_canary.load(Ordering::SeqCst), 1, "{what}");
            rig.is_clean().await;
        }
    }
}

#[tokio::test]
async fn what_fails_with_both_builds_counts_as_it_does_for_those_that_one_gets_alone() {
    for (status, fails) in [("500 Oh", true), ("400 Bad Request", false)] {
        let failing = || {
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\n");
            saying(head.leak().as_bytes(), b"{}")
        };
        let (own, canary) = (failing(), failing());
        let rig = rig(plan(), &own, Some(&canary)).await;
        let (head, _) = rig.ask(&post(CHAT, BODY)).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {}", &status[..3])), "{head}");
        let exchange = rig.record(0).await.trial_exchange().unwrap();
        assert_eq!((exchange.arm, exchange.failed), (TrialArm::Canary, fails), "{status}");
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn only_what_can_be_repeated_goes_to_a_canary_and_nobody_waits_for_one() {
    let canary = || Upstream::answering(|_, _| json_answer(r#"{"canary":1}"#));
    let large = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "y".repeat(1_000_000));
    for (request, on_death) in [
        (b"GET /props HTTP/1.1\r\nHost: h\r\n\r\n".to_vec(), OnDeath::Continue),
        (post("/slots/0?action=save", "{}"), OnDeath::Continue),
        (post(CHAT, &large), OnDeath::Continue),
        (post(CHAT, BODY), OnDeath::Error),
    ] {
        let (own, canary) = (own(), canary());
        let rig = rig(Plan { on_death, ..Plan::default() }, &own, Some(&canary)).await;
        let (head, body) = rig.ask(&request).await;
        assert!(head.starts_with("HTTP/1.1 200 ") && body == OWN, "{head}{body}");
        assert_eq!((canary.accepted(), rig.record(0).await.canary_part), (0, None));
        rig.is_clean().await;
    }
    // The canary is busy or starting.
    let own = own();
    let rig = rig(plan(), &own, None).await;
    let (_, body) = rig.ask(&post(CHAT, BODY)).await;
    assert_eq!((body.as_str(), rig.record(0).await.canary_part), (OWN, None));
    // This conversation belongs to the own build's share of the comparison.
    let (route, path) = rig.backends.canary.lock().unwrap().clone().unwrap();
    *rig.backends.canary.lock().unwrap() = Some((CanaryRoute { share: 0.0, ..route }, path));
    let (_, body) = rig.ask(&post(CHAT, BODY)).await;
    let exchange = rig.record(1).await.trial_exchange().unwrap();
    assert_eq!((body.as_str(), exchange.arm, exchange.failed), (OWN, TrialArm::Base, false));
    rig.is_clean().await;
}

/// A backend that answers with a stream of these events, and breaks off if `ends` is false.
fn streaming(events: Vec<String>, ends: bool) -> Upstream {
    Upstream::start(move |mut peer| {
        let events = events.clone();
        async move {
            peer.request().await;
            peer.send(EVENTS).await;
            for event in &events {
                peer.send_chunk(event.as_bytes()).await;
            }
            if ends {
                peer.send(b"0\r\n\r\n").await;
                peer.rest().await;
            }
        }
    })
}

#[tokio::test]
async fn a_stream_that_a_canary_breaks_off_goes_on_by_the_models_own_build() {
    let done = || "data: [DONE]\n\n".to_owned();
    let error =
        "data: {\"error\":{\"code\":500,\"message\":\"Compute error.\",\"type\":\"server_error\"}}\n\n";
    let cases = [
        ("before an event", streaming(Vec::new(), false)),
        ("behind an event", streaming(vec![said("Hel")], false)),
        ("an error at once", streaming(vec![error.to_owned()], true)),
        ("an error in the middle", streaming(vec![said("Hel"), error.to_owned()], true)),
    ];
    for (what, canary) in cases {
        // Without sampling the other build gives the same answer, which is compared with the client's part.
        let own = streaming(vec![said("Hel"), said("lo"), done()], true);
        let rig = rig(plan(), &own, Some(&canary)).await;
        // The process died by itself.
        rig.backends.dead.store(true, Ordering::SeqCst);
        let (head, body) = rig.ask(&post(CHAT, STREAM)).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{what}: {head}");
        let count = |text: &str| body.matches(text).count();
        assert_eq!((count("\"Hel\""), count("\"lo\""), count("[DONE]")), (1, 1, 1), "{what}: {body}");
        assert!(!body.contains("error"), "{what}: {body}");
        let record = rig.record(0).await;
        let exchange = record.trial_exchange().unwrap();
        assert_eq!(
            (exchange.arm, exchange.failed, record.outcome),
            (TrialArm::Canary, true, RequestOutcome::Ok),
            "{what}"
        );
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn what_a_canary_draws_by_chance_goes_on_by_its_tokens_although_the_binary_is_another_one() {
    let drawn =
        r#"{"messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":9,"temperature":0.7}"#;
    let canary = dying(said("Hel") + &said("lo"));
    let (own, asked) = next(Odd::Well);
    let rig = rig(plan(), &own, Some(&canary)).await;
    let (_, answer) = rig.ask(&post(CHAT, drawn)).await;
    assert!(answer.contains(&said(" you")) && answer.ends_with("data: [DONE]\n\n"), "{answer}");
    assert!(asked.lock().unwrap().iter().any(|(path, _)| path == "/completion"));
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::Ok);
    rig.is_clean().await;
}
