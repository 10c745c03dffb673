//! Tests a server that answers a request before it has read the body. cpp-httplib before 0.40 leaves the body
//! in the connection and parses it as the next request. Behind a proxy, one client's body then becomes a
//! request among those of other clients (request smuggling).
//!
//! The body is sent after the answer, and the next request a moment later, because cpp-httplib drops what
//! it had buffered beyond the part it read. A body sent together with its head would look discarded, and a
//! request sent together with the body would get no answer.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, sleep, timeout_at};

use super::checks::ServerAddress;

/// Requests that are answered before their body is read: by the first handler, and by checks of the head.
const REQUEST_HEADS: [&str; 4] = [
    "OPTIONS /v1/chat/completions HTTP/1.1\r\n",
    "POST /tokenize HTTP/1.1\r\nAccept: ;;q=x,,\r\n",
    "POST /tokenize HTTP/1.1\r\nRange: bytes=x\r\n",
    "POST /tokenize HTTP/1.1\r\nContent-Encoding: gzip\r\n",
];
/// Number of leading [`REQUEST_HEADS`] after which a server must discard the body instead of reading it.
const REQUIRED_HEADS: usize = 2;

/// The body: a request for a route that no server has.
const SMUGGLED_REQUEST: &str = "GET /llama-warden-unread HTTP/1.1\r\nHost: llama-server\r\n\r\n";
/// The request after the body; its answer ends the connection.
const NEXT_REQUEST: &str = "GET /health HTTP/1.1\r\nHost: llama-server\r\nConnection: close\r\n\r\n";

/// Pause between the body and the next request, per attempt; a busy machine may need the longer one.
const BODY_PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

const EARLY_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit from the body to the end of the connection.
const CONNECTION_END_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum bytes received on one connection, for all answers together. A single answer has a few hundred.
const MAX_ANSWER_BYTES: usize = 64 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyOutcome {
    Discarded,
    ReadAsRequest,
    /// The server waits for the body, or sends no valid answer.
    Unclear,
}

/// Tests that an unread body is never parsed as a request; `None` if unclear.
pub(super) async fn discards_unread_body(door: &ServerAddress) -> Option<bool> {
    let mut all = Vec::with_capacity(REQUEST_HEADS.len());
    for head in REQUEST_HEADS {
        let mut seen = BodyOutcome::Unclear;
        for pause in BODY_PAUSES {
            let tried = match door {
                ServerAddress::Unix(socket) => {
                    test_head(UnixStream::connect(socket).await, head, pause).await
                }
                ServerAddress::Port(port) => {
                    test_head(TcpStream::connect(("127.0.0.1", *port)).await, head, pause).await
                }
            };
            seen = tried.unwrap_or(BodyOutcome::Unclear);
            if seen != BodyOutcome::Unclear {
                break;
            }
        }
        all.push(seen);
    }
    judge_outcomes(&all)
}

fn judge_outcomes(all: &[BodyOutcome]) -> Option<bool> {
    if all.contains(&BodyOutcome::ReadAsRequest) {
        return Some(false);
    }
    let sure = all.iter().take(REQUIRED_HEADS).all(|shown| *shown == BodyOutcome::Discarded);
    (sure && all.len() >= REQUIRED_HEADS).then_some(true)
}

async fn test_head<S: AsyncRead + AsyncWrite + Unpin>(
    stream: io::Result<S>,
    head: &str,
    pause: Duration,
) -> io::Result<BodyOutcome> {
    let mut stream = stream?;
    let head = format!("{head}Host: llama-server\r\nContent-Length: {}\r\n\r\n", SMUGGLED_REQUEST.len());
    stream.write_all(head.as_bytes()).await?;
    let mut received = Vec::new();
    let until = Instant::now() + EARLY_ANSWER_TIMEOUT;
    while statuses(&received).is_empty() || !received.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
        match timeout_at(until, stream.read_buf(&mut received)).await {
            Ok(Ok(read)) if read > 0 && received.len() < MAX_ANSWER_BYTES => {}
            _ => return Ok(BodyOutcome::Unclear),
        }
    }
    let early = statuses(&received).len();
    if stream.write_all(SMUGGLED_REQUEST.as_bytes()).await.is_ok() {
        sleep(pause).await;
        // A server that closes the connection has not parsed the body, which is a valid result.
        let _closed = stream.write_all(NEXT_REQUEST.as_bytes()).await;
    }
    let until = Instant::now() + CONNECTION_END_TIMEOUT;
    let ended = loop {
        match timeout_at(until, stream.read_buf(&mut received)).await {
            Ok(Ok(read)) if read > 0 && received.len() < MAX_ANSWER_BYTES => {}
            Ok(Ok(0) | Err(_)) => break true,
            _ => break false,
        }
    };
    Ok(match (&statuses(&received)[early..], ended) {
        ([], true) | ([200], _) => BodyOutcome::Discarded,
        // 404, or two answers if the server answers every route.
        ([404, ..] | [_, _, ..], _) => BodyOutcome::ReadAsRequest,
        _ => BodyOutcome::Unclear,
    })
}

