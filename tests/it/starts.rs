//! If llama-server dies of a signal while loading, llama-warden finds a switch with which it starts, names
//! the line to configure, and uses the switch itself only if the model's `fallback` allows that.

use std::ffi::OsString;

use serde_json::{Value, json};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Home, Http, Outcome, Trouble, Warden, binaries, wait_for, wait_until};

use crate::wrappers::start_as;

/// Short backoffs, so that a search begins soon.
const QUICK: &str = "lifecycle.backoff_first = \"20ms\"\n";
const LINE: &str = "with `--no-repack` it starts: write `mitigations = [\"no-repack\"]` into [models.m]";

fn dies() -> Value {
    json!({"dies_without": ["--no-repack"]})
}

/// A model that dies without the flag; its binary lists the flag.
fn setup(more: &str) -> Result<Setup, Trouble> {
    let mut setup = Setup::new()?;
    setup.home.env.insert(OsString::from("FAKE_LLAMA_HELP"), OsString::from("new"));
    setup.fake("m", &dies(), &format!("{more}{QUICK}"))
}

async fn until_failed(warden: &Warden) -> Outcome {
    wait_until("the model waits for a change", SOON, async || {
        warden.state("m").await.is_ok_and(|state| state == "failed")
    })
    .await
}

#[tokio::test]
async fn a_server_that_dies_while_it_loads_is_searched_once_and_the_cure_is_named_everywhere() -> Outcome {
    let warden = setup("")?.start().await?;
    until_failed(&warden).await?;
    let status = warden.cli(&["status"]).await?;
    assert!(status.stdout.contains(LINE), "{}", status.all());
    let events = warden.cli(&["events"]).await?;
    assert!(events.stdout.contains("searched for a switch that starts it"), "{}", events.all());
    assert!(events.stdout.contains("with `--no-repack`: it starts"), "{}", events.all());
    let answer = warden.http.post(CHAT, &chat("a", "m", "hi", 6, false)).await?;
    assert_eq!(answer.status.as_u16(), 503, "{}", answer.text());
    assert!(answer.text().contains("no-repack"), "{}", answer.text());
    assert!(warden.backends().is_empty(), "nothing is left of the search");
    // The named line repairs the model.
    let mut warden = warden;
    let config =
        warden.setup.config().replace("preload = true\n", "preload = true\nmitigations = [\"no-repack\"]\n");
    warden.reload(&config)?;
    warden.until_ready(1).await?;
    let answer = warden.http.post(CHAT, &chat("b", "m", "hi", 2, false)).await?;
    assert!(answer.answer()?.is_whole());
    Ok(())
}

#[tokio::test]
async fn a_fallback_that_starts_it_is_used_by_itself() -> Outcome {
    let warden = setup("fallback = [\"--no-repack\"]\n")?.start().await?;
    warden.until_ready(1).await?;
    let answer = warden.http.post(CHAT, &chat("a", "m", "hi", 2, false)).await?;
    assert!(answer.answer()?.is_whole());
    let words = warden.backends()[0].command_line();
    assert!(words.iter().any(|word| word == "--no-repack"), "{words:?}");
    let events = warden.cli(&["events"]).await?;
    assert!(
        events.stdout.contains("falls back: started with --no-repack added, because it died"),
        "{}",
        events.all()
    );
    Ok(())
}

#[tokio::test]
async fn diagnose_names_the_switch_that_starts_a_dying_server() -> Outcome {
    let mut home = Home::with_fake(&dies())?;
    home.env.insert(OsString::from("FAKE_LLAMA_HELP"), OsString::from("old"));
    let fake = binaries::fake_llama()?.to_string_lossy().into_owned();
    let command = ["diagnose", "--binary", &fake, "--workload", "short-text", "--", "-m", "model.gguf"];
    let ran = home.warden(command, SOON).await?;
    assert_eq!(ran.code, 4, "{}", ran.all());
    assert!(
        ran.stdout.starts_with("the server died 3 times while it loaded: signal 11 (SIGSEGV)\n"),
        "{}",
        ran.stdout
    );
    assert!(
        ran.stdout.contains("with `--no-repack` it starts: add `--no-repack` to its command line\n"),
        "{}",
        ran.stdout
    );
    // An ordinary failure is reported as usual.
    let bad = Home::with_fake(&json!({"fail": "corrupt_model"}))?;
    let ran = bad.warden(command, SOON).await?;
    assert_eq!(ran.code, 1, "{}", ran.all());
    assert!(
        ran.stderr.contains("the server did not start") && !ran.stderr.contains("start: as configured"),
        "{}",
        ran.all()
    );
    Ok(())
}

/// Events of a start after this script; it may stall for two seconds.
async fn events_of_start(body: &str) -> Result<String, Trouble> {
    let toml = format!("lifecycle.start_stall = \"2s\"\n{QUICK}");
    let started = start_as(&binaries::llama_warden()?, Setup::new()?, body, &json!({}), &toml).await?;
    started.warden.until_ready(1).await?;
    Ok(started.warden.cli(&["events"]).await?.stdout)
}

#[tokio::test]
async fn a_server_that_loads_for_longer_than_it_may_stand_still_is_left_alone_while_it_moves_on() -> Outcome {
    // llama-server prints progress as points without a line end.
    let body = "for i in 1 2 3 4 5 6 7 8; do printf . >&2; sleep 0.5; done; exec \"$fake\" \"$@\"";
    let events = events_of_start(body).await?;
    assert!(!events.contains("start_stall"), "{events}");
    Ok(())
}

#[tokio::test]
async fn a_server_that_stands_still_while_it_starts_is_ended_and_the_key_is_named() -> Outcome {
    let body = "echo waiting for a lock >&2; [ -e \"$0.stood\" ] || { : >\"$0.stood\"; exec sleep 600; }; exec \"$fake\" \"$@\"";
    let events = events_of_start(body).await?;
    let told = "it logged, wrote, read and computed nothing for 2 s: give it more time with `start_stall`";
    assert!(events.contains(told), "{events}");
    Ok(())
}

#[tokio::test]
async fn a_server_whose_socket_is_removed_while_it_loads_is_started_again() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({"load_ms": 4000}), QUICK)?.start().await?;
    let socket = wait_for("its socket is there", SOON, async || {
        let path = warden.backends().first()?.socket()?;
        path.exists().then_some(path)
    })
    .await?;
    // The server answers a probe within milliseconds; then a cleaner removes its socket.
    wait_until("it has answered a probe", SOON, async || {
        Http::Unix(socket.clone()).get("/health").await.is_ok_and(|answer| answer.status.as_u16() == 503)
    })
    .await?;
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    std::fs::remove_file(&socket)?;
    warden.until_ready(1).await?;
    let events = warden.cli(&["events"]).await?;
    assert!(events.stdout.contains("its socket was removed while it started"), "{}", events.all());
    Ok(())
}
