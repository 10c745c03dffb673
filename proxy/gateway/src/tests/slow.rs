//! Clients that do not read, send in a trickle, or leave where that is hard to see.

use super::*;
use crate::{Limit, Outcome};

#[tokio::test]
async fn a_client_that_takes_nothing_is_cut_in_time() {
    let upstream = Upstream::start(|mut peer| async move {
        if peer.request().await.is_some() {
            peer.send(EVENTS).await;
            let chunk = [b"1000\r\n".as_slice(), &[b'x'; 0xffe], b"\n\n\r\n"].concat();
            while peer.stream.write_all(&chunk).await.is_ok() {}
        }
    });
    let mut plan = Plan::default();
    plan.config.send_timeout = Duration::from_millis(300);
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
    eventually("its stream begins", || upstream.open() == 1).await;
    eventually("it is cut", || upstream.open() == 0).await;
    assert_eq!(rig.gauges.limited.count(Limit::SendTime), 1);
    assert_eq!(rig.record(0).await.outcome, Outcome::ClientGone);
    rig.is_clean().await;
    eventually("no connection is counted", || rig.gauges.connections.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn requests_that_come_together_are_answered_in_order() {
    let upstream = Upstream::answering(|head, _| json_answer(&format!("{:?}", head.lines().next())));
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    let all: Vec<u8> = (0..5).flat_map(|number| post(&format!("/v1/completions?n={number}"), "{}")).collect();
    client.send(&all).await;
    for number in 0..5 {
        let (head, body) = client.response().await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert!(String::from_utf8(body).unwrap().contains(&format!("n={number} ")));
    }
    rig.is_clean().await;
}

#[tokio::test]
async fn a_client_that_leaves_behind_unread_bytes_is_noticed() {
    let upstream = Upstream::start(|mut peer| async move {
        if let Some((head, _)) = peer.request().await
            && head.contains("chat")
        {
            peer.send(EVENTS).await;
            peer.send_chunk(b"data: 1\n\n").await;
        }
        peer.rest().await;
    });
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let rig = Rig::start(&[&upstream]).await;
        let mut client = rig.client().await;
        let mut both = post(path, r#"{"stream":true}"#);
        both.extend_from_slice(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n");
        client.send(&both).await;
        eventually("the first runs", || upstream.open() == 1).await;
        if path.contains("chat") {
            client.until("data: 1\n\n").await;
        }
        drop(client);
        eventually("it is given up", || upstream.open() == 0).await;
        assert_eq!(rig.record(0).await.outcome, Outcome::ClientGone);
        rig.is_clean().await;
    }
}
