//! Transcripts of streams as llama-server writes them, and reasons why one cannot be continued elsewhere.

use serde_json::json;

use super::*;

const LIMIT: usize = 1 << 20;

fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

fn chat(delta: &Value, finish: &Value) -> Value {
    json!({ "choices": [{ "finish_reason": finish, "index": 0, "delta": delta }], "created": 7, "id": "chatcmpl-1",
        "model": "m", "object": "chat.completion.chunk" })
}

fn said(text: &str) -> Value {
    chat(&json!({ "content": text }), &Value::Null)
}

fn text(text: &str, finish: &Value) -> Value {
    json!({ "choices": [{ "text": text, "index": 0, "logprobs": null, "finish_reason": finish }], "id": "c", "created": 7 })
}

fn native(text: &str, id: u32, counted: u64) -> Value {
    json!({ "index": 0, "content": text, "tokens": [id], "stop": false, "tokens_predicted": counted })
}

fn heard(kind: AnswerFormat, events: &[Value]) -> AnswerTranscript {
    let mut heard = AnswerTranscript::for_stream(kind, LIMIT);
    for one in events {
        heard.feed(event(one).as_bytes());
    }
    heard
}

#[test]
fn each_piece_of_a_chat_is_kept_whatever_stands_in_it() {
    let pieces = [
        "a",
        "\"",
        "\\",
        "\\\"",
        "漢",
        "\n\n",
        "data: [DONE]",
        "{\"content\":\"x\"}",
        "\u{7}",
        "😀",
        "",
        "\\u0041",
    ];
    let mut events = vec![chat(&json!({ "role": "assistant", "content": null }), &Value::Null)];
    events.extend(pieces.map(said));
    let heard = heard(AnswerFormat::Chat, &events);
    assert_eq!(heard.lost, None);
    assert_eq!(heard.decode_string(), pieces.concat());
    assert_eq!(heard.pieces().collect::<String>(), pieces.concat());
    assert_eq!(heard.frame.unwrap()["id"], "chatcmpl-1");
    assert_eq!(heard.stage, AnswerStage::Unfinished);
}

#[test]
fn the_fast_way_and_the_slow_one_hear_the_same() {
    // Every second event has another time stamp: the template does not match, and each event is parsed.
    for piece in
        ["x", "\"quoted\"", "back\\slash", "\\", "ends\\\\", "\"},\"delta\":{\"content\":\"y", "é漢\u{0}"]
    {
        let mut slow = AnswerTranscript::for_stream(AnswerFormat::Chat, LIMIT);
        let mut fast = AnswerTranscript::for_stream(AnswerFormat::Chat, LIMIT);
        for n in 0..20 {
            let mut one = said(piece);
            fast.feed(event(&one).as_bytes());
            one["created"] = json!(n);
            slow.feed(event(&one).as_bytes());
        }
        assert_eq!((fast.lost, slow.lost), (None, None), "{piece:?}");
        assert_eq!((fast.decode_string(), &fast.ends), (slow.decode_string(), &slow.ends), "{piece:?}");
        assert!(fast.mould.is_some());
    }
}

#[test]
fn tokens_of_llama_servers_own_dialect_count_only_if_none_is_missing() {
    let all = heard(AnswerFormat::Native, &[native("a", 5, 1), native("b", 6, 2)]);
    assert_eq!(all.all_token_ids(), Some(&[5, 6][..]));
    // Of a character with several tokens, the event has only the last one.
    let some = heard(AnswerFormat::Native, &[native("a", 5, 1), native("漢", 9, 4)]);
    assert_eq!((some.all_token_ids(), some.decode_string()), (None, "a漢"));
    // Events about the prompt have a token 0; they do not make up for tokens missing later.
    let mut progress = native("", 0, 0);
    progress["prompt_progress"] = json!({ "total": 9 });
    let told = heard(AnswerFormat::Native, &[progress.clone(), progress.clone(), native("漢", 162, 3)]);
    assert_eq!((told.all_token_ids(), told.tokens.counted), (None, Some(3)));
    let told = heard(AnswerFormat::Native, &[progress.clone(), native("a", 5, 1)]);
    assert_eq!(told.all_token_ids(), Some(&[5][..]));
    assert!(heard(AnswerFormat::Native, &[progress]).has_no_token() && !told.has_no_token());
    // A list with a gap never becomes complete again.
    let gap = heard(AnswerFormat::Native, &[native("漢", 162, 3), native("b", 6, 4), native("", 7, 3)]);
    assert_eq!(gap.all_token_ids(), None);
}

