//! A client that leaves frees everything at once.

use super::*;
use crate::RequestOutcome;

/// Maximum time from the client's leaving to the close of the backend's connection; usually some ms.
const PROMISE: Duration = Duration::from_millis(500);

async fn closes_within_the_promise(rig: &Rig, upstream: &Upstream) {
    let left = Instant::now();
    eventually("the backend's connection is closed", || upstream.open() == 0).await;
    assert!(left.elapsed() < PROMISE, "after {:?}", left.elapsed());
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::ClientGone);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_client_that_leaves_before_the_head_cancels_upstream() {
    let upstream = Upstream::silent();
    for body in ["{}", r#"{"stream":true}"#] {
        let rig = Rig::start(&[&upstream]).await;
        let mut client = rig.client().await;
        client.send(&post("/v1/chat/completions", body)).await;
        eventually("the backend has the request", || upstream.open() == 1).await;
        drop(client);
        closes_within_the_promise(&rig, &upstream).await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_in_the_middle_of_a_stream_cancels_upstream() {
    let upstream = Upstream::start(|mut peer| async move {
        peer.request().await;
        peer.send(EVENTS).await;
        peer.send_chunk(b"data: 1\n\n").await;
        // Silent from now on: no data from the backend helps to notice the client's leaving.
        peer.rest().await;
    });
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
    client.until("data: 1\n\n").await;
    drop(client);
    closes_within_the_promise(&rig, &upstream).await;
}

#[tokio::test]
async fn a_client_that_closes_its_side_only_has_left_too() {
    for begun in [false, true] {
        let upstream = Upstream::start(move |mut peer| async move {
            peer.request().await;
            if begun {
                peer.send(EVENTS).await;
                peer.send_chunk(b"data: 1\n\n").await;
            }
            peer.rest().await;
        });
        let rig = Rig::start(&[&upstream]).await;
        let mut client = rig.client().await;
        client.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
        eventually("the backend has the request", || upstream.open() == 1).await;
        if begun {
            client.until("data: 1\n\n").await;
        }
        client.stream.shutdown().await.unwrap();
        closes_within_the_promise(&rig, &upstream).await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_the_queue_frees_its_place() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let rig = Rig::with(Plan { room: 0, any_name: true, ..Plan::default() }, &[&upstream]).await;
    let waiting = rig.backends.waiting.clone();
    // A small body, an unfinished one, and a large one that is streamed.
    let unfinished = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n{".to_vec();
    for request in [post("/x", "{}"), unfinished, post("/x", &"x".repeat(3_000_000))] {
        let mut client = rig.client().await;
        let sending = request.clone();
        client.send(&sending).await;
        eventually("it waits", || waiting.load(Ordering::SeqCst) == 1).await;
        let left = Instant::now();
        drop(client);
        eventually("its place is free", || waiting.load(Ordering::SeqCst) == 0).await;
        assert!(left.elapsed() < PROMISE, "after {:?}", left.elapsed());
    }
    assert_eq!(upstream.accepted(), 0);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_client_that_leaves_in_the_middle_of_its_body_cancels_upstream() {
    let upstream = Upstream::start(|mut peer| async move {
        peer.rest().await;
    });
    let rig = Rig::with(Plan { any_name: true, ..Plan::default() }, &[&upstream]).await;
    let mut client = rig.client().await;
    client.send(b"POST /tools HTTP/1.1\r\nHost: h\r\nContent-Length: 9000000\r\n\r\n{\"x\":").await;
    eventually("the backend is reached", || upstream.open() == 1).await;
    drop(client);
    closes_within_the_promise(&rig, &upstream).await;
}

#[tokio::test]
async fn a_slow_reader_stalls_its_own_backend_and_nobody_else() {
    let written = Arc::new(AtomicUsize::new(0));
    let upstream = endless(&written, None);
    let rig = Rig::start(&[&upstream]).await;
    let mut slow = rig.client().await;
    slow.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
    // Stalled: no further byte within 200 ms.
    let mut before = usize::MAX;
    let until = Instant::now() + PATIENCE;
    while written.load(Ordering::SeqCst) != before || before == 0 {
        assert!(Instant::now() < until, "never stalls");
        before = written.load(Ordering::SeqCst);
        sleep(Duration::from_millis(200)).await;
    }
    // The bytes are in the kernel's buffers of both sockets, and few in the gateway.
    assert!(before < 16 * 1024 * 1024, "{before} bytes were taken");
    let (head, _) = rig.ask(&post("/quick", "{}")).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    // The backend continues when the reader does.
    slow.until("\r\n\r\n").await;
    let mut taken = 0;
    while taken < before + 1_000_000 {
        taken += slow.chunk().await.unwrap().len();
    }
    drop(slow);
    rig.is_clean().await;
    eventually("the stream is cancelled", || upstream.open() == 0).await;
}
