//! Streams whose model is not loaded yet: begun, kept alive, and ended by the model's answer or a refusal.

use super::computation::unread;
use super::peer::*;
use super::*;
use crate::RequestOutcome;
use warden_policies::modes::WhileLoading;
use warden_policies::{ByteSize, QuickMap};
use warden_supervisor::NextProcess;

const ASKED: &str = r#"{"stream":true}"#;
pub(super) const SIGN: &str = ": the model is being loaded, some ";

/// A gateway whose model takes some more minutes to load, or until the test lets it finish.
pub(super) async fn loading(mode: WhileLoading, upstream: &Upstream) -> Rig {
    loads(loading_plan(), mode, upstream).await
}

fn loading_plan() -> Plan {
    let mut plan = Plan { room: 0, ..Plan::default() };
    plan.config.upstream.comment_interval = Duration::from_millis(10);
    plan.config.upstream.reasoning_interval = Duration::from_millis(10);
    plan
}

async fn loads(plan: Plan, mode: WhileLoading, upstream: &Upstream) -> Rig {
    let rig = Rig::with(plan, &[upstream]).await;
    *rig.backends.coming.lock().unwrap() = Some(NextProcess {
        since: Some(Instant::now()),
        took: Some(Duration::from_secs(600)),
        ..NextProcess::default()
    });
    let rules = Arc::new(ModelRules { loading: mode, ..ModelRules::default() });
    rig.control.update(LiveConfig {
        models: QuickMap::from_iter([(ModelName::new("m"), rules)]),
        ..LiveConfig::default()
    });
    rig
}

fn streaming() -> Upstream {
    Upstream::answering(|_, _| {
        let event = "data: {\"a\":1}\n\n";
        let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n";
        format!("{head}Content-Length: {}\r\n\r\n{event}", event.len()).into_bytes()
    })
}

