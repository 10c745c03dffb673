//! A process that answers wrongly although its health check passes is found, reported and, if configured,
//! replaced: no text, null embeddings, other log-probabilities. Sound traffic raises nothing, tests of a process
//! delay no request, and a model whose next process answers as wrongly is not restarted for ever.

use std::cell::Cell;

use serde_json::{Value, json};
use warden_rig::warden::{CHAT, SOON, Setup, chat, json_lines};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

/// Readings in quick succession, from which symptoms follow.
const SENSORS: &str = "sensors.interval = \"20ms\"\ninternal.sensors.idle_settle = \"1ms\"";

/// No delays between replacements.
const PACE: &str = "policy.jitter = 0.0\npolicy.quiet_for = \"1ms\"\npolicy.min_interval = \"1ms\"\npolicy.min_interval_hard = \"1ms\"\n";

const EMPTY: &str = "got answers without text";
const CHANGED: &str = "its answer to a fixed prompt has changed";
const OFF: &str = "the answers of a second process became faulty";

async fn start(answers: &str, faults: &Value, more: &str) -> Result<Warden, Trouble> {
    let script = json!({ "tokens": 5, "faults": faults });
    let toml = format!("{more}{PACE}policy.answers = \"{answers}\"\n");
    let warden = Setup::new()?.top(SENSORS).fake("m", &script, &toml)?.start().await?;
    warden.until_ready(1).await?;
    Ok(warden)
}

/// Sends requests, each a conversation of its own, until `done`; returns their number.
async fn converse(warden: &Warden, name: &str, done: impl AsyncFn(usize) -> bool) -> Result<usize, Trouble> {
    let sent = Cell::new(0_usize);
    wait_until("enough was answered", SOON, async || {
        sent.set(sent.get() + 1);
        let id = format!("{name}-{}", sent.get());
        let body = chat(&id, "m", &format!("{name} {}", sent.get()), 5, sent.get().is_multiple_of(2));
        let answer = warden.http.post(CHAT, &body).await;
        assert!(answer.is_ok_and(|answer| answer.status.is_success()), "clients get whole answers");
        done(sent.get()).await
    })
    .await?;
    Ok(sent.get())
}

async fn sound(warden: &Warden, name: &str) -> Outcome {
    converse(warden, name, async |sent| sent == 30).await.map(drop)
}

/// Number of answered fixed prompts: fake-llama gives them no ordinal.
fn probes(warden: &Warden) -> Result<usize, Trouble> {
    let lines = warden.ledger().lines()?;
    Ok(lines.iter().filter(|line| line.ordinal == 0 && line.event == "finished").count())
}

async fn until_probes(warden: &Warden, least: usize) -> Outcome {
    wait_until("fixed prompts are answered", SOON, async || probes(warden).is_ok_and(|found| found >= least))
        .await
}

fn entries(warden: &Warden) -> Result<Vec<Value>, Trouble> {
    json_lines(&warden.recycles())
}

/// Waits for the first replacement; returns its entry in the ledger.
async fn replaced(warden: &Warden) -> Result<Value, Trouble> {
    wait_until("the ledger has the replacement", SOON, async || {
        entries(warden).is_ok_and(|found| !found.is_empty())
    })
    .await?;
    warden.until_ready(1).await?;
    entries(warden)?.first().cloned().context("an entry")
}

#[tokio::test]
async fn a_process_whose_answers_have_no_text_any_more_is_replaced() -> Outcome {
    let directory = tempfile::tempdir()?;
    let faults = json!([{ "at": 31, "do": "mute", "once": directory.path().join("mute") }]);
    let mut warden = start("replace", &faults, "").await?;
    let old = warden.backends()[0];
    sound(&warden, "sound").await?;
    let sent = converse(&warden, "empty", async |_| {
        !warden.backends().is_empty() && warden.backends().iter().all(|backend| backend.pid != old.pid)
    })
    .await?;
    println!("replaced after {sent} answers");
    assert!(sent >= 8, "by {sent} answers");
    assert_eq!(replaced(&warden).await?["reason"], "empty_answers");
    warden.says(EMPTY).await?;
    let answer = warden.http.post(CHAT, &chat("well", "m", "hi", 5, false)).await?.json()?;
    assert!(
        answer["choices"][0]["message"]["content"].as_str().is_some_and(|text| !text.is_empty()),
        "{answer}"
    );
    Ok(())
}

