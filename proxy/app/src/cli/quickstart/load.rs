//! Clients of the demonstration, which send requests (half of them streamed) and count failures.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::exit::CommandError;

/// More clients than the two slots of the demonstration's server, so that some requests always wait.
const CLIENTS: u64 = 4;
/// Enough words for some MiB of KV cache.
const PROMPT_WORDS: u64 = 150;

#[derive(Debug, Default)]
pub(super) struct ClientTally {
    pub(super) sent: u64,
    pub(super) failures: Vec<String>,
    pub(super) longest: Duration,
}

pub(super) struct DemoClients {
    stop: CancellationToken,
    clients: JoinSet<ClientTally>,
}

impl DemoClients {
    pub(super) fn start(url: &str, model: &'static str) -> Self {
        let stop = CancellationToken::new();
        let mut clients = JoinSet::new();
        for client in 0..CLIENTS {
            clients.spawn(run_client(url.to_owned(), model, client, stop.clone()));
        }
        Self { stop, clients }
    }

    /// Stops sending, and waits for the running requests.
    pub(super) async fn stop(mut self) -> ClientTally {
        self.stop.cancel();
        let mut all = ClientTally::default();
        while let Some(joined) = self.clients.join_next().await {
            match joined {
                Ok(one) => {
                    all.sent += one.sent;
                    all.failures.extend(one.failures);
                    all.longest = all.longest.max(one.longest);
                }
                Err(error) => all.failures.push(error.to_string()),
            }
        }
        all
    }
}

async fn run_client(url: String, model: &'static str, client: u64, stop: CancellationToken) -> ClientTally {
    let mut tally = ClientTally::default();
    while !stop.is_cancelled() {
        let number = tally.sent * CLIENTS + client;
        let begun = Instant::now();
        tally.sent += 1;
        let body = request_body(model, &unique_prompt(number), 16, number.is_multiple_of(2));
        if let Err(failure) = send_request(&url, &body).await {
            tally.failures.push(failure);
        }
        tally.longest = tally.longest.max(begun.elapsed());
    }
    tally
}

/// Each prompt is new to the server's prompt cache.
fn unique_prompt(number: u64) -> String {
    let syllables = ["ba", "do", "ki", "lu", "me", "no", "pi", "ra"];
    let mut state = number + 1;
    let mut text = format!("request {number}");
    for _ in 0..PROMPT_WORDS {
        // Knuth's multiplicative generator; any generator that does not repeat itself would do.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        for shift in [33, 43] {
            let pick = usize::try_from((state >> shift) % 8).unwrap_or_default();
            text.push_str(if shift == 33 { " " } else { "" });
            text.push_str(syllables.get(pick).copied().unwrap_or_default());
        }
    }
    text
}

pub(super) async fn ask_question(
    url: &str,
    model: &str,
    question: &str,
    tokens: u64,
) -> Result<String, CommandError> {
    let failed = |error| CommandError::failed(format!("the first request failed: {error}"));
    send_request(url, &request_body(model, question, tokens, false)).await.map_err(failed)
}

fn request_body(model: &str, question: &str, tokens: u64, stream: bool) -> Value {
    json!({
        "model": model, "stream": stream, "max_tokens": tokens, "temperature": 0,
        "messages": [{"role": "user", "content": question}],
    })
}

async fn send_request(url: &str, body: &Value) -> Result<String, String> {
    // Use a new client for each request: on a kept-alive connection, reqwest retries by itself and hides
    // failures.
    let client = reqwest::Client::builder().no_proxy().build().map_err(|error| error.to_string())?;
    let answer = client
        .post(format!("{url}/v1/chat/completions"))
        .json(body)
        .send()
        .await
        .map_err(|error| error.to_string())?;
    let status = answer.status();
    let text = answer.text().await.map_err(|error| format!("the answer broke off: {error}"))?;
    if !status.is_success() {
        return Err(format!("{status}: {text}"));
    }
    if body["stream"] == true { parse_stream(&text) } else { parse_answer(&text) }
}

fn parse_answer(text: &str) -> Result<String, String> {
    let answer: Value = serde_json::from_str(text).map_err(|error| format!("{error}: {text}"))?;
    answer["choices"][0]["message"]["content"]
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| format!("no content: {text}"))
}

fn parse_stream(text: &str) -> Result<String, String> {
    let mut content = String::new();
    let mut ended = false;
    for data in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if data == "[DONE]" {
            ended = true;
            continue;
        }
        let event: Value = serde_json::from_str(data).map_err(|error| format!("{error}: {data}"))?;
        if !event["error"].is_null() {
            return Err(format!("an error within the stream: {data}"));
        }
        content.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    if ended { Ok(content) } else { Err("the stream ended without [DONE]".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_counts_only_with_its_end_and_without_an_error() {
        let event = r#"data: {"choices":[{"delta":{"content":" a"}}]}"#;
        assert_eq!(parse_stream(&format!("{event}\n\n{event}\n\ndata: [DONE]\n\n")), Ok(" a a".to_owned()));
        parse_stream(&format!("{event}\n\n")).unwrap_err();
        parse_stream("data: {\"error\":{\"message\":\"x\"}}\n\ndata: [DONE]\n\n").unwrap_err();
    }

    #[test]
    fn prompts_differ() {
        assert_ne!(unique_prompt(1), unique_prompt(2));
        assert_eq!(unique_prompt(3).split(' ').count() as u64, PROMPT_WORDS + 2);
    }
}
