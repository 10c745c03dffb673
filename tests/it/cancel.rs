//! If a client leaves, the backend stops its generation within 100 ms.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;
use warden_rig::ledger::End;
use warden_rig::process::ProcessId;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden, wait_until};

const PROMISED: Duration = Duration::from_millis(100);

async fn started(stream_of: &Value) -> Result<(Warden, Http), Trouble> {
    let warden = Setup::new()?.fake("m", stream_of, "")?.start().await?;
    let backend: ProcessId = warden.until_ready(1).await?[0];
    let fake = Http::Unix(backend.socket().context("no socket")?);
    Ok((warden, fake))
}

async fn until_busy(fake: &Http, slots: u64) -> Result<(), Trouble> {
    wait_until(&format!("{slots} busy slots"), SOON, async || match fake.get("/fake/state").await {
        Ok(state) => state.json().is_ok_and(|state| state["busy"] == slots),
        Err(_) => false,
    })
    .await
}

#[tokio::test]
async fn in_mid_stream_the_generation_ends_within_100_ms() -> Outcome {
    let (warden, fake) = started(&json!({"ms_per_token": 10})).await?;
    let mut times = Vec::new();
    for n in 0..5 {
        let mut flow =
            warden.http.stream(CHAT, &chat(&format!("gone-{n}"), "m", "go", 100_000, true)).await?;
        flow.event().await?;
        let left = Instant::now();
        drop(flow);
        until_busy(&fake, 0).await?;
        times.push(left.elapsed());
    }
    // Judge the shortest time: a busy machine may delay single requests, but a fault would delay all.
    assert!(times.iter().min().is_some_and(|shortest| *shortest < PROMISED), "{times:?}");
    assert!(warden.ledger().executions()?.values().all(|ends| *ends == [End::Cancelled]));
    Ok(())
}

#[tokio::test]
async fn a_client_that_leaves_before_the_first_byte_ends_its_generation_too() -> Outcome {
    for stream in [true, false] {
        let (warden, fake) = started(&json!({"prompt_ms": 60_000})).await?;
        let request = warden_rig::http::json_request(CHAT, &chat("gone", "m", "go", 10, stream))?;
        let mut raw = warden.http.raw().await?;
        let body = request.body().clone();
        let body = http_body_util::BodyExt::collect(body).await?.to_bytes();
        let head = format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
        raw.write(head.as_bytes()).await?;
        raw.write(&body).await?;
        until_busy(&fake, 1).await?;
        drop(raw);
        until_busy(&fake, 0).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_slow_reader_slows_its_own_stream_and_no_other() -> Outcome {
    let (warden, _fake) = started(&json!({"token_bytes": 65536})).await?;
    // The client reads none of the ten thousand tokens of 64 KiB, which must not pile up in llama-warden's
    // memory.
    let _slow = warden.http.stream(CHAT, &chat("slow", "m", "go", 10_000, true)).await?;
    let process = ProcessId::of(warden.kid.pid()).context("it has ended")?;
    let before = process.host_bytes().context("no figure")?;
    for n in 0..20 {
        let whole = warden.http.post(CHAT, &chat(&format!("{n}"), "m", "go", 4, true)).await?;
        assert!(whole.answer()?.is_whole());
    }
    let grown = process.host_bytes().context("no figure")?.saturating_sub(before);
    assert!(grown < 64 << 20, "grew by {grown} bytes");
    Ok(())
}

#[tokio::test]
async fn a_half_close_is_no_departure_for_a_client_that_still_reads() -> Outcome {
    let (warden, _fake) = started(&json!({"ms_per_token": 5})).await?;
    let body = chat("half", "m", "go", 20, true).to_string();
    let mut raw = warden.http.raw().await?;
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    raw.write(head.as_bytes()).await?;
    raw.half_close().await?;
    let all = raw.to_end(SOON).await?;
    // The request may be cut or served, but half an answer must not look complete.
    assert!(all.is_empty() || all.contains("[DONE]") || !all.ends_with("0\r\n\r\n"), "{all}");
    Ok(())
}
