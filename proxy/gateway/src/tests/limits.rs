//! Requests beyond a limit are refused with an explanation.

use tokio::net::TcpSocket;

use super::*;

fn echo() -> Upstream {
    Upstream::answering(|_, body| json_answer(&body.len().to_string()))
}

#[tokio::test]
async fn ten_megabytes_of_headers_get_one_clear_answer() {
    let upstream = echo();
    let rig = Rig::start(&[&upstream]).await;
    let one = format!("GET /health HTTP/1.1\r\nHost: h\r\nX-Big: {}\r\n\r\n", "x".repeat(10_000_000));
    let many = format!("GET /health HTTP/1.1\r\nHost: h\r\n{}\r\n", "X-Many: y\r\n".repeat(101));
    let wide = format!(
        "GET /health HTTP/1.1\r\nHost: h\r\n{}\r\n",
        format!("X-Wide: {}\r\n", "y".repeat(900)).repeat(90)
    );
    for request in [one, many, wide] {
        let (mut reading, mut writing) = TcpStream::connect(rig.address).await.unwrap().into_split();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let _reset = writing.write_all(request.as_bytes()).await;
            writing
        });
        let mut answer = Vec::new();
        while !answer.ends_with(b"}") {
            assert!(timeout(PATIENCE, reading.read_buf(&mut answer)).await.unwrap().unwrap() > 0, "cut off");
        }
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 431 Request Header Fields Too Large\r\n"), "{answer}");
        assert!(
            answer.contains("server.header_bytes")
                && answer.to_ascii_lowercase().contains("x-warden-executed: no"),
            "{answer}"
        );
    }
    let (head, _) = rig.ask(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let (head, body) = rig.ask(b"GET /health HTTP/1.1\r\nHost: h\r\nBad Name: x\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 400 ") && body.contains("not valid HTTP/1.1"), "{head}{body}");
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused_declared_or_not() {
    let upstream = echo();
    let mut plan = Plan { any_name: true, ..Plan::default() };
    plan.config.server.body_bytes = ByteSize(1_000_000);
    let rig = Rig::with(plan, &[&upstream]).await;
    let (head, body) = rig.ask(&post("/x", &"x".repeat(1_000_001))).await;
    assert!(
        head.starts_with("HTTP/1.1 413 ") && head.to_ascii_lowercase().contains("connection: close"),
        "{head}"
    );
    assert!(body.contains("1000000 bytes"), "{body}");
    assert_eq!(upstream.accepted(), 0, "refused before it was read");

    let mut client = rig.client().await;
    client.send(b"POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n").await;
    let chunk = [b"10000\r\n".as_slice(), &vec![b'x'; 0x10000], b"\r\n"].concat();
    for _ in 0..40 {
        client.send(&chunk).await;
    }
    let (head, body) = client.response().await;
    assert!(head.starts_with("HTTP/1.1 413 "), "{head}");
    assert!(body.len() > 10);
    let (head, answer) = rig.ask(&post("/x", &"x".repeat(1_000_000))).await;
    assert!(head.starts_with("HTTP/1.1 200 ") && answer == "1000000", "{head}");
    rig.is_clean().await;
}

