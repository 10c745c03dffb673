//! A slot is held only while it computes, not by a client that sends or reads slowly.

use super::*;

/// A client with small buffers that does not read.
pub(super) async fn unread(rig: &Rig) -> Peer<TcpStream> {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    Peer::new(socket.connect(rig.address).await.unwrap())
}

fn one_slot() -> Plan {
    Plan { room: 1, ..Plan::default() }
}

/// Checks that the only slot serves another client.
async fn serves_another(rig: &Rig) {
    let (head, _) = rig.ask(&post("/completion", r#"{"quick":1}"#)).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
}

#[tokio::test]
async fn no_slot_is_taken_before_the_last_byte_of_a_body_is_here() {
    let upstream = Upstream::answering(|_, body| json_answer(&body.len().to_string()));
    let rig = Rig::with(one_slot(), &[&upstream]).await;
    let size = 400_000;
    let declared = format!("POST /completion HTTP/1.1\r\nHost: h\r\nContent-Length: {size}\r\n\r\n");
    let query = format!("POST /completion?model=m HTTP/1.1\r\nHost: h\r\nContent-Length: {size}\r\n\r\n");
    let chunked = "POST /v1/embeddings HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned();
    let begun = br#"{"model":"m","prompt":""#;
    for (head, is_chunked) in [(&declared, false), (&query, false), (&chunked, true)] {
        let mut slow = rig.client().await;
        slow.send(head.as_bytes()).await;
        serves_another(&rig).await;
        let first = [begun.as_slice(), &vec![b'x'; 350_000]].concat();
        let rest = [vec![b'x'; size - first.len() - 2].as_slice(), br#""}"#].concat();
        if is_chunked {
            slow.send_chunk(&first).await;
        } else {
            slow.send(&first).await;
        }
        let held = || rig.gauges.held_bytes.load(Ordering::SeqCst);
        eventually("what is here is held", || held() >= first.len()).await;
        serves_another(&rig).await;
        assert_eq!(rig.live(), 0, "nobody has a slot");
        if is_chunked {
            slow.send_chunk(&rest).await;
            slow.send_chunk(b"").await;
        } else {
            slow.send(&rest).await;
        }
        assert_eq!(slow.response().await.1, size.to_string().as_bytes());
        drop(slow);
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_body_for_which_there_is_no_room_has_a_slot_only_as_long_as_it_comes_fast() {
    let upstream = Upstream::answering(|_, body| json_answer(&body.len().to_string()));
    let mut plan = one_slot();
    plan.config.server.buffered_bytes = ByteSize(1_000_000);
    plan.config.server.slot_body_pause = Duration::from_millis(300);
    let rig = Rig::with(plan, &[&upstream]).await;
    let size = 3_000_000;
    let head = format!("POST /completion HTTP/1.1\r\nHost: h\r\nContent-Length: {size}\r\n\r\n");
    let begun = [br#"{"model":"m","prompt":""#.as_slice(), &vec![b'x'; 1_500_000]].concat();
    // A request that continues is served: most of it was never in memory at one time.
    let mut fast = rig.client().await;
    fast.send(head.as_bytes()).await;
    fast.send(&begun).await;
    fast.send(&vec![b'x'; size - begun.len()]).await;
    assert_eq!(fast.response().await.1, size.to_string().as_bytes());
    let mut slow = rig.client().await;
    slow.send(head.as_bytes()).await;
    slow.send(&begun).await;
    serves_another(&rig).await;
    let (head, answer) = slow.response().await;
    let answer = String::from_utf8(answer).unwrap();
    assert!(head.starts_with("HTTP/1.1 503 ") && head.contains("x-warden-executed: no"), "{head}{answer}");
    assert!(answer.contains("server.buffered_bytes"), "{answer}");
    rig.is_clean().await;
}

#[tokio::test]
async fn a_whole_answer_frees_its_slot_though_its_client_does_not_read() {
    let large = "y".repeat(3_000_000);
    let answer = large.clone();
    let upstream = Upstream::answering(move |_, body| {
        json_answer(if memchr::memmem::find(body, b"quick").is_some() { "{}" } else { &answer })
    });
    let rig = Rig::with(one_slot(), &[&upstream]).await;
    let mut client = unread(&rig).await;
    client.send(&post("/v1/embeddings", "{}")).await;
    eventually("its slot is free", || rig.live() == 0 && rig.records.0.lock().unwrap().len() == 1).await;
    serves_another(&rig).await;
    // No byte is lost.
    let (head, body) = client.response().await;
    assert!(head.starts_with("HTTP/1.1 200 ") && body == large.as_bytes(), "{head}: {} bytes", body.len());
    drop(client);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_stream_frees_its_slot_with_its_last_event_though_its_client_does_not_read() {
    let event = format!("data: {}\n\n", "z".repeat(990));
    let events = event.repeat(900);
    let all = events.clone();
    let upstream = Upstream::start(move |mut peer| {
        let events = events.clone();
        async move {
            while let Some((_, body)) = peer.request().await {
                if memchr::memmem::find(&body, b"quick").is_some() {
                    peer.send(&json_answer("{}")).await;
                } else {
                    peer.send(EVENTS).await;
                    peer.send_chunk(events.as_bytes()).await;
                    peer.send_chunk(b"").await;
                }
            }
        }
    });
    let rig = Rig::with(one_slot(), &[&upstream]).await;
    let mut client = unread(&rig).await;
    client.send(&post("/completion", r#"{"stream":true}"#)).await;
    eventually("its slot is free", || rig.live() == 0 && rig.records.0.lock().unwrap().len() == 1).await;
    serves_another(&rig).await;
    let (_, body) = client.response().await;
    assert!(body == all.as_bytes(), "{} of {} bytes", body.len(), all.len());
    drop(client);
    rig.is_clean().await;
}

#[tokio::test]
async fn unread_answers_share_the_memory_of_bodies_and_no_more_is_taken_than_that() {
    let upstream = Upstream::answering(|_, _| json_answer(&"y".repeat(12_000_000)));
    let mut plan = Plan::default();
    plan.config.server.buffered_bytes = ByteSize(4_000_000);
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = unread(&rig).await;
        client.send(&post("/v1/embeddings", "{}")).await;
        clients.push(client);
    }
    let held = || rig.gauges.held_bytes.load(Ordering::SeqCst);
    eventually("half of it is used", || held() > 1_700_000).await;
    assert!(held() <= 2_000_000, "{}", held());
    assert_eq!(rig.live(), 3, "there is no room for the rest of any of them");
    for mut client in clients {
        assert_eq!(client.response().await.1.len(), 12_000_000);
    }
    rig.is_clean().await;
}
