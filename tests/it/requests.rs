//! The operator sees each request with its progress and can cancel it: the client gets an error, and the slot
//! is free at once.

use std::time::Duration;

use hyper::StatusCode;
use hyper::header::HeaderValue;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;
use warden_rig::http::json_request;
use warden_rig::ledger::End;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Http, Identity, Outcome, Trouble, Warden, wait_for, wait_until};

/// A whole answer, or the rest of a cut one.
struct Got {
    status: StatusCode,
    text: String,
    executed: Option<HeaderValue>,
    is_whole: bool,
}

async fn ask(http: Http, id: String, body: Value) -> Result<Got, Trouble> {
    let mut request = json_request(CHAT, &body)?;
    request.headers_mut().insert("x-request-id", HeaderValue::from_str(&id)?);
    let mut flow = http.open(request).await?;
    let (status, executed) = (flow.status(), flow.headers().get("x-warden-executed").cloned());
    let mut text = Vec::new();
    let is_whole = loop {
        match flow.piece().await {
            Ok(Some(piece)) => text.extend_from_slice(&piece),
            Ok(None) => break true,
            Err(_) => break false,
        }
    };
    Ok(Got { status, text: String::from_utf8_lossy(&text).into_owned(), executed, is_whole })
}

async fn shown(warden: &Warden, id: &str) -> Option<Value> {
    let all = warden.admin().get("/requests?limit=5000").await.ok()?.json().ok()?;
    all["requests"].as_array()?.iter().find(|one| one["id"] == id).cloned()
}

async fn until_state(warden: &Warden, id: &str, state: &str) -> Result<Value, Trouble> {
    let (mut last, what) = (None, format!("{id} is {state}"));
    let come = wait_for(&what, SOON, async || {
        last = shown(warden, id).await;
        last.clone().filter(|one| one["state"] == state)
    });
    match come.await {
        Ok(one) => Ok(one),
        Err(late) => Err(Trouble::new(format!("{late}; it is {last:?}"))),
    }
}

async fn cancel(warden: &Warden, id: &str) -> Result<Value, Trouble> {
    let told = warden.admin().post(&format!("/requests/{id}/cancel"), &json!({})).await?;
    assert_eq!(told.status, 200, "{}", told.text());
    told.json()
}

/// A model, and the states in which its streamed and whole requests stay.
const CASES: [(&str, &str, &str); 5] = [
    ("generates", "generating", "sent"),
    ("evaluates", "prefill", "sent"),
    ("full", "queued", "queued"),
    ("lazy", "loading", "loading"),
    ("dies", "continuing", ""),
];

/// Each of `names` has a model of its own that dies.
async fn started(identity: Option<&Identity>, names: &[&str]) -> Result<Warden, Trouble> {
    let mut setup =
        Setup::new()?.top("log.access = \"access.log\"\ninternal.lifecycle.look_interval = \"50ms\"");
    if let Some(identity) = identity {
        let (cert, key) = identity.put(setup.home.path())?;
        let tls = format!("server.tls_cert = '{}'\nserver.tls_key = '{}'", cert.display(), key.display());
        setup = setup.top(&tls);
    }
    let going_on =
        "on_death = \"continue\"\nlifecycle.backoff_first = \"20ms\"\nlifecycle.backoff_cap = \"50ms\"\n";
    let crash = json!({"ms_per_token": 20, "faults": [{"do": "crash", "after_tokens": 3, "signal": 9}]});
    let one_slot = "args = [\"-np\", \"1\", \"--metrics\"]\n";
    let mut setup = setup
        .fake("generates", &json!({"ms_per_token": 20}), "")?
        .fake("evaluates", &json!({"prompt_ms": 600_000}), "")?
        .fake("full", &json!({"ms_per_token": 20}), one_slot)?
        .fake("lazy", &json!({"load_ms": 600_000}), "preload = false\n")?;
    for name in names {
        setup = setup.fake(&format!("dies-{name}"), &crash, going_on)?;
    }
    let warden = setup.start().await?;
    warden.until_ready(3 + names.len()).await?;
    Ok(warden)
}

/// Returns true if no request runs in the model's slots or waits.
async fn is_free(warden: &Warden, model: &str) -> bool {
    let Ok(status) = warden.status(model).await else { return false };
    let busy = status["backends"].as_array().into_iter().flatten().filter(|one| one["in_flight"] != 0);
    status["waiting"] == 0 && busy.count() == 0
}

