//! The checks of a server's answers. The sample model's answers are nonsense, so only their form is checked.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use reqwest::{Client, ClientBuilder};
use serde_json::{Value, json};

/// Poll interval while a server loads. A tiny model is ready after some 30 ms.
const HEALTH_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Tokens requested per answer; the sample model generates no end token.
const ANSWER_TOKENS: u64 = 8;
const MAX_SHOWN_CHARS: usize = 300;

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct CheckError(String);

impl CheckError {
    pub(super) const fn new(why: String) -> Self {
        Self(why)
    }

    fn answer(what: &str, text: &str) -> Self {
        let shown: String = text.chars().take(MAX_SHOWN_CHARS).collect();
        Self(format!("{what}: {shown}"))
    }
}

impl From<reqwest::Error> for CheckError {
    fn from(error: reqwest::Error) -> Self {
        Self(error.to_string())
    }
}

pub(crate) type ServerCheckResult = Result<(), CheckError>;

/// Address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerAddress {
    /// Path of a socket in a private folder.
    Unix(PathBuf),
    /// Port of the loopback interface.
    Port(u16),
}

impl ServerAddress {
    pub(crate) fn url(&self, path: &str) -> String {
        match self {
            // The host name is never resolved: all requests use the socket.
            Self::Unix(_) => format!("http://llama-server{path}"),
            Self::Port(port) => format!("http://{}:{port}{path}", Ipv4Addr::LOCALHOST),
        }
    }

    /// A client for this server that ignores proxy settings. Each request uses a new connection: the server
    /// closes connections after streams and errors without announcing it.
    pub(crate) fn client(&self) -> reqwest::Result<Client> {
        self.builder().pool_max_idle_per_host(0).build()
    }

    /// A client whose connection stays open until it is dropped.
    pub(crate) fn persistent_client(&self) -> reqwest::Result<Client> {
        self.builder().pool_max_idle_per_host(1).pool_idle_timeout(None).build()
    }

    fn builder(&self) -> ClientBuilder {
        let builder = Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none());
        match self {
            Self::Unix(socket) => builder.unix_socket(socket.as_path()),
            Self::Port(_) => builder,
        }
    }
}

/// Waits until `/health` answers 200. The caller limits the time.
pub(crate) async fn wait_until_healthy(door: &ServerAddress) -> ServerCheckResult {
    let client = door.client()?;
    loop {
        // Until the server is ready, the socket does not exist, or the server answers 503.
        if let Ok(response) = client.get(door.url("/health")).send().await
            && response.status().is_success()
        {
            return Ok(());
        }
        tokio::time::sleep(HEALTH_POLL_INTERVAL).await;
    }
}

pub(super) async fn check_completion(door: &ServerAddress) -> ServerCheckResult {
    let body = json!({ "prompt": "hello", "n_predict": ANSWER_TOKENS, "temperature": 0 });
    let text = post(door, "/completion", &body).await?;
    let answer: Value = parse(&text)?;
    let words = answer["content"].as_str().unwrap_or_default();
    if words.trim().is_empty() || answer["tokens_predicted"] != ANSWER_TOKENS {
        return Err(CheckError::answer("a completion without its tokens", &text));
    }
    Ok(())
}

/// Checks that `/v1/chat/completions` streams text, gives a finish reason, and ends with `[DONE]`.
pub(super) async fn check_chat(door: &ServerAddress) -> ServerCheckResult {
    let body = json!({
        "messages": [{ "role": "user", "content": "hello" }],
        "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": true,
    });
    let text = post(door, "/v1/chat/completions", &body).await?;
    let mut words = String::new();
    let mut reason = None;
    let mut done = false;
    for data in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if data == "[DONE]" {
            done = true;
            break;
        }
        let event: Value = parse(data)?;
        let choice = &event["choices"][0];
        words.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        reason = choice["finish_reason"].as_str().map(str::to_owned).or(reason);
    }
    if words.trim().is_empty() || reason.is_none() || !done {
        return Err(CheckError::answer("a stream that is not whole", &text));
    }
    Ok(())
}

/// Checks that `/v1/embeddings` returns a vector that is not all zero.
pub(super) async fn check_embedding(door: &ServerAddress) -> ServerCheckResult {
    let text = post(door, "/v1/embeddings", &json!({ "input": "hello" })).await?;
    let answer: Value = parse(&text)?;
    let vector = answer["data"][0]["embedding"].as_array();
    if vector.is_none_or(|vector| vector.iter().all(|number| number.as_f64().unwrap_or(0.0) == 0.0)) {
        return Err(CheckError::answer("an embedding without numbers", &text));
    }
    Ok(())
}

pub(super) async fn post(door: &ServerAddress, path: &str, body: &Value) -> Result<String, CheckError> {
    let response = door.client()?.post(door.url(path)).json(body).send().await?;
    let status = response.status();
    let text = response.text().await?;
    if status.is_success() {
        Ok(text)
    } else {
        Err(CheckError::answer(&format!("{path} answered {status}"), &text))
    }
}

fn parse(text: &str) -> Result<Value, CheckError> {
    serde_json::from_str(text).map_err(|_| CheckError::answer("not JSON", text))
}