#[tokio::test]
async fn null_embeddings_are_found_after_a_few_requests() -> Outcome {
    let directory = tempfile::tempdir()?;
    let faults = json!([{ "at": 31, "do": "nullify", "once": directory.path().join("null") }]);
    let mut warden = start("replace", &faults, "").await?;
    let sent = Cell::new(0_usize);
    wait_until("the process is replaced", SOON, async || {
        sent.set(sent.get() + 1);
        let body = json!({ "model": "m", "input": format!("text {}", sent.get()) });
        let answer = warden.http.post("/v1/embeddings", &body).await;
        assert!(answer.is_ok_and(|answer| answer.status.is_success()));
        entries(&warden).is_ok_and(|found| !found.is_empty())
    })
    .await?;
    println!("replaced after {} answers", sent.get() - 30);
    assert!(sent.get() >= 38, "by {} answers", sent.get());
    assert_eq!(replaced(&warden).await?["reason"], "null_answers");
    warden.says("have null or all-equal numbers").await?;
    Ok(())
}

#[tokio::test]
async fn a_model_whose_second_process_answers_nothing_either_is_not_replaced_again() -> Outcome {
    // Each process, from its request 31 on.
    let mut warden = start("replace", &json!([{ "at": 31, "do": "mute" }]), "").await?;
    sound(&warden, "first").await?;
    converse(&warden, "first empty", async |_| entries(&warden).is_ok_and(|found| !found.is_empty())).await?;
    replaced(&warden).await?;
    sound(&warden, "second").await?;
    let second = warden.backends();
    converse(&warden, "second empty", async |_| warden.kid.output().contains(OFF)).await?;
    converse(&warden, "more", async |sent| sent == 20).await?;
    assert_eq!((warden.backends(), entries(&warden)?.len()), (second, 1));
    let said = warden.says(OFF).await?;
    assert!(said.contains("llama-warden mitigations show recurrent-state-nan"), "{said}");
    Ok(())
}

#[tokio::test]
async fn empty_answers_are_only_reported_without_requests_to_the_process_by_default() -> Outcome {
    let mut warden = start("observe", &json!([{ "at": 31, "do": "mute" }]), "").await?;
    let old = warden.backends();
    sound(&warden, "sound").await?;
    converse(&warden, "empty", async |_| warden.kid.output().contains(EMPTY)).await?;
    assert_eq!((warden.backends(), probes(&warden)?), (old, 0));
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}

#[tokio::test]
async fn a_process_that_computes_otherwise_than_before_is_replaced_after_a_few_empty_answers() -> Outcome {
    let directory = tempfile::tempdir()?;
    let faults = json!([
        { "at": 31, "do": "alter", "once": directory.path().join("alter") },
        { "from": 32, "do": "silence" },
    ]);
    let mut warden = start("replace", &faults, "").await?;
    until_probes(&warden, 6).await?;
    sound(&warden, "sound").await?;
    converse(&warden, "altered", async |sent| sent == 9).await?;
    assert_eq!(replaced(&warden).await?["reason"], "altered");
    warden.says(CHANGED).await?;
    assert!(
        !warden.kid.output().contains(OFF),
        "the next process computes as the first: {}",
        warden.kid.output()
    );
    Ok(())
}

#[tokio::test]
async fn a_next_process_that_computes_as_wrongly_is_not_replaced_again() -> Outcome {
    let mut warden = start("replace", &json!([{ "from": 31, "do": "silence" }]), "").await?;
    until_probes(&warden, 6).await?;
    sound(&warden, "sound").await?;
    // The next fixed prompt changes this process, and the next process before it serves.
    let faults = json!([{ "at": 0, "do": "alter" }, { "from": 31, "do": "silence" }]);
    warden.script("m", &json!({ "faults": faults })).await?;
    converse(&warden, "empty", async |sent| sent == 8).await?;
    assert_eq!(replaced(&warden).await?["reason"], "altered");
    warden.says(OFF).await?;
    let second = warden.backends();
    converse(&warden, "more", async |sent| sent == 20).await?;
    assert_eq!((warden.backends(), entries(&warden)?.len()), (second, 1));
    Ok(())
}

