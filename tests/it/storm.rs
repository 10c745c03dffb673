//! Runs storms (see [`warden_rig::storm`]); `WARDEN_STORM_SEED` sets another seed. Large storms are in
//! `tests/ledger`.

use rustix::process::Signal;
use serde_json::json;
use warden_rig::storm::{Report, Storm, Weather, sockets, zombies};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

async fn small(weather: Weather, stream_head: &'static str) -> Result<Report, Trouble> {
    let seed = std::env::var("WARDEN_STORM_SEED").ok().and_then(|text| text.parse().ok());
    let storm = Storm { stream_head, ..Storm::small(weather, seed.unwrap_or(20_260_801)) };
    let report = storm.run().await?;
    let whole = report.counts.get("whole").copied().unwrap_or(0);
    assert!(whole * 2 > report.requests(), "{report:?}");
    Ok(report)
}

#[tokio::test]
async fn in_a_storm_every_request_is_answered_and_what_was_told_is_what_was_executed() -> Outcome {
    small(Weather::Foul, "slot").await.map(drop)
}

#[tokio::test]
async fn in_a_storm_over_backends_that_head_a_stream_with_its_first_token_nothing_runs_twice() -> Outcome {
    small(Weather::Foul, "first_token").await.map(drop)
}

#[tokio::test]
async fn restarts_drains_recycles_and_reloads_all_at_once_fail_no_request() -> Outcome {
    let report = small(Weather::Fair, "slot").await?;
    let failed = report.counts.keys().find(|label| !matches!(**label, "whole" | "left"));
    assert_eq!(failed, None, "{report:?}");
    Ok(())
}

fn open_files(pid: i32) -> Result<usize, Trouble> {
    Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

#[tokio::test]
async fn many_restarts_and_kills_leave_no_file_no_socket_and_no_zombie_behind() -> Outcome {
    let setup = Setup::new()?.top("log.children = false\ninternal.lifecycle.failures_told = 1000");
    let toml = format!("replace = \"overlap\"\n{}", Storm::small(Weather::Foul, 0).settings());
    let mut warden = setup.fake("m", &json!({}), &toml)?.start().await?;
    warden.until_ready(1).await?;
    let admin = warden.admin();
    let round = async |warden: &Warden, n: u32| {
        if n.is_multiple_of(5) {
            for backend in warden.backends() {
                backend.signal(Signal::KILL);
            }
        } else {
            admin.post("/models/m/restart", &json!({})).await?;
        }
        let answer =
            warden.http.post(CHAT, &chat(&format!("r-{n}"), "m", "hi", 2, n.is_multiple_of(2))).await?;
        // A kill may be noticed only by the next request, which then fails.
        if answer.status.is_success() || n.is_multiple_of(5) {
            Ok(())
        } else {
            Err(Trouble::new(answer.text()))
        }
    };
    for n in 0..10 {
        round(&warden, n).await?;
    }
    warden.until_ready(1).await?;
    let before = open_files(warden.kid.pid())?;
    for n in 10..60 {
        round(&warden, n).await?;
    }
    warden.until_ready(1).await?;
    wait_until("as few files are open as before", SOON, async || {
        open_files(warden.kid.pid()).is_ok_and(|now| now <= before + 4)
    })
    .await
    .context(format!("before: {before}, now: {:?}", open_files(warden.kid.pid())))?;
    assert_eq!(zombies(warden.kid.pid()), 0, "ended children are not reaped");
    assert_eq!(sockets(warden.home().path().join("run")).len(), 1);
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}
