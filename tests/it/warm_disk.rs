//! Promise: with `warm = "disk"`, conversations survive an unload, an exit, a kill and a reboot. Only our
//! user can read them, and they are removed in time.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use warden_rig::warden::{CHAT, SOON, Setup};
use warden_rig::{Outcome, Trouble, Warden, binaries, wait_until};

use crate::warm::{Talk, all_warm, talks, unloaded};

/// Starts a model whose conversations stay on disk, and three conversations.
async fn begun(script: &Value, lines: &str) -> Result<(Warden, Vec<Talk>), Trouble> {
    let lines = format!("preload = false\nwarm = \"disk\"\nlifecycle.stop_grace = \"5s\"\n{lines}");
    let warden = Setup::new()?.fake("m", script, &lines)?.start().await?;
    let talks = talks(&warden, 3).await?;
    Ok((warden, talks))
}

fn dense() -> Value {
    json!({ "kept": "dense" })
}

/// Files of the model's conversations, without the mark of a running process.
fn stored(warden: &Warden) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for directory in entries(&conversations(warden)) {
        all.extend(entries(&directory));
    }
    all.retain(|file| file.extension().is_none_or(|end| end != "mark"));
    all
}

fn conversations(warden: &Warden) -> PathBuf {
    warden.home().path().join("state/llama-warden/conversations")
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn with_end(files: &[PathBuf], end: &str) -> usize {
    files.iter().filter(|file| file.extension().is_some_and(|its| its == end)).count()
}

/// Starts llama-warden again with a changed configuration.
async fn again_with(warden: &mut Warden, from: &str, to: &str) -> Outcome {
    let config = warden.setup.config();
    assert!(config.contains(from), "{config}");
    let config = warden.home().file("warden.toml", config.replacen(from, to, 1))?;
    let args = ["serve".into(), "--config".into(), config.into_os_string()];
    warden.start_anew(&binaries::llama_warden()?, &args).await
}

async fn upgraded(warden: &Warden) -> Outcome {
    let ran = warden.cli(&["upgrade", "--to", &binaries::llama_warden()?.to_string_lossy()]).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    Ok(())
}

async fn exited(warden: &mut Warden) -> Outcome {
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}

#[tokio::test]
async fn conversations_survive_an_unload_exits_and_a_kill() -> Outcome {
    let (mut warden, mut talks) = begun(&dense(), "ttl = \"1s\"").await?;
    unloaded(&warden).await?;
    let files = stored(&warden);
    assert_eq!((with_end(&files, "slot"), with_end(&files, "json"), files.len()), (3, 3, 6), "{files:?}");
    all_warm(&warden, &mut talks).await?;
    let events = warden.cli(&["events"]).await?.stdout;
    assert!(events.contains("on disk: 3 conversations, 3 with slots"), "{events}");
    assert!(events.contains("loaded again: warm: 3 of 3"), "{events}");

    for _ in 0..2 {
        exited(&mut warden).await?;
        assert_eq!(with_end(&stored(&warden), "slot"), 3);
        warden = warden.again().await?;
        all_warm(&warden, &mut talks).await?;
    }

    // The files of the last save are still there.
    let before = talks.clone();
    warden.kid.signal(Signal::KILL);
    wait_until("it has ended", SOON, async || warden.kid.ended().is_some()).await?;
    let warden = warden.again().await?;
    for (n, talk) in before.into_iter().enumerate() {
        let (cached, _) = { talk }.turn(&warden, n % 2 == 0).await?;
        assert!(cached > 400, "conversation {n}: {cached} cached");
    }
    Ok(())
}

#[tokio::test]
async fn with_checkpoints_conversations_of_sliding_windows_survive_an_exit() -> Outcome {
    let (mut warden, mut talks) =
        begun(&json!({ "kept": "windows" }), "mitigations = [\"slot-checkpoints\"]").await?;
    exited(&mut warden).await?;
    assert_eq!(with_end(&stored(&warden), "checkpoints"), 3);
    let warden = warden.again().await?;
    all_warm(&warden, &mut talks).await
}

#[tokio::test]
async fn unchanged_conversations_are_not_written_again() -> Outcome {
    let (mut warden, mut talks) = begun(&dense(), "").await?;
    exited(&mut warden).await?;
    let before = stored(&warden);
    let mut warden = warden.again().await?;
    talks[1].turn(&warden, false).await?;
    exited(&mut warden).await?;
    let after = stored(&warden);
    let kept = after.iter().filter(|file| before.contains(file)).count();
    assert_eq!((after.len(), kept), (6, 4), "{before:?} {after:?}");
    Ok(())
}

#[tokio::test]
async fn a_process_that_cannot_use_the_slots_evaluates_the_prompts() -> Outcome {
    let (mut warden, mut talks) = begun(&dense(), "").await?;
    exited(&mut warden).await?;
    again_with(&mut warden, "\"-np\", \"4\"", "\"-np\", \"4\", \"-c\", \"2048\"").await?;
    let body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 2 });
    warden.http.post(CHAT, &body).await?.json()?;
    wait_until("the prompts are evaluated", SOON, async || {
        warden
            .cli(&["events"])
            .await
            .is_ok_and(|events| events.stdout.contains("behind the gate: warm: 3 of 3"))
    })
    .await?;
    all_warm(&warden, &mut talks).await
}

