//! Requests for a foreign host name.

use warden_policies::{AllowedOrigins, HostNames};

use super::*;
use crate::{CorsConfig, LiveConfig, RequestOutcome};

fn named(texts: &[&str]) -> LiveConfig {
    LiveConfig { names: HostNames::parse(texts).unwrap(), ..LiveConfig::default() }
}

#[tokio::test]
async fn a_form_of_a_foreign_page_is_refused_before_anything_is_done() {
    let done = Arc::new(AtomicUsize::new(0));
    let count = done.clone();
    let upstream = Upstream::answering(move |_, _| {
        count.fetch_add(1, Ordering::SeqCst);
        json_answer("{}")
    });
    let rig = Rig::start(&[&upstream]).await;
    let form = |fields: &str| {
        let request = String::from_utf8(post("/completion", "{}")).unwrap();
        request.replacen("Host: h\r\n", &format!("Host: h\r\n{fields}"), 1).into_bytes()
    };
    let evil = form("Origin: https://evil.example\r\nContent-Type: text/plain\r\n");
    assert!(rig.ask(&evil).await.0.starts_with("HTTP/1.1 200 "), "every page may call");
    let cors = CorsConfig {
        origins: AllowedOrigins::parse(&["https://app.example"]).unwrap(),
        ..CorsConfig::default()
    };
    rig.control.update(LiveConfig { cors, ..LiveConfig::default() });
    let (head, body) = rig.ask(&evil).await;
    assert!(head.starts_with("HTTP/1.1 403 ") && body.contains("server.cors"), "{head}{body}");
    assert!(!head.contains("access-control-allow-origin"), "{head}");
    assert_eq!(rig.record(1).await.outcome, RequestOutcome::Rejected("origin"));
    for known in ["Origin: https://app.example\r\n", "Origin: http://h\r\n", ""] {
        assert!(rig.ask(&form(known)).await.0.starts_with("HTTP/1.1 200 "), "{known}");
    }
    assert_eq!(done.load(Ordering::SeqCst), 4);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_foreign_name_is_refused_before_anything_is_done_whoever_it_comes_from() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let rig = Rig::with(Plan { any_name: true, ..Plan::default() }, &[&upstream]).await;
    rig.control.update(named(&["llm.example"]));
    let mut refused = 0;
    for (target, host, taken) in [
        ("/props", "llm.example:8080", true),
        ("/props", "127.0.0.1", true),
        ("/props", "[::1]:8080", true),
        ("/props", "localhost:8080", true),
        ("/props", "evil.example", false),
        ("/props", "evil.example:8080", false),
        ("/v1/models", "evil.example", false),
        ("/running", "evil.example", false),
        ("/health", "evil.example", true),
        // The target takes precedence; one that differs from `Host` is refused anyway.
        ("http://evil.example/props", "evil.example", false),
        ("http://llm.example/props", "llm.example", true),
    ] {
        let (head, body) = rig.ask(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).await;
        if taken {
            assert!(head.starts_with("HTTP/1.1 200 "), "{target} {host}: {head}{body}");
        } else {
            refused += 1;
            assert!(head.starts_with("HTTP/1.1 421 "), "{target} {host}: {head}{body}");
            assert!(head.contains("x-warden-executed: no\r\n"), "{head}");
            assert!(body.contains("evil.example") && body.contains("server.names"), "{body}");
        }
    }
    eventually("all were told of", || {
        let records = rig.records.0.lock().unwrap();
        records.iter().filter(|record| record.outcome == RequestOutcome::Rejected("name")).count() == refused
    })
    .await;
    // A client without a host name is no browser; a POST is refused before its body is read.
    let (head, _) = rig.ask(b"GET /props HTTP/1.0\r\n\r\n").await;
    assert!(head.contains(" 200 "), "{head}");
    let (head, _) =
        rig.ask(b"POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 9\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 421 ") && head.contains("connection: close\r\n"), "{head}");
    rig.control.update(named(&["any"]));
    let (head, _) = rig.ask(b"GET /props HTTP/1.1\r\nHost: evil.example\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    rig.is_clean().await;
}
