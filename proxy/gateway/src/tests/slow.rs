//! Clients that do not read, send in a trickle, or leave in ways that are hard to notice.

use super::*;
use crate::{GatewayLimit, RequestOutcome};

/// Raises the limit of open files for a test with thousands of connections: both ends are in this process.
fn raise_file_limit() {
    let mut files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    files.current = files.maximum;
    rustix::process::setrlimit(rustix::process::Resource::Nofile, files).unwrap();
}

/// Returns whether this process runs this test only. If not, starts such a process, which has to pass:
/// memory of other tests in the same process must not be counted.
pub(super) async fn is_alone(module: &str, test: &str) -> bool {
    const ALONE: &str = "WARDEN_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let name = format!("{}::{test}", module.split_once("::").unwrap().1);
    let mut program = tokio::process::Command::new(std::env::current_exe().unwrap());
    let ran = program.args(["--exact", &name]).env(ALONE, "1").output().await.unwrap();
    let told = String::from_utf8_lossy(&ran.stdout);
    assert!(
        ran.status.success() && told.contains("1 passed"),
        "{told}{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    false
}

/// Returns the anonymous memory of this process in bytes.
fn anonymous() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

#[tokio::test]
async fn a_thousand_readers_that_do_not_read_cost_little_and_hurt_nobody() {
    if !is_alone(module_path!(), "a_thousand_readers_that_do_not_read_cost_little_and_hurt_nobody").await {
        return;
    }
    raise_file_limit();
    let written = Arc::new(AtomicUsize::new(0));
    let upstream = endless(&written, Some(16 * 1024));
    let rig = Rig::start(&[&upstream]).await;
    let before = anonymous();
    let mut slow = Vec::new();
    for _ in 0..1000 {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        // Small kernel buffers: the gateway's own memory is measured.
        socket.set_recv_buffer_size(4096).unwrap();
        let mut client = Peer::new(socket.connect(rig.address).await.unwrap());
        client.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
        slow.push(client);
    }
    eventually("all are answered", || rig.live() == 1000).await;
    let last = stalled(&written).await;
    // These bytes are in the buffers of the sockets and of the gateway.
    assert!(last < 1000 * 1024 * 1024, "{last} bytes were taken from the backend");
    for _ in 0..5 {
        let (head, _) = rig.ask(&post("/quick", "{}")).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        let cost = anonymous().saturating_sub(before);
        // Four buffers of 64 KiB each: being read from the backend, whose last piece is held, in transit,
        // and waiting to be written. 64 KiB for the tasks of both ends, which are in this process. Plus the
        // bytes read ahead over all connections.
        let ahead = defaults().server.buffered_bytes.in_memory() / 2;
        assert!(cost < 1000 * (4 + 1) * 64 * 1024 + ahead, "{cost} bytes for a thousand");
    }
    assert_eq!(rig.live(), 1000, "none of them was given up");
    drop(slow);
    rig.is_clean().await;
    eventually("all streams are cancelled", || upstream.open() == 0).await;
}

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
    plan.config.server.send_timeout = Duration::from_millis(300);
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", r#"{"stream":true}"#)).await;
    eventually("its stream began", || upstream.accepted() == 1).await;
    eventually("it is cut", || upstream.open() == 0).await;
    eventually("it is counted", || rig.gauges.limited.count(GatewayLimit::SendTime) == 1).await;
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::ClientGone);
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
        assert_eq!(rig.record(0).await.outcome, RequestOutcome::ClientGone);
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_body_in_a_trickle_is_refused_held_or_streamed() {
    let upstream = Upstream::start(|mut peer| async move {
        peer.rest().await;
    });
    let mut plan = Plan { any_name: true, ..Plan::default() };
    plan.config.server.body_timeout = Duration::from_millis(300);
    plan.config.server.body_rate = ByteSize(1_000_000);
    let rig = Rig::with(plan, &[&upstream]).await;
    // The first body is read completely before it is sent on, the second is streamed.
    for length in ["1000", "9000000"] {
        let (mut reading, mut writing) = TcpStream::connect(rig.address).await.unwrap().into_split();
        let head = format!("POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n{{");
        writing.write_all(head.as_bytes()).await.unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            // The client is never silent for long.
            while writing.write_all(b" ").await.is_ok() {
                sleep(Duration::from_millis(20)).await;
            }
        });
        let mut answer = Vec::new();
        while !answer.ends_with(b"}") {
            assert!(timeout(PATIENCE, reading.read_buf(&mut answer)).await.unwrap().unwrap() > 0, "cut off");
        }
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("server.body_rate"), "{answer}");
    }
    rig.is_clean().await;
}

#[tokio::test]
async fn a_body_that_fails_behind_the_beginning_of_its_answer_is_no_fault_of_the_backend() {
    let upstream = Upstream::start(|mut peer| async move {
        peer.until("\r\n\r\n").await;
        peer.send(EVENTS).await;
        peer.send_chunk(b"data: 1\n\n").await;
        peer.rest().await;
    });
    let mut plan = Plan { any_name: true, ..Plan::default() };
    plan.config.upstream.replay_bytes = ByteSize(1);
    plan.config.server.body_bytes = ByteSize(10_000);
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut client = rig.client().await;
    client.send(b"POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{ \r\n").await;
    client.until("data: 1\n\n").await;
    client.send_chunk(&[b' '; 12_000]).await;
    client.until("larger than allowed").await;
    assert_eq!(rig.record(0).await.outcome.as_str(), "body_too_large");
    assert_eq!(rig.backends.doubts.load(Ordering::SeqCst), 0);
    rig.is_clean().await;
}
