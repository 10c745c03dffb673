//! Requests are recorded without their texts and can be sent to the same server again: tool calls, pictures
//! of each API and texts to fill in work as in the originals.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use warden_builder::sample_model::SamplePreset;
use warden_rig::real::{llama_server, model_lines, sample_model};
use warden_rig::warden::{CHAT, SOON, Setup};
use warden_rig::{Context as _, Home, Outcome, Trouble, Warden, binaries, wait_until};

use crate::sample_models::picture;

const PATIENCE: Duration = Duration::from_secs(240);

/// Words that a recording must not contain.
const SAID: [&str; 5] = ["secret", "weather", "Paris", "celsius", "rainy"];

/// Requests of each kind that a server handles; each contains a secret word.
fn requests() -> Vec<(&'static str, Value)> {
    let schema = json!({ "type": "object", "required": ["city"], "properties": {
        "city": { "type": "string", "description": "the secret city" },
        "unit": { "type": "string", "enum": ["celsius", "secret unit"] } } });
    let call = json!({ "name": "weather", "arguments": "{\"city\": \"Paris\", \"unit\": \"celsius\"}" });
    let image = picture(48, 200);
    let data = image.split_once(";base64,").map_or("", |(_, data)| data).to_owned();
    let looks = json!([{ "type": "text", "text": "what is the secret in this picture" },
        { "type": "image_url", "image_url": { "url": image } }]);
    vec![
        (
            "/infill",
            json!({ "input_prefix": "def secret(weather):\n    return ", "input_suffix": "\n# the end of the secret\n",
                "input_extra": [{ "filename": "secret.py", "text": "import secret\nsecret.secret()\n" }], "n_predict": 3 }),
        ),
        (
            CHAT,
            json!({ "max_tokens": 3, "ignore_eos": true, "tools": [{ "type": "function", "function": {
                    "name": "weather", "description": "tells the secret weather", "parameters": schema } }],
                "messages": [
                    { "role": "system", "content": "you know the weather and every secret" },
                    { "role": "user", "content": "how is the weather in Paris today" },
                    { "role": "assistant", "content": "", "tool_calls": [{ "id": "secret123", "type": "function", "function": call }] },
                    { "role": "tool", "tool_call_id": "secret123", "content": "rainy" },
                    { "role": "user", "content": "and tomorrow, is there a secret" } ] }),
        ),
        (
            CHAT,
            json!({ "max_tokens": 3, "ignore_eos": true, "stream": true, "messages": [{ "role": "user", "content": looks }] }),
        ),
        (
            "/v1/messages",
            json!({ "max_tokens": 3, "system": "a secret of mine", "tools": [{ "name": "weather", "input_schema": schema }],
                "messages": [
                    { "role": "user", "content": [
                        { "type": "image", "source": { "type": "base64", "media_type": "image/bmp", "data": data } },
                        { "type": "text", "text": "how is the weather in this picture" } ] },
                    { "role": "assistant", "content": [
                        { "type": "tool_use", "id": "toolu_secret", "name": "weather", "input": { "city": "Paris" } } ] },
                    { "role": "user", "content": [
                        { "type": "tool_result", "tool_use_id": "toolu_secret", "content": "rainy" } ] } ] }),
        ),
        (
            "/completion",
            json!({ "prompt": "a long secret about the weather that goes on and on", "n_predict": 3, "ignore_eos": true }),
        ),
    ]
}