#[tokio::test]
async fn sound_traffic_with_empty_answers_raises_nothing() -> Outcome {
    let mut warden = start("replace", &json!([{ "body_has": "silence", "do": "silence" }]), "").await?;
    until_probes(&warden, 6).await?;
    let old = warden.backends();
    sound(&warden, "sound").await?;
    for n in 0..60 {
        // Classifiers, evaluations of prompts, stop words.
        let mut body = chat(&format!("c-{n}"), "m", &format!("silence {n}"), n % 2, false);
        if n % 3 == 0 {
            body["stop"] = json!(["\n"]);
            body["max_tokens"] = json!(5);
        }
        assert!(warden.http.post(CHAT, &body).await?.status.is_success());
    }
    sound(&warden, "sound again").await?;
    converse(&warden, "silence", async |sent| sent == 8).await?;
    until_probes(&warden, 9).await?;
    converse(&warden, "sound at last", async |sent| sent == 5).await?;
    for n in 0..40 {
        // Each answer with a text shows that the process is sound, also to a request with stop words.
        let empty = chat(&format!("e-{n}"), "m", &format!("silence again {n}"), 5, false);
        let mut stopped = chat(&format!("s-{n}"), "m", &format!("a text {n}"), 5, false);
        stopped["stop"] = json!(["\n"]);
        for body in [empty, stopped] {
            assert!(warden.http.post(CHAT, &body).await?.status.is_success());
        }
    }
    assert_eq!((warden.backends(), entries(&warden)?), (old, Vec::new()));
    assert_eq!(warden.terminate(SOON).await?, 0);
    for words in [EMPTY, CHANGED, OFF] {
        assert!(!warden.kid.output().contains(words), "{}", warden.kid.output());
    }
    Ok(())
}

#[tokio::test]
async fn nothing_is_looked_at_if_that_is_off() -> Outcome {
    let mut warden = start("off", &json!([{ "at": 31, "do": "mute" }]), "").await?;
    sound(&warden, "sound").await?;
    converse(&warden, "empty", async |sent| sent == 60).await?;
    assert_eq!(probes(&warden)?, 0);
    assert_eq!(warden.terminate(SOON).await?, 0);
    assert!(!warden.kid.output().contains(EMPTY), "{}", warden.kid.output());
    Ok(())
}

#[tokio::test]
async fn a_request_that_arrives_during_a_fixed_prompt_ends_the_prompt() -> Outcome {
    let script = json!({ "tokens": 5, "ms_per_token": 300.0 });
    let toml = format!("args = [\"-np\", \"1\"]\n{PACE}policy.answers = \"replace\"\n");
    let warden = Setup::new()?.top(SENSORS).fake("m", &script, &toml)?.start().await?;
    warden.until_ready(1).await?;
    let of_probe = |event: &str| {
        let lines = warden.ledger().lines().unwrap_or_default();
        lines.iter().position(|line| line.ordinal == 0 && line.event == event)
    };
    wait_until("the fixed prompt has begun", SOON, async || of_probe("begun").is_some()).await?;
    let answer = warden.http.post(CHAT, &chat("r", "m", "hi", 1, false)).await?;
    assert!(answer.answer()?.is_whole());
    let lines = warden.ledger().lines()?;
    let begun = lines.iter().position(|line| line.id == "r" && line.event == "begun");
    // The only slot was free before the prompt had ended.
    assert!(of_probe("cancelled").is_some_and(|cancelled| Some(cancelled) < begun), "{lines:#?}");
    assert_eq!(of_probe("finished"), None);
    let status = warden.status("m").await?;
    assert_eq!(status["backends"][0]["work"]["requests"], 1, "{status:#}");
    Ok(())
}
