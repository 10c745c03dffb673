//! An operator cancels a request in any state: its client is informed, and everything is freed.

use serde_json::Value;
use warden_policies::modes::WhileLoading;

use super::*;
use crate::{CancelError, CancelledRequest, RequestOutcome, RequestState, RequestView};

const CHAT: &str = "/v1/chat/completions";
const STREAM: &str = r#"{"stream":true}"#;

fn named(id: &str, path: &str, body: &str) -> Vec<u8> {
    let head = format!("POST {path} HTTP/1.1\r\nX-Request-Id: {id}\r\n");
    [head.as_bytes(), &post(path, body)[format!("POST {path} HTTP/1.1\r\n").len()..]].concat()
}

impl Rig {
    fn shown(&self, id: &str) -> Option<RequestView> {
        self.requests.list().into_iter().find(|one| one.id == id)
    }

    async fn comes_to(&self, id: &str, state: RequestState) -> RequestView {
        eventually(state.as_str(), || self.shown(id).is_some_and(|one| one.state == state)).await;
        self.shown(id).unwrap()
    }

    /// Cancels the request `x` in this state.
    async fn cancel_in(&self, state: RequestState) -> CancelledRequest {
        let before = self.comes_to("x", state).await;
        let told = self.requests.cancel("x", None).unwrap();
        assert_eq!(
            (told.request.state, told.request.number, told.was_cancelled),
            (state, before.number, false)
        );
        told
    }

    /// Cancels the request `x` when the gateway notes `noted`, before hyper polls the answer.
    fn cancel_when(&self, noted: &'static str) {
        *self.backends.cancels_when.lock().unwrap() = Some((noted, self.requests.clone()));
    }

    async fn is_cancelled(&self, status: u16) -> RequestView {
        let record = self.record(0).await;
        assert_eq!((record.outcome, record.answer_status()), (RequestOutcome::Cancelled, status));
        let ended = self.comes_to("x", RequestState::Ended).await;
        assert_eq!(ended.outcome.as_deref(), Some("cancelled_by_operator"));
        assert!(ended.cancelled && ended.status == Some(status), "{ended:?}");
        let after = self.requests.cancel("x", None).unwrap_err();
        assert_eq!(after, CancelError::Ended { id: "x".into(), outcome: "cancelled_by_operator".into() });
        self.is_clean().await;
        ended
    }
}

/// Checks the error for a client that has no head yet.
fn is_told(head: &str, body: &[u8], executed: &str) {
    assert!(head.starts_with("HTTP/1.1 499 "), "{head}");
    assert!(head.contains("x-should-retry: false\r\n") && !head.contains("retry-after"), "{head}");
    assert!(head.contains(&format!("x-warden-executed: {executed}\r\n")), "{head}");
    let error: Value = serde_json::from_slice(body).unwrap();
    assert_eq!(error["error"]["code"], "request_cancelled", "{error}");
    assert!(error["error"]["message"].as_str().unwrap().contains("the operator"), "{error}");
}

