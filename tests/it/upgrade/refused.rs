//! An impossible upgrade has no effect: the message gives the reason, and the old program continues.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use serde_json::json;
use warden_rig::ledger::End;
use warden_rig::process::ProcessId;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Outcome, Trouble, Warden, binaries, wait_until};

use super::{double, programs, until_alone, upgrade};
use crate::canary::{another_build, start};

/// Checks the reason, and that no new program is left.
async fn refused(warden: &Warden, program: &Path, wait: &str, why: &str) -> Outcome {
    let before = programs(warden);
    let ran = warden.cli(&["upgrade", "--wait", wait, "--to", &program.to_string_lossy()]).await?;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.all().contains("everything continues as before"), "{ran:?}");
    assert!(ran.all().contains(why), "{why:?} in {ran:?}");
    wait_until("the next program is gone", SOON, async || programs(warden) == before).await?;
    assert!(warden.http.post(CHAT, &chat("after", "m", "hi", 2, true)).await?.answer()?.is_whole());
    Ok(())
}

#[tokio::test]
async fn one_that_does_not_like_its_configuration_or_would_be_elsewhere_or_answers_nothing_is_not_taken()
-> Outcome {
    let top = "internal.child.version_timeout = \"5s\"";
    let warden = Setup::new()?.top(top).fake("m", &json!({"ms_per_token": 5}), "")?.start().await?;
    let children = warden.until_ready(1).await?;
    let (real, good) = (binaries::llama_warden()?, warden.setup.config());
    let mut flow = warden.http.stream(CHAT, &chat("a", "m", "go", 1000, true)).await?;
    flow.event().await?;
    let home = warden.home();
    home.file("warden.toml", format!("server.prot = 1\n{good}"))?;
    refused(&warden, &real, "20s", "the next program cannot start").await?;
    let elsewhere = good.replace("/admin.sock'", "/other.sock'");
    home.file("warden.toml", elsewhere)?;
    refused(&warden, &real, "20s", "would be somewhere else").await?;
    home.file("warden.toml", &good)?;
    // The program adopts all processes, but answers no request of its own.
    let mute =
        format!("exec env LLAMA_WARDEN_INTERNAL__SERVER__UPGRADE_ANSWER=0s '{}' \"$@\"", real.display());
    refused(&warden, &double(&warden, "mute", &mute)?, "20s", "is not fit: it does not answer").await?;
    let silent = warden.home().program("silent", "#!/bin/sh\nexec sleep 60\n")?;
    refused(&warden, &silent, "20s", "did not print its version within").await?;
    let plain = warden.home().file("plain", "#!/bin/sh\n")?;
    std::fs::set_permissions(&plain, std::fs::Permissions::from_mode(0o644))?;
    refused(&warden, &plain, "20s", "not executable").await?;
    let (answer, end) = flow.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    upgrade(&warden).await?;
    assert_eq!(warden.until_ready(1).await?, children);
    Ok(())
}

#[tokio::test]
async fn a_process_that_drains_for_a_replacement_is_waited_for_as_long_as_is_said() -> Outcome {
    let toml = "args = [\"-np\", \"1\"]\nreplace = \"sequential\"\n";
    let warden = Setup::new()?.fake("m", &json!({"ms_per_token": 10}), toml)?.start().await?;
    let before = warden.until_ready(1).await?;
    let mut flow = warden.http.stream(CHAT, &chat("a", "m", "go", 1300, true)).await?;
    flow.event().await?;
    let restarting = warden.cli(&["restart", "m"]);
    let upgrading = async {
        wait_until("it drains", SOON, async || {
            warden.status("m").await.is_ok_and(|status| status["backends"][0]["phase"] == "draining")
        })
        .await?;
        let real = binaries::llama_warden()?;
        let ran = warden.cli(&["upgrade", "--wait", "5s", "--to", &real.to_string_lossy()]).await?;
        assert!(ran.code == 1 && ran.all().contains("busy: the model `m`"), "{ran:?}");
        upgrade(&warden).await
    };
    let (restarted, upgraded) = tokio::join!(restarting, upgrading);
    let restarted = restarted?;
    upgraded?;
    assert_eq!(restarted.code, 0, "{restarted:?}");
    let (answer, end) = flow.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    assert_ne!(warden.until_ready(1).await?, before);
    until_alone(&warden).await?;
    assert_eq!(warden.ledger().executions()?["a"], [End::Finished]);
    Ok(())
}

