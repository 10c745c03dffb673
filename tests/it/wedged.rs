//! A server that no longer computes is detected while its streams stay open. Long prompts, tool calls without
//! events, slow clients and stopped processes raise no false alarm.

use std::time::Duration;

use serde_json::{Value, json};
use warden_rig::warden::{CHAT, SOON, Setup, chat, json_lines};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

/// Frequent checks, and half a second of patience instead of twenty or sixty.
const SHORT: &str = "sensors.interval = \"20ms\"\ninternal.sensors.idle_settle = \"1ms\"\n\
                     internal.health.token_least = \"500ms\"\ninternal.health.prefill_least = \"500ms\"\n\
                     internal.health.silent_least = \"500ms\"\ninternal.health.silent_tokens = 100";

const EAGER: &str = "policy.jitter = 0.0\npolicy.min_interval = \"1ms\"\npolicy.min_interval_hard = \"1ms\"\n\
                     args = [\"-np\", \"4\"]\n";

async fn serve(script: &Value) -> Result<Warden, Trouble> {
    let warden = Setup::new()?.top(SHORT).fake("m", script, EAGER)?.start().await?;
    warden.until_ready(1).await?;
    // These requests teach the model's speed.
    for n in 0..3 {
        let answer = warden.http.post(CHAT, &chat(&format!("warm-{n}"), "m", "some words", 8, true)).await?;
        assert!(answer.answer()?.is_whole(), "{}", answer.text());
    }
    Ok(warden)
}

async fn entry(warden: &Warden) -> Result<Value, Trouble> {
    let ledger = warden.recycles();
    wait_until("the ledger has the replacement", SOON, async || {
        json_lines(&ledger).is_ok_and(|found| !found.is_empty())
    })
    .await?;
    json_lines(&ledger)?.into_iter().next().context("an entry")
}

#[tokio::test]
async fn a_server_that_stalls_between_tokens_is_replaced_with_and_without_comments_on_its_stream() -> Outcome
{
    for ping_ms in [0, 30] {
        let home = tempfile::tempdir()?;
        let fault = json!({"at": 4, "after_tokens": 5, "do": "wedge", "once": home.path().join("once")});
        let warden = serve(&json!({"ping_ms": ping_ms, "ms_per_token": 2.0, "faults": [fault]})).await?;
        let old = warden.until_ready(1).await?[0];
        let mut stalls = warden.http.stream(CHAT, &chat("stalls", "m", "hi", 60, true)).await?;
        let (answer, _) = stalls.rest().await;
        assert!(!answer.is_whole(), "pings every {ping_ms} ms");
        let entry = entry(&warden).await?;
        assert_eq!(entry["reason"], "wedged", "{entry}");
        let words = entry["evidence"]["words"].as_str().unwrap_or_default();
        assert!(words.contains("99 of 100 tokens so far came within"), "{words}");
        let new = warden.until_ready(1).await?[0];
        assert_ne!(new.pid, old.pid);
        let next = warden.http.post(CHAT, &chat("next", "m", "hi", 4, true)).await?;
        assert!(next.answer()?.is_whole());
    }
    Ok(())
}

#[tokio::test]
async fn a_server_that_stalls_before_the_first_token_is_replaced_by_the_measured_speed_of_prompts() -> Outcome
{
    for ping_ms in [0, 30] {
        let home = tempfile::tempdir()?;
        let fault = json!({"at": 4, "do": "wedge", "once": home.path().join("once")});
        let warden = serve(&json!({"ping_ms": ping_ms, "faults": [fault]})).await?;
        let mut stalls = warden.http.stream(CHAT, &chat("stalls", "m", "hi", 60, true)).await?;
        let (answer, _) = stalls.rest().await;
        assert!(!answer.is_whole(), "pings every {ping_ms} ms");
        let entry = entry(&warden).await?;
        assert_eq!(entry["reason"], "wedged", "{entry}");
        let words = entry["evidence"]["words"].as_str().unwrap_or_default();
        assert!(words.contains("tokens of prompt take"), "{words}");
    }
    Ok(())
}

#[tokio::test]
async fn a_long_prompt_and_tokens_without_events_are_no_wedge_while_the_loop_turns() -> Outcome {
    let pause = json!({"at": 4, "after_tokens": 5, "do": "stall", "ms": 2500});
    let warden = serve(&json!({"ping_ms": 30, "faults": [pause]})).await?;
    let old = warden.until_ready(1).await?[0];
    let quiet = warden.http.post(CHAT, &chat("quiet", "m", "hi", 9, true)).await?;
    assert!(quiet.answer()?.is_whole());
    warden.script("m", &json!({"prompt_ms": 2500})).await?;
    let long = warden.http.post(CHAT, &chat("long", "m", "hi", 4, true)).await?;
    assert!(long.answer()?.is_whole());
    assert_eq!(warden.until_ready(1).await?[0].pid, old.pid);
    assert!(json_lines(&warden.recycles()).map_or(true, |found| found.is_empty()));
    Ok(())
}

#[tokio::test]
async fn a_client_that_does_not_read_is_no_wedge_of_its_server() -> Outcome {
    let warden = serve(&json!({"token_bytes": 65_536})).await?;
    let old = warden.until_ready(1).await?[0];
    let mut lazy = warden.http.stream(CHAT, &chat("lazy", "m", "hi", 400, true)).await?;
    let first = lazy.event().await?;
    assert!(first.is_some());
    // The client's unread bytes fill all buffers, for four times the limit.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (answer, end) = lazy.rest().await;
    end?;
    assert!(answer.is_whole());
    assert_eq!(warden.until_ready(1).await?[0].pid, old.pid);
    Ok(())
}
