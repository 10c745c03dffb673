//! Promise: with `cancel = "assemble"`, an answer assembled from a real llama-server's stream equals the
//! answer without a stream, and a client that leaves frees its slot although another stream runs.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;
use warden_builder::sample_model::SamplePreset;
use warden_rig::real::{REPRODUCIBLE, llama_server_plain, sample_model};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden, wait_until};

/// Fields that differ from run to run.
const VOLATILE: [&str; 7] = ["id", "created", "created_at", "completed_at", "timings", "id_slot", "call_id"];

/// Starts llama-warden with an unpatched llama-server; also returns a client of that server.
async fn started(preset: SamplePreset) -> Result<(Warden, Http), Trouble> {
    let mut flags = vec!["-np", "2", "-c", "16384", "--cache-ram", "0", "--metrics"];
    flags.extend(REPRODUCIBLE);
    let lines = format!(
        "binary = '{}'\nmodel = '{}'\nargs = {}\npreload = true\ncancel = \"assemble\"\n",
        llama_server_plain().await?.display(),
        sample_model(preset)?.display(),
        json!(flags)
    );
    let warden = Setup::new()?.model("m", &lines).start().await?;
    let backend = warden.until_ready(1).await?[0];
    let direct = Http::Unix(backend.socket().context("no socket")?);
    Ok((warden, direct))
}

/// Replaces the fields that differ from run to run, but keeps their names.
fn settled(value: Value) -> Value {
    match value {
        Value::Object(fields) => Value::Object(
            fields
                .into_iter()
                .map(|(name, value)| {
                    let value = if VOLATILE.contains(&name.as_str()) { json!("*") } else { settled(value) };
                    (name, value)
                })
                .collect(),
        ),
        Value::Array(all) => Value::Array(all.into_iter().map(settled).collect()),
        other => other,
    }
}

fn questions() -> Vec<(&'static str, Value)> {
    let parameters =
        json!({ "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"] });
    let tools = json!([{ "type": "function", "function": { "name": "weather", "parameters": parameters } }]);
    let mut all = Vec::new();
    for words in ["hello", "tell me a story", "Ünïcödé — 漢字 😀", "{\"a\": [1, 2]}"] {
        for tokens in [1, 7, 60] {
            let asked = |own: Value| {
                let mut body = json!({ "model": "m", "temperature": 0, "seed": 7 });
                for (name, value) in own.as_object().into_iter().flatten() {
                    body[name] = value.clone();
                }
                body
            };
            let messages = json!([{ "role": "user", "content": words }]);
            all.extend([
                (CHAT, asked(json!({ "messages": messages, "max_tokens": tokens }))),
                (CHAT, asked(json!({ "messages": messages, "max_tokens": tokens, "tools": tools }))),
                (CHAT, asked(json!({ "messages": messages, "max_tokens": tokens, "tools": tools, "tool_choice": "required" }))),
                (CHAT, asked(json!({ "messages": messages, "max_tokens": tokens, "n": 2 }))),
                ("/completion", asked(json!({ "prompt": words, "n_predict": tokens }))),
                ("/completion", asked(json!({ "prompt": words, "n_predict": tokens, "n_probs": 2, "temperature": 1.1 }))),
                ("/completion", asked(json!({ "prompt": [words, "and"], "n_predict": tokens }))),
                ("/v1/completions", asked(json!({ "prompt": words, "max_tokens": tokens, "logprobs": 2 }))),
                ("/v1/responses", asked(json!({ "input": words, "max_output_tokens": tokens }))),
                ("/v1/messages", asked(json!({ "messages": messages, "max_tokens": tokens }))),
            ]);
        }
    }
    all.push((CHAT, json!({ "model": "m", "messages": "no list" })));
    all.push(("/completion", json!({ "model": "m" })));
    all.push((
        CHAT,
        json!({ "model": "m", "messages": [{ "role": "user", "content": "long ".repeat(20_000) }] }),
    ));
    all
}

#[tokio::test]
async fn an_answer_put_together_is_the_one_that_llama_server_gives() -> Outcome {
    for preset in [SamplePreset::Chat, SamplePreset::Tools, SamplePreset::Ends] {
        let (warden, direct) = started(preset).await?;
        for (route, body) in questions() {
            // The first run fills the prompt cache, as the other two runs find it.
            direct.post(route, &body).await?;
            let wanted = direct.post(route, &body).await?;
            let came = warden.http.post(route, &body).await?;
            assert_eq!(came.status, wanted.status, "{route} {body}");
            let (came, wanted) = (settled(came.json()?), settled(wanted.json()?));
            // Compared as texts, because the order of the fields counts.
            assert_eq!(came.to_string(), wanted.to_string(), "{preset:?} {route} {body}");
        }
    }
    Ok(())
}

/// Number of requests that the server processes.
async fn busy(direct: &Http) -> Option<u64> {
    let text = direct.get("/metrics").await.ok()?.text();
    let line = text.lines().find(|line| line.starts_with("llamacpp:requests_processing "))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_slot_although_a_stream_runs() -> Outcome {
    let (warden, direct) = started(SamplePreset::Slow).await?;
    let mut flow = warden.http.stream(CHAT, &chat("-", "m", "go on", 8000, true)).await?;
    let mut reader = JoinSet::new();
    reader.spawn(async move { while let Ok(Some(_)) = flow.event().await {} });
    wait_until("the stream runs", SOON, async || busy(&direct).await == Some(1)).await?;
    for _ in 0..3 {
        let mut client = JoinSet::new();
        let own = warden.http.clone();
        client.spawn(async move { own.post(CHAT, &chat("-", "m", "go on", 8000, false)).await.map(drop) });
        wait_until("both work", SOON, async || busy(&direct).await == Some(2)).await?;
        client.shutdown().await;
        // The generation would run for minutes.
        wait_until("its slot is free", Duration::from_secs(10), async || busy(&direct).await == Some(1))
            .await?;
    }
    Ok(())
}
