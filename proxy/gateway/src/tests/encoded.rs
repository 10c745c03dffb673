//! Compressed request bodies.

use async_compression::tokio::write::{GzipEncoder, ZstdEncoder};
use serde_json::{Value, json};

use super::*;

async fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzipEncoder::new(Vec::new());
    encoder.write_all(text).await.unwrap();
    encoder.shutdown().await.unwrap();
    encoder.into_inner()
}

async fn zstd(text: &[u8]) -> Vec<u8> {
    let mut encoder = ZstdEncoder::new(Vec::new());
    encoder.write_all(text).await.unwrap();
    encoder.shutdown().await.unwrap();
    encoder.into_inner()
}

fn encoded(coding: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Encoding: {coding}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// A body without repetitions in its text.
fn chat(bytes: usize) -> String {
    let digits = (0_u64..).map(|number| number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_string());
    let mut text = String::new();
    for word in digits.take_while({
        let mut length = 0;
        move |word| {
            length += word.len();
            length < bytes
        }
    }) {
        text.push_str(&word);
    }
    json!({ "model": "b", "messages": [{ "role": "user", "content": text }] }).to_string()
}

/// A backend that answers with the received body and the codings in its head.
fn mirror() -> Upstream {
    Upstream::answering(|head, body| {
        let coded = head.to_ascii_lowercase().contains("content-encoding");
        let sum: u64 = body.iter().map(|byte| u64::from(*byte)).sum();
        json_answer(&json!({ "coded": coded, "bytes": body.len(), "sum": sum }).to_string())
    })
}

fn two() -> Plan {
    Plan { models: vec!["a", "b"], ..Plan::default() }
}

#[tokio::test]
async fn a_compressed_body_is_decoded_before_its_model_is_read() {
    let upstream = mirror();
    let rig = Rig::with(two(), &[&upstream]).await;
    // The first body is sent from memory, the second is streamed.
    for (number, bytes) in [100, 3_000_000].into_iter().enumerate() {
        let chat = chat(bytes);
        let sum: u64 = chat.bytes().map(u64::from).sum();
        let gzip = gzip(chat.as_bytes()).await;
        let zstd = zstd(chat.as_bytes()).await;
        let plain = chat.clone().into_bytes();
        let all =
            [("gzip", &gzip), ("x-gzip", &gzip), ("zstd", &zstd), ("identity", &plain), ("ZSTD", &zstd)];
        for (at, (coding, body)) in all.into_iter().enumerate() {
            let (head, told) = rig.ask(&encoded(coding, body)).await;
            assert!(head.starts_with("HTTP/1.1 200 "), "{coding}: {head}{told}");
            let told: Value = serde_json::from_str(&told).unwrap();
            assert_eq!((&told["bytes"], &told["sum"]), (&json!(chat.len()), &json!(sum)), "{coding}");
            assert_eq!(told["coded"], false, "{coding}");
            assert_eq!(rig.record(5 * number + at).await.model.unwrap().as_str(), "b", "{coding}");
        }
    }
    rig.is_clean().await;
}

#[tokio::test]
async fn a_coding_that_is_not_served_is_refused_with_those_that_are() {
    let upstream = mirror();
    let rig = Rig::with(two(), &[&upstream]).await;
    for coding in ["br", "deflate", "gzip, zstd", "nonsense"] {
        let (head, told) = rig.ask(&encoded(coding, b"xyz")).await;
        assert!(head.starts_with("HTTP/1.1 415 "), "{coding}: {head}{told}");
        assert!(head.contains("accept-encoding: gzip, zstd, identity\r\n"), "{head}");
        assert!(told.contains("Content-Encoding"), "{told}");
    }
    assert_eq!(upstream.accepted(), 0);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_body_that_is_not_what_its_head_says_is_refused() {
    let upstream = mirror();
    let rig = Rig::with(two(), &[&upstream]).await;
    let chat = chat(50_000);
    let whole = gzip(chat.as_bytes()).await;
    let followed = [whole.clone(), b"GET / HTTP/1.1".to_vec()].concat();
    for (coding, body) in [
        ("gzip", chat.as_bytes()),
        ("zstd", whole.as_slice()),
        ("gzip", &whole[..whole.len() - 9]),
        ("gzip", followed.as_slice()),
    ] {
        let (head, told) = rig.ask(&encoded(coding, body)).await;
        assert!(head.starts_with("HTTP/1.1 400 ") && told.contains("`Content-Encoding`"), "{head}{told}");
    }
    assert_eq!(rig.record(3).await.outcome.as_str(), "undecodable");
    rig.is_clean().await;
}

#[tokio::test]
async fn a_body_that_decodes_to_very_much_is_refused_and_takes_no_memory() {
    let upstream = mirror();
    let mut plan = two();
    plan.config.server.body_bytes = ByteSize(40_000_000);
    plan.config.server.buffered_bytes = ByteSize(80_000_000);
    let rig = Rig::with(plan, &[&upstream]).await;
    let bomb = json!({ "model": "a", "x": "y".repeat(30_000_000) }).to_string();
    for (coding, body) in [("gzip", gzip(bomb.as_bytes()).await), ("zstd", zstd(bomb.as_bytes()).await)] {
        let (head, told) = rig.ask(&encoded(coding, &body)).await;
        assert!(head.starts_with("HTTP/1.1 413 ") && told.contains("200 times"), "{coding}: {head}{told}");
    }
    // Large at a plausible ratio: the limit of plain bodies applies.
    let large = gzip(chat(41_000_000).as_bytes()).await;
    let (head, told) = rig.ask(&encoded("gzip", &large)).await;
    assert!(head.starts_with("HTTP/1.1 413 ") && told.contains("server.body_bytes"), "{head}{told}");
    assert_eq!(rig.gauges.held_bytes.load(Ordering::Relaxed), 0);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_frame_with_a_window_above_eight_mebibytes_is_refused() {
    let upstream = mirror();
    let rig = Rig::with(two(), &[&upstream]).await;
    // Magic number, a descriptor without a length, a window of 2^27 bytes, and one empty last block.
    let frame = [0x28, 0xb5, 0x2f, 0xfd, 0x00, (27 - 10) << 3, 0x01, 0x00, 0x00];
    let (head, told) = rig.ask(&encoded("zstd", &frame)).await;
    assert!(head.starts_with("HTTP/1.1 400 ") && told.contains("`Content-Encoding`"), "{head}{told}");
    rig.is_clean().await;
}
