//! Streams whose server dies in the middle of an answer: continued, or ended with the reason.

use serde_json::{Value, json};

use super::*;
use crate::RequestOutcome;

const CHAT: &str = "/v1/chat/completions";
const BODY: &str =
    r#"{"messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":9,"temperature":0}"#;

pub(super) fn going_on() -> Plan {
    Plan { rotates: true, on_death: OnDeath::Continue, ..Plan::default() }
}

fn data(event: &Value) -> String {
    format!("data: {event}\n\n")
}

pub(super) fn said(text: &str) -> String {
    let choice = json!({ "finish_reason": null, "index": 0, "delta": { "content": text } });
    data(
        &json!({ "choices": [choice], "created": 7, "id": "one", "model": "m", "object": "chat.completion.chunk" }),
    )
}

fn finished(reason: &str) -> String {
    let choice = json!({ "finish_reason": reason, "index": 0, "delta": {} });
    data(
        &json!({ "choices": [choice], "created": 7, "id": "one", "model": "m", "object": "chat.completion.chunk" }),
    )
}

/// A backend that sends the head of a stream and these events, and closes.
pub(super) fn dying(events: String) -> Upstream {
    Upstream::start(move |mut peer| {
        let events = events.clone();
        async move {
            peer.request().await;
            peer.send(EVENTS).await;
            peer.send_chunk(events.as_bytes()).await;
        }
    })
}

/// Misbehaviour of the next server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Odd {
    Well,
    /// Closes instead of answering this path.
    DiesAt(&'static str),
    /// Refuses this path.
    Refuses(&'static str),
    /// Does not report its settings.
    Silent,
    /// Has a grammar, and restarts it after a given text.
    Grammar,
    /// Has a grammar, and starts it at the right place.
    Shapes,
    /// Does not report that it has a grammar.
    Shapeless,
    /// Strips blanks from an answer.
    Trims,
    /// Has a vocabulary that puts blanks before texts.
    SpellsOtherwise,
    /// Counts another prompt than was sent.
    OtherPrompt,
    /// Ends in the middle of the rest.
    EndsEarly,
    /// Closes in the middle of the rest.
    DiesInTheRest,
}

/// Paths and bodies of the requests to a server, in order.
pub(super) type Asked = Arc<Mutex<Vec<(String, Value)>>>;

/// Records a request to a server.
pub(super) fn note(log: &Asked, head: &str, body: &[u8]) -> (String, Value) {
    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
    let asked = (path, serde_json::from_slice(body).unwrap_or_default());
    log.lock().unwrap().push(asked.clone());
    asked
}

/// A server that continues "Hel" and "lo", its tokens 1 and 2, with " you".
pub(super) fn next(odd: Odd) -> (Upstream, Asked) {
    next_with(odd, Arc::default())
}

/// Like [`next`], and records the heads of the requests.
fn next_with(odd: Odd, heads: Arc<Mutex<Vec<String>>>) -> (Upstream, Asked) {
    let asked = Asked::default();
    let log = asked.clone();
    let upstream = Upstream::start(move |mut peer| {
        let (log, heads) = (log.clone(), heads.clone());
        async move {
            while let Some((head, body)) = peer.request().await {
                let (path, body) = note(&log, &head, &body);
                heads.lock().unwrap().push(head);
                let is_measure = path == "/completion" && body["stream"] == false;
                match odd {
                    Odd::DiesAt(at) if at == path => return,
                    Odd::Refuses(at) if at == path => {
                        peer.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}").await;
                        continue;
                    }
                    _ => {}
                }
                let grammar = if matches!(odd, Odd::Grammar | Odd::Shapes) { "root ::= x" } else { "" };
                let settings = json!({ "grammar": grammar, "stop": ["END"], "preserved_tokens": [] });
                let raw = if odd == Odd::Trims { " Hi" } else { "Hi" };
                let told = json!({
                    "__verbose": { "generation_settings": settings, "tokens_evaluated": 5, "content": raw },
                    "choices": [{ "message": { "role": "assistant", "content": "Hi" } }],
                });
                let answer = match path.as_str() {
                    CHAT if odd == Odd::Silent => json!({ "choices": [] }),
                    CHAT => told,
                    "/apply-template" => json!({ "prompt": "<user>hi<assistant>" }),
                    "/tokenize" if odd == Odd::SpellsOtherwise => {
                        json!({ "tokens": [{ "id": 1, "piece": " Hel" }, { "id": 2, "piece": "lo" }] })
                    }
                    "/tokenize" => {
                        json!({ "tokens": [{ "id": 1, "piece": "Hel" }, { "id": 2, "piece": "lo" }] })
                    }
                    _ if is_measure => {
                        let said = if odd == Odd::Shapes { "q" } else { "Hello" };
                        json!({ "content": said, "stop_type": "eos" })
                    }
                    _ => {
                        let evaluated = if odd == Odd::OtherPrompt { 6 } else { 7 };
                        let one = json!({ "content": " you", "stop": false, "tokens_predicted": 1, "tokens_evaluated": evaluated });
                        let end = json!({ "content": "", "stop": true, "stop_type": "eos", "tokens_predicted": 1, "tokens_evaluated": evaluated,
                            "timings": { "prompt_n": 7, "predicted_n": 1, "cache_n": 0 } });
                        peer.send(EVENTS).await;
                        peer.send_chunk(data(&one).as_bytes()).await;
                        if odd == Odd::DiesInTheRest {
                            return;
                        }
                        if odd != Odd::EndsEarly {
                            peer.send_chunk(data(&end).as_bytes()).await;
                        }
                        peer.send(b"0\r\n\r\n").await;
                        return;
                    }
                };
                peer.send(&json_answer(&answer.to_string())).await;
            }
        }
    });
    (upstream, asked)
}

