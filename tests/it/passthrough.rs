//! Every route of llama-server passes through unchanged for the addressed model.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden};

async fn started() -> Result<(Warden, Http), Trouble> {
    let warden = Setup::new()?.fake("m", &json!({}), "aliases = [\"nick\"]\n")?.start().await?;
    let backend = warden.until_ready(1).await?[0];
    let direct = Http::Unix(backend.socket().context("no socket")?);
    Ok((warden, direct))
}

fn sha(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Headers that the echo reports, as lowercase `name: value`.
fn seen(echo: &Value) -> Vec<String> {
    let pair =
        |pair: &Value| format!("{}: {}", pair[0].as_str().unwrap_or(""), pair[1].as_str().unwrap_or(""));
    echo["headers"].as_array().into_iter().flatten().map(pair).collect()
}

#[tokio::test]
async fn an_answer_names_the_model_as_the_configuration_does_and_no_path() -> Outcome {
    let named = "args = [\"-np\", \"2\", \"--alias\", \"mine\"]\n";
    let warden = Setup::new()?.fake("org/a", &json!({}), "")?.fake("b", &json!({}), named)?.start().await?;
    for (model, told) in [("org/a", "org/a"), ("b", "mine")] {
        let answer = warden.http.post(CHAT, &chat("r", model, "hi", 2, false)).await?;
        assert_eq!(answer.json()?["model"], told, "{}", answer.text());
        let stream = warden.http.post(CHAT, &chat("r", model, "hi", 2, true)).await?;
        assert!(stream.text().contains(&format!("\"model\":\"{told}\"")), "{}", stream.text());
    }
    Ok(())
}

#[tokio::test]
async fn answers_are_byte_for_byte_those_of_llama_server() -> Outcome {
    let (warden, direct) = started().await?;
    for stream in [false, true] {
        let request = chat("a", "m", "hello", 20, stream);
        let (through, plain) = (warden.http.post(CHAT, &request).await?, direct.post(CHAT, &request).await?);
        let neutral = |text: String| {
            // Only times may differ.
            let cut = text.find("\"timings\"").unwrap_or(text.len());
            let mut text = text[..cut].to_owned();
            while let Some(at) = text.find("\"created\":1") {
                text.replace_range(at..at + "\"created\":1795249450".len(), "");
            }
            text
        };
        assert_eq!(neutral(through.text()), neutral(plain.text()));
        assert_eq!(through.header("content-type"), plain.header("content-type"));
    }
    Ok(())
}

#[tokio::test]
async fn every_other_route_reaches_the_addressed_model() -> Outcome {
    let (warden, direct) = started().await?;
    for target in ["/props?model=m", "/slots?model=m", "/metrics?model=nick"] {
        let (through, plain) = (warden.http.get(target).await?, direct.get(target).await?);
        assert_eq!((through.status, &through.body), (plain.status, &plain.body), "{target}");
    }
    for (target, body) in [
        ("/tokenize", json!({"model": "m", "content": "abc"})),
        ("/v1/embeddings", json!({"input": "a b c", "model": "nick"})),
        ("/completion", json!({"prompt": "x", "n_predict": 3, "model": "m"})),
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 3, "model": "m"})),
    ] {
        let through = warden.http.post(target, &body).await?;
        assert!(through.status.is_success(), "{target}: {}", through.text());
    }
    let unknown = warden.http.get("/no/such/route?model=m").await?;
    assert_eq!(unknown.status.as_u16(), 404);
    assert_eq!(unknown.json()?["error"]["message"], "File Not Found", "llama-server answers it, not we");
    Ok(())
}

