//! Continues answers under load: a thousand streams at once, a slow reader, keys with rates, and operators who
//! replace the next process, too.

use http_body_util::Full;
use hyper::Request;
use hyper::header::AUTHORIZATION;
use procfs::process::Process;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;
use tokio::task::JoinSet;
use warden_rig::http::{Flow, json_request};
use warden_rig::ledger::End;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Answer, Context as _, Outcome, Trouble, Warden, wait_until};

const SOON_AGAIN: &str =
    "on_death = \"continue\"\nlifecycle.backoff_first = \"20ms\"\nlifecycle.backoff_cap = \"50ms\"\n";
const LOOKING: &str = "internal.lifecycle.look_interval = \"50ms\"";

/// Starts a slow fake, whose next process gives the same answers.
async fn one(script: &Value, more: &str, top: &str) -> Result<Warden, Trouble> {
    let more = format!("{SOON_AGAIN}{more}");
    let warden = Setup::new()?.top(LOOKING).top(top).fake("m", script, &more)?.start().await?;
    warden.until_ready(1).await?;
    Ok(warden)
}

async fn rest_behind(mut first: Answer, flow: &mut Flow) -> Result<Answer, Trouble> {
    while let Some(event) = flow.event().await? {
        first.event(&event);
    }
    Ok(first)
}

/// Starts a stream and reads its first event, so that only a continuation can complete it.
async fn begun(warden: &Warden, id: &str, tokens: u64) -> Result<(Answer, Flow), Trouble> {
    let mut flow = warden.http.stream(CHAT, &chat(id, "m", "hi", tokens, true)).await?;
    let mut answer = Answer::default();
    while answer.text.is_empty() {
        let event = flow.event().await?.context("the stream has ended before its first token")?;
        answer.event(&event);
    }
    Ok((answer, flow))
}

/// A request that is sent again after a death, because tools have a state that its tokens do not show.
fn told_again(id: &str, tokens: u64) -> Value {
    let mut body = chat(id, "m", "hi", tokens, true);
    body["temperature"] = json!(0);
    body["tools"] =
        json!([{ "type": "function", "function": { "name": "look", "parameters": { "type": "object" } } }]);
    body
}

fn kill(warden: &Warden) {
    for process in warden.backends() {
        process.signal(Signal::KILL);
    }
}

async fn undisturbed(warden: &Warden, tokens: u64) -> Result<String, Trouble> {
    let answer = warden.http.post(CHAT, &chat("undisturbed", "m", "hi", tokens, false)).await?;
    Ok(answer.answer()?.text)
}

/// Most resident memory of llama-warden so far, in bytes.
fn most_memory(warden: &Warden) -> Result<u64, Trouble> {
    let status = Process::new(warden.kid.pid())?.status()?;
    Ok(status.vmhwm.context("VmHWM")? * 1024)
}

const STREAMS: u64 = 1000;

#[tokio::test]
async fn a_thousand_streams_go_on_when_their_one_server_dies() -> Outcome {
    let tokens = 12;
    let slots = "args = ['-np', '1100']\nmax_in_flight = 1100\n";
    // The server has a slot for each stream, and still serves all when the last one begins.
    let warden = one(&json!({"ms_per_token": 0}), slots, "").await?;
    let wanted = undisturbed(&warden, tokens).await?;
    warden.script("m", &json!({"ms_per_token": 20_000})).await?;
    let mut streams = Vec::new();
    for number in 0..STREAMS {
        streams.push(warden.http.stream(CHAT, &chat(&format!("s{number}"), "m", "hi", tokens, true)).await?);
    }
    // All streams have their heads. Now each gets its first tokens; its rest comes from the next process.
    let before = most_memory(&warden)?;
    warden.script("m", &json!({"ms_per_token": 0})).await?;
    kill(&warden);
    let mut readers = JoinSet::new();
    for mut flow in streams {
        readers.spawn(async move { rest_behind(Answer::default(), &mut flow).await });
    }
    while let Some(answer) = readers.join_next().await {
        let answer = answer??;
        assert!(answer.is_whole(), "{answer:?}");
        assert_eq!(answer.text, wanted);
    }
    // Per stream: a copy of the request, the client's text, and the request to the next process.
    let grown = most_memory(&warden)?.saturating_sub(before);
    assert!(grown < STREAMS * 128 * 1024, "{grown} bytes more for {STREAMS} streams");
    warden
        .until_metrics(&[format!("llama_warden_requests_continued_total{{model=\"m\"}} {STREAMS}")])
        .await?;
    Ok(())
}