#[tokio::test]
async fn a_damaged_file_costs_one_evaluation_and_no_request() -> Outcome {
    let (mut warden, mut talks) = begun(&dense(), "").await?;
    exited(&mut warden).await?;
    for file in stored(&warden).iter().filter(|file| file.extension().is_some_and(|end| end == "slot")) {
        let bytes = std::fs::read(file)?;
        std::fs::write(file, &bytes[..bytes.len() / 2])?;
    }
    let mut warden = warden.again().await?;
    for talk in &mut talks {
        talk.turn(&warden, false).await?;
    }
    warden.says("a slot file is damaged").await?;
    Ok(())
}

#[tokio::test]
async fn faults_of_the_disk_cost_only_evaluation() -> Outcome {
    for script in [
        json!({ "kept": "dense", "save_fault": "error" }),
        json!({ "kept": "dense", "save_fault": "full" }),
        json!({ "kept": "dense", "restore_fault": "error" }),
    ] {
        let (mut warden, mut talks) = begun(&script, "").await?;
        exited(&mut warden).await?;
        let warden = warden.again().await?;
        for talk in &mut talks {
            talk.turn(&warden, false).await?;
        }
    }
    // A state directory in which nothing can be made.
    let (mut warden, _) = begun(&dense(), "").await?;
    let conversations = conversations(&warden);
    exited(&mut warden).await?;
    std::fs::remove_dir_all(&conversations)?;
    std::fs::write(&conversations, "a file")?;
    let mut warden = warden.again().await?;
    let mut talks = talks(&warden, 2).await?;
    talks[0].turn(&warden, true).await?;
    exited(&mut warden).await
}

#[tokio::test]
async fn a_disk_that_is_slow_holds_up_no_exit() -> Outcome {
    let (mut warden, _) = begun(&json!({ "kept": "dense", "save_ms": 60_000 }), "").await?;
    let begun = tokio::time::Instant::now();
    exited(&mut warden).await?;
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    // The prompts are on disk.
    assert_eq!((with_end(&stored(&warden), "json"), with_end(&stored(&warden), "slot")), (3, 0));
    Ok(())
}

#[tokio::test]
async fn files_of_one_that_was_killed_while_it_saved_go_at_the_next_start() -> Outcome {
    let (mut warden, _) = begun(&json!({ "kept": "dense", "save_ms": 60_000 }), "ttl = \"1s\"").await?;
    wait_until("a slot is being saved", SOON, async || with_end(&stored(&warden), "slot") == 1).await?;
    warden.kid.signal(Signal::KILL);
    wait_until("it has ended", SOON, async || warden.kid.ended().is_some()).await?;
    assert_eq!(with_end(&stored(&warden), "slot"), 1);
    let warden = warden.again().await?;
    talks(&warden, 1).await?;
    assert_eq!(with_end(&stored(&warden), "slot"), 0);
    Ok(())
}

