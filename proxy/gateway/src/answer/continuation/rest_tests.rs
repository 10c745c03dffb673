//! Events of a continuation look like those of the stream that it continues.

use super::*;

fn voice(kind: AnswerFormat) -> RestTranslator {
    let frame = match kind {
        AnswerFormat::Chat => {
            json!({ "choices": [{ "delta": { "role": "assistant", "content": null }, "index": 0 }], "created": 7,
            "id": "chatcmpl-1", "model": "m", "object": "chat.completion.chunk", "timings": { "a": 1 },
            "prompt_progress": { "total": 22 } })
        }
        AnswerFormat::Text => {
            json!({ "choices": [{ "text": "a", "index": 0 }], "created": 7, "id": "cmpl-1", "model": "m" })
        }
        _ => json!({ "index": 0, "content": "a" }),
    };
    let Value::Object(frame) = frame else { unreachable!() };
    RestTranslator {
        kind,
        frame,
        delivered: 3,
        prompt: 22,
        text: "abc".to_owned(),
        limit: Some(10),
        wants_usage: true,
        ended: false,
    }
}

fn native(text: &str, made: u64, stop: bool) -> Value {
    let mut event = json!({ "index": 0, "content": text, "tokens": [made], "stop": stop, "tokens_predicted": made, "tokens_evaluated": 25 });
    if stop {
        event["stop_type"] = json!("eos");
        event["prompt"] = json!("Pabc");
        event["timings"] = json!({ "cache_n": 24 });
        event["generation_settings"] = json!({ "n_predict": 7, "max_tokens": 7 });
    }
    event
}

/// Returns the events made of these, without the end mark, and whether the answer has ended.
fn said(voice: &mut RestTranslator, events: &[Value]) -> (Vec<Value>, bool) {
    let mut all = Vec::new();
    for event in events {
        all.extend_from_slice(&voice.translate(format!("data: {event}\n\n").as_bytes()).unwrap());
    }
    let text = String::from_utf8(all).unwrap();
    let done = text.ends_with("data: [DONE]\n\n");
    let blocks = text.split_terminator("\n\n").map(|block| block.strip_prefix("data: ").unwrap());
    (blocks.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect(), done)
}

#[test]
fn a_chat_goes_on_as_a_chat_with_its_name_and_one_end() {
    let mut voice = voice(AnswerFormat::Chat);
    let (events, done) =
        said(&mut voice, &[native("d", 1, false), native("e", 2, false), native("", 2, true)]);
    assert!(done && voice.ended);
    assert_eq!(events.len(), 4, "{events:?}");
    for event in &events {
        assert_eq!(
            (&event["id"], &event["created"], &event["object"]),
            (&json!("chatcmpl-1"), &json!(7), &json!("chat.completion.chunk"))
        );
    }
    assert_eq!(
        events[0]["choices"],
        json!([{ "finish_reason": null, "index": 0, "delta": { "content": "d" } }])
    );
    assert!(
        events
            .iter()
            .take(3)
            .all(|event| event.get("timings").is_none() && event.get("prompt_progress").is_none()),
        "those of the first event are of the first event"
    );
    assert_eq!(events[2]["choices"], json!([{ "finish_reason": "stop", "index": 0, "delta": {} }]));
    assert_eq!(
        (
            &events[3]["usage"]["completion_tokens"],
            &events[3]["usage"]["prompt_tokens"],
            &events[3]["usage"]["total_tokens"]
        ),
        (&json!(5), &json!(22), &json!(27))
    );
    assert_eq!(
        events[3]["usage"]["prompt_tokens_details"]["cached_tokens"], 22,
        "not more than the prompt has"
    );
}

#[test]
fn without_a_wish_for_counters_there_are_none() {
    let mut voice = RestTranslator { wants_usage: false, ..voice(AnswerFormat::Chat) };
    let (events, done) = said(&mut voice, &[native("", 0, true)]);
    assert!(done && events.len() == 1 && events[0].get("usage").is_none(), "{events:?}");
}

#[test]
fn llama_servers_own_dialect_counts_on() {
    let mut voice = voice(AnswerFormat::Native);
    let (events, done) = said(&mut voice, &[native("d", 1, false), native("", 1, true)]);
    assert!(!done && voice.ended);
    assert_eq!((&events[0]["tokens_predicted"], &events[0]["tokens_evaluated"]), (&json!(4), &json!(22)));
    let end = &events[1];
    assert_eq!(
        (&end["prompt"], &end["tokens_predicted"], &end["generation_settings"]["n_predict"]),
        (&json!("P"), &json!(4), &json!(10))
    );
    assert_eq!(end["generation_settings"]["max_tokens"], 10);
}

