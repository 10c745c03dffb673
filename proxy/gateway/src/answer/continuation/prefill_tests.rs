//! Texts that can be the beginning of a message, and proofs that a server continues after them.

use super::*;

fn named(event: &Value) -> String {
    format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap())
}

fn heard(kind: AnswerFormat, events: &str) -> AnswerTranscript {
    let mut heard = AnswerTranscript::for_stream(kind, 1 << 20);
    heard.feed(events.as_bytes());
    assert_eq!(heard.lost, None, "{events}");
    heard
}

/// A transcript with the text of a message so far, after a block of this kind.
fn message(block: &str, text: &str) -> AnswerTranscript {
    let events = [
        json!({ "type": "message_start", "message": { "id": "one" } }),
        json!({ "type": "content_block_start", "index": 0, "content_block": { "type": block, "text": "" } }),
        json!({ "type": "content_block_delta", "index": 0, "delta": { "type": "text_delta", "text": text } }),
    ];
    heard(AnswerFormat::Messages, &events.iter().map(named).collect::<String>())
}

fn response(text: &str) -> AnswerTranscript {
    let events = [
        json!({ "type": "response.created", "response": { "id": "r" } }),
        json!({ "type": "response.in_progress", "response": { "id": "r" } }),
        json!({ "type": "response.output_item.added", "item": { "type": "message", "id": "i" } }),
        json!({ "type": "response.content_part.added", "item_id": "i", "part": { "type": "output_text", "text": "" } }),
        json!({ "type": "response.output_text.delta", "item_id": "i", "delta": text }),
    ];
    heard(AnswerFormat::Responses, &events.iter().map(named).collect::<String>())
}

fn chat(text: &str) -> AnswerTranscript {
    let chunk = |delta: Value| {
        format!("data: {}\n\n", json!({ "id": "c", "choices": [{ "index": 0, "delta": delta }] }))
    };
    heard(
        AnswerFormat::Chat,
        &(chunk(json!({ "role": "assistant", "content": null })) + &chunk(json!({ "content": text }))),
    )
}

fn turns() -> Value {
    json!([{ "role": "user", "content": "tell" }])
}

fn of(heard: &AnswerTranscript, body: &Value) -> Result<PrefillContinuation, NoContinuationReason> {
    PrefillContinuation::from_body(heard, body.to_string().as_bytes())
}

#[test]
fn a_text_becomes_the_beginning_of_a_message_in_the_words_of_each_route() {
    let read = |body: Vec<u8>| serde_json::from_slice::<Value>(&body).unwrap();
    let text = "Once";
    let body = json!({ "messages": turns(), "max_tokens": 40, "temperature": 1, "tools": [{ "name": "f" }], "stream": true,
        "tool_choice": { "type": "auto" } });
    let begun = json!([{ "role": "user", "content": "tell" }, { "role": "assistant", "content": text }]);
    let prefill = of(&message("text", text), &body).unwrap();
    let mut one = body.clone();
    (one["max_tokens"], one["stream"]) = (json!(1), json!(false));
    assert_eq!(read(prefill.first_request()), one, "all that is said of drawing goes along");
    one["messages"] = begun.clone();
    assert_eq!(read(prefill.second_request(text)), one);
    let mut rest = body.clone();
    (rest["max_tokens"], rest["messages"]) = (json!(37), begun.clone());
    assert_eq!(read(prefill.rest_request(3, Some(9)).unwrap()), rest);
    assert!(prefill.rest_request(40, None).is_err(), "nothing is left of it");

    let body = json!({ "messages": turns(), "max_completion_tokens": 40, "n_predict": -1, "stream_options": { "include_usage": true } });
    let prefill = of(&chat(text), &body).unwrap();
    assert_eq!(
        read(prefill.first_request()),
        json!({ "messages": turns(), "max_tokens": 1, "stream": false })
    );
    let rest = read(prefill.rest_request(3, Some(9)).unwrap());
    assert_eq!(
        (&rest["max_completion_tokens"], &rest["n_predict"], &rest["messages"]),
        (&json!(37), &json!(-1), &begun)
    );
    assert_eq!(rest["stream_options"], body["stream_options"]);

    for input in
        [json!("tell"), json!([{ "role": "user", "content": [{ "type": "input_text", "text": "tell" }] }])]
    {
        let body =
            json!({ "input": input, "max_output_tokens": 40, "text": { "format": { "type": "text" } } });
        let second = read(of(&response(text), &body).unwrap().second_request(text));
        let turns = second["input"].as_array().unwrap();
        assert_eq!(
            (turns.len(), &turns[0]["role"], &turns[1]["content"][0]["text"]),
            (2, &json!("user"), &json!(text))
        );
        assert_eq!(second["max_output_tokens"], 1);
    }
}

