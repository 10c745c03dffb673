//! The main promise, with a real llama-server built from the pinned source: under repeated replacements no
//! request fails, none is executed twice, and every answer equals the undisturbed one.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use warden_builder::sample_model::SamplePreset;
use warden_rig::real::{REPRODUCIBLE, Undisturbed, model_lines};
use warden_rig::swarm::{all_whole, requests, same, swarm};
use warden_rig::warden::{CHAT, SOON, Setup, chat, json_lines};
use warden_rig::{Outcome, Trouble, Warden, wait_until};

const CLIENTS: usize = 8;

/// Number of requests, and the least number of replacements meanwhile.
fn work() -> (usize, usize) {
    if warden_rig::is_long() { (400, 5) } else { (160, 3) }
}

/// Line that llama-server logs when a request gets its slot.
const BEGUN: &str = "processing task";

/// Two slots, and a prompt cache that takes about 4 MiB of host memory per new prompt.
fn flags(cache_mib: &'static str) -> Vec<&'static str> {
    let mut flags = vec!["-np", "2", "-c", "2048", "--cache-ram", cache_mib];
    flags.extend(REPRODUCIBLE);
    flags
}

/// Requests whose prompts have no common beginning.
fn distinct() -> Vec<Value> {
    let words = |n: usize| (0..15).fold(String::new(), |text, k| text + &format!("w{} ", n * 100 + k));
    (0..work().0).map(|n| chat(&format!("r-{n}"), "m", &words(n), 8, n.is_multiple_of(2))).collect()
}

async fn until_reason(warden: &Warden, reason: &str, count: usize) -> Outcome {
    wait_until(&format!("{count} replacements by {reason}"), Duration::from_secs(120), async || {
        let found = json_lines(&warden.recycles()).unwrap_or_default();
        found.iter().filter(|entry| entry["reason"] == reason).count() >= count
    })
    .await
}

async fn survives(replace: &str) -> Outcome {
    let all = distinct();
    let undisturbed =
        swarm(&Undisturbed::start(SamplePreset::FatKv, &flags("4096")).await?.http, &all, CLIENTS).await;
    all_whole(&undisturbed)?;

    let lines = model_lines(SamplePreset::FatKv, &flags("4096")).await?;
    let policy = format!(
        "replace = \"{replace}\"\npolicy.host.soft = \"320MiB\"\npolicy.host.hard = \"1GiB\"\npolicy.jitter = 0.0\n\
         policy.quiet_for = \"1ms\"\npolicy.quiet_within = \"50ms\"\npolicy.min_interval = \"1ms\"\npolicy.reclaim = false\n"
    );
    let setup = Setup::new()?.top("sensors.interval = \"200ms\"").model("m", &format!("{lines}{policy}"));
    let mut warden = setup.start().await?;
    warden.until_ready(1).await?;
    let http = warden.http.clone();
    let disturb = async {
        until_reason(&warden, "host_soft", 1).await?;
        let ran = warden.cli(&["restart", "m"]).await?;
        assert_eq!(ran.code, 0, "{ran:?}");
        // A changed prompt cache changes the command line.
        let changed = warden.setup.config().replace("\"4096\"", "\"4097\"");
        warden.reload(&changed)?;
        until_reason(&warden, "configuration", 1).await
    };
    let (disturbed, disturbance) = tokio::join!(swarm(&http, &all, CLIENTS), disturb);
    disturbance?;
    same(&undisturbed, &disturbed)?;

    let entries = json_lines(&warden.recycles())?;
    assert!(entries.len() >= work().1, "only {} replacements: {entries:?}", entries.len());
    for reason in ["host_soft", "operator", "configuration"] {
        assert!(entries.iter().any(|entry| entry["reason"] == reason), "none by {reason}: {entries:?}");
    }
    for entry in &entries {
        assert!(entry["failed"].is_null() && entry["cut"] == 0 && entry["mode"] == replace, "{entry}");
        if replace == "overlap" {
            assert_eq!(entry["gap_ms"], 0, "{entry}");
        }
    }
    // All output is written at the end.
    assert_eq!(warden.terminate(SOON).await?, 0);
    let begun = warden.kid.output().matches(BEGUN).count();
    assert_eq!(begun, all.len(), "requests that got a slot, over all generations");
    Ok(())
}

#[tokio::test]
async fn many_requests_survive_replacements_in_sequence() -> Outcome {
    survives("sequential").await
}

#[tokio::test]
async fn many_requests_survive_replacements_by_overlap() -> Outcome {
    survives("overlap").await
}

/// A model with one slot that generates some 150 tokens per second.
async fn slow() -> Result<Warden, Trouble> {
    let mut flags = vec!["-np", "1", "-c", "4096", "--cache-ram", "0"];
    flags.extend(REPRODUCIBLE);
    let lines = model_lines(SamplePreset::Slow, &flags).await?;
    let warden =
        Setup::new()?.model("m", &format!("{lines}lifecycle.backoff_first = \"50ms\"\n")).start().await?;
    warden.until_ready(1).await?;
    Ok(warden)
}

#[tokio::test]
async fn killed_in_mid_stream_the_stream_is_told_and_what_is_queued_is_served_by_the_next() -> Outcome {
    let warden = slow().await?;
    let first = warden.backends();
    let mut flow = warden.http.stream(CHAT, &chat("cut", "m", "go", 4000, true)).await?;
    for _ in 0..5 {
        flow.event().await?;
    }
    let queued = requests("q", "m", 4, 4);
    let kill = async {
        wait_until("all four wait", SOON, async || {
            warden.waiting("m").await.is_ok_and(|waiting| waiting == 4)
        })
        .await?;
        first[0].signal(Signal::KILL);
        Ok::<_, Trouble>(flow.rest().await.0)
    };
    let (answers, cut) = tokio::join!(swarm(&warden.http, &queued, 4), kill);
    let cut = cut?;
    assert!(cut.error.is_some() && !cut.is_whole(), "an in-band error: {cut:?}");
    all_whole(&answers)
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_generation_of_a_real_llama_server() -> Outcome {
    let warden = slow().await?;
    let mut flow = warden.http.stream(CHAT, &chat("gone", "m", "go", 4000, true)).await?;
    flow.event().await?;
    drop(flow);
    let begun = tokio::time::Instant::now();
    // The request waits for the only slot if the first generation continues, which would take 20 s.
    let answer = warden.http.post(CHAT, &chat("next", "m", "hi", 4, false)).await?;
    assert!(answer.answer()?.is_whole());
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    Ok(())
}

#[tokio::test]
async fn killed_with_9_llama_warden_leaves_no_llama_server_two_seconds_later() -> Outcome {
    let mut warden = slow().await?;
    let children = warden.backends();
    let mut flow = warden.http.stream(CHAT, &chat("cut", "m", "go", 4000, true)).await?;
    flow.event().await?;
    warden.kid.signal(Signal::KILL);
    warden.kid.exit(SOON).await?;
    Warden::until_gone(&children, Duration::from_secs(2)).await
}

#[tokio::test]
async fn routes_of_a_real_llama_server_pass_through() -> Outcome {
    let warden = slow().await?;
    let props = warden.http.get("/props?model=m").await?;
    assert_eq!(props.json()?["total_slots"], 1, "{}", props.text());
    let tokens =
        warden.http.post("/tokenize", &serde_json::json!({"model": "m", "content": "hello"})).await?;
    assert!(
        tokens.json()?["tokens"].as_array().is_some_and(|tokens| !tokens.is_empty()),
        "{}",
        tokens.text()
    );
    let wrong = warden.http.post(CHAT, &serde_json::json!({"model": "m"})).await?;
    assert_eq!(wrong.status.as_u16(), 400);
    assert_eq!(wrong.json()?["error"]["message"], "'messages' is required");
    let listed = warden.http.get("/v1/models").await?.json()?;
    assert_eq!(listed["data"][0]["id"], "m", "{listed}");
    Ok(())
}