#[test]
fn completions_count_on_and_keep_their_name() {
    let mut voice = voice(AnswerFormat::Text);
    let chunk = |text: &str, finish: Value| json!({ "choices": [{ "text": text, "index": 0, "finish_reason": finish }], "id": "other", "created": 9 });
    let mut end = chunk("", json!("length"));
    end["usage"] = json!({ "completion_tokens": 7, "prompt_tokens": 25, "total_tokens": 32 });
    let (events, done) = said(&mut voice, &[chunk("d", Value::Null), end]);
    assert!(done);
    assert!(events.iter().all(|event| event["id"] == "cmpl-1" && event["created"] == 7), "{events:?}");
    assert_eq!(
        events[1]["usage"],
        json!({ "completion_tokens": 10, "prompt_tokens": 22, "total_tokens": 32 })
    );
}

#[test]
fn where_no_token_is_left_none_is_told() {
    let full = |kind| RestTranslator { delivered: 10, ..voice(kind) };
    let one = |stop| {
        let mut event = native("too much", 1, stop);
        event["tokens_evaluated"] = json!(32);
        event
    };
    let (events, _) = said(&mut full(AnswerFormat::Chat), &[one(false), one(true)]);
    assert!(events.iter().all(|event| event["choices"][0]["delta"].get("content").is_none()), "{events:?}");
    assert_eq!(events[0]["choices"][0]["finish_reason"], "length");
    assert_eq!(events[1]["usage"]["completion_tokens"], 10);
    let (events, _) = said(&mut full(AnswerFormat::Native), &[one(false), one(true)]);
    assert_eq!(
        (events.len(), &events[0]["content"], &events[0]["tokens_predicted"], &events[0]["stop_type"]),
        (1, &json!(""), &json!(10), &json!("limit"))
    );
}

#[test]
fn a_server_that_was_given_something_else_is_not_listened_to() {
    for kind in [AnswerFormat::Chat, AnswerFormat::Native] {
        let mut event = native("d", 1, false);
        event["tokens_evaluated"] = json!(24);
        let mut voice = voice(kind);
        assert!(voice.translate(format!("data: {event}\n\n").as_bytes()).is_err());
    }
    let end = |prompt: u64| {
        json!({ "choices": [{ "text": "", "index": 0, "finish_reason": "stop" }],
            "usage": { "completion_tokens": 1, "prompt_tokens": prompt, "total_tokens": prompt + 1 } })
    };
    assert!(voice(AnswerFormat::Text).translate(format!("data: {}\n\n", end(25)).as_bytes()).is_ok());
    assert!(voice(AnswerFormat::Text).translate(format!("data: {}\n\n", end(24)).as_bytes()).is_err());
    for odd in ["data: [DONE]\n\n", "data: nonsense\n\n", "data: []\n\n", "data: {\"a\":1}\n\n"] {
        assert!(voice(AnswerFormat::Chat).translate(odd.as_bytes()).is_err(), "{odd:?}");
        assert!(voice(AnswerFormat::Text).translate(odd.as_bytes()).is_err(), "{odd:?}");
    }
}

#[test]
fn comments_pass_and_a_servers_own_error_is_the_end() {
    let mut voice = voice(AnswerFormat::Chat);
    assert_eq!(voice.translate(b": ping\n\n").unwrap(), ": ping\n\n");
    let (events, _) = said(&mut voice, &[json!({ "error": { "message": "full" } })]);
    assert!(voice.ended && events[0]["error"]["message"] == "full");
    assert!(
        voice.translate(format!("data: {}\n\n", native("x", 1, false)).as_bytes()).unwrap().is_empty(),
        "nothing follows"
    );
}

#[test]
fn the_work_of_both_is_one() {
    let continued = WorkDone { prompt_tokens: 25, output_tokens: 7, ..WorkDone::default() };
    let work = voice(AnswerFormat::Chat).work(continued);
    assert_eq!((work.prompt_tokens, work.output_tokens), (22, 10));
}

#[test]
fn counts_of_timings_are_those_of_the_whole() {
    let mut event = native("", 2, true);
    event["timings"] = json!({ "cache_n": 24, "prompt_n": 1, "predicted_n": 2, "predicted_ms": 5.0 });
    let (events, _) = said(&mut voice(AnswerFormat::Native), &[event]);
    let wanted = json!({ "cache_n": 22, "prompt_n": 0, "predicted_n": 5, "predicted_ms": 5.0 });
    assert_eq!(events[0]["timings"], wanted);
}
