//! Requests drive their connections to backends, which are not polled while idle.

use std::fmt::Write as _;

use tokio::sync::Mutex as AsyncMutex;
use tokio::sync::mpsc::unbounded_channel;

use super::*;
use crate::RequestOutcome;

fn events(count: usize) -> String {
    let mut all = String::new();
    for event in 0..count {
        let _infallible = write!(all, "data: {event}\n\n");
    }
    all
}

#[tokio::test]
async fn an_event_passes_before_the_next_one_is_made() {
    let (tell, told) = unbounded_channel::<()>();
    let told = Arc::new(AsyncMutex::new(told));
    let upstream = Upstream::start(move |mut peer| {
        let told = told.clone();
        async move {
            peer.request().await;
            peer.send(EVENTS).await;
            for event in 0..50 {
                peer.send_chunk(format!("data: {event}\n\n").as_bytes()).await;
                told.lock().await.recv().await;
            }
            peer.send(b"0\r\n\r\n").await;
        }
    });
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
    client.until("\r\n\r\n").await;
    for event in 0..50 {
        assert_eq!(client.chunk().await.unwrap(), format!("data: {event}\n\n").as_bytes());
        tell.send(()).unwrap();
    }
    assert_eq!(client.chunk().await, None);
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::Ok);
    rig.is_clean().await;
}

#[tokio::test]
async fn events_that_are_here_together_are_joined_and_none_is_lost() {
    let upstream = Upstream::start(|mut peer| async move {
        peer.request().await;
        let mut all = EVENTS.to_vec();
        for event in 0..2000 {
            let event = format!("data: {event}\n\n");
            all.extend_from_slice(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes());
        }
        all.extend_from_slice(b"0\r\n\r\n");
        peer.send(&all).await;
    });
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
    client.until("\r\n\r\n").await;
    let (mut text, mut chunks) = (Vec::new(), 0);
    while let Some(chunk) = client.chunk().await {
        text.extend(chunk);
        chunks += 1;
    }
    let expected = events(2000);
    assert_eq!(String::from_utf8(text).unwrap(), expected);
    assert!(chunks < 200, "{chunks} chunks");
    assert_eq!(rig.record(0).await.work.requests, 1);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_connection_that_was_closed_while_idle_costs_no_attempt() {
    let upstream = Upstream::start(|mut peer| async move {
        if peer.request().await.is_some() {
            peer.send(&json_answer("{}")).await;
        }
    });
    let rig = Rig::start(&[&upstream]).await;
    for n in 0..5 {
        // The backend has closed the idle connection before the next request.
        let (head, _) = rig.ask(&post("/v1/chat/completions", "{}")).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert_eq!(rig.record(n).await.retries, 0);
        eventually("the backend has closed", || upstream.open() == 0).await;
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(upstream.accepted(), 5);
    rig.is_clean().await;
}

#[tokio::test]
async fn idle_connections_are_used_again_and_closed_when_nobody_needs_them() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let mut plan = Plan::default();
    plan.config.server.threads = 1;
    plan.config.upstream.idle_timeout = Duration::from_millis(300);
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut client = rig.client().await;
    for _ in 0..20 {
        client.send(&post("/v1/chat/completions", "{}")).await;
        client.response().await;
    }
    assert_eq!(upstream.accepted(), 1);
    eventually("it is closed", || upstream.open() == 0).await;
    client.send(&post("/v1/chat/completions", "{}")).await;
    client.response().await;
    assert_eq!(upstream.accepted(), 2);
    eventually("the next one, too", || upstream.open() == 0).await;
    rig.is_clean().await;
}

#[tokio::test]
async fn requests_without_a_body_use_a_connection_again_too() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let mut plan = Plan::default();
    plan.config.server.threads = 1;
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut client = rig.client().await;
    for request in [
        "GET /props HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET /props HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
        "DELETE /v1/stream HTTP/1.1\r\nHost: h\r\n\r\n",
        "POST /slots/0?action=erase HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
        "POST /slots/0?action=erase HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "GET /slots HTTP/1.1\r\nHost: h\r\n\r\n",
    ] {
        for _ in 0..3 {
            client.send(request.as_bytes()).await;
            let (head, _) = client.response().await;
            assert!(head.starts_with("HTTP/1.1 200 "), "{request}: {head}");
            assert_eq!(upstream.accepted(), 1, "{request}");
        }
    }
    rig.is_clean().await;
}

