//! Continues answers of a trained, quantised model: SmolLM2 is killed within a sentence, on each route, and
//! under a schema.

use warden_rig::real::model_lines_of;
use warden_rig::real_weights::{self, is_sentence};

use super::*;

/// A request for each route and form, and the number of events before the kill.
fn requests() -> [(&'static str, &'static str, usize, Value); 6] {
    let content = "Explain in two sentences why the sky is blue.";
    let messages = json!([{ "role": "user", "content": content }]);
    let with = |own: Value| {
        let mut body = json!({ "model": "m", "stream": true, "temperature": 0 });
        for (name, value) in own.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        body
    };
    let city = json!({ "type": "object", "required": ["city", "country"], "properties": {
        "city": { "type": "string", "maxLength": 24 }, "country": { "type": "string", "maxLength": 24 } } });
    let format = json!({ "type": "json_schema", "json_schema": { "schema": city } });
    let question = json!([{ "role": "user", "content": "What is the capital of France?" }]);
    [
        ("a text", CHAT, 12, with(json!({ "messages": messages, "max_tokens": 32 }))),
        (
            "a text",
            "/v1/completions",
            9,
            with(json!({ "prompt": "Once upon a time, there was a little girl who", "max_tokens": 24 })),
        ),
        (
            "a text",
            "/completion",
            9,
            with(json!({ "prompt": "Once upon a time, there was a little girl who", "n_predict": 24 })),
        ),
        ("a text", "/v1/messages", 12, with(json!({ "messages": messages, "max_tokens": 32 }))),
        ("a text", "/v1/responses", 12, with(json!({ "input": content, "max_output_tokens": 32 }))),
        (
            "a schema",
            CHAT,
            8,
            with(json!({ "messages": question, "max_tokens": 96, "response_format": format })),
        ),
    ]
}

#[tokio::test]
async fn killed_in_the_middle_of_a_sentence_a_model_with_trained_weights_ends_it() -> Outcome {
    let Some(model) = real_weights::smollm2().await? else { return Ok(()) };
    let mut flags = vec!["-np", "1", "-c", "2048", "--cache-ram", "0"];
    flags.extend(REPRODUCIBLE);
    let lines = model_lines_of(&model, &flags).await? + GOING_ON;
    let warden = Setup::new()?.top("log.children = false").model("m", &lines).start().await?;
    warden.until_ready(1).await?;
    let all = requests();
    for (what, path, kill_at, body) in &all {
        let wanted = asked(&warden, path, body, None).await?;
        assert!(wanted.error.is_none() && wanted.ends.len() == 1, "{path}, {what}: {wanted:?}");
        let heard = asked(&warden, path, body, Some(*kill_at)).await?;
        assert_eq!(heard, wanted, "{path}, {what}, killed at event {kill_at}");
        match *what {
            "a text" => assert!(heard.text.len() > 20, "{path}: {heard:?}"),
            _ => assert!(serde_json::from_str::<Value>(&heard.text).is_ok(), "{heard:?}"),
        }
    }
    let continued = warden.metric("llama_warden_requests_continued_total{model=\"m\"}").await?;
    assert_eq!(continued, Some(6.0));
    let answer = asked(&warden, CHAT, &all[0].3, None).await?;
    assert!(is_sentence(&format!("{}.", answer.text.trim_end_matches(['.', ' ']))), "{answer:?}");
    Ok(())
}