/// Returns the events without comments.
pub(super) fn events(body: &str) -> String {
    body.split_inclusive("\n\n").filter(|event| !event.starts_with(':')).collect()
}

#[tokio::test]
async fn it_goes_on_in_the_same_words_and_is_counted_once() {
    // The last event was incomplete when the server died, and the client gets no half of it.
    for half in ["", "data: {\"choices\":[{\"del"] {
        let dying = dying(said("Hel") + &said("lo") + half);
        let (alive, asked) = next(Odd::Well);
        let rig = Rig::with(going_on(), &[&dying, &alive]).await;
        let (_, body) = rig.ask(&post(CHAT, BODY)).await;
        let wanted = said("Hel") + &said("lo") + &said(" you") + &finished("stop") + "data: [DONE]\n\n";
        let without_timings =
            events(&body).replace(r#","timings":{"prompt_n":5,"predicted_n":3,"cache_n":0}"#, "");
        assert_eq!(without_timings, wanted, "{body}");
        assert!(body.contains(": continued by another process\n\n"), "{body}");
        let asked = asked.lock().unwrap().clone();
        let paths: Vec<&str> = asked.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(paths, [CHAT, "/apply-template", "/tokenize", "/completion"]);
        assert_eq!((&asked[0].1["verbose"], &asked[0].1["stream"]), (&json!(true), &json!(false)));
        assert_eq!(asked[2].1["content"], json!(["Hel", "lo"]));
        let rest = json!({ "temperature": 0, "stop": ["END"], "n_predict": 7, "prompt": ["<user>hi<assistant>", 1, 2], "stream": true });
        let mut last = asked[3].1.clone();
        let fields = last.as_object_mut().unwrap().shift_remove("response_fields");
        assert!(fields.is_some_and(|fields| fields.as_array().unwrap().contains(&json!("tokens_evaluated"))));
        assert_eq!(last, rest);
        let record = rig.record(0).await;
        assert_eq!((record.retries, record.continued, record.outcome), (1, true, RequestOutcome::Ok));
        assert_eq!((record.work.prompt_tokens, record.work.output_tokens), (5, 3), "{:?}", record.work);
        assert_eq!((record.generation, record.bytes_out), (Some(GenerationId(1)), body.len() as u64));
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn what_is_asked_beside_belongs_to_the_continuation_and_not_to_the_server_that_is_gone() {
    let heads = Arc::<Mutex<Vec<String>>>::default();
    let dying = dying(said("Hel") + &said("lo"));
    let (alive, asked) = next_with(Odd::Well, heads.clone());
    let mut plan = going_on();
    plan.config = plan.config.with_traces(1.0);
    let rig = Rig::with(plan, &[&dying, &alive]).await;
    rig.ask(&post(CHAT, BODY)).await;
    let record = rig.record(0).await;
    let parts = &record.trace.as_ref().expect("it is recorded").parts;
    let span = |number: usize| parts[number].span.to_string();
    let continuation = parts.iter().position(|part| part.kind == crate::PartKind::Continuation).unwrap();
    let attempts: Vec<usize> =
        (0..parts.len()).filter(|at| matches!(parts[*at].kind, crate::PartKind::Attempt(_))).collect();
    let paths: Vec<String> = asked.lock().unwrap().iter().map(|(path, _)| path.clone()).collect();
    assert_eq!(paths, [CHAT, "/apply-template", "/tokenize", "/completion"]);
    // The probe and the rest are attempts with their own spans; the questions between them are not.
    let [_gone, probe, rest] = attempts[..] else { panic!("{parts:?}") };
    let wanted = [span(probe), span(continuation), span(continuation), span(rest)];
    for (head, wanted) in heads.lock().unwrap().iter().zip(wanted) {
        assert!(head.contains(&wanted), "{wanted} in {head}");
    }
}

#[tokio::test]
async fn what_cannot_be_right_ends_with_an_error_that_says_why() {
    let drawn = BODY.replace("\"temperature\":0", "\"temperature\":0.7");
    let with = |own: Value| {
        let mut body: Value = serde_json::from_str(&drawn).unwrap();
        for (name, value) in own.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        body.to_string()
    };
    let plain = drawn.clone();
    let cases = [
        (with(json!({ "n": 2 })), Odd::Well, "`n`"),
        (with(json!({ "grammar": "root ::= x" })), Odd::Shapeless, "does not report its grammar"),
        (
            with(json!({ "grammar": "root ::= x" })),
            Odd::Grammar,
            "does not apply a grammar from that text on",
        ),
        (with(json!({ "mirostat": 2 })), Odd::Well, "`mirostat`"),
        (with(json!({ "something_new": 1 })), Odd::Well, "`something_new`"),
        (with(json!({ "max_tokens": "9" })), Odd::Well, "no number of tokens"),
        (plain.clone(), Odd::Silent, "does not report its settings"),
        (plain.clone(), Odd::Grammar, "computes with `grammar`"),
        (plain.clone(), Odd::Trims, "removes parts"),
        (plain.clone(), Odd::SpellsOtherwise, "tokenizes that text differently"),
        (plain.clone(), Odd::Refuses(CHAT), "answers with 404"),
        (plain.clone(), Odd::Refuses("/apply-template"), "/apply-template with 404"),
        (plain.clone(), Odd::Refuses("/tokenize"), "/tokenize with 404"),
        (plain.clone(), Odd::Refuses("/completion"), "404 Not Found and no stream"),
        (plain.clone(), Odd::DiesAt("/apply-template"), "ended, too"),
        (plain.clone(), Odd::DiesAt("/completion"), "ended, too"),
        (plain.clone(), Odd::OtherPrompt, "would not begin where it ended"),
        (plain.clone(), Odd::EndsEarly, "has no end"),
        (plain, Odd::DiesInTheRest, "its process ended in the middle of the answer"),
    ];
    for (body, odd, why) in cases {
        let dying = dying(said("Hel") + &said("lo"));
        let (next, asked) = next(odd);
        let third = Upstream::answering(|_, _| json_answer("{}"));
        let rig = Rig::with(going_on(), &[&dying, &next, &third]).await;
        let (_, answer) = rig.ask(&post(CHAT, &body)).await;
        let begun = said("Hel") + &said("lo");
        let told = events(&answer);
        let rest = told.strip_prefix(&begun).unwrap_or_else(|| panic!("{odd:?}: {answer}"));
        let rest = rest.strip_prefix(&said(" you")).unwrap_or(rest);
        assert!(
            rest.starts_with("data: {\"error\":{\"code\":502") && rest.contains(why),
            "{odd:?} {why}: {answer}"
        );
        assert!(!told.contains("[DONE]"), "{odd:?}: {answer}");
        assert_eq!(third.accepted(), 0, "nothing is tried a third time");
        // An unknown member may be known to the next server, which is asked.
        if odd == Odd::Well && why != "`something_new`" {
            assert!(asked.lock().unwrap().is_empty(), "it is known without asking");
        }
        let record = rig.record(0).await;
        let garbled = [Odd::OtherPrompt].contains(&odd);
        let outcome = if garbled { RequestOutcome::UpstreamGarbled } else { RequestOutcome::UpstreamDied };
        assert_eq!(record.outcome, outcome, "{odd:?}");
        // The client's part counts as work, whether or not the rest came.
        assert!(record.work.output_tokens >= 2, "{odd:?}: {:?}", record.work);
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn what_a_grammar_shapes_goes_on_where_the_next_server_puts_it_behind_the_text() {
    let shaped = BODY
        .replace("\"temperature\":0", "\"temperature\":0.7,\"response_format\":{\"type\":\"json_object\"}");
    let dying = dying(said("Hel") + &said("lo"));
    let (alive, asked) = next(Odd::Shapes);
    let rig = Rig::with(going_on(), &[&dying, &alive]).await;
    let (_, answer) = rig.ask(&post(CHAT, &shaped)).await;
    assert!(answer.contains(&said(" you")) && answer.ends_with("data: [DONE]\n\n"), "{answer}");
    let asked = asked.lock().unwrap().clone();
    let paths: Vec<&str> = asked.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths, [CHAT, "/apply-template", "/tokenize", "/completion", "/completion"]);
    let (measure, rest) = (&asked[3].1, &asked[4].1);
    assert_eq!(measure["grammar"], "root ::= \"Hello\" \"q\"");
    assert_eq!((&rest["grammar"], &rest["generation_prompt"]), (&json!("root ::= x"), &json!("Hello")));
    assert_eq!(
        (&measure["generation_prompt"], &measure["prompt"]),
        (&rest["generation_prompt"], &rest["prompt"])
    );
    rig.is_clean().await;
}

#[tokio::test]
async fn what_had_no_token_yet_is_begun_anew_in_the_same_stream() {
    let delta = |id: &str, created: u64, delta: Value, reason: Value| {
        let choice = json!({ "finish_reason": reason, "index": 0, "delta": delta });
        data(&json!({ "choices": [choice], "created": created, "id": id, "model": "m" }))
    };
    let role =
        |id: &str, created| delta(id, created, json!({ "role": "assistant", "content": null }), Value::Null);
    let thought = |id: &str, created| delta(id, created, json!({ "reasoning_content": "hm" }), Value::Null);
    let end = |id: &str, created| delta(id, created, json!({}), json!("stop"));
    // The rest of an answer with tools cannot be requested, but nothing of the answer exists yet.
    for body in [BODY.to_owned(), BODY.replace("\"temperature\":0", "\"tools\":[{\"type\":\"function\"}]")] {
        let dead = dying(role("one", 7));
        let all = role("two", 9) + &thought("two", 9) + &end("two", 9) + "data: [DONE]\n\n";
        let alive = Upstream::start(move |mut peer| {
            let all = all.clone();
            async move {
                peer.request().await;
                peer.send(EVENTS).await;
                peer.send_chunk(all.as_bytes()).await;
                peer.send(b"0\r\n\r\n").await;
            }
        });
        let rig = Rig::with(going_on(), &[&dead, &alive]).await;
        let (_, answer) = rig.ask(&post(CHAT, &body)).await;
        let wanted = role("one", 7) + &thought("one", 7) + &end("one", 7) + "data: [DONE]\n\n";
        assert_eq!(events(&answer), wanted, "{answer}");
        let record = rig.record(0).await;
        assert_eq!((record.continued, record.outcome), (true, RequestOutcome::Ok));
        rig.is_clean().await;
    }
}

/// A server that answers any request with these events and a proper end.
fn saying(events: String) -> (Upstream, Asked) {
    let asked = Asked::default();
    let log = asked.clone();
    let upstream = Upstream::start(move |mut peer| {
        let (events, log) = (events.clone(), log.clone());
        async move {
            while let Some((head, body)) = peer.request().await {
                note(&log, &head, &body);
                peer.send(EVENTS).await;
                for event in events.split_inclusive("\n\n") {
                    peer.send_chunk(event.as_bytes()).await;
                }
                peer.send(b"0\r\n\r\n").await;
            }
        }
    });
    (upstream, asked)
}

/// An answer with reasoning, a text and a call in the dialect of a route, from the first event to the end.
fn answers(path: &str, name: &str) -> Vec<String> {
    let named = |event: Value| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap());
    match path {
        CHAT => {
            let delta = |delta: Value, finish: Value| {
                let choice = json!({ "finish_reason": finish, "index": 0, "delta": delta });
                data(&json!({ "choices": [choice], "created": 7, "id": name, "model": "m" }))
            };
            let call = json!([{ "index": 0, "id": "call", "type": "function", "function": { "name": "f", "arguments": "{}" } }]);
            vec![
                delta(json!({ "role": "assistant", "content": null }), Value::Null),
                delta(json!({ "reasoning_content": "so" }), Value::Null),
                delta(json!({ "content": "Hello" }), Value::Null),
                delta(json!({ "tool_calls": call }), Value::Null),
                delta(json!({}), json!("tool_calls")),
                "data: [DONE]\n\n".to_owned(),
            ]
        }
        "/v1/messages" => [
            json!({ "type": "message_start", "message": { "id": name } }),
            json!({ "type": "content_block_start", "index": 0, "content_block": { "type": "thinking", "thinking": "" } }),
            json!({ "type": "content_block_delta", "index": 0, "delta": { "type": "thinking_delta", "thinking": "so" } }),
            json!({ "type": "content_block_start", "index": 1, "content_block": { "type": "text", "text": "" } }),
            json!({ "type": "content_block_delta", "index": 1, "delta": { "type": "text_delta", "text": "Hello" } }),
            json!({ "type": "message_delta", "delta": { "stop_reason": "end_turn" }, "usage": { "output_tokens": 2 } }),
            json!({ "type": "message_stop" }),
        ]
        .map(named)
        .into(),
        _ => [
            json!({ "type": "response.created", "response": { "id": name } }),
            json!({ "type": "response.output_item.added", "item": { "type": "message", "id": "item" } }),
            json!({ "type": "response.output_text.delta", "item_id": "item", "delta": "Hello" }),
            json!({ "type": "response.completed", "response": { "id": name, "usage": { "input_tokens": 4, "output_tokens": 2 } } }),
        ]
        .map(named)
        .into(),
    }
}

#[tokio::test]
async fn what_is_drawn_the_same_way_again_goes_on_behind_what_its_client_has() {
    let tools = json!([{ "type": "function" }]);
    for (path, body) in [
        (CHAT, json!({ "messages": [], "tools": tools, "stream": true, "temperature": 0 })),
        ("/v1/messages", json!({ "messages": [], "stream": true, "temperature": 0 })),
        ("/v1/responses", json!({ "input": "hi", "stream": true, "temperature": 0.8, "seed": 3 })),
    ] {
        let (first, again) = (answers(path, "one"), answers(path, "two").concat());
        for had in 1..first.len() - 1 {
            // The incomplete event is dropped.
            let dead = dying(first[..had].concat() + "data: {\"choices\":[{\"del");
            let (alive, asked) = saying(again.clone());
            let rig = Rig::with(going_on(), &[&dead, &alive]).await;
            // The identity of the next server does not matter.
            *rig.backends.kin_of_later.lock().unwrap() = None;
            let (_, answer) = rig.ask(&post(path, &body.to_string())).await;
            assert_eq!(events(&answer), first.concat(), "{path}, {had}: {answer}");
            assert!(answer.contains(": continued by another process\n\n"));
            assert_eq!(*asked.lock().unwrap(), [(path.to_owned(), body.clone())], "the very same");
            let record = rig.record(0).await;
            assert_eq!((record.retries, record.continued, record.outcome), (1, true, RequestOutcome::Ok));
            if path == "/v1/responses" {
                assert_eq!((record.work.prompt_tokens, record.work.output_tokens), (4, 2));
            }
            rig.is_clean().await;
        }
    }
}

#[tokio::test]
async fn another_answer_to_the_same_request_is_nobodys_second_half() {
    let body = json!({ "messages": [], "stream": true, "temperature": 0 }).to_string();
    let first = answers("/v1/messages", "one");
    let again = answers("/v1/messages", "two").concat();
    for other in [again.replace("Hello", "Howdy"), again.replace("\"so\"", "\"hm\""), first[..4].concat()] {
        let dead = dying(first[..5].concat());
        let (alive, _) = saying(other.clone());
        let third = Upstream::answering(|_, _| json_answer("{}"));
        let rig = Rig::with(going_on(), &[&dead, &alive, &third]).await;
        let (_, answer) = rig.ask(&post("/v1/messages", &body)).await;
        let told = events(&answer);
        let rest = told.strip_prefix(&first[..5].concat()).unwrap_or_else(|| panic!("{answer}"));
        assert!(rest.starts_with("event: error\ndata: ") && rest.matches("\n\n").count() == 1, "{answer}");
        if other.len() > first[..4].concat().len() {
            let why = "sent once more, the process that follows says something else";
            assert!(rest.contains(why), "{answer}");
            assert!(!rig.backends.told.lock().unwrap()[1..].contains(&"broke"), "it is no fault of its own");
        }
        assert_eq!((rig.record(0).await.outcome, third.accepted()), (RequestOutcome::UpstreamDied, 0));
        // The client's part counts as work.
        assert!(rig.record(0).await.work.output_tokens >= 2, "{:?}", rig.record(0).await.work);
        rig.is_clean().await;
    }
    // No server is asked if the draw cannot be repeated.
    let (never, asked) = saying(again);
    let dead = dying(first[..5].concat());
    let rig = Rig::with(going_on(), &[&dead, &never]).await;
    let drawn = body.replace("\"temperature\":0", "\"temperature\":1");
    let (_, answer) = rig.ask(&post("/v1/messages", &drawn)).await;
    assert!(
        answer.contains("with a temperature and no seed") && asked.lock().unwrap().is_empty(),
        "{answer}"
    );
    rig.is_clean().await;
}

#[tokio::test]
async fn whoever_waits_until_another_has_said_it_again_hears_of_that() {
    let first = answers(CHAT, "one");
    let again = answers(CHAT, "two");
    let go_on = Arc::new(Notify::new());
    let going = go_on.clone();
    let dead = dying(first[..3].concat());
    let slow = Upstream::start(move |mut peer| {
        let (again, going) = (again.clone(), going.clone());
        async move {
            peer.request().await;
            peer.send(EVENTS).await;
            peer.send_chunk(again[..2].concat().as_bytes()).await;
            going.notified().await;
            peer.send_chunk(again[2..].concat().as_bytes()).await;
            peer.send(b"0\r\n\r\n").await;
        }
    });
    let mut plan = going_on();
    plan.config.upstream.comment_interval = Duration::from_millis(10);
    let rig = Rig::with(plan, &[&dead, &slow]).await;
    let mut client = rig.client().await;
    client.send(&post(CHAT, r#"{"messages":[],"stream":true,"temperature":0}"#)).await;
    client.until(": no other process is ready yet\n\n").await;
    go_on.notify_one();
    client.until("data: [DONE]\n\n").await;
    rig.is_clean().await;
}

#[tokio::test]
async fn a_rest_that_has_its_end_needs_its_server_no_more() {
    let native = |text: &str, made: u64, stop: bool, evaluated: u64| {
        data(
            &json!({ "content": text, "tokens": [made], "stop": stop, "tokens_predicted": made, "tokens_evaluated": evaluated }),
        )
    };
    let dead = dying(native("a", 1, false, 5));
    let (rest, told) = (
        native("b", 1, false, 6) + &native("", 1, true, 6),
        json!({
            "generation_settings": { "grammar": "", "stop": [], "preserved_tokens": [] }, "tokens_evaluated": 5, "content": "a",
        }),
    );
    let alive = Upstream::start(move |mut peer| {
        let (rest, told) = (rest.clone(), told.clone());
        async move {
            peer.request().await;
            peer.send(&json_answer(&told.to_string())).await;
            peer.request().await;
            peer.send(EVENTS).await;
            peer.send_chunk(rest.as_bytes()).await;
            // The server closes before the end of its body.
        }
    });
    let rig = Rig::with(going_on(), &[&dead, &alive]).await;
    let body = r#"{"prompt":"P","stream":true,"temperature":0}"#;
    let (_, answer) = rig.ask(&post("/completion", body)).await;
    assert!(answer.contains(r#""stop":true"#) && !answer.contains("error"), "{answer}");
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::Ok);
    rig.is_clean().await;
}

#[tokio::test]
async fn what_a_probe_meets_is_tried_no_third_time_either() {
    let dying = dying(said("Hel"));
    let (next, _) = next(Odd::DiesAt(CHAT));
    let third = Upstream::answering(|_, _| json_answer("{}"));
    let rig = Rig::with(going_on(), &[&dying, &next, &third]).await;
    let (_, answer) = rig.ask(&post(CHAT, BODY)).await;
    assert!(events(&answer).starts_with(&(said("Hel") + "data: {\"error\":{\"code\":502")), "{answer}");
    assert_eq!(third.accepted(), 0);
    assert_eq!(rig.record(0).await.outcome, RequestOutcome::UpstreamDied);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_process_made_of_something_else_does_not_go_on() {
    for kin in [None, Some(2)] {
        let dying = dying(said("Hel"));
        let (next, asked) = next(Odd::Well);
        let rig = Rig::with(going_on(), &[&dying, &next]).await;
        *rig.backends.kin_of_later.lock().unwrap() =
            kin.map(|made_of| AnswerIdentity { made_of, but_for_binary: made_of, answer_tokens: None });
        let drawn = BODY.replace("\"temperature\":0", "\"temperature\":0.7");
        let (_, answer) = rig.ask(&post(CHAT, &drawn)).await;
        assert!(answer.contains("started from something else"), "{answer}");
        assert!(asked.lock().unwrap().iter().all(|(path, _)| path != "/completion"));
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_stream_that_has_its_end_needs_nobody_else() {
    let (never, asked) = next(Odd::Well);
    let counted = data(&json!({ "choices": [], "usage": { "completion_tokens": 1, "prompt_tokens": 5 } }));
    let wanting =
        BODY.replace("\"stream\":true", "\"stream\":true,\"stream_options\":{\"include_usage\":true}");
    let done = "data: [DONE]\n\n".to_owned();
    let begun = said("Hel") + &finished("stop");
    for (body, before, behind) in [
        (BODY, begun.clone(), &*done),
        (BODY, begun.clone() + &done, ""),
        (&wanting, begun.clone() + &counted, &done),
        (&wanting, begun.clone() + &counted + &done, ""),
    ] {
        let dead = dying(before.clone());
        let rig = Rig::with(going_on(), &[&dead, &never]).await;
        let (_, answer) = rig.ask(&post(CHAT, body)).await;
        assert_eq!(answer, before + behind);
        assert_eq!((rig.record(0).await.outcome, asked.lock().unwrap().len()), (RequestOutcome::Ok, 0));
        rig.is_clean().await;
    }
    // The answer lacks only its counters, which no other server has.
    let dead = dying(begun.clone());
    let rig = Rig::with(going_on(), &[&dead, &never]).await;
    let (_, answer) = rig.ask(&post(CHAT, &wanting)).await;
    assert!(
        answer.starts_with(&begun) && answer.contains("\"error\"") && !answer.contains("[DONE]"),
        "{answer}"
    );
    rig.is_clean().await;
}

#[tokio::test]
async fn a_process_that_is_stopped_in_the_middle_costs_nobody_the_rest() {
    let begun = Arc::new(Notify::new());
    let has_begun = begun.clone();
    let slow = Upstream::start(move |mut peer| {
        let has_begun = has_begun.clone();
        async move {
            peer.request().await;
            peer.send(EVENTS).await;
            peer.send_chunk((said("Hel") + &said("lo")).as_bytes()).await;
            has_begun.notify_one();
            peer.rest().await;
        }
    });
    let (alive, _) = next(Odd::Well);
    let rig = Rig::with(going_on(), &[&slow, &alive]).await;
    let mut client = rig.client().await;
    client.send(&post(CHAT, BODY)).await;
    begun.notified().await;
    client.until("\"lo\"").await;
    rig.backends.revoke.cancel();
    client.until("data: [DONE]\n\n").await;
    assert_eq!(*rig.backends.told.lock().unwrap(), ["lost"]);
    eventually("the first one is left", || slow.open() == 0).await;
    rig.is_clean().await;
}

#[tokio::test]
async fn whoever_leaves_meanwhile_leaves_nothing_behind() {
    let dying = dying(said("Hel"));
    let (alive, asked) = next(Odd::Well);
    let mut plan = going_on();
    plan.config.upstream.comment_interval = Duration::from_millis(10);
    plan.config.upstream.connect_timeout = PATIENCE;
    let rig = Rig::with(plan, &[&dying, &alive]).await;
    *rig.backends.slow_end.lock().unwrap() = Some(Arc::new(Notify::new()));
    let mut client = rig.client().await;
    client.send(&post(CHAT, BODY)).await;
    client.until(": waiting for another process\n\n").await;
    drop(client);
    let record = rig.record(0).await;
    assert_eq!((record.continued, record.outcome, rig.live()), (true, RequestOutcome::ClientGone, 0));
    assert!(asked.lock().unwrap().is_empty());
    rig.is_clean().await;
}

#[tokio::test]
async fn what_is_kept_for_it_is_bounded() {
    // The answer has more text than the limit.
    let mut plan = going_on();
    plan.config.upstream.continue_bytes = ByteSize(16);
    let (never, asked) = next(Odd::Well);
    let dead = dying(said("Hello, ") + &said("everybody"));
    let rig = Rig::with(plan, &[&dead, &never]).await;
    let (_, answer) = rig.ask(&post(CHAT, BODY)).await;
    assert!(answer.contains("upstream.continue_bytes") && asked.lock().unwrap().is_empty(), "{answer}");
    rig.is_clean().await;
    // A held request is dropped when others need the room.
    let mut plan = going_on();
    plan.config.server.buffered_bytes = ByteSize((BODY.len() as u64 + 64) * 17 / 10);
    let dead = dying(said("Hel"));
    let rig = Rig::with(plan, &[&dead, &never]).await;
    let (_, answer) = rig.ask(&post(CHAT, BODY)).await;
    assert!(answer.contains("its request could not be kept") && asked.lock().unwrap().is_empty(), "{answer}");
    rig.is_clean().await;
}

#[tokio::test]
async fn of_several_answers_the_end_of_the_first_is_not_taken_for_the_end_of_all() {
    let body = r#"{"prompt":["a","b"],"stream":true,"temperature":0}"#;
    let piece = data(&json!({ "index": 0, "content": "one", "stop": false, "tokens_predicted": 1 }));
    let end = data(
        &json!({ "index": 0, "content": "", "stop": true, "stop_type": "limit", "tokens_predicted": 1 }),
    );
    // The server dies within the first answer, or between the two.
    for said in [piece.clone(), piece.clone() + &end] {
        let dying = dying(said.clone());
        let (next, asked) = next(Odd::Well);
        let rig = Rig::with(going_on(), &[&dying, &next]).await;
        let (_, answer) = rig.ask(&post("/completion", body)).await;
        let told = events(&answer);
        let rest = told.strip_prefix(&said).unwrap_or_else(|| panic!("{answer}"));
        assert!(rest.contains("\"error\":{\"code\":502") && rest.contains("several prompts"), "{answer}");
        assert!(asked.lock().unwrap().is_empty(), "it is known without asking");
        rig.is_clean().await;
    }
}
