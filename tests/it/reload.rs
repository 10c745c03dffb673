//! On SIGHUP, llama-warden applies a new configuration and restarts only backends whose settings changed.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use tokio::time::timeout;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

fn backend_of(warden: &Warden, alias: &str) -> Option<warden_rig::process::ProcessId> {
    warden.backends().into_iter().find(|process| process.command_line().iter().any(|word| word == alias))
}

fn args(alias: &str, context: u32) -> String {
    format!("args = [\"-np\", \"2\", \"-a\", \"{alias}\", \"-c\", \"{context}\"]\n")
}

#[tokio::test]
async fn only_the_changed_model_is_restarted_and_nothing_fails_meanwhile() -> Outcome {
    let setup = Setup::new()?.fake("a", &json!({}), &args("nick-a", 1024))?;
    let mut warden = setup.fake("b", &json!({}), &args("nick-b", 1024))?.start().await?;
    warden.until_ready(2).await?;
    let (a, b) = (backend_of(&warden, "nick-a"), backend_of(&warden, "nick-b"));
    assert!(a.is_some() && b.is_some());
    let changed = warden.setup.config().replace(&args("nick-b", 1024), &args("nick-b", 2048));
    warden.reload(&changed)?;
    wait_until("b runs with its new flags", SOON, async || {
        backend_of(&warden, "nick-b")
            .is_some_and(|process| process.command_line().contains(&"2048".to_owned()))
    })
    .await?;
    let answer = warden.http.post(CHAT, &chat("x", "b", "hi", 4, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    wait_until("the old b is gone", SOON, async || b.is_some_and(|process| !process.is_alive())).await?;
    assert_eq!(backend_of(&warden, "nick-a"), a, "a was restarted though nothing of it changed");
    Ok(())
}

#[tokio::test]
async fn models_come_and_go_with_the_file() -> Outcome {
    let mut warden = Setup::new()?.fake("a", &json!({}), &args("nick-a", 1024))?.start().await?;
    let first = warden.until_ready(1).await?;
    let renamed =
        warden.setup.config().replace("[models.\"a\"]", "[models.\"c\"]").replace("nick-a", "nick-c");
    warden.reload(&renamed)?;
    wait_until("c is served", SOON, async || {
        let answer = warden.http.post(CHAT, &chat("x", "c", "hi", 4, false)).await;
        answer.is_ok_and(|answer| answer.status.is_success())
    })
    .await?;
    Warden::until_gone(&first, Duration::from_secs(10)).await?;
    let listed = warden.http.get("/v1/models").await?.json()?;
    assert_eq!(listed["data"].as_array().map(Vec::len), Some(1), "{listed}");
    assert_eq!(listed["data"][0]["id"], "c");
    Ok(())
}

#[tokio::test]
async fn a_wrong_file_changes_nothing_and_is_told() -> Outcome {
    let mut warden = Setup::new()?.fake("a", &json!({}), "")?.start().await?;
    let before = warden.until_ready(1).await?;
    let wrong = warden.setup.config().replace("preload = true", "preloaded = true");
    warden.reload(&wrong)?;
    warden.says("preloaded").await?;
    let answer = warden.http.post(CHAT, &chat("x", "a", "hi", 4, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    assert_eq!(warden.backends(), before);
    Ok(())
}

#[tokio::test]
async fn a_new_budget_alone_restarts_nothing() -> Outcome {
    let mut warden = Setup::new()?
        .fake("a", &json!({}), "queue.depth = 5\npolicy.host.soft = \"1GiB\"\n")?
        .start()
        .await?;
    let before = warden.until_ready(1).await?;
    let changed = warden.setup.config().replace("\"1GiB\"", "\"2GiB\"").replace("depth = 5", "depth = 6");
    warden.reload(&changed)?;
    wait_until("the new depth is in force", SOON, async || {
        warden.status("a").await.is_ok_and(|status| status["queue_depth"] == 6)
    })
    .await?;
    assert_eq!(warden.backends(), before);
    Ok(())
}

/// Replaces a file by a pipe: opening it blocks, as on a disk that hangs.
fn hang(warden: &Warden, file: &str) -> Result<PathBuf, Trouble> {
    let path = warden.home().path().join(file);
    std::fs::remove_file(&path)?;
    let made = std::process::Command::new("mkfifo").arg(&path).status()?;
    made.success().then_some(path).context("mkfifo")
}

#[tokio::test]
#[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
async fn while_the_configuration_cannot_be_read_all_goes_on_and_what_comes_at_last_is_taken() -> Outcome {
    let mut warden = Setup::new()?.fake("a", &json!({}), &args("nick-a", 1024))?.start().await?;
    let before = warden.until_ready(1).await?;
    let path = hang(&warden, "warden.toml")?;
    warden.kid.signal(Signal::HUP);
    // The pipe has a reader, so it can be opened for writing.
    let (config, writing) = (warden.setup.config(), path.clone());
    let writer =
        timeout(SOON, tokio::task::spawn_blocking(move || File::options().write(true).open(writing)));
    let mut writer = writer.await.context("nobody reads it")???;
    let answer = warden.http.post(CHAT, &chat("x", "a", "hi", 4, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    let program = warden_rig::binaries::llama_warden()?.display().to_string();
    let children = warden.kid.children();
    let refused = warden.cli(&["upgrade", "--to", &program, "--wait", "1s"]).await?;
    assert!(refused.code == 1 && refused.all().contains("did not start in time"), "{refused:?}");
    // The next program also reads from the pipe: as long as it lives, it takes part of what is written.
    wait_until("the next program is gone", SOON, async || warden.kid.children() == children).await?;
    let renamed = config.replace("[models.\"a\"]", "[models.\"c\"]");
    // The next reader finds a regular file.
    std::fs::rename(&path, path.with_extension("fifo"))?;
    std::fs::write(&path, &renamed)?;
    writer.write_all(renamed.as_bytes())?;
    drop(writer);
    wait_until("c is served", SOON, async || {
        let answer = warden.http.post(CHAT, &chat("y", "c", "hi", 4, false)).await;
        answer.is_ok_and(|answer| answer.status.is_success())
    })
    .await?;
    Warden::until_gone(&before, SOON).await
}

#[tokio::test]
#[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
async fn while_the_configuration_cannot_be_read_it_ends_when_it_is_told_to() -> Outcome {
    let mut warden = Setup::new()?.fake("a", &json!({"ms_per_token": 10}), "")?.start().await?;
    warden.until_ready(1).await?;
    let path = hang(&warden, "warden.toml")?;
    warden.kid.signal(Signal::HUP);
    let writer = timeout(SOON, tokio::task::spawn_blocking(move || File::options().write(true).open(path)));
    let _open = writer.await.context("nobody reads it")???;
    let mut stream = warden.http.stream(CHAT, &chat("x", "a", "hi", 60, true)).await?;
    stream.event().await?.context("it has begun")?;
    warden.kid.signal(Signal::TERM);
    let (answer, end) = stream.rest().await;
    assert!(end.is_ok() && answer.is_whole(), "it may end: {answer:?}");
    assert_eq!(warden.kid.exit(SOON).await?, 0);
    Ok(())
}

#[tokio::test]
async fn while_the_access_log_cannot_be_opened_anew_the_rest_is_read_and_it_ends_when_it_is_told_to()
-> Outcome {
    let top = "log.access = \"access.log\"";
    let mut warden = Setup::new()?.top(top).fake("a", &json!({}), &args("nick-a", 1024))?.start().await?;
    warden.until_ready(1).await?;
    hang(&warden, "access.log")?;
    let renamed = warden.setup.config().replace("[models.\"a\"]", "[models.\"c\"]");
    warden.reload(&renamed)?;
    wait_until("c is served", SOON, async || {
        let answer = warden.http.post(CHAT, &chat("x", "c", "hi", 4, false)).await;
        answer.is_ok_and(|answer| answer.status.is_success())
    })
    .await?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}