fn statuses(heard: &[u8]) -> Vec<u16> {
    let text = String::from_utf8_lossy(heard);
    let answers = text.split("HTTP/1.1 ").skip(1);
    answers.map(|answer| answer.get(..3).and_then(|status| status.parse().ok()).unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::DuplexStream;

    #[derive(Clone, Copy)]
    enum Server {
        Leaves,
        LeavesAndHasEveryRoute,
        Discards,
        /// As in cpp-httplib: also drops what it had buffered after the body.
        DiscardsItsBuffer,
        Closes,
        ReadsFirst,
        Stalls,
    }

    async fn head(stream: &mut DuplexStream) -> Option<String> {
        let mut text = Vec::new();
        while !text.ends_with(b"\r\n\r\n") {
            text.push(stream.read_u8().await.ok()?);
        }
        String::from_utf8(text).ok()
    }

    async fn answer(stream: &mut DuplexStream, status: &str) {
        let text = format!("HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\n{{}}");
        stream.write_all(text.as_bytes()).await.unwrap();
    }

    async fn serve(mut stream: DuplexStream, server: Server) {
        let mut body = vec![0; SMUGGLED_REQUEST.len()];
        head(&mut stream).await.unwrap();
        match server {
            Server::Stalls => std::future::pending().await,
            Server::ReadsFirst => {
                stream.read_exact(&mut body).await.unwrap();
                answer(&mut stream, "200 OK").await;
            }
            Server::Closes => return answer(&mut stream, "400 Bad Request").await,
            Server::Leaves | Server::LeavesAndHasEveryRoute => answer(&mut stream, "200 OK").await,
            Server::Discards => {
                answer(&mut stream, "200 OK").await;
                stream.read_exact(&mut body).await.unwrap();
            }
            Server::DiscardsItsBuffer => {
                answer(&mut stream, "200 OK").await;
                let mut buffer = vec![0; 4096];
                assert!(stream.read(&mut buffer).await.unwrap() >= body.len());
            }
        }
        while let Some(head) = head(&mut stream).await {
            answer(&mut stream, if head.starts_with("GET /health ") { "200 OK" } else { "404 Not Found" })
                .await;
            if head.contains("Connection: close") {
                return;
            }
        }
    }

    async fn shows(server: Server) -> BodyOutcome {
        let (ours, theirs) = tokio::io::duplex(1024);
        let mut serving = tokio::task::JoinSet::new();
        serving.spawn(serve(theirs, server));
        test_head(Ok(ours), REQUEST_HEADS[0], BODY_PAUSES[0]).await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn what_becomes_of_an_unread_body_is_seen_by_the_answers_behind_it() {
        assert_eq!(shows(Server::Leaves).await, BodyOutcome::ReadAsRequest);
        assert_eq!(shows(Server::LeavesAndHasEveryRoute).await, BodyOutcome::ReadAsRequest);
        assert_eq!(shows(Server::Discards).await, BodyOutcome::Discarded);
        assert_eq!(shows(Server::DiscardsItsBuffer).await, BodyOutcome::Discarded);
        assert_eq!(shows(Server::Closes).await, BodyOutcome::Discarded);
        assert_eq!(shows(Server::ReadsFirst).await, BodyOutcome::Unclear, "it answers only with the body");
        assert_eq!(shows(Server::Stalls).await, BodyOutcome::Unclear);
    }

    #[test]
    fn one_body_that_was_read_as_a_request_is_enough_and_what_is_unclear_is_no_proof() {
        use BodyOutcome::{Discarded, ReadAsRequest, Unclear};
        assert_eq!(judge_outcomes(&[Discarded, Discarded, Discarded, ReadAsRequest]), Some(false));
        assert_eq!(judge_outcomes(&[Discarded, Discarded, Unclear, Unclear]), Some(true));
        assert_eq!(judge_outcomes(&[Discarded, Unclear, Discarded, Discarded]), None);
        assert_eq!(judge_outcomes(&[Unclear; 4]), None);
        assert_eq!(judge_outcomes(&[]), None);
    }
}
