//! TLS: chat over it, certificates renewed while serving, and clients without TLS.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use warden_rig::http::json_request;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Identity, Outcome, Trouble, Warden, wait_until};

/// Part of the message about an invalid pair.
const STAYS: &str = "the certificate in use stays";

/// Serves one fake model with this certificate, which is checked often.
async fn start(identity: &Identity, more: &str) -> Result<Warden, Trouble> {
    let setup = Setup::new()?;
    let (cert, key) = identity.put(setup.home.path())?;
    let top = format!(
        "server.tls_cert = '{}'\nserver.tls_key = '{}'\ninternal.server.tls_check = \"50ms\"\n{more}",
        cert.display(),
        key.display()
    );
    let warden = setup.top(&top).fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    Ok(warden)
}

fn hosted(request: Request<Full<Bytes>>) -> Result<Request<Full<Bytes>>, Trouble> {
    let mut request = request;
    request.headers_mut().insert(HOST, "localhost".parse()?);
    Ok(request)
}

async fn shows(warden: &Warden, identity: &Identity) -> bool {
    identity.connect(warden.address(), &[]).await.is_ok()
}

#[tokio::test]
async fn a_chat_over_tls_is_the_chat_without_it() -> Outcome {
    let identity = Identity::new()?;
    let warden = start(&identity, "").await?;
    assert!(warden.url().starts_with("https://"), "{}", warden.url());
    let https = warden.https(&identity);
    let streamed = https.post(CHAT, &chat("s", "m", "hi", 5, true)).await?.answer()?;
    let whole = https.post(CHAT, &chat("w", "m", "hi", 5, false)).await?.answer()?;
    assert!(streamed.is_whole() && whole.is_whole(), "{streamed:?} {whole:?}");
    assert_eq!(streamed.text, whole.text);
    warden.ledger().each_finished_once(["s", "w"])?;
    let stranger = Identity::new()?;
    assert!(!shows(&warden, &stranger).await, "a client that trusts another certificate only was let in");
    Ok(())
}

#[tokio::test]
async fn a_renewed_certificate_is_shown_to_new_connections_and_old_ones_go_on() -> Outcome {
    let (first, second) = (Identity::new()?, Identity::new()?);
    let mut warden = start(&first, "").await?;
    let (mut old, connection) =
        http1::handshake(TokioIo::new(first.connect(warden.address(), &[]).await?)).await?;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { drop(connection.await) });
    // This stream begins before the renewal and is read to its end afterwards.
    warden.script("m", &json!({"ms_per_token": 20})).await?;
    let mut stream = warden.https(&first).stream(CHAT, &chat("long", "m", "hi", 200, true)).await?;
    assert!(stream.event().await?.is_some());
    second.put(warden.home().path())?;
    wait_until("new connections get the new certificate", SOON, async || shows(&warden, &second).await)
        .await?;
    assert!(!shows(&warden, &first).await, "the old certificate is still shown");
    warden.says("was read again").await?;
    let request = hosted(json_request(CHAT, &chat("old", "m", "hi", 4, false))?)?;
    let answer = old.send_request(request).await.context("the connection made before the renewal")?;
    assert!(answer.status().is_success());
    let answer: Value = serde_json::from_slice(&answer.into_body().collect().await?.to_bytes())?;
    assert!(answer["choices"].is_array(), "{answer}");
    let (answer, end) = stream.rest().await;
    end?;
    assert!(answer.is_whole(), "{answer:?}");
    assert!(warden.https(&second).post(CHAT, &chat("new", "m", "hi", 4, false)).await?.status.is_success());
    assert!(warden.kid.ended().is_none());
    Ok(())
}

#[tokio::test]
async fn a_wrong_new_certificate_is_told_and_the_old_one_stays() -> Outcome {
    let (good, other) = (Identity::new()?, Identity::new()?);
    let mut warden = start(&good, "").await?;
    let folder = warden.home().path().to_owned();
    let (mut strange, mut empty) = (good.clone(), good.clone());
    strange.key.clone_from(&other.key);
    "renewal failed\n".clone_into(&mut empty.cert);
    let wrongs = [
        ("a key of another", strange, "does not belong to"),
        ("no certificate", empty, "holds no certificate"),
    ];
    for (what, wrong, told) in wrongs {
        wrong.put(&folder)?;
        warden.says(told).await.context(what)?;
        let output = warden.says(STAYS).await?;
        assert!(output.contains("cert.pem"), "{what}: {output}");
        assert!(shows(&warden, &good).await, "{what}: the old certificate is not shown any more");
    }
    // A reload reports the same error, keeps the certificate, and accepts the next pair.
    let before = warden.kid.output().matches(STAYS).count();
    let config = warden.setup.config();
    warden.reload(&config)?;
    wait_until("the wrong file is told again", SOON, async || {
        warden.kid.output().matches("reload:").count() > 0
            || warden.kid.output().matches(STAYS).count() > before
    })
    .await?;
    assert!(shows(&warden, &good).await);
    other.put(&folder)?;
    wait_until("a good one is taken", SOON, async || shows(&warden, &other).await).await?;
    assert!(warden.https(&other).get("/health").await?.status.is_success());
    Ok(())
}

#[tokio::test]
async fn who_does_not_speak_tls_is_told_so_and_counted() -> Outcome {
    let identity = Identity::new()?;
    let warden = start(&identity, "").await?;
    let answer = warden.http.post(CHAT, &chat("plain", "m", "hi", 4, false)).await?;
    assert_eq!(answer.status.as_u16(), 400, "{}", answer.text());
    assert!(
        answer.json()?["error"]["message"].as_str().unwrap_or_default().contains("https://"),
        "{}",
        answer.text()
    );
    assert_eq!(answer.header("connection"), "close");
    // HTTP/2 without TLS, and random bytes, end the connection at once.
    for bytes in [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], b"\0\0\0\0", &[0x16, 3, 1, 0, 5, 1, 2, 3, 4, 5]] {
        let mut raw = warden.http.raw().await?;
        raw.write(bytes).await?;
        let said = raw.to_end(SOON).await.context(format!("{bytes:?}"))?;
        assert!(!said.contains("200 OK"), "{said}");
    }
    wait_until("all four are counted", SOON, async || {
        let count = warden.metric("llama_warden_limited_total{limit=\"handshake\"}").await;
        count.is_ok_and(|count| count == Some(4.0))
    })
    .await?;
    assert!(warden.ledger().lines()?.is_empty(), "something was executed");
    assert!(warden.https(&identity).get("/health").await?.status.is_success());
    Ok(())
}

#[tokio::test]
async fn a_handshake_that_never_ends_is_closed_and_counted() -> Outcome {
    let identity = Identity::new()?;
    let warden = start(&identity, "internal.server.tls_handshake_timeout = \"500ms\"").await?;
    // No byte, one byte, and most of a record.
    for begin in [&b""[..], b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"] {
        let mut raw = warden.http.raw().await?;
        raw.write(begin).await?;
        assert_eq!(raw.to_end(Duration::from_secs(20)).await.context(format!("{begin:?}"))?, "");
    }
    wait_until("all three are counted", SOON, async || {
        let count = warden.metric("llama_warden_limited_total{limit=\"handshake_time\"}").await;
        count.is_ok_and(|count| count == Some(3.0))
    })
    .await?;
    assert!(warden.https(&identity).get("/health").await?.status.is_success());
    Ok(())
}
