//! A backend is drained and replaced without a failed request: on command, by count, by memory, in both ways.

use std::time::Duration;

use serde_json::{Value, json};
use warden_rig::swarm::{all_whole, names, requests, same, swarm};
use warden_rig::warden::{CHAT, SOON, Setup, chat, json_lines};
use warden_rig::{Context as _, Fake, Outcome, Trouble, Warden, wait_until};

const EAGER: &str = "policy.jitter = 0.0\npolicy.quiet_for = \"1ms\"\npolicy.quiet_within = \"50ms\"\n\
                     policy.min_interval = \"1ms\"\npolicy.min_interval_hard = \"1ms\"\n";

/// With 2 ms per token, requests are in flight when something happens.
fn paced() -> Value {
    json!({"ms_per_token": 2})
}

fn entries(warden: &Warden) -> Result<Vec<Value>, Trouble> {
    json_lines(&warden.recycles())
}

/// Waits for this number of entries. Meanwhile `work` requests repeat, because on a busy machine a process
/// may complete them before its replacement.
async fn until_entries(warden: &Warden, count: usize, work: usize) -> Result<Vec<Value>, Trouble> {
    let mut round = 0;
    wait_until(&format!("{count} entries in the ledger"), SOON, async || {
        round += 1;
        let more = requests(&format!("more{round}"), "m", work, 6);
        let whole = all_whole(&swarm(&warden.http, &more, 4).await).is_ok();
        whole && entries(warden).is_ok_and(|found| found.len() >= count)
    })
    .await?;
    entries(warden)
}

