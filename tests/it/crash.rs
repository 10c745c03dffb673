//! A backend that dies breaks only the streams that it was sending, and their clients get an error.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use warden_rig::ledger::End;
use warden_rig::swarm::{all_whole, requests, swarm};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Outcome, binaries, wait_until};

/// Line that `ik_llama.cpp` logs before it waits for a debugger.
const CUDA_ERROR: &str = "CUDA error: an illegal instruction was encountered";
const HASTY: &str = "lifecycle.backoff_first = \"20ms\"\nlifecycle.backoff_cap = \"50ms\"\n";
const LOOKING: &str = "internal.lifecycle.look_interval = \"50ms\"";

/// Message and type of the `error` object of a body in `OpenAI`'s form.
fn error_of(body: &Value) -> Result<(String, String), warden_rig::Trouble> {
    let error = &body["error"];
    let text = |key: &str| error[key].as_str().map(str::to_owned).context(format!("no {key} in {body}"));
    Ok((text("message")?, text("type")?))
}

#[tokio::test]
async fn killed_in_mid_stream_the_stream_ends_with_an_error_and_the_queue_is_served() -> Outcome {
    let args = "args = [\"-np\", \"1\"]\n";
    let script = json!({"ms_per_token": 10});
    let warden = Setup::new()?.top(LOOKING).fake("m", &script, &format!("{args}{HASTY}"))?.start().await?;
    let first = warden.until_ready(1).await?;
    let mut flow = warden.http.stream(CHAT, &chat("cut", "m", "go", 100_000, true)).await?;
    for _ in 0..3 {
        flow.event().await?;
    }
    let queued = requests("q", "m", 6, 4);
    let kill = async {
        wait_until("all six wait", SOON, async || {
            warden.waiting("m").await.is_ok_and(|waiting| waiting == 6)
        })
        .await?;
        first[0].signal(Signal::KILL);
        Ok::<_, warden_rig::Trouble>(flow.rest().await)
    };
    let (answers, cut) = tokio::join!(swarm(&warden.http, &queued, 6), kill);
    let (cut, _) = cut?;
    assert!(cut.error.is_some() && !cut.is_whole(), "an in-band error: {cut:?}");
    all_whole(&answers)?;
    let ends = warden.ledger().executions()?;
    assert_eq!(ends["cut"], [End::Open]);
    assert!(ends.iter().all(|(name, all)| name == "cut" || *all == [End::Finished]), "{ends:?}");
    Ok(())
}

#[tokio::test]
async fn a_request_whose_backend_dies_before_the_first_byte_is_told_or_sent_again_but_never_both() -> Outcome
{
    let warden = Setup::new()?.top(LOOKING);
    let once = warden.home.path().join("once");
    // The server dies with the request in its slot, before any byte of an answer.
    let script = json!({"faults": [{"do": "crash", "after_tokens": 2, "signal": 9, "once": once}]});
    let warden = warden.fake("m", &script, HASTY)?.start().await?;
    let answer = warden.http.post(CHAT, &chat("a", "m", "hi", 6, false)).await?;
    // llama-server may have executed a non-streaming request, so it must not be sent again.
    assert_eq!(answer.status.as_u16(), 502, "{}", answer.text());
    error_of(&answer.json()?)?;
    assert_eq!(answer.header("x-warden-executed"), "maybe");
    assert_eq!(warden.ledger().executions()?["a"], [End::Open]);
    let next = warden.http.post(CHAT, &chat("b", "m", "hi", 6, false)).await?;
    assert!(next.status.is_success(), "{}", next.text());
    Ok(())
}

#[tokio::test]
async fn each_way_to_fail_a_start_is_told_with_the_childs_last_lines() -> Outcome {
    for (how, words) in [
        ("corrupt_model", "invalid magic characters"),
        ("bad_flag", "invalid argument"),
        ("out_of_memory", "insufficient memory"),
        ("missing_library", "libcudart.so.12"),
        ("abort", "GGML_ASSERT"),
    ] {
        let mut warden = Setup::new()?.top(LOOKING).fake("m", &json!({"fail": how}), HASTY)?.start().await?;
        let answer = warden.http.post(CHAT, &chat("a", "m", "hi", 6, false)).await?;
        assert_eq!(answer.status.as_u16(), 503, "{how}: {}", answer.text());
        error_of(&answer.json()?)?;
        assert!(answer.text().contains(words), "{how}: {}", answer.text());
        warden.says(words).await?;
    }
    Ok(())
}

#[tokio::test]
async fn however_often_a_child_is_killed_no_request_is_turned_away() -> Outcome {
    let warden = Setup::new()?.top(LOOKING).fake("m", &json!({}), HASTY)?.start().await?;
    for kill in 0..9 {
        let child = warden.until_ready(1).await?;
        child[0].signal(Signal::KILL);
        wait_until("it is gone", SOON, async || child[0].is_collected()).await?;
        let answer = warden.http.post(CHAT, &chat(&format!("after-{kill}"), "m", "hi", 4, true)).await?;
        assert!(answer.status.is_success(), "kill {kill}: {} {}", answer.status, answer.text());
        assert_eq!(warden.http.get("/health").await?.status.as_u16(), 200);
    }
    let told = warden.cli(&["events"]).await?;
    assert!(told.stdout.contains("crash loop; still restarting"), "{told:?}");
    Ok(())
}

