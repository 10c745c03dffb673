//! An answer with a temperature is continued as the beginning of its own message, where possible.

use serde_json::{Value, json};

use super::goes_on::{Asked, dying, events, going_on, note};
use super::*;
use crate::RequestOutcome;

const PATH: &str = "/v1/messages";
const BODY: &str =
    r#"{"messages":[{"role":"user","content":"tell"}],"max_tokens":9,"temperature":1,"stream":true}"#;

fn named(event: &Value) -> String {
    format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap_or_default())
}

fn begun(id: &str, texts: &[&str]) -> String {
    let delta = |text: &&str| {
        named(
            &json!({ "type": "content_block_delta", "index": 0, "delta": { "type": "text_delta", "text": text } }),
        )
    };
    named(&json!({ "type": "message_start", "message": { "id": id } }))
        + &named(
            &json!({ "type": "content_block_start", "index": 0, "content_block": { "type": "text", "text": "" } }),
        )
        + &texts.iter().map(delta).collect::<String>()
}

fn end(tokens: u64) -> String {
    named(&json!({ "type": "content_block_stop", "index": 0 }))
        + &named(
            &json!({ "type": "message_delta", "delta": { "stop_reason": "end_turn" }, "usage": { "output_tokens": tokens } }),
        )
        + &named(&json!({ "type": "message_stop" }))
}

/// Behaviour of the next server for the beginning of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Continues, and repeats the beginning.
    Again,
    /// Continues without repeating: its parser strips blanks.
    Behind,
    /// Begins another message.
    Another,
    /// Has given the slot to another request.
    Busy,
    /// The same, but shows that its template appends the beginning.
    Appends,
    /// Closes the connection.
    Dies,
}

fn next(way: Way) -> (Upstream, Asked) {
    let asked = Asked::default();
    let log = asked.clone();
    let upstream = Upstream::start(move |mut peer| {
        let log = log.clone();
        async move {
            while let Some((head, body)) = peer.request().await {
                let (path, body) = note(&log, &head, &body);
                let has_text = body["messages"].as_array().is_some_and(|turns| turns.len() > 1);
                let said = |new: u64, cached: u64, text: &str| {
                    json!({ "content": [{ "type": "text", "text": text }],
                        "usage": { "input_tokens": new, "cache_read_input_tokens": cached, "output_tokens": 1 } })
                };
                let answer = match (path.as_str(), has_text, way) {
                    ("/apply-template", _, Way::Appends) => {
                        json!({ "prompt": if has_text { "tell: Once" } else { "tell: " } })
                    }
                    ("/apply-template", ..) => json!({}),
                    ("/tokenize", ..) if body["content"] == "Once<eot>" && body["parse_special"] == true => {
                        json!({ "tokens": [1, 9] })
                    }
                    ("/tokenize", ..) if body["content"] == "Once<eot>" => json!({ "tokens": [1, 2, 3, 4] }),
                    ("/tokenize", ..) if body["content"] == "tell: " => json!({ "tokens": [1, 2, 3] }),
                    ("/tokenize", ..) if body["content"] == "tell: Once" => {
                        json!({ "tokens": [1, 2, 3, 4, 5] })
                    }
                    ("/tokenize", ..) => json!({ "tokens": [1, 2] }),
                    ("/completion", ..) => {
                        json!({ "generation_settings": { "grammar": "", "mirostat": 0, "temperature": 0.8 } })
                    }
                    (_, true, Way::Dies) => return,
                    (_, true, _) if body["stream"] == true => {
                        let repeats = matches!(way, Way::Again | Way::Appends);
                        let text = if repeats { "Once upon" } else { " upon" };
                        peer.send(EVENTS).await;
                        peer.send_chunk((begun("two", &[text, " a"]) + &end(3)).as_bytes()).await;
                        peer.send(b"0\r\n\r\n").await;
                        continue;
                    }
                    (_, true, Way::Again) => said(2, 50, "Once upon"),
                    (_, true, Way::Behind) => said(1, 51, " upon"),
                    (_, true, Way::Another) => said(8, 50, "Well"),
                    (_, true, Way::Busy | Way::Appends) => said(52, 0, "Once upon"),
                    _ => said(50, 0, "Once"),
                };
                peer.send(&json_answer(&answer.to_string())).await;
            }
        }
    });
    (upstream, asked)
}

