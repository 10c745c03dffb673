//! Promise: a canary (another build of llama-server that serves a share of requests) never makes a request
//! fail.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use warden_rig::process::ProcessId;
use warden_rig::swarm::{Answers, all_whole, requests, same, swarm};
use warden_rig::warden::{CHAT, SOON, Setup, chat, json_lines};
use warden_rig::{Context as _, Fake, Outcome, Trouble, Warden, binaries, wait_for, wait_until};

/// Short backoffs and frequent readings, for canaries that fail or hang.
pub(crate) const HASTY: &str = "on_death = \"continue\"\nlifecycle.backoff_first = \"20ms\"\nlifecycle.backoff_cap = \"50ms\"\n\
                     args = [\"-np\", \"8\", \"--metrics\", \"--cache-ram\", \"0\", \"--ctx-checkpoints\", \"0\"]\n";
pub(crate) const OFTEN: &str = "sensors.interval = \"20ms\"\ninternal.sensors.idle_settle = \"1ms\"\n\
                     internal.growth.host_effect = \"4MiB\"\ninternal.growth.allowance_slack = \"4MiB\"\n\
                     internal.canary.patience_least = \"500ms\"";

/// More requests than any verdict here needs.
const MANY: usize = 4000;
const BATCH: usize = 40;

/// Starts llama-warden with a model `m`, and writes another build of its llama-server with the script
/// `canary`.
async fn started(own: &Value, canary: &Value, top: &str) -> Result<(Warden, PathBuf), Trouble> {
    let setup = Setup::new()?.top(OFTEN).top(top).fake("m", own, HASTY)?;
    let binary = another_build(&setup, canary)?;
    let warden = setup.start().await?;
    warden.until_ready(1).await?;
    Ok((warden, binary))
}

/// Writes a program that runs fake-llama with another script.
pub(crate) fn another_build(setup: &Setup, script: &Value) -> Result<PathBuf, Trouble> {
    let script = setup.home.file("scripts/m-canary.json", script.to_string())?;
    let text = format!(
        "#!/bin/sh\nFAKE_LLAMA_SCRIPT='{}' exec '{}' \"$@\"\n",
        script.display(),
        binaries::fake_llama()?.display()
    );
    let program = setup.home.program("canary-llama-server", text)?;
    Ok(program)
}

pub(crate) async fn start(
    warden: &Warden,
    binary: &std::path::Path,
    more: &[&str],
) -> Result<Value, Trouble> {
    let binary = binary.to_string_lossy();
    let mut args = vec!["canary", "start", "m", "--json", "--binary", &*binary];
    args.extend(more);
    let ran = warden.cli(&args).await?;
    if ran.code != 0 {
        return Err(Trouble::new(format!("canary start: {ran:?}")));
    }
    wait_for("the canary runs", SOON, async || {
        let view = view_of(warden).await.ok()?;
        (view["state"] == "running").then_some(view)
    })
    .await
}

pub(crate) async fn view_of(warden: &Warden) -> Result<Value, Trouble> {
    warden.admin().get("/models/m/canary").await?.json()
}

pub(crate) async fn ended(warden: &Warden) -> Result<Value, Trouble> {
    wait_for("the canary has ended", SOON, async || {
        let view = view_of(warden).await.ok()?;
        (view["state"] == "ended").then_some(view)
    })
    .await
}

pub(crate) fn canaries(warden: &Warden) -> Vec<ProcessId> {
    let is_one = |process: &ProcessId| {
        let script = process.variable("FAKE_LLAMA_SCRIPT");
        script.is_some_and(|script| script.to_string_lossy().ends_with("m-canary.json"))
    };
    warden.backends().into_iter().filter(is_one).collect()
}

async fn load_until_ended(warden: &Warden, tokens: u64) -> Result<Value, Trouble> {
    for from in (0..MANY).step_by(BATCH) {
        let batch: Vec<Value> = (from..from + BATCH)
            .map(|n| chat(&format!("c-{n}"), "m", &format!("say it {n} times"), tokens, n.is_multiple_of(2)))
            .collect();
        all_whole(&swarm(&warden.http, &batch, 6).await)?;
        let view = view_of(warden).await?;
        if view["state"] == "ended" {
            return Ok(view);
        }
    }
    Err(Trouble::new(format!("not within {MANY} requests: {}", view_of(warden).await?)))
}

/// PIDs that executed each request, by its name.
pub(crate) fn executed_by(warden: &Warden) -> Result<BTreeMap<String, Vec<i32>>, Trouble> {
    let mut by: BTreeMap<String, Vec<i32>> = BTreeMap::new();
    for line in warden.ledger().lines()?.into_iter().filter(|line| line.event == "begun") {
        by.entry(line.id).or_default().push(line.pid);
    }
    Ok(by)
}

