//! Promise: external failures do not stop serving. Without threads, with a hanging or full state disk, or
//! without the socket directory, loaded models answer. Afterwards all functions recover without help.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;
use warden_rig::scarcity::{SmallDisk, TaskLimit};
use warden_rig::warden::{CHAT, SOON, Setup, chat, json_lines};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

/// An answer takes a second on an idle machine; tests share theirs with builds. Without the fix it took a
/// minute or more.
const PROMPT: Duration = Duration::from_secs(5);

async fn answers(warden: &Warden, model: &str) -> Outcome {
    let asked = timeout(PROMPT, warden.http.post(CHAT, &chat("now", model, "hi", 3, false))).await;
    let answer =
        asked.map_err(|_| Trouble::new(format!("`{model}` does not answer within {PROMPT:?}")))??;
    if answer.status.is_success() { Ok(()) } else { Err(Trouble::new(answer.text())) }
}

async fn is_shown(warden: &Warden) -> Result<serde_json::Value, Trouble> {
    let asked = timeout(PROMPT, warden.admin().get("/status")).await;
    asked.map_err(|_| Trouble::new("the status does not answer"))??.json()
}

async fn comes_back(warden: &Warden, model: &str) -> Outcome {
    let what = format!("`{model}` answers again; {}", warden.kid.output());
    wait_until(&what, SOON * 2, async || answers(warden, model).await.is_ok()).await
}

/// Starts two running models, `a` and `b`, and an unloaded one, `cold`.
async fn start(setup: Setup) -> Result<Warden, Trouble> {
    let unloaded = "preload = false";
    let warden = setup
        .fake("a", &json!({}), "")?
        .fake("b", &json!({}), "")?
        .fake("cold", &json!({}), unloaded)?
        .start()
        .await?;
    warden.until_ready(2).await?;
    Ok(warden)
}

fn on(disk: &Path) -> String {
    format!("paths.state_dir = '{}'", disk.join("state").display())
}

async fn kill(warden: &Warden, model: &str) -> Outcome {
    let pid = warden.status(model).await?["backends"][0]["pid"].as_i64().context("a process")?;
    let backends = warden.backends();
    let of = backends.iter().find(|process| i64::from(process.pid) == pid);
    of.context("it runs")?.signal(Signal::KILL);
    Ok(())
}

#[tokio::test]
async fn without_threads_what_is_loaded_answers_and_everything_else_comes_by_itself_afterwards() -> Outcome {
    let Some(limit) = TaskLimit::new()? else { return Ok(()) };
    let setup = Setup::new()?;
    let folder = setup.home.path().join("folder");
    std::fs::create_dir(&folder)?;
    let top = format!("paths.models = ['{}']\ninternal.child.models_look = \"50ms\"", folder.display());
    let mut warden = start(setup.top(&top)).await?;
    let pid = warden.kid.pid();
    limit.hold(pid)?;
    limit.close()?;
    // Actions that used to need a thread: a reload, a look at the folder, a load, an exit.
    warden.kid.signal(Signal::HUP);
    kill(&warden, "a").await?;
    let http = warden.http.clone();
    let cold =
        TaskTracker::new().spawn(async move { http.post(CHAT, &chat("cold", "cold", "hi", 3, false)).await });
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        answers(&warden, "b").await.map_err(|why| Trouble::new(format!("{why}\n{}", warden.kid.output())))?;
        is_shown(&warden).await?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    limit.open()?;
    for model in ["a", "b", "cold"] {
        comes_back(&warden, model).await?;
    }
    drop(cold.await);
    let output = warden.kid.output();
    assert!(!output.contains("panicked"), "{output}");
    assert_eq!(warden.kid.pid(), pid);
    limit.close()?;
    kill(&warden, "a").await?;
    assert_eq!(warden.terminate(SOON).await?, 0, "SIGTERM has effect without threads, too");
    Ok(())
}

