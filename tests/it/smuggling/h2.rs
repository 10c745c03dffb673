//! HTTP/2 fields may contain bytes that would be a line break, a second request or another length in HTTP/1,
//! which llama-warden speaks upstream. Tests build frames by hand, because no library would send these.

use std::collections::BTreeMap;
use std::time::Duration;

use warden_rig::http::Raw;
use warden_rig::raw::{self, Log, arrived};
use warden_rig::warden::Setup;
use warden_rig::{Http, Outcome, Trouble, wait_until};

use super::PATIENCE;

const HEADERS: u8 = 1;
const DATA: u8 = 0;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// `:status: 200` in HPACK's static table.
const STATUS_200: u8 = 0x88;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(0).to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Encodes fields as literals without compression; none is longer than 126 bytes.
fn fields(list: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in list {
        block.push(0);
        for text in [name, value] {
            let bytes = raw::bytes(text);
            block.push(u8::try_from(bytes.len()).unwrap_or(0));
            block.extend(bytes);
        }
    }
    block
}

/// Reads the stream to its end; returns true for a 200.
async fn outcome(raw: &mut Raw) -> Result<bool, Trouble> {
    let mut bytes: Vec<u8> = Vec::new();
    loop {
        while let Some(head) = bytes.first_chunk::<9>() {
            let length = usize::try_from(u32::from_be_bytes([0, head[0], head[1], head[2]]))?;
            let (kind, stream) = (head[3], head[8]);
            if bytes.len() < 9 + length {
                break;
            }
            match kind {
                HEADERS if stream == 1 => return Ok(bytes.get(9) == Some(&STATUS_200)),
                RST_STREAM | GOAWAY => return Ok(false),
                _ => {}
            }
            bytes.drain(..9 + length);
        }
        let more = raw.read(PATIENCE).await?;
        if more.is_empty() {
            return Ok(false);
        }
        bytes.extend(more);
    }
}

/// Sends a request, each part of `data` in a frame; returns true for a 200.
async fn send(http: &Http, list: &[(&str, &str)], data: &[&str]) -> Result<bool, Trouble> {
    let mut raw = http.raw().await?;
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(4, 0, 0, &[]));
    let end = |last: bool| if last { END_STREAM } else { 0 };
    bytes.extend(frame(HEADERS, END_HEADERS | end(data.is_empty()), 1, &fields(list)));
    for (nth, piece) in data.iter().enumerate() {
        bytes.extend(frame(DATA, end(nth + 1 == data.len()), 1, piece.as_bytes()));
    }
    raw.write(&bytes).await?;
    outcome(&mut raw).await
}

const GET: [(&str, &str); 4] =
    [(":method", "GET"), (":scheme", "http"), (":authority", "x"), (":path", "/e")];
const POST: [(&str, &str); 4] =
    [(":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", "/e")];

/// Name, fields, and parts of the body.
type Sent<'a> = (&'a str, Vec<(&'a str, &'a str)>, &'a [&'a str]);

fn with<'a>(name: &str, value: &'a str) -> Vec<(&'a str, &'a str)> {
    let mut list: Vec<(&str, &str)> = GET.to_vec();
    for entry in &mut list {
        if entry.0 == name {
            entry.1 = value;
        }
    }
    list
}

fn and<'a>(base: &[(&'a str, &'a str)], more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    base.iter().chain(more).copied().collect()
}

async fn started() -> Result<(warden_rig::Warden, Log), Trouble> {
    let (setup, log) = raw::model(Setup::new()?.top("server.h2c = true"), &BTreeMap::new())?;
    let warden = setup.start().await?;
    warden.until_ready(1).await?;
    Ok((warden, log))
}

