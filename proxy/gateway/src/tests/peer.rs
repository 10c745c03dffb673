//! Both ends of connections, byte by byte: scripted backends, and clients.

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::PATIENCE;

/// One generation: a socket and the handler of its connections.
pub(super) struct Upstream {
    pub(super) path: PathBuf,
    open: Arc<AtomicUsize>,
    accepted: Arc<AtomicUsize>,
    pub(super) tasks: JoinSet<()>,
    _dir: TempDir,
}

impl Upstream {
    /// Passes each connection to `handle`; it counts as open until `handle` returns.
    pub(super) fn start<F, R>(handle: F) -> Self
    where
        F: Fn(Peer<UnixStream>) -> R + Send + Sync + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("s.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (open, accepted) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (open_inside, accepted_inside) = (open.clone(), accepted.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                accepted_inside.fetch_add(1, Ordering::SeqCst);
                open_inside.fetch_add(1, Ordering::SeqCst);
                let (handling, done) = (handle(Peer::new(stream)), open_inside.clone());
                connections.spawn(async move {
                    handling.await;
                    done.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { path, open, accepted, tasks, _dir: dir }
    }

    /// Takes a request and sends nothing until the other side closes.
    pub(super) fn silent() -> Self {
        Self::start(|mut peer| async move {
            peer.request().await;
            peer.rest().await;
        })
    }

    /// Answers every request on a connection with the result of `answer` for its head and body.
    pub(super) fn answering(answer: impl Fn(&str, &[u8]) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let answer = Arc::new(answer);
        Self::start(move |mut peer| {
            let answer = answer.clone();
            async move {
                while let Some((head, body)) = peer.request().await {
                    peer.send(&answer(&head, &body)).await;
                }
            }
        })
    }

    pub(super) fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }

    pub(super) fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}

/// One end of a connection, read message by message.
pub(super) struct Peer<S> {
    pub(super) stream: S,
    pub(super) buffer: Vec<u8>,
}

impl<S: AsyncRead + tokio::io::AsyncWrite + Unpin> Peer<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, buffer: Vec::new() }
    }

    pub(super) async fn send(&mut self, bytes: &[u8]) {
        // A write to a peer that has left fails, which the test notices elsewhere.
        let _left = self.stream.write_all(bytes).await;
    }

    /// Reads more; false at the end.
    pub(super) async fn more(&mut self) -> bool {
        let read = timeout(PATIENCE, self.stream.read_buf(&mut self.buffer)).await.expect("bytes or an end");
        read.unwrap_or(0) > 0
    }

    /// Reads until the connection ends.
    pub(super) async fn rest(&mut self) -> Vec<u8> {
        while self.more().await {}
        std::mem::take(&mut self.buffer)
    }

    /// Reads until `text` was received; returns everything up to its end.
    pub(super) async fn until(&mut self, text: &str) -> String {
        loop {
            if let Some(at) = memchr::memmem::find(&self.buffer, text.as_bytes()) {
                let rest = self.buffer.split_off(at + text.len());
                return plain_names(&String::from_utf8(std::mem::replace(&mut self.buffer, rest)).unwrap());
            }
            assert!(self.more().await, "no {text:?} in {:?}", String::from_utf8_lossy(&self.buffer));
        }
    }

    /// Reads a request with its body; `None` when the peer has closed.
    pub(super) async fn request(&mut self) -> Option<(String, Vec<u8>)> {
        while memchr::memmem::find(&self.buffer, b"\r\n\r\n").is_none() {
            if self.stream.read_buf(&mut self.buffer).await.unwrap_or(0) == 0 {
                return None;
            }
        }
        let head = self.until("\r\n\r\n").await;
        let body = self.body(&head).await;
        Some((head, body))
    }

    /// Reads a response with its body.
    pub(super) async fn response(&mut self) -> (String, Vec<u8>) {
        let head = self.until("\r\n\r\n").await;
        let body = self.body(&head).await;
        (head, body)
    }

    pub(super) async fn body(&mut self, head: &str) -> Vec<u8> {
        let field = |name: &str| {
            let line =
                head.lines().find(|line| line.to_ascii_lowercase().starts_with(&format!("{name}:")))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        if let Some(length) = field("content-length") {
            let length: usize = length.parse().unwrap();
            while self.buffer.len() < length && self.more().await {}
            let rest = self.buffer.split_off(length.min(self.buffer.len()));
            return std::mem::replace(&mut self.buffer, rest);
        }
        let mut body = Vec::new();
        if field("transfer-encoding").is_some() {
            while let Some(piece) = self.chunk().await {
                body.extend(piece);
            }
        }
        body
    }

    /// Reads one chunk; `None` for the last one.
    pub(super) async fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = self.until("\r\n").await;
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        while self.buffer.len() < size + 2 && self.more().await {}
        let mut rest = self.buffer.split_off(size);
        rest.drain(..2);
        let piece = std::mem::replace(&mut self.buffer, rest);
        (size > 0).then_some(piece)
    }

    pub(super) async fn send_chunk(&mut self, bytes: &[u8]) {
        let mut chunk = format!("{:x}\r\n", bytes.len()).into_bytes();
        chunk.extend_from_slice(bytes);
        chunk.extend_from_slice(b"\r\n");
        self.send(&chunk).await;
    }
}

/// Converts header names to lower case, because their case has no meaning.
fn plain_names(text: &str) -> String {
    if !text.starts_with("HTTP/1.") {
        return text.to_owned();
    }
    let line = |line: &str| match line.split_once(": ") {
        Some((name, value)) => format!("{}: {value}", name.to_ascii_lowercase()),
        None => line.to_owned(),
    };
    text.split("\r\n").map(line).collect::<Vec<_>>().join("\r\n")
}

pub(super) const EVENTS: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n";

pub(super) fn json_answer(body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nKeep-Alive: timeout=5, max=100\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

pub(super) fn post(path: &str, body: &str) -> Vec<u8> {
    format!("POST {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len())
        .into_bytes()
}
