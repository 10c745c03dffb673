//! HTTP/2 keeps the same promises, stream by stream.

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, SendStream};
use http::{Request, Response};

use super::*;
use crate::GatewayLimit;

mod streams;

/// A client's connection; dropping it closes it.
pub(super) struct Client {
    send: SendRequest<Bytes>,
    pub(super) tasks: JoinSet<Result<(), h2::Error>>,
}

impl Client {
    pub(super) async fn over<S>(stream: S, window: u32) -> Self
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        let mut builder = h2::client::Builder::new();
        // Only the windows of streams matter here.
        builder.initial_window_size(window).initial_connection_window_size(0x7fff_ffff);
        let (send, connection) = timeout(PATIENCE, builder.handshake(stream)).await.unwrap().unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(connection);
        Self { send, tasks }
    }

    async fn new(rig: &Rig) -> Self {
        Self::over(TcpStream::connect(rig.address).await.unwrap(), 65_535).await
    }

    pub(super) async fn begin(
        &mut self,
        request: Request<()>,
        ends: bool,
    ) -> (ResponseFuture, SendStream<Bytes>) {
        let mut ready = timeout(PATIENCE, self.send.clone().ready()).await.unwrap().unwrap();
        ready.send_request(request, ends).unwrap()
    }

    pub(super) async fn ask(&mut self, request: Request<()>, body: &'static [u8]) -> (Response<()>, String) {
        let (answer, mut sending) = self.begin(request, body.is_empty()).await;
        if !body.is_empty() {
            sending.send_data(Bytes::from_static(body), true).unwrap();
        }
        let answer = timeout(PATIENCE, answer).await.unwrap().unwrap();
        let (parts, mut body) = answer.into_parts();
        let mut all = Vec::new();
        while let Some(piece) = timeout(PATIENCE, body.data()).await.unwrap() {
            let piece = piece.unwrap();
            body.flow_control().release_capacity(piece.len()).unwrap();
            all.extend_from_slice(&piece);
        }
        (Response::from_parts(parts, ()), String::from_utf8(all).unwrap())
    }

    /// Returns how the connection ended.
    pub(super) async fn end(&mut self) -> Result<(), h2::Error> {
        timeout(PATIENCE, self.tasks.join_next()).await.unwrap().unwrap().unwrap()
    }
}

pub(super) fn request(method: &str, path: &str) -> Request<()> {
    Request::builder().method(method).uri(format!("http://h{path}")).body(()).unwrap()
}

pub(super) fn plan() -> Plan {
    let mut plan = Plan { any_name: true, ..Plan::default() };
    plan.config.server.h2c = true;
    plan
}

fn echo() -> Upstream {
    Upstream::answering(|head, body| {
        json_answer(&format!("{} {}", head.lines().next().unwrap_or_default(), String::from_utf8_lossy(body)))
    })
}