#[test]
fn what_has_a_state_or_is_more_than_a_text_has_no_such_rest() {
    let text = message("text", "Once");
    let plain = json!({ "messages": turns() });
    assert!(of(&text, &plain).is_ok());
    for (name, value) in [
        ("grammar", json!("root ::= \"a\"")),
        ("response_format", json!({ "type": "json_object" })), // its route shows no grammar
        ("mirostat", json!(2)),
        ("tool_choice", json!({ "type": "function", "function": { "name": "f" } })),
        ("messages", json!([])),
        ("messages", json!([{ "role": "assistant", "content": "On" }])),
        ("messages", json!([{ "role": "user", "content": [{ "type": "image", "source": {} }] }])),
        ("continue_final_message", json!(true)),
        ("cache_prompt", json!(false)),
    ] {
        let mut body = plain.clone();
        body[name] = value;
        assert!(of(&text, &body).is_err(), "{body}");
    }
    for name in ["grammar", "response_format", "mirostat", "tool_choice"] {
        let mut body = plain.clone();
        body[name] = Value::Null;
        assert!(of(&text, &body).is_ok(), "{body}");
    }
    let called = json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": [{ "type": "tool_use", "id": "x" }] },
        { "role": "user", "content": [{ "type": "tool_result", "content": [{ "type": "text", "text": "b" }] }] }]);
    assert!(of(&text, &json!({ "messages": called })).is_ok());

    let thought = json!({ "type": "content_block_delta", "index": 0, "delta": { "type": "thinking_delta", "thinking": "so" } });
    for more in [&thought, &json!({ "type": "content_block_stop", "index": 0 })] {
        let mut heard = message("text", "Once"); // a thought follows, or the text has ended
        heard.feed(named(more).as_bytes());
        assert!(of(&heard, &plain).is_err(), "{more}");
    }
    for odd in [message("text", "On <think>"), message("text", "On <|im_end|>"), message("text", "\u{FFFD}")]
    {
        assert!(of(&odd, &plain).is_err(), "{odd:?}");
    }
}

/// The events of a message's call so far, after a text.
fn with_call(arguments: &[&str]) -> AnswerTranscript {
    let mut heard = message("text", "I look.");
    heard.feed(named(&json!({ "type": "content_block_stop", "index": 0 })).as_bytes());
    let call = json!({ "type": "tool_use", "name": "f", "id": "x", "input": {} });
    heard
        .feed(named(&json!({ "type": "content_block_start", "index": 1, "content_block": call })).as_bytes());
    for part in arguments {
        let delta = json!({ "type": "input_json_delta", "partial_json": part });
        heard.feed(named(&json!({ "type": "content_block_delta", "index": 1, "delta": delta })).as_bytes());
    }
    heard
}

#[test]
fn a_call_that_has_begun_becomes_the_beginning_of_a_message_that_must_call() {
    let read = |body: Vec<u8>| serde_json::from_slice::<Value>(&body).unwrap();
    let tools = json!([{ "name": "f", "input_schema": { "type": "object" } }]);
    let body = json!({ "messages": turns(), "tools": tools, "max_tokens": 40 });
    let short = json!({ "choices": [{ "message": { "tool_calls": [{ "function": { "name": "f", "arguments": "{\"a\"" } }] } }],
        "__verbose": { "content": "f: {\"a\"" } });
    for arguments in [&[][..], &["{\"a\"", ":"]] {
        let mut prefill = of(&with_call(arguments), &body).unwrap();
        assert!(prefill.trigger_request().unwrap().is_ok() && prefill.grammar_request().is_none());
        prefill.set_call_text("<call>", short.to_string().as_bytes()).unwrap();
        assert_eq!(prefill.text, format!("I look.<call>f: {}", arguments.concat()));
        assert!(prefill.grammar_request().is_some());
        let rest = read(prefill.rest_request(3, None).unwrap());
        assert_eq!(rest["tool_choice"], json!({ "type": "any" }), "an optional call has no grammar yet");
        assert_eq!(rest["messages"][1]["content"], prefill.text.as_str());
    }
    let mut second = with_call(&["{}"]);
    second.feed(named(&json!({ "type": "content_block_stop", "index": 1 })).as_bytes());
    assert!(of(&second, &body).is_err(), "another call may follow");
}