/// Cancels a request in each state.
async fn each_is_cancelled(warden: &Warden, http: &Http, name: &str) -> Outcome {
    for (model, of_stream, of_whole) in CASES {
        let dying = format!("dies-{name}");
        let model = if model == "dies" { dying.as_str() } else { model };
        for (stream, state) in [(true, of_stream), (false, of_whole)] {
            if state.is_empty() {
                continue;
            }
            let blocker = (model == "full").then(|| format!("{name}-{stream}-blocks"));
            let mut blocks = JoinSet::new();
            if let Some(id) = &blocker {
                blocks.spawn(ask(http.clone(), id.clone(), chat(id, model, "go", 100_000, true)));
                until_state(warden, id, "generating").await?;
            }
            if model == dying {
                // The next process loads slowly.
                warden.script(model, &json!({"load_ms": 600_000})).await?;
            }
            let id = format!("{name}-{model}-{stream}");
            let asked = ask(http.clone(), id.clone(), chat(&id, model, "go", 100_000, stream));
            let told = async {
                let before = until_state(warden, &id, state).await?;
                assert_eq!((&before["model"], &before["route"]), (&json!(model), &json!("chat")), "{before}");
                let told = cancel(warden, &id).await?;
                assert_eq!((&told["cancelled"]["state"], &told["again"]), (&json!(state), &json!(false)));
                Ok::<_, Trouble>(())
            };
            let (got, told) = tokio::join!(asked, told);
            told?;
            let got = got?;
            let context = format!("{id}: {} {}", got.status, got.text);
            assert!(got.is_whole && got.text.contains("request_cancelled"), "{context}");
            if stream && matches!(state, "generating" | "continuing") {
                assert_eq!(got.status, 200, "{context}");
                assert!(!got.text.contains("[DONE]") && got.text.ends_with("\n\n"), "{context}");
            } else if !stream {
                assert_eq!(got.status.as_u16(), 499, "{context}");
                let executed = if state == "sent" { "maybe" } else { "no" };
                assert_eq!(got.executed, Some(HeaderValue::from_static(executed)), "{context}");
            }
            if let Some(blocker) = &blocker {
                cancel(warden, blocker).await?;
                while let Some(ended) = blocks.join_next().await {
                    assert!(ended??.text.contains("request_cancelled"));
                }
            }
            wait_until(&format!("{id} has given its slot back"), SOON, async || is_free(warden, model).await)
                .await?;
            let ended = until_state(warden, &id, "ended").await?;
            assert_eq!(ended["outcome"], "cancelled_by_operator", "{ended}");
            let again = warden.admin().post(&format!("/requests/{id}/cancel"), &json!({})).await?;
            assert_eq!(again.status, 409, "{}", again.text());
        }
    }
    let executions = warden.ledger().executions()?;
    assert!(!executions.contains_key(&format!("{name}-full-true")), "{executions:?}");
    assert_eq!(executions[&format!("{name}-generates-true")], [End::Cancelled]);
    Ok(())
}

#[tokio::test]
async fn a_request_is_cancelled_wherever_it_is_and_all_that_counts_says_so() -> Outcome {
    let warden = started(None, &["plain"]).await?;
    each_is_cancelled(&warden, &warden.http, "plain").await?;
    warden
        .until_metrics(&[
            "llama_warden_request_outcomes_total{model=\"generates\",outcome=\"cancelled_by_operator\"} 2",
        ])
        .await?;
    let access = warden.home().path().join("access.log");
    wait_until("the access log has it", SOON, async || {
        let text = std::fs::read_to_string(&access).unwrap_or_default();
        let is_told = |line: &str| {
            line.contains("id=\"plain-generates-true\"") && line.contains("outcome=cancelled_by_operator")
        };
        text.lines().any(is_told)
    })
    .await?;
    let events = warden.cli(&["events"]).await?;
    assert!(
        events.stdout.contains("request plain-lazy-false (loading) was cancelled by uid "),
        "{}",
        events.stdout
    );
    Ok(())
}

#[tokio::test]
async fn over_tls_it_is_the_same() -> Outcome {
    let identity = Identity::new()?;
    let warden = started(Some(&identity), &["tls"]).await?;
    each_is_cancelled(&warden, &warden.https(&identity), "tls").await
}

#[tokio::test]
async fn a_stream_that_has_begun_while_its_model_loads_ends_with_an_error_event() -> Outcome {
    let setup = Setup::new()?.top("internal.upstream.comment_interval = \"20ms\"");
    let warden = setup.fake("m", &json!({"load_ms": 600_000}), "preload = false\n")?.start().await?;
    let mut flow = warden.http.stream(CHAT, &chat("x", "m", "go", 10, true)).await?;
    assert_eq!(flow.status(), 200);
    let id = flow.headers().get("x-request-id").context("no id")?.to_str()?.to_owned();
    until_state(&warden, &id, "loading").await?;
    cancel(&warden, &id).await?;
    let (answer, ended) = flow.rest().await;
    ended?;
    assert!(answer.error.is_some() && !answer.is_whole(), "{answer:?}");
    assert_eq!(until_state(&warden, &id, "ended").await?["outcome"], "cancelled_by_operator");
    Ok(())
}

