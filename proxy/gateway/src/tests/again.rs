//! Requests whose server dies before the client has any part of the answer are executed once more.

use super::*;
use crate::RequestOutcome;

/// A model that continues answers, whose leases go to one backend after the other.
fn going_on() -> Plan {
    Plan { rotates: true, on_death: OnDeath::Continue, ..Plan::default() }
}

/// A backend that takes one request, sends `words` and closes.
fn dying(words: &'static [u8]) -> Upstream {
    Upstream::start(move |mut peer| async move {
        peer.request().await;
        peer.send(words).await;
    })
}

/// A backend that answers every request with this stream.
fn streaming(event: &'static [u8]) -> Upstream {
    Upstream::start(move |mut peer| async move {
        while peer.request().await.is_some() {
            peer.send(EVENTS).await;
            peer.send_chunk(event).await;
            peer.send(b"0\r\n\r\n").await;
        }
    })
}

const ASKED: &str = r#"{"stream":true}"#;

#[tokio::test]
async fn what_only_computes_is_executed_once_more_and_marked() {
    let alive = Upstream::answering(|_, body| json_answer(std::str::from_utf8(body).unwrap()));
    for words in [&b""[..], b"H", b"HTTP/1.1 200 OK\r\n"] {
        let dying = dying(words);
        for path in [
            "/v1/chat/completions",
            "/completion",
            "/v1/messages",
            "/v1/responses",
            "/infill",
            "/v1/embeddings",
            "/rerank",
            "/tokenize",
            "/apply-template",
        ] {
            let rig = Rig::with(going_on(), &[&dying, &alive]).await;
            *rig.backends.facts.lock().unwrap() = ServerFacts { stream_head: StreamHeadTime::Unknown, ..NEW };
            let before = alive.accepted();
            let (head, body) = rig.ask(&post(path, r#"{"x":1}"#)).await;
            assert!(head.starts_with("HTTP/1.1 200 "), "{path}: {head}{body}");
            assert!(head.contains("x-warden-continued: 1\r\n"), "{path}: {head}");
            assert_eq!(body, r#"{"x":1}"#, "{path}");
            let record = rig.record(0).await;
            assert_eq!(
                (record.retries, record.continued, record.outcome),
                (1, true, RequestOutcome::Ok),
                "{path}"
            );
            assert_eq!((record.generation, alive.accepted()), (Some(GenerationId(1)), before + 1), "{path}");
            rig.is_clean().await;
        }
    }
}

#[tokio::test]
async fn what_may_do_more_than_compute_or_is_not_held_is_not() {
    let (dying, alive) = (dying(b""), Upstream::answering(|_, _| json_answer("{}")));
    let big = format!(r#"{{"x":"{}"}}"#, "y".repeat(1_000_000));
    for (path, body) in [
        ("/props", "{}"),
        ("/slots/0?action=save", "{}"),
        ("/lora-adapters", "{}"),
        ("/tools", "{}"),
        ("/upstream/m/models/load", "{}"),
        ("/v1/chat/completions/control", "{}"),
        ("/of/somebody/else", "{}"),
        ("/v1/chat/completions", &big),
    ] {
        let rig = Rig::with(going_on(), &[&dying, &alive]).await;
        let (head, answer) = rig.ask(&post(path, body)).await;
        assert!(
            head.starts_with("HTTP/1.1 502 ") && head.contains("x-warden-executed: maybe\r\n"),
            "{path}: {head}{answer}"
        );
        assert!(!rig.record(0).await.continued, "{path}");
        rig.is_clean().await;
    }
    // The operator does not permit a second execution.
    let rig = Rig::with(Plan { on_death: OnDeath::Error, ..going_on() }, &[&dying, &alive]).await;
    assert!(rig.ask(&post("/completion", "{}")).await.0.starts_with("HTTP/1.1 502 "));
    assert_eq!(alive.accepted(), 0);
    rig.is_clean().await;
}

#[tokio::test]
async fn nothing_is_executed_a_third_time() {
    let (first, second) = (dying(b""), dying(b""));
    let alive = Upstream::answering(|_, _| json_answer("{}"));
    for (words, body) in [("{}", "{}"), (ASKED, ASKED)] {
        let rig = Rig::with(going_on(), &[&first, &second, &alive]).await;
        // It is unknown when this build sends the head of a stream, so a missing head proves nothing.
        *rig.backends.facts.lock().unwrap() = ServerFacts { stream_head: StreamHeadTime::Unknown, ..NEW };
        let (head, answer) = rig.ask(&post("/v1/chat/completions", body)).await;
        assert!(head.starts_with("HTTP/1.1 502 "), "{words}: {head}{answer}");
        assert!(head.contains("x-warden-executed: maybe\r\n"), "{head}");
        let record = rig.record(0).await;
        assert_eq!(
            (record.retries, record.continued, record.outcome),
            (1, true, RequestOutcome::UpstreamDied)
        );
        assert_eq!(alive.accepted(), 0);
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn that_no_second_server_is_found_does_not_unsay_that_the_first_may_have_executed_it() {
    for words in [&b""[..], EVENTS] {
        let dying = dying(words);
        let rig = Rig::with(going_on(), &[&dying, &dying]).await;
        let end = Arc::new(Notify::new());
        *rig.backends.slow_end.lock().unwrap() = Some(end.clone());
        let mut client = rig.client().await;
        client.send(&post("/v1/chat/completions", ASKED)).await;
        *rig.backends.facts.lock().unwrap() = ServerFacts { stream_head: StreamHeadTime::Unknown, ..NEW };
        eventually("it waits for the end", || rig.backends.settling.load(Ordering::SeqCst) > 0).await;
        *rig.backends.denied.lock().unwrap() = Some(LeaseDenied::ShuttingDown);
        end.notify_one();
        let (head, body) = client.response().await;
        let body = String::from_utf8(body).unwrap();
        if words.is_empty() {
            assert!(
                head.starts_with("HTTP/1.1 502 ") && head.contains("x-warden-executed: maybe\r\n"),
                "{head}"
            );
        } else {
            assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
            assert!(body.starts_with("data: {\"error\":{\"code\":502") && !body.contains("[DONE]"), "{body}");
        }
        assert!(body.contains("its process ended before it answered"), "{body}");
        let record = rig.record(0).await;
        assert_eq!((record.continued, record.outcome), (true, RequestOutcome::UpstreamDied));
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_request_that_is_refused_meanwhile_is_told_so_and_that_it_may_have_run() {
    let alive = Upstream::answering(|_, _| json_answer("{}"));
    let dying = dying(b"");
    let rig = Rig::with(going_on(), &[&dying, &alive]).await;
    let end = Arc::new(Notify::new());
    *rig.backends.slow_end.lock().unwrap() = Some(end.clone());
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", "{}")).await;
    eventually("it waits for the end", || rig.backends.settling.load(Ordering::SeqCst) > 0).await;
    *rig.backends.standing.lock().unwrap() = RequestStanding::Refused { left: Duration::from_secs(60) };
    end.notify_one();
    let (head, _) = client.response().await;
    assert!(head.starts_with("HTTP/1.1 422 ") && head.contains("x-warden-executed: maybe\r\n"), "{head}");
    assert_eq!(alive.accepted(), 0, "it would have met the same");
    rig.is_clean().await;
}

#[tokio::test]
async fn a_stream_without_an_event_goes_on_by_another_server() {
    let alive = streaming(b"data: {\"n\":1}\n\ndata: [DONE]\n\n");
    // The answer ends after its head, after a comment, or within an event, which the client does not get.
    for last in [&b""[..], b"5\r\n: x\n\n\r\n", b"9\r\ndata: {\"h\r\n"] {
        let dying = Upstream::start(move |mut peer| async move {
            peer.request().await;
            peer.send(EVENTS).await;
            peer.send(last).await;
        });
        let rig = Rig::with(going_on(), &[&dying, &alive]).await;
        let (head, body) = rig.ask(&post("/v1/chat/completions", ASKED)).await;
        assert!(head.starts_with("HTTP/1.1 200 ") && head.contains("text/event-stream"), "{head}");
        let events: Vec<&str> = body.split("\n\n").filter(|event| !event.starts_with(':')).collect();
        assert_eq!(events, ["data: {\"n\":1}", "data: [DONE]", ""], "{body}");
        assert!(body.contains(": continued by another process\n\n"), "{body}");
        let record = rig.record(0).await;
        assert_eq!((record.retries, record.continued, record.outcome), (1, true, RequestOutcome::Ok));
        assert_eq!((record.generation, record.bytes_out), (Some(GenerationId(1)), body.len() as u64));
        assert_eq!(*rig.backends.told.lock().unwrap(), ["broke"]);
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_stream_with_an_event_ends_with_an_error_and_is_not_begun_again() {
    let dying = Upstream::start(|mut peer| async move {
        peer.request().await;
        peer.send(EVENTS).await;
        peer.send_chunk(b"data: {\"n\":1}\n\n").await;
    });
    let alive = streaming(b"data: {\"n\":2}\n\n");
    let rig = Rig::with(going_on(), &[&dying, &alive]).await;
    let (_, body) = rig.ask(&post("/v1/chat/completions", ASKED)).await;
    assert!(body.starts_with("data: {\"n\":1}\n\ndata: {\"error\":{\"code\":502"), "{body}");
    let record = rig.record(0).await;
    assert_eq!(
        (record.continued, record.outcome, alive.accepted()),
        (false, RequestOutcome::UpstreamDied, 0)
    );
    rig.is_clean().await;
}

#[tokio::test]
async fn a_process_that_is_stopped_early_costs_nobody_an_answer() {
    for (body, words) in [("{}", &b""[..]), (ASKED, EVENTS)] {
        let taken = Arc::new(Notify::new());
        let has_it = taken.clone();
        let slow = Upstream::start(move |mut peer| {
            let has_it = has_it.clone();
            async move {
                peer.request().await;
                peer.send(words).await;
                has_it.notify_one();
                peer.rest().await;
            }
        });
        let alive = if body == ASKED {
            streaming(b"data: {}\n\n")
        } else {
            Upstream::answering(|_, _| json_answer("{}"))
        };
        let rig = Rig::with(going_on(), &[&slow, &alive]).await;
        let mut client = rig.client().await;
        client.send(&post("/v1/chat/completions", body)).await;
        taken.notified().await;
        rig.backends.revoke.cancel();
        let (head, answer) = client.response().await;
        let answer = String::from_utf8(answer).unwrap();
        assert!(head.starts_with("HTTP/1.1 200 ") && answer.contains("{}"), "{head}{answer}");
        assert!(!answer.contains("error"), "{answer}");
        assert_eq!(*rig.backends.told.lock().unwrap(), ["lost"]);
        assert!(rig.record(0).await.continued);
        eventually("the first one is left", || slow.open() == 0).await;
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_stream_that_waits_for_a_server_says_so_and_its_client_may_leave() {
    let (dying, alive) = (dying(EVENTS), streaming(b"data: {}\n\n"));
    for leaves in [false, true] {
        let mut plan = going_on();
        plan.config.upstream.comment_interval = Duration::from_millis(10);
        plan.config.upstream.connect_timeout = PATIENCE;
        let rig = Rig::with(plan, &[&dying, &alive]).await;
        let end = Arc::new(Notify::new());
        *rig.backends.slow_end.lock().unwrap() = Some(end.clone());
        let mut client = rig.client().await;
        client.send(&post("/v1/chat/completions", ASKED)).await;
        client.until("\r\n\r\n").await;
        for _ in 0..3 {
            client.until(": waiting for another process\n\n").await;
        }
        if leaves {
            drop(client);
            let record = rig.record(0).await;
            assert_eq!((record.continued, record.outcome), (true, RequestOutcome::ClientGone));
            assert_eq!(rig.live(), 0, "no lease is waited for");
        } else {
            end.notify_one();
            client.until("data: {}\n\n").await;
            assert_eq!(rig.record(0).await.outcome, RequestOutcome::Ok);
        }
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn an_answer_that_is_no_stream_cannot_go_on_as_one() {
    let dying = dying(EVENTS);
    let refusing = Upstream::answering(|_, _| {
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}".to_vec()
    });
    for other in [refusing, Upstream::answering(|_, _| json_answer("{}"))] {
        let rig = Rig::with(going_on(), &[&dying, &other]).await;
        let (head, body) = rig.ask(&post("/v1/messages", ASKED)).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert!(body.starts_with("event: error\ndata: {\"type\":\"error\""), "{body}");
        assert!(body.contains("no stream"), "{body}");
        assert_eq!(rig.record(0).await.outcome, RequestOutcome::UpstreamGarbled);
        rig.is_clean().await;
    }
}
