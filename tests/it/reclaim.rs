//! A leaking backend must first try to give memory back. If that succeeds, no replacement is needed;
//! otherwise the backend is replaced. No answer, kill or drain in the meantime costs a request.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use warden_rig::process::ProcessId;
use warden_rig::warden::{CHAT, SOON, Setup, chat, json_lines};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_for, wait_until};

/// Frequent readings and short limits, so that tests need not wait.
const OFTEN: &str = "sensors.interval = \"20ms\"\ninternal.sensors.idle_settle = \"1ms\"\n\
                     internal.recycle.reclaim_again = \"1ms\"\ninternal.recycle.reclaim_wait = \"1s\"\n\
                     internal.recycle.reclaim_limit = \"60s\"";

/// A fake has some MiB of its own and leaks a MiB per request.
const POLICY: &str = "policy.host.soft = \"64MiB\"\npolicy.jitter = 0.0\npolicy.quiet_for = \"1ms\"\n\
                      policy.quiet_within = \"100ms\"\npolicy.min_interval = \"1ms\"\npolicy.growth = \"off\"\n";

const LEAK_KIB: u64 = 1024;

async fn start(reclaim: &Value, more: &str) -> Result<(Warden, ProcessId), Trouble> {
    let script = json!({ "leak_kib_per_request": LEAK_KIB, "reclaim": reclaim, "ms_per_token": 0.0 });
    let warden = Setup::new()?.top(OFTEN).fake("m", &script, &format!("{POLICY}{more}"))?.start().await?;
    let backend = warden.until_ready(1).await?[0];
    Ok((warden, backend))
}

async fn ask(warden: &Warden, n: usize) -> Outcome {
    let answer = warden.http.post(CHAT, &chat(&format!("r-{n}"), "m", "hi", 2, false)).await?;
    if answer.status.is_success() && answer.answer()?.is_whole() {
        return Ok(());
    }
    Err(Trouble::new(format!("request {n}: {}: {}", answer.status, answer.text())))
}

/// Entries of reclaims and of replacements in the ledger.
fn ledger(warden: &Warden) -> (Vec<Value>, Vec<Value>) {
    let all = json_lines(&warden.recycles()).unwrap_or_default();
    all.into_iter().partition(|entry| entry["kind"] == "reclaim")
}

async fn backend(warden: &Warden) -> Value {
    warden.status("m").await.unwrap_or_default()["backends"][0].clone()
}

/// Waits for the first reading, which shows if the process can reclaim memory.
async fn known(warden: &Warden) -> Result<Value, Trouble> {
    wait_for("it is known who can be asked", SOON, async || {
        let parts = backend(warden).await["reclaim"]["parts"].clone();
        parts.is_object().then_some(parts)
    })
    .await
}

fn charged(memory: &Value) -> u64 {
    memory["anon"].as_u64().unwrap_or(0) + memory["swap"].as_u64().unwrap_or(0)
}

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn a_leak_that_goes_back_saws_at_its_budget_with_no_request_lost_and_no_process_replaced() -> Outcome {
    let (warden, backend_) = start(&json!({}), "").await?;
    let mut n = 0;
    wait_until("it gave back four times", Duration::from_secs(120), async || {
        for _ in 0..10 {
            n += 1;
            if ask(&warden, n).await.is_err() {
                return true;
            }
        }
        ledger(&warden).0.len() >= 4
    })
    .await?;
    let (reclaims, replacements) = ledger(&warden);
    assert_eq!(replacements, Vec::<Value>::new());
    assert!(reclaims.len() >= 4, "{reclaims:?}");
    for entry in &reclaims {
        assert_eq!((&entry["reason"], &entry["outcome"]), (&json!("host_soft"), &json!("done")), "{entry}");
        assert_eq!(entry["helped"], true, "{entry}");
        let (before, after) = (charged(&entry["host_before"]), charged(&entry["host_after"]));
        assert!(before >= 64 * MIB && after < 50 * MIB, "{entry}");
        assert!(entry["given"]["graphs_host"].as_u64() > Some(20 * MIB), "{entry}");
    }
    assert_eq!(warden.until_ready(1).await?[0], backend_, "the same process all along");
    let events = warden.cli(&["history", "--json", "--reason", "reclaimed"]).await?;
    assert!(events.stdout.lines().count() >= 4, "{}", events.all());
    let done = warden.metric("llama_warden_reclaims_total{model=\"m\",result=\"done\"}").await?;
    assert!(done >= Some(4.0), "{done:?}");
    let bytes = "llama_warden_reclaimed_bytes_total{model=\"m\",component=\"graphs_host\"}";
    assert!(warden.metric(bytes).await? > Some(80.0e6));
    Ok(())
}

