//! `raw-llama`: an upstream without an HTTP library. It takes the necessary flags of llama-server and answers
//! health probes. It records the exact bytes of every other request that it finds, and sends them back.
//! `/dirty/NAME` returns the raw bytes with that name in its answers file.
//!
//! It parses requests as a plain server would: a head up to an empty line, then a body by `Content-Length` or
//! in chunks. So everything that a proxy lets through becomes a request, and a line in the log.
//!
//! `RAW_LLAMA_BODIES` makes it answer some requests before it reads their bodies ([`unread`]).
//! `RAW_LLAMA_LOG` names the log, `RAW_LLAMA_ANSWERS` the JSON file with the answers. Bytes are written as
//! the characters of the same number.

mod unread;

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use serde_json::json;

use self::unread::{Bodies, Framing};

/// Longer than any request of a test.
const LIMIT: u64 = 1 << 20;

struct Shared {
    log: Option<PathBuf>,
    answers: BTreeMap<String, String>,
    bodies: Option<Bodies>,
    connections: AtomicU64,
}

#[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
fn main() -> ExitCode {
    let flags: Vec<String> = std::env::args().skip(1).collect();
    if flags.iter().any(|flag| flag == "--version") {
        say("version: 0.0.0-raw (build 1, commit 000000000)");
        return ExitCode::SUCCESS;
    }
    if flags.iter().any(|flag| flag == "--help") {
        say("--host HOST   a UNIX socket, if the address ends with .sock");
        return ExitCode::SUCCESS;
    }
    let host = flags.iter().position(|flag| flag == "--host").and_then(|at| flags.get(at + 1));
    let Some(socket) = host.and_then(|hosts| {
        hosts.split(',').find(|host| Path::new(host).extension().is_some_and(|end| end == "sock"))
    }) else {
        say("raw-llama: needs --host PATH.sock");
        return ExitCode::FAILURE;
    };
    let answers = std::env::var_os("RAW_LLAMA_ANSWERS").and_then(|file| std::fs::read(file).ok());
    let shared = Arc::new(Shared {
        log: std::env::var_os("RAW_LLAMA_LOG").map(PathBuf::from),
        answers: answers.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default(),
        bodies: std::env::var("RAW_LLAMA_BODIES").ok().and_then(|value| Bodies::from_variable(&value)),
        connections: AtomicU64::new(0),
    });
    let listener = match UnixListener::bind(socket) {
        Ok(listener) => listener,
        Err(error) => {
            say(&format!("raw-llama: {socket}: {error}"));
            return ExitCode::FAILURE;
        }
    };
    say(&format!("srv  llama_server: listening on unix://{socket}"));
    say("srv  llama_server: model loaded");
    for stream in listener.incoming().flatten() {
        let shared = Arc::clone(&shared);
        thread::spawn(move || {
            let _ended = serve(&shared, stream);
        });
    }
    ExitCode::SUCCESS
}

fn say(line: &str) {
    let _ignored = writeln!(io::stderr(), "{line}");
}

