//! Signals to the first program reach the right one, and requests in an old program get their time at a stop.

use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Outcome, Trouble, Warden, binaries, wait_until};

use super::waiting::{ask, kept};
use super::{double, programs, until_alone, upgrade, upgrade_to};
use crate::remotes::{endpoint, remote, until_state};

/// Sends the main process a signal, in parallel with other work.
fn tell(warden: &Warden, signal: Signal) -> Outcome {
    let main = Pid::from_raw(warden.kid.pid()).context("it has a number")?;
    kill_process(main, signal).context("it is there")
}

async fn until_told(warden: &Warden, text: &str) -> Outcome {
    wait_until(text, SOON, async || warden.kid.output().contains(text)).await
}

#[tokio::test]
async fn a_stop_that_meets_the_second_upgrade_is_heard_by_whoever_serves_then() -> Outcome {
    let mut warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    let children = warden.until_ready(1).await?;
    upgrade(&warden).await?;
    until_alone(&warden).await?;
    // The upgrade begins when the file `gate` appears.
    let gate = warden.home().path().join("gate");
    let does = format!(
        "while [ ! -e '{}' ]; do sleep 0.02; done; exec '{}' \"$@\"",
        gate.display(),
        binaries::llama_warden()?.display()
    );
    let slow = double(&warden, "slow", &does)?;
    let upgrading = upgrade_to(&warden, &slow);
    let stopping = async {
        wait_until("the third is there", SOON, async || programs(&warden).len() == 2).await?;
        tell(&warden, Signal::TERM)?;
        until_told(&warden, "stopping: ").await?;
        Ok::<(), Trouble>(std::fs::write(&gate, "")?)
    };
    // The upgrade may succeed or fail, but all programs end.
    let (_asked, stopped) = tokio::join!(upgrading, stopping);
    stopped?;
    assert_eq!(warden.kid.exit(SOON).await?, 0);
    Warden::until_gone(&children, SOON).await?;
    assert!(!warden.admin_socket().exists(), "its admin socket is left behind");
    Ok(())
}

fn has_line(log: &Path) -> bool {
    std::fs::read_to_string(log).is_ok_and(|text| text.contains("route=chat"))
}

#[tokio::test]
async fn a_program_between_opens_its_access_log_anew() -> Outcome {
    let setup = Setup::new()?.top("log.access = \"access.log\"");
    let warden = setup.fake("m", &json!({"ms_per_token": 10}), "")?.start().await?;
    warden.until_ready(1).await?;
    upgrade(&warden).await?;
    let mut flow = warden.http.stream(CHAT, &chat("between", "m", "go", 500, true)).await?;
    flow.event().await?;
    upgrade(&warden).await?;
    let log = warden.home().path().join("access.log");
    std::fs::rename(&log, log.with_extension("1"))?;
    tell(&warden, Signal::HUP)?;
    let (answer, end) = flow.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    wait_until("its line is in the new file", SOON, async || has_line(&log)).await
}

#[tokio::test]
async fn at_a_stop_a_remote_models_streams_in_old_programs_outlive_the_one_that_serves() -> Outcome {
    let (there, port) = endpoint("", &json!({"ms_per_token": 20})).await?;
    let top = remote(&format!("http://127.0.0.1:{port}"), "");
    let mut here = Setup::new()?.top(&top).fake("near", &json!({}), "")?.start().await?;
    let children = here.until_ready(1).await?;
    until_state(&here, "cloud", "loaded").await?;
    let mut first = here.http.stream(CHAT, &chat("first", "cloud", "go", 250, true)).await?;
    first.event().await?;
    upgrade(&here).await?;
    until_state(&here, "cloud", "loaded").await?;
    let mut between = here.http.stream(CHAT, &chat("between", "cloud", "go", 300, true)).await?;
    between.event().await?;
    upgrade(&here).await?;
    tell(&here, Signal::TERM)?;
    // No llama-server runs any more, and both streams have some seconds left.
    Warden::until_gone(&children, SOON).await?;
    for flow in [&mut first, &mut between] {
        let (answer, end) = flow.rest().await;
        assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    }
    assert_eq!(here.kid.exit(SOON).await?, 0);
    there.ledger().each_finished_once(["first", "between"])
}

#[tokio::test]
async fn at_a_stop_a_request_on_a_connection_that_an_old_program_keeps_is_still_answered() -> Outcome {
    let waits = "internal.server.stopped_keep_alive = \"1h\"";
    let leaves = "probe.drain_delay = \"6s\"\ninternal.server.stopped_keep_alive = \"1ms\"";
    for (top, upgrades, told) in [
        (waits, 1, "stopping: no new requests"),
        (waits, 2, "stopping: no new requests"),
        (leaves, 1, "draining: load balancers are notified"),
    ] {
        let mut warden = Setup::new()?.top(top).fake("m", &json!({}), "")?.start().await?;
        let children = warden.until_ready(1).await?;
        let mut client = kept(&warden).await?;
        ask(&mut client, "first", "m").await?;
        for _ in 0..upgrades {
            upgrade(&warden).await?;
        }
        tell(&warden, Signal::TERM)?;
        until_told(&warden, told).await?;
        assert!(ask(&mut client, "second", "m").await?, "{top}: it is the last one");
        assert_eq!(warden.kid.exit(SOON).await?, 0, "{top}");
        Warden::until_gone(&children, SOON).await?;
        warden.ledger().each_finished_once(["first", "second"])?;
    }
    Ok(())
}

#[tokio::test]
async fn an_impatient_stop_of_an_old_program_takes_nothing_from_the_one_that_serves() -> Outcome {
    let mut warden = Setup::new()?.fake("m", &json!({"ms_per_token": 20}), "")?.start().await?;
    warden.until_ready(1).await?;
    upgrade(&warden).await?;
    let old = until_alone(&warden).await?;
    let mut flow = warden.http.stream(CHAT, &chat("cut", "m", "go", 1000, true)).await?;
    flow.event().await?;
    upgrade(&warden).await?;
    // Signal the old program, not the main process; signals within a second count as one.
    wait_until("it has ended", SOON, async || {
        old.signal(Signal::TERM);
        !programs(&warden).contains(&old)
    })
    .await?;
    assert!(warden.admin_socket().exists(), "it has taken the socket of the one that serves away");
    upgrade(&warden).await?;
    assert!(warden.http.post(CHAT, &chat("next", "m", "hi", 2, true)).await?.answer()?.is_whole());
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}
