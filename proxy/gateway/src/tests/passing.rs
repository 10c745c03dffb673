//! Bytes that pass, and how they are counted.

use super::*;
use crate::RequestOutcome;

#[tokio::test]
async fn a_request_and_its_answer_pass_unchanged() {
    let upstream = Upstream::answering(|head, body| {
        let head = head.to_ascii_lowercase();
        assert!(head.starts_with("post /v1/chat/completions?x=%20y http/1.1\r\n"), "{head}");
        for line in [
            "host: localhost\r\n",
            "authorization: bearer k\r\n",
            "x-request-id: mine\r\n",
            "x-unknown: 1\r\n",
            "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n",
            "tracestate: a=1,b=2\r\n",
        ] {
            assert!(head.contains(line), "{line} in {head}");
        }
        for name in ["x-conversation-id", "expect", "\nte:", "connection", "x-hop", "keep-alive", "upgrade"] {
            assert!(!head.contains(name), "{name} in {head}");
        }
        json_answer(std::str::from_utf8(body).unwrap())
    });
    let rig = Rig::start(&[&upstream]).await;
    let body = r#"{"unknown" : [1, 2.50, 1e400], "model":"alias-of-m"   }"#;
    let request = format!(
        "POST /v1/chat/completions?x=%20y HTTP/1.1\r\nHost: any\r\nAuthorization: Bearer k\r\nX-Request-Id: mine\r\nX-Unknown: 1\r\ntraceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\ntracestate: a=1,b=2\r\nX-Conversation-Id: c\r\nTE: trailers\r\nConnection: keep-alive, x-hop\r\nX-Hop: 1\r\nUpgrade: h2c\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let (head, answer) = rig.ask(request.as_bytes()).await;
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert_eq!(answer, body);
    assert!(head.contains("x-request-id: mine\r\n") && !head.contains("keep-alive"), "{head}");
    assert!(head.contains("content-type: application/json; charset=utf-8\r\n"), "{head}");
    let record = rig.record(0).await;
    assert_eq!((record.outcome, record.status, record.route), (RequestOutcome::Ok, 200, "chat"));
    assert_eq!((record.bytes_in, record.bytes_out), (body.len() as u64, body.len() as u64));
    assert_eq!((record.request_id.as_str(), record.retries), ("mine", 0));
    rig.is_clean().await;
}

#[tokio::test]
async fn a_server_without_its_web_page_is_spoken_for_in_a_sentence() {
    let upstream = Upstream::answering(|head, _| {
        let not_found = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}";
        if head.starts_with("GET / ") { not_found.to_vec() } else { json_answer("{}") }
    });
    let rig = Rig::start(&[&upstream]).await;
    let (head, body) = rig.ask(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 404 ") && body.contains("without its web page"), "{head}{body}");
    let (head, _) = rig.ask(b"GET /props HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    rig.is_clean().await;
}

#[tokio::test]
async fn a_stream_passes_event_by_event_and_its_work_is_counted() {
    let go = Arc::new(Semaphore::new(0));
    let signal = go.clone();
    let upstream = Upstream::start(move |mut peer| {
        let go = signal.clone();
        async move {
            let Some(_) = peer.request().await else { return };
            peer.send(EVENTS).await;
            for event in ["data: {\"a\":1}\n\n", "data: {\"b\":2}\n\n: ping\n\n"] {
                peer.send_chunk(event.as_bytes()).await;
                go.acquire().await.unwrap().forget();
            }
            peer.send_chunk(b"data: {\"timings\":{\"prompt_n\":5,\"predicted_n\":7}}\n\ndata: [DONE]\n\n")
                .await;
            peer.send(b"0\r\n\r\n").await;
            peer.rest().await;
        }
    });
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    let body = r#"{"model":"m","stream":true,"messages":[{"content":[{"type":"image_url"}]}]}"#;
    client.send(&post("/v1/chat/completions", body)).await;
    let head = client.until("\r\n\r\n").await;
    assert!(head.contains("content-type: text/event-stream\r\n"), "{head}");
    // Each event arrives before the backend sends the next: nothing is held back.
    assert_eq!(client.chunk().await.unwrap(), b"data: {\"a\":1}\n\n");
    go.add_permits(1);
    assert_eq!(client.chunk().await.unwrap(), b"data: {\"b\":2}\n\n: ping\n\n");
    go.add_permits(1);
    assert!(client.chunk().await.unwrap().ends_with(b"data: [DONE]\n\n"));
    assert_eq!(client.chunk().await, None);
    let record = rig.record(0).await;
    assert_eq!((record.outcome, record.stream), (RequestOutcome::Ok, true));
    assert_eq!(
        record.work,
        WorkDone { requests: 1, prompt_tokens: 5, output_tokens: 7, images: 1, ..WorkDone::default() }
    );
    assert!(record.first_byte.unwrap() < record.total);
    rig.is_clean().await;
    assert_eq!(*rig.backends.work.lock().unwrap(), [record.work]);
}

#[tokio::test]
async fn work_is_counted_once_from_the_answer() {
    let upstream = Upstream::answering(|_, _| {
        json_answer(
            r#"{"usage":{"prompt_tokens":9,"completion_tokens":4},"timings":{"prompt_n":3,"predicted_n":4}}"#,
        )
    });
    let rig = Rig::start(&[&upstream]).await;
    rig.ask(&post("/v1/chat/completions", "{}")).await;
    rig.ask(&post("/tokenize", "{}")).await;
    rig.is_clean().await;
    let work = rig.backends.work.lock().unwrap().clone();
    assert_eq!(
        work,
        [WorkDone { requests: 1, prompt_tokens: 3, output_tokens: 4, images: 0, ..WorkDone::default() }],
        "tokenize is no work"
    );
}

#[tokio::test]
async fn connections_are_reused_but_not_after_a_stream_or_an_error() {
    let upstream = Upstream::answering(|head, _| match head {
        _ if head.contains("/stream") => [EVENTS, b"b\r\ndata: {}\n\n \r\n0\r\n\r\n"].concat(),
        _ if head.contains("/bad") => b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}".to_vec(),
        _ => json_answer("{}"),
    });
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    let mut accepted = Vec::new();
    for path in ["/a", "/b", "/stream", "/c", "/bad", "/d", "/e"] {
        client.send(&post(path, "{}")).await;
        client.response().await;
        rig.is_clean().await;
        accepted.push(upstream.accepted());
    }
    assert_eq!(accepted, [1, 1, 1, 2, 2, 3, 3], "one client connection, three to the backend");
    assert_eq!(rig.gauges.connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn head_and_http_1_0_and_chunked_requests_work() {
    let upstream = Upstream::answering(|head, body| {
        if head.starts_with("HEAD") {
            return b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n".to_vec();
        }
        if head.starts_with("POST /empty") {
            assert!(head.contains("content-length: 0"), "{head}");
        }
        json_answer(std::str::from_utf8(body).unwrap())
    });
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    client.send(b"HEAD /props HTTP/1.1\r\nHost: h\r\n\r\n").await;
    let head = client.until("\r\n\r\n").await;
    assert!(head.contains("content-length: 1234\r\n"), "{head}");

    client.send(b"POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{\"a\r\n4\r\n\":1}\r\n0\r\n\r\n").await;
    assert_eq!(client.response().await.1, b"{\"a\":1}");

    client.send(b"POST /empty HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n").await;
    assert_eq!(client.response().await.1, b"");

    client.send(b"POST /x HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}").await;
    let all = String::from_utf8(client.rest().await).unwrap();
    assert!(all.starts_with("HTTP/1.0 200 OK\r\n") && all.ends_with("\r\n\r\n{}"), "{all}");
    rig.is_clean().await;
}

#[tokio::test]
async fn expect_is_answered_by_us_and_only_when_the_body_is_wanted() {
    let upstream = Upstream::answering(|head, body| {
        assert!(!head.to_ascii_lowercase().contains("expect"), "{head}");
        json_answer(std::str::from_utf8(body).unwrap())
    });
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    client.send(b"POST /x HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n").await;
    assert_eq!(client.until("\r\n\r\n").await, "HTTP/1.1 100 Continue\r\n\r\n");
    client.send(b"{}").await;
    assert_eq!(client.response().await.1, b"{}");
    let mut other = rig.client().await;
    other
        .send(b"POST /x HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 999999999999\r\n\r\n")
        .await;
    let (head, _) = other.response().await;
    assert!(head.starts_with("HTTP/1.1 413 "), "no 100 first: {head}");
    rig.is_clean().await;
}

#[tokio::test]
async fn a_large_body_streams_through_without_being_held() {
    let upstream = Upstream::answering(|_, body| json_answer(&body.len().to_string()));
    let rig = Rig::with(Plan { any_name: true, ..Plan::default() }, &[&upstream]).await;
    let mut client = rig.client().await;
    let size = 8 * 1024 * 1024;
    client.send(format!("POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: {size}\r\n\r\n").as_bytes()).await;
    let mut most = 0;
    for _ in 0..size / 65536 {
        client.send(&vec![b'x'; 65536]).await;
        most = most.max(rig.gauges.held_bytes.load(Ordering::SeqCst));
    }
    assert_eq!(client.response().await.1, size.to_string().as_bytes());
    assert!(most < 1024 * 1024, "{most} bytes were held");
    rig.is_clean().await;
}

#[tokio::test]
async fn a_stream_without_done_ends_as_it_ended() {
    let events = "event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":5,\"output_tokens\":0}}}\n\n\
                  event: message_delta\ndata: {\"usage\":{\"output_tokens\":7}}\n\nevent: message_stop\ndata: {}\n\n";
    let upstream = Upstream::start(move |mut peer| async move {
        while peer.request().await.is_some() {
            peer.send(EVENTS).await;
            for event in events.split_inclusive("\n\n") {
                peer.send_chunk(event.as_bytes()).await;
            }
            peer.send_chunk(b"").await;
        }
    });
    let rig = Rig::start(&[&upstream]).await;
    for (n, path) in ["/v1/messages", "/v1/responses"].into_iter().enumerate() {
        let (head, body) = rig.ask(&post(path, r#"{"stream":true}"#)).await;
        assert!(head.starts_with("HTTP/1.1 200 ") && body == events, "{head}{body}");
        let record = rig.record(n).await;
        assert_eq!((record.outcome.as_str(), record.stream), ("ok", true), "{path}");
        assert_eq!((record.work.prompt_tokens, record.work.output_tokens), (5, 7), "{path}");
    }
    rig.is_clean().await;
}