#[tokio::test]
async fn a_leak_that_does_not_go_back_is_replaced_after_one_question_and_no_request_is_lost() -> Outcome {
    for reclaim in
        [json!({"gives": 0.1}), json!({"how": "garbage"}), json!({"how": "silent", "parts": "heap"})]
    {
        let (warden, _) = start(&reclaim, "").await?;
        let mut n = 0;
        wait_until("it is replaced", Duration::from_secs(120), async || {
            for _ in 0..10 {
                n += 1;
                if ask(&warden, n).await.is_err() {
                    return true;
                }
            }
            !ledger(&warden).1.is_empty()
        })
        .await?;
        let (reclaims, replacements) = ledger(&warden);
        let first = replacements.first().context("a replacement: no request failed")?;
        assert_eq!(first["reason"], "host_soft", "{first}");
        let words = first["evidence"]["words"].as_str().unwrap_or_default();
        assert!(words.contains("asked to give memory back"), "{reclaim}: {first}");
        let of_first = reclaims.iter().filter(|entry| entry["generation"] == first["from"]).count();
        assert_eq!(of_first, 1, "{reclaim}: {reclaims:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_plain_build_is_replaced_as_before_and_status_says_why_it_is_not_asked() -> Outcome {
    let (warden, _) = start(&Value::Null, "").await?;
    assert_eq!(known(&warden).await?, json!({"heap": false, "cuda": false}));
    let table = warden.cli(&["status"]).await?;
    assert!(table.stdout.contains("reclaim: this build cannot give memory back"), "{}", table.all());
    let refused = warden.admin().post("/models/m/reclaim", &json!({})).await?;
    assert_eq!(refused.status, 409);
    assert!(refused.text().contains("its build cannot be asked: `llama-warden build`"), "{}", refused.text());
    let mut n = 0;
    wait_until("it is replaced", Duration::from_secs(120), async || {
        for _ in 0..10 {
            n += 1;
            if ask(&warden, n).await.is_err() {
                return true;
            }
        }
        !ledger(&warden).1.is_empty()
    })
    .await?;
    let (reclaims, replacements) = ledger(&warden);
    assert_eq!((reclaims.len(), &replacements[0]["reason"]), (0, &json!("host_soft")));
    Ok(())
}

#[tokio::test]
async fn an_operator_asks_by_hand_and_is_told_what_came_back_of_which_part() -> Outcome {
    let (warden, _) = start(&json!({"takes_ms": 20}), "").await?;
    known(&warden).await?;
    for n in 0..8 {
        ask(&warden, n).await?;
    }
    let ran = warden.cli(&["reclaim", "m"]).await?;
    let line = ran.stdout.lines().next().context("a line")?;
    assert!(line.starts_with("m g1: done: graphs ") && line.contains("given back in 40 ms"), "{line}");
    assert!(line.contains("host memory") && line.contains(" after"), "{line}");
    let ran = warden.cli(&["reclaim", "m", "--json"]).await?;
    let answer: Value = serde_json::from_str(&ran.stdout)?;
    assert_eq!(answer["entries"][0]["reason"], "operator");
    assert_eq!(answer["entries"][0]["given"]["graphs_host"], 0, "nothing is left");
    assert_eq!(ledger(&warden).0.len(), 2);
    Ok(())
}

#[tokio::test]
async fn a_kill_a_drain_and_the_end_in_the_middle_of_it_cost_no_request_and_leave_no_file() -> Outcome {
    let slow = json!({"takes_ms": 600_000});
    let (mut warden, first) = start(&slow, "").await?;
    known(&warden).await?;
    ask(&warden, 0).await?;
    let file = first.variable("LLAMA_WARDEN_RECLAIM").map(std::path::PathBuf::from).context("its file")?;
    assert!(file.exists());
    let asking = async |warden: &Warden| {
        wait_until("it is asked", SOON, async || backend(warden).await["reclaim"]["asking"] == true).await
    };
    // The process is killed meanwhile.
    let waiting = by_hand(&warden);
    asking(&warden).await?;
    first.signal(Signal::KILL);
    assert_eq!(waiting.await??["entries"][0]["outcome"], "no_answer");
    ask(&warden, 1).await?;
    wait_until("its file is gone", SOON, async || !file.exists()).await?;
    // The process is drained meanwhile.
    known(&warden).await?;
    let waiting = by_hand(&warden);
    asking(&warden).await?;
    warden.cli(&["restart", "m"]).await?;
    assert_eq!(waiting.await??["entries"][0]["outcome"], "no_answer");
    ask(&warden, 2).await?;
    // llama-warden ends meanwhile.
    known(&warden).await?;
    let waiting = by_hand(&warden);
    asking(&warden).await?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    drop(waiting.await?);
    assert!(!file.parent().context("a folder")?.exists(), "nothing of it stays behind");
    Ok(())
}

/// Sends `POST /models/m/reclaim` in a task of its own.
fn by_hand(warden: &Warden) -> AbortOnDropHandle<Result<Value, Trouble>> {
    let admin = warden.admin();
    let task =
        TaskTracker::new().spawn(async move { admin.post("/models/m/reclaim", &json!({})).await?.json() });
    AbortOnDropHandle::new(task)
}

#[tokio::test]
async fn policy_reclaim_false_tells_no_process_where_and_asks_none() -> Outcome {
    let (warden, backend) = start(&json!({}), "policy.reclaim = false\n").await?;
    assert_eq!(backend.variable("LLAMA_WARDEN_RECLAIM"), None);
    let mut n = 0;
    wait_until("it is replaced", Duration::from_secs(120), async || {
        for _ in 0..10 {
            n += 1;
            if ask(&warden, n).await.is_err() {
                return true;
            }
        }
        !ledger(&warden).1.is_empty()
    })
    .await?;
    let (reclaims, replacements) = ledger(&warden);
    assert_eq!((reclaims.len(), &replacements[0]["reason"]), (0, &json!("host_soft")));
    Ok(())
}
