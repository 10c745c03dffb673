//! llama-server with cpp-httplib before 0.40 leaves an unread body in the connection and parses it as the
//! next request; any llama-server does so after an invalid head. No such body may become a request of another
//! client, or bypass keys and rules. `raw-llama` plays both.

use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use warden_rig::raw::{self, Log, arrived, echo, talk};
use warden_rig::warden::Setup;
use warden_rig::{Context as _, Outcome, Trouble, Warden, binaries};

use super::corpus::SMUGGLED;
use super::{PATIENCE, started};
use crate::drop_in::words;

/// Name, request line and further fields; the body of each is a request.
fn attacks() -> Vec<(String, String, String)> {
    let mut all = Vec::new();
    for method in
        ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "FROB", "PRI", "TRACE", "CONNECT"]
    {
        for target in ["/unread", "/v1/nothing", "/props", "/cors-proxy", "/index.html"] {
            all.push((format!("{method} {target}"), format!("{method} {target} HTTP/1.1"), String::new()));
        }
    }
    for (name, field) in [
        ("a bad Accept", "Accept: ;;q=x,,"),
        ("a bad Range", "Range: bytes"),
        ("a Content-Encoding", "Content-Encoding: br"),
        ("a form without a boundary", "Content-Type: multipart/form-data"),
        ("Expect", "Expect: 100-continue"),
        ("a Connection of the client's", "Connection: keep-alive, close"),
    ] {
        for target in ["/v1/chat/completions", "/tokenize", "/e"] {
            let line = format!("POST {target} HTTP/1.1");
            all.push((format!("{name} at {target}"), line, format!("{field}\r\n")));
        }
    }
    for count in [94, 96, 97, 98] {
        let fields = (0..count).fold(String::new(), |text, nth| text + &format!("X-{nth}: a\r\n"));
        all.push((format!("{count} fields"), "POST /e HTTP/1.1".to_owned(), fields));
    }
    for length in [8100, 8192, 8300, 20_000] {
        let long = "a".repeat(length);
        all.push((format!("a field of {length}"), "POST /e HTTP/1.1".to_owned(), format!("X-A: {long}\r\n")));
        all.push((format!("a target of {length}"), format!("POST /{long} HTTP/1.1"), String::new()));
        all.push((
            format!("a method of {length}"),
            format!("{} /e HTTP/1.1", "A".repeat(length)),
            String::new(),
        ));
    }
    all
}

/// Bytes of the request, with its body by length or in chunks.
fn bytes(line: &str, fields: &str, chunked: bool) -> String {
    let size = SMUGGLED.len();
    let head = format!("{line}\r\nHost: x\r\n{fields}");
    if chunked {
        format!("{head}Transfer-Encoding: chunked\r\n\r\n{size:x}\r\n{SMUGGLED}\r\n0\r\n\r\n")
    } else {
        format!("{head}Content-Length: {size}\r\n\r\n{SMUGGLED}")
    }
}

/// Checks the state after the answer to such a request.
async fn judge(warden: &Warden, log: &Log, name: &str, request: &str) -> Outcome {
    let before = log.requests()?.len();
    let went = talk(&warden.http, request, PATIENCE).await?;
    let not = |what: &str| Err(Trouble::new(format!("{name}: {what}; it became {went:?}")));
    if went.answers.len() > 2 || went.answers.iter().filter(|answer| answer.status >= 200).count() != 1 {
        return not("not one answer");
    }
    // Several requests at once would get the answer left in a connection.
    for nth in 0..3 {
        let target = format!("/clean?{nth}");
        let next = talk(&warden.http, &format!("GET {target} HTTP/1.1\r\nHost: x\r\n\r\n"), PATIENCE).await?;
        let own = next.answers.first().map(echo).transpose().ok().flatten().unwrap_or_default();
        if arrived(&own).unwrap_or_default() != format!("GET {target} HTTP/1.1\n\n") {
            return not(&format!("the next client got {next:?}"));
        }
    }
    let all = log.by_connection()?.split_off(before);
    for (at, (connection, raw)) in all.iter().enumerate() {
        if raw.starts_with("GET /smuggled") {
            return not("its body was read as a request");
        }
        let has_body = raw.contains("content-length: 3") || raw.contains("transfer-encoding: ");
        let ends = raw.contains("\r\nconnection: close\r\n");
        let is_last = all[at + 1..].iter().all(|(later, _)| later != connection);
        if has_body && !(ends && is_last) {
            return not(&format!("a body went on a connection that is kept: {raw:?}"));
        }
    }
    Ok(())
}

