//! The questions, and what counts as an answer. The sample model talks nonsense, so form is checked and not
//! content.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use reqwest::{Client, ClientBuilder};
use serde_json::{Value, json};

/// How often a server that loads is asked again. A tiny model is ready after some 30 ms.
const POLL: Duration = Duration::from_millis(20);
/// Tokens that each answer must have; the sample model never ends by itself.
const TOKENS: u64 = 8;
/// Longest part of an answer that an error shows.
const SHOWN: usize = 300;

/// Why a check did not pass.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Fault(String);

impl Fault {
    pub(super) const fn new(why: String) -> Self {
        Self(why)
    }

    fn answer(what: &str, text: &str) -> Self {
        let shown: String = text.chars().take(SHOWN).collect();
        Self(format!("{what}: {shown}"))
    }
}

impl From<reqwest::Error> for Fault {
    fn from(error: reqwest::Error) -> Self {
        Self(error.to_string())
    }
}

type Outcome = Result<(), Fault>;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Door {
    /// On a socket in a private folder.
    Unix(PathBuf),
    /// On a port of the loopback interface.
    Port(u16),
}

impl Door {
    /// The address of a path.
    pub(crate) fn url(&self, path: &str) -> String {
        match self {
            // The host is never looked up: everything goes through the socket.
            Self::Unix(_) => format!("http://llama-server{path}"),
            Self::Port(port) => format!("http://{}:{port}{path}", Ipv4Addr::LOCALHOST),
        }
    }

    /// A client that speaks to this server alone, whatever proxy the environment names. Each request has a connection of
    /// its own: the server closes connections after streams and errors without saying so.
    pub(crate) fn client(&self) -> reqwest::Result<Client> {
        self.builder().pool_max_idle_per_host(0).build()
    }

    /// The same, but its connection stays open until it is dropped.
    pub(crate) fn lasting_client(&self) -> reqwest::Result<Client> {
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

/// Waits until `/health` answers 200. The caller bounds the time.
pub(super) async fn health(door: &Door) -> Outcome {
    let client = door.client()?;
    loop {
        // No socket yet, or 503 while loading.
        if let Ok(response) = client.get(door.url("/health")).send().await
            && response.status().is_success()
        {
            return Ok(());
        }
        tokio::time::sleep(POLL).await;
    }
}

/// `/completion` must give the tokens that were asked for.
pub(super) async fn completion(door: &Door) -> Outcome {
    let body = json!({ "prompt": "hello", "n_predict": TOKENS, "temperature": 0 });
    let text = post(door, "/completion", &body).await?;
    let answer: Value = parse(&text)?;
    let words = answer["content"].as_str().unwrap_or_default();
    if words.trim().is_empty() || answer["tokens_predicted"] != TOKENS {
        return Err(Fault::answer("a completion without its tokens", &text));
    }
    Ok(())
}

/// `/v1/chat/completions` must stream text, say why it ended, and close with `[DONE]`.
pub(super) async fn chat(door: &Door) -> Outcome {
    let body = json!({
        "messages": [{ "role": "user", "content": "hello" }],
        "max_tokens": TOKENS, "temperature": 0, "stream": true,
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
        return Err(Fault::answer("a stream that is not whole", &text));
    }
    Ok(())
}

/// `/v1/embeddings` must give a vector of numbers that are not all zero.
pub(super) async fn embedding(door: &Door) -> Outcome {
    let text = post(door, "/v1/embeddings", &json!({ "input": "hello" })).await?;
    let answer: Value = parse(&text)?;
    let vector = answer["data"][0]["embedding"].as_array();
    if vector.is_none_or(|vector| vector.iter().all(|number| number.as_f64().unwrap_or(0.0) == 0.0)) {
        return Err(Fault::answer("an embedding without numbers", &text));
    }
    Ok(())
}

pub(super) async fn post(door: &Door, path: &str, body: &Value) -> Result<String, Fault> {
    let response = door.client()?.post(door.url(path)).json(body).send().await?;
    let status = response.status();
    let text = response.text().await?;
    if status.is_success() {
        Ok(text)
    } else {
        Err(Fault::answer(&format!("{path} answered {status}"), &text))
    }
}

fn parse(text: &str) -> Result<Value, Fault> {
    serde_json::from_str(text).map_err(|_| Fault::answer("not JSON", text))
}