#[tokio::test]
async fn the_head_arrives_without_what_belongs_to_a_connection_only() -> Outcome {
    let (warden, _direct) = started().await?;
    let mut raw = warden.http.raw().await?;
    raw.write(
        b"POST /fake/echo?model=m&x=%20y HTTP/1.1\r\nHost: example.org\r\nContent-Length: 3\r\nAuthorization: Bearer k\r\n\
          X-Own: 1\r\nX-Own: 2\r\nConnection: close, X-Hop\r\nX-Hop: gone\r\nKeep-Alive: timeout=9\r\nTE: trailers\r\n\
          X-Conversation-Id: c\r\n\r\nabc",
    )
    .await?;
    let all = raw.to_end(SOON).await?;
    let (head, body) = all.split_once("\r\n\r\n").context("no body")?;
    assert!(head.starts_with("HTTP/1.1 200"), "{all}");
    // The body may be chunked; the echo is one line of JSON in it.
    let json = body.lines().find(|line| line.starts_with('{')).context(body)?;
    let echo: Value = serde_json::from_str(json)?;
    assert_eq!(echo["target"], "/fake/echo?model=m&x=%20y");
    assert_eq!(echo["body_sha256"], sha(b"abc"));
    let seen = seen(&echo);
    for kept in ["authorization: Bearer k", "x-own: 1", "x-own: 2"] {
        assert!(seen.iter().any(|line| line == kept), "{kept} is missing in {seen:?}");
    }
    for gone in ["x-hop", "keep-alive", "te", "x-conversation-id"] {
        assert!(!seen.iter().any(|line| line.starts_with(&format!("{gone}:"))), "{gone} is in {seen:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_client_gets_a_request_id_and_keeps_its_own() -> Outcome {
    let (warden, _direct) = started().await?;
    let fresh = warden.http.get("/fake/echo?model=m").await?;
    let id = fresh.header("x-request-id").to_owned();
    assert!(!id.is_empty());
    assert!(seen(&fresh.json()?).contains(&format!("x-request-id: {id}")));
    let request = Request::get("/fake/echo?model=m").header("x-request-id", "mine-7").body(Full::default())?;
    let own = warden.http.send(request).await?;
    assert_eq!(own.header("x-request-id"), "mine-7");
    assert!(seen(&own.json()?).contains(&"x-request-id: mine-7".to_owned()));
    Ok(())
}

#[tokio::test]
async fn statuses_of_llama_server_stay_what_they_are() -> Outcome {
    let (warden, _direct) = started().await?;
    for status in [201, 400, 401, 404, 418, 500, 501, 503] {
        let answer = warden.http.get(&format!("/fake/echo?status={status}&model=m")).await?;
        assert_eq!(answer.status.as_u16(), status);
    }
    Ok(())
}

#[tokio::test]
async fn multipart_bodies_arrive_whole_and_their_model_field_is_obeyed() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "")?.fake("other", &json!({}), "")?.start().await?;
    warden.until_ready(2).await?;
    let mut body = Vec::new();
    body.extend_from_slice(
        b"--XyZ\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\
          Content-Type: audio/wav\r\n\r\n",
    );
    body.extend((0..200_000_u32).map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1]));
    body.extend_from_slice(
        b"\r\n--XyZ\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nother\r\n--XyZ--\r\n",
    );
    let request = Request::post("/v1/audio/transcriptions")
        .header("content-type", "multipart/form-data; boundary=XyZ")
        .header("x-request-id", "file")
        .body(Full::new(Bytes::from(body.clone())))?;
    let answer = warden.http.send(request).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    assert_eq!(answer.json()?["text"], format!("{} bytes, sha256 {}", body.len(), sha(&body)));
    Ok(())
}

#[tokio::test]
async fn big_bodies_pass_in_both_directions() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({"token_bytes": 100_000}), "")?.start().await?;
    let image = "A".repeat(20 << 20);
    let body = json!({"user": "big", "stream": true, "max_tokens": 100, "model": "m", "messages": [{"role": "user",
        "content": [{"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{image}")}}]}]});
    let answer = warden.http.post(CHAT, &body).await?.answer()?;
    assert!(answer.is_whole());
    assert!(answer.text.len() >= 100 * 100_000, "{}", answer.text.len());
    let line =
        warden.ledger().lines()?.into_iter().find(|line| line.event == "begun").context("not begun")?;
    assert_eq!(line.sha256, sha(body.to_string().as_bytes()));
    Ok(())
}

#[tokio::test]
async fn chunked_requests_and_expectations_work_as_with_llama_server() -> Outcome {
    let (warden, _direct) = started().await?;
    let body = chat("c", "m", "hi", 2, false).to_string();
    let (left, right) = body.split_at(10);
    let chunked = format!("{:x}\r\n{left}\r\n{:x}\r\n{right}\r\n0\r\n\r\n", left.len(), right.len());
    let mut raw = warden.http.raw().await?;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n{chunked}"
    );
    raw.write(head.as_bytes()).await?;
    let all = raw.to_end(SOON).await?;
    assert!(all.starts_with("HTTP/1.1 200") && all.contains("chat.completion"), "{all}");

    let mut raw = warden.http.raw().await?;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    raw.write(head.as_bytes()).await?;
    let first = raw.read(Duration::from_secs(5)).await?;
    assert!(first.starts_with(b"HTTP/1.1 100"), "{:?}", String::from_utf8_lossy(&first));
    raw.write(body.as_bytes()).await?;
    let all = raw.to_end(SOON).await?;
    assert!(all.contains("HTTP/1.1 200") && all.contains("chat.completion"), "{all}");
    Ok(())
}

#[tokio::test]
async fn models_are_listed_with_their_state_and_health_is_ours() -> Outcome {
    let setup = Setup::new()?.fake("m", &json!({}), "aliases = [\"nick\"]\n")?;
    let warden = setup.fake("lazy", &json!({}), "preload = false\n")?.start().await?;
    assert_eq!(warden.http.get("/health").await?.json()?["status"], "ok");
    warden.until_ready(1).await?;
    let listed = warden.http.get("/v1/models").await?.json()?;
    let data = listed["data"].as_array().context("no data")?;
    let ids: Vec<&str> = data.iter().filter_map(|model| model["id"].as_str()).collect();
    assert_eq!(ids, ["m", "lazy"]);
    assert_eq!(data[1]["status"]["value"], "unloaded", "{listed}");
    let unknown = warden.http.post(CHAT, &chat("x", "nope", "hi", 2, false)).await?;
    assert_eq!(unknown.status.as_u16(), 404, "{}", unknown.text());
    assert!(unknown.text().contains("lazy"), "the known models are named: {}", unknown.text());
    Ok(())
}
