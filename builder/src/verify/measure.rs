//! Measures a server's behaviour by tests, not by name or build number. Nothing here fails a verification:
//! a failed measurement leaves the fact unknown.
//!
//! ```text
//!  start with two HTTP threads -> health -> / -> unread bodies -> one connection more than threads
//!        -> long prompts, streamed -> stop
//! ```

use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout, timeout_at};

use super::bodies;
use super::checks::Door;
use crate::sample_model::{FIRST_WORD, WORDS};

use super::measured::{AGREEING, HttpThreads, Measured, StreamHead, Try, stream_head};

/// Flags of the measured server. One slot, so that requests run in order; small batches, so that its model
/// takes some milliseconds for a few tokens.
pub(super) const FLAGS: [&str; 8] = ["-np", "1", "-b", "64", "-ub", "16", "--threads-http", THREADS];
/// Value of `--threads-http`.
const THREADS: &str = "2";
/// The same value as a number.
const FIXED: usize = 2;
/// Connections opened: if all are served at once, threads are created on demand.
const CONNECTIONS: usize = 6;
/// Time limit for a connection to be served; mostly this takes less than a millisecond.
const SERVED: Duration = Duration::from_secs(1);
/// Time limit of the test: llama-server closes a connection after five idle seconds, which frees its
/// thread, so later observations would be meaningless.
const IDLE: Duration = Duration::from_secs(4);

/// Tokens of the first prompt.
const PROMPT: usize = 256;
/// Tokens of the longest prompt; prompt and answer fit into the context.
const LONGEST: usize = 2000;
/// Context size of the measured server.
pub(super) const CONTEXT: &str = "4096";
/// Maximum number of streams.
const TRIES: usize = 8;

/// Tests if `/` is a web page. `None`: no answer, or an unexpected one.
async fn web_page(door: &Door) -> Option<bool> {
    let client = door.client().ok()?;
    let answer = client.get(door.url("/")).header("accept", "text/html").header("accept-encoding", "gzip");
    let answer = timeout(SERVED * 10, answer.send()).await.ok()?.ok()?;
    match answer.status() {
        status if status.is_success() => Some(true),
        StatusCode::NOT_FOUND => Some(false),
        _ => None,
    }
}

/// Tests if connections beyond the number of threads are served while the others stay open.
async fn http_threads(door: &Door) -> Option<HttpThreads> {
    // Repeated: a stalled machine looks like a server with too few threads.
    let first = connections(door).await?;
    (first == connections(door).await?).then_some(first)
}

async fn connections(door: &Door) -> Option<HttpThreads> {
    let begun = Instant::now();
    // Each client keeps its connection open.
    let mut held = Vec::new();
    while held.len() < CONNECTIONS {
        let client = door.lasting_client().ok()?;
        let mut answer = Box::pin(client.get(door.url("/health")).send());
        match timeout(SERVED, &mut answer).await {
            Ok(answer) => {
                // Read the whole body, else the connection is closed instead of idle.
                answer.ok()?.bytes().await.ok()?;
                held.push(client);
            }
            Err(_) if held.len() == FIXED => {
                // The waiting connection must be served as soon as another one closes.
                drop(held.pop());
                let served = timeout(SERVED, answer).await.is_ok_and(|answer| answer.is_ok());
                return (served && begun.elapsed() < IDLE).then_some(HttpThreads::Fixed);
            }
            Err(_) => return None,
        }
    }
    (begun.elapsed() < IDLE).then_some(HttpThreads::OnDemand)
}

/// Tests when the head of a streamed answer is sent: repeats with longer prompts until the result is clear.
async fn head(door: &Door, until: Instant) -> Option<StreamHead> {
    let mut tries = Vec::new();
    let mut tokens = PROMPT;
    for number in 0..TRIES {
        let shown = timeout_at(until, stream(door, tokens, number)).await.ok()??;
        if shown.is_long() {
            tries.push(shown);
            if tries.len() >= AGREEING
                && let Some(order) = stream_head(&tries)
            {
                return Some(order);
            }
        } else if tokens < LONGEST {
            tokens = (tokens * 3).min(LONGEST);
        }
    }
    stream_head(&tries)
}

/// Streams one answer. `number` varies the prompt, so that no part of it is cached.
async fn stream(door: &Door, tokens: usize, number: usize) -> Option<Try> {
    let client = door.client().ok()?;
    // Token ids, so that the prompt's length is exact.
    let prompt: Vec<usize> = (0..tokens).map(|at| token_of(at, number)).collect();
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
        // Between events come keep-alive comments.
        if token.is_none() && text.windows(5).any(|window| window == b"data:") {
            token = Some(begun.elapsed().saturating_sub(head));
        }
    }
    let text = String::from_utf8_lossy(&text);
    let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let prompt = events.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let prompt = prompt.filter_map(|event| event["timings"]["prompt_ms"].as_f64()).next_back();
    let prompt = prompt.and_then(|millis| Duration::try_from_secs_f64(millis / 1000.0).ok());
    Some(Try { head, token: token?, prompt })
}

/// A pseudo-random word of the sample model.
const fn token_of(at: usize, number: usize) -> usize {
    FIRST_WORD + (at * (2 * number + 1) + 17 * number) % WORDS
}

/// Runs all measurements that are possible on one running server; those not done after `limit` stay unknown.
pub(super) async fn all(door: &Door, limit: Duration) -> Measured {
    let until = Instant::now() + limit;
    let unix = matches!(door, Door::Unix(_));
    let mut measured = Measured { unix_sockets: Some(unix), ..Measured::default() };
    measured.web_page = timeout_at(until, web_page(door)).await.ok().flatten();
    measured.discards_bodies = timeout_at(until, bodies::discards(door)).await.ok().flatten();
    measured.http_threads = timeout_at(until, http_threads(door)).await.ok().flatten();
    measured.stream_head = head(door, until).await;
    measured
}