#[tokio::test]
async fn a_request_goes_on_while_its_answer_is_not_read() {
    const SIZE: usize = 24 * 1024 * 1024;
    // The answer exceeds all buffers before the backend reads the request.
    let upstream = Upstream::start(|mut peer| async move {
        let head = peer.until("\r\n\r\n").await;
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n\r\n");
        peer.send(answer.as_bytes()).await;
        let (mut read, mut write) = peer.stream.into_split();
        let mut bytes = peer.buffer.len();
        let reading = async {
            let mut sink = vec![0; 1 << 16];
            while bytes < SIZE {
                match read.read(&mut sink).await {
                    Ok(more) if more > 0 => bytes += more,
                    _ => break,
                }
            }
        };
        let chunk = vec![b'x'; SIZE];
        let _both = tokio::join!(reading, write.write_all(&chunk));
        drop(head);
    });
    let mut plan = Plan { any_name: true, ..Plan::default() };
    plan.config.server.body_bytes = ByteSize(64 * 1024 * 1024);
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut client = rig.client().await;
    client.send(format!("POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: {SIZE}\r\n\r\n").as_bytes()).await;
    let body = vec![b'y'; SIZE];
    timeout(PATIENCE, client.stream.write_all(&body)).await.expect("all of it is taken").unwrap();
    let head = client.until("\r\n\r\n").await;
    assert_eq!(client.body(&head).await.len(), SIZE);
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::Ok);
    rig.is_clean().await;
}

#[tokio::test]
async fn many_streams_go_on_side_by_side() {
    const STREAMS: usize = 300;
    const EVENTS_EACH: usize = 5;
    let upstream = Upstream::start(|mut peer| async move {
        peer.request().await;
        peer.send(EVENTS).await;
        for event in 0..EVENTS_EACH {
            peer.send_chunk(format!("data: {event}\n\n").as_bytes()).await;
            sleep(Duration::from_millis(5)).await;
        }
        peer.send(b"0\r\n\r\n").await;
    });
    let rig = Rig::start(&[&upstream]).await;
    let mut clients = JoinSet::new();
    for _ in 0..STREAMS {
        let mut client = rig.client().await;
        clients.spawn(async move {
            client.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
            let (_, body) = client.response().await;
            String::from_utf8(body).unwrap()
        });
    }
    let expected = events(EVENTS_EACH);
    while let Some(body) = clients.join_next().await {
        assert_eq!(body.unwrap(), expected);
    }
    rig.is_clean().await;
    eventually("llama-server's way: closed after a stream", || upstream.open() == 0).await;
}

#[tokio::test]
async fn idle_connections_leave_threads_of_the_backend_to_others() {
    const AT_A_TIME: usize = 12;
    for (http_threads, most) in
        [(Some(6), 3), (None, 2), (Some(1), 0), (Some(ServerFacts::THREADS_ON_DEMAND), AT_A_TIME)]
    {
        let all_here = Arc::new(tokio::sync::Barrier::new(AT_A_TIME));
        let upstream = Upstream::start(move |mut peer| {
            let all_here = all_here.clone();
            async move {
                peer.request().await;
                all_here.wait().await;
                peer.send(&json_answer("{}")).await;
                peer.rest().await;
            }
        });
        let mut plan = Plan::default();
        plan.config.upstream.idle_timeout = PATIENCE * 9;
        let rig = Rig::with(plan, &[&upstream]).await;
        *rig.backends.facts.lock().unwrap() = ServerFacts { http_threads, ..NEW };
        let mut clients = Vec::new();
        for _ in 0..AT_A_TIME {
            let mut client = rig.client().await;
            client.send(&post("/v1/completions", "{}")).await;
            clients.push(client);
        }
        for client in &mut clients {
            assert!(client.response().await.0.starts_with("HTTP/1.1 200 "));
        }
        rig.is_clean().await;
        eventually("no more are kept than leave half of its threads", || upstream.open() == most).await;
    }
}