#[test]
fn tokens_whose_text_is_held_back_are_known_until_the_text_comes() {
    let held = heard(AnswerFormat::Native, &[native("a", 5, 1), native("", 6, 2)]);
    assert!(held.has_withheld_text() && !held.has_no_token());
    let come = heard(AnswerFormat::Native, &[native("a", 5, 1), native("", 6, 2), native("\nU", 7, 3)]);
    assert!(!come.has_withheld_text());
    assert_eq!(come.all_token_ids(), Some(&[5, 6, 7][..]));
    assert!(heard(AnswerFormat::Native, &[native("", 6, 1)]).has_withheld_text());
    // Without token ids, an event without text is the only sign of a withheld token.
    let one = |piece: &str| text(piece, &Value::Null);
    assert!(heard(AnswerFormat::Text, &[one("a"), one("")]).has_withheld_text());
    assert!(!heard(AnswerFormat::Text, &[one("a"), one(""), one("b")]).has_withheld_text());
    assert_eq!(heard(AnswerFormat::Text, &[one("a"), one(""), one("b")]).pieces().count(), 2);
    let role = chat(&json!({ "role": "assistant", "content": null }), &Value::Null);
    let blank = heard(AnswerFormat::Chat, &[role]);
    assert!(blank.has_no_token() && !blank.has_withheld_text());
    assert!(
        !heard(AnswerFormat::Chat, &[said("a")]).has_no_token()
            && !heard(AnswerFormat::Chat, &[]).has_no_token()
    );
}

#[test]
fn the_end_is_known_with_and_without_counters() {
    let stop = chat(&json!({}), &json!("stop"));
    let mut counted = json!({ "choices": [], "usage": { "completion_tokens": 1 } });
    assert_eq!(
        heard(AnswerFormat::Chat, &[said("a"), stop.clone()]).stage,
        AnswerStage::Finished { counted: false }
    );
    assert_eq!(
        heard(AnswerFormat::Chat, &[said("a"), stop.clone(), counted.clone()]).stage,
        AnswerStage::Finished { counted: true }
    );
    let mut last = text("", &json!("length"));
    last["usage"] = counted["usage"].take();
    assert_eq!(
        heard(AnswerFormat::Text, &[text("a", &Value::Null), last]).stage,
        AnswerStage::Finished { counted: true }
    );
    let mut end = native("", 0, 1);
    end["stop"] = json!(true);
    assert_eq!(heard(AnswerFormat::Native, &[native("a", 5, 1), end]).stage, AnswerStage::Done);
    let mut done = heard(AnswerFormat::Chat, &[said("a"), stop]);
    done.feed(b"data: [DONE]\n\n");
    assert_eq!((done.stage, done.lost), (AnswerStage::Done, None));
}

#[test]
fn comments_are_no_events() {
    let mut heard = AnswerTranscript::for_stream(AnswerFormat::Chat, LIMIT);
    heard.feed(b": ping\n\n");
    heard.feed(format!(":\n\n{}: x\n\n", event(&said("a"))).as_bytes());
    assert_eq!((heard.decode_string(), heard.lost), ("a", None));
}

#[test]
fn what_is_more_than_one_text_is_not_plain() {
    let header =
        json!([{ "index": 0, "id": "x", "type": "function", "function": { "name": "f", "arguments": "{" } }]);
    let more = json!([{ "index": 0, "function": { "arguments": "}" } }]);
    let call = chat(&json!({ "tool_calls": header }), &Value::Null);
    let calls =
        heard(AnswerFormat::Chat, &[said("a"), call, chat(&json!({ "tool_calls": more }), &Value::Null)]);
    assert_eq!((calls.lost, calls.is_plain(), calls.decode_string()), (None, Err("it calls a tool"), "a{}"));
    let thinks =
        heard(AnswerFormat::Chat, &[chat(&json!({ "reasoning_content": "hm" }), &Value::Null), said("a")]);
    let why = "it has reasoning apart from its text";
    assert_eq!((thinks.lost, thinks.is_plain(), thinks.decode_string()), (None, Err(why), "hma"));
    let plain = heard(AnswerFormat::Chat, &[said("a")]);
    assert_eq!(plain.is_plain(), Ok(()));
    assert!(plain.marked_not_plain("because").is_plain().is_err());
    let ended = heard(AnswerFormat::Chat, &[said("a"), chat(&json!({}), &json!("stop"))]);
    assert!(ended.is_plain().is_err());
    for kind in [AnswerFormat::Messages, AnswerFormat::Responses] {
        assert!(AnswerTranscript::for_stream(kind, LIMIT).is_plain().is_err());
    }
}

