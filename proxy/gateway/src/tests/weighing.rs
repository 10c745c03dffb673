//! Admission gets the tokens of a prompt; the backend counts them only if the bound is too large.

use super::*;

/// A backend that answers `/tokenize` with one token a word, and everything else with a sentence.
fn counting() -> Upstream {
    Upstream::answering(|head, body| {
        if head.starts_with("POST /tokenize ") {
            assert!(head.to_ascii_lowercase().contains("authorization: bearer k\r\n"), "{head}");
            let text = String::from_utf8(body.to_vec()).unwrap().replace("\\n", " ");
            let words = text.split('"').nth(3).unwrap().split_whitespace().count();
            return json_answer(&format!(r#"{{"tokens":{:?}}}"#, vec![7; words]));
        }
        json_answer(r#"{"usage":{"prompt_tokens":1}}"#)
    })
}

fn request(body: &str) -> Vec<u8> {
    let length = body.len();
    format!("POST /v1/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer k\r\nContent-Length: {length}\r\n\r\n{body}")
        .into_bytes()
}

fn prompt(words: usize) -> String {
    format!(r#"{{"model":"m","prompt":"{}"}}"#, vec!["word"; words].join(" "))
}

#[tokio::test]
async fn nothing_is_counted_where_nobody_asks() {
    let upstream = counting();
    let rig = Rig::start(&[&upstream]).await;
    rig.ask(&request(&prompt(5000))).await;
    assert_eq!(*rig.backends.demands.lock().unwrap(), [None]);
    assert_eq!(upstream.accepted(), 1);
}

#[tokio::test]
async fn a_bound_is_enough_where_it_fits_and_the_backend_counts_where_it_may_not() {
    let upstream = counting();
    let rig = Rig::start(&[&upstream]).await;
    *rig.backends.room_tokens.lock().unwrap() = Some(1000);
    let small = prompt(100);
    rig.ask(&request(&small)).await;
    rig.ask(&request(&prompt(5000))).await;
    let bound = small.len() as u64 / 3;
    assert_eq!(*rig.backends.demands.lock().unwrap(), [Some(bound), Some(5000)]);
    rig.is_clean().await;
}

#[tokio::test]
async fn a_prompt_that_comes_in_chunks_is_weighed_whole() {
    let upstream = counting();
    let mut plan = Plan::default();
    plan.config.upstream.replay_bytes = ByteSize(1000);
    let rig = Rig::with(plan, &[&upstream]).await;
    *rig.backends.room_tokens.lock().unwrap() = Some(1000);
    let body = prompt(5000);
    let (first, rest) = body.split_at(1500);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer k\r\nTransfer-Encoding: chunked\r\n\r\n";
    let mut client = rig.client().await;
    client.send(format!("{head}{:x}\r\n{first}\r\n", first.len()).as_bytes()).await;
    client.send(format!("{:x}\r\n{rest}\r\n0\r\n\r\n", rest.len()).as_bytes()).await;
    client.response().await;
    assert_eq!(*rig.backends.demands.lock().unwrap(), [Some(5000)]);
    drop(client);
    rig.is_clean().await;
}

#[tokio::test]
async fn images_are_no_text_however_large_and_however_late_they_come() {
    let upstream = counting();
    let mut plan = Plan::default();
    plan.config.upstream.replay_bytes = ByteSize(1000);
    let rig = Rig::with(plan, &[&upstream]).await;
    *rig.backends.room_tokens.lock().unwrap() = Some(1000);
    let image = "A".repeat(300_000);
    let body = format!(
        r#"{{"model":"m","messages":[{{"content":[{{"type":"text","text":"see"}},{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{image}"}}}}]}}]}}"#
    );
    rig.ask(&request(&body)).await;
    let told = rig.backends.demands.lock().unwrap()[0].unwrap();
    assert!(told < 100, "{told}");
    rig.is_clean().await;
}

#[tokio::test]
async fn what_is_too_long_to_be_counted_is_not_taken_apart() {
    let upstream = counting();
    let rig = Rig::start(&[&upstream]).await;
    *rig.backends.room_tokens.lock().unwrap() = Some(1000);
    // As parsed values it would take sixteen times the memory.
    let large = format!(r#"{{"model":"m","prompt":[{}1]}}"#, "1,".repeat(5_000_000));
    rig.ask(&request(&large)).await;
    assert_eq!(*rig.backends.demands.lock().unwrap(), [Some(large.len() as u64 / 3)]);
    assert_eq!(upstream.accepted(), 1);
    rig.is_clean().await;
}

#[tokio::test]
async fn without_a_count_the_bound_holds() {
    let upstream = Upstream::answering(|head, _| {
        if head.starts_with("POST /tokenize ") {
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_vec();
        }
        json_answer("{}")
    });
    let rig = Rig::start(&[&upstream]).await;
    *rig.backends.room_tokens.lock().unwrap() = Some(1000);
    let large = prompt(5000);
    rig.ask(&request(&large)).await;
    assert_eq!(*rig.backends.demands.lock().unwrap(), [Some(large.len() as u64 / 3)]);
    rig.is_clean().await;
}

#[tokio::test]
async fn no_body_costs_many_times_its_own_bytes_when_it_is_looked_at() {
    if !slow::is_alone(module_path!(), "no_body_costs_many_times_its_own_bytes_when_it_is_looked_at").await {
        return;
    }
    // The backend ignores the bodies, and counts no tokens.
    let upstream = Upstream::answering(|_, _| json_answer(r#"{"tokens":[]}"#));
    let rig = Rig::start(&[&upstream]).await;
    *rig.backends.room_tokens.lock().unwrap() = Some(1000);
    for (begin, element, end) in [
        (r#"{"messages":["#, "{},", "{}]}"),
        (r#"{"input":["#, "{},", "{}]}"),
        (r#"{"prompt":["#, "0,", "0]}"),
        (r#"{"tools":["#, "{},", "{}]}"),
    ] {
        // Small enough to have its tokens counted, too.
        let body = format!("{begin}{}{end}", element.repeat(1_000_000 / element.len()));
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let before = resident("VmRSS:");
        let (head, _) = rig.ask(&post("/v1/chat/completions", &body)).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        let cost = resident("VmHWM:").saturating_sub(before);
        // The body is held once, joined for parsing, and kept once more by each end in this process.
        // Buffers double as they grow.
        assert!(cost < 14 * body.len(), "{begin}: {} MiB for {} MB", cost >> 20, body.len() / 1_000_000);
    }
    rig.is_clean().await;
}

/// Returns this process's memory (`VmRSS:`) or its peak since the last reset (`VmHWM:`), in bytes.
fn resident(which: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(which)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}
