//! `raw-llama` and raw bytes, for tests of ambiguous messages. A string stands for the bytes with the numbers
//! of its characters.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, timeout};

use crate::http::Raw;
use crate::warden::{Setup, json_lines};
use crate::{Context as _, Http, Trouble, binaries};

/// Converts characters to the bytes of the same number, others to their UTF-8.
pub fn bytes(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    for char in text.chars() {
        match u8::try_from(u32::from(char)) {
            Ok(byte) => bytes.push(byte),
            Err(_) => bytes.extend(char.to_string().into_bytes()),
        }
    }
    bytes
}

/// Converts bytes to the characters of the same number.
pub fn text(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

/// Log of the requests that raw-llama got.
#[derive(Debug, Clone)]
pub struct Log(PathBuf);

impl Log {
    /// Log in this file.
    pub fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// Returns the requests in order, each with the number of its connection.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn by_connection(&self) -> Result<Vec<(u64, String)>, Trouble> {
        let number = |line: &Value| line["connection"].as_u64().unwrap_or_default();
        let lines = json_lines(&self.0)?;
        Ok(lines.iter().map(number).zip(self.requests()?).collect())
    }

    /// Returns the raw requests of all connections, in order.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn requests(&self) -> Result<Vec<String>, Trouble> {
        let lines = json_lines(&self.0)?;
        Ok(lines.iter().map(|line| line["raw"].as_str().unwrap_or_default().to_owned()).collect())
    }
}

/// Adds the model `m`: a `raw-llama` that gives the answer NAME at `/dirty/NAME`.
///
/// # Errors
/// A file cannot be written, or raw-llama cannot be built.
pub fn model(setup: Setup, answers: &BTreeMap<String, String>) -> Result<(Setup, Log), Trouble> {
    let log = setup.home.path().join("raw.jsonl");
    let answers = setup.home.file("answers.json", serde_json::to_string(answers)?)?;
    let lines = format!(
        "binary = '{}'\nmodel = '{}'\nenv = {{ RAW_LLAMA_LOG = '{}', RAW_LLAMA_ANSWERS = '{}' }}\npreload = true\n",
        binaries::raw_llama()?.display(),
        setup.home.path().join("model.gguf").display(),
        log.display(),
        answers.display(),
    );
    Ok((setup.model("m", &lines), Log(log)))
}

/// Raw answer of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RawAnswer {
    /// Status of the answer.
    pub status: u16,
    /// Head without the empty line.
    pub head: String,
    /// Body without framing.
    pub body: String,
    /// True if the answer is complete.
    pub whole: bool,
    /// True if only the end of the connection ends the answer.
    pub until_close: bool,
}

/// Splits the bytes of a connection into answers, informational ones included.
pub fn answers(mut all: &str, no_body: bool) -> Vec<RawAnswer> {
    let mut found = Vec::new();
    while let Some((head, rest)) = all.split_once("\r\n\r\n") {
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
        let field = |wanted: &str| {
            let mut lines = head.lines().filter_map(|line| line.split_once(':'));
            lines.find(|(name, _)| name.eq_ignore_ascii_case(wanted)).map(|(_, value)| value.trim())
        };
        let mut answer = RawAnswer { status, head: head.to_owned(), whole: true, ..RawAnswer::default() };
        all = rest;
        if status < 200 || status == 204 || status == 304 || no_body {
        } else if field("transfer-encoding").is_some() {
            answer.whole = false;
            while let Some((size, rest)) = all.split_once("\r\n") {
                let size = usize::from_str_radix(size.split(';').next().unwrap_or_default(), 16).unwrap_or(0);
                if size == 0 {
                    // Trailers stay in the body, because a test looks for them.
                    let end = if rest.starts_with("\r\n") {
                        2
                    } else {
                        rest.find("\r\n\r\n").map_or(0, |at| at + 4)
                    };
                    answer.whole = end > 0;
                    answer.body.push_str(rest[..end].trim_end());
                    all = &rest[end..];
                    break;
                }
                let Some((chunk, rest)) = rest.split_at_checked(size) else {
                    all = "";
                    break;
                };
                answer.body.push_str(chunk);
                all = rest.strip_prefix("\r\n").unwrap_or(rest);
            }
        } else if let Some(length) = field("content-length").and_then(|word| word.parse::<usize>().ok()) {
            let here = length.min(all.len());
            all[..here].clone_into(&mut answer.body);
            answer.whole = here == length;
            all = &all[here..];
        } else {
            all.clone_into(&mut answer.body);
            answer.until_close = true;
            all = "";
        }
        let whole = answer.whole;
        found.push(answer);
        if !whole {
            break;
        }
    }
    found
}