/// A request that only a real server handles.
fn responses() -> (&'static str, Value) {
    let tool = json!({ "type": "function", "name": "weather", "parameters": { "type": "object", "properties": {} } });
    let items = json!([
        { "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "a secret about the weather" }] },
        { "type": "function_call", "call_id": "secret", "name": "weather", "arguments": "{\"city\": \"Paris\"}" },
        { "type": "function_call_output", "call_id": "secret", "output": "rainy" },
        { "role": "user", "content": "thank you, and the secret" } ]);
    ("/v1/responses", json!({ "input": items, "tools": [tool], "max_output_tokens": 3 }))
}

/// Sends all requests through a recording llama-warden; returns the recording and the statuses.
async fn recorded(
    warden: &mut Warden,
    file: &Path,
    all: &[(&str, Value)],
) -> Result<(String, Vec<u16>), Trouble> {
    warden.until_ready(1).await?;
    let mut answered = Vec::new();
    for (path, body) in all {
        let mut body = body.clone();
        body["model"] = json!("m");
        let answer = warden.http.post(path, &body).await?;
        answered.push(answer.status.as_u16());
    }
    let text = || std::fs::read_to_string(file).unwrap_or_default();
    wait_until("all are recorded", SOON, async || text().lines().count() >= all.len()).await?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    let text = text();
    for said in SAID {
        assert!(!text.contains(said), "{said}: {text}");
    }
    Ok((text, answered))
}

/// Replays these lines twice; returns the leg.
async fn replayed(home: &Home, server: &Path, lines: &str, flags: &[&str]) -> Result<Value, Trouble> {
    home.file("replayed.jsonl", lines)?;
    let (server, rounds) = (server.to_string_lossy(), (2 * lines.lines().count()).to_string());
    let args = [
        "diagnose",
        "--binary",
        &server,
        "--replay",
        "replayed.jsonl",
        "--requests",
        &rounds,
        "--json",
        "--",
    ];
    let ran = home.warden(args.iter().chain(flags), PATIENCE).await?;
    let mut report: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
    let mut leg = report["legs"][0].take();
    assert!(leg.is_object(), "{report}");
    leg["readings"] = Value::Null;
    Ok(leg)
}

/// Checks that original and recording cause the same work.
fn alike(original: &Value, redacted: &Value) {
    for what in ["requests", "images", "audio"] {
        assert_eq!(original["work"][what], redacted["work"][what], "{what}: {original} {redacted}");
    }
    // A model with random weights may end an answer at any token, and other words have other numbers of
    // tokens.
    for what in ["prompt_tokens", "output_tokens"] {
        let tokens = |leg: &Value| leg["work"][what].as_f64().unwrap_or_default();
        let ratio = tokens(redacted) / tokens(original);
        assert!((0.7..1.4).contains(&ratio), "{what}: {ratio} of {original}");
    }
    assert_eq!(original["refused"], redacted["refused"]);
}

fn lines(all: &[(&str, Value)]) -> String {
    let line = |(path, body): &(&str, Value)| json!({ "path": path, "body": body }).to_string();
    all.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[tokio::test]
async fn every_kind_of_request_can_be_replayed_and_is_the_same_work() -> Outcome {
    let setup = Setup::new()?.fake(
        "m",
        &json!({}),
        "args = [\"--mmproj\", \"p\"]\nrecord_requests = \"asked.jsonl\"\n",
    )?;
    let file = setup.home.path().join("asked.jsonl");
    let all = requests();
    let (recording, answered) = recorded(&mut setup.start().await?, &file, &all).await?;
    assert!(answered.iter().all(|status| *status == 200), "{answered:?}");
    let home = Home::new()?;
    home.file("model.gguf", "GGUF")?;
    let (fake, flags) =
        (binaries::fake_llama()?, ["-m", "model.gguf", "--mmproj", "model.gguf", "--cache-ram", "0"]);
    let original = replayed(&home, &fake, &lines(&all), &flags).await?;
    let redacted = replayed(&home, &fake, &recording, &flags).await?;
    assert_eq!(original["refused"], Value::Null, "{original}");
    assert_eq!(
        (&original["work"]["images"], &original["work"]["requests"]),
        (&json!(4), &json!(10)),
        "{original}"
    );
    alike(&original, &redacted);
    assert_eq!(original["work"]["output_tokens"], redacted["work"]["output_tokens"], "{original} {redacted}");
    Ok(())
}

#[tokio::test]
async fn a_real_server_takes_what_was_recorded_as_it_took_what_was_asked() -> Outcome {
    let (model, mmproj) = (sample_model(SamplePreset::Tools)?, sample_model(SamplePreset::Mmproj)?);
    let (model, mmproj) = (model.to_string_lossy().into_owned(), mmproj.to_string_lossy().into_owned());
    let plain = ["-np", "1", "-c", "4096", "-t", "1", "--cache-ram", "0", "--mmproj", &mmproj];
    let own = model_lines(SamplePreset::Tools, &plain).await?;
    let setup = Setup::new()?.model("m", &format!("{own}record_requests = \"asked.jsonl\"\n"));
    let file = setup.home.path().join("asked.jsonl");
    let all: Vec<(&str, Value)> = requests().into_iter().chain([responses()]).collect();
    let (recording, answered) = recorded(&mut setup.start().await?, &file, &all).await?;
    // This model has no tokens for filling in.
    assert_eq!(answered, [501, 200, 200, 200, 200, 200]);
    let home = Home::new()?;
    let flags: Vec<&str> = ["-m", &model].into_iter().chain(plain).collect();
    let server = llama_server().await?;
    let original = replayed(&home, &server, &lines(&all), &flags).await?;
    let redacted = replayed(&home, &server, &recording, &flags).await?;
    assert!(
        redacted["refused"]["why"].as_str().is_some_and(|why| why.contains("Infill is not supported")),
        "{redacted}"
    );
    assert!(redacted["work"]["images"].as_u64() >= Some(4), "{redacted}");
    alike(&original, &redacted);
    Ok(())
}

#[tokio::test]
async fn a_recording_that_the_server_refuses_altogether_is_told_and_one_that_it_takes_in_part_is_not_lost()
-> Outcome {
    let home = Home::new()?;
    home.file("model.gguf", "GGUF")?;
    let fake = binaries::fake_llama()?;
    let bad = ("/infill", json!({ "input_prefix": "a" }));
    let good = ("/completion", json!({ "prompt": "a b", "n_predict": 2 }));
    let mixed = lines(&[bad.clone(), bad.clone(), bad.clone(), bad.clone(), good]);
    let leg = replayed(&home, &fake, &mixed, &["-m", "model.gguf"]).await?;
    assert_eq!((&leg["steps"], &leg["work"]["requests"]), (&json!(10), &json!(10)), "{leg}");
    assert_eq!(leg["refused"]["requests"], 40, "{leg}");
    assert!(leg["refused"]["why"].as_str().is_some_and(|why| why.contains("input_suffix")), "{leg}");
    home.file("bad.jsonl", lines(&[bad]))?;
    let fake = fake.to_string_lossy();
    let args = ["diagnose", "--binary", &fake, "--replay", "bad.jsonl", "--", "-m", "model.gguf"];
    let ran = home.warden(args, PATIENCE).await?;
    assert!(ran.stdout.contains("not run: ") && ran.stdout.contains("input_suffix"), "{}", ran.all());
    Ok(())
}
