//! Redacted requests contain no original text, and a server still accepts them.

use super::*;

fn redacted(body: &Value) -> Value {
    let line =
        Redactor::new().redact_line("POST", "/v1/chat/completions?who=me", body.to_string().as_bytes());
    serde_json::from_str(&line.unwrap()).unwrap()
}

#[test]
fn nothing_that_was_said_is_left_and_all_that_decides_is() {
    let picture = format!("data:image/png;base64,{}", media::encode_picture((31, 17)));
    let body = json!({
        "model": "secret-model", "user": "secret-user", "metadata": { "secret": 1 }, "max_tokens": 32, "stream": true,
        "stop": ["secret"], "secret": 7, "tool_choice": "secret", "stream_options": { "include_usage": true },
        "messages": [
            { "role": "system", "content": "a secret as long as this one", "name": "secret" },
            { "role": "user", "content": [
                { "type": "text", "text": "secret" },
                { "type": "image_url", "image_url": { "url": picture, "detail": "secret" } },
                { "type": "input_audio", "input_audio": { "data": "c2VjcmV0", "format": "wav" } } ] },
            { "role": "assistant", "content": null, "tool_calls": [
                { "id": "secret", "type": "function", "function": { "name": "secret", "arguments": "{secret}" } } ] },
        ],
        "tools": [{ "type": "function", "function": { "name": "secret", "parameters": { "properties": { "secret": {} } } } }],
    });
    let line = redacted(&body);
    assert!(!line.to_string().contains("secret") && !line.to_string().contains("c2VjcmV0"), "{line}");
    let kept = &line["body"];
    assert_eq!(line["path"], "/v1/chat/completions");
    assert_eq!((&kept["max_tokens"], &kept["stream"]), (&json!(32), &json!(true)));
    assert_eq!(kept["stream_options"], json!({ "include_usage": true }));
    assert_eq!(kept["messages"][0]["role"], "system");
    let length = "a secret as long as this one".len();
    assert_eq!(kept["messages"][0]["content"].as_str().unwrap().len(), length);
    let url = kept["messages"][1]["content"][1]["image_url"]["url"].as_str().unwrap().to_owned();
    assert_eq!(media::picture_size(url.split_once(";base64,").unwrap().1), Some((31, 17)));
    assert_eq!(kept["tools"].as_array().unwrap().len(), 1);
}

#[test]
fn the_same_text_becomes_the_same_other_text_and_each_run_makes_another() {
    let body =
        json!({ "prompt": "a text that comes again", "input": ["a text that comes again", "another"] });
    let line = redacted(&body);
    assert_eq!(line["body"]["prompt"], line["body"]["input"][0]);
    assert_ne!(line["body"]["prompt"], body["prompt"]);
    let other = Redactor::new().redact_line("POST", "/a", body.to_string().as_bytes()).unwrap();
    assert!(!other.contains(line["body"]["prompt"].as_str().unwrap()));
}

#[test]
fn tokens_become_others_that_hang_on_those_before_them() {
    let line = redacted(&json!({ "prompt": [7, 7, 9], "input": [[7, 7, 8], [9]] }));
    let (all, other) = (&line["body"]["prompt"], &line["body"]["input"][0]);
    assert_eq!((&all[0], &all[1]), (&other[0], &other[1]), "what they begin with stays common");
    assert_eq!((all.as_array().unwrap().len(), line["body"]["input"][1].as_array().unwrap().len()), (3, 1));
    assert!(
        all[0] != all[1] || all[2] != line["body"]["input"][1][0],
        "no token has a stand-in of its own: {line}"
    );
}

#[test]
fn a_request_that_would_make_more_than_anybody_sends_is_not_recorded() {
    let part = json!({ "type": "input_audio", "input_audio": { "data": "" } });
    let body = json!({ "messages": [{ "role": "user", "content": vec![part; 100_000] }] }).to_string();
    assert_eq!(Redactor::new().redact_line("POST", "/a", body.as_bytes()), None);
    let huge = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAEAAAABAA";
    let part = json!({ "type": "image_url", "image_url": { "url": huge } });
    let body = json!({ "messages": [{ "role": "user", "content": vec![part; 5000] }] }).to_string();
    assert_eq!(Redactor::new().redact_line("POST", "/a", body.as_bytes()), None);
    assert!(Redactor::new().redact_line("POST", "/a", b"{}").is_some());
}

#[test]
fn a_line_is_never_much_longer_than_its_request() {
    let deep = format!("{}{}1{}\n", "[".repeat(120), "1,".repeat(50_000), "]".repeat(120));
    for body in [json!({ "prompt": deep }), json!({ "messages": [{ "role": "user", "content": deep }] })] {
        let body = body.to_string();
        let line = Redactor::new().redact_line("POST", "/a", body.as_bytes()).unwrap();
        assert!(line.len() < body.len() * 2 + 200, "{} of {}", line.len(), body.len());
    }
}