#[tokio::test]
async fn while_another_build_is_tried_there_is_none_and_afterwards_there_is() -> Outcome {
    let setup = Setup::new()?.fake("m", &json!({}), "")?;
    let build = another_build(&setup, &json!({}))?;
    let warden = setup.start().await?;
    warden.until_ready(1).await?;
    start(&warden, &build, &[]).await?;
    let real = binaries::llama_warden()?;
    refused(&warden, &real, "5s", "another build is being tried").await?;
    let ran = warden.cli(&["canary", "stop", "m"]).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    warden.until_ready(1).await?;
    upgrade(&warden).await
}

#[tokio::test]
async fn a_model_that_runs_and_is_not_configured_any_more_is_ended_before_and_left_behind_by_nobody()
-> Outcome {
    let setup = Setup::new()?.fake("m", &json!({}), "")?;
    let without = setup.config();
    let mut warden = setup.fake("other", &json!({}), "")?.start().await?;
    let all = warden.until_ready(2).await?;
    warden.home().file("warden.toml", &without)?;
    let real = binaries::llama_warden()?;
    refused(&warden, &real, "20s", "the model `other` runs, and the configuration").await?;
    assert_eq!(warden.until_ready(2).await?, all);
    warden.reload(&without)?;
    let left = warden.until_ready(1).await?;
    wait_until("the other one has ended", SOON, async || warden.backends() == left).await?;
    upgrade(&warden).await?;
    until_alone(&warden).await?;
    assert_eq!(warden.until_ready(1).await?, left);
    assert!(left.len() == 1 && all.contains(&left[0]), "{left:?} of {all:?}");
    Ok(())
}

#[tokio::test]
async fn whoever_is_told_to_end_while_an_upgrade_waits_ends() -> Outcome {
    let toml = "args = [\"-np\", \"1\"]\nreplace = \"sequential\"\n";
    let top = "server.shutdown_deadline = \"30s\"";
    let mut warden = Setup::new()?.top(top).fake("m", &json!({"ms_per_token": 10}), toml)?.start().await?;
    warden.until_ready(1).await?;
    let mut flow = warden.http.stream(CHAT, &chat("a", "m", "go", 300, true)).await?;
    flow.event().await?;
    let restarting = async { drop(warden.cli(&["restart", "m"]).await) };
    let real = binaries::llama_warden()?;
    let real = real.to_string_lossy();
    let upgrading = async {
        wait_until("it drains", SOON, async || {
            warden.status("m").await.is_ok_and(|status| status["backends"][0]["phase"] == "draining")
        })
        .await?;
        warden.cli(&["upgrade", "--wait", "20m", "--to", &real]).await
    };
    let first = ProcessId::of(warden.kid.pid()).context("llama-warden runs")?;
    let ending = async {
        wait_until("the next program waits", SOON, async || {
            programs(&warden)
                .iter()
                .any(|program| program.command_line().get(1).is_some_and(|word| word == "serve"))
        })
        .await?;
        first.signal(rustix::process::Signal::TERM);
        Ok::<_, Trouble>(())
    };
    let ((), ran, ended) = tokio::join!(restarting, upgrading, ending);
    ended?;
    let ran = ran?;
    assert!(ran.code != 0 && ran.all().contains("asked to end"), "{ran:?}");
    let (answer, end) = flow.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    assert_eq!(warden.kid.exit(SOON).await?, 0);
    Ok(())
}
