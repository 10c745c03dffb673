//! Requests that can be continued elsewhere, and the requests made from them.

use super::*;

fn wish(kind: AnswerFormat, own: &Value) -> Result<ContinuationRequest, NoContinuationReason> {
    let mut body = match kind {
        AnswerFormat::Chat => json!({ "messages": [{ "role": "user", "content": "hi" }], "stream": true }),
        _ => json!({ "prompt": "once", "stream": true }),
    };
    for (name, value) in own.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    ContinuationRequest::from_body(kind, body.to_string().as_bytes())
}

fn settings(own: &Value) -> Value {
    let mut all = json!({
        "grammar": "", "grammar_lazy": false, "grammar_triggers": [], "preserved_tokens": [], "mirostat": 0,
        "adaptive_target": -1.0, "n_probs": 0, "stop": ["<|im_end|>"],
    });
    for (name, value) in own.as_object().into_iter().flatten() {
        all[name] = value.clone();
    }
    let told = json!({ "generation_settings": all, "tokens_evaluated": 22, "content": "a b" });
    json!({ "__verbose": told, "choices": [{ "message": { "role": "assistant", "content": "a b" } }] })
}

fn plain() -> ProbedSettings {
    ProbedSettings::from_probe(AnswerFormat::Chat, settings(&json!({})).to_string().as_bytes()).unwrap()
}

fn rest(wish: &ContinuationRequest, rendered: Option<&str>, said: &[u32]) -> Value {
    serde_json::from_slice(&wish.rest_request(&plain(), rendered.map(str::to_owned), said, "")).unwrap()
}

#[test]
fn what_is_not_known_to_change_nothing_is_not_continued() {
    let harmless = [
        json!({ "temperature": 0.7, "top_p": 0.9, "seed": 3, "logit_bias": [[5, 1.0]], "user": "u", "metadata": {} }),
        json!({ "n": 1, "logprobs": false, "tools": [], "response_format": { "type": "text" }, "grammar": "" }),
        json!({ "stop": ["x"], "stream_options": { "include_usage": true }, "chat_template_kwargs": { "a": 1 } }),
        json!({ "something_new": null, "echo": false, "continue_final_message": false }),
    ];
    for own in harmless {
        assert!(wish(AnswerFormat::Chat, &own).is_ok(), "{own}: {:?}", wish(AnswerFormat::Chat, &own).err());
    }
    let harmful = [
        json!({ "n": 2 }),
        json!({ "logprobs": true }),
        json!({ "tools": [{ "type": "function" }] }),
        json!({ "tool_choice": "required" }),
        json!({ "grammar": 1 }),
        json!({ "json_schema": "object" }),
        json!({ "grammar_type": "tool_calls" }),
        json!({ "response_format": { "type": "text", "schema": {} } }),
        json!({ "response_format": { "type": "regex" } }),
        json!({ "mirostat": 2 }),
        json!({ "n_probs": 3 }),
        json!({ "something_new": 1 }),
        json!({ "something_new": false }),
        json!({ "something_new": [] }),
        json!({ "add_generation_prompt": false }),
        json!({ "continue_final_message": true }),
        json!({ "max_tokens": 5, "n_predict": 6 }),
        json!({ "max_tokens": "5" }),
        json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }] }),
        json!({ "messages": [{ "role": "assistant", "content": "Sure," }] }),
        json!({ "messages": [] }),
        json!({ "messages": "text" }),
    ];
    for own in harmful {
        assert!(wish(AnswerFormat::Chat, &own).is_err(), "{own}");
    }
    for own in [
        json!({ "prompt": ["a", "b"] }),
        json!({ "prompt": { "prompt_string": "a", "multimodal_data": [] } }),
        json!({ "prompt": null }),
    ] {
        assert!(wish(AnswerFormat::Native, &own).is_err(), "{own}");
    }
    assert!(wish(AnswerFormat::Native, &json!({ "prompt": [1, "a", 2] })).is_ok());
    assert!(
        ContinuationRequest::from_body(AnswerFormat::Chat, b"[1]").is_err()
            && ContinuationRequest::from_body(AnswerFormat::Chat, b"").is_err()
    );
}