#[test]
fn numbers_that_name_somebody_are_made_up_and_those_of_adapters_are_kept() {
    let body = json!({
        "query": "a", "documents": [{ "id": 31_415_926, "text": "b" }], "messages": [{ "role": "user", "id": 31_415_926 }],
        "scale": 31_415_926, "lora": [{ "id": 2, "scale": 0.5, "name": "secret" }],
    });
    let line = redacted(&body);
    assert!(!line.to_string().contains("31415926"), "{line}");
    let id = &line["body"]["documents"][0]["id"];
    assert_eq!((id.to_string().len(), id), (8, &line["body"]["messages"][0]["id"]));
    assert_eq!(line["body"]["lora"], json!([{ "id": 2, "scale": 0.5 }]));
}

#[test]
fn what_is_no_object_is_not_recorded_and_neither_is_what_nobody_can_make() {
    let line = |body: &str| Redactor::new().redact_line("POST", "/a", body.as_bytes());
    assert_eq!((line("[1]"), line("text")), (None, None));
    let video = r#"{"messages": [{"role": "user", "content": [{"type": "input_video", "input_video": {"data": ""}}]}]}"#;
    let prompt = r#"{"prompt": {"prompt_string": "<__media__>", "multimodal_data": ["aGk="]}}"#;
    assert_eq!((line(video), line(prompt)), (None, None));
}

/// Redacts a body whose sensitive texts all contain `secret`.
fn without_secrets(body: &Value) -> Value {
    let line = redacted(body);
    let text = line.to_string();
    assert!(!text.contains("secret"), "{text}");
    line["body"].clone()
}

