//! Distinguishes a leak from a cache, names the unit of work that causes it, and reacts as configured: not at
//! all, or with a replacement that fails no request. A process that can no longer compute is replaced
//! although its health check passes.

use std::time::Duration;

use serde_json::{Value, json};
use warden_builder::sample_model::SamplePreset;
use warden_rig::real::{model_lines, sample_model};
use warden_rig::swarm::{all_whole, names, swarm};
use warden_rig::warden::{CHAT, SOON, Setup, chat, json_lines};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

/// Usual detector, but for smaller leaks in less time: a fake varies by less than a MiB.
const DETECTOR: &str = "sensors.interval = \"20ms\"\ninternal.sensors.idle_settle = \"1ms\"\n\
                        internal.growth.host_effect = \"4MiB\"\ninternal.growth.allowance_slack = \"4MiB\"";

/// A distant budget, so that growth triggers first, and no delays.
const BUDGET: &str = "policy.host.soft = \"2GiB\"\npolicy.jitter = 0.0\npolicy.quiet_for = \"1ms\"\n\
                      policy.quiet_within = \"100ms\"\npolicy.min_interval = \"1ms\"\n\
                      policy.min_interval_hard = \"1ms\"\n";

/// No caches, so that memory is constant without a leak.
const PLAIN: &str =
    "args = [\"-np\", \"4\", \"--metrics\", \"--cache-ram\", \"0\", \"--ctx-checkpoints\", \"0\"]\n";

const BATCH: usize = 40;

/// More requests than any verdict here needs.
const MANY: usize = 1200;

