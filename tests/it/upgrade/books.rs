//! An upgrade carries over counters, due actions and loaded models: nothing is counted twice or starts over.

use serde_json::{Value, json};
use warden_rig::swarm::{all_whole, swarm};
use warden_rig::warden::{CHAT, SOON, Setup, chat, json_lines};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

use super::upgrade;

async fn ask(warden: &Warden, from: usize, count: usize) -> Outcome {
    let requests: Vec<Value> =
        (from..from + count).map(|n| chat(&format!("r{n}"), "m", "hi", 2, false)).collect();
    all_whole(&swarm(&warden.http, &requests, 1).await)
}

async fn replaced(warden: &Warden, times: usize) -> Result<Vec<Value>, Trouble> {
    wait_until(&format!("{times} replacements are in the ledger"), SOON, async || {
        json_lines(&warden.recycles()).is_ok_and(|entries| entries.len() >= times)
    })
    .await?;
    json_lines(&warden.recycles())
}

#[tokio::test]
async fn a_process_is_replaced_after_the_requests_that_it_had_in_all_programs_together() -> Outcome {
    let policy = "policy.max_requests = 30\npolicy.jitter = 0.0\npolicy.quiet_for = \"1ms\"\n\
                  policy.quiet_within = \"100ms\"\npolicy.min_interval = \"1ms\"\npolicy.min_interval_hard = \"1ms\"\n";
    let top = "sensors.interval = \"50ms\"";
    let warden = Setup::new()?.top(top).fake("m", &json!({}), policy)?.start().await?;
    let first = warden.until_ready(1).await?;
    ask(&warden, 0, 14).await?;
    upgrade(&warden).await?;
    ask(&warden, 14, 8).await?;
    upgrade(&warden).await?;
    ask(&warden, 22, 6).await?;
    assert_eq!(warden.until_ready(1).await?, first, "28 of 30");
    assert_eq!(json_lines(&warden.recycles())?, [] as [Value; 0]);
    ask(&warden, 28, 3).await?;
    let entries = replaced(&warden, 1).await?;
    assert_eq!(entries.len(), 1, "{entries:?}");
    assert_eq!(entries[0]["reason"], "max_requests", "{entries:?}");
    let second = warden.until_ready(1).await?;
    assert_ne!(second, first);
    // The next program does not repeat written entries, and numbers continue.
    upgrade(&warden).await?;
    ask(&warden, 31, 31).await?;
    let entries = replaced(&warden, 2).await?;
    assert_eq!(entries.len(), 2, "{entries:?}");
    let events = json_lines(&warden.home().path().join("state/llama-warden/events.jsonl"))?;
    // Each program numbers its own events, and none is written twice.
    let number = |event: &Value| (event["at"].to_string(), event["id"].as_u64());
    let mut numbers: Vec<_> = events.iter().map(number).collect();
    numbers.sort_unstable();
    assert!(numbers.is_sorted_by(|one, next| one < next), "{events:?}");
    let began = events.iter().filter(|event| event["kind"] == "recycle_began").count();
    assert_eq!(began, 2, "{events:?}");
    Ok(())
}

#[tokio::test]
async fn the_next_program_knows_who_is_loaded_and_who_has_to_leave() -> Outcome {
    let top =
        "loading.max_loaded = 1\ninternal.loading.turn_least = \"100ms\"\ninternal.loading.noted = \"100ms\"";
    let mut setup = Setup::new()?.top(top);
    for name in ["a", "b"] {
        setup = setup.fake(name, &json!({"load_ms": 30}), "preload = false\n")?;
    }
    let warden = setup.start().await?;
    let asked = async |model: &str| -> Outcome {
        let answer = warden.http.post(CHAT, &chat("x", model, "hi", 2, true)).await?.answer()?;
        answer.is_whole().then_some(()).context(format!("{answer:?}"))
    };
    asked("a").await?;
    let loaded = warden.until_ready(1).await?;
    upgrade(&warden).await?;
    asked("a").await?;
    assert_eq!(warden.until_ready(1).await?, loaded, "it is there");
    for model in ["b", "a", "b"] {
        asked(model).await?;
        assert_eq!(warden.backends().len(), 1, "as many as may be");
        upgrade(&warden).await?;
    }
    assert_eq!(warden.state("a").await?, "unloaded");
    Ok(())
}
