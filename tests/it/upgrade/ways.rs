//! Upgrades by signal, under llama-server's flags, with the admin address on TCP, and with TLS.

use std::net::SocketAddr;
use std::path::Path;

use rustix::process::Signal;
use serde_json::json;
use warden_rig::process::ProcessId;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Http, Identity, Outcome, Trouble, Warden, binaries, wait_until};

use super::{programs, until_alone, upgrade};
use crate::{drop_in, page};

/// Replaces a file by the program with a new inode, as packages do.
fn put(path: &Path) -> Outcome {
    let (program, fresh) = (binaries::llama_warden()?, path.with_extension("new"));
    if std::fs::hard_link(&program, &fresh).is_err() {
        std::fs::copy(&program, &fresh)?;
    }
    // Renaming one link of a file to another would do nothing.
    drop(std::fs::remove_file(path));
    Ok(std::fs::rename(fresh, path)?)
}

/// Waits until this number of programs has taken over. A child alone proves nothing, because programs also
/// run for their version.
async fn until_upgraded(warden: &Warden, times: usize) -> Result<ProcessId, Trouble> {
    wait_until("another program serves", SOON, async || {
        warden.kid.output().matches("upgrade: the next program serves").count() == times
    })
    .await?;
    until_alone(warden).await
}

#[tokio::test]
async fn a_signal_or_a_command_without_a_name_takes_the_program_that_lies_at_our_own_path() -> Outcome {
    let setup = Setup::new()?.fake("m", &json!({"ms_per_token": 5}), "")?;
    let config = setup.home.file("warden.toml", setup.config())?;
    let own = setup.home.path().join("llama-warden");
    put(&own)?;
    let mut warden = setup.start_program(&own, &["serve".into(), "--config".into(), config.into()]).await?;
    let children = warden.until_ready(1).await?;
    let mut flow = warden.http.stream(CHAT, &chat("a", "m", "go", 200, true)).await?;
    flow.event().await?;
    put(&own)?;
    warden.kid.signal(Signal::USR2);
    let first = until_upgraded(&warden, 1).await?;
    assert_eq!(std::fs::read_link(format!("/proc/{}/exe", first.pid))?, own);
    // The signal is passed on to the serving program, whose file is replaced in turn.
    put(&own)?;
    warden.kid.signal(Signal::USR2);
    assert_ne!(until_upgraded(&warden, 2).await?, first);
    let (answer, end) = flow.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    put(&own)?;
    let ran = warden.cli(&["upgrade"]).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let serving = until_upgraded(&warden, 3).await?;
    assert_eq!(warden.until_ready(1).await?, children);
    // With an invalid program, the signal has no effect, and the event names its origin.
    let bad = warden.home().program("bad", "#!/bin/sh\nexit 0\n")?;
    std::fs::rename(bad, &own)?;
    warden.kid.signal(Signal::USR2);
    wait_until("it is told", SOON, async || {
        let events = warden.cli(&["events"]).await;
        events.is_ok_and(|ran| ran.stdout.contains("upgrade, which failed") && ran.stdout.contains("USR2"))
    })
    .await?;
    assert_eq!(programs(&warden), [serving]);
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}

/// PIDs of all models in the status. Under llama-server's flags, children look alike.
async fn pids(warden: &Warden) -> Result<Vec<i64>, Trouble> {
    let status = warden.admin().get("/status").await?.json()?;
    let models = status["fleet"]["models"].as_array().cloned().unwrap_or_default();
    let backends = models.iter().flat_map(|model| model["backends"].as_array().cloned().unwrap_or_default());
    Ok(backends.filter_map(|one| one["pid"].as_i64()).collect())
}

fn address(warden: &Warden, words: &str) -> Result<SocketAddr, Trouble> {
    let output = warden.kid.output();
    let after = output.split_once(words).context(format!("{words:?} in {output}"))?.1;
    Ok(after.lines().next().unwrap_or_default().trim().parse()?)
}

#[tokio::test]
async fn the_operators_address_and_that_of_probes_go_along() -> Outcome {
    let top = "admin.address = \"127.0.0.1:0\"\nprobe.address = \"127.0.0.1:0\"";
    let mut warden = Setup::new()?.top(top).fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    warden.says("probe address").await?;
    let (admin, probe) =
        (address(&warden, "admin address http://")?, address(&warden, "probe address http://")?);
    for _ in 0..2 {
        upgrade(&warden).await?;
        let status = page::ask(admin, "GET", "/status", &[], "").await?.json()?;
        let same = warden.admin().get("/status").await?.json()?;
        assert_eq!(status["instance"]["pid"], same["instance"]["pid"]);
        wait_until("probes hear that it is ready", SOON, async || {
            Http::Tcp(probe).get("/readyz").await.is_ok_and(|answer| answer.status.is_success())
        })
        .await?;
    }
    Ok(())
}

#[tokio::test]
async fn under_llama_servers_name_and_flags_it_stays_llama_server() -> Outcome {
    let setup = drop_in::setup()?;
    let link = setup.home.path().join("llama-server");
    std::os::unix::fs::symlink(binaries::llama_warden()?, &link)?;
    let args =
        drop_in::words(&["-m", "model.gguf", "--port", "0", "--host", "127.0.0.1", "-np", "3", "-a", "nick"]);
    let mut warden = setup.start_program(&link, &args).await?;
    let before = warden.until_ready(1).await?;
    let mut flow = warden.http.stream(CHAT, &chat("a", "any", "go", 60, true)).await?;
    flow.event().await?;
    for _ in 0..2 {
        upgrade(&warden).await?;
    }
    let (answer, end) = flow.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    assert_eq!(pids(&warden).await?, [i64::from(before[0].pid)]);
    for model in ["nick", "gpt-4o"] {
        let answer = warden.http.post(CHAT, &chat("x", model, "hi", 3, true)).await?.answer()?;
        assert!(answer.is_whole(), "{model}: {answer:?}");
    }
    // A concurrent diagnosis starts its own processes and touches none of these.
    let fake = binaries::fake_llama()?;
    let fake = fake.to_string_lossy();
    let words = ["diagnose", "--binary", &fake, "--requests", "64", "--", "-m", "model.gguf"];
    let ran = warden.home().warden(words, SOON * 4).await?;
    assert!(ran.stdout.contains("VERDICT") && ran.stdout.contains("steady"), "{ran:?}");
    assert_eq!(pids(&warden).await?, [i64::from(before[0].pid)]);
    assert_eq!(warden.terminate(SOON).await?, 0);
    Warden::until_gone(&before, SOON).await
}

#[tokio::test]
async fn streams_over_tls_go_on_in_the_program_that_has_them() -> Outcome {
    let identity = Identity::new()?;
    let setup = Setup::new()?;
    let (cert, key) = identity.put(setup.home.path())?;
    let top = format!("server.tls_cert = '{}'\nserver.tls_key = '{}'", cert.display(), key.display());
    let warden = setup.top(&top).fake("m", &json!({"ms_per_token": 10}), "")?.start().await?;
    warden.until_ready(1).await?;
    let plain = warden.https(&identity);
    let mut one = plain.stream(CHAT, &chat("one", "m", "go", 400, true)).await?;
    one.event().await?;
    for _ in 0..2 {
        upgrade(&warden).await?;
    }
    // A new connection reaches the new program, with the same certificate.
    assert!(plain.post(CHAT, &chat("three", "m", "go", 3, true)).await?.answer()?.is_whole());
    let (answer, end) = one.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    until_alone(&warden).await?;
    warden.ledger().each_finished_once(["one", "three"])
}
