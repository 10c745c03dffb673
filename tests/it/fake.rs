//! fake-llama behaves as llama-server was observed to behave, and fails exactly as its script says.

use std::time::Duration;

use hyper::StatusCode;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};
use warden_rig::process::ProcessId;
use warden_rig::warden::{CHAT, chat};
use warden_rig::{Answer, Context as _, Fake, Outcome, Trouble, wait_until};

const SOON: Duration = Duration::from_secs(10);

/// Script of a request that runs until a test ends it.
fn slow() -> Value {
    json!({"ms_per_token": 20})
}

fn long(id: &str, stream: bool) -> Value {
    chat(id, "m", "tell me", 100_000, stream)
}

/// Reads a raw connection to its end after this request.
async fn raw(fake: &Fake, body: &Value) -> Result<String, Trouble> {
    let mut raw = fake.http.raw().await?;
    let body = body.to_string();
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
    raw.write(format!("{head}{body}").as_bytes()).await?;
    raw.to_end(SOON).await
}

#[tokio::test]
async fn equal_requests_get_equal_answers_streamed_or_not() -> Outcome {
    let fake = Fake::start(&json!({}), &[]).await?;
    let other = Fake::start(&json!({}), &[]).await?;
    let whole = fake.http.post(CHAT, &chat("a", "m", "hello", 12, false)).await?.answer()?;
    let streamed = fake.http.post(CHAT, &chat("b", "m", "hello", 12, true)).await?.answer()?;
    let elsewhere = other.http.post(CHAT, &chat("c", "n", "hello", 12, true)).await?.answer()?;
    let different = fake.http.post(CHAT, &chat("d", "m", "hello!", 12, true)).await?.answer()?;
    assert!(whole.is_whole() && streamed.is_whole(), "{whole:?} {streamed:?}");
    assert_eq!(whole.text.split(' ').count(), 12);
    assert_eq!(whole.text, streamed.text);
    assert_eq!(whole.text, elsewhere.text);
    assert_ne!(whole.text, different.text);
    assert_eq!(whole.finish.as_deref(), Some("length"));
    assert_eq!(whole.usage.map(|usage| usage["completion_tokens"].clone()), Some(json!(12)));
    assert_eq!(streamed.timings.map(|timings| timings["predicted_n"].clone()), Some(json!(12)));
    fake.ledger.each_finished_once(["a", "b", "d"])
}

#[tokio::test]
async fn it_serves_the_routes_of_llama_server() -> Outcome {
    let fake = Fake::start(&json!({}), &["-np", "3", "-a", "nick"]).await?;
    assert_eq!(fake.http.get("/health").await?.json()?, json!({"status": "ok"}));
    assert_eq!(fake.http.get("/props").await?.json()?["total_slots"], 3);
    assert_eq!(fake.http.get("/v1/models").await?.json()?["data"][0]["id"], "nick");
    assert_eq!(fake.http.get("/slots").await?.json()?.as_array().map(Vec::len), Some(3));
    assert!(fake.http.get("/metrics").await?.text().contains("llamacpp:n_decode_total 0"));
    let native =
        fake.http.post("/completion", &json!({"prompt": "a b", "n_predict": 2, "stream": true})).await?;
    let native = native.answer()?;
    assert_eq!((native.events, native.done, native.finish.as_deref()), (3, true, Some("limit")));
    let text =
        fake.http.post("/v1/completions", &json!({"prompt": "a b", "max_tokens": 2})).await?.answer()?;
    assert!(text.is_whole());
    let embedding = fake.http.post("/v1/embeddings", &json!({"input": "a b"})).await?.json()?;
    assert_eq!(embedding["data"][0]["embedding"].as_array().map(Vec::len), Some(16));
    assert_eq!(
        fake.http.post("/tokenize", &json!({"content": "a b"})).await?.json()?,
        json!({"tokens": [0, 1]})
    );
    let missing = fake.http.post("/v1/chat/completions", &json!({})).await?;
    assert_eq!((missing.status.as_u16(), missing.header("connection")), (400, "close"));
    let unknown = fake.http.get("/nope").await?;
    assert_eq!(unknown.json()?["error"]["message"], "File Not Found");
    Ok(())
}

