//! Deaths of llama-server around an upgrade: streams of the old program continue in the new one's next
//! process, and a death during the hand-over costs no request.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use tokio::task::JoinSet;
use warden_rig::http::Flow;
use warden_rig::ledger::End;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Answer, Context as _, Outcome, Trouble, Warden, binaries, wait_until};

use super::{until_alone, upgrade};

const FAST: &str = "lifecycle.backoff_first = \"20ms\"\nlifecycle.backoff_cap = \"50ms\"\n\
                    lifecycle.crash_cap = \"50ms\"\n";

async fn one(slots: u32, on_death: &str) -> Result<Warden, Trouble> {
    let more = format!("{FAST}on_death = \"{on_death}\"\nargs = [\"-np\", \"{slots}\", \"--metrics\"]\n");
    let setup = Setup::new()?.top("internal.lifecycle.look_interval = \"50ms\"");
    let warden = setup.fake("m", &json!({"ms_per_token": 10}), &more)?.start().await?;
    warden.until_ready(1).await?;
    Ok(warden)
}

async fn begun(warden: &Warden, id: &str, tokens: u64) -> Result<(Answer, Flow), Trouble> {
    let mut flow = warden.http.stream(CHAT, &chat(id, "m", "the same", tokens, true)).await?;
    let mut answer = Answer::default();
    while answer.text.is_empty() {
        answer.event(&flow.event().await?.context("it ended before its first token")?);
    }
    Ok((answer, flow))
}

async fn rest(begun: (Answer, Flow)) -> Result<Answer, Trouble> {
    let (mut answer, mut flow) = begun;
    while let Some(event) = flow.event().await? {
        answer.event(&event);
    }
    Ok(answer)
}

#[tokio::test]
async fn a_stream_of_the_old_program_goes_on_in_the_next_process_of_the_new_one() -> Outcome {
    let warden = one(4, "continue").await?;
    let text = warden.http.post(CHAT, &chat("wanted", "m", "the same", 150, false)).await?.answer()?.text;
    let before = warden.until_ready(1).await?;
    let old = begun(&warden, "old", 150).await?;
    let (http, whole) = (warden.http.clone(), chat("whole", "m", "the same", 150, false));
    let mut unstreamed = JoinSet::new();
    unstreamed.spawn(async move { http.post(CHAT, &whole).await });
    let is_begun = || warden.ledger().executions().is_ok_and(|all| all.contains_key("whole"));
    wait_until("it is computed", SOON, async || is_begun()).await?;
    upgrade(&warden).await?;
    let new = begun(&warden, "new", 150).await?;
    before[0].signal(Signal::KILL);
    for (id, answer) in [("old", rest(old).await?), ("new", rest(new).await?)] {
        assert!(answer.is_whole() && answer.text == text, "{id}: {answer:?} instead of {text:?}");
    }
    let whole = unstreamed.join_next().await.context("it was asked")???;
    assert!(whole.answer()?.text == text && whole.header("x-warden-continued") == "1", "{whole:?}");
    let after = warden.until_ready(1).await?;
    assert_ne!(after, before);
    until_alone(&warden).await?;
    let executions = warden.ledger().executions()?;
    for id in ["old", "new", "whole"] {
        assert_eq!(executions[id], [End::Open, End::Finished], "{id}");
    }
    assert_eq!(warden.status("m").await?["crashes"], 1);
    Ok(())
}

/// With a temperature and no seed, a request cannot be repeated and continues by its tokens. Therefore the
/// old program must know the command of the new one's process, across any number of programs in between.
#[tokio::test]
async fn a_stream_that_no_second_answer_would_equal_goes_on_by_its_tokens() -> Outcome {
    for upgrades in [1, 2] {
        let warden = one(4, "continue").await?;
        let drawn = |id: &str| {
            let mut body = chat(id, "m", "the same", 150, true);
            body["temperature"] = json!(0.7);
            body.as_object_mut().map(|fields| fields.remove("seed"));
            body
        };
        let text = warden.http.post(CHAT, &drawn("wanted")).await?.answer()?.text;
        let before = warden.until_ready(1).await?;
        let mut flow = warden.http.stream(CHAT, &drawn("old")).await?;
        let mut answer = Answer::default();
        while answer.text.is_empty() {
            answer.event(&flow.event().await?.context("it ended before its first token")?);
        }
        for _ in 0..upgrades {
            upgrade(&warden).await?;
        }
        before[0].signal(Signal::KILL);
        let answer = rest((answer, flow)).await?;
        assert!(
            answer.is_whole() && answer.text == text,
            "{upgrades} upgrades: {answer:?} instead of {text:?}"
        );
        assert_ne!(warden.until_ready(1).await?, before);
        until_alone(&warden).await?;
    }
    Ok(())
}