#[test]
fn the_probe_asks_for_a_few_tokens_and_all_settings() {
    let wish = wish(
        AnswerFormat::Chat,
        &json!({ "max_completion_tokens": 9, "stream_options": { "include_usage": true }, "top_k": 3 }),
    )
    .unwrap();
    let probe: Value = serde_json::from_slice(&wish.probe_request()).unwrap();
    assert_eq!(
        (&probe["stream"], &probe["verbose"], &probe["max_tokens"], &probe["n_predict"]),
        (&json!(false), &json!(true), &json!(PROBE_TOKENS), &json!(PROBE_TOKENS))
    );
    assert_eq!((&probe["top_k"], &probe["messages"][0]["content"]), (&json!(3), &json!("hi")));
    // llama-server refuses stream options if no stream is requested.
    assert!(probe.get("stream_options").is_none() && probe.get("max_completion_tokens").is_none());
    assert_eq!((wish.limit, wish.wants_usage), (Some(9), true));
}

#[test]
fn the_rest_has_what_was_delivered_behind_the_prompt_and_as_many_tokens_as_are_left() {
    let wish =
        wish(AnswerFormat::Chat, &json!({ "max_tokens": 10, "temperature": 0.5, "user": "u" })).unwrap();
    let asked = rest(&wish, Some("<user>hi<assistant>"), &[4, 5, 6]);
    assert_eq!(asked["prompt"], json!(["<user>hi<assistant>", 4, 5, 6]));
    assert_eq!(
        (&asked["n_predict"], &asked["temperature"], &asked["stream"]),
        (&json!(7), &json!(0.5), &json!(true))
    );
    assert_eq!(asked["stop"], json!(["<|im_end|>"]), "a template's own");
    assert!(["user", "messages", "max_tokens"].iter().all(|name| asked.get(name).is_none()), "{asked}");
    // Otherwise its last event repeats the prompt, which may be larger than the limit for one event.
    assert_eq!(asked["response_fields"], json!(LAST_EVENT_FIELDS));
    // No token is left: one is computed and thrown away.
    assert_eq!(rest(&wish, Some("P"), &[1; 10])["n_predict"], 1);
    let endless = self::wish(AnswerFormat::Native, &json!({ "prompt": [7, "a"], "stop": "x" })).unwrap();
    let asked = rest(&endless, None, &[8]);
    assert_eq!((&asked["prompt"], &asked["stop"]), (&json!([7, "a", 8]), &json!("x")));
    assert!(asked.get("n_predict").is_none());
    assert!(asked.get("response_fields").is_none(), "the client gets all of it");
    assert_eq!(rest(&endless, None, &[])["prompt"], json!([7, "a"]));
}

#[test]
fn what_has_a_state_of_its_own_is_not_continued() {
    for own in [
        json!({ "grammar_lazy": true }),
        json!({ "grammar_triggers": [{}] }),
        json!({ "mirostat": 1 }),
        json!({ "adaptive_target": 0.4 }),
        json!({ "n_probs": 1 }),
        json!({ "preserved_tokens": ["<think>"] }),
    ] {
        assert!(
            ProbedSettings::from_probe(AnswerFormat::Chat, settings(&own).to_string().as_bytes()).is_err(),
            "{own}"
        );
    }
    for odd in ["", "{}", "[]", "{\"__verbose\":{}}", "{\"__verbose\":{\"generation_settings\":{}}}"] {
        assert!(ProbedSettings::from_probe(AnswerFormat::Chat, odd.as_bytes()).is_err(), "{odd}");
    }
    let own = settings(&json!({ "preserved_tokens": [3, 4] }));
    let of_native =
        ProbedSettings::from_probe(AnswerFormat::Native, own["__verbose"].to_string().as_bytes()).unwrap();
    assert_eq!((of_native.prompt, of_native.marks), (22, vec![3, 4]));
}

#[test]
fn a_build_that_takes_something_out_of_what_the_model_says_is_found_out() {
    let with = |raw: &str, message: Value| {
        let mut answer = settings(&json!({}));
        answer["__verbose"]["content"] = json!(raw);
        answer["choices"][0]["message"] = message;
        ProbedSettings::from_probe(AnswerFormat::Chat, answer.to_string().as_bytes())
    };
    for whole in [
        with("a", json!({ "content": "a" })),
        with("", json!({ "content": null })),
        with("a", json!({ "content": "a", "reasoning_content": null, "tool_calls": [] })),
    ] {
        assert!(whole.is_ok(), "{:?}", whole.err());
    }
    for (raw, message) in [
        (" a", json!({ "content": "a" })),
        ("<think>\n\n</think>\n\na", json!({ "content": "a" })),
        ("all\na", json!({ "content": "a" })),
        ("a", json!({ "content": null })),
        ("a", json!({ "content": "a", "reasoning_content": "b" })),
        ("a", json!({ "content": "a", "tool_calls": [{}] })),
        ("a", json!({ "content": ["a"] })),
        ("a", json!({})),
    ] {
        let told = with(raw, message.clone()).map(|_| ()).unwrap_err();
        assert!(told.contains("removes parts"), "{raw} {message}: {told}");
    }
}