#[tokio::test]
async fn while_the_state_disk_hangs_models_answer_restart_and_load_and_what_they_did_is_written_later()
-> Outcome {
    let setup = Setup::new()?;
    let Some(disk) = SmallDisk::that_freezes(&setup.home.path().join("disk"))? else { return Ok(()) };
    let mut warden = start(setup.top(&on(disk.place()))).await?;
    let frozen = disk.freeze()?;
    kill(&warden, "a").await?;
    comes_back(&warden, "a").await?;
    let restarted = timeout(SOON, warden.admin().post("/models/a/restart", &json!({}))).await??;
    assert!(restarted.status.is_success(), "{}", restarted.text());
    comes_back(&warden, "cold").await?;
    for model in ["a", "b", "cold"] {
        answers(&warden, model).await?;
    }
    assert!(timeout(PROMPT, warden.http.get("/health")).await??.status.is_success());
    warden.kid.signal(Signal::HUP);
    wait_until("it is shown that the disk does not answer", SOON, async || {
        is_shown(&warden).await.is_ok_and(|status| status["state"]["silent_seconds"].as_f64().is_some())
    })
    .await?;
    answers(&warden, "b").await?;
    drop(frozen);
    let ledger = disk.place().join("state/ledger.jsonl");
    wait_until("the restart is in the ledger", SOON, async || {
        json_lines(&ledger).is_ok_and(|all| all.len() == 1)
    })
    .await?;
    wait_until("all is written", SOON, async || {
        is_shown(&warden).await.is_ok_and(|status| status["state"]["waiting"] == 0)
    })
    .await?;
    let status = is_shown(&warden).await?;
    assert_eq!(status["state"]["lost"], json!({}), "{status}");
    let events = std::fs::read_to_string(disk.place().join("state/events.jsonl"))?;
    assert!(events.contains("\"crashed\""), "{events}");
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}

#[tokio::test]
async fn with_a_state_disk_that_hangs_it_ends_in_time_and_takes_its_processes_with_it() -> Outcome {
    let setup = Setup::new()?;
    let Some(disk) = SmallDisk::that_freezes(&setup.home.path().join("disk"))? else { return Ok(()) };
    let mut warden = start(setup.top(&on(disk.place())).top("server.shutdown_deadline = \"2s\"")).await?;
    let children = warden.until_ready(2).await?;
    let frozen = disk.freeze()?;
    kill(&warden, "a").await?;
    comes_back(&warden, "a").await?;
    let began = Instant::now();
    warden.kid.signal(Signal::TERM);
    warden.says("stopped").await?;
    Warden::until_gone(&children, SOON).await?;
    assert!(warden.backends().is_empty(), "its processes are gone");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    // A process ends only after its threads, which the kernel blocks while the disk is frozen.
    drop(frozen);
    assert_eq!(warden.kid.exit(SOON).await?, 0);
    Ok(())
}

#[tokio::test]
async fn with_a_full_state_disk_it_starts_and_serves_and_no_entry_is_torn_when_there_is_room() -> Outcome {
    let setup = Setup::new()?;
    let Some(disk) = SmallDisk::of_bytes(&setup.home.path().join("disk"), 256 << 10)? else { return Ok(()) };
    let ballast = disk.fill()?;
    let mut warden = start(setup.top(&on(disk.place()))).await?;
    let ledger: PathBuf = disk.place().join("state/ledger.jsonl");
    for model in ["a", "b", "cold"] {
        answers(&warden, model).await?;
    }
    let restart = async |model: &str| {
        let done = warden.admin().post(&format!("/models/{model}/restart"), &json!({})).await?;
        if done.status.is_success() { Ok(()) } else { Err(Trouble::new(done.text())) }
    };
    restart("a").await?;
    let status = is_shown(&warden).await?;
    assert!(status["state"]["lost"]["ledger"].as_u64() > Some(0), "{status}");
    std::fs::remove_file(ballast)?;
    restart("b").await?;
    let entries = std::fs::read_to_string(&ledger)?;
    let whole: Vec<serde_json::Value> =
        entries.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert!(whole.iter().any(|entry| entry["model"] == "b"), "{entries}");
    wait_until("the command line finds it", SOON, async || {
        warden.cli(&["status"]).await.is_ok_and(|ran| ran.code == 0)
    })
    .await?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}

#[tokio::test]
async fn without_the_directory_of_its_sockets_it_makes_them_again_and_nothing_waits_a_minute() -> Outcome {
    let setup = Setup::new()?;
    let base = setup.home.path().join("run");
    let top = format!("paths.runtime_dir = '{}'", base.display());
    let config = setup.top(&top).fake("m", &json!({}), "")?;
    let text = config
        .config()
        .lines()
        .filter(|line| !line.starts_with("admin.socket"))
        .collect::<Vec<_>>()
        .join("\n");
    let file = config.home.file("warden.toml", text)?;
    let mut warden = config.start_with(&["serve".into(), "--config".into(), file.into()]).await?;
    wait_until("it answers", SOON, async || answers(&warden, "m").await.is_ok()).await?;
    let own = base.join(format!("llama-warden-{}", warden.kid.pid()));
    std::fs::remove_dir_all(&own)?;
    let began = Instant::now();
    wait_until("it answers again", SOON, async || answers(&warden, "m").await.is_ok()).await?;
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    wait_until("the command line reaches it", SOON, async || {
        warden.cli(&["status"]).await.is_ok_and(|ran| ran.code == 0)
    })
    .await?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    assert!(!own.exists(), "it is left behind");
    Ok(())
}
