//! A prompt for which there is not enough memory is refused with the numbers, logged, or sent to another or a
//! fresh process. A prompt that fits is unaffected. Earlier prompts teach the price of a prompt.

use serde_json::{Value, json};
use warden_rig::http::json_request;
use warden_rig::warden::{CHAT, SOON, Setup, chat, json_lines};
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden, wait_until};

const OFTEN: &str = "sensors.interval = \"25ms\"\ninternal.sensors.idle_settle = \"1ms\"";
const EAGER: &str = "policy.jitter = 0.0\npolicy.quiet_for = \"1ms\"\npolicy.quiet_within = \"50ms\"\n\
                     policy.min_interval = \"1ms\"\npolicy.min_interval_hard = \"1ms\"\n";

/// KiB that a token of the largest prompt so far takes in the fakes.
const TOKEN_KIB: u64 = 64;

/// Words of prompts that teach a price: the first proves nothing, and three larger ones suffice.
const LESSONS: [usize; 4] = [100, 200, 400, 800];

/// Words that fit a fresh process, but not what `LESSONS` leave of the budget, less the reserve of 256 MiB.
const LARGE: usize = 1500;

const HUGE: usize = 5000;

async fn start(mode: &str, toml: &str) -> Result<Warden, Trouble> {
    let script = json!({"buffer_kib_per_prompt_token": TOKEN_KIB});
    let toml = format!("policy.admission = \"{mode}\"\npolicy.host.hard = \"400MiB\"\n{EAGER}{toml}");
    let warden = Setup::new()?.top(OFTEN).fake("m", &script, &toml)?.start().await?;
    wait_until("all backends are ready", SOON, async || {
        warden.status("m").await.is_ok_and(|status| {
            let backends = status["backends"].as_array().cloned().unwrap_or_default();
            !backends.is_empty() && backends.iter().all(|backend| backend["phase"] == "ready")
        })
    })
    .await?;
    for words in LESSONS {
        let answer = ask(&warden, words).await?;
        assert!(answer.status.is_success(), "{}", answer.text());
        until_read(&warden).await?;
    }
    Ok(warden)
}

/// Sends a prompt of one conversation, so that all go to the same replica while it has room.
async fn ask(warden: &Warden, words: usize) -> Result<warden_rig::http::Whole, Trouble> {
    let text: Vec<String> = (0..words).map(|n| format!("w{n}")).collect();
    let body = chat(&format!("p-{words}"), "m", &text.join(" "), 2, false);
    let mut request = json_request(CHAT, &body)?;
    request.headers_mut().insert("x-warden-conversation", "one".parse()?);
    warden.http.send(request).await
}

async fn until_read(warden: &Warden) -> Outcome {
    let number = async || {
        let status = warden.admin().get("/status").await?.json()?;
        status["fleet"]["number"].as_u64().context("no number")
    };
    let now = number().await?;
    wait_until("memory was read", SOON, async || number().await.is_ok_and(|later| later > now + 6)).await
}

/// Waits for this log line; returns the output.
async fn too_large(warden: &mut Warden, done: &str) -> Result<String, Trouble> {
    warden.says(&format!("{done}: a prompt of about")).await
}

fn entries(warden: &Warden) -> Result<Vec<Value>, Trouble> {
    json_lines(&warden.recycles())
}