pub(crate) async fn undisturbed(requests: &[Value], script: &Value) -> Result<Answers, Trouble> {
    let fake = Fake::start(script, &["-np", "8"]).await?;
    Ok(swarm(&fake.http, requests, 6).await)
}

fn reasons(view: &Value) -> String {
    view["reasons"].to_string()
}

#[tokio::test]
async fn a_conversation_stays_where_it_began_and_the_share_is_about_right() -> Outcome {
    let (warden, binary) = started(&json!({}), &json!({}), "").await?;
    let view = start(&warden, &binary, &["--share", "30%", "--for", "1h"]).await?;
    assert_eq!((&view["share"], &view["verdict"]), (&json!(0.3), &json!("undecided")), "{view}");
    let turn = |conversation: usize, turn: usize| {
        let mut request = chat(&format!("s-{conversation}-{turn}"), "m", "", 2, false);
        let mut messages = vec![json!({"role": "user", "content": format!("conversation {conversation}")})];
        for said in 0..turn {
            messages.push(json!({"role": "assistant", "content": format!("answer {said}")}));
            messages.push(json!({"role": "user", "content": format!("question {said}")}));
        }
        request["messages"] = Value::Array(messages);
        request
    };
    let own: Vec<i32> = canaries(&warden).iter().map(|process| process.pid).collect();
    let mut taken = 0;
    for conversation in 0..120 {
        for n in 0..3 {
            let answer = warden.http.post(CHAT, &turn(conversation, n)).await?;
            assert!(answer.status.is_success(), "{}", answer.text());
        }
        let by = executed_by(&warden)?;
        let at = |n: usize| by[&format!("s-{conversation}-{n}")].clone();
        assert_eq!((at(0), at(0)), (at(1), at(2)), "conversation {conversation}");
        taken += usize::from(own.contains(&at(0)[0]));
    }
    // The count for 120 requests at a share of 0.3 lies outside these bounds less than once in ten thousand
    // times.
    assert!((17..56).contains(&taken), "{taken} of 120");
    let status = warden.admin().get("/status").await?.json()?;
    assert_eq!(status["fleet"]["canaries"][0]["name"], "m@canary", "{status}");
    assert_eq!(status["fleet"]["models"].as_array().map(Vec::len), Some(1), "{status}");
    // Clients can neither request the canary nor see it.
    let listed = warden.http.get("/v1/models").await?.text();
    assert!(!listed.contains("canary"), "{listed}");
    let asked = warden.http.post(CHAT, &chat("x", "m@canary", "hi", 1, false)).await?;
    assert_eq!(asked.status.as_u16(), 404, "{}", asked.text());
    // A second canary is refused, as is an invalid build or share.
    let again = warden.cli(&["canary", "start", "m", "--binary", &binary.to_string_lossy()]).await?;
    assert!(again.code != 0 && again.stderr.contains("has a canary"), "{again:?}");
    let ran = warden.cli(&["canary", "stop", "m"]).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    Warden::until_gone(&canaries(&warden), SOON).await?;
    for (args, told) in [
        (["m", "--binary", "/nowhere/llama-server"], "there is no file /nowhere/llama-server"),
        (["other", "--binary", "/bin/true"], "there is no model `other`"),
        (["m", "--build", "0123"], "there is no build `0123`"),
    ] {
        let mut all = vec!["canary", "start"];
        all.extend(args);
        let ran = warden.cli(&all).await?;
        assert!(ran.code != 0 && ran.stderr.contains(told), "{ran:?}");
    }
    let much =
        ["canary", "start", "m", "--share", "90%", "--binary", &*binary.to_string_lossy()].map(str::to_owned);
    let ran = warden.cli(&much.each_ref().map(String::as_str)).await?;
    assert!(ran.code != 0 && ran.stderr.contains("0.9"), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn a_canary_that_is_killed_with_all_streams_open_fails_nobody_and_every_text_is_whole() -> Outcome {
    let slow = json!({"ms_per_token": 8});
    let (warden, binary) = started(&slow, &slow, "").await?;
    start(&warden, &binary, &["--share", "50%"]).await?;
    let all = requests("k", "m", 60, 40);
    let wanted = undisturbed(&all, &json!({})).await?;
    let (http, batch) = (warden.http.clone(), all.clone());
    let mut load = JoinSet::new();
    load.spawn(async move { swarm(&http, &batch, 12).await });
    let mut kills = 0;
    let answers = loop {
        let at_work = wait_for("the canary is at work", SOON * 4, async || {
            let now = canaries(&warden);
            let state = now.first()?.http()?.get("/fake/state").await.ok()?.json().ok()?;
            (state["busy"].as_u64()? > 1).then_some(now)
        });
        tokio::select! {
            answers = load.join_next() => break answers.context("a load")??,
            victims = at_work, if kills < 3 => {
                for victim in victims? {
                    victim.signal(Signal::KILL);
                }
                kills += 1;
            }
        }
    };
    assert!(kills > 0, "the load was over before");
    same(&wanted, &answers)?;
    let view = view_of(&warden).await?;
    assert!(view["report"]["canary"]["failures"].as_u64() > Some(0), "{view}");
    Ok(())
}

/// A faulty canary fails no request, and is found to be worse.
async fn found_worse(canary: &Value, because: &str) -> Outcome {
    let (warden, binary) = started(&json!({}), canary, "").await?;
    start(&warden, &binary, &["--share", "30%"]).await?;
    let view = load_until_ended(&warden, 4).await?;
    assert_eq!(view["verdict"], "worse", "{view}");
    assert!(reasons(&view).contains(because), "{view}");
    // The canary has ended, and ledger, history and metrics show it.
    wait_until("its process has ended", SOON, async || canaries(&warden).is_empty()).await?;
    let ledger = json_lines(&warden.recycles())?;
    let entry = ledger.iter().find(|entry| entry["kind"] == "canary").context(format!("{ledger:?}"))?;
    assert_eq!((&entry["model"], &entry["verdict"]), (&json!("m"), &json!("worse")), "{entry}");
    warden.until_metrics(&["llama_warden_canary_verdicts_total{model=\"m\",verdict=\"worse\"} 1"]).await?;
    let history = warden.cli(&["history", "--reason", "canary_ended"]).await?;
    assert!(history.stdout.contains("is worse"), "{history:?}");
    let watched = warden.cli(&["canary", "status", "m", "--watch", "--json"]).await?;
    assert_eq!(watched.code, 3, "{watched:?}");
    Ok(())
}

#[tokio::test]
async fn a_canary_that_answers_with_errors_fails_nobody_and_is_worse() -> Outcome {
    found_worse(&json!({"faults": [{"do": "error", "from": 1}]}), "it fails more often").await
}

#[tokio::test]
async fn a_canary_that_hangs_fails_nobody_and_is_worse() -> Outcome {
    found_worse(&json!({"faults": [{"do": "hang", "from": 1}]}), "it").await
}

#[tokio::test]
async fn a_canary_that_sends_its_head_and_then_hangs_is_left_in_time() -> Outcome {
    let stall = json!({"do": "stall", "from": 1, "after_tokens": 0, "ms": 600_000});
    let canary = json!({"stream_head": "slot", "faults": [stall]});
    found_worse(&canary, "it fails more often").await
}

#[tokio::test]
async fn a_death_of_the_models_own_server_behind_a_canary_that_was_left_is_one_like_any_other() -> Outcome {
    let head = json!({"stream_head": "slot"});
    let with = |fault: Value| {
        let mut script = head.clone();
        script["faults"] = json!([fault]);
        script
    };
    let own = with(json!({"do": "crash", "from": 5, "after_tokens": 3}));
    let canary = with(json!({"do": "stall", "from": 1, "after_tokens": 0, "ms": 600_000}));
    // The canary continues, because this error rate is never reached.
    let (warden, binary) = started(&own, &canary, "internal.canary.wrong = 1e-12").await?;
    start(&warden, &binary, &["--share", "50%"]).await?;
    let all = requests("d", "m", 40, 8);
    let wanted = undisturbed(&all, &head).await?;
    same(&wanted, &swarm(&warden.http, &all, 1).await)?;
    // Executed by the canary, by a server that died, and by a third process.
    let met = executed_by(&warden)?;
    assert!(met.values().any(|processes| processes.len() == 3), "{met:?}");
    Ok(())
}

#[tokio::test]
async fn a_canary_that_crashes_at_each_request_fails_nobody_and_is_worse() -> Outcome {
    found_worse(&json!({"faults": [{"do": "crash", "from": 3, "after_tokens": 2}]}), "it").await
}

#[tokio::test]
async fn a_canary_that_is_much_slower_is_worse() -> Outcome {
    let (warden, binary) = started(&json!({"ms_per_token": 1}), &json!({"ms_per_token": 12}), "").await?;
    start(&warden, &binary, &["--share", "40%"]).await?;
    let view = load_until_ended(&warden, 12).await?;
    assert_eq!(view["verdict"], "worse", "{view}");
    assert!(reasons(&view).contains("longer for a token"), "{view}");
    Ok(())
}

#[tokio::test]
async fn a_canary_that_leaks_where_the_other_does_not_is_worse() -> Outcome {
    let (warden, binary) = started(&json!({}), &json!({"leak_kib_per_request": 512}), "").await?;
    start(&warden, &binary, &["--share", "50%", "--slower", "100"]).await?;
    let view = load_until_ended(&warden, 2).await?;
    assert_eq!(view["verdict"], "worse", "{view}");
    assert!(reasons(&view).contains("it leaks host memory"), "{view}");
    Ok(())
}

#[tokio::test]
async fn a_canary_that_is_as_good_is_let_go_early() -> Outcome {
    // With slow answers, the delays of a busy machine matter little.
    let script = json!({"ms_per_token": 4});
    let (warden, binary) = started(&script, &script, "").await?;
    start(&warden, &binary, &["--share", "50%", "--slower", "100%"]).await?;
    let view = load_until_ended(&warden, 10).await?;
    assert_eq!(view["verdict"], "better_or_equal", "{view}");
    let requests = view["report"]["canary"]["requests"].as_u64().unwrap_or_default();
    assert!(requests < 1500, "stopped early: {view}");
    let watched = warden.cli(&["canary", "status", "m", "--watch"]).await?;
    assert_eq!(watched.code, 0, "{watched:?}");
    Ok(())
}

#[tokio::test]
async fn a_canary_that_does_not_start_is_worse_and_says_why() -> Outcome {
    let (warden, binary) = started(&json!({}), &json!({"fail": "abort"}), "").await?;
    let ran = warden.cli(&["canary", "start", "m", "--binary", &binary.to_string_lossy()]).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let view = ended(&warden).await?;
    assert_eq!(view["verdict"], "worse", "{view}");
    assert!(reasons(&view).contains("it does not start"), "{view}");
    assert!(warden.http.post(CHAT, &chat("a", "m", "hi", 2, false)).await?.status.is_success());
    Ok(())
}

#[tokio::test]
async fn a_canary_without_room_is_refused_with_numbers() -> Outcome {
    let (warden, binary) = started(&json!({}), &json!({}), "loading.max_loaded = 1").await?;
    let ran = warden.cli(&["canary", "start", "m", "--binary", &binary.to_string_lossy()]).await?;
    assert!(ran.code != 0 && ran.stderr.contains("max_loaded"), "{ran:?}");
    assert!(canaries(&warden).is_empty());
    assert!(warden.http.post(CHAT, &chat("a", "m", "hi", 2, false)).await?.status.is_success());
    Ok(())
}

#[tokio::test]
async fn reload_replacement_drain_stop_and_the_end_during_a_canary_fail_nobody() -> Outcome {
    let slow = json!({"ms_per_token": 3});
    let (mut warden, binary) = started(&slow, &slow, "").await?;
    start(&warden, &binary, &["--share", "50%"]).await?;
    let config = warden.setup.config();
    let all = requests("r", "m", 200, 20);
    let wanted = undisturbed(&all, &json!({})).await?;
    let (http, batch) = (warden.http.clone(), all.clone());
    let mut load = JoinSet::new();
    load.spawn(async move { swarm(&http, &batch, 8).await });
    // The canary survives a change of other settings.
    warden.reload(&(config.clone() + "\nqueue.depth = 77\n"))?;
    warden.says("configuration applied").await?;
    assert_eq!(view_of(&warden).await?["state"], "running");
    // The canary survives a replacement of its model's process.
    warden.restart("m", 1).await?;
    assert_eq!(view_of(&warden).await?["state"], "running");
    let stopped = warden.cli(&["canary", "stop", "m", "--json"]).await?;
    assert_eq!(stopped.code, 0, "{stopped:?}");
    wait_until("no process of it is left", SOON, async || canaries(&warden).is_empty()).await?;
    same(&wanted, &load.join_next().await.context("a load")??)?;
    // A change of its model's command ends the canary, and the log says so.
    start(&warden, &binary, &[]).await?;
    warden.reload(&config.replace("\"-np\", \"8\"", "\"-np\", \"6\""))?;
    let view = ended(&warden).await?;
    assert!(view["missing"].to_string().contains("changed by a reload"), "{view}");
    start(&warden, &binary, &["--share", "50%"]).await?;
    // The canary ends while both processes answer.
    let long = requests("e", "m", 8, 60);
    let wanted = undisturbed(&long, &json!({})).await?;
    let (http, batch) = (warden.http.clone(), long.clone());
    let mut load = JoinSet::new();
    load.spawn(async move { swarm(&http, &batch, 8).await });
    wait_until("all are begun", SOON, async || {
        executed_by(&warden).is_ok_and(|by| by.keys().filter(|id| id.starts_with("e-")).count() == 8)
    })
    .await?;
    let processes = warden.backends();
    assert_eq!(warden.terminate(SOON).await?, 0);
    same(&wanted, &load.join_next().await.context("a load")??)?;
    Warden::until_gone(&processes, Duration::from_secs(1)).await?;
    let ledger = json_lines(&warden.recycles())?;
    let last = ledger.iter().rfind(|entry| entry["kind"] == "canary").context("an entry")?;
    assert!(last["missing"].to_string().contains("llama-warden was stopped"), "{last}");
    Ok(())
}