#[tokio::test]
async fn who_reads_slowly_has_the_whole_answer_all_the_same() -> Outcome {
    let warden = one(&json!({"ms_per_token": 10}), "", "").await?;
    let wanted = undisturbed(&warden, 60).await?;
    let (first, mut flow) = begun(&warden, "slow", 60).await?;
    kill(&warden);
    wait_until("the rest has been computed, and nobody has read it", SOON, async || {
        let all = warden.ledger().executions().unwrap_or_default();
        all.values().flatten().filter(|end| **end == End::Finished).count() >= 2
    })
    .await?;
    let answer = rest_behind(first, &mut flow).await?;
    assert!(answer.is_whole(), "{answer:?}");
    assert_eq!(answer.text, wanted);
    Ok(())
}

#[tokio::test]
async fn who_leaves_while_the_next_process_starts_leaves_nothing_behind() -> Outcome {
    let warden = one(&json!({"ms_per_token": 10}), "", "").await?;
    let (_, flow) = begun(&warden, "left", 4000).await?;
    warden.script("m", &json!({"load_ms": 300})).await?;
    kill(&warden);
    wait_until("it waits for the next process", SOON, async || {
        warden.waiting("m").await.is_ok_and(|waiting| waiting == 1)
    })
    .await?;
    drop(flow);
    wait_until("nobody waits", SOON, async || warden.waiting("m").await.is_ok_and(|waiting| waiting == 0))
        .await?;
    warden.until_ready(1).await?;
    let executed = warden.ledger().executions()?;
    assert!(executed["left"].len() == 1, "what nobody waits for is not computed: {executed:?}");
    assert!(!undisturbed(&warden, 5).await?.is_empty());
    Ok(())
}

#[tokio::test]
async fn a_key_is_charged_once_for_an_answer_from_two_processes() -> Outcome {
    const KEY: &str = "sk-carol-0123456789abcdef";
    let setup = Setup::new()?.top(LOOKING).top("server.keys = \"keys.toml\"");
    let keys = setup.home.path().join("keys.toml");
    std::fs::write(&keys, format!("[carol]\nkey = \"{KEY}\"\nrate = \"2/h\"\nconcurrency = 1\n"))?;
    std::fs::set_permissions(&keys, std::fs::Permissions::from_mode(0o600))?;
    let warden = setup.fake("m", &json!({"ms_per_token": 10}), SOON_AGAIN)?.start().await?;
    warden.until_ready(1).await?;
    let asked = |id: &str, stream: bool| {
        let mut request: Request<Full<bytes::Bytes>> = json_request(CHAT, &chat(id, "m", "hi", 30, stream))?;
        request.headers_mut().insert(AUTHORIZATION, format!("Bearer {KEY}").parse()?);
        Ok::<_, Trouble>(request)
    };
    let mut flow = warden.http.open(asked("first", true)?).await?;
    let mut answer = Answer::default();
    while answer.text.is_empty() {
        answer.event(&flow.event().await?.context("an end before the first token")?);
    }
    kill(&warden);
    let answer = rest_behind(answer, &mut flow).await?;
    assert!(answer.is_whole(), "{answer:?}");
    drop(flow);
    for status in [200, 429] {
        let next = warden.http.send(asked("next", false)?).await?;
        assert_eq!(next.status.as_u16(), status, "two requests an hour: {}", next.text());
    }
    let lines = [
        "llama_warden_key_requests_total{key=\"carol\"} 2",
        "llama_warden_key_tokens_total{key=\"carol\",kind=\"output\"} 60",
        "llama_warden_key_in_flight{key=\"carol\"} 0",
    ];
    warden.until_metrics(&lines).await?;
    Ok(())
}