#[tokio::test]
async fn one_whose_body_still_comes_is_cancelled_and_its_connection_is_closed() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    let mut raw = warden.http.raw().await?;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: slow/1\r\nContent-Length: 900\r\n\r\n{";
    raw.write(head.as_bytes()).await?;
    until_state(&warden, "slow/1", "receiving").await?;
    let told = warden.cli(&["requests", "cancel", "slow/1"]).await?;
    assert_eq!((told.code, told.stdout.contains("(receiving)")), (0, true), "{told:?}");
    let answer = raw.to_end(SOON).await?;
    assert!(answer.starts_with("HTTP/1.1 499 ") && answer.contains("request_cancelled"), "{answer}");
    assert!(warden.ledger().executions()?.is_empty());
    let late = warden.cli(&["requests", "cancel", "slow/1"]).await?;
    assert!(late.code == 1 && late.stderr.contains("has ended already"), "{late:?}");
    Ok(())
}

#[tokio::test]
async fn the_table_shows_what_each_has_cost_and_never_what_it_says() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({"ms_per_token": 20}), "")?.start().await?;
    warden.until_ready(1).await?;
    let whole = warden.http.post(CHAT, &chat("done", "m", "a secret word", 7, true)).await?;
    assert!(whole.answer()?.is_whole());
    let id = whole.header("x-request-id").to_owned();
    let ended = until_state(&warden, &id, "ended").await?;
    assert_eq!(
        (&ended["status"], &ended["outcome"], &ended["stream"]),
        (&json!(200), &json!("ok"), &json!(true))
    );
    assert_eq!((&ended["output_tokens"], &ended["attempts"]), (&json!(7), &json!(1)), "{ended}");
    assert!(ended["prefill_ms"].is_number() && ended["generating_ms"].is_number(), "{ended}");
    let mut flow = warden.http.stream(CHAT, &chat("runs", "m", "a secret word", 100_000, true)).await?;
    flow.event().await?;
    let runs = wait_for("it is shown", SOON, async || {
        let list = warden.cli(&["requests", "--json", "--state", "generating", "--model", "m"]).await.ok()?;
        let list: Value = serde_json::from_str(&list.stdout).ok()?;
        let one = list["requests"].as_array()?.first()?.clone();
        (one["output_tokens"].as_u64()? > 1).then_some(one)
    })
    .await?;
    assert!(runs["generation"].is_u64() && runs["replica"] == 0, "{runs}");
    let table = warden.cli(&["requests"]).await?;
    assert!(
        table.code == 0 && table.stdout.contains("generating") && table.stdout.contains("ok 200"),
        "{table:?}"
    );
    assert!(table.stdout.contains("1 in flight"), "{table:?}");
    for text in [table.stdout, runs.to_string(), ended.to_string()] {
        assert!(!text.contains("secret"), "{text}");
    }
    let wrong = warden.cli(&["requests", "--state", "busy"]).await?;
    assert!(wrong.code == 1 && wrong.stderr.contains("generating"), "{wrong:?}");
    for target in ["/requests", "/requests/x/cancel"] {
        assert!(!warden.http.get(target).await?.status.is_success(), "{target} is no public route");
    }
    Ok(())
}

#[tokio::test]
async fn a_thousand_in_flight_are_listed_and_one_of_them_is_found() -> Outcome {
    const IN_FLIGHT: usize = 1000;
    let model = json!({"ms_per_token": 50});
    let warden = Setup::new()?.fake("m", &model, "queue.depth = 2000\n")?.start().await?;
    warden.until_ready(1).await?;
    let mut asked = JoinSet::new();
    for n in 0..IN_FLIGHT {
        let id = n.to_string();
        asked.spawn(ask(warden.http.clone(), id.clone(), chat(&id, "m", "go", 100_000, true)));
    }
    let all = wait_for("all are shown", SOON, async || {
        let all = warden.admin().get("/requests?state=in_flight&limit=5000").await.ok()?.json().ok()?;
        (all["in_flight"] == IN_FLIGHT).then_some(all)
    })
    .await?;
    let listed = all["requests"].as_array().context("no list")?;
    assert_eq!(listed.len(), IN_FLIGHT);
    let began: Vec<u64> = listed.iter().filter_map(|one| one["began_unix_ms"].as_u64()).collect();
    assert!(began.windows(2).all(|two| two[0] <= two[1] + 1), "the oldest first");
    let mut best = Duration::MAX;
    for _ in 0..10 {
        let since = Instant::now();
        let answer = warden.admin().get("/requests?state=in_flight&limit=5000").await?;
        best = best.min(since.elapsed());
        assert!(answer.status.is_success());
    }
    println!("{} in flight: listed in {best:?}", listed.len());
    let last = listed.last().and_then(|one| one["id"].as_str()).context("no id")?;
    cancel(&warden, last).await?;
    assert_eq!(until_state(&warden, last, "ended").await?["outcome"], "cancelled_by_operator");
    Ok(())
}