#[tokio::test]
async fn while_its_body_comes() {
    let upstream = Upstream::silent();
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    client
        .send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nX-Request-Id: x\r\nContent-Length: 1000\r\n\r\n{")
        .await;
    rig.cancel_in(RequestState::Receiving).await;
    let (head, body) = client.response().await;
    is_told(&head, &body, "no");
    assert!(head.contains("connection: close\r\n"), "the rest of the body is no request: {head}");
    assert_eq!((upstream.accepted(), rig.is_cancelled(499).await.attempts), (0, 0));
}

#[tokio::test]
async fn while_it_waits_in_the_queue() {
    let upstream = Upstream::silent();
    for body in ["{}", STREAM] {
        let rig = Rig::with(Plan { room: 0, ..Plan::default() }, &[&upstream]).await;
        let mut client = rig.client().await;
        client.send(&named("x", CHAT, body)).await;
        let told = rig.cancel_in(RequestState::Queued).await;
        assert_eq!(told.request.model, Some(ModelName::new("m")));
        let (head, body) = client.response().await;
        is_told(&head, &body, "no");
        eventually("its place is free", || rig.backends.waiting.load(Ordering::SeqCst) == 0).await;
        rig.is_cancelled(499).await;
    }
    assert_eq!(upstream.accepted(), 0);
}

#[tokio::test]
async fn while_its_model_loads_and_its_stream_has_begun() {
    for (path, told) in [
        (CHAT, "\"code\":\"request_cancelled\""),
        ("/v1/messages", "event: error\ndata: {"),
        ("/v1/responses", "event: error\ndata: {"),
    ] {
        let upstream = Upstream::silent();
        let rig = loading::loading(WhileLoading::Comment, &upstream).await;
        let mut client = rig.client().await;
        client.send(&named("x", path, STREAM)).await;
        client.until(loading::SIGN).await;
        rig.cancel_in(RequestState::Queued).await;
        client.until(told).await;
        let rest = client.until("0\r\n\r\n").await;
        assert!(rest.contains("the operator"), "{rest}");
        assert_eq!(upstream.accepted(), 0);
        rig.is_cancelled(499).await;
    }
}

#[tokio::test]
async fn before_anything_of_its_answer_is_there() {
    let upstream = Upstream::silent();
    for (body, state) in [("{}", RequestState::Sent), (STREAM, RequestState::Prefill)] {
        let rig = Rig::start(&[&upstream]).await;
        let mut client = rig.client().await;
        client.send(&named("x", CHAT, body)).await;
        eventually("the backend has the request", || upstream.open() == 1).await;
        let told = rig.cancel_in(state).await;
        assert_eq!((told.request.attempts, told.request.generation), (1, Some(GenerationId(0))));
        let (head, body) = client.response().await;
        is_told(&head, &body, "maybe");
        eventually("the backend's connection is closed", || upstream.open() == 0).await;
        rig.is_cancelled(499).await;
    }
}

#[tokio::test]
async fn in_the_middle_of_a_stream_which_ends_with_an_event_in_the_shape_of_its_route() {
    for (path, told) in [
        (CHAT, "data: {\"error\":{\"code\":\"request_cancelled\""),
        ("/v1/messages", "event: error\ndata: {"),
        ("/v1/responses", "event: error\ndata: {"),
    ] {
        let upstream = Upstream::start(|mut peer| async move {
            peer.request().await;
            peer.send(EVENTS).await;
            peer.send_chunk(b"data: 1\n\ndata: 2\n\n").await;
            peer.rest().await;
        });
        let rig = Rig::start(&[&upstream]).await;
        let mut client = rig.client().await;
        client.send(&named("x", path, STREAM)).await;
        client.until("data: 2\n\n").await;
        let told_to = rig.cancel_in(RequestState::Generating).await;
        assert_eq!(told_to.request.output_tokens, 2);
        client.until(told).await;
        let words = client.until("0\r\n\r\n").await;
        assert!(words.contains("model `m`: the operator"), "{words}");
        eventually("the backend's connection is closed", || upstream.open() == 0).await;
        let ended = rig.is_cancelled(200).await;
        assert_eq!(ended.output_tokens, 2);
        // The connection is still usable, and the next request is not cancelled.
        client.send(&named("y", "/v1/models", "{}")).await;
        client.until("HTTP/1.1 ").await;
    }
}

/// A backend that sends the head of a non-streaming answer, and one byte of its thousand.
fn begins_a_long_answer() -> Upstream {
    Upstream::start(|mut peer| async move {
        peer.request().await;
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")
            .await;
        peer.rest().await;
    })
}

#[tokio::test]
async fn in_the_middle_of_an_answer_that_is_no_stream_which_breaks_off() {
    let upstream = begins_a_long_answer();
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    client.send(&named("x", CHAT, "{}")).await;
    client.until("\r\n\r\n{").await;
    rig.cancel_in(RequestState::Answering).await;
    assert!(client.rest().await.is_empty(), "it does not look whole");
    eventually("the backend's connection is closed", || upstream.open() == 0).await;
    rig.is_cancelled(200).await;
}

#[tokio::test]
async fn in_the_moment_in_which_its_answer_begins_and_its_client_has_the_head() {
    let upstream = begins_a_long_answer();
    let rig = Rig::start(&[&upstream]).await;
    rig.cancel_when("answered");
    let mut client = rig.client().await;
    client.send(&named("x", CHAT, "{}")).await;
    let head = client.until("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 ") && head.contains("x-request-id: x\r\n"), "{head}");
    assert!(client.rest().await.len() < 1000, "it does not look whole");
    eventually("the backend's connection is closed", || upstream.open() == 0).await;
    rig.is_cancelled(200).await;
}

#[tokio::test]
async fn its_connection_is_as_good_as_before_if_all_of_its_body_had_come() {
    let whole = Arc::new(AtomicUsize::new(0));
    let count = whole.clone();
    let upstream = Upstream::start(move |mut peer| {
        let count = count.clone();
        async move {
            if peer.request().await.is_some_and(|(_, body)| body.len() >= 2_000_000) {
                count.fetch_add(1, Ordering::SeqCst);
            }
            peer.rest().await;
        }
    });
    let rig = Rig::start(&[&upstream]).await;
    let mut client = rig.client().await;
    for body in ["{}", STREAM] {
        client.send(&named("x", CHAT, body)).await;
        eventually("the backend has the request", || upstream.open() == 1).await;
        rig.requests.cancel("x", None).unwrap();
        let (head, body) = client.response().await;
        is_told(&head, &body, "maybe");
        assert!(!head.contains("connection: close"), "{head}");
        eventually("the backend's connection is closed", || upstream.open() == 0).await;
    }
    // A streamed body, whose route needs no slot, closes the connection only if incomplete.
    for (sent, closes) in [(2_000_000, false), (1_000_000, true)] {
        let mut client = rig.client().await;
        let head =
            "POST /x?model=m HTTP/1.1\r\nHost: h\r\nX-Request-Id: x\r\nContent-Length: 2000000\r\n\r\n";
        client.send(head.as_bytes()).await;
        client.send(&vec![b' '; sent]).await;
        eventually("the backend is asked", || upstream.open() == 1).await;
        eventually("it has all of it", || closes || whole.load(Ordering::SeqCst) == 1).await;
        rig.requests.cancel("x", None).unwrap();
        let (head, body) = client.response().await;
        is_told(&head, &body, "maybe");
        assert_eq!(head.contains("connection: close\r\n"), closes, "{head}");
        eventually("the backend's connection is closed", || upstream.open() == 0).await;
    }
    rig.is_clean().await;
}