#[test]
fn other_routes_are_heard_in_their_own_words() {
    let data = |name: &str, event: &Value| format!("event: {name}\ndata: {event}\n\n");
    let delta = |text: &str| {
        data(
            "content_block_delta",
            &json!({ "type": "content_block_delta", "index": 1, "delta": { "type": "text_delta", "text": text } }),
        )
    };
    let mut heard = AnswerTranscript::for_stream(AnswerFormat::Messages, LIMIT);
    heard.feed(
        data("message_start", &json!({ "type": "message_start", "message": { "id": "one" } })).as_bytes(),
    );
    assert!(heard.has_no_token());
    heard.feed((delta("a") + &delta("\"b\"") + &delta("c")).as_bytes());
    assert_eq!((heard.lost, heard.decode_string(), heard.has_no_token()), (None, "a\"b\"c", false));
    assert!(heard.mould.is_some());
    heard.feed(data("message_stop", &json!({ "type": "message_stop" })).as_bytes());
    assert_eq!(heard.stage, AnswerStage::Done);
    let mut heard = AnswerTranscript::for_stream(AnswerFormat::Responses, LIMIT);
    let numbered = |number: u64, text: &str| {
        let event = json!({ "type": "response.output_text.delta", "sequence_number": number, "item_id": "i", "delta": text });
        data("response.output_text.delta", &event)
    };
    heard.feed((numbered(4, "a") + &numbered(5, "b")).as_bytes());
    assert_eq!((heard.lost, heard.decode_string(), heard.sequence), (None, "ab", Some(5)));
}

#[test]
fn what_is_not_understood_is_not_continued() {
    let mut second = said("b");
    second["choices"][0]["index"] = json!(1);
    let mut probable = said("b");
    probable["choices"][0]["logprobs"] = json!({ "content": [] });
    let mut verbose = said("b");
    verbose["__verbose"] = json!({});
    let two = json!({ "choices": [{ "index": 0, "delta": {} }, { "index": 1, "delta": {} }] });
    let mut probabilities = native("b", 1, 1);
    probabilities["completion_probabilities"] = json!([]);
    let cases = [
        (
            AnswerFormat::Chat,
            chat(&json!({ "tool_calls": [{ "index": 0 }, { "index": 1 }] }), &Value::Null),
            "several calls",
        ),
        (AnswerFormat::Chat, chat(&json!({ "tool_calls": [{ "id": "x" }] }), &Value::Null), "not written as"),
        (AnswerFormat::Chat, chat(&json!({ "audio": {} }), &Value::Null), "more than text"),
        (AnswerFormat::Messages, json!({ "type": "something" }), "not known"),
        (AnswerFormat::Responses, json!({ "type": "response.something" }), "not known"),
        (AnswerFormat::Responses, json!({ "type": "response.failed" }), "an error"),
        (AnswerFormat::Chat, second, "several answers"),
        (AnswerFormat::Chat, two, "several answers"),
        (AnswerFormat::Chat, probable, "probabilities"),
        (AnswerFormat::Chat, verbose, "debugging"),
        (AnswerFormat::Chat, json!({ "error": { "message": "no" } }), "an error"),
        (AnswerFormat::Chat, json!({ "a": 1 }), "no choices"),
        (AnswerFormat::Chat, json!([1]), "no JSON object"),
        (AnswerFormat::Native, probabilities, "probabilities"),
        (AnswerFormat::Native, json!({ "index": 1, "content": "" }), "several answers"),
        (AnswerFormat::Native, json!({ "stop": false }), "no text"),
        (AnswerFormat::Text, json!({ "choices": [{ "index": 0 }] }), "no text"),
    ];
    for (kind, one, why) in cases {
        let heard = heard(kind, std::slice::from_ref(&one));
        assert!(heard.lost.is_some_and(|lost| lost.contains(why)), "{one}: {:?}", heard.lost);
        assert!(heard.decode_string().is_empty() && heard.frame.is_none(), "nothing is held for nothing");
    }
    for odd in ["event: x\n\n", "data: {}\r\n\r\n", "data: {\ndata: }\n\n", "id: 1\n\n", "data: nonsense\n\n"]
    {
        let mut heard = AnswerTranscript::for_stream(AnswerFormat::Chat, LIMIT);
        heard.feed(odd.as_bytes());
        assert!(heard.lost.is_some(), "{odd:?}");
    }
    let after = heard(AnswerFormat::Chat, &[said("a"), chat(&json!({}), &json!("stop")), said("b")]);
    assert!(after.lost.is_some());
}

#[test]
fn no_more_is_held_than_may_be() {
    let mut heard = AnswerTranscript::for_stream(AnswerFormat::Chat, 1000);
    let mut fed = 0;
    while heard.lost.is_none() {
        heard.feed(event(&said("0123456789")).as_bytes());
        fed += 1;
        assert!(heard.said.held_bytes() + heard.ends.len() * PIECE_OVERHEAD <= 1000);
        assert!(fed < 200, "it must come to an end");
    }
    assert!(heard.lost.is_some_and(|lost| lost.contains("continue_bytes")));
    // Pieces without text have an overhead, too.
    let mut empty = AnswerTranscript::for_stream(AnswerFormat::Text, 1000);
    for _ in 0..10_000 {
        empty.feed(event(&text("", &Value::Null)).as_bytes());
        empty.feed(event(&text("a", &Value::Null)).as_bytes());
        if empty.lost.is_some() {
            return;
        }
    }
    panic!("{} pieces are held", empty.ends.len());
}