#[tokio::test]
async fn a_prompt_that_fits_nowhere_is_refused_with_the_numbers_and_others_are_not() -> Outcome {
    let mut warden = start("enforce", "").await?;
    let refused = ask(&warden, HUGE).await?;
    assert_eq!(refused.status.as_u16(), 503, "{}", refused.text());
    assert!(refused.header("retry-after").parse::<u64>().is_ok_and(|seconds| seconds > 0));
    assert_eq!(refused.header("x-warden-executed"), "no");
    let error = refused.json()?["error"].clone();
    assert_eq!(error["type"], "unavailable_error");
    let details = &error["details"];
    let tokens = details["prompt_tokens"].as_u64().unwrap_or_default();
    assert!((HUGE as u64..HUGE as u64 + 10).contains(&tokens), "counted by the backend: {error}");
    let price = details["bytes_per_token"].as_f64().unwrap_or_default();
    let told = f64::from(u32::try_from(TOKEN_KIB * 1024)?);
    assert!((price / told - 1.0).abs() < 0.25, "{price} for {told}: {error}");
    assert_eq!(details["memory"], "host");
    assert!(details["needed_bytes"].as_u64() > details["left_bytes"].as_u64(), "{error}");
    too_large(&mut warden, "refused").await?;
    // By its bytes this prompt would not fit; by its tokens it does.
    let fits = ask(&warden, LARGE).await?;
    assert!(fits.status.is_success(), "{}", fits.text());
    assert!(ask(&warden, 10).await?.status.is_success());
    assert_eq!(entries(&warden)?.len(), 0);
    assert_eq!(warden.waiting("m").await?, 0);
    Ok(())
}

#[tokio::test]
async fn a_warning_is_told_and_the_prompt_is_sent_and_off_is_silent() -> Outcome {
    // Too large only because of the reserve, so that sending the prompt does not exhaust the machine.
    let words = 3000;
    for (mode, told) in [("warn", true), ("off", false)] {
        let mut warden = start(mode, "").await?;
        let answer = ask(&warden, words).await?;
        assert!(answer.status.is_success(), "{mode}: {}", answer.text());
        if told {
            too_large(&mut warden, "sent all the same").await?;
        } else {
            // Lines about the prompt precede this one.
            warden.says("access: ").await?;
            assert!(!warden.kid.output().contains("a prompt of about"), "{mode}: {}", warden.kid.output());
        }
    }
    Ok(())
}

/// Leaks until a large prompt has no room.
async fn fill(warden: &Warden) -> Outcome {
    warden.script("m", &json!({"leak_kib_per_request": 150 << 10})).await?;
    assert!(ask(warden, 10).await?.status.is_success());
    warden.script("m", &json!({"leak_kib_per_request": 0})).await?;
    until_read(warden).await
}

#[tokio::test]
async fn a_prompt_that_fits_into_a_fresh_process_gets_one() -> Outcome {
    let mut warden = start("enforce", "replace = \"sequential\"").await?;
    fill(&warden).await?;
    let (large, small) = tokio::join!(ask(&warden, LARGE), ask(&warden, 10));
    assert!(large.as_ref().is_ok_and(|answer| answer.status.is_success()), "{:?}", large?.text());
    assert!(small?.status.is_success());
    wait_until("the ledger has the replacement", SOON, async || {
        entries(&warden).is_ok_and(|entries| !entries.is_empty())
    })
    .await?;
    let found = entries(&warden)?;
    assert_eq!(
        (found.len(), found[0]["reason"].as_str(), &found[0]["cut"]),
        (1, Some("admission"), &json!(0))
    );
    too_large(&mut warden, "waits for a fresh process").await?;
    Ok(())
}

#[tokio::test]
async fn a_prompt_goes_to_the_process_that_has_room() -> Outcome {
    let mut warden = start("enforce", "replicas = 2").await?;
    fill(&warden).await?;
    let large = ask(&warden, LARGE).await?;
    assert!(large.status.is_success(), "{}", large.text());
    let mut arrivals = Vec::new();
    for backend in warden.backends() {
        let socket = backend.socket().context("a fake listens on a socket")?;
        let state = Http::Unix(socket).get("/fake/state").await?.json()?;
        arrivals.push(state["arrivals"].as_u64().unwrap_or_default());
    }
    arrivals.sort_unstable();
    assert_eq!(arrivals, [1, LESSONS.len() as u64 + 1]);
    too_large(&mut warden, "goes to another process").await?;
    assert_eq!(entries(&warden)?.len(), 0);
    Ok(())
}
