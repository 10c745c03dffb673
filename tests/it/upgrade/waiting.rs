//! A connection that stays in an old program has one request more there: whoever decides now hears of it, however many are between, and in
//! time. One that stays at a stop has one, too.

use std::time::Duration;

use http_body_util::BodyExt as _;
use procfs::process::Process;
use rustix::process::Signal;
use serde_json::json;
use tokio::time::timeout;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

use super::{Client, until_alone, upgrade};

/// The time that a process has had on a core.
fn cpu_time(pid: i32) -> Result<Duration, Trouble> {
    let stat = Process::new(pid)?.stat()?;
    let tick = Duration::from_secs(1) / u32::try_from(procfs::ticks_per_second())?;
    Ok(tick * u32::try_from(stat.utime + stat.stime)?)
}

pub(super) async fn kept(warden: &Warden) -> Result<Client, Trouble> {
    Client::over(warden.http.connect().await?).await
}

/// Whether the connection was closed with the answer, which has to come in time.
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
        // Whoever is between goes when what it had to tell is over.
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
        // The old program gives it to a process, which the new one replaces before it has heard of the request.
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
    // Not continued: nobody ended its process under it.
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
    let mut setup = Setup::new()?.top("loading.max_loaded = 1");
    for (name, more) in [("a", "pin = true\n"), ("b", "preload = false\nqueue.wait = \"2s\"\n")] {
        setup = setup.fake(name, &json!({}), more)?;
    }
    let warden = setup.start().await?;
    warden.until_ready(1).await?;
    let mut client = kept(&warden).await?;
    ask(&mut client, "first", "a").await?;
    upgrade(&warden).await?;
    let serving = until_alone(&warden).await?;
    let before = cpu_time(serving.pid)?;
    let refused = ask(&mut client, "second", "b").await.err().context("it is never loaded")?.to_string();
    assert!(refused.contains("503"), "{refused}");
    let spent = cpu_time(serving.pid)?.saturating_sub(before);
    assert!(
        spent < Duration::from_millis(1500),
        "a loop without a pause takes all of these two seconds: {spent:?}"
    );
    assert_eq!(warden.state("a").await?, "loaded");
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