fn text(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

fn bytes(text: &str) -> Vec<u8> {
    text.chars().map(|char| u8::try_from(u32::from(char)).unwrap_or(b'?')).collect()
}

fn serve(shared: &Shared, mut stream: UnixStream) -> io::Result<()> {
    let connection = shared.connections.fetch_add(1, Ordering::Relaxed);
    let mut reader = BufReader::new(stream.try_clone()?);
    for nth in 0_u64.. {
        let (raw, early) = match shared.bodies {
            None => {
                let Some(raw) = request(&mut reader)? else { return Ok(()) };
                (text(&raw), None)
            }
            Some(bodies) => {
                let Some(request) = unread::next(&mut reader)? else { return Ok(()) };
                (text(&request.raw), Some((request, bodies)))
            }
        };
        let status = early.as_ref().map_or("200 OK", |(request, _)| request.status);
        let goes_on = |reader: &mut BufReader<UnixStream>| match &early {
            Some((request, bodies)) => request.goes_on(reader, *bodies),
            None => Ok(true),
        };
        let has_body = !raw.starts_with("HEAD ");
        let target = raw.split(' ').nth(1).unwrap_or_default().to_owned();
        let path = target.split('?').next().unwrap_or_default();
        if ["/health", "/props", "/slots", "/metrics", "/v1/models"].contains(&path) {
            answer(&mut stream, status, "{\"status\":\"ok\"}", has_body)?;
            if goes_on(&mut reader)? {
                continue;
            }
            return Ok(());
        }
        let line = json!({ "connection": connection, "nth": nth, "target": target, "raw": raw }).to_string();
        if let Some(log) = &shared.log {
            let mut file = OpenOptions::new().create(true).append(true).open(log)?;
            file.write_all(format!("{line}\n").as_bytes())?;
        }
        match path.strip_prefix("/dirty/").and_then(|name| shared.answers.get(name)) {
            Some(raw) => {
                stream.write_all(&bytes(raw))?;
                if path.ends_with("-close") {
                    return Ok(());
                }
            }
            None => answer(&mut stream, status, &line, has_body)?,
        }
        if !goes_on(&mut reader)? {
            return Ok(());
        }
    }
    Ok(())
}

fn answer(stream: &mut UnixStream, status: &str, body: &str, has_body: bool) -> io::Result<()> {
    let head = format!("HTTP/1.1 {status}\r\nServer: raw-llama\r\nContent-Type: application/json\r\n");
    let length = body.len();
    let body = if has_body { body } else { "" };
    stream.write_all(format!("{head}Content-Length: {length}\r\n\r\n{body}").as_bytes())
}

/// Returns the bytes of the next request; `None` at the end of the connection.
fn request(reader: &mut impl BufRead) -> io::Result<Option<Vec<u8>>> {
    let mut raw = Vec::new();
    let (mut framing, mut dirty) = (Framing::default(), false);
    loop {
        let line = line(reader, &mut raw)?;
        let Some(line) = line else { return Ok(None) };
        if line.is_empty() {
            break;
        }
        let Some((name, value)) = line.split_once(':') else { continue };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => framing.length = value.trim().parse().unwrap_or(0),
            "transfer-encoding" => framing.chunked = true,
            _ => {}
        }
        // Early answers are sent before the body is read.
        dirty |= raw.starts_with(b"POST /dirty/early");
    }
    if dirty {
        return Ok(Some(raw));
    }
    Ok(rest_of(reader, &mut raw, framing)?.then_some(raw))
}

/// Reads a body to its end; returns false if the connection ends before.
fn rest_of(reader: &mut impl BufRead, raw: &mut Vec<u8>, framing: Framing) -> io::Result<bool> {
    let Framing { length, chunked } = framing;
    if chunked {
        loop {
            let Some(size) = line(reader, raw)? else { return Ok(false) };
            let size =
                u64::from_str_radix(size.split(';').next().unwrap_or_default().trim(), 16).unwrap_or(0);
            if size > 0 {
                reader.take(size.min(LIMIT)).read_to_end(raw)?;
            }
            // Trailers may follow the last chunk; an empty line follows any other.
            loop {
                let Some(rest) = line(reader, raw)? else { return Ok(false) };
                if size > 0 || rest.is_empty() {
                    break;
                }
            }
            if size == 0 {
                return Ok(true);
            }
        }
    }
    reader.take(length.min(LIMIT)).read_to_end(raw)?;
    Ok(true)
}

/// Returns the next line without its end; `raw` keeps all bytes.
fn line(reader: &mut impl BufRead, raw: &mut Vec<u8>) -> io::Result<Option<String>> {
    let before = raw.len();
    reader.take(LIMIT).read_until(b'\n', raw)?;
    let whole = &raw[before..];
    if whole.is_empty() {
        return Ok(None);
    }
    Ok(Some(text(whole.strip_suffix(b"\r\n").or(whole.strip_suffix(b"\n")).unwrap_or(whole))))
}