#[test]
fn only_a_server_that_counts_the_text_and_knows_all_before_it_goes_on() {
    let prefill = of(&message("text", "Once"), &json!({ "messages": turns() })).unwrap();
    let said = |new: u64, cached: u64, text: &str| {
        let answer = json!({ "content": [{ "type": "text", "text": text }],
            "usage": { "input_tokens": new, "cache_read_input_tokens": cached, "output_tokens": 1 } });
        prefill.read_counts(answer.to_string().as_bytes()).unwrap()
    };
    let first = said(50, 2, "Once");
    let shows = |second: &PrefillCounts| prefill.check_continues(&first, None, second, ("Once", 3)).is_ok();
    assert!(shows(&said(3, 52, "Once upon")) && shows(&said(2, 53, "Once upon")));
    assert_eq!(PrefillContinuation::prompt_shift(&first, 3), PromptShift { tokens: 3, evaluated: 50 });
    // Another message begins, the beginning differs, its slot is gone, or the same was requested before.
    for second in [
        said(8, 52, "On"),
        said(55, 0, "Once upon"),
        said(4, 51, "Once upon"),
        said(2, 52, "Once"),
        said(1, 54, "Once upon"),
    ] {
        assert!(!shows(&second), "{second:?}");
    }
    // Older builds do not repeat the text, and strip blanks after it. A single token may be equal by chance.
    assert!(!shows(&said(3, 52, " upon")));
    assert!(prefill.check_continues(&first, None, &said(1, 52, "Once"), ("Once", 1)).is_err());
    // If the template appends the text, the prompt need not be cached.
    assert!(prefill.check_appended(&first, &said(55, 0, "Once upon"), ("Once", 3)).is_ok());
    for second in [said(56, 0, "Once upon"), said(55, 0, "On")] {
        assert!(prefill.check_appended(&first, &second, ("Once", 3)).is_err(), "{second:?}");
    }
    // Each step has the previous one in its cache.
    let second = said(3, 52, "Once upon");
    let next = |now: &PrefillCounts| {
        prefill.check_continues(&first, Some(&second), now, ("Once upon a time", 8)).is_ok()
    };
    assert!(next(&said(5, 55, "Once upon a time there")) && next(&said(7, 53, "Once upon a time there")));
    assert!(!next(&said(60, 0, "Once upon a time there")) && !next(&said(9, 51, "Once upon a time there")));
    assert!(prefill.read_counts(br#"{"usage":{"input_tokens":9}}"#).is_err(), "an old build");
}

#[test]
fn the_servers_own_settings_have_a_state_or_not() {
    let of = |settings: Value| {
        PrefillContinuation::is_greedy(json!({ "generation_settings": settings }).to_string().as_bytes())
    };
    let plain = json!({ "grammar": "", "mirostat": 0, "n_probs": 0, "adaptive_target": -1.0, "temperature": 0.8, "top_k": 40 });
    assert_eq!(of(plain), Ok(false));
    assert_eq!(
        (of(json!({ "temperature": 0.0 })), of(json!({ "temperature": 0.8, "top_k": 1 }))),
        (Ok(true), Ok(true))
    );
    for settings in [
        json!({ "grammar": "root ::= \"a\"" }),
        json!({ "mirostat": 1 }),
        json!({ "adaptive_target": 0.5 }),
        Value::Null,
    ] {
        assert!(of(settings.clone()).is_err(), "{settings}");
    }
    assert_eq!(spelling::read_count(br#"{"tokens":[1,2]}"#), Ok(2));
    assert!(spelling::read_count(br#"{"tokens":[]}"#).is_err());
}

#[test]
fn a_long_text_is_shown_in_steps_that_a_server_finds_again() {
    let text = (0..500).map(|word| format!("word{word}")).collect::<Vec<_>>().join(" ");
    let prefill = of(&message("text", &text), &json!({ "messages": turns() })).unwrap();
    let sizes = |prompt: u64, tokens: u64| -> Vec<usize> {
        let steps = prefill.text_steps(prompt, tokens);
        assert_eq!(steps.last(), Some(&&*text));
        assert!(
            steps.windows(2).all(|two| two[1].starts_with(two[0]) && two[1][two[0].len()..].starts_with(' '))
        );
        steps.iter().map(|step| step.len() * usize::try_from(tokens).unwrap() / text.len()).collect()
    };
    assert_eq!(sizes(5000, 1000), [1000]);
    let steps = sizes(20, 1000);
    assert_eq!(steps.len(), 3, "{steps:?}");
    assert!(steps[0] <= 60 && steps[1] <= 300, "{steps:?}");
    assert!(sizes(0, 1000).len() < 8);
    let one = of(&message("text", &"x".repeat(900)), &json!({ "messages": turns() })).unwrap();
    assert_eq!(one.text_steps(1, 900).len(), 1, "there is no word to cut behind");
}
