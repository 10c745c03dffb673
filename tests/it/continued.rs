//! If a server dies before the client has any of its answer, the request is executed once more, and the
//! client sees only a mark in the answer.

use std::collections::BTreeSet;

use rustix::process::Signal;
use serde_json::json;
use warden_rig::ledger::End;
use warden_rig::swarm::{all_whole, requests, swarm};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Outcome, Trouble, wait_until};

const GOING_ON: &str =
    "on_death = \"continue\"\nlifecycle.backoff_first = \"20ms\"\nlifecycle.backoff_cap = \"50ms\"\n";
const LOOKING: &str = "internal.lifecycle.look_interval = \"50ms\"";

#[tokio::test]
async fn an_answer_whose_server_dies_comes_from_the_next_and_is_marked() -> Outcome {
    for streamed in [false, true] {
        let setup = Setup::new()?.top(LOOKING);
        let once = setup.home.path().join("once");
        // The crash comes with the request in its slot: a streamed answer has its head, but no event.
        let script = json!({"faults": [{"do": "crash", "after_tokens": 0, "signal": 9, "once": once}]});
        let mut warden = setup.fake("m", &script, GOING_ON)?.start().await?;
        warden.until_ready(1).await?;
        if streamed {
            let mut flow = warden.http.stream(CHAT, &chat("a", "m", "hi", 6, true)).await?;
            let (answer, _) = flow.rest().await;
            assert!(answer.is_whole() && answer.error.is_none(), "{answer:?}");
        } else {
            let answer = warden.http.post(CHAT, &chat("a", "m", "hi", 6, false)).await?;
            assert!(answer.status.is_success(), "{}", answer.text());
            assert_eq!(answer.header("x-warden-continued"), "1");
        }
        assert_eq!(warden.ledger().executions()?["a"], [End::Open, End::Finished]);
        warden.says("continued=true").await?;
        warden.until_metrics(&["llama_warden_requests_continued_total{model=\"m\"} 1"]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_request_that_kills_every_server_is_refused_after_the_second_and_nobody_else_is() -> Outcome {
    let script = json!({"ms_per_token": 2, "faults": [{"do": "crash", "body_has": "POISON"}]});
    let warden = Setup::new()?.top(LOOKING).fake("m", &script, GOING_ON)?.start().await?;
    warden.until_ready(1).await?;
    let answer = warden.http.post(CHAT, &chat("p", "m", "POISON", 9, false)).await?;
    assert_eq!(answer.status.as_u16(), 422, "{}", answer.text());
    assert_eq!(answer.header("x-warden-executed"), "maybe");
    assert_eq!(answer.json()?["error"]["code"], "request_quarantined");
    // The connection breaks before llama-warden sees the exit.
    wait_until("both crashes are counted", SOON, async || {
        warden.status("m").await.is_ok_and(|model| model["crashes"] == 2)
    })
    .await?;
    all_whole(&swarm(&warden.http, &requests("q", "m", 6, 4), 6).await)?;
    Ok(())
}

#[tokio::test]
async fn one_in_which_every_server_crashes_without_an_end_is_refused_too() -> Outcome {
    // Probes keep their usual interval, so only the log line can make the difference.
    let setup = Setup::new()?.top(LOOKING).top("internal.lifecycle.crash_ends = \"500ms\"");
    let says = "CUDA error: an illegal instruction was encountered";
    let fault = json!({"do": "hang", "silent_health": true, "says": says, "body_has": "POISON"});
    let script = json!({"ms_per_token": 2, "faults": [fault]});
    let mut warden = setup.fake("m", &script, GOING_ON)?.start().await?;
    warden.until_ready(1).await?;
    let answer = warden.http.post(CHAT, &chat("p", "m", "POISON", 9, false)).await?;
    assert_eq!(answer.status.as_u16(), 422, "{}", answer.text());
    assert_eq!(answer.json()?["error"]["code"], "request_quarantined");
    warden.says(&format!("because it logged `{says}`")).await?;
    all_whole(&swarm(&warden.http, &requests("q", "m", 6, 4), 6).await)?;
    let told = warden.cli(&["events"]).await?;
    assert!(told.stdout.contains("recycle began: crashed"), "{told:?}");
    Ok(())
}

#[tokio::test]
async fn killed_again_and_again_under_load_no_request_fails() -> Outcome {
    let script = json!({"ms_per_token": 4});
    let warden = Setup::new()?.top(LOOKING).fake("m", &script, GOING_ON)?.start().await?;
    for turn in 0..4 {
        let before = warden.until_ready(1).await?;
        let name = |n: u64| format!("r{turn}-{n}");
        let asked: Vec<_> = (0..12).map(|n| chat(&name(n), "m", "hi", 30, n % 2 == 0)).collect();
        let kill = async {
            wait_until("four of them are computed", SOON, async || {
                let lines = warden.ledger().lines().unwrap_or_default();
                lines.iter().filter(|line| line.event == "begun" && line.pid == before[0].pid).count() >= 4
            })
            .await?;
            before[0].signal(Signal::KILL);
            Ok::<_, Trouble>(())
        };
        let (answers, killed) = tokio::join!(swarm(&warden.http, &asked, 8), kill);
        killed?;
        all_whole(&answers)?;
        for (name, ends) in warden.ledger().executions()? {
            assert!(matches!(ends[..], [End::Finished] | [End::Open, End::Finished]), "{name}: {ends:?}");
        }
        let texts: BTreeSet<_> =
            answers.values().map(|answer| answer.as_ref().map(|answer| &answer.text)).collect();
        assert_eq!(texts.len(), 1, "the same was asked of all: {texts:?}");
    }
    wait_until("each death has cost somebody a second execution", SOON, async || {
        let gone_on = warden.metric("llama_warden_requests_continued_total{model=\"m\"}").await;
        gone_on.is_ok_and(|all| all.is_some_and(|all| all >= 4.0))
    })
    .await?;
    Ok(())
}
