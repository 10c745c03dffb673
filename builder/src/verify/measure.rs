//! Measures a server's behaviour by tests, not by name or build number. A failed measurement leaves the fact
//! unknown, and never fails a verification.

use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout, timeout_at};

use super::bodies;
use super::checks::ServerAddress;
use crate::sample_model::{FIRST_WORD_ID, WORD_COUNT};

use super::measured::{
    HttpThreads, REQUIRED_AGREEMENT, ServerBehaviour, StreamHead, StreamTiming, stream_head,
};

/// One slot, so that requests run in order; small batches, so that a few tokens take some milliseconds.
pub(super) const MEASURING_FLAGS: [&str; 8] =
    ["-np", "1", "-b", "64", "-ub", "16", "--threads-http", HTTP_THREADS_FLAG];
const HTTP_THREADS_FLAG: &str = "2";
const HTTP_THREAD_COUNT: usize = 2;
/// Number of connections to open. A server that serves all of them at once creates threads on demand.
const TESTED_CONNECTIONS: usize = 6;
/// Time limit for a connection to be served; mostly this takes less than a millisecond.
const SERVED_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit of the connection test: after 5 s, llama-server closes idle connections and frees threads.
const IDLE_TEST_LIMIT: Duration = Duration::from_secs(4);

const FIRST_PROMPT_TOKENS: usize = 256;
/// Tokens of the longest prompt; prompt and answer fit into the context.
const MAX_PROMPT_TOKENS: usize = 2000;
pub(super) const CONTEXT_SIZE: &str = "4096";
const MAX_STREAMS: usize = 8;

/// Tests if `/` is a web page. `None`: no answer, or an unexpected one.
async fn test_web_page(door: &ServerAddress) -> Option<bool> {
    let client = door.client().ok()?;
    let answer = client.get(door.url("/")).header("accept", "text/html").header("accept-encoding", "gzip");
    let answer = timeout(SERVED_TIMEOUT * 10, answer.send()).await.ok()?.ok()?;
    match answer.status() {
        status if status.is_success() => Some(true),
        StatusCode::NOT_FOUND => Some(false),
        _ => None,
    }
}

/// Tests if connections beyond the number of threads are served while the others stay open.
async fn test_http_threads(door: &ServerAddress) -> Option<HttpThreads> {
    // Test twice: on a stalled machine, a server seems to have too few threads.
    let first = test_connections(door).await?;
    (first == test_connections(door).await?).then_some(first)
}

async fn test_connections(door: &ServerAddress) -> Option<HttpThreads> {
    let begun = Instant::now();
    // Each client keeps its connection open.
    let mut held = Vec::new();
    while held.len() < TESTED_CONNECTIONS {
        let client = door.persistent_client().ok()?;
        let mut answer = Box::pin(client.get(door.url("/health")).send());
        match timeout(SERVED_TIMEOUT, &mut answer).await {
            Ok(answer) => {
                // Read the whole body, else the connection is closed instead of idle.
                answer.ok()?.bytes().await.ok()?;
                held.push(client);
            }
            Err(_) if held.len() == HTTP_THREAD_COUNT => {
                // The waiting connection must be served as soon as another one closes.
                drop(held.pop());
                let served = timeout(SERVED_TIMEOUT, answer).await.is_ok_and(|answer| answer.is_ok());
                return (served && begun.elapsed() < IDLE_TEST_LIMIT).then_some(HttpThreads::Fixed);
            }
            Err(_) => return None,
        }
    }
    (begun.elapsed() < IDLE_TEST_LIMIT).then_some(HttpThreads::OnDemand)
}

/// Determines if the head of a streamed answer is sent before or after the first token. Repeats the test with
/// longer prompts until the result is clear.
async fn test_stream_head(door: &ServerAddress, until: Instant) -> Option<StreamHead> {
    let mut tries = Vec::new();
    let mut tokens = FIRST_PROMPT_TOKENS;
    for number in 0..MAX_STREAMS {
        let shown = timeout_at(until, stream_answer(door, tokens, number)).await.ok()??;
        if shown.is_long() {
            tries.push(shown);
            if tries.len() >= REQUIRED_AGREEMENT
                && let Some(order) = stream_head(&tries)
            {
                return Some(order);
            }
        } else if tokens < MAX_PROMPT_TOKENS {
            tokens = (tokens * 3).min(MAX_PROMPT_TOKENS);
        }
    }
    stream_head(&tries)
}

/// Streams one answer. `number` varies the prompt, so that no part of it is cached.
async fn stream_answer(door: &ServerAddress, tokens: usize, number: usize) -> Option<StreamTiming> {
    let client = door.client().ok()?;
    // Token ids, so that the prompt's length is exact.
    let prompt: Vec<usize> = (0..tokens).map(|at| prompt_token(at, number)).collect();
    let body = json!({
        "prompt": prompt, "n_predict": 2, "temperature": 0, "stream": true, "cache_prompt": false,
    });
    let begun = Instant::now();
    let mut answer = client.post(door.url("/completion")).json(&body).send().await.ok()?;
    let head = begun.elapsed();
    if !answer.status().is_success() {
        return None;
    }
    let mut text = Vec::new();
    let mut token = None;
    while let Some(chunk) = answer.chunk().await.ok()? {
        text.extend_from_slice(chunk.as_ref());
        // Wait for an event: the server also sends keep-alive comments.
        if token.is_none() && text.windows(5).any(|window| window == b"data:") {
            token = Some(begun.elapsed().saturating_sub(head));
        }
    }
    let text = String::from_utf8_lossy(&text);
    let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let prompt = events.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let prompt = prompt.filter_map(|event| event["timings"]["prompt_ms"].as_f64()).next_back();
    let prompt = prompt.and_then(|millis| Duration::try_from_secs_f64(millis / 1000.0).ok());
    Some(StreamTiming { head, token: token?, prompt })
}

const fn prompt_token(at: usize, number: usize) -> usize {
    FIRST_WORD_ID + (at * (2 * number + 1) + 17 * number) % WORD_COUNT
}

/// Runs all measurements that are possible on one running server; those not done after `limit` stay unknown.
pub(super) async fn measure_all(door: &ServerAddress, limit: Duration) -> ServerBehaviour {
    let until = Instant::now() + limit;
    let unix = matches!(door, ServerAddress::Unix(_));
    let mut measured = ServerBehaviour { unix_sockets: Some(unix), ..ServerBehaviour::default() };
    measured.web_page = timeout_at(until, test_web_page(door)).await.ok().flatten();
    measured.discards_bodies = timeout_at(until, bodies::discards_unread_body(door)).await.ok().flatten();
    measured.http_threads = timeout_at(until, test_http_threads(door)).await.ok().flatten();
    measured.stream_head = test_stream_head(door, until).await;
    measured
}