#[tokio::test]
async fn a_request_of_http_2_that_would_be_another_in_http_1_goes_nowhere() -> Outcome {
    let (warden, log) = started().await?;
    let line = "/e HTTP/1.1\r\nhost: x\r\n\r\nGET /smuggled";
    let cases: Vec<Sent> = vec![
        ("path with a request in it", with(":path", line), &[]),
        ("path with a space", with(":path", "/e f"), &[]),
        ("path with an LF", with(":path", "/e\nf"), &[]),
        ("path with a NUL", with(":path", "/e\0f"), &[]),
        ("path empty", with(":path", ""), &[]),
        ("path relative", with(":path", "e"), &[]),
        ("path an asterisk", with(":path", "*"), &[]),
        ("path twice", and(&GET, &[(":path", "/f")]), &[]),
        ("path missing", GET[..3].to_vec(), &[]),
        ("method with a request in it", with(":method", "GET /smuggled HTTP/1.1\r\nx: y\r\n\r\nGET"), &[]),
        ("method with a space", with(":method", "GET /e"), &[]),
        ("method missing", GET[1..].to_vec(), &[]),
        ("authority with an LF", with(":authority", "x\r\ny: z"), &[]),
        ("authority with a space", with(":authority", "x y"), &[]),
        ("authority with a path", with(":authority", "x/y"), &[]),
        ("authority with a user", with(":authority", "a@x"), &[]),
        ("host that differs", and(&GET, &[("host", "y")]), &[]),
        ("host twice", and(&GET, &[("host", "x"), ("host", "x")]), &[]),
        ("scheme unknown", with(":scheme", "ftp"), &[]),
        ("pseudo-header unknown", and(&GET, &[(":x", "y")]), &[]),
        ("pseudo-header of an answer", and(&GET, &[(":status", "200")]), &[]),
        ("pseudo-header behind a field", and(&[("a", "b")], &GET), &[]),
        ("field in capitals", and(&GET, &[("X-A", "b")]), &[]),
        ("field name with a colon", and(&GET, &[("x-a: b\r\nx", "c")]), &[]),
        ("field name with a space", and(&GET, &[("x a", "b")]), &[]),
        ("field name empty", and(&GET, &[("", "b")]), &[]),
        ("field value with lines", and(&GET, &[("x-a", "b\r\nx-c: d")]), &[]),
        ("field value with an LF", and(&GET, &[("x-a", "b\nc")]), &[]),
        ("field value with a CR", and(&GET, &[("x-a", "b\rc")]), &[]),
        ("field value with a NUL", and(&GET, &[("x-a", "b\0c")]), &[]),
        ("field of a connection", and(&GET, &[("connection", "x-a"), ("x-a", "b")]), &[]),
        ("keep-alive", and(&GET, &[("keep-alive", "timeout=5")]), &[]),
        ("proxy-connection", and(&GET, &[("proxy-connection", "close")]), &[]),
        ("upgrade", and(&GET, &[("upgrade", "websocket")]), &[]),
        ("transfer-encoding", and(&POST, &[("transfer-encoding", "chunked")]), &["0\r\n\r\n"]),
        ("te other than trailers", and(&GET, &[("te", "gzip")]), &[]),
        ("length above the body", and(&POST, &[("content-length", "9")]), &["hello"]),
        ("length below the body", and(&POST, &[("content-length", "3")]), &["hello"]),
        ("length of 0 with a body", and(&POST, &[("content-length", "0")]), &["hello"]),
        ("length without a body", and(&POST, &[("content-length", "5")]), &[]),
        ("length negative", and(&POST, &[("content-length", "-5")]), &["hello"]),
        ("lengths that differ", and(&POST, &[("content-length", "5"), ("content-length", "6")]), &["hello"]),
        ("CONNECT", vec![(":method", "CONNECT"), (":authority", "x:80")], &[]),
        ("expectation unknown", and(&POST, &[("expect", "x")]), &["hello"]),
    ];
    let mut wrong = Vec::new();
    for (name, list, data) in &cases {
        let before = log.requests()?.len();
        let passed = send(&warden.http, list, data).await?;
        let clean = send(&warden.http, &with(":path", "/clean"), &[]).await?;
        let got: Vec<String> = log.requests()?.split_off(before);
        if passed || !clean || got.len() != 1 || !got[0].starts_with("GET /clean HTTP/1.1\r\n") {
            wrong.push(format!("{name}: passed {passed}, clean {clean}, upstream got {got:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    Ok(())
}

#[tokio::test]
async fn a_request_of_http_2_arrives_as_one_of_http_1() -> Outcome {
    let (warden, log) = started().await?;
    let twice = [("x-a", "b"), ("x-a", "c"), ("te", "trailers"), ("host", "x"), ("x_b", "d")];
    assert!(send(&warden.http, &and(&with(":path", "/e?a=%20"), &twice), &[]).await?);
    assert!(send(&warden.http, &and(&POST, &[("content-length", "10")]), &["hello", "world"]).await?);
    assert!(send(&warden.http, &POST, &["hello", "", "world"]).await?);
    wait_until("three requests have arrived", Duration::from_secs(5), async || {
        log.requests().is_ok_and(|all| all.len() == 3)
    })
    .await?;
    let all: Vec<String> = log.requests()?.iter().map(|raw| arrived(raw)).collect::<Result<_, Trouble>>()?;
    let post = "POST /e HTTP/1.1\n\nhelloworld";
    assert_eq!(all, ["GET /e?a=%20 HTTP/1.1\nx-a: b\nx-a: c\n\n", post, post]);
    assert!(log.requests()?[0].contains("via: 2 llama-warden-"));
    Ok(())
}