/// Outcome of a connection.
#[derive(Debug, Clone)]
pub struct Talk {
    /// Answers in order.
    pub answers: Vec<RawAnswer>,
    /// True if the peer closed first; otherwise the client half-closed after the first answer or after
    /// `patience`.
    pub closed: bool,
}

impl Talk {
    /// Status of the first final answer, or 0.
    pub fn status(&self) -> u16 {
        self.answers.iter().map(|answer| answer.status).find(|status| *status >= 200).unwrap_or(0)
    }
}

/// Sends bytes on a new connection, waits at most `patience` for an answer, half-closes, and reads to the
/// end.
///
/// # Errors
/// The server does not listen, or the connection is still open after twenty seconds.
pub async fn talk(http: &Http, sent: &str, patience: Duration) -> Result<Talk, Trouble> {
    let mut raw: Raw = http.raw().await?;
    // The peer may refuse and close while the bytes are sent.
    let _refused = raw.write(&bytes(sent)).await;
    let no_body = sent.starts_with("HEAD ");
    let (mut all, mut closed) = (Vec::new(), false);
    let until = Instant::now() + patience;
    let is_final = |answer: &RawAnswer| answer.whole && !answer.until_close && answer.status >= 200;
    while !closed && !answers(&text(&all), no_body).iter().any(is_final) {
        let left = until.saturating_duration_since(Instant::now());
        let Ok(more) = timeout(left, raw.read(patience)).await else { break };
        let Ok(more) = more else { break };
        closed = more.is_empty();
        all.extend(more);
    }
    if !closed {
        // A server that announces the end must close by itself.
        let announced = text(&all).to_ascii_lowercase().contains("\r\nconnection: close\r\n");
        if announced {
            let deadline = Duration::from_secs(5);
            while let Ok(more) = raw.read(deadline).await {
                closed = more.is_empty();
                if closed {
                    break;
                }
                all.extend(more);
            }
        }
        let _gone = raw.half_close().await;
        loop {
            let more = raw.read(Duration::from_secs(20)).await?;
            if more.is_empty() {
                break;
            }
            all.extend(more);
        }
    }
    Ok(Talk { answers: answers(&text(&all), no_body), closed })
}

/// Normalizes a request that arrived: request line, fields sorted by name, empty line, body without framing.
/// Fields of every forwarded request are checked and left out, as is the `connection: close` allowed with a
/// body.
///
/// # Errors
/// `host`, `via` or `x-request-id` is missing or repeated, or there is not exactly one framing.
pub fn arrived(raw: &str) -> Result<String, Trouble> {
    let (head, body) = raw.split_once("\r\n\r\n").context(format!("no head: {raw:?}"))?;
    let mut lines = head.split("\r\n");
    let first = lines.next().unwrap_or_default().to_owned();
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in lines {
        let (name, value) = line.split_once(": ").or(line.split_once(':')).context(line)?;
        fields.push((name.to_owned(), value.to_owned()));
    }
    let mut take = |name: &str| -> Vec<String> {
        let found =
            fields.iter().filter(|(known, _)| known == name).map(|(_, value)| value.clone()).collect();
        fields.retain(|(known, _)| known != name);
        found
    };
    for name in ["host", "via", "x-request-id"] {
        let found = take(name);
        if found.len() != 1 {
            return Err(Trouble::new(format!("{name}: {found:?} in {raw:?}")));
        }
    }
    let connection = take("connection");
    if !connection.is_empty() && (connection != ["close"] || body.is_empty()) {
        return Err(Trouble::new(format!("connection: {connection:?} in {raw:?}")));
    }
    let (lengths, codings) = (take("content-length"), take("transfer-encoding"));
    let body = match (&lengths[..], &codings[..]) {
        ([], []) if body.is_empty() => String::new(),
        ([length], []) if *length == body.len().to_string() => body.to_owned(),
        ([], [coding]) if coding == "chunked" => {
            let whole = format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{body}");
            answers(&whole, false).first().map(|answer| answer.body.clone()).unwrap_or_default()
        }
        _ => return Err(Trouble::new(format!("framing {lengths:?} {codings:?} of {raw:?}"))),
    };
    fields.sort();
    let fields = fields.iter().fold(String::new(), |all, (name, value)| all + name + ": " + value + "\n");
    Ok(format!("{first}\n{fields}\n{body}"))
}

/// Returns the request that an answer echoes in its body.
///
/// # Errors
/// The body is no echo.
pub fn echo(answer: &RawAnswer) -> Result<String, Trouble> {
    let json: Value = serde_json::from_slice(&bytes(&answer.body)).context(answer.body.clone())?;
    Ok(json["raw"].as_str().context("no raw")?.to_owned())
}