#[tokio::test]
async fn a_replacement_of_the_process_that_goes_on_waits_for_the_rest() -> Outcome {
    let warden = one(&json!({"ms_per_token": 10}), "", "").await?;
    let wanted = undisturbed(&warden, 120).await?;
    let (first, mut flow) = begun(&warden, "twice", 120).await?;
    let dead = warden.backends();
    kill(&warden);
    let reader = async {
        let answer = rest_behind(first, &mut flow).await?;
        assert!(answer.is_whole(), "{answer:?}");
        assert_eq!(answer.text, wanted);
        Ok::<_, Trouble>(())
    };
    let operator = async {
        wait_until("the rest is being computed", SOON, async || {
            let lines = warden.ledger().lines().unwrap_or_default();
            lines.iter().any(|line| line.event == "begun" && line.pid != dead[0].pid)
        })
        .await?;
        warden.restart("m", 1).await
    };
    let (read, replaced) = tokio::join!(reader, operator);
    read?;
    replaced?;
    Ok(())
}

#[tokio::test]
async fn a_new_command_while_the_answer_is_told_again_waits_for_its_end() -> Outcome {
    let args = |context: u32| format!("args = ['-np', '4', '-c', '{context}']\n");
    let mut warden = one(&json!({"ms_per_token": 10}), &args(1024), "").await?;
    let mut body = told_again("undisturbed", 120);
    body["stream"] = json!(false);
    let wanted = warden.http.post(CHAT, &body).await?.answer()?.text;
    let mut flow = warden.http.stream(CHAT, &told_again("again", 120)).await?;
    let mut first = Answer::default();
    while first.text.len() < wanted.len() / 2 {
        first.event(&flow.event().await?.context("it has ended")?);
    }
    let dead = warden.backends();
    kill(&warden);
    wait_until("it is told again", SOON, async || {
        let lines = warden.ledger().lines().unwrap_or_default();
        lines.iter().any(|line| line.event == "begun" && line.pid != dead[0].pid)
    })
    .await?;
    let changed = warden.setup.config().replace(&args(1024), &args(2048));
    warden.reload(&changed)?;
    let answer = rest_behind(first, &mut flow).await?;
    assert!(answer.is_whole() && answer.text == wanted, "{answer:?}");
    wait_until("the new command is served", SOON, async || {
        let backends = warden.backends();
        backends.len() == 1 && backends[0].command_line().contains(&"2048".to_owned())
    })
    .await?;
    assert!(!undisturbed(&warden, 5).await?.is_empty());
    Ok(())
}

#[tokio::test]
async fn an_end_of_the_program_meanwhile_is_told_in_the_stream() -> Outcome {
    let mut warden = one(&json!({"ms_per_token": 10}), "", "").await?;
    let (first, mut flow) = begun(&warden, "end", 4000).await?;
    warden.script("m", &json!({"load_ms": 60_000})).await?;
    kill(&warden);
    wait_until("it waits for the next process", SOON, async || {
        warden.waiting("m").await.is_ok_and(|waiting| waiting == 1)
    })
    .await?;
    let (answer, code) =
        tokio::join!(rest_behind(first, &mut flow), warden.terminate(Duration::from_secs(30)));
    let answer = answer?;
    assert!(answer.error.is_some() && !answer.done, "the client knows that it has half of it: {answer:?}");
    assert_eq!(code?, 0);
    Ok(())
}
