//! TLS: protocols, renewed certificates, and clients without a handshake.

use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::*;
use crate::{GatewayError, GatewayLimit};

struct Identity {
    dir: TempDir,
    der: CertificateDer<'static>,
}

impl Identity {
    fn new() -> Self {
        let mut identity = Self { dir: TempDir::new().unwrap(), der: CertificateDer::from(Vec::new()) };
        identity.renew();
        identity
    }

    fn renew(&mut self) {
        let key = KeyPair::generate().unwrap();
        let cert = CertificateParams::new(vec!["localhost".to_owned()]).unwrap().self_signed(&key).unwrap();
        std::fs::write(self.dir.path().join("key.pem"), key.serialize_pem()).unwrap();
        std::fs::write(self.dir.path().join("cert.pem"), cert.pem()).unwrap();
        self.der = cert.der().clone();
    }

    fn plan(&self) -> Plan {
        let mut plan = Plan { any_name: true, ..Plan::default() };
        let file = |name| self.dir.path().join(name).to_str().unwrap().to_owned();
        (plan.config.server.tls_cert, plan.config.server.tls_key) = (file("cert.pem"), file("key.pem"));
        plan
    }

    /// Makes a TLS connection that trusts this certificate only.
    async fn connect(&self, rig: &Rig, protocols: &[&str]) -> std::io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(self.der.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        let stream = TcpStream::connect(rig.address).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        timeout(PATIENCE, TlsConnector::from(Arc::new(config)).connect(name, stream)).await.unwrap()
    }
}

fn echo() -> Upstream {
    Upstream::answering(|_, body| json_answer(&String::from_utf8_lossy(body)))
}

const HEALTH: &[u8] = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n";

