//! Ambiguous answers of an upstream, each with the result for its client; the next client gets only its own
//! answer.

use std::collections::BTreeMap;

use warden_rig::raw::{Talk, arrived, echo, talk};
use warden_rig::{Outcome, Trouble};

use super::{PATIENCE, started};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gets {
    /// 502 from llama-warden.
    BadGateway,
    /// This status and body, complete.
    Whole(u16, &'static str),
    /// This status and a visibly broken answer, or a connection that ends without one.
    Cut(u16),
}

const GONE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nSMUGGLED";

/// Name, bytes and result. After an answer whose name ends with `-close`, the connection is closed.
fn all() -> Vec<(String, String, Gets)> {
    let mut all = Vec::new();
    for (name, fields, body) in [
        ("cl-twice", "Content-Length: 5\r\nContent-Length: 5\r\n", "hello"),
        ("cl-twice-unequal", "Content-Length: 5\r\nContent-Length: 6\r\n", "hello"),
        ("cl-list", "Content-Length: 5, 5\r\n", "hello"),
        ("cl-te", "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", "5\r\nhello\r\n0\r\n\r\n"),
        ("te-cl", "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", "5\r\nhello\r\n0\r\n\r\n"),
        ("cl-negative", "Content-Length: -5\r\n", "hello"),
        ("cl-plus", "Content-Length: +5\r\n", "hello"),
        ("cl-empty", "Content-Length: \r\n", "hello"),
        ("cl-overflow", "Content-Length: 18446744073709551621\r\n", "hello"),
        ("te-gzip", "Transfer-Encoding: gzip, chunked\r\n", "5\r\nhello\r\n0\r\n\r\n"),
        (
            "te-twice",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            "5\r\nhello\r\n0\r\n\r\n",
        ),
        ("te-identity", "Transfer-Encoding: identity\r\n", "hello"),
        ("te-xchunked", "Transfer-Encoding: xchunked\r\n", "5\r\nhello\r\n0\r\n\r\n"),
        ("space-before-colon", "Content-Length : 5\r\n", "hello"),
        ("obs-fold", "X-A: b\r\n c\r\nContent-Length: 5\r\n", "hello"),
        ("nul-in-value", "X-A: b\0c\r\nContent-Length: 5\r\n", "hello"),
        ("cr-in-value", "X-A: b\rc\r\nContent-Length: 5\r\n", "hello"),
        ("no-colon", "X-A\r\nContent-Length: 5\r\n", "hello"),
        ("name-with-space", "X A: b\r\nContent-Length: 5\r\n", "hello"),
    ] {
        all.push((name.to_owned(), format!("HTTP/1.1 200 OK\r\n{fields}\r\n{body}"), Gets::BadGateway));
    }
    for (name, bytes) in [
        ("te-in-1.0", "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
        ("no-status-line", "hello, world\r\n\r\n"),
        ("status-of-http-2", "HTTP/2.0 200 OK\r\nContent-Length: 5\r\n\r\nhello"),
        ("status-of-two-digits", "HTTP/1.1 99 OK\r\nContent-Length: 5\r\n\r\nhello"),
        ("status-of-letters", "HTTP/1.1 abc OK\r\nContent-Length: 5\r\n\r\nhello"),
        (
            "switches-protocols",
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nhello",
        ),
        ("nothing-close", ""),
        ("half-a-head-close", "HTTP/1.1 200 OK\r\nContent-Le"),
    ] {
        all.push((name.to_owned(), bytes.to_owned(), Gets::BadGateway));
    }
    let huge = format!("HTTP/1.1 200 OK\r\nX-A: {}\r\n\r\n", "a".repeat(400_000));
    all.push(("huge-head-close".to_owned(), huge, Gets::BadGateway));
    for (name, chunks) in [
        ("chunk-0x5", "0x5\r\nhello\r\n0\r\n\r\n"),
        ("chunk-overflow", "10000000000000005\r\nhello\r\n0\r\n\r\n"),
        ("chunk-bare-lf", "5\nhello\n0\n\n"),
        ("chunk-extension-lf", "5;a\nb\r\nhello\r\n0\r\n\r\n"),
        ("chunk-too-short", "6\r\nhello\r\n0\r\n\r\n"),
        ("chunk-not-ended-close", "5\r\nhello\r\n"),
    ] {
        let bytes = format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}");
        all.push((name.to_owned(), bytes, Gets::Cut(200)));
    }
    let short = "HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello".to_owned();
    all.push(("shorter-than-its-length-close".to_owned(), short, Gets::Cut(200)));
    let ok = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
    let hints = "HTTP/1.1 103 Early Hints\r\nConnection: X-Hop\r\nX-Hop: 1\r\nLink: </a>\r\n\r\n";
    for (name, bytes, gets) in [
        ("clean", ok.to_owned(), Gets::Whole(200, "hello")),
        ("answer-behind-an-answer", format!("{ok}{GONE}"), Gets::Whole(200, "hello")),
        ("garbage-behind-an-answer", format!("{ok}GARBAGE\r\n\r\n"), Gets::Whole(200, "hello")),
        (
            "answer-behind-chunks",
            format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n{GONE}"),
            Gets::Whole(200, "hello"),
        ),
        (
            "body-of-204",
            format!("HTTP/1.1 204 No Content\r\nContent-Length: 57\r\n\r\n{GONE}"),
            Gets::Whole(204, ""),
        ),
        (
            "body-of-304",
            format!("HTTP/1.1 304 Not Modified\r\nContent-Length: 57\r\n\r\n{GONE}"),
            Gets::Whole(304, ""),
        ),
        ("informational", format!("HTTP/1.1 100 Continue\r\n\r\n{hints}{ok}"), Gets::Whole(200, "hello")),
        ("informational-flood", format!("{}{ok}", hints.repeat(2000)), Gets::Whole(200, "hello")),
        ("until-close-close", "HTTP/1.1 200 OK\r\n\r\nhello".to_owned(), Gets::Whole(200, "hello")),
        ("until-close-of-1.0-close", "HTTP/1.0 200 OK\r\n\r\nhello".to_owned(), Gets::Whole(200, "hello")),
        ("early", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello".to_owned(), Gets::Whole(200, "hello")),
    ] {
        all.push((name.to_owned(), bytes, gets));
    }
    all
}

fn judge(went: &Talk, gets: Gets) -> Outcome {
    let not = |what: &str| Err(Trouble::new(format!("{what}: {went:?}")));
    if let (Gets::Cut(_), [], true) = (gets, &went.answers[..], went.closed) {
        // The answer broke off before its head was complete.
        return Ok(());
    }
    let [answer] = &went.answers[..] else { return not("not one answer") };
    if ["SMUGGLED", "GARBAGE"].iter().any(|word| answer.body.contains(word)) {
        return not("it holds bytes from behind the answer");
    }
    let head = answer.head.to_ascii_lowercase();
    if ["x-hop", "x-secret", "keep-alive:", "upgrade:"].iter().any(|name| head.contains(name)) {
        return not("fields of one connection came through");
    }
    match gets {
        Gets::BadGateway if answer.status == 502 && answer.whole && head.contains("x-warden-executed:") => {
            Ok(())
        }
        Gets::Whole(status, body) if answer.status == status && answer.body == body && answer.whole => Ok(()),
        Gets::Cut(status) if answer.status == status && !answer.whole && went.closed => Ok(()),
        _ => not(&format!("not {gets:?}")),
    }
}

#[tokio::test]
async fn every_dirty_answer_ends_with_its_own_client() -> Outcome {
    let cases = all();
    let answers: BTreeMap<String, String> =
        cases.iter().map(|(name, bytes, _)| (name.clone(), bytes.clone())).collect();
    let (warden, _log) = started(&answers).await?;
    let mut wrong = Vec::new();
    for (name, _, gets) in &cases {
        let went =
            talk(&warden.http, &format!("GET /dirty/{name} HTTP/1.1\r\nHost: x\r\n\r\n"), PATIENCE).await?;
        if let Err(trouble) = judge(&went, *gets) {
            wrong.push(format!("{name}: {}", trouble.to_string().chars().take(600).collect::<String>()));
        }
        // Several requests at once would use a connection that was kept by mistake.
        for nth in 0..3 {
            let target = format!("/next/{name}/{nth}");
            let next =
                talk(&warden.http, &format!("GET {target} HTTP/1.1\r\nHost: x\r\n\r\n"), PATIENCE).await?;
            let own = next.answers.first().map(echo).transpose().ok().flatten().unwrap_or_default();
            if arrived(&own).unwrap_or_default() != format!("GET {target} HTTP/1.1\n\n") {
                wrong.push(format!("{name}: the next client got {next:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    Ok(())
}

#[tokio::test]
async fn an_answer_that_comes_before_the_body_is_passed_on_and_ends_the_connection() -> Outcome {
    let early = "HTTP/1.1 413 Payload Too Large\r\nContent-Length: 5\r\n\r\nearly".to_owned();
    let (warden, log) = started(&BTreeMap::from([("early".to_owned(), early)])).await?;
    let mut raw = warden.http.raw().await?;
    raw.write(b"POST /dirty/early HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n").await?;
    raw.write(&vec![b'a'; 2_000_000]).await?;
    let mut all = String::new();
    while !all.contains("early") {
        let more = raw.read(PATIENCE).await?;
        assert!(!more.is_empty(), "closed without an answer: {all}");
        all.push_str(&String::from_utf8_lossy(&more));
    }
    assert!(
        all.starts_with("HTTP/1.1 413") && all.to_ascii_lowercase().contains("connection: close"),
        "{all}"
    );
    // The rest of the body looks like a request, and must not become one.
    let _closed = raw.write(super::corpus::SMUGGLED.as_bytes()).await;
    raw.to_end(PATIENCE).await?;
    assert!(!log.requests()?.iter().any(|raw| raw.contains("/smuggled")));
    Ok(())
}

#[tokio::test]
async fn fields_of_the_upstreams_connection_end_there() -> Outcome {
    let fields = "Connection: keep-alive, X-Secret\r\nX-Secret: 1\r\nKeep-Alive: timeout=5\r\nProxy-Connection: x\r\n\
                  Proxy-Authenticate: Basic\r\nTE: trailers\r\nTrailer: X-Sum\r\nUpgrade: h2c\r\nX-Own: 1\r\nX-Own: 2\r\n";
    let answer = format!("HTTP/1.1 200 Fine\r\n{fields}Content-Length: 5\r\n\r\nhello");
    let (warden, _log) = started(&BTreeMap::from([("hop".to_owned(), answer)])).await?;
    let went = talk(&warden.http, "GET /dirty/hop HTTP/1.1\r\nHost: x\r\n\r\n", PATIENCE).await?;
    let head = went.answers[0].head.to_ascii_lowercase();
    let mut names: Vec<&str> =
        head.lines().skip(1).filter_map(|line| line.split_once(':')).map(|(name, _)| name).collect();
    names.sort_unstable();
    assert_eq!(names, ["content-length", "date", "vary", "via", "x-own", "x-own", "x-request-id"], "{head}");
    Ok(())
}
