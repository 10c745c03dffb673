//! Promise: llama-warden measures the behaviour of a llama-server that it did not build, at its first start
//! and in a process of its own, and remembers the result. A server without Unix sockets is served by a port.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde_json::{Value, json};
use warden_rig::raw;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Http, Outcome, Trouble, Warden, wait_until};

/// Variable with which other tests turn the measurement off.
const SWITCH: &str = "LLAMA_WARDEN_CHILD__MEASURE";

/// The measured process evaluates prompts slowly enough to measure; the model's own script does not.
fn setup(variables: &[(&str, &str)]) -> Result<Setup, Trouble> {
    let mut setup = Setup::new()?;
    setup.home.env.remove(std::ffi::OsStr::new(SWITCH));
    setup.home.env.insert("FAKE_LLAMA_PROMPT_MS".into(), "250".into());
    setup.home.env.extend(variables.iter().map(|(name, value)| (name.into(), value.into())));
    Ok(setup)
}

fn remembered(warden: &Warden) -> Vec<Value> {
    let folder: PathBuf = warden.home().path().join("cache/llama-warden/measured");
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    files.filter_map(|file| serde_json::from_slice(&std::fs::read(file.path()).ok()?).ok()).collect()
}

async fn until_remembered(warden: &Warden) -> Result<Value, Trouble> {
    wait_until("what was measured is remembered", SOON, async || remembered(warden).len() == 1).await?;
    Ok(remembered(warden)[0]["measured"].clone())
}

#[tokio::test]
async fn a_server_that_we_did_not_build_is_measured_once_beside_its_model() -> Outcome {
    let mut warden = setup(&[])?.fake("m", &json!({}), "")?.start().await?;
    let measured = until_remembered(&warden).await?;
    assert_eq!(
        measured,
        json!({"stream_head": "before_first_token", "unix_sockets": true, "http_threads": "on_demand", "web_page": false})
    );
    wait_until("the process that was measured is gone", SOON, async || warden.backends().len() == 1).await?;
    warden.until_ready(1).await?;
    assert!(warden.http.post(CHAT, &chat("r", "m", "hello", 4, false)).await?.answer()?.is_whole());
    assert_eq!(warden.terminate(SOON).await?, 0);
    // A second start uses the remembered result.
    let mut warden = warden.again().await?;
    warden.until_ready(1).await?;
    assert!(warden.http.post(CHAT, &chat("s", "m", "hello", 4, false)).await?.answer()?.is_whole());
    assert_eq!(warden.terminate(SOON).await?, 0);
    assert!(!warden.kid.output().contains("measured:"), "{}", warden.kid.output());
    Ok(())
}

#[tokio::test]
async fn a_server_without_unix_sockets_is_served_by_a_port_once_that_is_known() -> Outcome {
    let warden =
        setup(&[("FAKE_LLAMA_NO_UNIX", "true")])?.fake("m", &json!({ "no_unix": true }), "")?.start().await?;
    let measured = until_remembered(&warden).await?;
    assert_eq!(measured["unix_sockets"], json!(false), "{measured}");
    warden.until_ready(1).await?;
    let backends = warden.backends();
    assert!(matches!(backends[0].http(), Some(Http::Tcp(_))), "{backends:?}");
    assert!(warden.http.post(CHAT, &chat("r", "m", "hello", 4, true)).await?.answer()?.is_whole());
    Ok(())
}

/// Starts llama-warden with a raw-llama that treats unread bodies like this, and waits for the measurement.
async fn measured_raw(bodies: &str) -> Result<(Warden, raw::Log, Value), Trouble> {
    // Each thread keeps connections of its own, and each request of this test comes by a new connection.
    let setup = setup(&[("RAW_LLAMA_BODIES", bodies)])?.top("server.threads = 1");
    let (setup, log) = raw::model(setup, &BTreeMap::new())?;
    let warden = setup.start().await?;
    let measured = until_remembered(&warden).await?;
    warden.until_ready(1).await?;
    Ok((warden, log, measured))
}

/// Connections that bring this number of requests with a body to the backend.
async fn connections(warden: &Warden, log: &raw::Log, requests: usize) -> Result<BTreeSet<u64>, Trouble> {
    let before = log.requests()?.len();
    for _ in 0..requests {
        assert!(warden.http.post("/kept", &json!({})).await?.status.is_success());
    }
    let came = log.by_connection()?.split_off(before);
    assert_eq!(came.len(), requests);
    Ok(came.into_iter().map(|(connection, _)| connection).collect())
}

#[tokio::test]
async fn connections_of_bodies_are_kept_where_unread_ones_were_seen_to_be_discarded() -> Outcome {
    let (warden, log, measured) = measured_raw("discard").await?;
    assert_eq!(measured["discards_bodies"], json!(true), "{measured}");
    // The model learns the result after it is remembered.
    wait_until("a connection is kept", SOON, async || {
        connections(&warden, &log, 4).await.is_ok_and(|connections| connections.len() == 1)
    })
    .await
}

#[tokio::test]
async fn a_connection_ends_behind_each_body_where_unread_ones_were_read_as_requests() -> Outcome {
    let (warden, log, measured) = measured_raw("leave").await?;
    assert_eq!(measured["discards_bodies"], json!(false), "{measured}");
    assert_eq!(connections(&warden, &log, 4).await?.len(), 4);
    assert!(
        log.requests()?
            .iter()
            .filter(|raw| raw.starts_with("POST /kept"))
            .all(|raw| raw.contains("connection: close"))
    );
    Ok(())
}
