//! Backends that die, at every moment.

use super::*;
use crate::RequestOutcome;

fn rotating() -> Plan {
    Plan { rotates: true, ..Plan::default() }
}

fn gone() -> Upstream {
    let mut upstream = Upstream::start(|_| async {});
    upstream.tasks.abort_all();
    std::fs::remove_file(&upstream.path).unwrap();
    upstream
}

#[tokio::test]
async fn a_backend_that_is_gone_is_replaced_by_the_next() {
    let (dead, alive) =
        (gone(), Upstream::answering(|_, body| json_answer(std::str::from_utf8(body).unwrap())));
    for size in [10, 1_000_000] {
        let rig = Rig::with(rotating(), &[&dead, &alive]).await;
        let body = format!(r#"{{"model":"m","x":"{}"}}"#, "y".repeat(size));
        let (head, answer) = rig.ask(&post("/v1/chat/completions", &body)).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert!(answer == body);
        let record = rig.record(0).await;
        assert_eq!((record.retries, record.generation), (1, Some(GenerationId(1))));
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn the_lease_of_a_failed_attempt_is_back_before_another_is_asked_for() {
    let dying = Upstream::start(|mut peer| async move {
        peer.request().await;
    });
    let alive = Upstream::answering(|_, _| json_answer("{}"));
    // With one slot, a request that kept its lease would wait for itself.
    let rig = Rig::with(Plan { room: 1, ..rotating() }, &[&dying, &alive]).await;
    let answered = timeout(PATIENCE, rig.ask(&post("/v1/chat/completions", r#"{"stream":true}"#))).await;
    let (head, _) = answered.expect("it waits for its own slot");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_eq!(rig.record(0).await.retries, 1);
    rig.is_clean().await;
}

#[tokio::test]
async fn when_no_backend_can_be_reached_nothing_was_executed() {
    let dead = gone();
    let mut plan = Plan::default();
    plan.config.upstream.connect_timeout = Duration::from_millis(100);
    let rig = Rig::with(plan, &[&dead]).await;
    let (head, body) = rig.ask(&post("/v1/chat/completions", "{}")).await;
    assert!(head.starts_with("HTTP/1.1 503 ") && head.contains("x-warden-executed: no\r\n"), "{head}{body}");
    assert!(head.contains("retry-after: 1\r\n"), "{head}");
    rig.is_clean().await;
}

#[tokio::test]
async fn a_stream_that_never_began_is_sent_again_and_anything_else_is_not() {
    let taken = Arc::new(AtomicUsize::new(0));
    let count = taken.clone();
    let dying = Upstream::start(move |mut peer| {
        let count = count.clone();
        async move {
            peer.request().await;
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    let alive = Upstream::answering(|_, _| json_answer("{}"));
    let big = format!(r#"{{"stream":true,"x":"{}"}}"#, "y".repeat(1_000_000));
    for (path, body, again) in [
        ("/v1/chat/completions", r#"{"stream":true}"#, true),
        ("/v1/messages", r#"{"messages":[],"stream":true}"#, true),
        ("/v1/chat/completions", r#"{"stream":false}"#, false),
        ("/v1/chat/completions", r#"{"stream":true,"stream":true}"#, false),
        ("/v1/chat/completions", "{}", false),
        ("/v1/embeddings", r#"{"stream":true}"#, false),
        // The gateway does not hold this body, so it cannot be sent again.
        ("/v1/chat/completions", &big, false),
    ] {
        taken.store(0, Ordering::SeqCst);
        let rig = Rig::with(rotating(), &[&dying, &alive]).await;
        let (head, answer) = rig.ask(&post(path, body)).await;
        let record = rig.record(0).await;
        if again {
            assert!(head.starts_with("HTTP/1.1 200 "), "{body}: {head}{answer}");
            assert_eq!((record.retries, record.outcome), (1, RequestOutcome::Ok));
        } else {
            assert!(head.starts_with("HTTP/1.1 502 "), "{head}{answer}");
            assert!(head.contains("x-warden-executed: maybe\r\n"), "{head}");
            assert_eq!((record.retries, record.outcome), (0, RequestOutcome::UpstreamDied));
        }
        assert_eq!(taken.load(Ordering::SeqCst), 1);
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn where_the_head_of_a_stream_may_come_with_its_first_token_no_head_proves_nothing() {
    let dying = Upstream::start(|mut peer| async move {
        peer.request().await;
    });
    for stream_head in [StreamHeadTime::AfterFirstToken, StreamHeadTime::Unknown] {
        let alive = Upstream::answering(|_, _| json_answer("{}"));
        let rig = Rig::with(rotating(), &[&dying, &alive]).await;
        *rig.backends.facts.lock().unwrap() = ServerFacts { stream_head, ..NEW };
        let (head, _) = rig.ask(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
        assert!(head.starts_with("HTTP/1.1 502 "), "{stream_head:?}: {head}");
        assert!(head.contains("x-warden-executed: maybe\r\n"), "{stream_head:?}: {head}");
        assert_eq!(alive.accepted(), 0, "{stream_head:?}");
        // A request that executes nothing is sent to any other server.
        let rig = Rig::with(rotating(), &[&dying, &alive]).await;
        *rig.backends.facts.lock().unwrap() = ServerFacts { stream_head, ..NEW };
        let (head, _) = rig.ask(b"GET /props HTTP/1.1\r\nHost: h\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{stream_head:?}: {head}");
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_suspect_is_sent_alone_and_a_refused_request_not_at_all_in_whatever_way_its_body_comes() {
    let served = Arc::new(AtomicUsize::new(0));
    let count = served.clone();
    // A body that broke off does not count as served; a whole one ends with its object.
    let upstream = Upstream::answering(move |_, body| {
        if body.ends_with(b"}") {
            count.fetch_add(1, Ordering::SeqCst);
        }
        json_answer("{}")
    });
    let big = format!(r#"{{"model":"m","x":"{}"}}"#, "y".repeat(1_000_000));
    let chunked =
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
    for request in [post("/v1/completions", "{}"), post("/v1/completions", &big), chunked.to_vec()] {
        let rig = Rig::start(&[&upstream]).await;
        *rig.backends.standing.lock().unwrap() = RequestStanding::Suspect;
        let (head, _) = rig.ask(&request).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        rig.is_clean().await;
        assert_eq!(*rig.backends.told.lock().unwrap(), ["alone", "survived"]);
        let before = served.load(Ordering::SeqCst);
        *rig.backends.standing.lock().unwrap() = RequestStanding::Refused { left: Duration::from_secs(60) };
        let (head, body) = rig.ask(&request).await;
        assert!(head.starts_with("HTTP/1.1 422 ") && head.contains("x-warden-executed: no\r\n"), "{head}");
        assert!(!head.contains("retry-after"), "{head}");
        let body: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body["error"]["code"], "request_quarantined", "{body}");
        assert_eq!(served.load(Ordering::SeqCst), before, "the backend never had it whole");
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn who_was_alone_when_its_server_broke_off_waits_for_its_end_however_long_that_takes() {
    let dying = Upstream::start(|mut peer| async move {
        peer.request().await;
    });
    let alive = Upstream::answering(|_, _| json_answer("{}"));
    let refused = RequestStanding::Refused { left: Duration::from_secs(60) };
    for (after, status) in [(refused, "HTTP/1.1 422 "), (RequestStanding::Suspect, "HTTP/1.1 502 ")] {
        let rig = Rig::with(rotating(), &[&dying, &alive]).await;
        *rig.backends.standing.lock().unwrap() = RequestStanding::Suspect;
        let end = Arc::new(Notify::new());
        *rig.backends.slow_end.lock().unwrap() = Some(end.clone());
        let mut client = rig.client().await;
        client.send(&post("/v1/completions", "{}")).await;
        eventually("it waits for the end", || rig.backends.settling.load(Ordering::SeqCst) == 1).await;
        assert_eq!(*rig.backends.told.lock().unwrap(), ["alone", "broke"]);
        // The supervisor knows this once the process has ended.
        *rig.backends.standing.lock().unwrap() = after;
        end.notify_one();
        let (head, body) = client.response().await;
        assert!(head.starts_with(status), "{head}{}", String::from_utf8_lossy(&body));
        assert_eq!(alive.accepted(), 0, "another server would have met the same");
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_lease_that_is_revoked_because_its_server_died_costs_a_stream_that_never_began_nothing() {
    let go = Arc::new(Notify::new());
    let (taken, closes) = (Arc::new(Notify::new()), go.clone());
    let has_it = taken.clone();
    let dying = Upstream::start(move |mut peer| {
        let (has_it, closes) = (has_it.clone(), closes.clone());
        async move {
            peer.request().await;
            has_it.notify_one();
            closes.notified().await;
        }
    });
    let alive = Upstream::answering(|_, _| json_answer("{}"));
    for (dead, status) in [(true, "HTTP/1.1 200 "), (false, "HTTP/1.1 502 ")] {
        let mut plan = rotating();
        plan.config.upstream.connect_timeout = PATIENCE;
        let rig = Rig::with(plan, &[&dying, &alive]).await;
        let mut client = rig.client().await;
        client.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
        taken.notified().await;
        // The supervisor knows of the death before the connection has ended.
        rig.backends.dead.store(dead, Ordering::SeqCst);
        rig.backends.revoke.cancel();
        if !dead {
            // The process was only ordered to end, so there is nothing to wait for.
            let (head, _) = client.response().await;
            assert!(head.starts_with(status), "{head}");
        }
        go.notify_one();
        if dead {
            let (head, _) = client.response().await;
            assert!(head.starts_with(status), "{head}");
        }
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_text_that_kills_the_tokenizer_that_counts_it_is_a_suspect() {
    let upstream = Upstream::start(|mut peer| async move {
        let Some((head, _)) = peer.request().await else { return };
        if !head.starts_with("POST /tokenize") {
            peer.send(&json_answer("{}")).await;
        }
    });
    let rig = Rig::start(&[&upstream]).await;
    *rig.backends.room_tokens.lock().unwrap() = Some(1);
    let request = post("/v1/completions", r#"{"prompt":"a text that has to be counted"}"#);
    let (head, _) = rig.ask(&request).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    rig.is_clean().await;
    assert_eq!(*rig.backends.told.lock().unwrap(), ["broke"]);
    // A suspect's tokens are not counted, because counting would run next to other requests.
    *rig.backends.standing.lock().unwrap() = RequestStanding::Suspect;
    let before = upstream.accepted();
    let (head, _) = rig.ask(&request).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_eq!(upstream.accepted(), before + 1, "it was sent and not counted");
    rig.is_clean().await;
}

#[tokio::test]
async fn who_breaks_a_connection_with_a_whole_request_is_noted() {
    let upstream = Upstream::start(|mut peer| async move {
        let Some((head, _)) = peer.request().await else { return };
        if head.contains("/half") {
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf").await;
        }
    });
    for path in ["/v1/completions", "/half"] {
        let rig = Rig::start(&[&upstream]).await;
        let mut client = rig.client().await;
        client.send(&post(path, "{}")).await;
        client.until("\r\n\r\n").await;
        rig.is_clean().await;
        assert_eq!(*rig.backends.told.lock().unwrap(), ["broke"], "{path}");
    }
}

#[tokio::test]
async fn a_line_that_llama_server_does_not_take_is_refused_and_nobody_is_doubted() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let rig = Rig::start(&[&upstream]).await;
    let get = |length: usize| format!("GET /props?{} HTTP/1.1\r\nHost: h\r\n\r\n", "x".repeat(length));
    let fits = 8 * 1024 - "/props?".len();
    assert!(rig.ask(get(fits).as_bytes()).await.0.starts_with("HTTP/1.1 200 "));
    let (head, body) = rig.ask(get(fits + 1).as_bytes()).await;
    assert!(head.starts_with("HTTP/1.1 414 ") && body.contains("too long"), "{head}{body}");
    let header = format!("GET /props HTTP/1.1\r\nHost: h\r\nX-A: {}\r\n\r\n", "x".repeat(8200));
    assert!(rig.ask(header.as_bytes()).await.0.starts_with("HTTP/1.1 431 "));
    // A long target is refused in any spelling, even if another fault would lead to a refusal, too.
    let long = "x".repeat(33_000);
    for target in [
        format!("http://h/props?{long}"),
        format!("http://h?{long}"),
        format!("/upstream/m/{long}"),
        format!("/%70rops?{long}"),
        format!("/{long}?model=m"),
        format!("/props?{}", "x".repeat(60_000)),
    ] {
        let request = format!("GET {target} HTTP/1.1\r\nHost: h\r\nX-A: {}\r\n\r\n", "x".repeat(5000));
        let (head, body) = rig.ask(request.as_bytes()).await;
        assert!(head.starts_with("HTTP/1.1 414 "), "{}: {head}{body}", &target[..20]);
    }
    let posted = format!("POST /v1/completions?{long} HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{{}}");
    assert!(rig.ask(posted.as_bytes()).await.0.starts_with("HTTP/1.1 414 "));
    // One lease was requested: the refused requests neither waited for a backend nor started one.
    let granted = rig.backends.granted.load(Ordering::SeqCst);
    assert_eq!((upstream.accepted(), granted, rig.backends.doubts.load(Ordering::SeqCst)), (1, 1, 0));
    rig.is_clean().await;
}

#[tokio::test]
async fn a_stream_of_events_without_an_end_only_watches() {
    let upstream = Upstream::start(|mut peer| async move {
        peer.request().await;
        peer.send(EVENTS).await;
        peer.send(b"0\r\n\r\n").await;
    });
    for (request, watches) in [
        ("GET /upstream/m/models/sse", true),
        ("GET /tools", true),
        ("GET /v1/stream?conv_id=a", false),
        ("POST /v1/completions", false),
    ] {
        let rig = Rig::start(&[&upstream]).await;
        let request = format!("{request} HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n");
        rig.ask(request.as_bytes()).await;
        rig.is_clean().await;
        assert_eq!(rig.backends.told.lock().unwrap().contains(&"watches"), watches, "{request}");
    }
}

#[tokio::test]
async fn a_head_that_began_is_never_sent_again_however_little_of_it_came() {
    let informed = "HTTP/1.1 100 Continue\r\n\r\n";
    let headed = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n";
    for begun in ["H", "HTTP/1.1 200 OK\r\n", headed, informed, "\r\n"] {
        let dying = Upstream::start(move |mut peer| async move {
            peer.request().await;
            peer.send(begun.as_bytes()).await;
        });
        let alive = Upstream::answering(|_, _| json_answer("{}"));
        let rig = Rig::with(rotating(), &[&dying, &alive]).await;
        // Without that head, the gateway would retry: llama-server sends a stream's head when it begins.
        let (head, body) = rig.ask(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
        assert!(head.starts_with("HTTP/1.1 502 "), "{begun:?}: {head}{body}");
        assert!(head.contains("x-warden-executed: maybe\r\n"), "{begun:?}: {head}");
        let record = rig.record(0).await;
        assert_eq!((record.retries, record.outcome), (0, RequestOutcome::UpstreamDied), "{begun:?}");
        assert_eq!(alive.accepted(), 0, "{begun:?}");
        // A request that executes nothing may be sent to another server.
        let rig = Rig::with(rotating(), &[&dying, &alive]).await;
        let (head, _) = rig.ask(b"GET /props HTTP/1.1\r\nHost: h\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{begun:?}: {head}");
        assert_eq!(rig.record(0).await.retries, 1, "{begun:?}");
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_body_that_goes_nowhere_keeps_no_request_from_being_asked_of_another() {
    let dying = Upstream::start(|mut peer| async move {
        peer.request().await;
        peer.send(b"H").await;
    });
    let alive = Upstream::answering(|_, _| json_answer("{}"));
    let mut plan = rotating();
    plan.config.upstream.replay_bytes = ByteSize(4);
    let rig = Rig::with(plan, &[&dying, &alive]).await;
    // The body exceeds the limit for bodies held for sending again.
    let (head, _) = rig.ask(b"GET /props HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\n0123456789").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_eq!(alive.accepted(), 1);
    rig.is_clean().await;
}

#[tokio::test]
async fn what_an_earlier_answer_said_on_the_same_connection_does_not_count() {
    let upstream = Upstream::start(|mut peer| async move {
        // Answers once, then takes another request and closes without an answer.
        peer.request().await;
        peer.send(&json_answer("{}")).await;
        peer.request().await;
    });
    let mut plan = Plan::default();
    plan.config.server.threads = 1;
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", r#"{"stream":false}"#)).await;
    assert!(client.response().await.0.starts_with("HTTP/1.1 200 "));
    client.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
    assert!(client.response().await.0.starts_with("HTTP/1.1 200 "));
    let record = rig.record(1).await;
    assert_eq!((record.retries, upstream.accepted()), (1, 2));
    rig.is_clean().await;
}

#[tokio::test]
async fn a_stream_that_breaks_off_ends_with_an_error_event_and_no_half_one() {
    let upstream = Upstream::start(|mut peer| async move {
        peer.request().await;
        peer.send(EVENTS).await;
        peer.send_chunk(b"data: {\"n\":1}\n\ndata: {\"half").await;
    });
    for (path, prefix) in [
        ("/v1/chat/completions", "data: {\"n\":1}\n\ndata: {\"error\":{\"code\":502"),
        ("/v1/messages", "data: {\"n\":1}\n\nevent: error\ndata: {\"type\":\"error\""),
    ] {
        let rig = Rig::start(&[&upstream]).await;
        let mut client = rig.client().await;
        client.send(&post(path, r#"{"stream":true}"#)).await;
        // The body ends as HTTP requires: the terminal chunk was read.
        let (_, body) = client.response().await;
        let text = String::from_utf8(body).unwrap();
        assert!(text.starts_with(prefix) && text.ends_with("}\n\n"), "{text}");
        assert!(!text.contains("[DONE]") && !text.contains("half"), "{text}");
        let last = text.trim_end().rsplit("data: ").next().unwrap();
        assert!(serde_json::from_str::<serde_json::Value>(last).is_ok(), "{last}");
        let record = rig.record(0).await;
        assert_eq!(
            (record.outcome, record.status, record.work.output_tokens),
            (RequestOutcome::UpstreamDied, 200, 1)
        );
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_seen_to_be_cut() {
    let upstream = Upstream::start(|mut peer| async move {
        peer.request().await;
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"half\":").await;
    });
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", "{}")).await;
    let all = String::from_utf8(client.rest().await).unwrap().to_ascii_lowercase();
    assert!(all.contains("content-length: 100\r\n") && all.ends_with("{\"half\":"), "{all}");
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::UpstreamDied);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_silent_stream_is_ended() {
    let upstream = Upstream::start(|mut peer| async move {
        peer.request().await;
        peer.send(EVENTS).await;
        peer.send_chunk(b"data: 1\n\n").await;
        peer.rest().await;
    });
    let mut plan = Plan::default();
    plan.config.upstream.stream_idle = Duration::from_millis(150);
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
    let (_, body) = client.response().await;
    assert!(String::from_utf8(body).unwrap().contains("upstream.stream_idle"));
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::UpstreamStalled);
    eventually("the backend's connection is closed", || upstream.open() == 0).await;
    rig.is_clean().await;
}

#[tokio::test]
async fn a_stream_whose_first_event_came_late_is_ended_when_it_falls_silent() {
    let go = Arc::new(Notify::new());
    let begun = go.clone();
    let upstream = Upstream::start(move |mut peer| {
        let go = begun.clone();
        async move {
            peer.request().await;
            peer.send(EVENTS).await;
            go.notified().await;
            peer.send_chunk(b"data: 1\n\n").await;
            peer.rest().await;
        }
    });
    let mut plan = Plan::default();
    plan.config.upstream.stream_idle = Duration::from_millis(150);
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
    // The head has come, so the gateway is waiting for the first event.
    let head = client.until("\r\n\r\n").await;
    go.notify_one();
    let body = client.body(&head).await;
    assert!(String::from_utf8(body).unwrap().contains("upstream.stream_idle"));
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::UpstreamStalled);
    rig.is_clean().await;
}

#[tokio::test]
async fn an_exchange_has_an_end() {
    let upstream = Upstream::silent();
    let mut plan = Plan::default();
    plan.config.upstream.exchange_timeout = Duration::from_millis(150);
    let rig = Rig::with(plan, &[&upstream]).await;
    let (head, body) = rig.ask(&post("/v1/chat/completions", "{}")).await;
    assert!(head.starts_with("HTTP/1.1 504 ") && head.contains("x-warden-executed: maybe"), "{head}{body}");
    rig.is_clean().await;
}

#[tokio::test]
async fn a_revoked_lease_ends_its_exchange() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let upstream = Upstream::start(move |mut peer| {
        let count = count.clone();
        async move {
            let Some((head, _)) = peer.request().await else { return };
            if head.contains("/v1/chat") {
                peer.send(EVENTS).await;
                peer.send_chunk(b"data: 1\n\n").await;
            }
            count.fetch_add(1, Ordering::SeqCst);
            peer.rest().await;
        }
    });
    let rig = Rig::start(&[&upstream]).await;
    let (mut streaming, mut waiting) = (rig.client().await, rig.client().await);
    streaming.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
    streaming.until("data: 1\n\n").await;
    waiting.send(&post("/v1/completions", "{}")).await;
    eventually("both are at the backend", || asked.load(Ordering::SeqCst) == 2).await;
    rig.backends.revoke.cancel();
    assert!(streaming.until("}\n\n").await.contains("was stopped"));
    let (head, _) = waiting.response().await;
    assert!(head.starts_with("HTTP/1.1 502 ") && head.contains("x-warden-executed: maybe"), "{head}");
    eventually("the backend's connections are closed", || upstream.open() == 0).await;
    rig.is_clean().await;
    assert_eq!(*rig.backends.told.lock().unwrap(), ["lost", "lost"]);
}

#[tokio::test]
async fn an_idle_connection_that_was_closed_costs_nothing() {
    let upstream = Upstream::start(|mut peer| async move {
        peer.request().await;
        peer.send(&json_answer("{}")).await;
        // The backend closes although it promised to keep the connection.
    });
    let rig = Rig::start(&[&upstream]).await;
    for n in 0..20 {
        let (head, _) = rig.ask(&post("/v1/completions", "{}")).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert_eq!(rig.record(n).await.retries, 0);
        eventually("the backend closed", || upstream.open() == 0).await;
    }
    assert_eq!(upstream.accepted(), 20);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_backend_with_a_dirty_answer_is_a_502() {
    let upstream = Upstream::start(|mut peer| async move {
        peer.request().await;
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!").await;
    });
    let rig = Rig::start(&[&upstream]).await;
    let (head, _) = rig.ask(&post("/v1/completions", "{}")).await;
    assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
    rig.is_clean().await;
}

#[tokio::test]
async fn a_stream_of_declared_length_gets_its_error_event_too() {
    let upstream = Upstream::start(|mut peer| async move {
        peer.request().await;
        peer.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\ndata: 1\n\n",
        )
        .await;
    });
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
    let (head, body) = client.response().await;
    assert!(head.contains("transfer-encoding: chunked"), "{head}");
    assert!(body.starts_with(b"data: 1\n\ndata: {\"error\"") && body.ends_with(b"}\n\n"));
    rig.is_clean().await;
}

#[tokio::test]
async fn a_full_backlog_is_waited_for() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("s.sock");
    let socket =
        rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, 1).unwrap();
    let listener = std::os::unix::net::UnixListener::from(socket);
    // Fill the queue.
    let mut waiting = Vec::new();
    loop {
        let next = UnixStream::connect(&path).await;
        match next {
            Ok(stream) => waiting.push(stream),
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                break;
            }
        }
    }
    let mut upstream = Upstream::start(|_| async {});
    upstream.path = path;
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/completions", "{}")).await;
    eventually("the lease is held", || rig.live() == 1).await;
    listener.set_nonblocking(true).unwrap();
    let listener = UnixListener::from_std(listener).unwrap();
    let mut served = JoinSet::new();
    served.spawn(async move {
        let mut tasks = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            tasks.spawn(async move {
                let mut peer = Peer::new(stream);
                if peer.request().await.is_some() {
                    peer.send(&json_answer("{}")).await;
                }
            });
        }
    });
    let (head, _) = client.response().await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_eq!(rig.record(0).await.retries, 0);
    rig.is_clean().await;
}

#[tokio::test]
async fn who_has_the_port_of_a_process_that_is_gone_is_told_nothing() {
    let (unused, taken, calls) = (gone(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, bytes, visits) = (listener.local_addr().unwrap(), taken.clone(), calls.clone());
    let mut stranger = JoinSet::new();
    stranger.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            bytes.fetch_add(Peer::new(stream).rest().await.len(), Ordering::SeqCst);
            visits.fetch_add(1, Ordering::SeqCst);
        }
    });
    let mut plan = Plan::default();
    plan.config.upstream.connect_timeout = Duration::from_millis(100);
    let rig = Rig::with(plan, &[&unused]).await;
    *rig.backends.stranger.lock().unwrap() = Some(address);
    // Counting tokens sends a request to the backend, too.
    *rig.backends.room_tokens.lock().unwrap() = Some(0);
    let (head, _) = rig.ask(&post("/v1/completions", r#"{"model":"m","prompt":"secret"}"#)).await;
    assert!(head.starts_with("HTTP/1.1 503 ") && head.contains("x-warden-executed: no\r\n"), "{head}");
    rig.is_clean().await;
    eventually("it was called to count, and three times to answer", || calls.load(Ordering::SeqCst) == 4)
        .await;
    assert_eq!(taken.load(Ordering::SeqCst), 0);
}
