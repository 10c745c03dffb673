//! Start and stop.

use super::*;
use crate::GatewayError;

/// Three connections: one idle after use, one never used, one with a request that runs until `go`.
struct Three {
    rig: Rig,
    go: Arc<Semaphore>,
    used: Peer<TcpStream>,
    fresh: Peer<TcpStream>,
    running: Peer<TcpStream>,
    upstream: Upstream,
}

impl Three {
    async fn start(plan: Plan) -> Self {
        let go = Arc::new(Semaphore::new(0));
        let signal = go.clone();
        let upstream = Upstream::start(move |mut peer| {
            let go = signal.clone();
            async move {
                while peer.request().await.is_some() {
                    go.acquire().await.unwrap().forget();
                    peer.send(&json_answer(r#"{"late":true}"#)).await;
                }
            }
        });
        let rig = Rig::with(plan, &[&upstream]).await;
        let (mut used, fresh, mut running) = (rig.client().await, rig.client().await, rig.client().await);
        used.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n").await;
        used.response().await;
        running.send(&post("/v1/completions", "{}")).await;
        eventually("it runs", || upstream.open() == 1).await;
        eventually("all are there", || rig.gauges.connections.load(Ordering::SeqCst) == 3).await;
        Self { rig, go, used, fresh, running, upstream }
    }
}

#[tokio::test]
async fn a_stop_closes_what_is_idle_and_lets_the_rest_finish() {
    let Three { mut rig, go, mut used, mut fresh, mut running, upstream: _upstream } =
        Three::start(Plan::default()).await;
    rig.stop.cancel();
    assert!(used.rest().await.is_empty());
    assert!(fresh.rest().await.is_empty());
    eventually("nobody is accepted", || rig.gauges.connections.load(Ordering::SeqCst) == 1).await;
    assert!(TcpStream::connect(rig.address).await.is_err());
    assert_eq!(rig.serving.len(), 1, "it waits for the running one");
    go.add_permits(1);
    let (head, body) = running.response().await;
    assert!(head.starts_with("HTTP/1.1 200 ") && body == br#"{"late":true}"#, "{head}");
    timeout(PATIENCE, rig.serving.join_next()).await.unwrap().unwrap().unwrap();
    rig.is_clean().await;
}

/// Checks that each client gets an answer and is closed with it.
async fn answers_one_more(clients: impl IntoIterator<Item = &mut Peer<TcpStream>>) {
    for client in clients {
        client.send(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n").await;
        let (head, _) = client.response().await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert!(head.to_lowercase().contains("connection: close"), "{head}");
        assert!(client.rest().await.is_empty());
    }
}

/// A plan whose gateway waits longer for requests in transit than any test takes.
fn patient() -> Plan {
    let mut plan = Plan::default();
    plan.config.server.stopped_keep_alive = Duration::from_secs(3600);
    plan
}

#[tokio::test]
async fn a_request_that_was_on_its_way_at_a_stop_is_answered() {
    let Three { mut rig, go, mut used, mut fresh, mut running, upstream: _upstream } =
        Three::start(patient()).await;
    rig.stop.cancel();
    answers_one_more([&mut used, &mut fresh]).await;
    go.add_permits(1);
    let (head, _) = running.response().await;
    assert!(head.to_lowercase().contains("connection: close"), "its answer began after the stop: {head}");
    // No connection is left: the gateway waits for nothing.
    timeout(PATIENCE, rig.serving.join_next()).await.unwrap().unwrap().unwrap();
    rig.is_clean().await;
}

#[tokio::test]
async fn who_has_connected_before_a_stop_is_accepted_after_it() {
    use std::io::Write as _;
    let upstream = Upstream::silent();
    let mut rig = Rig::with(patient(), &[&upstream]).await;
    // Nothing is accepted meanwhile: the acceptor shares this thread.
    let connect = |number: usize| {
        let mut client = std::net::TcpStream::connect(rig.address).unwrap();
        if number.is_multiple_of(2) {
            client.write_all(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n").unwrap();
        }
        client.set_nonblocking(true).unwrap();
        client
    };
    let clients: Vec<_> = (0..64).map(connect).collect();
    assert_eq!(rig.gauges.connections.load(Ordering::SeqCst), 0, "they wait to be accepted");
    rig.stop.cancel();
    for (number, client) in clients.into_iter().enumerate() {
        let mut client = Peer::new(TcpStream::from_std(client).unwrap());
        if !number.is_multiple_of(2) {
            client.send(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n").await;
        }
        let (head, _) = client.response().await;
        assert!(
            head.starts_with("HTTP/1.1 200 ") && head.to_lowercase().contains("connection: close"),
            "{head}"
        );
    }
    timeout(PATIENCE, rig.serving.join_next()).await.unwrap().unwrap().unwrap();
    assert!(TcpStream::connect(rig.address).await.is_err());
    rig.is_clean().await;
}

#[tokio::test]
async fn dropping_the_server_cuts_what_runs() {
    let upstream = Upstream::silent();
    let mut rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/completions", "{}")).await;
    eventually("it runs", || upstream.open() == 1).await;
    rig.serving.shutdown().await;
    assert!(client.rest().await.is_empty());
    eventually("the backend's connection is closed", || upstream.open() == 0).await;
    rig.is_clean().await;
}

#[tokio::test]
async fn an_address_that_cannot_be_had_is_named_with_its_cure() {
    let at = |host: &str, port: u16| {
        let mut config = GatewayConfig::new(&defaults().server, &defaults().upstream);
        config.server.host = host.to_owned();
        config.server.port = port;
        config
    };
    let bound = Gateway::bind(at("127.0.0.1", 0)).await.unwrap();
    let taken = bound.local_addr().port();
    let error = Gateway::bind(at("127.0.0.1", taken)).await.unwrap_err();
    assert!(matches!(error, GatewayError::InUse { .. }));
    let text = error.to_string();
    assert!(text.contains(&format!("127.0.0.1:{taken}")) && text.contains("--port"), "{text}");
    let error = Gateway::bind(at("192.0.2.1", 0)).await.unwrap_err();
    assert!(matches!(error, GatewayError::NotOurs { .. }), "{error}");
    let error = Gateway::bind(at("no such host", 0)).await.unwrap_err();
    assert!(matches!(error, GatewayError::Resolve { .. }), "{error}");
    for host in ["localhost", "[::1]", "::1"] {
        // A machine may have no IPv6; then the error must say so.
        match Gateway::bind(at(host, 0)).await {
            Ok(bound) => assert_ne!(bound.local_addr().port(), 0),
            Err(error) => assert!(
                matches!(error, GatewayError::NotOurs { .. } | GatewayError::Listen { .. }),
                "{error}"
            ),
        }
    }
}

#[tokio::test]
async fn whoever_retires_answers_one_more_request_on_each_connection_and_says_so() {
    let Three { mut rig, go, mut used, mut fresh, mut running, upstream: _upstream } =
        Three::start(Plan::default()).await;
    rig.retire.cancel();
    // Neither the idle connection nor the unused one is closed while its next request is in transit.
    answers_one_more([&mut used, &mut fresh]).await;
    assert_eq!(rig.serving.len(), 1, "it waits for the running one");
    go.add_permits(1);
    let (head, body) = running.response().await;
    assert!(head.starts_with("HTTP/1.1 200 ") && body == br#"{"late":true}"#, "{head}");
    // The answer on this connection began before the gateway retired; the next answer is the last.
    running.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(running.response().await.0.to_lowercase().contains("connection: close"));
    timeout(PATIENCE, rig.serving.join_next()).await.unwrap().unwrap().unwrap();
    rig.is_clean().await;
}