#[tokio::test]
async fn while_another_backend_is_to_go_on_with_it() {
    let dying = goes_on::dying(goes_on::said("a"));
    let silent = Upstream::silent();
    // Either the fate of the first server is unknown, or the second one is silent.
    for settles in [false, true] {
        let rig = Rig::with(goes_on::going_on(), &[&dying, &silent]).await;
        if !settles {
            *rig.backends.slow_end.lock().unwrap() = Some(Arc::default());
        }
        let mut client = rig.client().await;
        let body =
            r#"{"messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":9,"temperature":0}"#;
        client.send(&named("x", CHAT, body)).await;
        client.until("\"a\"").await;
        if settles {
            eventually("the second one has it", || silent.open() == 1).await;
        }
        let told = rig.cancel_in(RequestState::Continuing).await;
        assert_eq!((told.request.output_tokens, told.request.attempts), (1, 1 + u32::from(settles)));
        client.until("request_cancelled").await;
        client.until("0\r\n\r\n").await;
        assert!(rig.is_cancelled(200).await.continued);
        eventually("the second one is let go", || silent.open() == 0).await;
    }
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_cut_so_that_its_slot_is_free_at_once() {
    let written = Arc::new(AtomicUsize::new(0));
    let upstream = endless(&written, None);
    let rig = Rig::start(&[&upstream]).await;
    let mut slow = rig.client().await;
    slow.send(&named("x", CHAT, STREAM)).await;
    stalled(&written).await;
    rig.cancel_in(RequestState::Generating).await;
    eventually("the stream is cancelled", || upstream.open() == 0).await;
    rig.is_cancelled(200).await;
}

#[tokio::test]
async fn twice_is_once_and_who_is_meant_must_be_clear() {
    let upstream = Upstream::silent();
    let rig = Rig::start(&[&upstream]).await;
    let mut clients = Vec::new();
    for _ in 0..2 {
        let mut client = rig.client().await;
        client.send(&named("same", CHAT, "{}")).await;
        clients.push(client);
    }
    eventually("both are there", || rig.requests.in_flight() == 2 && rig.live() == 2).await;
    let numbers: Vec<u64> = rig.requests.list().iter().map(|one| one.number).collect();
    let several = rig.requests.cancel("same", None).unwrap_err();
    assert!(matches!(&several, CancelError::Several { numbers: told, .. } if told.len() == 2), "{several}");
    assert!(matches!(rig.requests.cancel("other", None), Err(CancelError::Unknown { .. })));
    assert!(matches!(rig.requests.cancel("same", Some(u64::MAX)), Err(CancelError::Unknown { .. })));
    rig.requests.cancel("same", Some(numbers[0])).unwrap();
    eventually("one is left", || rig.requests.in_flight() == 1).await;
    assert!(matches!(rig.requests.cancel("same", Some(numbers[0])), Err(CancelError::Ended { .. })));
    let told = rig.requests.cancel("same", None).unwrap();
    assert_eq!(told.request.number, numbers[1]);
    eventually("none is left", || rig.requests.in_flight() == 0).await;
    rig.is_clean().await;
}

#[tokio::test]
async fn what_we_answer_ourselves_is_not_shown_and_who_is_turned_away_is() {
    let upstream = Upstream::answering(|_, _| json_answer("{}"));
    let rig = Rig::with(Plan { models: vec!["m", "n"], ..Plan::default() }, &[&upstream]).await;
    rig.ask(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n").await;
    rig.ask(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n").await;
    rig.ask(&named("a", CHAT, r#"{"model":"m"}"#)).await;
    rig.ask(&named("b", CHAT, r#"{"model":"nobody"}"#)).await;
    eventually("both have ended", || {
        rig.requests.list().iter().filter(|one| !one.is_in_flight()).count() == 2
    })
    .await;
    let all = rig.requests.list();
    let of = |id: &str| all.iter().find(|one| one.id == id).unwrap();
    assert_eq!((of("a").outcome.as_deref(), of("a").status), (Some("ok"), Some(200)));
    assert_eq!((of("b").outcome.as_deref(), of("b").model.clone()), (Some("unknown_model"), None));
    assert_eq!((all.len(), all[0].id.as_str()), (2, "b"), "the last one first");
    rig.is_clean().await;
}
