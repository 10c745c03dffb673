//! A kept connection in an old program may send one more request, which the present program decides, in time,
//! across any number of programs in between. A connection kept at a stop may send one, too.

use std::time::Duration;

use http_body_util::BodyExt as _;
use procfs::process::Process;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::timeout;
use warden_rig::process::ProcessId;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

use super::{Client, until_alone, upgrade};

fn cpu_time(pid: i32) -> Result<Duration, Trouble> {
    let stat = Process::new(pid)?.stat()?;
    let tick = Duration::from_secs(1) / u32::try_from(procfs::ticks_per_second())?;
    Ok(tick * u32::try_from(stat.utime + stat.stime)?)
}

pub(super) async fn kept(warden: &Warden) -> Result<Client, Trouble> {
    Client::over(warden.http.connect().await?).await
}

/// Sends a request, which must be answered in time; returns true if the answer closed the connection.
pub(super) async fn ask(client: &mut Client, id: &str, model: &str) -> Result<bool, Trouble> {
    let body = chat(id, model, "hi", 3, false);
    timeout(SOON, client.ask(id, &body)).await.context(format!("{id}: no answer in time"))?
}

#[tokio::test]
async fn a_model_is_loaded_for_who_asks_an_old_program_and_that_through_another_old_one() -> Outcome {
    for upgrades in [1, 2] {
        let mut setup = Setup::new()?;
        for name in ["a", "b"] {
            setup = setup.fake(name, &json!({"load_ms": 30}), "preload = false\nqueue.wait = \"1h\"\n")?;
        }
        let warden = setup.start().await?;
        let mut client = kept(&warden).await?;
        assert!(!ask(&mut client, "first", "a").await?, "it is kept");
        for _ in 0..upgrades {
            upgrade(&warden).await?;
        }
        assert_eq!(warden.state("b").await?, "unloaded");
        assert!(
            ask(&mut client, "second", "b").await?,
            "{upgrades}: by the one before, which keeps no connection"
        );
        wait_until("nobody waits any more", SOON, async || {
            let waiting = async |model| warden.waiting(model).await.is_ok_and(|callers| callers == 0);
            waiting("a").await && waiting("b").await
        })
        .await?;
        // Programs in between end when they have nothing left to report.
        until_alone(&warden).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_process_that_is_replaced_ends_after_what_an_old_program_has_just_given_to_it() -> Outcome {
    let mut warden = Setup::new()?.fake("m", &json!({"ms_per_token": 5}), "")?.start().await?;
    warden.until_ready(1).await?;
    let mut ids = Vec::new();
    for round in 0..8 {
        let mut client = kept(&warden).await?;
        let first = format!("first-{round}");
        ask(&mut client, &first, "m").await?;
        for _ in 0..=round % 2 {
            upgrade(&warden).await?;
        }
        // The old program gives the request to a process, which the new program replaces before it knows of
        // the request.
        let id = format!("long-{round}");
        let body = chat(&id, "m", "hi", 60, true);
        let answer =
            timeout(SOON, client.begin(&id, &body)).await.context(format!("{id}: no answer in time"))??;
        let (replaced, text) = tokio::join!(warden.restart("m", 1), answer.into_body().collect());
        replaced?;
        let text = String::from_utf8_lossy(&text.context(format!("{id} was cut"))?.to_bytes()).into_owned();
        text.contains("[DONE]").then_some(()).context(format!("{id}: {text}"))?;
        ids.extend([first, id]);
    }
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    // Not continued, because the process was not ended during the request.
    warden.ledger().each_finished_once(ids)?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}

#[tokio::test]
async fn another_model_leaves_for_who_asks_an_old_program() -> Outcome {
    let top =
        "loading.max_loaded = 1\ninternal.loading.turn_least = \"100ms\"\ninternal.loading.noted = \"100ms\"";
    let mut setup = Setup::new()?.top(top);
    for name in ["a", "b"] {
        setup = setup.fake(name, &json!({"load_ms": 30}), "preload = false\nqueue.wait = \"1h\"\n")?;
    }
    let warden = setup.start().await?;
    let mut client = kept(&warden).await?;
    ask(&mut client, "first", "a").await?;
    upgrade(&warden).await?;
    assert!(ask(&mut client, "second", "b").await?, "by the one before");
    assert_eq!((warden.state("a").await?, warden.backends().len()), ("unloaded".to_owned(), 1));
    Ok(())
}

#[tokio::test]
async fn who_asks_an_old_program_for_what_is_never_loaded_hears_so_in_time_and_keeps_nobody_busy() -> Outcome
{
    let mut setup = Setup::new()?.top(&format!("loading.max_loaded = 1\n{STAY}"));
    for (name, more) in [("a", "pin = true\n"), ("b", "preload = false\nqueue.wait = \"1h\"\n")] {
        setup = setup.fake(name, &json!({}), more)?;
    }
    let warden = setup.start().await?;
    warden.until_ready(1).await?;
    let mut clients = Vec::new();
    for number in 0..4 {
        let mut client = kept(&warden).await?;
        ask(&mut client, &format!("first-{number}"), "a").await?;
        clients.push(client);
    }
    upgrade(&warden).await?;
    let serving = until_alone(&warden).await?;
    let before = cpu_time(serving.pid)?;
    // The new program sees the two requests as one waiting client.
    for (number, client) in clients.iter_mut().enumerate() {
        let (status, told) = refused(client, &format!("second-{number}"), "b").await?;
        assert!(status == 503 && told.to_string().contains("cannot be loaded"), "{number}: {status} {told}");
    }
    let spent = cpu_time(serving.pid)?.saturating_sub(before);
    assert!(
        spent < Duration::from_millis(1500),
        "a loop without a pause takes all the time that there is: {spent:?}"
    );
    assert_eq!(warden.state("a").await?, "loaded");
    Ok(())
}

/// Old programs keep idle connections for longer than upgrades take.
const STAY: &str = "internal.server.retired_keep_alive = \"20s\"";

/// Sends a request that must be refused on a kept connection of an old program; returns status and body.
async fn refused(client: &mut Client, id: &str, model: &str) -> Result<(u16, Value), Trouble> {
    let body = chat(id, model, "hi", 3, false);
    let answer =
        timeout(SOON, client.begin(id, &body)).await.context(format!("{id}: no answer in time"))??;
    let status = answer.status().as_u16();
    let body =
        timeout(SOON, answer.into_body().collect()).await.context(format!("{id}: no body in time"))??;
    Ok((status, serde_json::from_slice(&body.to_bytes())?))
}

#[tokio::test]
async fn who_waits_in_an_old_program_for_a_model_that_fails_hears_what_the_new_ones_callers_hear() -> Outcome
{
    for upgrades in [1, 2] {
        let mut setup = Setup::new()?.top(STAY);
        for (name, more) in [("a", ""), ("b", "preload = false\nqueue.wait = \"1h\"\n")] {
            setup = setup.fake(name, &json!({}), more)?;
        }
        let warden = setup.start().await?;
        warden.until_ready(1).await?;
        let mut clients = Vec::new();
        for number in 0..2 {
            let mut client = kept(&warden).await?;
            ask(&mut client, &format!("first-{number}"), "a").await?;
            clients.push(client);
        }
        for _ in 0..upgrades {
            upgrade(&warden).await?;
        }
        // The next process cannot start, which only the new program notices.
        warden.script("b", &json!({"fail": "corrupt_model"})).await?;
        let (status, old) = refused(&mut clients[0], "old", "b").await?;
        let new = warden.http.post(CHAT, &chat("new", "b", "hi", 3, false)).await?;
        assert_eq!((status, new.status.as_u16()), (503, 503), "{upgrades}: {old} {}", new.text());
        let words = |body: &Value| body["error"]["message"].as_str().map(str::to_owned);
        let told = words(&old).context("no message")?;
        assert!(told.contains("cannot start before something changes"), "{upgrades}: {told}");
        assert_eq!(Some(told), words(&new.json()?), "{upgrades}");
        // After the repair, later requests succeed.
        warden.script("b", &json!({"fail": null})).await?;
        warden.restart("b", 1).await?;
        assert!(ask(&mut clients[1], "later", "b").await?, "{upgrades}: by the old one");
        until_alone(&warden).await?;
    }
    Ok(())
}

#[tokio::test]
async fn what_is_set_over_a_connection_that_an_old_program_keeps_is_set_in_all_and_in_those_that_follow()
-> Outcome {
    for upgrades in [1, 2] {
        let setup = Setup::new()?.top(STAY).fake("m", &json!({}), "replicas = 2\n")?;
        let warden = setup.start().await?;
        let first = warden.until_ready(2).await?;
        let mut client = kept(&warden).await?;
        ask(&mut client, "first", "m").await?;
        for _ in 0..upgrades {
            upgrade(&warden).await?;
        }
        let adapters = json!([{ "id": 0, "scale": 0.25 }]);
        let answer = timeout(SOON, client.post("/lora-adapters", "set", &adapters)).await;
        assert!(answer.context("no answer in time")??.status().is_success());
        let has = async |process: &ProcessId| {
            let Some(http) = process.http() else { return false };
            let got = http.get("/lora-adapters").await.ok().and_then(|answer| answer.json().ok());
            got.is_some_and(|got| got == adapters)
        };
        wait_until("both replicas have it", SOON, async || has(&first[0]).await && has(&first[1]).await)
            .await?;
        warden.restart("m", 1).await?;
        let last = warden.until_ready(2).await?;
        assert!(last.iter().all(|process| !first.contains(process)), "{last:?}");
        // No client could have used the port before, so the result is immediate.
        assert!(has(&last[0]).await && has(&last[1]).await, "{upgrades}: in those that follow");
    }
    Ok(())
}

#[tokio::test]
async fn who_waits_in_an_old_program_for_a_model_that_is_taken_out_hears_so() -> Outcome {
    for upgrades in [1, 2] {
        let setup = Setup::new()?.top(STAY).fake("a", &json!({}), "")?;
        // The model does not become ready during the test.
        let never = json!({"load_ms": 3_600_000});
        let setup = setup.fake(
            "b",
            &never,
            "preload = false\nqueue.wait = \"1h\"\nlifecycle.start_timeout = \"1h\"\n",
        )?;
        let mut warden = setup.start().await?;
        warden.until_ready(1).await?;
        let mut clients = Vec::new();
        for number in 0..2 {
            let mut client = kept(&warden).await?;
            ask(&mut client, &format!("first-{number}"), "a").await?;
            clients.push(client);
        }
        for _ in 0..upgrades {
            upgrade(&warden).await?;
        }
        let mut late = clients.pop().context("there are two")?;
        let mut early = clients.pop().context("there are two")?;
        let mut waiting = JoinSet::new();
        waiting.spawn(async move { refused(&mut early, "early", "b").await });
        wait_until("it waits", SOON, async || warden.waiting("b").await.is_ok_and(|all| all == 1)).await?;
        let config = warden.setup.config();
        let at = config.find("[models.\"b\"").context("its table")?;
        warden.reload(&config[..at])?;
        let (status, told) = waiting.join_next().await.context("it was asked")???;
        assert!(status == 404 && told.to_string().contains("was removed"), "{upgrades}: {status} {told}");
        // The old program still knows the model, which no program will load again.
        let (status, told) = refused(&mut late, "late", "b").await?;
        assert!(status == 404 && told.to_string().contains("was removed"), "{upgrades}: {status} {told}");
        until_alone(&warden).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_model_that_is_taken_out_while_an_old_program_streams_ends_at_once() -> Outcome {
    let setup = Setup::new()?.fake("a", &json!({"ms_per_token": 20}), "")?;
    let mut warden = setup.fake("b", &json!({}), "")?.start().await?;
    warden.until_ready(2).await?;
    let mut flow = warden.http.stream(CHAT, &chat("long", "a", "go", 400, true)).await?;
    flow.event().await?;
    upgrade(&warden).await?;
    let config = warden.setup.config();
    let at = config.find("[models.\"b\"").context("its table")?;
    warden.reload(&config[..at])?;
    wait_until("the process of b has ended", SOON, async || warden.backends().len() == 1).await?;
    assert_eq!(warden.until_ready(1).await?.len(), 1);
    let (answer, end) = flow.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    Ok(())
}

#[tokio::test]
async fn at_a_stop_a_request_on_a_kept_connection_is_still_answered() -> Outcome {
    let top = "internal.server.stopped_keep_alive = \"1h\"";
    let mut warden = Setup::new()?.top(top).fake("m", &json!({}), "")?.start().await?;
    let children = warden.until_ready(1).await?;
    let mut client = kept(&warden).await?;
    ask(&mut client, "first", "m").await?;
    warden.kid.signal(Signal::TERM);
    wait_until("nobody is let in any more", SOON, async || kept(&warden).await.is_err()).await?;
    assert!(ask(&mut client, "second", "m").await?, "it is the last one");
    assert_eq!(warden.kid.exit(SOON).await?, 0);
    Warden::until_gone(&children, SOON).await
}