#[tokio::test]
async fn the_memory_for_held_bodies_is_bounded_by_all_together() {
    let upstream = echo();
    let mut plan = Plan { models: vec!["a", "b"], ..Plan::default() };
    plan.config.server.buffered_bytes = ByteSize(2_400_000);
    let rig = Rig::with(plan, &[&upstream]).await;
    // Two bodies with the model at their end; the first one is unfinished.
    let mut first = rig.client().await;
    first.send(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 3000000\r\n\r\n{\"x\":\"").await;
    first.send(&vec![b'x'; 1_500_000]).await;
    // Wait for everything sent of the first: otherwise its next piece may be the one without room.
    eventually("the first is held", || rig.gauges.held_bytes.load(Ordering::SeqCst) >= 1_500_000).await;
    let body = format!(r#"{{"x":"{}","model":"a"}}"#, "y".repeat(1_000_000));
    let (head, answer) = rig.ask(&post("/x", &body)).await;
    assert!(head.starts_with("HTTP/1.1 503 ") && head.contains("retry-after: 1"), "{head}{answer}");
    assert!(answer.contains("server.buffered_bytes"), "{answer}");
    // A body that need not be held still passes.
    let (head, _) = rig.ask(&post("/x?model=a", &body)).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    drop(first);
    rig.is_clean().await;
    let (head, _) = rig.ask(&post("/x", &body)).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    rig.is_clean().await;
}

#[tokio::test]
async fn five_slow_uploads_of_one_address_leave_room_for_another() {
    let upstream = echo();
    let mut plan = Plan { models: vec!["a", "b"], ..Plan::default() };
    plan.config.server.buffered_bytes = ByteSize(3_000_000);
    let rig = Rig::with(plan, &[&upstream]).await;
    let upload = async || {
        let mut client = rig.client().await;
        client.send(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 3000000\r\n\r\n{\"x\":\"").await;
        client.send(&vec![b'x'; 590_000]).await;
        client
    };
    let kept = || rig.gauges.held_bytes.load(Ordering::SeqCst);
    let mut slow = Vec::new();
    for more in 1..=3 {
        slow.push(upload().await);
        eventually("it is kept", || kept() >= more * 590_000).await;
    }
    // One client may hold two thirds of the budget: its further bodies are refused.
    for _ in 0..2 {
        let (head, _) = upload().await.response().await;
        assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
    }
    let body = format!(r#"{{"x":"{}","model":"a"}}"#, "y".repeat(450_000));
    let elsewhere = TcpSocket::new_v4().unwrap();
    elsewhere.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut other = Peer::new(elsewhere.connect(rig.address).await.unwrap());
    other.send(&post("/x", &body)).await;
    let (head, answer) = other.response().await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}{}", String::from_utf8_lossy(&answer));
    drop((slow, other));
    rig.is_clean().await;
}

#[tokio::test]
async fn bodies_that_wait_for_a_lease_leave_room_for_those_whose_model_is_looked_for() {
    let upstream = echo();
    let mut plan = Plan { models: vec!["a", "b"], room: 0, ..Plan::default() };
    plan.config.server.buffered_bytes = ByteSize(2_000_000);
    let rig = Rig::with(plan, &[&upstream]).await;
    let (mut first, mut second) = (rig.client().await, rig.client().await);
    let waiting = || rig.backends.waiting.load(Ordering::SeqCst);
    let large = post("/x", &format!(r#"{{"model":"a","x":"{}"}}"#, "y".repeat(5_000_000)));
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        first.send(&large).await;
        first.response().await;
    });
    let held = || rig.gauges.held_bytes.load(Ordering::SeqCst);
    eventually("the first waits, and is read ahead", || waiting() == 1 && held() > 900_000).await;
    second.send(&post("/x", &format!(r#"{{"x":"{}","model":"b"}}"#, "y".repeat(250_000)))).await;
    eventually("the second waits, too", || waiting() == 2).await;
    rig.backends.room.add_permits(1);
    assert!(second.response().await.0.starts_with("HTTP/1.1 200 "));
    tasks.join_next().await;
    rig.is_clean().await;
}

#[tokio::test]
async fn a_model_that_comes_too_late_is_not_searched_for_ever() {
    let upstream = echo();
    let mut plan = Plan { models: vec!["a", "b"], ..Plan::default() };
    plan.config.server.model_scan_bytes = ByteSize(500_000);
    let rig = Rig::with(plan, &[&upstream]).await;
    let body = format!(r#"{{"x":"{}","model":"a"}}"#, "y".repeat(1_000_000));
    let (head, answer) = rig.ask(&post("/x", &body)).await;
    assert!(head.starts_with("HTTP/1.1 400 ") && answer.contains("put `model` first"), "{head}{answer}");
    rig.is_clean().await;
}

#[tokio::test]
async fn slow_heads_and_slow_bodies_are_given_up() {
    let upstream = echo();
    let mut plan = Plan::default();
    plan.config.server.header_timeout = Duration::from_millis(150);
    plan.config.server.body_timeout = Duration::from_millis(150);
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut head = rig.client().await;
    head.send(b"GET /health HTTP/1.1\r\nHo").await;
    let answer = String::from_utf8(head.rest().await).unwrap();
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("server.header_timeout"), "{answer}");
    // The limit also applies after a first request, but not to a connection that is idle between requests.
    let mut second = rig.client().await;
    second.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n").await;
    second.response().await;
    sleep(Duration::from_millis(400)).await;
    second.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(second.response().await.0.starts_with("HTTP/1.1 200 "));
    second.send(b"GET /hea").await;
    assert!(String::from_utf8(second.rest().await).unwrap().starts_with("HTTP/1.1 408 "));
    let mut body = rig.client().await;
    body.send(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\n{").await;
    let (answer, _) = body.response().await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    rig.is_clean().await;
}

#[tokio::test]
async fn idle_connections_are_closed_in_time() {
    let upstream = echo();
    let mut plan = Plan::default();
    plan.config.server.keep_alive = Duration::from_millis(200);
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut client = rig.client().await;
    client.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n").await;
    client.response().await;
    assert!(client.rest().await.is_empty());
    eventually("no connection is counted", || rig.gauges.connections.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn connections_beyond_the_limit_are_told_so() {
    let upstream = echo();
    let mut plan = Plan::default();
    plan.config.server.connections_per_peer = 2;
    let rig = Rig::with(plan, &[&upstream]).await;
    let (one, two) = (rig.client().await, rig.client().await);
    eventually("both are counted", || rig.gauges.connections.load(Ordering::SeqCst) == 2).await;
    let (head, body) = rig.ask(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 503 ") && head.contains("retry-after: 1"), "{head}{body}");
    drop((one, two));
    eventually("none is counted", || rig.gauges.connections.load(Ordering::SeqCst) == 0).await;
    let (head, _) = rig.ask(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
}

#[tokio::test]
async fn a_thousand_idle_connections_do_not_hurt_the_next() {
    // Both ends of each connection are in this process, so raise the limit of open files.
    let mut files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    files.current = files.maximum;
    rustix::process::setrlimit(rustix::process::Resource::Nofile, files).unwrap();
    let upstream = echo();
    let rig = Rig::start(&[&upstream]).await;
    let mut idle = Vec::new();
    for _ in 0..1000 {
        idle.push(rig.client().await);
    }
    eventually("all are open", || rig.gauges.connections.load(Ordering::SeqCst) == 1000).await;
    let (head, _) = rig.ask(&post("/v1/completions", "{}")).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    drop(idle);
    eventually("all are gone", || rig.gauges.connections.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn hosts_and_methods_are_checked() {
    let upstream = Upstream::answering(|_, _| panic!("reached a backend"));
    let rig = Rig::start(&[&upstream]).await;
    for (request, status) in [
        ("GET /props HTTP/1.1\r\n\r\n", 400),
        ("GET /props HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        ("TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        ("CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        ("GET /health HTTP/1.0\r\n\r\n", 200),
    ] {
        let mut client = rig.client().await;
        client.send(request.as_bytes()).await;
        let head = client.until("\r\n").await;
        assert!(head.contains(&format!(" {status} ")), "{request}: {head}");
    }
}