#[tokio::test]
async fn a_text_goes_on_where_the_next_server_shows_that_it_does() {
    let no_temperature = BODY.replace("\"temperature\":1,", "");
    for (way, body) in
        [(Way::Again, BODY.to_owned()), (Way::Again, no_temperature), (Way::Appends, BODY.to_owned())]
    {
        let dead = dying(begun("one", &["On", "ce"]) + "event: content_bl");
        let (alive, asked) = next(way);
        let rig = Rig::with(going_on(), &[&dead, &alive]).await;
        let (_, answer) = rig.ask(&post(PATH, &body)).await;
        assert_eq!(events(&answer), begun("one", &["On", "ce", " upon", " a"]) + &end(5), "{way:?}");
        let asked = asked.lock().unwrap().clone();
        let paths: Vec<&str> = asked.iter().map(|(path, _)| path.as_str()).collect();
        let counts = if way == Way::Appends { 2 } else { 1 };
        let questions = ["/completion", "/tokenize", "/tokenize", "/apply-template", "/apply-template"];
        assert_eq!(paths[..5], questions, "{body}");
        assert_eq!(paths[5..5 + counts], ["/tokenize", "/tokenize"][..counts], "{body}");
        assert_eq!(paths[5 + counts..], [PATH, PATH, PATH], "{body}");
        let (_, last) = &asked[7 + counts];
        assert_eq!((&last["max_tokens"], &last["stream"]), (&json!(7), &json!(true)), "{last}");
        assert_eq!(last["messages"][1], json!({ "role": "assistant", "content": "Once" }));
        let record = rig.record(0).await;
        assert_eq!((record.retries, record.continued, record.outcome), (1, true, RequestOutcome::Ok));
        assert_eq!((record.work.prompt_tokens, record.work.output_tokens), (50, 5));
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_server_made_of_something_else_is_not_asked() {
    for kin in [None, Some(2)] {
        let dead = dying(begun("one", &["Once"]));
        let (other, asked) = next(Way::Again);
        let rig = Rig::with(going_on(), &[&dead, &other]).await;
        *rig.backends.kin_of_later.lock().unwrap() =
            kin.map(|made_of| AnswerIdentity { made_of, but_for_binary: made_of, answer_tokens: None });
        let (_, answer) = rig.ask(&post(PATH, BODY)).await;
        assert!(answer.contains("started from something else"), "{answer}");
        assert!(asked.lock().unwrap().iter().all(|(_, body)| body["stream"] != true));
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn where_it_shows_something_else_the_stream_ends_with_an_error() {
    for way in [Way::Another, Way::Behind, Way::Busy, Way::Dies] {
        let begun = begun("one", &["Once"]);
        let dead = dying(begun.clone());
        let (alive, asked) = next(way);
        let third = Upstream::answering(|_, _| json_answer("{}"));
        let rig = Rig::with(going_on(), &[&dead, &alive, &third]).await;
        let (_, answer) = rig.ask(&post(PATH, BODY)).await;
        let told = events(&answer);
        let rest = told.strip_prefix(&begun).unwrap_or_else(|| panic!("{answer}"));
        assert!(rest.starts_with("event: error\ndata: ") && rest.matches("\n\n").count() == 1, "{answer}");
        if way != Way::Dies {
            let why = match way {
                Way::Behind => "does not repeat the text",
                Way::Busy => "the prompt is no longer cached",
                _ => "does not continue after a text",
            };
            assert!(rest.contains(why), "{answer}");
            assert!(!rig.backends.told.lock().unwrap()[1..].contains(&"broke"), "it is no fault of its own");
        }
        assert_eq!((asked.lock().unwrap().len(), third.accepted()), (8, 0), "{way:?}");
        assert_eq!(rig.record(0).await.outcome, RequestOutcome::UpstreamDied);
        rig.is_clean().await;
    }
}

#[tokio::test]
async fn a_text_with_a_special_token_of_the_model_is_not_put_into_a_prompt() {
    let dead = dying(begun("one", &["Once", "<eot>"]));
    let (alive, asked) = next(Way::Appends);
    let rig = Rig::with(going_on(), &[&dead, &alive]).await;
    let (_, answer) = rig.ask(&post(PATH, BODY)).await;
    assert!(answer.contains("its text has special tokens of a template"), "{answer}");
    assert!(asked.lock().unwrap().iter().all(|(_, body)| body["stream"] != true));
    rig.is_clean().await;
}
