//! Many streams on one HTTP/2 connection: they are independent, and too many or too fast ones are stopped.

use super::*;
use crate::RequestOutcome;

#[tokio::test]
async fn a_reset_stream_gives_up_its_exchange_and_no_other() {
    let upstream = Upstream::start(|mut peer| async move {
        let Some((head, _)) = peer.request().await else { return };
        if head.contains("/stream") {
            peer.send(EVENTS).await;
            peer.send_chunk(b"data: 1\n\n").await;
        }
        peer.rest().await;
    });
    let rig = Rig::with(plan(), &[&upstream]).await;
    let mut client = Client::new(&rig).await;
    let (before, mut sending) = client.begin(request("POST", "/v1/completions"), false).await;
    sending.send_data(Bytes::from_static(b"{}"), true).unwrap();
    let (during, mut streaming) = client.begin(request("POST", "/stream"), false).await;
    streaming.send_data(Bytes::from_static(b"{\"stream\":true}"), true).unwrap();
    let mut body = timeout(PATIENCE, during).await.unwrap().unwrap().into_body();
    assert_eq!(timeout(PATIENCE, body.data()).await.unwrap().unwrap().unwrap(), "data: 1\n\n");
    eventually("both run", || upstream.open() == 2).await;
    sending.send_reset(Reason::CANCEL);
    drop(before);
    eventually("the one without a head is closed", || upstream.open() == 1).await;
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::ClientGone);
    streaming.send_reset(Reason::CANCEL);
    drop(body);
    eventually("the stream is closed", || upstream.open() == 0).await;
    assert_eq!(rig.record(1).await.outcome, RequestOutcome::ClientGone);
    let (answer, _) = client.ask(request("GET", "/health"), b"").await;
    assert!(answer.status().is_success(), "the connection goes on");
    drop(client);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_client_that_vanishes_gives_up_all_its_streams() {
    let upstream = Upstream::silent();
    let rig = Rig::with(plan(), &[&upstream]).await;
    let mut client = Client::new(&rig).await;
    let mut answers = Vec::new();
    for _ in 0..20 {
        let (answer, mut sending) = client.begin(request("POST", "/v1/completions"), false).await;
        sending.send_data(Bytes::from_static(b"{}"), true).unwrap();
        answers.push((answer, sending));
    }
    eventually("all run", || upstream.open() == 20).await;
    client.tasks.shutdown().await;
    eventually("none runs", || upstream.open() == 0).await;
    rig.is_clean().await;
    eventually("no connection is counted", || rig.gauges.connections.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn a_stream_that_is_not_read_stalls_its_own_backend_and_no_other_stream() {
    let written = Arc::new(AtomicUsize::new(0));
    let upstream = endless(&written, None);
    let rig = Rig::with(plan(), &[&upstream]).await;
    let mut client = Client::new(&rig).await;
    let mut unread = Vec::new();
    for _ in 0..50 {
        let (answer, mut sending) = client.begin(request("POST", "/v1/completions"), false).await;
        sending.send_data(Bytes::from_static(b"{\"stream\":true}"), true).unwrap();
        unread.push(timeout(PATIENCE, answer).await.unwrap().unwrap().into_body());
    }
    let mut before = usize::MAX;
    let until = Instant::now() + PATIENCE;
    while written.load(Ordering::SeqCst) != before || before == 0 {
        assert!(Instant::now() < until, "never stalls");
        before = written.load(Ordering::SeqCst);
        sleep(Duration::from_millis(200)).await;
    }
    // The bytes fit into the kernel's buffers on the path from the backend, and a window.
    assert!(before < 50 * 2 * 1024 * 1024, "{before} bytes were taken");
    for _ in 0..10 {
        let (answer, _) = client.ask(request("POST", "/quick"), b"{}").await;
        assert_eq!(answer.status().as_u16(), 200);
    }
    // The backend continues when the reader does.
    let mut body = unread.pop().unwrap();
    let mut taken = 0;
    while taken < 4_000_000 {
        let piece = timeout(PATIENCE, body.data()).await.unwrap().unwrap().unwrap();
        body.flow_control().release_capacity(piece.len()).unwrap();
        taken += piece.len();
    }
    drop((body, unread, client));
    rig.is_clean().await;
}

#[tokio::test]
async fn a_stream_whose_client_opens_no_window_is_cut_in_time() {
    let written = Arc::new(AtomicUsize::new(0));
    let upstream = endless(&written, None);
    let mut plan = plan();
    plan.config.server.send_timeout = Duration::from_millis(200);
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut client = Client::new(&rig).await;
    let (answer, mut sending) = client.begin(request("POST", "/v1/completions"), false).await;
    sending.send_data(Bytes::from_static(b"{\"stream\":true}"), true).unwrap();
    let mut body = timeout(PATIENCE, answer).await.unwrap().unwrap().into_body();
    eventually("the backend is free", || rig.live() == 0 && written.load(Ordering::SeqCst) > 0).await;
    eventually("it is counted", || rig.gauges.limited.count(GatewayLimit::SendTime) == 1).await;
    let cut = loop {
        match timeout(PATIENCE, body.data()).await.unwrap() {
            Some(Ok(_)) => {}
            Some(Err(error)) => break error,
            None => panic!("a stream that was cut looks whole"),
        }
    };
    assert!(cut.is_reset(), "{cut}");
    let (answer, _) = client.ask(request("POST", "/quick"), b"{}").await;
    assert_eq!(answer.status().as_u16(), 200);
    drop(client);
    rig.is_clean().await;
}

#[tokio::test]
async fn more_streams_than_allowed_wait_for_their_turn() {
    let upstream = Upstream::silent();
    let mut plan = plan();
    plan.config.server.h2_streams = 3;
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut client = Client::new(&rig).await;
    // The server's settings are known after a first answer.
    client.ask(request("GET", "/health"), b"").await;
    let mut running = Vec::new();
    for _ in 0..3 {
        running.push(client.begin(request("GET", "/props"), true).await);
    }
    eventually("they run", || upstream.open() == 3).await;
    let mut next = JoinSet::new();
    let send = client.send.clone();
    next.spawn(async move {
        let (answer, _) = send.ready().await.unwrap().send_request(request("GET", "/health"), true).unwrap();
        answer.await.unwrap().status().as_u16()
    });
    running.pop().unwrap().1.send_reset(Reason::CANCEL);
    assert_eq!(timeout(PATIENCE, next.join_next()).await.unwrap().unwrap().unwrap(), 200);
    drop((running, client));
    rig.is_clean().await;
}

/// Sends and resets until the server closes the connection.
async fn flood(rig: &Rig, per_round: usize) {
    let mut client = Client::new(rig).await;
    let until = Instant::now() + PATIENCE;
    while client.tasks.try_join_next().is_none() {
        assert!(Instant::now() < until, "the flood is never ended");
        for _ in 0..per_round {
            let Ok(Ok(mut ready)) = timeout(PATIENCE, client.send.clone().ready()).await else { return };
            let Ok((answer, mut sending)) = ready.send_request(request("GET", "/props"), false) else {
                return;
            };
            sending.send_reset(Reason::CANCEL);
            drop(answer);
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn rapid_reset_ends_the_connection_and_harms_no_other() {
    let upstream = echo();
    let rig = Rig::with(plan(), &[&upstream]).await;
    let mut other = Client::new(&rig).await;
    for per_round in [1, 100] {
        let before = rig.gauges.limited.count(GatewayLimit::H2Resets);
        flood(&rig, per_round).await;
        eventually("it is counted", || rig.gauges.limited.count(GatewayLimit::H2Resets) > before).await;
        let (answer, _) = other.ask(request("POST", "/v1/completions"), b"{}").await;
        assert_eq!(answer.status().as_u16(), 200, "others are unharmed");
    }
    eventually("the floods are closed", || rig.gauges.connections.load(Ordering::SeqCst) == 1).await;
    // A few resets are permitted.
    for _ in 0..10 {
        let (_, mut sending) = other.begin(request("POST", "/v1/completions"), false).await;
        sending.send_reset(Reason::CANCEL);
    }
    let (answer, _) = other.ask(request("GET", "/health"), b"").await;
    assert_eq!(answer.status().as_u16(), 200);
    drop(other);
    rig.is_clean().await;
}
