//! HTTP/2 clients that do not read, or that have vanished.

use std::io;
use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::http2::{Client, plan, request};
use super::slow::{anonymous, is_alone, raise_file_limit};
use super::*;
use crate::{GatewayLimit, RequestOutcome};

const STREAM: &[u8] = b"{\"stream\":true}";

#[tokio::test]
async fn a_thousand_streams_that_are_not_read_cost_little_and_hurt_nobody() {
    const CONNECTIONS: usize = 10;
    const STREAMS: usize = 100;
    if !is_alone(module_path!(), "a_thousand_streams_that_are_not_read_cost_little_and_hurt_nobody").await {
        return;
    }
    raise_file_limit();
    let written = Arc::new(AtomicUsize::new(0));
    let upstream = endless(&written, Some(16 * 1024));
    let rig = Rig::with(plan(), &[&upstream]).await;
    let before = anonymous();
    let (mut clients, mut unread) = (Vec::new(), Vec::new());
    for _ in 0..CONNECTIONS {
        let stream = TcpStream::connect(rig.address).await.unwrap();
        // A small window: the memory of the client's own library is not measured.
        let mut client = Client::over(stream, 1024).await;
        for _ in 0..STREAMS {
            let (answer, mut sending) = client.begin(request("POST", "/v1/completions"), false).await;
            sending.send_data(Bytes::from_static(STREAM), true).unwrap();
            unread.push((answer, sending));
        }
        clients.push(client);
    }
    let mut bodies = Vec::new();
    for (answer, _sending) in unread {
        bodies.push(timeout(PATIENCE * 9, answer).await.unwrap().unwrap().into_body());
    }
    assert_eq!(rig.live(), CONNECTIONS * STREAMS);
    let last = stalled(&written).await;
    assert!(last < 1000 * 1024 * 1024, "{last} bytes were taken from the backend");
    // Further requests are answered: on their own connections of either version, and after the stalled ones.
    for _ in 0..5 {
        let (head, _) = rig.ask(&post("/quick", "{}")).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        let mut other = Client::over(TcpStream::connect(rig.address).await.unwrap(), 65_535).await;
        let (answer, _) = other.ask(request("POST", "/quick"), b"{}").await;
        assert_eq!(answer.status().as_u16(), 200);
        let cost = anonymous().saturating_sub(before);
        // The same as over HTTP/1.1: bytes read from a backend, in transit, and waiting to be written, plus
        // those read ahead over all connections.
        let ahead = defaults().server.buffered_bytes.in_memory() / 2;
        assert!(cost < CONNECTIONS * STREAMS * 256 * 1024 + ahead, "{cost} bytes for a thousand");
    }
    drop(bodies.pop());
    eventually("the place of one that is given up is free", || rig.live() == CONNECTIONS * STREAMS - 1).await;
    let client = clients.last_mut().unwrap();
    let (answer, _) = client.ask(request("POST", "/quick"), b"{}").await;
    assert_eq!(
        answer.status().as_u16(),
        200,
        "the hundredth stream of a connection with 99 that are not read"
    );
    drop((bodies, clients));
    rig.is_clean().await;
    eventually("all streams are cancelled", || upstream.open() == 0).await;
}

/// A client whose machine vanished: nothing comes back from it any more, not even a close.
struct Vanishing {
    stream: TcpStream,
    gone: Arc<AtomicBool>,
}

impl AsyncRead for Vanishing {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.gone.load(Ordering::SeqCst) {
            return Poll::Pending;
        }
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if self.gone.load(Ordering::SeqCst) { Poll::Pending } else { read }
    }
}

impl AsyncWrite for Vanishing {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.gone.load(Ordering::SeqCst) {
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[tokio::test]
async fn a_peer_that_answers_no_ping_is_dead_and_one_that_does_is_not() {
    let upstream = Upstream::start(|mut peer| async move {
        let Some((head, _)) = peer.request().await else { return };
        if head.contains("/quick") {
            peer.send(&json_answer("{}")).await;
        }
        peer.rest().await;
    });
    let mut plan = plan();
    plan.config.server.h2_ping = Duration::from_millis(300);
    plan.config.server.h2_ping_timeout = Duration::from_secs(1);
    let rig = Rig::with(plan, &[&upstream]).await;
    let gone = Arc::new(AtomicBool::new(false));
    let stream = TcpStream::connect(rig.address).await.unwrap();
    let mut dying = Client::over(Vanishing { stream, gone: gone.clone() }, 65_535).await;
    let (_answer, mut sending) = dying.begin(request("POST", "/v1/completions"), false).await;
    sending.send_data(Bytes::from_static(b"{}"), true).unwrap();
    let mut living = Client::over(TcpStream::connect(rig.address).await.unwrap(), 65_535).await;
    let (_waiting, mut sending) = living.begin(request("POST", "/v1/completions"), false).await;
    sending.send_data(Bytes::from_static(b"{}"), true).unwrap();
    eventually("both run", || rig.live() == 2).await;
    assert_eq!(rig.gauges.limited.count(GatewayLimit::H2Ping), 0);
    gone.store(true, Ordering::SeqCst);
    eventually("the dead one is noticed", || rig.gauges.limited.count(GatewayLimit::H2Ping) == 1).await;
    eventually("its request is given up", || rig.live() == 1).await;
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::ClientGone);
    // The other client was pinged as often, has nothing to read either, and stays connected.
    let (answer, _) = living.ask(request("POST", "/quick"), b"{}").await;
    assert_eq!(answer.status().as_u16(), 200);
    assert_eq!(rig.gauges.limited.count(GatewayLimit::H2Ping), 1);
    drop((dying, living));
    rig.is_clean().await;
}
