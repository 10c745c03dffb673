//! Bodies that a backend may leave unread in its connection.

use super::*;

/// A backend that ignores `Connection: close`, and answers with the received head.
fn keeping() -> Upstream {
    Upstream::answering(|head, body| {
        let end = if body.is_empty() { "" } else { "with a body" };
        json_answer(&serde_json::json!(format!("{}{end}", head.to_lowercase())).to_string())
    })
}

fn request(method: &str) -> Vec<u8> {
    format!("{method} /unread HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello").into_bytes()
}

/// Sends two requests and returns the last answer and the number of connections that the backend saw.
async fn asked_twice(facts: ServerFacts, method: &str) -> (String, usize) {
    let upstream = keeping();
    let mut plan = Plan { any_name: true, ..Plan::default() };
    plan.config.server.threads = 1;
    let rig = Rig::with(plan, &[&upstream]).await;
    *rig.backends.facts.lock().unwrap() = facts;
    let (head, _) = rig.ask(&request(method)).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    rig.is_clean().await;
    let (_, body) = rig.ask(&request(method)).await;
    rig.is_clean().await;
    (body, upstream.accepted())
}

#[tokio::test]
async fn a_get_goes_without_its_body_and_its_connection_is_kept() {
    for discards_bodies in [None, Some(false), Some(true)] {
        let (arrived, connections) = asked_twice(ServerFacts { discards_bodies, ..NEW }, "GET").await;
        assert!(!arrived.contains("with a body") && !arrived.contains("content-length"), "{arrived}");
        assert!(!arrived.contains("connection:"), "{arrived}");
        assert_eq!(connections, 1, "{discards_bodies:?}");
    }
}

#[tokio::test]
async fn a_connection_ends_behind_a_body_unless_its_backend_is_known_to_discard_what_it_has_not_read() {
    for method in ["POST", "PUT", "PATCH", "DELETE"] {
        for discards_bodies in [None, Some(false)] {
            let (arrived, connections) = asked_twice(ServerFacts { discards_bodies, ..NEW }, method).await;
            assert!(arrived.contains("with a body") && arrived.contains("connection: close"), "{arrived}");
            assert_eq!(connections, 2, "{method}, {discards_bodies:?}");
        }
        let (arrived, connections) = asked_twice(NEW, method).await;
        assert!(arrived.contains("with a body") && !arrived.contains("connection:"), "{arrived}");
        assert_eq!(connections, 1, "{method}");
    }
}

#[tokio::test]
async fn a_body_that_is_still_coming_ends_its_connection_too() {
    let upstream = keeping();
    let mut plan = Plan { any_name: true, ..Plan::default() };
    plan.config.upstream.replay_bytes = ByteSize(4);
    plan.config.server.threads = 1;
    let rig = Rig::with(plan, &[&upstream]).await;
    *rig.backends.facts.lock().unwrap() = ServerFacts { discards_bodies: None, ..NEW };
    for nth in 1..=2 {
        let mut client = rig.client().await;
        client.send(b"POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n").await;
        eventually("the head is there", || upstream.accepted() == nth).await;
        client.send(b"5\r\nworld\r\n0\r\n\r\n").await;
        let (head, body) = client.response().await;
        let body = String::from_utf8(body).unwrap();
        assert!(head.starts_with("HTTP/1.1 200 ") && body.contains("connection: close"), "{head}{body}");
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_method_that_llama_server_does_not_know_reaches_no_backend() {
    let upstream = keeping();
    let rig = Rig::start(&[&upstream]).await;
    let made_up = "X".repeat(5000);
    for method in ["FROB", "PRI", "PROPFIND", "TRACE", "CONNECT", &made_up] {
        let (head, body) = rig.ask(&request(method)).await;
        assert!(head.starts_with("HTTP/1.1 405 ") && body.len() < 300, "{method}: {head}{body}");
    }
    assert_eq!(upstream.accepted(), 0);
    rig.is_clean().await;
}