#[tokio::test]
async fn a_model_that_needs_another_file_says_so_and_starts_when_the_file_changes() -> Outcome {
    let warden =
        Setup::new()?.top(LOOKING).fake("m", &json!({"fail": "corrupt_model"}), HASTY)?.start().await?;
    wait_until("the model is failed", SOON, async || {
        warden.state("m").await.is_ok_and(|state| state == "failed")
    })
    .await?;
    let begun = tokio::time::Instant::now();
    let answer = warden.http.post(CHAT, &chat("a", "m", "hi", 6, false)).await?;
    assert_eq!(answer.status.as_u16(), 503, "{}", answer.text());
    // Requests that wait in the queue fail later.
    assert!(begun.elapsed() < Duration::from_secs(10), "a failed model must say so at once");
    let after: u64 = answer.header("retry-after").parse()?;
    assert!((1..=600).contains(&after), "the next trial is within ten minutes, not in {after} s");
    let health = warden.http.get("/health").await?;
    assert_eq!(health.status.as_u16(), 503, "{}", health.text());
    let (_, kind) = error_of(&health.json()?)?;
    assert_eq!(kind, "unavailable_error");
    assert!(!health.text().contains("gguf"), "anybody may ask for it: {}", health.text());
    let status = warden.cli(&["status"]).await?;
    assert!(status.stdout.contains("next start at") && status.stdout.contains("restart m"), "{status:?}");
    // Only the changed file can trigger the next start.
    warden.script("m", &json!({"fail": null})).await?;
    std::fs::write(warden.setup.home.path().join("model.gguf"), "GGUF and more")?;
    wait_until("it serves", SOON, async || {
        let answer = warden.http.post(CHAT, &chat("b", "m", "hi", 6, false)).await;
        answer.is_ok_and(|answer| answer.status.is_success())
    })
    .await?;
    assert_eq!(warden.http.get("/health").await?.status.as_u16(), 200);
    Ok(())
}