#[tokio::test]
async fn what_waits_in_the_old_program_is_executed_by_the_next_process() -> Outcome {
    let warden = one(1, "continue").await?;
    let before = warden.until_ready(1).await?;
    let old = begun(&warden, "old", 150).await?;
    let mut waiting = JoinSet::new();
    for number in 0..3 {
        let (http, request) = (warden.http.clone(), chat(&format!("w{number}"), "m", "hi", 3, number == 1));
        waiting.spawn(async move { http.post(CHAT, &request).await?.answer() });
    }
    wait_until("they wait", SOON, async || warden.waiting("m").await.is_ok_and(|all| all == 3)).await?;
    upgrade(&warden).await?;
    before[0].signal(Signal::KILL);
    assert!(rest(old).await?.is_whole());
    while let Some(answer) = waiting.join_next().await {
        let answer = answer??;
        assert!(answer.is_whole(), "{answer:?}");
    }
    for number in 0..3 {
        assert_eq!(warden.ledger().executions()?[&format!("w{number}")], [End::Finished]);
    }
    until_alone(&warden).await.map(drop)
}

#[tokio::test]
async fn where_a_death_is_told_the_old_programs_stream_says_so_and_the_new_one_starts_another() -> Outcome {
    let warden = one(4, "error").await?;
    let before = warden.until_ready(1).await?;
    let old = begun(&warden, "old", 300).await?;
    upgrade(&warden).await?;
    before[0].signal(Signal::KILL);
    let answer = rest(old).await?;
    assert!(answer.error.is_some() && !answer.is_whole(), "{answer:?}");
    until_alone(&warden).await?;
    let after = warden.until_ready(1).await?;
    assert_ne!(after, before);
    assert!(warden.http.post(CHAT, &chat("next", "m", "hi", 3, true)).await?.answer()?.is_whole());
    assert_eq!(warden.ledger().executions()?["old"], [End::Open]);
    Ok(())
}

#[tokio::test]
async fn a_death_at_any_moment_of_a_hand_over_costs_no_answer_and_no_process() -> Outcome {
    let warden = one(4, "continue").await?;
    let text = warden.http.post(CHAT, &chat("wanted", "m", "the same", 120, false)).await?.answer()?.text;
    let program = binaries::llama_warden()?;
    let to = program.to_string_lossy();
    let words = ["upgrade", "--wait", "20s", "--to", &to];
    // From the start of the next program to after the end of the old one.
    for (number, after_ms) in [0, 60, 120, 180, 260, 400].into_iter().enumerate() {
        let process = warden.until_ready(1).await?[0];
        let stream = begun(&warden, &format!("s{number}"), 120).await?;
        let upgrading = warden.cli(&words);
        let dying = async {
            tokio::time::sleep(Duration::from_millis(after_ms)).await;
            process.signal(Signal::KILL);
        };
        let (ran, ()) = tokio::join!(upgrading, dying);
        let ran = ran?;
        assert!(
            ran.code == 0 || ran.all().contains("everything continues as before"),
            "{after_ms} ms: {ran:?}"
        );
        let answer = rest(stream).await?;
        assert!(answer.is_whole() && answer.text == text, "{after_ms} ms, {ran:?}: {answer:?}");
        let next = warden.until_ready(1).await?[0];
        assert_ne!(next, process);
    }
    assert_eq!(warden.status("m").await?["crashes"], 6);
    Ok(())
}