#[tokio::test]
async fn a_stream_begins_before_its_model_is_loaded_and_goes_on_with_its_answer() {
    let upstream = streaming();
    for path in ["/v1/chat/completions", "/completion", "/v1/messages", "/v1/responses"] {
        let rig = loading(WhileLoading::Comment, &upstream).await;
        let mut client = rig.client().await;
        client.send(&post(path, ASKED)).await;
        let head = client.until("\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 200 ") && head.contains("text/event-stream"), "{head}");
        assert!(head.contains("x-request-id: "), "{head}");
        assert!(
            head.contains("x-accel-buffering: no\r\n") && head.contains("\r\nvia: 1.1 llama-warden-"),
            "{head}"
        );
        for _ in 0..3 {
            client.until(SIGN).await;
        }
        assert_eq!(rig.live(), 0);
        rig.backends.room.add_permits(1);
        client.until("data: {\"a\":1}\n\n").await;
        let record = rig.record(0).await;
        assert_eq!((record.status, record.outcome, record.stream), (200, RequestOutcome::Ok, true));
        assert_eq!(record.late_status, Some(200));
        // The connection is still usable.
        *rig.backends.coming.lock().unwrap() = None;
        client.until("0\r\n\r\n").await;
        client.send(&post(path, ASKED)).await;
        let next = client.until("data: {\"a\":1}\n\n").await;
        assert!(!next.contains(": the model"), "{next}");
        drop(client);
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn while_it_loads_clients_of_messages_get_pings_and_those_of_responses_no_event_before_the_first() {
    let upstream = streaming();
    let ping = "event: ping\ndata: {\"type\":\"ping\"}\n\n";
    for (path, event) in [("/v1/messages", Some(ping)), ("/v1/responses", None), ("/v1/completions", None)] {
        let rig = loading(WhileLoading::Comment, &upstream).await;
        let mut client = rig.client().await;
        client.send(&post(path, ASKED)).await;
        let mut signs = String::new();
        for _ in 0..3 {
            signs += &client.until(event.unwrap_or(SIGN)).await;
        }
        assert_eq!(signs.contains("event:"), event.is_some(), "{signs}");
        rig.backends.room.add_permits(1);
        client.until("data: {\"a\":1}\n\n").await;
        drop(client);
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_its_signs_keeps_no_slot_waiting_when_its_model_is_loaded() {
    let upstream = streaming();
    let mut plan = loading_plan();
    // The socket takes no more than the client's own buffer.
    plan.config.server.unsent_bytes = ByteSize(1);
    plan.config.upstream.comment_interval = Duration::from_millis(1);
    let rig = loads(plan, WhileLoading::Comment, &upstream).await;
    let mut client = unread(&rig).await;
    client.send(&post("/completion", ASKED)).await;
    // Enough signs to fill that buffer.
    sleep(Duration::from_secs(1)).await;
    rig.backends.room.add_permits(1);
    eventually("it is computed, and its slot free", || upstream.accepted() == 1 && rig.live() == 0).await;
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::Ok);
    let all = client.until("data: {\"a\":1}\n\n").await;
    assert!(all.contains(SIGN), "{all}");
    drop(client);
    rig.is_clean().await;
}

#[tokio::test]
async fn chats_show_it_as_reasoning_if_they_are_to() {
    let upstream = streaming();
    let rig = loading(WhileLoading::Reasoning, &upstream).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", ASKED)).await;
    let shown = client.until("data: {").await + &client.until("\n\n").await;
    assert!(
        shown.contains(
            r#""delta":{"reasoning_content":"`m` is being loaded (the last time it took 600 s) "}"#
        ),
        "{shown}"
    );
    assert!(shown.contains(r#""object":"chat.completion.chunk""#), "{shown}");
    client.until(r#"{"reasoning_content":"."}"#).await;
    rig.backends.room.add_permits(1);
    client.until(r#"{"reasoning_content":"\n\n"}"#).await;
    client.until("data: {\"a\":1}\n\n").await;
    // Other dialects have no reasoning text.
    let mut other = rig.client().await;
    other.send(&post("/v1/messages", ASKED)).await;
    other.until("data: {\"a\":1}\n\n").await;
    drop((client, other));
    rig.is_clean().await;
}

#[tokio::test]
async fn what_is_refused_then_is_an_event_of_its_dialect() {
    let upstream = streaming();
    for (path, event) in [
        ("/v1/chat/completions", "data: {\"error\":{\"code\":503,"),
        ("/v1/responses", "event: error\ndata: {\"type\":\"error\",\"code\":\"unavailable_error\","),
        (
            "/v1/messages",
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"model `m`: no backend was free",
        ),
    ] {
        let rig = loading(WhileLoading::Comment, &upstream).await;
        let mut client = rig.client().await;
        client.send(&post(path, ASKED)).await;
        client.until(SIGN).await;
        *rig.backends.denied.lock().unwrap() =
            Some(LeaseDenied::Deadline { waited: Duration::from_secs(300) });
        rig.backends.room.add_permits(1);
        let error = client.until("0\r\n\r\n").await;
        assert!(error.contains(event) && error.contains("within 300.0 s"), "{path}: {error}");
        let record = rig.record(0).await;
        assert_eq!((record.status, record.stream, record.late_status), (200, true, Some(503)));
        assert_eq!(record.outcome, RequestOutcome::Denied("queue_deadline"));
        drop(client);
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn what_the_model_refuses_then_is_one_too() {
    let refusing = Upstream::answering(|_, _| {
        let body = r#"{"error":{"code":400,"message":"too long","type":"exceed_context_size_error"}}"#;
        let head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n";
        format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
    });
    let silent = Upstream::answering(|_, _| b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\nno".to_vec());
    for (upstream, path, status, words) in [
        (
            &refusing,
            "/v1/chat/completions",
            400,
            "data: {\"error\":{\"code\":400,\"message\":\"too long\",\"type\":\"exceed_context_size_error\"}}\n\n",
        ),
        (
            &refusing,
            "/v1/messages",
            400,
            "data: {\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\",\"message\":\"too long\"}}\n\n",
        ),
        (
            &refusing,
            "/v1/responses",
            400,
            "data: {\"type\":\"error\",\"code\":\"exceed_context_size_error\",\"message\":\"too long\",\"param\":null,\"sequence_number\":0}\n\n",
        ),
        (&silent, "/v1/chat/completions", 500, "the model answered with status 500"),
        (&silent, "/v1/messages", 500, "\"api_error\",\"message\":\"the model answered with status 500"),
    ] {
        let rig = loading(WhileLoading::Comment, upstream).await;
        let mut client = rig.client().await;
        client.send(&post(path, ASKED)).await;
        client.until(SIGN).await;
        rig.backends.room.add_permits(1);
        let error = client.until("0\r\n\r\n").await;
        assert!(error.contains(words), "{path}: {error}");
        // The record has the client's status and the late one.
        let record = rig.record(0).await;
        assert_eq!((record.status, record.stream, record.late_status), (200, true, Some(status)));
        drop(client);
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_meanwhile_leaves_nothing() {
    let upstream = streaming();
    let rig = loading(WhileLoading::Comment, &upstream).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", ASKED)).await;
    client.until(SIGN).await;
    drop(client);
    let record = rig.record(0).await;
    assert_eq!((record.status, record.outcome), (200, RequestOutcome::ClientGone));
    eventually("nobody waits", || rig.backends.waiting.load(Ordering::SeqCst) == 0).await;
    rig.is_clean().await;
}

#[tokio::test]
async fn a_refusal_that_comes_soon_and_whatever_is_no_stream_keep_their_status() {
    let upstream = streaming();
    for (mode, body) in [
        (WhileLoading::Off, ASKED),
        (WhileLoading::Comment, "{}"),
        (WhileLoading::Comment, r#"{"stream":false}"#),
    ] {
        let rig = loading(mode, &upstream).await;
        let mut client = rig.client().await;
        client.send(&post("/v1/chat/completions", body)).await;
        eventually("it waits", || rig.backends.waiting.load(Ordering::SeqCst) == 1).await;
        *rig.backends.denied.lock().unwrap() =
            Some(LeaseDenied::Deadline { waited: Duration::from_secs(300) });
        sleep(Duration::from_millis(50)).await;
        rig.backends.room.add_permits(1);
        let (head, _) = client.response().await;
        assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
        drop(client);
        rig.is_clean().await;
    }
    let rig = loading(WhileLoading::Comment, &upstream).await;
    *rig.backends.denied.lock().unwrap() =
        Some(LeaseDenied::TooSlow { left: Duration::from_secs(90), wait: Duration::from_secs(10) });
    let (head, body) = rig.ask(&post("/v1/chat/completions", ASKED)).await;
    assert!(head.starts_with("HTTP/1.1 503 ") && head.contains("retry-after: 90\r\n"), "{head}");
    assert!(body.contains("\"details\":{\"loads_in_s\":90,\"queue_wait_s\":10}"), "{body}");
    rig.is_clean().await;
}