#[tokio::test]
async fn an_operator_need_not_wait_for_the_next_trial() -> Outcome {
    let warden = Setup::new()?.top(LOOKING).fake("m", &json!({"fail": "bad_flag"}), HASTY)?.start().await?;
    wait_until("the model is failed", SOON, async || {
        warden.state("m").await.is_ok_and(|state| state == "failed")
    })
    .await?;
    warden.script("m", &json!({"fail": null})).await?;
    let ran = warden.cli(&["restart", "m"]).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let answer = warden.http.post(CHAT, &chat("b", "m", "hi", 6, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    Ok(())
}

#[tokio::test]
async fn a_backend_that_answers_no_probe_is_replaced() -> Outcome {
    let setup = Setup::new()?.top(LOOKING);
    let once = setup.home.path().join("once");
    let script =
        json!({"on_term": "ignore", "faults": [{"do": "hang", "silent_health": true, "once": once}]});
    let toml = format!(
        "lifecycle.probe_interval = \"100ms\"\nlifecycle.probe_timeout = \"200ms\"\nlifecycle.suspect_timeout = \"300ms\"\n\
         lifecycle.drain_deadline = \"300ms\"\nlifecycle.stop_grace = \"300ms\"\n{HASTY}"
    );
    let warden = setup.fake("m", &script, &toml)?.start().await?;
    let first = warden.until_ready(1).await?;
    let hung = chat("hung", "m", "hi", 6, true);
    let (hung, next) = tokio::join!(warden.http.post(CHAT, &hung), async {
        wait_until("the first one is gone", SOON, async || !first[0].is_alive()).await?;
        warden.http.post(CHAT, &chat("next", "m", "hi", 6, true)).await
    });
    assert!(next?.answer()?.is_whole());
    // The request never began, so an error and the next process's answer are both right.
    if let Ok(hung) = hung {
        assert!(!hung.status.is_success() || hung.answer()?.is_whole(), "{}", hung.text());
    }
    Ok(())
}

#[tokio::test]
async fn a_backend_that_logged_a_crash_and_does_not_end_is_not_waited_for_like_a_busy_one() -> Outcome {
    // Without the log line the process would be suspect for a minute, and then drain for five.
    let setup = Setup::new()?.top(LOOKING).top("internal.lifecycle.crash_ends = \"200ms\"");
    let once = setup.home.path().join("once");
    let script = json!({
        "faults": [{"do": "hang", "silent_health": true, "once": once, "says": CUDA_ERROR}],
    });
    let toml = format!(
        "lifecycle.probe_interval = \"100ms\"\nlifecycle.probe_timeout = \"200ms\"\nlifecycle.stop_grace = \"300ms\"\n{HASTY}"
    );
    let warden = setup.fake("m", &script, &toml)?.start().await?;
    let first = warden.until_ready(1).await?;
    let hung = chat("hung", "m", "hi", 6, true);
    // Until the process ends, its other threads answer requests that need no computing.
    let (_, gone) = tokio::join!(
        warden.http.post(CHAT, &hung),
        wait_until("the first one is gone", SOON, async || {
            let _told = warden.http.get("/props?model=m").await;
            !first[0].is_alive()
        })
    );
    gone?;
    assert!(warden.http.post(CHAT, &chat("next", "m", "hi", 6, true)).await?.answer()?.is_whole());
    Ok(())
}

#[tokio::test]
async fn dirty_bytes_from_a_backend_become_a_clean_502_and_the_next_request_is_served() -> Outcome {
    for how in ["bad_status_line", "two_lengths", "cut_head", "close", "huge_head"] {
        let setup = Setup::new()?;
        let once = setup.home.path().join("once");
        let script = json!({"faults": [{"do": how, "once": once}]});
        let warden = setup.fake("m", &script, HASTY)?.start().await?;
        let answer = warden.http.post(CHAT, &chat("a", "m", "hi", 6, false)).await?;
        assert_eq!(answer.status.as_u16(), 502, "{how}: {}", answer.text());
        error_of(&answer.json()?)?;
        let next = warden.http.post(CHAT, &chat("b", "m", "hi", 6, false)).await?;
        assert!(next.status.is_success(), "{how}: {}", next.text());
    }
    Ok(())
}

#[tokio::test]
async fn a_body_cut_by_the_backend_is_never_ended_as_if_it_were_whole() -> Outcome {
    for (how, stream) in [("short_body", false), ("cut_chunk", false), ("cut_chunk", true), ("close", true)] {
        let setup = Setup::new()?;
        let fault = if stream { json!({"do": how, "after_tokens": 2}) } else { json!({"do": how}) };
        let warden = setup.fake("m", &json!({"faults": [fault]}), HASTY)?.start().await?;
        let flow = warden.http.stream(CHAT, &chat("a", "m", "hi", 6, stream)).await;
        let Ok(mut flow) = flow else { continue };
        if !flow.status().is_success() {
            continue;
        }
        let (answer, end) = flow.rest().await;
        assert!(
            !answer.done && (end.is_err() || answer.error.is_some()),
            "{how} {stream}: {answer:?} {end:?}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn started_with_ignored_child_signals_it_serves_and_knows_how_its_children_end() -> Outcome {
    let setup = Setup::new()?.fake("m", &json!({}), "lifecycle.backoff_first = \"10ms\"\n")?;
    let config = setup.home.file("warden.toml", setup.config())?;
    let ignoring = "trap '' CHLD; exec \"$0\" \"$@\"";
    let warden = binaries::llama_warden()?;
    let args =
        ["-c".into(), ignoring.into(), warden.into(), "serve".into(), "--config".into(), config.into()];
    let mut warden = setup.start_program(Path::new("/bin/sh"), &args).await?;
    let first = warden.until_ready(1).await?;
    first[0].signal(Signal::KILL);
    warden.says("SIGKILL").await?;
    warden.until_ready(1).await?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}

#[tokio::test]
async fn without_its_runtime_directory_a_restart_makes_a_new_one_and_it_serves_again() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    let first = warden.until_ready(1).await?;
    let socket = first[0].socket().context("a socket")?;
    std::fs::remove_dir_all(socket.parent().context("its directory")?)?;
    let ran = warden.cli(&["restart", "m"]).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let answer = warden.http.post(CHAT, &chat("a", "m", "hi", 4, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    Ok(())
}

#[tokio::test]
async fn a_lack_of_open_files_is_not_taken_for_a_dead_backend() -> Outcome {
    let slots = "args = [\"-np\", \"200\"]\n";
    let setup = Setup::new()?.fake("m", &json!({"ms_per_token": 5}), slots)?;
    let config = setup.home.file("warden.toml", setup.config())?;
    let few = "ulimit -n 100; exec \"$0\" \"$@\"";
    let warden = binaries::llama_warden()?;
    let args = ["-c".into(), few.into(), warden.into(), "serve".into(), "--config".into(), config.into()];
    let mut warden = setup.start_program(Path::new("/bin/sh"), &args).await?;
    let first = warden.until_ready(1).await?;
    let long = requests("long", "m", 150, 100_000);
    let crowd = swarm(&warden.http, &long, 150);
    let full = wait_until("every file is taken", SOON, async || {
        std::fs::read_dir(format!("/proc/{}/fd", warden.kid.pid())).is_ok_and(|files| files.count() >= 99)
    });
    let refused_for_a_while = async {
        full.await?;
        tokio::time::sleep(Duration::from_millis(700)).await;
        Ok::<_, warden_rig::Trouble>(())
    };
    tokio::select! {
        done = refused_for_a_while => done?,
        answers = crowd => return Err(warden_rig::Trouble::new(format!("the crowd ended: {answers:?}"))),
    }
    // The hanging clients have left.
    let answer = warden.http.post(CHAT, &chat("after", "m", "hi", 4, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    assert_eq!(warden.backends(), first);
    assert!(!warden.kid.output().contains("suspect"), "a healthy backend was doubted");
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}
