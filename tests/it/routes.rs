//! Every route of llama-server gives the same answer through llama-warden, for the model that the request
//! names. Rules change the routes that they name, and a reload applies new rules.

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Method, Request};
use serde_json::{Value, json};
use warden_builder::sample_model::SamplePreset;
use warden_rig::real::model_lines;
use warden_rig::warden::{CHAT, SOON, Setup};
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden, wait_until};

async fn echoed(warden: &Warden, target: &str, body: &str) -> Result<Value, Trouble> {
    let request = Request::post(target).body(Full::new(Bytes::copy_from_slice(body.as_bytes())))?;
    warden.http.send(request).await?.json()
}

#[tokio::test]
async fn models_with_slashes_are_reached_by_every_way_to_name_them() -> Outcome {
    let setup = Setup::new()?.fake("org/a", &json!({}), "aliases = [\"nick\"]\n")?;
    let warden = setup.fake("b", &json!({}), "preload = false\n")?.start().await?;
    warden.until_ready(1).await?;
    for target in [
        "/props?model=org/a",
        "/props?model=org%2Fa",
        "/upstream/org/a/props",
        "/upstream/org%2Fa/props",
        "/upstream/nick/props",
    ] {
        let answer = warden.http.get(target).await?;
        assert!(
            answer.status.is_success() && answer.json()?["total_slots"] == 4,
            "{target}: {}",
            answer.text()
        );
    }
    let echo = echoed(&warden, "/upstream/org/a/fake/echo?x=%20y&model=b", "{\"model\":\"b\"}").await?;
    assert_eq!(echo["target"], "/fake/echo?x=%20y&model=b", "path and query are as they were");
    let one = warden.http.get("/v1/models/org%2Fa").await?.json()?;
    assert_eq!((&one["id"], &one["status"]["value"]), (&json!("org/a"), &json!("loaded")));
    assert!(one["meta"]["n_ctx"].as_u64().is_some(), "{one}");
    let running = warden.http.get("/running").await?.json()?;
    let [process] = running["running"].as_array().context("no list")?.as_slice() else {
        panic!("one process runs: {running}")
    };
    assert_eq!((&process["model"], &process["state"]), (&json!("org/a"), &json!("ready")), "{running}");
    let unnamed = warden.http.get("/props").await?;
    assert_eq!((unnamed.status.as_u16(), &unnamed.json()?["role"]), (200, &json!("router")));
    let unnamed = warden.http.get("/metrics").await?;
    assert_eq!(unnamed.status.as_u16(), 400);
    assert!(unnamed.text().contains("`org/a`, `b`"), "{}", unnamed.text());
    let nowhere = warden.http.get("/no/such/route").await?;
    assert_eq!(
        (nowhere.status.as_u16(), &nowhere.json()?["error"]["type"]),
        (404, &json!("not_found_error"))
    );
    assert_eq!(warden.state("b").await?, "unloaded", "nobody asked for it");
    Ok(())
}

#[tokio::test]
async fn rules_change_requests_and_are_taken_over_at_a_reload() -> Outcome {
    let rules = "[models.\"m\".request]\nmax_tokens = 3\nstrip = [\"user\"]\n";
    let mut warden = Setup::new()?.fake("m", &json!({}), "")?.top("").start().await?;
    warden.until_ready(1).await?;
    let body = json!({"model": "m", "user": "u", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]});
    let tokens = async |warden: &Warden| -> Result<u64, Trouble> {
        let answer = warden.http.post(CHAT, &body).await?.json()?;
        answer["usage"]["completion_tokens"].as_u64().context("no usage")
    };
    assert_eq!(tokens(&warden).await?, 9);
    let config = format!("{}\n{rules}", warden.setup.config());
    warden.reload(&config)?;
    wait_until("the rules are in force", SOON, async || tokens(&warden).await.is_ok_and(|tokens| tokens == 3))
        .await
}