#[test]
fn calls_of_tools_keep_what_a_server_insists_on_and_names_that_belong_together() {
    let schema = json!({ "type": "object", "properties": { "secret_city": { "type": "string" } }, "required": ["secret_city"] });
    let call = json!({ "name": "secret_tool", "arguments": r#"{"secret_city": "secret", "days": 12}"# });
    let body = without_secrets(&json!({
        "messages": [
            { "role": "user", "content": "secret" },
            { "role": "assistant", "content": null, "tool_calls": [{ "id": "secret123", "type": "function", "function": call }] },
            { "role": "tool", "tool_call_id": "secret123", "name": "secret_tool", "content": r#"{"secret": [1, 2]}"# },
        ],
        "tools": [{ "type": "function", "function": { "name": "secret_tool", "description": "a secret", "parameters": schema, "strict": true } }],
        "tool_choice": { "type": "function", "function": { "name": "secret_tool" } },
        "response_format": { "type": "json_schema", "json_schema": { "name": "secret", "strict": true, "schema": schema } },
        "chat_template_kwargs": { "enable_thinking": false, "secret": "secret" },
    }));
    let call = &body["messages"][1]["tool_calls"][0];
    let (name, id) = (&call["function"]["name"], &call["id"]);
    assert_eq!((name.as_str().unwrap().len(), id.as_str().unwrap().len()), (11, 9));
    assert_eq!((&body["messages"][2]["name"], &body["messages"][2]["tool_call_id"]), (name, id));
    let tool = &body["tools"][0]["function"];
    assert_eq!((&tool["name"], &body["tool_choice"]["function"]["name"]), (name, name));
    let given: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    let wanted = &tool["parameters"]["required"][0];
    assert_eq!(given[wanted.as_str().unwrap()].as_str().unwrap().len(), 6, "{given} has {wanted}");
    let result: Value = serde_json::from_str(body["messages"][2]["content"].as_str().unwrap()).unwrap();
    assert!(result.is_object(), "{result}");
    assert_eq!(body["response_format"]["json_schema"]["schema"], tool["parameters"]);
    assert_eq!(body["chat_template_kwargs"], json!({ "enable_thinking": false }));
}

#[test]
fn messages_of_anthropic_keep_their_pictures_and_their_tools() {
    let picture = media::encode_picture((31, 17));
    let source = json!({ "type": "base64", "media_type": "image/jpeg", "data": picture });
    let input = json!({ "secret_city": "secret", "more": { "secret": [true, null, 3] } });
    let body = without_secrets(&json!({
        "model": "secret", "max_tokens": 16, "stop_sequences": ["secret"], "metadata": { "user_id": "secret" },
        "system": [{ "type": "text", "text": "a secret", "cache_control": { "type": "secret" } }],
        "thinking": { "type": "enabled", "budget_tokens": 1024 },
        "messages": [
            { "role": "user", "content": [{ "type": "image", "source": source }, { "type": "text", "text": "a secret" }] },
            { "role": "assistant", "content": [
                { "type": "thinking", "thinking": "a secret", "signature": "secret" },
                { "type": "tool_use", "id": "toolu_secret", "name": "secret_tool", "input": input } ] },
            { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "toolu_secret", "content": [
                { "type": "text", "text": "secret" },
                { "type": "image", "source": { "type": "url", "url": "https://secret/cat.png" } } ] }] },
        ],
        "tools": [{ "name": "secret_tool", "input_schema": { "type": "object", "properties": { "secret_city": {} } } }],
        "tool_choice": { "type": "tool", "name": "secret_tool" },
    }));
    let said = &body["messages"];
    assert_eq!(said[0]["content"][0]["source"]["media_type"], "image/png");
    assert_eq!(
        media::picture_size(said[0]["content"][0]["source"]["data"].as_str().unwrap()),
        Some((31, 17))
    );
    assert_eq!(said[1]["content"][0]["thinking"].as_str().unwrap().len(), 8);
    let call = &said[1]["content"][1];
    assert_eq!((&call["type"], &call["name"]), (&json!("tool_use"), &body["tools"][0]["name"]));
    let city = body["tools"][0]["input_schema"]["properties"].as_object().unwrap().keys().next().unwrap();
    assert_eq!(call["input"][city].as_str().unwrap().len(), 6, "{call}");
    let result = &said[2]["content"][0];
    assert_eq!((&result["type"], &result["tool_use_id"]), (&json!("tool_result"), &call["id"]));
    assert_eq!(result["content"][1]["source"]["type"], "base64", "nothing is fetched from anywhere");
    assert_eq!(body["tool_choice"], json!({ "type": "tool", "name": body["tools"][0]["name"] }));
    assert_eq!(
        (&body["thinking"]["budget_tokens"], &body["system"][0]["type"]),
        (&json!(1024), &json!("text"))
    );
}

#[test]
fn responses_and_infill_keep_their_items_their_beginnings_and_their_ends() {
    let body = without_secrets(&json!({
        "instructions": "a secret", "max_output_tokens": 8, "previous_response_id": "secret", "reasoning": { "effort": "low" },
        "input": [
            { "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "secret" },
                { "type": "input_image", "image_url": "https://secret" }] },
            { "type": "function_call", "call_id": "secret", "name": "secret_tool", "arguments": "{\"secret\": 1}" },
            { "type": "function_call_output", "call_id": "secret", "output": "a secret" },
        ],
        "tools": [{ "type": "function", "name": "secret_tool", "parameters": { "type": "object" } }],
    }));
    let (call, result) = (&body["input"][1], &body["input"][2]);
    assert!(
        body["input"][0]["content"][1]["image_url"]
            .as_str()
            .unwrap()
            .starts_with("data:image/png;base64,iVBOR")
    );
    assert_eq!((&call["name"], &call["call_id"]), (&body["tools"][0]["name"], &result["call_id"]));
    assert!(serde_json::from_str::<Value>(call["arguments"].as_str().unwrap()).unwrap().is_object());
    assert_eq!(
        (result["output"].as_str().unwrap().len(), &body["reasoning"]),
        (8, &json!({ "effort": "low" }))
    );

    let body = without_secrets(&json!({
        "input_prefix": "def secret():", "input_suffix": "secret", "prompt": "",
        "input_extra": [{ "filename": "secret.py", "text": "import secret" }], "t_max_predict_ms": 500,
    }));
    let length = |value: &Value| value.as_str().unwrap().len();
    let extra = &body["input_extra"][0];
    assert_eq!(
        [length(&body["input_prefix"]), length(&body["input_suffix"]), length(&body["prompt"])],
        [13, 6, 0]
    );
    assert_eq!([length(&extra["filename"]), length(&extra["text"])], [9, 13]);
    assert_eq!(body["t_max_predict_ms"], 500);
}

#[test]
fn numbers_among_texts_are_tokens_and_sounds_say_what_they_are() {
    let body =
        without_secrets(&json!({ "prompt": [151_644, "a secret", 9], "lora": [{ "id": 0, "scale": 0.5 }] }));
    assert!(
        body["prompt"][0].as_u64().unwrap() < 1003 && body["prompt"][1].as_str().unwrap().len() == 8,
        "{body}"
    );
    assert_eq!(body["lora"], json!([{ "id": 0, "scale": 0.5 }]));
    let part = json!({ "type": "input_audio", "input_audio": { "url": "https://secret", "format": "mp3" } });
    let body = without_secrets(&json!({ "messages": [{ "role": "user", "content": [part] }] }));
    let sound = &body["messages"][0]["content"][0]["input_audio"];
    assert!(sound["format"] == "wav" && sound["data"].as_str().unwrap().starts_with("UklGR"), "{body}");
}