/// Returns a pseudo-random number, the same in each run.
fn noise(n: usize, salt: u64) -> u64 {
    let mixed = (n as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ salt.wrapping_mul(0xD134_2543_DE82_EF95);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40
}

/// Images, prompts and answers vary independently, so that their effects can be told apart.
fn mixed(n: usize) -> Value {
    let words = vec!["word"; usize::try_from(2 + noise(n, 1) % 60).unwrap_or(2)].join(" ");
    let mut request = chat(&format!("g-{n}"), "m", &words, 1 + noise(n, 2) % 12, n.is_multiple_of(2));
    let images = noise(n, 3) % 3;
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
    let mut content = vec![json!({"type": "text", "text": words})];
    content.extend((0..images).map(|_| image.clone()));
    request["messages"][0]["content"] = Value::Array(content);
    request
}

async fn load(
    warden: &Warden,
    make: impl Fn(usize) -> Value,
    from: usize,
    mut holds: impl AsyncFnMut(usize) -> bool,
) -> Result<usize, Trouble> {
    for n in from..from + MANY {
        let answer = warden.http.post(CHAT, &make(n)).await?;
        if !answer.status.is_success() || !answer.answer()?.is_whole() {
            return Err(Trouble::new(format!("request {n}: {}: {}", answer.status, answer.text())));
        }
        if holds(n).await {
            return Ok(n);
        }
    }
    Err(Trouble::new(format!("not within {MANY} requests: {}", warden.status("m").await?)))
}

async fn host(warden: &Warden) -> Value {
    let status = warden.status("m").await.unwrap_or_default();
    let growth = status["backends"][0]["memory"]["growth"].as_array().cloned().unwrap_or_default();
    growth.into_iter().find(|growth| growth["series"] == "host").unwrap_or_default()
}

async fn leaking(warden: &Warden) -> bool {
    host(warden).await["verdict"] == "leaking"
}

fn entries(warden: &Warden) -> Result<Vec<Value>, Trouble> {
    json_lines(&warden.recycles())
}

/// Checks that a fake's leak by `field` is found, and `unit` is blamed.
async fn blamed(field: &str, kib: u64, unit: &str) -> Outcome {
    let toml = format!("{PLAIN}{BUDGET}policy.growth = \"observe\"\n");
    let mut warden = Setup::new()?.top(DETECTOR).fake("m", &json!({field: kib}), &toml)?.start().await?;
    warden.until_ready(1).await?;
    load(&warden, mixed, 0, async |_| leaking(&warden).await).await?;
    let told = f64::from(u32::try_from(kib * 1024)?);
    // The first verdict may come before the blame is certain.
    let sure = |growth: &Value| {
        let blame = &growth["blame"];
        let paid = blame["bytes_per_unit"].as_f64().unwrap_or_default();
        blame["kind"] == "pays" && blame["unit"] == unit && (paid / told - 1.0).abs() < 0.25
    };
    load(&warden, mixed, MANY, async |_| sure(&host(&warden).await)).await?;
    // The leak is only reported.
    warden.says("leaking").await?;
    assert_eq!(entries(&warden)?, [] as [Value; 0]);
    let next = warden.status("m").await?["backends"][0]["next"].clone();
    assert_ne!(next["decision"]["action"], "drain_now", "{next}");
    Ok(())
}

#[tokio::test]
async fn a_leak_per_image_is_found_and_images_are_blamed() -> Outcome {
    blamed("leak_kib_per_image", 512, "image").await
}

#[tokio::test]
async fn a_leak_per_output_token_is_found_and_output_tokens_are_blamed() -> Outcome {
    blamed("leak_kib_per_token", 96, "output_token").await
}

#[tokio::test]
async fn a_leak_per_request_is_found_and_requests_are_blamed() -> Outcome {
    blamed("leak_kib_per_request", 512, "request").await
}

#[tokio::test]
async fn a_leak_per_prompt_token_is_found_and_prompt_tokens_are_blamed() -> Outcome {
    blamed("leak_kib_per_prompt_token", 16, "prompt_token").await
}

#[tokio::test]
async fn where_growth_recycles_a_leaking_backend_is_replaced_and_no_request_fails() -> Outcome {
    let toml = format!("{PLAIN}{BUDGET}policy.growth = \"recycle\"\n");
    let script = json!({"leak_kib_per_image": 512});
    let warden = Setup::new()?.top(DETECTOR).fake("m", &script, &toml)?.start().await?;
    warden.until_ready(1).await?;
    // With several concurrent clients, a careless replacement would break a request.
    let mut sent = 0;
    while entries(&warden)?.is_empty() && sent < MANY {
        let batch: Vec<Value> = (sent..sent + BATCH).map(mixed).collect();
        all_whole(&swarm(&warden.http, &batch, 4).await)?;
        sent += BATCH;
    }
    let all: Vec<Value> = (0..sent).map(mixed).collect();
    warden.ledger().each_finished_once(names(&all))?;
    // The entry is written after the old process has ended, which may take longer than the remaining
    // requests.
    let replaced = wait_until("the ledger has the replacement", SOON, async || {
        entries(&warden).is_ok_and(|found| !found.is_empty())
    });
    if let Err(late) = replaced.await {
        return Err(Trouble::new(format!("{late}: {}", host(&warden).await)));
    }
    let entry = entries(&warden)?.pop().context("no replacement")?;
    assert_eq!(entry["reason"], "growth", "{entry}");
    assert_eq!((&entry["cut"], &entry["helped"]), (&json!(0), &json!(true)), "{entry}");
    // The replacement came long before the budget.
    let held = entry["evidence"]["host_bytes"].as_u64().context("no evidence")?;
    assert!(held < 1 << 30, "{entry}");
    load(&warden, mixed, sent, async |n| n >= sent + 20).await?;
    Ok(())
}

/// Sends enough requests to fill a cache of this size twice, and checks the verdict after each.
async fn never_leaking(warden: &Warden, make: impl Fn(usize) -> Value, count: usize) -> Outcome {
    let mut alarmed = None;
    load(warden, make, 0, async |n| {
        let growth = host(warden).await;
        if matches!(growth["verdict"].as_str(), Some("suspected" | "leaking")) {
            alarmed = Some(growth);
        }
        alarmed.is_some() || n + 1 >= count
    })
    .await?;
    if let Some(growth) = alarmed {
        return Err(Trouble::new(format!("alarmed: {growth}")));
    }
    assert_eq!(entries(warden)?, [] as [Value; 0]);
    let growth = host(warden).await;
    assert!(matches!(growth["verdict"].as_str(), Some("bounded" | "steady")), "{growth}");
    Ok(())
}

#[tokio::test]
async fn a_cache_that_fills_to_its_declared_size_is_bounded_and_replaces_nothing() -> Outcome {
    let args =
        "args = [\"-np\", \"4\", \"--metrics\", \"--cache-ram\", \"64\", \"--ctx-checkpoints\", \"0\"]\n";
    let toml = format!("{args}{BUDGET}policy.growth = \"recycle\"\n");
    let script = json!({"cache_kib_per_request": 512});
    let warden = Setup::new()?.top(DETECTOR).fake("m", &script, &toml)?.start().await?;
    warden.until_ready(1).await?;
    never_leaking(&warden, mixed, 256).await
}

#[tokio::test]
async fn the_prompt_cache_of_a_real_server_is_bounded_and_replaces_nothing() -> Outcome {
    let flags = ["-np", "1", "-c", "2048", "--cache-ram", "64", "--no-warmup", "-t", "1"];
    let lines =
        format!("{}{BUDGET}policy.growth = \"recycle\"\n", model_lines(SamplePreset::FatKv, &flags).await?);
    sample_model(SamplePreset::FatKv)?;
    // A real allocator varies more than a fake.
    let detector = DETECTOR.replace("4MiB", "16MiB");
    let warden = Setup::new()?.top(&detector).model("m", &lines).start().await?;
    warden.until_ready(1).await?;
    let distinct = |n: usize| {
        let words: Vec<String> = (0..40).map(|at| (noise(n * 40 + at, 7) % 1000).to_string()).collect();
        chat(&format!("c-{n}"), "m", &words.join(" "), 2, false)
    };
    never_leaking(&warden, distinct, 160).await
}

#[tokio::test]
async fn a_process_that_cannot_compute_any_more_is_replaced_though_it_is_healthy() -> Outcome {
    let directory = tempfile::tempdir()?;
    let once = directory.path().join("poisoned");
    let script = json!({"faults": [{"at": 5, "do": "poison", "once": once}]});
    let toml = format!("{PLAIN}{BUDGET}");
    let mut warden = Setup::new()?.top(DETECTOR).fake("m", &script, &toml)?.start().await?;
    let old = warden.until_ready(1).await?[0];
    let mut sent = 0;
    wait_until("the process is another one", SOON, async || {
        sent += 1;
        let _failed = warden.http.post(CHAT, &chat(&format!("s-{sent}"), "m", "hi", 2, false)).await;
        warden.backends().iter().all(|backend| backend.pid != old.pid) && !warden.backends().is_empty()
    })
    .await?;
    warden.until_ready(1).await?;
    wait_until("the ledger has the replacement", SOON, async || {
        entries(&warden).is_ok_and(|found| !found.is_empty())
    })
    .await?;
    assert_eq!(entries(&warden)?[0]["reason"], "compute_errors");
    let answer = warden.http.post(CHAT, &chat("well", "m", "hi", 2, false)).await?;
    assert!(answer.answer()?.is_whole());
    warden.says("computing failed").await?;
    assert!(!old.is_alive() || Warden::until_gone(&[old], Duration::from_secs(10)).await.is_ok());
    Ok(())
}

/// Sends requests, each a conversation of its own, until `done`; returns their number.
async fn converse(warden: &Warden, name: &str, done: impl AsyncFn() -> bool) -> Result<usize, Trouble> {
    let mut sent = 0;
    wait_until("enough was answered", SOON, async || {
        sent += 1;
        let prompt = format!("{name} {sent}");
        let id = format!("{name}-{sent}");
        let answer = warden.http.post(CHAT, &chat(&id, "m", &prompt, 200, sent % 2 == 0)).await;
        assert!(answer.is_ok_and(|answer| answer.status.is_success()), "clients get whole answers");
        done().await
    })
    .await?;
    Ok(sent)
}

/// Starts a server whose answers are endless repetitions from request 31 on, and lets it answer 30.
async fn babbling(answers: &str) -> Result<(Warden, tempfile::TempDir), Trouble> {
    let directory = tempfile::tempdir()?;
    let once = directory.path().join("babbles");
    let script = json!({"tokens": 200, "faults": [{"at": 31, "do": "babble", "once": once}]});
    let toml = format!("{PLAIN}{BUDGET}policy.answers = \"{answers}\"\n");
    let warden = Setup::new()?.top(DETECTOR).fake("m", &script, &toml)?.start().await?;
    warden.until_ready(1).await?;
    let sent = std::cell::Cell::new(0);
    converse(&warden, "sound", async || {
        sent.set(sent.get() + 1);
        sent.get() == 30
    })
    .await?;
    Ok((warden, directory))
}

#[tokio::test]
async fn a_process_whose_answers_have_become_endless_repetitions_is_replaced() -> Outcome {
    let (mut warden, _directory) = babbling("replace").await?;
    let old = warden.backends()[0];
    let sent = converse(&warden, "poisoned", async || {
        warden.backends().iter().all(|backend| backend.pid != old.pid) && !warden.backends().is_empty()
    })
    .await?;
    println!("replaced after {sent} answers");
    wait_until("the ledger has the replacement", SOON, async || {
        entries(&warden).is_ok_and(|found| !found.is_empty())
    })
    .await?;
    let entry = entries(&warden)?[0].clone();
    assert_eq!(entry["reason"], "repeating");
    assert_eq!(entry["warm"]["carried"].as_u64().unwrap_or(0), 0, "a corrupt cache is not carried over");
    warden.says("end in endless repetitions").await?;
    warden.until_ready(1).await?;
    let answer = warden.http.post(CHAT, &chat("well", "m", "hi", 20, false)).await?.text();
    assert!(!answer.contains("//////"), "{answer}");
    Ok(())
}

#[tokio::test]
async fn endless_repetitions_are_reported_and_one_conversation_is_no_evidence() -> Outcome {
    let (mut warden, _directory) = babbling("observe").await?;
    let old = warden.backends();
    for turn in 0..30 {
        let messages = json!([
            { "role": "user", "content": "the same beginning" },
            { "role": "assistant", "content": format!("answer {turn}") },
            { "role": "user", "content": "and then" },
        ]);
        let body = json!({ "model": "m", "messages": messages, "max_tokens": 200 });
        assert!(warden.http.post(CHAT, &body).await?.status.is_success());
    }
    assert!(!warden.kid.output().contains("end in endless repetitions"), "{}", warden.kid.output());
    let told = std::cell::Cell::new(false);
    converse(&warden, "poisoned", async || {
        told.set(warden.kid.output().contains("end in endless repetitions"));
        told.get()
    })
    .await?;
    assert_eq!(warden.backends(), old, "it is only reported");
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}

#[tokio::test]
async fn a_process_that_makes_no_progress_is_replaced_although_it_answers_probes() -> Outcome {
    let directory = tempfile::tempdir()?;
    let once = directory.path().join("wedged");
    let script = json!({"faults": [{"at": 3, "do": "hang", "once": once}]});
    let toml = format!("{PLAIN}{BUDGET}lifecycle.drain_deadline = \"200ms\"\n");
    let top = format!("{DETECTOR}\ninternal.health.prefill_least = \"300ms\"");
    let warden = Setup::new()?.top(&top).fake("m", &script, &toml)?.start().await?;
    let old = warden.until_ready(1).await?[0];
    for n in 1..=2 {
        let answer = warden.http.post(CHAT, &chat(&format!("w-{n}"), "m", "hi", 2, false)).await?;
        assert!(answer.answer()?.is_whole());
    }
    // The request hangs until the drain's time limit, and its client then gets an error.
    let hanging = warden.http.post(CHAT, &chat("w-3", "m", "hi", 2, false)).await?;
    assert!(hanging.status.is_server_error(), "{}", hanging.text());
    wait_until("the ledger has the replacement", SOON, async || {
        entries(&warden).is_ok_and(|found| !found.is_empty())
    })
    .await?;
    assert_eq!(entries(&warden)?[0]["reason"], "wedged");
    let new = warden.until_ready(1).await?[0];
    assert_ne!(new.pid, old.pid);
    let answer = warden.http.post(CHAT, &chat("well", "m", "hi", 2, false)).await?;
    assert!(answer.answer()?.is_whole());
    Ok(())
}