/// A request to a real server, and true if its answer is always the same.
type Asked = (Method, &'static str, Option<Value>, bool);

fn every_route() -> Vec<Asked> {
    let get = |target: &'static str, same: bool| (Method::GET, target, None, same);
    let post = |target: &'static str, body: Value, same: bool| (Method::POST, target, Some(body), same);
    let messages = json!([{"role": "user", "content": "one two three"}]);
    let mut all = vec![
        get("/props", true),
        get("/slots", false),
        get("/metrics", false),
        get("/lora-adapters", true),
        get("/no/such/route", true),
        get("/tools", true),
        get("/v1/stream?conv_id=x", true),
        post("/lora-adapters", json!([]), true),
        post("/tokenize", json!({"content": "one two"}), true),
        post("/detokenize", json!({"tokens": [5, 6, 7]}), true),
        post("/apply-template", json!({"messages": messages}), true),
        post("/v1/messages/count_tokens", json!({"messages": messages, "max_tokens": 5}), true),
        post("/slots/0?action=erase", json!({}), false),
        post("/v1/streams/lookup", json!({"conversation_ids": ["x"]}), true),
        post("/v1/chat/completions/control", json!({"id": "x", "action": "reasoning_end"}), true),
        post("/v1/embeddings", json!({"input": "x"}), true),
        post("/v1/rerank", json!({"query": "x", "documents": ["y"]}), true),
        post("/infill", json!({"input_prefix": "a", "input_suffix": "b", "n_predict": 2}), false),
        post("/v1/responses", json!({"input": "one two", "max_output_tokens": 3}), false),
        post("/v1/messages", json!({"messages": messages, "max_tokens": 3}), false),
    ];
    for path in ["/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"] {
        all.push(post(path, json!({"messages": messages}), true));
    }
    for path in ["/responses/input_tokens", "/v1/responses/input_tokens"] {
        all.push(post(path, json!({"input": "one two"}), true));
    }
    for path in ["/completion", "/completions", "/v1/completions"] {
        all.push(post(path, json!({"prompt": "one two", "max_tokens": 3}), false));
    }
    for path in ["/chat/completions", "/v1/chat/completions"] {
        all.push(post(path, json!({"messages": messages, "max_tokens": 3}), false));
    }
    all
}

async fn ask(
    http: &Http,
    method: &Method,
    target: &str,
    body: Option<&Value>,
) -> Result<(u16, Value), Trouble> {
    let body = body.map(Value::to_string).unwrap_or_default();
    let request = Request::builder()
        .method(method)
        .uri(target)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))?;
    let answer = http.send(request).await?;
    Ok((answer.status.as_u16(), answer.json().unwrap_or_else(|_| json!(answer.text()))))
}

#[tokio::test]
async fn every_route_of_a_real_server_answers_as_it_does_directly() -> Outcome {
    let flags = ["-np", "2", "-c", "2048", "-t", "1", "--metrics"];
    let lines = model_lines(SamplePreset::Chat, &flags).await?;
    // With a slot directory, llama-server would do more for llama-warden than for other clients.
    let setup = Setup::new()?.model("org/m", &format!("{lines}warm = \"off\"\n"));
    let warden = setup.fake("other", &json!({}), "preload = false\n")?.start().await?;
    let backend = warden.until_ready(1).await?[0];
    let direct = Http::Unix(backend.socket().context("no socket")?);
    for (method, target, body, same) in every_route() {
        let (status, plain) = ask(&direct, &method, target, body.as_ref()).await?;
        let mut ways = vec![format!("/upstream/org/m{target}")];
        let sign = if target.contains('?') { '&' } else { '?' };
        ways.push(format!("{target}{sign}model=org/m"));
        for way in ways {
            let (through, answer) = ask(&warden.http, &method, &way, body.as_ref()).await?;
            assert_eq!(through, status, "{way}: {answer} instead of {plain}");
            if same {
                assert_eq!(answer, plain, "{way}");
            }
        }
        // The model is named in the body if that is an object.
        if let Some(Value::Object(mut fields)) = body {
            fields.insert("model".to_owned(), json!("org/m"));
            let (through, answer) = ask(&warden.http, &method, target, Some(&fields.into())).await?;
            assert_eq!(through, status, "{target}: {answer} instead of {plain}");
        }
    }
    assert_eq!(warden.state("other").await?, "unloaded", "nothing went astray");
    Ok(())
}

#[tokio::test]
async fn rules_are_understood_by_a_real_server() -> Outcome {
    let lines = model_lines(SamplePreset::Chat, &["-np", "1", "-c", "2048", "-t", "1"]).await?;
    let rules = "[models.\"m\".request]\nmax_tokens = 4\nsystem_prompt = \"four five six\"\nset.seed = 7\nstrip = [\"grammar\"]\n";
    let warden = Setup::new()?.model("m", &format!("{lines}\n{rules}")).start().await?;
    warden.until_ready(1).await?;
    let messages = json!([{"role": "user", "content": "one two three"}]);
    for (target, body, told) in [
        (CHAT, json!({"messages": messages, "grammar": "no grammar"}), "/usage/completion_tokens"),
        (CHAT, json!({"messages": messages, "n_predict": -1, "max_tokens": 50}), "/usage/completion_tokens"),
        ("/completion", json!({"prompt": "one", "n_predict": "many"}), "/tokens_predicted"),
        (
            "/v1/completions",
            json!({"prompt": "one", "max_completion_tokens": null}),
            "/usage/completion_tokens",
        ),
        ("/v1/messages", json!({"messages": messages}), "/usage/output_tokens"),
        ("/v1/responses", json!({"input": "one two"}), "/usage/output_tokens"),
    ] {
        let answer = warden.http.post(target, &body).await?;
        assert!(answer.status.is_success(), "{target}: {}", answer.text());
        let answer = answer.json()?;
        assert_eq!(answer.pointer(told), Some(&json!(4)), "{target}: {answer}");
    }
    let prompt = warden.http.post("/apply-template", &json!({"messages": messages})).await?.json()?;
    let prompt = prompt["prompt"].as_str().context("no prompt")?;
    assert!(prompt.contains("four five six"), "{prompt}");
    Ok(())
}
