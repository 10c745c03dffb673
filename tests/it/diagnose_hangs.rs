//! `llama-warden diagnose` waits for a hanging server no longer than the declared limit, and ends at once on
//! a signal.

use std::ffi::OsString;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use warden_rig::process::Kid;
use warden_rig::warden::SOON;
use warden_rig::{Context as _, Home, Outcome, Trouble, binaries};

/// Far less than the limit of any single wait.
const AT_ONCE: Duration = Duration::from_secs(20);

/// Line that `ik_llama.cpp` logs before it waits for a debugger.
const CUDA_ERROR: &str = "CUDA error: an illegal instruction was encountered";

const INTERRUPTED: i32 = 130;

/// A home whose fake-llama never answers this path, and the arguments of `diagnose`.
fn hanging(path: &str, args: &[&str]) -> Result<(Home, Vec<OsString>), Trouble> {
    let home = Home::with_fake(&json!({"hangs_on": [path]}))?;
    let mut all: Vec<OsString> = vec!["diagnose".into(), "--binary".into(), binaries::fake_llama()?.into()];
    all.extend(args.iter().chain(&["--", "-m", "model.gguf"]).map(OsString::from));
    Ok((home, all))
}

fn start(home: &Home, args: &[OsString]) -> Result<Kid, Trouble> {
    Kid::start(&binaries::llama_warden()?, args, &home.env, home.path(), home.path().join("log"))
}

/// Sends a stop signal, and expects an immediate end without remaining children.
async fn ends(mut kid: Kid) -> Outcome {
    let children = kid.children();
    kid.signal(Signal::INT);
    assert_eq!(kid.exit(AT_ONCE).await?, INTERRUPTED, "{}", kid.output());
    assert!(!children.iter().any(|child| child.is_alive()), "{}", kid.output());
    Ok(())
}

#[tokio::test]
async fn a_server_that_counts_no_tokens_holds_up_no_interrupt() -> Outcome {
    let limit = ["--set", "internal.diagnose.question_limit=10m", "--workload", "short-text"];
    let (home, args) = hanging("/tokenize", &limit)?;
    let mut kid = start(&home, &args)?;
    kid.says("ready after", SOON).await?;
    ends(kid).await
}

#[tokio::test]
async fn a_server_that_never_says_whether_it_embeds_holds_up_no_interrupt() -> Outcome {
    let limit =
        ["--set", "internal.diagnose.question_limit=10m", "--workload", "short-text", "--requests", "1"];
    let (home, args) = hanging("/v1/embeddings", &limit)?;
    let mut kid = start(&home, &args)?;
    kid.says("short-text 1/1", SOON).await?;
    ends(kid).await
}

#[tokio::test]
async fn questions_that_nobody_answers_end_at_their_limit_and_the_work_is_done() -> Outcome {
    let limit = [
        "--set",
        "internal.diagnose.question_limit=200ms",
        "--json",
        "--workload",
        "short-text",
        "--requests",
        "4",
    ];
    let (home, args) = hanging("/tokenize", &limit)?;
    let ran = home.warden(&args, SOON).await?;
    let report: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
    assert_eq!(report["legs"][0]["steps"], 4, "{}", ran.all());
    Ok(())
}

#[tokio::test]
async fn a_server_that_logs_a_crash_and_then_waits_for_ever_has_crashed() -> Outcome {
    let home = Home::with_fake(&json!({
        "faults": [{ "at": 3, "do": "hang", "silent_health": true, "says": CUDA_ERROR }],
    }))?;
    let fake = binaries::fake_llama()?.display().to_string();
    let args = [
        "diagnose",
        "--binary",
        &fake,
        "--set",
        "internal.lifecycle.crash_ends=200ms",
        "--json",
        "--workload",
    ];
    let ran = home
        .warden(args.into_iter().chain(["short-text", "--requests", "8", "--", "-m", "model.gguf"]), SOON);
    let ran = ran.await?;
    let report: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
    let leg = &report["legs"][0];
    assert_eq!(
        (&leg["ended"]["kind"], &leg["crash"]["at_request"]),
        (&json!("crashed"), &json!(3)),
        "{}",
        ran.all()
    );
    assert_eq!(leg["crash"]["again"], "always", "{}", ran.all());
    assert!(leg["ended"]["why"].as_str().is_some_and(|why| why.contains("illegal instruction")), "{leg}");
    Ok(())
}

#[tokio::test]
async fn a_request_that_nobody_answers_ends_at_the_limit_of_its_leg() -> Outcome {
    let limit = ["--set", "diagnose.leg_limit=1s", "--json", "--workload", "short-text"];
    let (home, args) = hanging("/v1/chat/completions", &limit)?;
    let ran = home.warden(&args, SOON).await?;
    let report: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
    assert_eq!(report["legs"][0]["ended"]["kind"], "out_of_time", "{}", ran.all());
    Ok(())
}