#[tokio::test]
async fn requests_and_errors_are_the_same_as_over_http_1() {
    let upstream = echo();
    let rig = Rig::with(plan(), &[&upstream]).await;
    let mut client = Client::new(&rig).await;
    let mut post = request("POST", "/v1/completions?x=1");
    post.headers_mut().insert("x-request-id", "abc".parse().unwrap());
    post.headers_mut().append("cookie", "a=1".parse().unwrap());
    post.headers_mut().append("cookie", "b=2".parse().unwrap());
    let (answer, body) = client.ask(post, b"{\"a\":1}").await;
    assert_eq!(
        (answer.status().as_u16(), answer.headers()["x-request-id"].as_bytes()),
        (200, b"abc".as_slice())
    );
    assert_eq!(body, "POST /v1/completions?x=1 HTTP/1.1 {\"a\":1}");
    let (answer, body) = client.ask(request("GET", "/health"), b"").await;
    assert!(answer.status().is_success() && body.contains("ok"), "{body}");
    // A request is refused with its body unread: the connection continues, without a `Connection: close`.
    let mut large = request("POST", "/v1/completions");
    large.headers_mut().insert("content-length", "99999999999".parse().unwrap());
    let (refused, _sending) = client.begin(large, false).await;
    let refused = timeout(PATIENCE, refused).await.unwrap().unwrap();
    assert_eq!(refused.status().as_u16(), 413);
    assert!(!refused.headers().contains_key("connection"), "{refused:?}");
    assert_eq!(refused.headers()["x-warden-executed"], "no");
    let (answer, _) = client.ask(request("GET", "/health"), b"").await;
    assert!(answer.status().is_success());
    // The same port serves HTTP/1.1 to clients that begin with it.
    let (head, _) = rig.ask(&super::post("/v1/completions", "{}")).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    drop(client);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_line_that_llama_server_does_not_take_is_refused_and_nobody_is_doubted() {
    let upstream = echo();
    let rig = Rig::with(plan(), &[&upstream]).await;
    let mut client = Client::new(&rig).await;
    let fits = 8 * 1024 - "/props?".len();
    let (answer, _) = client.ask(request("GET", &format!("/props?{}", "x".repeat(fits))), b"").await;
    assert_eq!(answer.status().as_u16(), 200);
    for (method, body) in [("GET", ""), ("POST", "{}")] {
        let target = format!("/props?{}", "x".repeat(fits + 1));
        let (answer, body) = client.ask(request(method, &target), body.as_bytes()).await;
        assert_eq!(answer.status().as_u16(), 414, "{method}: {body}");
        assert!(body.contains("too long"), "{method}: {body}");
    }
    let (answer, _) = client.ask(request("GET", "/props"), b"").await;
    assert_eq!(answer.status().as_u16(), 200, "the connection goes on");
    let granted = rig.backends.granted.load(Ordering::SeqCst);
    assert_eq!((granted, rig.backends.doubts.load(Ordering::SeqCst)), (2, 0));
    drop(client);
    rig.is_clean().await;
}

#[tokio::test]
async fn without_being_asked_there_is_no_http_2() {
    let upstream = echo();
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    assert!(client.rest().await.is_empty(), "closed, without the settings that a server begins with");
    eventually("it is counted", || rig.gauges.limited.count(GatewayLimit::HeadInvalid) == 1).await;
}

#[tokio::test]
async fn a_preface_in_pieces_or_never_ended_is_dealt_with() {
    let upstream = echo();
    let mut plan = plan();
    plan.config.server.header_timeout = Duration::from_millis(200);
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut client = rig.client().await;
    for piece in ["PRI * HT", "TP/2.0\r\n\r\nSM\r", "\n\r\n"] {
        client.send(piece.as_bytes()).await;
        sleep(Duration::from_millis(10)).await;
    }
    client.send(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await;
    assert!(client.more().await && client.buffer.len() >= 9 && client.buffer[3] == 4, "settings come back");
    // These bytes only begin like the preface.
    let mut other = rig.client().await;
    other.send(b"P").await;
    sleep(Duration::from_millis(10)).await;
    other.send(b"OST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}").await;
    assert!(other.response().await.0.starts_with("HTTP/1.1 200 "));
    let mut slow = rig.client().await;
    slow.send(b"PRI *").await;
    assert!(slow.rest().await.is_empty());
    eventually("it is counted", || rig.gauges.limited.count(GatewayLimit::HeadTime) == 1).await;
}

#[tokio::test]
async fn a_stop_says_go_away_and_running_streams_end() {
    let go = Arc::new(Semaphore::new(0));
    let signal = go.clone();
    let upstream = Upstream::start(move |mut peer| {
        let go = signal.clone();
        async move {
            peer.request().await;
            go.acquire().await.unwrap().forget();
            peer.send(&json_answer(r#"{"late":true}"#)).await;
        }
    });
    let mut rig = Rig::with(plan(), &[&upstream]).await;
    let (mut running, mut idle) = (Client::new(&rig).await, Client::new(&rig).await);
    idle.ask(request("GET", "/health"), b"").await;
    let (answer, mut sending) = running.begin(request("POST", "/v1/completions"), false).await;
    sending.send_data(Bytes::from_static(b"{}"), true).unwrap();
    eventually("it runs", || upstream.open() == 1).await;
    rig.stop.cancel();
    assert!(idle.end().await.is_ok(), "an idle connection ends in order");
    eventually("no new streams", || {
        running.send.clone().send_request(request("GET", "/health"), true).is_err()
    })
    .await;
    go.add_permits(1);
    let mut body = timeout(PATIENCE, answer).await.unwrap().unwrap().into_body();
    assert_eq!(timeout(PATIENCE, body.data()).await.unwrap().unwrap().unwrap(), r#"{"late":true}"#);
    assert!(running.end().await.is_ok());
    timeout(PATIENCE, rig.serving.join_next()).await.unwrap().unwrap().unwrap();
    rig.is_clean().await;
}

#[tokio::test]
async fn an_idle_connection_is_closed_in_time() {
    let upstream = echo();
    let mut plan = plan();
    plan.config.server.keep_alive = Duration::from_millis(200);
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut client = Client::new(&rig).await;
    client.ask(request("GET", "/health"), b"").await;
    assert!(client.end().await.is_ok());
    eventually("it is counted", || rig.gauges.limited.count(GatewayLimit::KeepAlive) == 1).await;
    eventually("it is gone", || rig.gauges.connections.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn hosts_lengths_and_heads_are_checked_as_over_http_1() {
    let upstream = Upstream::answering(|head, _| panic!("reached a backend: {head}"));
    let rig = Rig::with(plan(), &[&upstream]).await;
    let mut client = Client::new(&rig).await;
    let mut differs = request("GET", "/props");
    differs.headers_mut().insert("host", "other".parse().unwrap());
    let mut two = request("GET", "/props");
    two.headers_mut().append("host", "h".parse().unwrap());
    two.headers_mut().append("host", "h".parse().unwrap());
    let mut many = request("GET", "/props");
    for number in 0..101 {
        many.headers_mut()
            .insert(http::HeaderName::try_from(format!("x-{number}")).unwrap(), "y".parse().unwrap());
    }
    let mut wide = request("GET", "/props");
    for number in 0..90 {
        let value = "y".repeat(900).parse().unwrap();
        wide.headers_mut().insert(http::HeaderName::try_from(format!("x-{number}")).unwrap(), value);
    }
    for (request, status) in [
        (differs, 400),
        (two, 400),
        (many, 431),
        (wide, 431),
        (request("TRACE", "/"), 405),
        (request("GET", "/a%00"), 400),
        (request("POST", "/%u0061"), 400),
    ] {
        let (answer, body) = client.ask(request, b"").await;
        assert_eq!(answer.status().as_u16(), status, "{body}");
    }
    // A body shorter or longer than declared never reaches a backend.
    for declared in ["5", "1"] {
        let mut wrong = request("POST", "/v1/completions");
        wrong.headers_mut().insert("content-length", declared.parse().unwrap());
        let (answer, mut sending) = client.begin(wrong, false).await;
        sending.send_data(Bytes::from_static(b"{ }"), true).unwrap();
        let error = timeout(PATIENCE, answer).await.unwrap().unwrap_err();
        assert_eq!(error.reason(), Some(Reason::PROTOCOL_ERROR), "{error}");
    }
    let (answer, _) = client.ask(request("GET", "/health"), b"").await;
    assert!(answer.status().is_success(), "the connection goes on");
    drop(client);
    rig.is_clean().await;
}

#[tokio::test]
async fn what_is_no_http_2_is_ended_and_counted() {
    let upstream = echo();
    let rig = Rig::with(plan(), &[&upstream]).await;
    let mut client = rig.client().await;
    // A DATA frame on a stream that was never opened.
    client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\0\0\x01\0\0\0\0\0\x05x").await;
    assert!(!client.rest().await.is_empty());
    eventually("it is counted", || rig.gauges.limited.count(GatewayLimit::H2Invalid) == 1).await;
}