async fn restarted_under_load(replace: &str) -> Outcome {
    let all = requests("r", "m", 160, 12);
    let undisturbed = swarm(&Fake::start(&paced(), &["-np", "4"]).await?.http, &all, 8).await;
    let toml = format!("replace = \"{replace}\"");
    let warden = Setup::new()?.fake("m", &paced(), &toml)?.start().await?;
    warden.until_ready(1).await?;
    let (disturbed, restarts) = tokio::join!(swarm(&warden.http, &all, 8), warden.restart("m", 3));
    restarts?;
    same(&undisturbed, &disturbed)?;
    warden.ledger().each_finished_once(names(&all))?;
    assert!(warden.ledger().generations()? >= 2, "no restart fell into the load");
    let found = until_entries(&warden, 3, 0).await?;
    for entry in &found {
        assert_eq!(
            (entry["reason"].as_str(), entry["mode"].as_str()),
            (Some("operator"), Some(replace)),
            "{entry}"
        );
        assert_eq!(entry["cut"], 0, "{entry}");
        assert!(entry["failed"].is_null(), "{entry}");
        if replace == "overlap" {
            assert_eq!(entry["gap_ms"], 0, "{entry}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn restarts_under_load_in_sequence_fail_nothing_and_execute_nothing_twice() -> Outcome {
    restarted_under_load("sequential").await
}

#[tokio::test]
async fn restarts_under_load_by_overlap_fail_nothing_and_leave_no_gap() -> Outcome {
    restarted_under_load("overlap").await
}

#[tokio::test]
async fn a_slowly_loading_next_generation_makes_requests_wait_and_none_fail() -> Outcome {
    let all = requests("r", "m", 40, 6);
    let warden = Setup::new()?.fake("m", &paced(), "replace = \"sequential\"")?.start().await?;
    warden.until_ready(1).await?;
    warden.script("m", &json!({"load_ms": 700})).await?;
    let (answers, ran) = tokio::join!(swarm(&warden.http, &all, 8), warden.cli(&["restart", "m"]));
    assert_eq!(ran?.code, 0);
    all_whole(&answers)?;
    let entry = until_entries(&warden, 1, 0).await?.remove(0);
    assert!(entry["gap_ms"].as_u64().is_some_and(|gap| gap >= 700), "{entry}");
    assert!(entry["carried_over"].as_u64().is_some_and(|carried| carried > 0), "{entry}");
    Ok(())
}

#[tokio::test]
async fn a_backend_is_replaced_after_its_share_of_requests() -> Outcome {
    let all = requests("r", "m", 100, 6);
    let toml = format!("policy.max_requests = 20\n{EAGER}");
    let warden = Setup::new()?.top("sensors.interval = \"20ms\"").fake("m", &paced(), &toml)?.start().await?;
    let answers = swarm(&warden.http, &all, 4).await;
    all_whole(&answers)?;
    warden.ledger().each_finished_once(names(&all))?;
    let found = until_entries(&warden, 2, 20).await?;
    for entry in found {
        assert_eq!(entry["reason"], "max_requests");
        assert!(entry["evidence"]["requests"].as_u64().is_some_and(|requests| requests >= 20), "{entry}");
    }
    Ok(())
}

#[tokio::test]
async fn a_leaking_backend_is_replaced_at_its_soft_budget_and_memory_comes_back() -> Outcome {
    let all = requests("r", "m", 60, 6);
    let script = json!({"ms_per_token": 2, "leak_kib_per_request": 1024});
    // The leak is too fast for the usual rule, by which a budget filled within four loads is too small.
    let toml = format!("policy.host.soft = \"48MiB\"\n{EAGER}");
    let top = "sensors.interval = \"100ms\"\ninternal.recycle.budget_loads = 0.0\n\
               internal.recycle.budget_requests = 0\ninternal.recycle.load_factor = 0.0";
    let warden = Setup::new()?.top(top).fake("m", &script, &toml)?.start().await?;
    let answers = swarm(&warden.http, &all, 4).await;
    all_whole(&answers)?;
    warden.ledger().each_finished_once(names(&all))?;
    for entry in until_entries(&warden, 2, 20).await? {
        assert_eq!(
            (entry["reason"].as_str(), &entry["helped"]),
            (Some("host_soft"), &json!(true)),
            "{entry}"
        );
        let held = entry["evidence"]["host_bytes"].as_u64().context("no evidence")?;
        let budget = entry["evidence"]["budget_bytes"].as_u64().context("no budget")?;
        assert!(held > budget && budget == 48 << 20, "{entry}");
    }
    Ok(())
}

#[tokio::test]
async fn at_the_hard_budget_a_busy_backend_is_drained_now_and_its_streams_end_well() -> Outcome {
    let script = json!({"ms_per_token": 10, "leak_kib_per_token": 1024});
    // The server is never quiet, so only the hard budget can cause a replacement.
    let toml =
        "policy.host.hard = \"64MiB\"\npolicy.min_interval_hard = \"1ms\"\npolicy.quiet_within = \"1h\"\n";
    let warden = Setup::new()?.top("sensors.interval = \"100ms\"").fake("m", &script, toml)?.start().await?;
    let all: Vec<Value> = (0..3).map(|n| chat(&format!("s-{n}"), "m", "long", 150, true)).collect();
    let answers = swarm(&warden.http, &all, 3).await;
    all_whole(&answers)?;
    let entry = until_entries(&warden, 1, 0).await?.remove(0);
    assert_eq!((entry["reason"].as_str(), &entry["cut"]), (Some("host_hard"), &json!(0)), "{entry}");
    Ok(())
}

#[tokio::test]
async fn a_budget_that_a_fresh_process_passes_replaces_nothing_and_is_said_to_be_too_small() -> Outcome {
    let script = json!({"base_mib": 96});
    let toml = format!("policy.host.soft = \"32MiB\"\nreplace = \"sequential\"\n{EAGER}");
    let mut warden =
        Setup::new()?.top("sensors.interval = \"50ms\"").fake("m", &script, &toml)?.start().await?;
    warden.says("the budget is below what this model needs to work").await?;
    let answer = warden.http.post(CHAT, &chat("a", "m", "still there?", 4, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    wait_until("the status says so", SOON, async || {
        let status = warden.cli(&["status"]).await;
        status.is_ok_and(|status| status.stdout.contains("below what this model needs"))
    })
    .await?;
    assert!(entries(&warden)?.is_empty());
    // The next start knows the memory that this process held.
    wait_until("its needs are remembered", SOON, async || {
        let config = warden.home().path().join("warden.toml").display().to_string();
        let checked = warden.cli(&["config", "check", &config]).await;
        checked.is_ok_and(|checked| checked.all().contains("below what this model needs"))
    })
    .await
}

#[tokio::test]
async fn a_drain_deadline_cuts_what_does_not_end_and_the_ledger_says_so() -> Outcome {
    let script = json!({"ms_per_token": 20});
    let toml =
        "replace = \"sequential\"\nlifecycle.drain_deadline = \"300ms\"\nlifecycle.stop_grace = \"500ms\"";
    let warden = Setup::new()?.fake("m", &script, toml)?.start().await?;
    let mut flow = warden.http.stream(CHAT, &chat("endless", "m", "go", 1_000_000, true)).await?;
    flow.event().await?;
    let restart = warden.cli(&["restart", "m"]);
    let (ran, (answer, _)) = tokio::join!(restart, async { flow.rest().await });
    assert_eq!(ran?.code, 0);
    assert!(answer.error.is_some() && !answer.is_whole(), "{answer:?}");
    let entry = until_entries(&warden, 1, 0).await?.remove(0);
    assert_eq!(entry["cut"], 1, "{entry}");
    Ok(())
}

#[tokio::test]
async fn a_drained_model_stops_and_starts_again_with_the_next_request() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    let first = warden.until_ready(1).await?;
    assert_eq!(warden.cli(&["drain", "m"]).await?.code, 0);
    Warden::until_gone(&first, Duration::from_secs(5)).await?;
    assert!(warden.backends().is_empty());
    let answer = warden.http.post(CHAT, &chat("a", "m", "again", 4, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    Ok(())
}

#[tokio::test]
async fn a_healthy_process_is_not_stopped_when_the_next_one_would_miss_its_model() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "replace = \"sequential\"\n")?.start().await?;
    let first = warden.until_ready(1).await?;
    let (model, away) = (warden.setup.home.path().join("model.gguf"), warden.setup.home.path().join("away"));
    std::fs::rename(&model, &away)?;
    let ran = warden.cli(&["restart", "m"]).await?;
    assert!(ran.code == 1 && ran.stderr.contains("model.gguf"), "{ran:?}");
    let answer = warden.http.post(CHAT, &chat("a", "m", "hi", 4, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    assert_eq!(warden.backends(), first, "the running process was kept");
    assert!(warden.cli(&["events"]).await?.stdout.contains("was kept"));
    std::fs::rename(&away, &model)?;
    let ran = warden.cli(&["restart", "m"]).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn who_waits_from_the_beginning_of_a_replacement_is_served_however_long_it_drains() -> Outcome {
    let toml = "replace = \"sequential\"\nqueue.wait = \"3s\"\nlifecycle.drain_deadline = \"3s\"\n";
    let script = json!({"load_ms": 1000, "ms_per_token": 10});
    let warden = Setup::new()?.fake("m", &script, toml)?.start().await?;
    warden.until_ready(1).await?;
    let mut long = warden.http.stream(CHAT, &chat("long", "m", "go", 100_000, true)).await?;
    long.event().await?;
    let waits = async {
        wait_until("it drains", SOON, async || {
            warden.state("m").await.is_ok_and(|state| state == "draining")
        })
        .await?;
        warden.http.post(CHAT, &chat("waits", "m", "hi", 4, false)).await
    };
    let (ran, answer, _) = tokio::join!(warden.cli(&["restart", "m"]), waits, long.rest());
    assert_eq!(ran?.code, 0);
    let answer = answer?;
    assert!(answer.status.is_success(), "{} {}", answer.status, answer.text());
    Ok(())
}
