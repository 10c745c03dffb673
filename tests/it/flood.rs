//! A server that floods its log, even with lines that look like crashes, affects no other model: requests are
//! answered in time, llama-warden's log and memory stay small, and the log counts omitted lines.

use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;
use warden_rig::process::ProcessId;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Outcome, Trouble, Warden, binaries, wait_until};

/// Starts `quiet`, and `noisy`, which prints `floods` for some seconds after its start.
async fn serve(floods: &str) -> Result<Warden, Trouble> {
    let setup = Setup::new()?.fake("quiet", &json!({}), "")?;
    let fake = binaries::fake_llama()?;
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *--version*|*--help*) exec '{fake}' \"$@\";; esac\n\
         (sleep 1; {floods}; echo 'the flood is over' >&2) &\nexec '{fake}' \"$@\"\n",
        fake = fake.display()
    );
    let program = setup.home.program("noisy", script)?;
    let model = setup.home.path().join("model.gguf");
    let toml = format!("binary = '{}'\nmodel = '{}'\npreload = true", program.display(), model.display());
    setup.top("child.measure = false").model("noisy", &toml).start().await
}

/// Sends requests to `quiet` until the flood is over; returns the log.
async fn answers_meanwhile(warden: &mut Warden) -> Result<String, Trouble> {
    warden.until_ready(2).await?;
    let begun = Instant::now();
    let mut slowest = Duration::ZERO;
    while !warden.kid.output().contains("the flood is over") {
        let asked = Instant::now();
        let answer = warden.http.post(CHAT, &chat("q", "quiet", "hi", 4, false)).await?;
        assert!(answer.status.is_success(), "{}", answer.text());
        slowest = slowest.max(asked.elapsed());
        assert!(begun.elapsed() < SOON, "the flood does not end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(slowest < Duration::from_secs(1), "an answer took {slowest:?}");
    Ok(warden.kid.output())
}

#[tokio::test]
async fn a_line_that_is_repeated_for_ever_is_folded_and_other_models_answer_in_time() -> Outcome {
    let mut warden = serve("timeout 3 yes 'W some warning that is repeated for ever' >&2").await?;
    let log = answers_meanwhile(&mut warden).await?;
    assert!(log.contains("last line repeated "), "{}", &log[..log.len().min(4000)]);
    let lines = log.lines().filter(|line| line.contains("repeated for ever")).count();
    assert!(lines < 20, "{lines} lines of it");
    Ok(())
}

#[tokio::test]
async fn a_flood_of_crash_lines_is_bounded_counted_and_fills_no_inbox() -> Outcome {
    let mut warden = serve("timeout 3 seq -f 'CUDA error: number %.0f' 1000000000 >&2").await?;
    let log = answers_meanwhile(&mut warden).await?;
    assert!(log.contains(" lines left out"), "what is left out is counted");
    let lines = log.lines().filter(|line| line.contains("CUDA error: number")).count();
    assert!(lines < 12_000, "{lines} lines of it");
    let anon = ProcessId::of(warden.kid.pid()).and_then(ProcessId::host_bytes).context("its memory")?;
    assert!(anon < 200 << 20, "{} MiB", anon >> 20);
    // The noisy server has not crashed, and serves.
    wait_until("the noisy model serves", SOON, async || {
        let answer = warden.http.post(CHAT, &chat("n", "noisy", "hi", 4, false)).await;
        answer.is_ok_and(|answer| answer.status.is_success())
    })
    .await
}
