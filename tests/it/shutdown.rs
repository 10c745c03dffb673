//! SIGTERM ends llama-warden in order: no new requests, running ones finish within a deadline, no child is
//! left, exit code 0.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use tokio::time::Instant;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Outcome, Warden, wait_until};

async fn until_it_takes_nothing_new(warden: &Warden) -> Outcome {
    wait_until("it takes nothing new", SOON, async || match warden.http.get("/health").await {
        Ok(answer) => !answer.status.is_success(),
        Err(_) => true,
    })
    .await
}

#[tokio::test]
async fn idle_it_ends_at_once_with_0_and_without_children() -> Outcome {
    for signal in [Signal::TERM, Signal::INT] {
        let mut warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
        let children = warden.until_ready(1).await?;
        let begun = Instant::now();
        warden.kid.signal(signal);
        assert_eq!(warden.kid.exit(SOON).await?, 0);
        // No request runs, so the end must not wait for the deadline.
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        Warden::until_gone(&children, SOON).await?;
        assert!(!warden.admin_socket().exists(), "its admin socket is left behind");
    }
    Ok(())
}

#[tokio::test]
async fn what_runs_is_finished_and_nothing_new_is_taken() -> Outcome {
    let mut warden = Setup::new()?.fake("m", &json!({"ms_per_token": 10}), "")?.start().await?;
    warden.until_ready(1).await?;
    let mut flow = warden.http.stream(CHAT, &chat("a", "m", "go", 100, true)).await?;
    flow.event().await?;
    warden.kid.signal(Signal::TERM);
    until_it_takes_nothing_new(&warden).await?;
    let (answer, end) = flow.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    assert_eq!(warden.kid.exit(SOON).await?, 0);
    warden.ledger().each_finished_once(["a"])
}

#[tokio::test]
async fn at_the_deadline_what_still_runs_is_cut_and_told() -> Outcome {
    let top = "server.shutdown_deadline = \"400ms\"";
    let mut warden = Setup::new()?.top(top).fake("m", &json!({"ms_per_token": 10}), "")?.start().await?;
    let children = warden.until_ready(1).await?;
    let mut flow = warden.http.stream(CHAT, &chat("a", "m", "go", 1_000_000, true)).await?;
    flow.event().await?;
    let begun = Instant::now();
    warden.kid.signal(Signal::TERM);
    let (answer, _) = flow.rest().await;
    assert!(!answer.done, "{answer:?}");
    assert_eq!(warden.kid.exit(SOON).await?, 0);
    assert!(begun.elapsed() >= Duration::from_millis(350), "{:?}", begun.elapsed());
    Warden::until_gone(&children, SOON).await
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once_and_no_child_survives() -> Outcome {
    let script = json!({"ms_per_token": 10, "on_term": "ignore"});
    let mut warden = Setup::new()?.fake("m", &script, "")?.start().await?;
    let children = warden.until_ready(1).await?;
    let mut flow = warden.http.stream(CHAT, &chat("a", "m", "go", 1_000_000, true)).await?;
    flow.event().await?;
    warden.kid.signal(Signal::TERM);
    until_it_takes_nothing_new(&warden).await?;
    let begun = Instant::now();
    // A signal within a second of the first counts as the same; a later one ends the drain.
    let ended = async || {
        warden.kid.signal(Signal::TERM);
        warden.kid.ended().is_some()
    };
    wait_until("it ends at once", SOON, ended).await?;
    let code = warden.kid.exit(SOON).await?;
    assert!(code != 0, "a forced end is no success");
    // Less than the grace period of ten seconds.
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    Warden::until_gone(&children, SOON).await
}

#[tokio::test]
async fn a_child_that_ignores_sigterm_is_killed_after_its_grace() -> Outcome {
    let script = json!({"on_term": "ignore"});
    let mut warden = Setup::new()?.fake("m", &script, "lifecycle.stop_grace = \"300ms\"")?.start().await?;
    let children = warden.until_ready(1).await?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    Warden::until_gone(&children, SOON).await
}

#[tokio::test]
async fn requests_that_wait_in_the_queue_are_told_and_not_lost() -> Outcome {
    let toml = "args = [\"-np\", \"1\"]\n";
    let top = "server.shutdown_deadline = \"2s\"";
    let mut warden = Setup::new()?.top(top).fake("m", &json!({"ms_per_token": 10}), toml)?.start().await?;
    warden.until_ready(1).await?;
    let mut flow = warden.http.stream(CHAT, &chat("a", "m", "go", 30, true)).await?;
    flow.event().await?;
    let http = warden.http.clone();
    let request = chat("waits", "m", "go", 2, false);
    let (waiting, exit) = tokio::join!(http.post(CHAT, &request), async {
        let waits = async || warden.waiting("m").await.is_ok_and(|waiting| waiting == 1);
        wait_until("one waits", SOON, waits).await?;
        warden.kid.signal(Signal::TERM);
        let (answer, end) = flow.rest().await;
        assert!(answer.done && end.is_ok(), "{answer:?}");
        warden.kid.exit(SOON).await
    });
    let waiting = waiting?;
    assert!(waiting.status.is_success() || waiting.status.as_u16() == 503, "{}", waiting.text());
    assert_eq!(exit?, 0);
    Ok(())
}