async fn try_all(warden: &Warden, log: &Log) -> Outcome {
    let mut wrong = Vec::new();
    for (name, line, fields) in attacks() {
        for chunked in [false, true] {
            if let Err(trouble) = judge(warden, log, &name, &bytes(&line, &fields, chunked)).await {
                wrong.push(trouble.to_string().chars().take(500).collect::<String>());
            }
        }
    }
    assert!(wrong.is_empty(), "{} went wrong:\n{}", wrong.len(), wrong.join("\n"));
    Ok(())
}

/// Checks that raw-llama without a proxy parses a body as a request.
async fn leaves_bodies(warden: &Warden, log: &Log) -> Outcome {
    let backend = warden.backends().first().and_then(|process| process.http()).context("no backend")?;
    let went = talk(&backend, &bytes("OPTIONS /e HTTP/1.1", "", false), PATIENCE).await?;
    assert_eq!(went.answers.len(), 2, "{went:?}");
    assert!(log.requests()?.last().is_some_and(|raw| raw.starts_with("GET /smuggled")), "{log:?}");
    Ok(())
}

async fn old() -> Result<(Warden, Log), Trouble> {
    let (mut setup, log) = raw::model(Setup::new()?, &BTreeMap::new())?;
    setup.home.env.insert("RAW_LLAMA_BODIES".into(), "leave".into());
    let warden = setup.start().await?;
    warden.until_ready(1).await?;
    Ok((warden, log))
}

#[tokio::test]
async fn no_body_is_read_as_a_request_by_a_server_that_leaves_it_unread() -> Outcome {
    let (warden, log) = old().await?;
    leaves_bodies(&warden, &log).await?;
    try_all(&warden, &log).await
}

#[tokio::test]
async fn nor_in_the_place_of_a_single_llama_server() -> Outcome {
    let mut setup = crate::drop_in::setup()?;
    setup.home.env.insert("RAW_LLAMA_BODIES".into(), "leave".into());
    let program = setup.home.path().join("bin/llama-server");
    std::fs::remove_file(&program)?;
    symlink(binaries::raw_llama()?, program)?;
    let log = setup.home.path().join("raw.jsonl");
    setup.home.env.insert("RAW_LLAMA_LOG".into(), log.clone().into());
    let warden = setup.start_with(&words(&["serve", "--", "-m", "model.gguf", "--port", "0"])).await?;
    warden.until_ready(1).await?;
    try_all(&warden, &Log::at(&log)).await
}

fn write_keys(home: &Path) -> Outcome {
    let path = home.join("keys.toml");
    std::fs::write(&path, "[eve]\nkey = \"sk-eve-0123456789abcdef\"\nmodels = [\"m\"]\n")?;
    Ok(std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?)
}

#[tokio::test]
async fn nor_past_the_keys_and_rules_of_a_client() -> Outcome {
    let setup = Setup::new()?;
    write_keys(setup.home.path())?;
    let (mut setup, log) = raw::model(setup.top("server.keys = \"keys.toml\""), &BTreeMap::new())?;
    setup.home.env.insert("RAW_LLAMA_BODIES".into(), "leave".into());
    let warden = setup.start().await?;
    warden.until_ready(1).await?;
    for (name, line, fields) in attacks() {
        let fields = format!("Authorization: Bearer sk-eve-0123456789abcdef\r\n{fields}");
        for request in [bytes(&line, &fields, false), bytes(&line, "", true)] {
            talk(&warden.http, &request, PATIENCE).await?;
        }
        assert!(!log.requests()?.iter().any(|raw| raw.starts_with("GET /smuggled")), "{name}");
    }
    Ok(())
}

#[tokio::test]
async fn a_body_of_a_request_that_needs_none_is_taken_whole_and_goes_nowhere() -> Outcome {
    let (warden, log) = started(&BTreeMap::new()).await?;
    let body = "x".repeat(700_000);
    let mut client = warden.http.raw().await?;
    for nth in 0..2 {
        // On one connection, the next request begins where the body ends.
        let head = format!("GET /e?{nth} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
        client.write(head.as_bytes()).await?;
        client.write(body.as_bytes()).await?;
        let mut all = String::new();
        while !all.contains("\"target\"") {
            let more = client.read(PATIENCE).await?;
            assert!(!more.is_empty(), "closed: {all}");
            all.push_str(&String::from_utf8_lossy(&more));
        }
        assert!(all.starts_with("HTTP/1.1 200"), "{all}");
    }
    let got = log.by_connection()?;
    assert!(
        got.iter().all(|(_, raw)| raw.ends_with("\r\n\r\n") && !raw.contains("content-length")),
        "{got:?}"
    );
    assert_eq!(
        got.iter().map(|(connection, _)| connection).min(),
        got.iter().map(|(it, _)| it).max(),
        "{got:?}"
    );
    Ok(())
}