#[tokio::test]
async fn a_body_that_is_not_json_is_a_500_as_with_the_real_one() -> Outcome {
    let fake = Fake::start(&json!({}), &[]).await?;
    let mut raw = fake.http.raw().await?;
    raw.write(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n{").await?;
    let answer = raw.to_end(SOON).await?;
    assert!(
        answer.starts_with("HTTP/1.1 500") && answer.contains("json.exception.parse_error.101"),
        "{answer}"
    );
    Ok(())
}

#[tokio::test]
async fn while_loading_every_route_says_503() -> Outcome {
    let fake = Fake::launch(&json!({"load_ms": 600_000}), &[])?;
    wait_until("it listens", SOON, async || fake.http.get("/health").await.is_ok()).await?;
    for target in ["/health", "/v1/models", "/nope"] {
        let answer = fake.http.get(target).await?;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(answer.json()?["error"]["message"], "Loading model");
    }
    let mut kid = fake.kid;
    kid.signal(Signal::TERM);
    assert_eq!(kid.exit(SOON).await?, -15, "SIGTERM while loading kills at once");
    Ok(())
}

#[tokio::test]
async fn a_request_beyond_the_slots_gets_no_byte_until_one_is_free() -> Outcome {
    let fake = Fake::start(&slow(), &["-np", "1"]).await?;
    let first = fake.http.stream(CHAT, &long("first", true)).await?;
    let request = long("second", true);
    let mut second = Box::pin(fake.http.stream(CHAT, &request));
    assert!(timeout(Duration::from_millis(300), &mut second).await.is_err(), "a head without a slot");
    assert_eq!(fake.state().await?["waiting"], 1);
    drop(first);
    let second = timeout(SOON, second).await.context("the slot is free")??;
    assert_eq!(second.status(), StatusCode::OK);
    Ok(())
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_slot_and_is_cancelled_in_the_ledger() -> Outcome {
    for stream in [true, false] {
        let fake = Fake::start(&slow(), &[]).await?;
        let request = fake.http.send(warden_rig::http::json_request(CHAT, &long("gone", stream))?);
        tokio::select! {
            _ = request => return Err(Trouble::new("it should still generate")),
            busy = fake.until_busy(1, SOON) => busy?,
        }
        fake.until_busy(0, SOON).await?;
        let ends = fake.ledger.executions()?;
        assert_eq!(ends["gone"], [warden_rig::ledger::End::Cancelled]);
    }
    Ok(())
}

#[tokio::test]
async fn after_a_stream_the_connection_is_closed_though_the_head_said_keep_alive() -> Outcome {
    let fake = Fake::start(&json!({}), &[]).await?;
    let all = raw(&fake, &chat("a", "m", "hello", 3, true)).await?;
    let head = all.split("\r\n\r\n").next().unwrap_or_default().to_lowercase();
    assert!(head.contains("keep-alive: timeout=5, max=100") && !head.contains("connection: close"), "{head}");
    assert!(all.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n"), "{all}");
    Ok(())
}

#[tokio::test]
async fn an_idle_connection_is_closed_after_five_seconds() -> Outcome {
    let fake = Fake::start(&json!({}), &[]).await?;
    let mut raw = fake.http.raw().await?;
    raw.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").await?;
    let answered = Instant::now();
    let all = raw.to_end(SOON).await?;
    assert!(all.ends_with("{\"status\":\"ok\"}"), "{all}");
    let idle = answered.elapsed();
    assert!(idle > Duration::from_secs(4) && idle < Duration::from_secs(20), "{idle:?}");
    Ok(())
}

#[tokio::test]
async fn a_stale_socket_file_makes_the_start_fail() -> Outcome {
    let directory = tempfile::tempdir()?;
    std::fs::write(directory.path().join("fake.sock"), "")?;
    let mut fake = Fake::launch_in(directory, &json!({}), &[])?;
    assert_eq!(fake.kid.exit(SOON).await?, 1);
    assert!(fake.kid.output().contains("couldn't bind HTTP server socket"));
    Ok(())
}

#[tokio::test]
async fn a_failed_start_says_what_llama_server_says() -> Outcome {
    for (how, code, words) in [
        ("missing_model", 1, "failed to load model"),
        ("corrupt_model", 1, "invalid magic characters"),
        ("bad_flag", 1, "error: invalid argument"),
        ("out_of_memory", 1, "insufficient memory"),
        ("port_in_use", 1, "couldn't bind HTTP server socket"),
        ("missing_library", 127, "error while loading shared libraries"),
        ("abort", -6, "GGML_ASSERT"),
    ] {
        let mut fake = Fake::launch(&json!({"fail": how}), &[])?;
        assert_eq!(fake.kid.exit(SOON).await?, code, "{how}");
        assert!(fake.kid.output().contains(words), "{how}: {}", fake.kid.output());
    }
    Ok(())
}

#[tokio::test]
async fn sigterm_ends_an_idle_one_and_hangs_with_a_client() -> Outcome {
    let mut idle = Fake::start(&slow(), &[]).await?;
    idle.kid.signal(Signal::TERM);
    assert_eq!(idle.kid.exit(SOON).await?, 0);

    let mut busy = Fake::start(&slow(), &[]).await?;
    let mut flow = busy.http.stream(CHAT, &long("a", true)).await?;
    flow.event().await?;
    busy.kid.signal(Signal::TERM);
    wait_until("new connections are refused", SOON, async || busy.http.connect().await.is_err()).await?;
    // Events in flight may still arrive; then none must follow.
    wait_until("silence", SOON, async || timeout(Duration::from_millis(300), flow.event()).await.is_err())
        .await?;
    assert!(busy.kid.ended().is_none());
    drop(flow);
    assert_eq!(busy.kid.exit(SOON).await?, 0);
    Ok(())
}

#[tokio::test]
async fn a_second_sigterm_exits_with_1_and_an_ignored_one_does_nothing() -> Outcome {
    let mut busy = Fake::start(&slow(), &[]).await?;
    let mut flow = busy.http.stream(CHAT, &long("a", true)).await?;
    busy.kid.signal(Signal::TERM);
    wait_until("new connections are refused", SOON, async || busy.http.connect().await.is_err()).await?;
    busy.kid.signal(Signal::TERM);
    assert_eq!(busy.kid.exit(SOON).await?, 1);
    let (answer, end) = flow.rest().await;
    assert!(!answer.done && end.is_err(), "{answer:?}");

    let mut deaf = Fake::start(&json!({"on_term": "ignore"}), &[]).await?;
    deaf.kid.signal(Signal::TERM);
    deaf.kid.signal(Signal::TERM);
    let whole = deaf.http.post(CHAT, &chat("b", "m", "hi", 2, false)).await?;
    assert_eq!(whole.status, StatusCode::OK);
    assert!(deaf.kid.ended().is_none());
    Ok(())
}

#[tokio::test]
async fn it_leaks_as_much_as_it_is_told() -> Outcome {
    let fake = Fake::start(&json!({"leak_kib_per_request": 4096, "leak_kib_per_token": 512}), &[]).await?;
    let process = ProcessId::of(fake.kid.pid()).ok_or_else(|| Trouble::new("it has ended"))?;
    let before = process.host_bytes().unwrap_or_default();
    for _ in 0..4 {
        fake.http.post(CHAT, &chat("-", "m", "hi", 8, false)).await?;
    }
    let grown = process.host_bytes().unwrap_or_default() - before;
    let told = 4 * (4096 + 8 * 512) * 1024;
    assert!(grown >= told && grown < told + told / 4, "grew by {grown}, told {told}");
    Ok(())
}

fn parts(words: &str, parts: &Value) -> Value {
    let mut request = chat("-", "m", words, 1, false);
    let mut content = vec![json!({"type": "text", "text": words})];
    content.extend(parts.as_array().into_iter().flatten().cloned());
    request["messages"][0]["content"] = Value::Array(content);
    request
}

#[tokio::test]
async fn each_unit_of_work_leaks_what_it_is_told_to() -> Outcome {
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
    let sound = json!({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}});
    let plain = parts("one two three four", &json!([]));
    for (field, request, kib) in [
        ("leak_kib_per_image", parts("see", &json!([image, image])), 2 * 8192),
        ("leak_kib_per_audio", parts("hear", &json!([sound])), 8192),
        ("leak_kib_per_request", plain.clone(), 8192),
        ("leak_kib_per_token", plain.clone(), 8192),
    ] {
        let fake = Fake::start(&json!({field: 8192}), &[]).await?;
        let process = ProcessId::of(fake.kid.pid()).ok_or_else(|| Trouble::new("it has ended"))?;
        let before = process.host_bytes().unwrap_or_default();
        fake.http.post(CHAT, &plain).await?;
        fake.http.post(CHAT, &request).await?;
        let told = if request == plain { 2 * kib } else { kib } * 1024;
        assert_eq!(fake.state().await?["leaked_bytes"], told, "{field}");
        let grown = process.host_bytes().unwrap_or_default() - before;
        assert!(grown >= told - told / 8 && grown < told * 7 / 4, "{field}: grew by {grown}, told {told}");
    }
    let fake = Fake::start(&json!({"leak_kib_per_prompt_token": 10}), &[]).await?;
    let answer = fake.http.post(CHAT, &plain).await?.answer()?;
    let tokens = answer.usage.and_then(|usage| usage["prompt_tokens"].as_u64()).unwrap_or_default();
    assert!(tokens >= 4);
    assert_eq!(fake.state().await?["leaked_bytes"], tokens * 10 * 1024);
    Ok(())
}

#[tokio::test]
async fn it_leaks_by_the_hour_without_any_work() -> Outcome {
    // A gibibyte per hour is 291 KiB per second.
    let fake = Fake::start(&json!({"leak_mib_per_hour": 1024 * 1024}), &[]).await?;
    let leaked = async || Ok::<_, Trouble>(fake.state().await?["leaked_bytes"].as_u64().unwrap_or_default());
    wait_until("ten MiB have leaked", SOON, async || leaked().await.is_ok_and(|bytes| bytes > 10 << 20)).await
}

#[tokio::test]
async fn its_prompt_cache_fills_to_its_size_and_no_further() -> Outcome {
    let mut fake = Fake::start(&json!({"cache_kib_per_request": 2048}), &["--cache-ram", "16"]).await?;
    assert!(fake.kid.output().contains("prompt cache is enabled, size limit: 16 MiB"));
    let process = ProcessId::of(fake.kid.pid()).ok_or_else(|| Trouble::new("it has ended"))?;
    let before = process.host_bytes().unwrap_or_default();
    for _ in 0..20 {
        fake.http.post(CHAT, &chat("-", "m", "hi", 1, false)).await?;
    }
    assert_eq!(fake.state().await?["cached_bytes"], 16 << 20);
    let grown = process.host_bytes().unwrap_or_default() - before;
    // Serving itself, and late counts of the kernel, come on top; 20 requests without a bound would take 40
    // MiB.
    assert!((14 << 20..28 << 20).contains(&grown), "grew by {grown}");
    fake.kid.says("cache state: 8 prompts, 16.000 MiB (limits: 16.000 MiB", SOON).await?;
    Ok(())
}

#[tokio::test]
async fn once_poisoned_it_can_compute_nothing_and_is_healthy() -> Outcome {
    let fake = Fake::start(&json!({"faults": [{"at": 2, "do": "poison", "after_tokens": 3}]}), &[]).await?;
    assert!(fake.http.post(CHAT, &chat("a", "m", "hi", 4, true)).await?.answer()?.is_whole());
    let cut = fake.http.post(CHAT, &chat("b", "m", "hi", 8, true)).await?.answer()?;
    assert!(!cut.is_whole() && cut.error.is_some_and(|error| error.to_string().contains("Compute error.")));
    for stream in [true, false] {
        let answer = fake.http.post(CHAT, &chat("c", "m", "hi", 4, stream)).await?;
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(answer.json()?["error"]["message"], "Compute error.");
    }
    assert_eq!(fake.http.get("/health").await?.status, StatusCode::OK);
    Ok(())
}

#[tokio::test]
async fn it_can_get_slower_with_each_request() -> Outcome {
    let fake = Fake::start(&json!({"ms_per_token_per_request": 2}), &[]).await?;
    let mut speeds = Vec::new();
    for _ in 0..4 {
        let answer = fake.http.post(CHAT, &chat("-", "m", "hi", 4, false)).await?.answer()?;
        let timings = answer.timings.unwrap_or_default();
        speeds.push(timings["predicted_ms"].as_f64().unwrap_or_default());
    }
    assert!(speeds[0] >= 8.0 && speeds[3] >= 32.0, "{speeds:?}");
    Ok(())
}

#[tokio::test]
async fn it_crashes_at_the_request_and_token_it_is_told() -> Outcome {
    for signal in [6, 11, 9] {
        let faults = json!([{"at": 2, "do": "crash", "after_tokens": 3, "signal": signal}]);
        let mut fake = Fake::start(&json!({"faults": faults}), &[]).await?;
        assert!(fake.http.post(CHAT, &chat("a", "m", "hi", 8, true)).await?.answer()?.is_whole());
        let mut flow = fake.http.stream(CHAT, &chat("b", "m", "hi", 8, true)).await?;
        let (answer, end) = flow.rest().await;
        assert!(end.is_err() && !answer.done);
        assert_eq!(answer.text.split(' ').count(), 3, "{answer:?}");
        assert_eq!(fake.kid.exit(SOON).await?, -signal);
        assert_eq!(fake.ledger.executions()?["b"], [warden_rig::ledger::End::Open]);
    }
    Ok(())
}

#[tokio::test]
async fn a_fault_that_happens_once_happens_to_one_process_only() -> Outcome {
    let directory = tempfile::tempdir()?;
    let once = directory.path().join("once");
    let script = json!({"faults": [{"do": "close", "once": once}]});
    let (first, second) = (Fake::start(&script, &[]).await?, Fake::start(&script, &[]).await?);
    assert!(first.http.post(CHAT, &chat("a", "m", "hi", 2, false)).await.is_err());
    assert!(first.http.post(CHAT, &chat("b", "m", "hi", 2, false)).await.is_ok());
    assert!(second.http.post(CHAT, &chat("c", "m", "hi", 2, false)).await.is_ok());
    first.ledger.each_finished_once(["b"])
}

#[tokio::test]
async fn it_hangs_with_health_or_without() -> Outcome {
    for silent in [false, true] {
        let script =
            json!({"faults": [{"from": 2, "do": "hang", "after_tokens": 1, "silent_health": silent}]});
        let fake = Fake::start(&script, &[]).await?;
        assert!(fake.http.post(CHAT, &chat("a", "m", "hi", 4, true)).await?.answer()?.is_whole());
        let request = chat("b", "m", "hi", 4, true);
        let hung = fake.http.post(CHAT, &request);
        assert!(timeout(Duration::from_millis(300), hung).await.is_err());
        let patience = if silent { Duration::from_millis(300) } else { SOON };
        let health = timeout(patience, fake.http.get("/health")).await;
        assert_eq!(health.is_err(), silent);
    }
    Ok(())
}

#[tokio::test]
async fn it_stalls_in_mid_stream() -> Outcome {
    let script = json!({"faults": [{"do": "stall", "after_tokens": 2, "ms": 400}]});
    let fake = Fake::start(&script, &[]).await?;
    let begun = Instant::now();
    let answer = fake.http.post(CHAT, &chat("a", "m", "hi", 4, true)).await?.answer()?;
    assert!(answer.is_whole() && begun.elapsed() >= Duration::from_millis(400));
    Ok(())
}

#[tokio::test]
async fn dirty_bytes_are_on_the_wire_as_told() -> Outcome {
    for (how, words) in [
        ("bad_status_line", "ICY 200 OK"),
        ("two_lengths", "Content-Length: 2\r\nContent-Length: 5"),
        ("length_and_chunked", "Content-Length: 2\r\nTransfer-Encoding: chunked"),
        ("cut_head", "Content-Ty"),
        ("short_body", "Content-Length: 100"),
        ("cut_chunk", "\r\n40\r\n"),
        ("garbage_after", "GARBAGE AFTER"),
        ("huge_head", "aaaaaaaaaaaaaaaa"),
    ] {
        let fake = Fake::start(&json!({"faults": [{"do": how}]}), &[]).await?;
        let all = raw(&fake, &chat("a", "m", "hi", 4, false)).await?;
        assert!(all.contains(words), "{how}: {all}");
        assert!(!all.contains("null"), "{how}: hyper's own answer got out: {all}");
    }
    let script = json!({"faults": [{"do": "cut_chunk", "after_tokens": 2}]});
    let fake = Fake::start(&script, &[]).await?;
    let all = raw(&fake, &chat("a", "m", "hi", 4, true)).await?;
    assert_eq!(all.matches("\"content\":\"").count(), 2, "{all}");
    assert!(all.ends_with("\r\n40\r\ndata: {\"choices\":[{\"ind"), "{all}");
    Ok(())
}

#[tokio::test]
async fn an_error_is_told_in_the_head_or_in_band() -> Outcome {
    let faults =
        json!([{"at": 1, "do": "error", "status": 503}, {"at": 2, "do": "error", "after_tokens": 2}]);
    let fake = Fake::start(&json!({"faults": faults}), &[]).await?;
    assert_eq!(fake.http.post(CHAT, &chat("a", "m", "hi", 4, true)).await?.status.as_u16(), 503);
    let answer = fake.http.post(CHAT, &chat("b", "m", "hi", 4, true)).await?.answer()?;
    assert!(answer.error.is_some() && !answer.done, "{answer:?}");
    Ok(())
}

#[tokio::test]
async fn it_refuses_connections_and_goes_on_with_those_it_has() -> Outcome {
    let script = json!({"ms_per_token": 5, "faults": [{"do": "refuse", "after_tokens": 1}]});
    let fake = Fake::start(&script, &[]).await?;
    let mut flow = fake.http.stream(CHAT, &chat("a", "m", "hi", 40, true)).await?;
    flow.event().await?;
    wait_until("connections are refused", SOON, async || fake.http.connect().await.is_err()).await?;
    let (answer, end) = flow.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?}");
    Ok(())
}

#[tokio::test]
async fn the_script_can_be_changed_while_it_runs_and_misspellings_are_errors() -> Outcome {
    let fake = Fake::start(&json!({}), &[]).await?;
    let patched = fake.http.post("/fake/script", &json!({"tokens": 3, "token_bytes": 1000})).await?;
    assert_eq!(patched.status, StatusCode::OK);
    let answer: Answer = fake.http.post(CHAT, &chat("a", "m", "hi", 50, false)).await?.answer()?;
    assert_eq!((answer.text.len(), answer.finish.as_deref()), (3000, Some("stop")));
    let wrong = fake.http.post("/fake/script", &json!({"leak_kb": 3})).await?;
    assert_eq!(wrong.status, StatusCode::BAD_REQUEST);
    let mut never = Fake::launch(&json!({"leak_kb": 3}), &[])?;
    assert_eq!(never.kid.exit(SOON).await?, 1);
    assert!(never.kid.output().contains("leak_kb"));
    Ok(())
}
