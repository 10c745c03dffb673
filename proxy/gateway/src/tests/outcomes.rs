//! Outcomes are reported to the lease's owner for whole answers only, and audio counts as work.

use super::*;

const COMPUTE_ERROR: &str = r#"{"error":{"code":500,"message":"Compute error.","type":"server_error"}}"#;

fn status(code: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 {code}\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}")
        .into_bytes()
}

#[tokio::test]
async fn every_answer_that_ends_by_itself_tells_how_it_went() {
    let upstream = Upstream::start(|mut peer| async move {
        while let Some((_, body)) = peer.request().await {
            let body = String::from_utf8(body).unwrap();
            if body.contains("broken") {
                peer.send(&status("500 Internal Server Error", COMPUTE_ERROR)).await;
            } else if body.contains("poison") {
                peer.send(EVENTS).await;
                peer.send_chunk(format!("data: {{}}\n\ndata: {COMPUTE_ERROR}\n\n").as_bytes()).await;
                peer.send(b"0\r\n\r\n").await;
            } else if body.contains("cut") {
                peer.send(EVENTS).await;
                peer.send_chunk(b"data: {\"timings\":{\"prompt_n\":1}}\n\n").await;
            } else if body.contains("long") {
                peer.send(&status("400 Bad Request", r#"{"error":{"message":"too long"}}"#)).await;
            } else {
                let timings = r#"{"timings":{"cache_n":4,"prompt_n":3,"predicted_n":8,"predicted_ms":16.0}}"#;
                peer.send(&json_answer(timings)).await;
                continue;
            }
            return;
        }
    });
    let rig = Rig::start(&[&upstream]).await;
    let told =
        |status: u16, compute_error: bool| Ended { status: Some(status), compute_error, ..Ended::default() };
    let fine = Ended { prompt: Some(7), decode: Some((8, 16.0)), ..told(200, false) };
    for (word, wanted) in [
        ("fine", Some(fine)),
        ("broken", Some(told(500, true))),
        ("poison", Some(told(200, true))),
        ("long", Some(told(400, false))),
        ("cut", None),
    ] {
        let request = post("/v1/chat/completions", &format!(r#"{{"model":"m","x":"{word}"}}"#));
        let mut client = rig.client().await;
        client.send(&request).await;
        client.response().await;
        eventually("the lease is given back", || rig.live() == 0).await;
        let ended = rig.backends.ended.lock().unwrap().pop();
        assert_eq!(ended, wanted, "{word}");
    }
    rig.is_clean().await;
}

#[tokio::test]
async fn what_takes_no_slot_and_whoever_leaves_tell_nothing() {
    let upstream = Upstream::start(|mut peer| async move {
        while let Some((head, _)) = peer.request().await {
            if head.contains("/tokenize") {
                peer.send(&json_answer(r#"{"tokens":[]}"#)).await;
            } else {
                peer.send(EVENTS).await;
                peer.send_chunk(b"data: {\"timings\":{\"prompt_n\":1}}\n\n").await;
                peer.rest().await;
            }
        }
    });
    let rig = Rig::start(&[&upstream]).await;
    rig.ask(&post("/tokenize", r#"{"content":"x"}"#)).await;
    let mut client = rig.client().await;
    client.send(&post("/v1/chat/completions", "{}")).await;
    client.until("prompt_n").await;
    drop(client);
    rig.is_clean().await;
    assert_eq!(*rig.backends.ended.lock().unwrap(), []);
}

#[tokio::test]
async fn recordings_are_counted_in_chats_and_as_forms() {
    let upstream = Upstream::answering(|_, _| json_answer(r#"{"usage":{"prompt_tokens":1}}"#));
    let rig = Rig::start(&[&upstream]).await;
    let part = r#"{"type":"input_audio","input_audio":{"data":"AAAA","format":"wav"}}"#;
    let chat =
        format!(r#"{{"model":"m","messages":[{{"content":[{part},{part},{{"type":"image_url"}}]}}]}}"#);
    rig.ask(&post("/v1/chat/completions", &chat)).await;
    let form =
        "--X\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\nRIFF\r\n--X--\r\n";
    let request = format!(
        "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: h\r\nContent-Type: multipart/form-data; boundary=X\r\nContent-Length: {}\r\n\r\n{form}",
        form.len()
    );
    rig.ask(request.as_bytes()).await;
    rig.is_clean().await;
    let work = rig.backends.work.lock().unwrap();
    let media: Vec<_> = work.iter().map(|work| (work.requests, work.images, work.audio)).collect();
    assert_eq!(media, [(1, 1, 2), (1, 0, 1)]);
}