#[tokio::test]
async fn conversations_go_with_the_setting_with_the_model_and_after_their_age() -> Outcome {
    let (mut warden, _) = begun(&dense(), "ttl = \"1s\"").await?;
    unloaded(&warden).await?;
    assert_eq!(stored(&warden).len(), 6);
    let config = warden.setup.config().replacen("warm = \"disk\"", "warm = \"auto\"", 1);
    warden.reload(&config)?;
    wait_until("they are gone", SOON, async || stored(&warden).is_empty()).await?;

    // The setting changed while llama-warden was stopped.
    let (mut warden, _) = begun(&dense(), "").await?;
    exited(&mut warden).await?;
    assert_eq!(stored(&warden).len(), 6);
    again_with(&mut warden, "warm = \"disk\"", "warm = \"off\"").await?;
    wait_until("they are gone", SOON, async || stored(&warden).is_empty()).await?;

    let (mut warden, _) = begun(&dense(), "ttl = \"1s\"").await?;
    unloaded(&warden).await?;
    let config = warden.setup.config().replacen("[models.\"m\"]", "[models.\"n\"]", 1);
    warden.reload(&config)?;
    wait_until("they are gone", SOON, async || stored(&warden).is_empty()).await?;

    let (mut warden, _) = begun(&dense(), "warm_disk_age = \"2s\"").await?;
    exited(&mut warden).await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let warden = warden.again().await?;
    wait_until("they are gone", SOON, async || stored(&warden).is_empty()).await
}

#[tokio::test]
async fn an_upgrade_of_ours_keeps_the_conversations_of_an_unloaded_model() -> Outcome {
    let (warden, mut talks) = begun(&dense(), "ttl = \"2s\"").await?;
    unloaded(&warden).await?;
    upgraded(&warden).await?;
    all_warm(&warden, &mut talks).await?;
    // A process that the next instance takes over keeps its slots, and saves them.
    upgraded(&warden).await?;
    all_warm(&warden, &mut talks).await?;
    unloaded(&warden).await?;
    all_warm(&warden, &mut talks).await
}

#[tokio::test]
async fn a_crash_leaves_what_was_on_disk_to_a_later_process() -> Outcome {
    let (mut warden, mut before) = begun(&dense(), "").await?;
    exited(&mut warden).await?;
    let mut warden = warden.again().await?;
    talks(&warden, 1).await?;
    let backends = warden.until_ready(1).await?;
    backends[0].signal(Signal::KILL);
    Warden::until_gone(&backends, SOON).await?;
    let body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 2 });
    warden.http.post(CHAT, &body).await?.json()?;
    exited(&mut warden).await?;
    let warden = warden.again().await?;
    // The process that crashed had evaluated the first conversation from its first turn.
    all_warm(&warden, &mut before[1..]).await
}

#[tokio::test]
async fn an_end_while_conversations_are_restored_loses_none() -> Outcome {
    let (mut warden, mut talks) = begun(&json!({ "kept": "dense", "restore_ms": 1500 }), "").await?;
    exited(&mut warden).await?;
    for _ in 0..3 {
        warden = warden.again().await?;
        let body =
            json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 2 });
        let restored = async {
            warden.kid.says("loading model", SOON).await?;
            tokio::time::sleep(Duration::from_millis(300)).await;
            Ok::<_, Trouble>(())
        };
        let http = warden.http.clone();
        tokio::select! {
            restored = restored => restored?,
            answer = http.post(CHAT, &body) => return Err(Trouble::new(format!("it was too fast: {answer:?}"))),
        }
        warden.kid.signal(Signal::TERM);
        warden.kid.exit(SOON).await?;
        assert_eq!(with_end(&stored(&warden), "slot"), 3);
    }
    let warden = warden.again().await?;
    all_warm(&warden, &mut talks).await
}

#[tokio::test]
async fn a_long_conversation_alone_is_saved_wherever_the_disk_has_room() -> Outcome {
    // At the assumed size of a token, it would not fit.
    let (mut warden, _) = begun(&dense(), "warm_disk_bytes = \"1MiB\"").await?;
    exited(&mut warden).await?;
    assert_eq!(with_end(&stored(&warden), "slot"), 3);
    let (mut warden, _) = begun(&dense(), "warm_disk_bytes = \"120KiB\"").await?;
    exited(&mut warden).await?;
    assert_eq!(with_end(&stored(&warden), "slot"), 2, "the bound holds");
    Ok(())
}