#[tokio::test]
async fn a_client_that_takes_http_1_gets_it_and_one_that_takes_only_http_2_is_refused() {
    let (identity, upstream) = (Identity::new(), echo());
    let rig = Rig::with(identity.plan(), &[&upstream]).await;
    for protocols in [&["http/1.1"][..], &["h2", "http/1.1"], &[]] {
        let mut client = Peer::new(identity.connect(&rig, protocols).await.unwrap());
        client.send(&post("/v1/completions", r#"{"a":1}"#)).await;
        let (head, body) = client.response().await;
        assert!(head.starts_with("HTTP/1.1 200 ") && body == br#"{"a":1}"#, "{head}");
    }
    let refused = identity.connect(&rig, &["h2"]).await.unwrap_err();
    assert!(refused.to_string().contains("NoApplicationProtocol"), "{refused}");
    eventually("it is counted", || rig.gauges.limited.count(GatewayLimit::Handshake) == 1).await;
    rig.is_clean().await;
}

#[tokio::test]
async fn a_large_answer_and_a_client_that_leaves_are_as_without_tls() {
    let identity = Identity::new();
    let upstream = Upstream::start(|mut peer| async move {
        let Some((head, _)) = peer.request().await else { return };
        if head.contains("/large") {
            peer.send(&json_answer(&"x".repeat(5_000_000))).await;
        }
        peer.rest().await;
    });
    let rig = Rig::with(identity.plan(), &[&upstream]).await;
    let mut client = Peer::new(identity.connect(&rig, &[]).await.unwrap());
    client.send(&post("/large", "{}")).await;
    assert_eq!(client.response().await.1.len(), 5_000_000);
    client.send(&post("/v1/completions", "{}")).await;
    eventually("it runs", || rig.live() == 1).await;
    drop(client);
    eventually("it is given up", || rig.live() == 0).await;
    rig.is_clean().await;
}

#[tokio::test]
async fn who_does_not_speak_tls_is_told_so_and_who_does_not_speak_is_closed() {
    let (identity, upstream) = (Identity::new(), echo());
    let mut plan = identity.plan();
    plan.config.server.tls_handshake_timeout = Duration::from_millis(300);
    let rig = Rig::with(plan, &[&upstream]).await;
    let mut silent = Vec::new();
    for begin in [&b""[..], b"\x16", b"\x16\x03\x01\x02\x00\x01"] {
        for _ in 0..30 {
            let mut client = rig.client().await;
            client.send(begin).await;
            silent.push(client);
        }
    }
    // None of them delays clients with a handshake.
    let mut client = Peer::new(identity.connect(&rig, &[]).await.unwrap());
    client.send(HEALTH).await;
    assert!(client.response().await.0.starts_with("HTTP/1.1 200 "));
    let (head, body) = rig.ask(HEALTH).await;
    assert!(head.starts_with("HTTP/1.1 400 ") && body.contains("https://"), "{head}{body}");
    for mut client in silent {
        client.rest().await;
    }
    eventually("all are counted", || rig.gauges.limited.count(GatewayLimit::HandshakeTime) == 90).await;
    assert_eq!(rig.gauges.limited.count(GatewayLimit::Handshake), 1);
}

#[tokio::test]
async fn a_new_certificate_is_for_new_connections_and_a_bad_one_for_none() {
    let (mut identity, upstream) = (Identity::new(), echo());
    let rig = Rig::with(identity.plan(), &[&upstream]).await;
    let mut old = Peer::new(identity.connect(&rig, &[]).await.unwrap());
    identity.renew();
    assert!(identity.connect(&rig, &[]).await.is_err(), "the old certificate is still shown");
    rig.tls.as_ref().unwrap().reload_if_changed().unwrap().unwrap();
    assert!(identity.connect(&rig, &[]).await.is_ok());
    std::fs::write(identity.dir.path().join("cert.pem"), "broken").unwrap();
    assert!(rig.tls.as_ref().unwrap().reload_if_changed().unwrap().is_err());
    assert!(identity.connect(&rig, &[]).await.is_ok(), "the good one stays");
    old.send(HEALTH).await;
    assert!(old.response().await.0.starts_with("HTTP/1.1 200 "), "who was connected stays connected");
}

#[tokio::test]
async fn a_bad_certificate_at_the_start_is_an_error() {
    let identity = Identity::new();
    std::fs::write(identity.dir.path().join("key.pem"), "broken").unwrap();
    let error = Gateway::bind(identity.plan().config).await.unwrap_err();
    assert!(matches!(error, GatewayError::Tls(_)) && error.to_string().contains("key.pem"), "{error}");
}

#[tokio::test]
async fn connections_beyond_the_limit_are_told_so_or_closed_when_there_are_too_many() {
    let (identity, upstream) = (Identity::new(), echo());
    let mut plan = identity.plan();
    plan.config.server.connections = 1;
    plan.config.server.refusals = 1;
    // A refused client that stays occupies the only place for refusals.
    plan.config.server.linger = PATIENCE * 2;
    let rig = Rig::with(plan, &[&upstream]).await;
    let _first = identity.connect(&rig, &[]).await.unwrap();
    let mut second = Peer::new(identity.connect(&rig, &["h2", "http/1.1"]).await.unwrap());
    let (head, _) = second.response().await;
    assert!(head.starts_with("HTTP/1.1 503 ") && head.contains("retry-after"), "{head}");
    eventually("it is counted", || rig.gauges.limited.count(GatewayLimit::Connections) == 1).await;
    let mut third = rig.client().await;
    assert!(third.rest().await.is_empty());
    eventually("it is counted", || rig.gauges.limited.count(GatewayLimit::Refusals) >= 1).await;
}

#[tokio::test]
async fn a_stop_says_goodbye() {
    let (identity, upstream) = (Identity::new(), echo());
    let mut rig = Rig::with(identity.plan(), &[&upstream]).await;
    let mut client = identity.connect(&rig, &[]).await.unwrap();
    client.write_all(HEALTH).await.unwrap();
    let mut buffer = vec![0; 4096];
    assert!(timeout(PATIENCE, client.read(&mut buffer)).await.unwrap().unwrap() > 0);
    let _shaking = rig.client().await;
    rig.stop.cancel();
    // rustls reports an end without close_notify as an error.
    let mut rest = Vec::new();
    timeout(PATIENCE, client.read_to_end(&mut rest)).await.unwrap().unwrap();
    timeout(PATIENCE, rig.serving.join_next()).await.unwrap().unwrap().unwrap();
}