#[test]
fn a_thought_that_may_have_come_before_is_not_passed_over() {
    let with = |own: Value| {
        ProbedSettings::from_probe(AnswerFormat::Chat, settings(&own).to_string().as_bytes()).unwrap()
    };
    let (drawn, greedy) = (with(json!({ "temperature": 0.7 })), with(json!({ "temperature": 0.0 })));
    let first = with(json!({ "temperature": 0.7, "top_k": 1 }));
    for (settings, marks, prompt, hides) in [
        (&drawn, "<think></think>", "<user>hi<assistant>", true),
        (&drawn, "", "<user>hi<assistant>a</think>b<user>so<assistant>", true),
        (&drawn, "<think></think>", "<user>hi<assistant><think>\n\n</think>\n\n", false),
        (&drawn, "", "<user>hi<assistant>", false),
        // The probe gave the same answer.
        (&greedy, "<think></think>", "<user>hi<assistant>", false),
        (&first, "<think></think>", "<user>hi<assistant>", false),
    ] {
        assert_eq!(settings.may_hide_thought(marks, prompt), hides, "{marks} {prompt} {settings:?}");
    }
}

#[test]
fn a_grammar_is_put_where_the_text_is_and_that_is_measured() {
    let told = settings(&json!({ "grammar": "root ::= x", "generation_prompt": "<a>\n" })).to_string();
    let told = ProbedSettings::from_probe(AnswerFormat::Chat, told.as_bytes()).unwrap();
    assert!(told.has_shape() && !plain().has_shape());
    let read = |body: Vec<u8>| serde_json::from_slice::<Value>(&body).unwrap();
    let schema =
        wish(AnswerFormat::Chat, &json!({ "response_format": { "type": "json_object" }, "max_tokens": 9 }))
            .unwrap();
    assert!(schema.is_shaped());
    let rest = read(schema.rest_request(&told, Some("P".to_owned()), &[5, 6], "{\"a\\\t漢"));
    assert_eq!(
        (&rest["grammar"], &rest["grammar_type"], &rest["generation_prompt"], &rest["n_predict"]),
        (&json!("root ::= x"), &json!("tool_calls"), &json!("<a>\n{\"a\\\t漢"), &json!(7))
    );
    assert!(rest.get("response_format").is_none());
    let measure = read(schema.grammar_test(&told, Some("P".to_owned()), &[5, 6], "{\"a\\\t漢").unwrap());
    assert_eq!(measure["grammar"], "root ::= \"<a>\\x0A{\\\"a\\\\\\x09漢\" \"q\"");
    assert_eq!((&measure["stream"], &measure["prompt"]), (&json!(false), &json!(["P", 5, 6])));
    assert_eq!(measure["generation_prompt"], rest["generation_prompt"]);
    // A client's own grammar does not cover the text with which the template begins the answer.
    let own = wish(AnswerFormat::Chat, &json!({ "grammar": "root ::= x" })).unwrap();
    assert_eq!(read(own.rest_request(&told, Some("P".to_owned()), &[5], "t"))["generation_prompt"], "t");
    let none = wish(AnswerFormat::Chat, &json!({})).unwrap();
    assert!(!none.is_shaped() && none.grammar_test(&plain(), None, &[], "t").is_none());
    let answer = |content: &str, end: &str| json!({ "content": content, "stop_type": end }).to_string();
    assert!(is_grammar_in_place(answer("q", "eos").as_bytes()));
    for (content, end) in [("<a>", "limit"), ("q", "limit"), ("", "eos")] {
        assert!(!is_grammar_in_place(answer(content, end).as_bytes()), "{content} {end}");
    }
    assert!(!is_grammar_in_place(b"{}") && !is_grammar_in_place(b""));
}
