//! A client's connection as hyper sees it, and the little that we must know about it: since when it is idle or in the
//! middle of a request head, and whether it must linger. It also puts words into the answers that hyper gives by itself
//! to an unreadable head, which have none.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::errors::unreadable_head;
use crate::gateway::LEAST_BUFFER;
use crate::raw_head::{Heads, Seen};

/// Where a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Between requests, since then.
    Idle(Instant),
    /// In a request head, whose first byte came then.
    Head(Instant),
    /// A request is being answered; it must be over by then, if there is a bound.
    Busy(Option<Instant>),
}

/// What the connection's task, its requests and its socket tell each other.
#[derive(Debug)]
pub(crate) struct ConnState {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    phase: Phase,
    linger: bool,
    ended: bool,
    /// Reads beside hyper, where hyper reads HTTP/1.
    heads: Option<Heads>,
}

impl ConnState {
    pub(crate) fn new() -> Arc<Self> {
        let inner = Inner { phase: Phase::Idle(Instant::now()), linger: false, ended: false, heads: None };
        Arc::new(Self { inner: Mutex::new(inner) })
    }

    fn with<T>(&self, act: impl FnOnce(&mut Inner) -> T) -> T {
        act(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn phase(&self) -> Phase {
        self.with(|inner| inner.phase)
    }

    /// A request head is complete.
    pub(crate) fn begin(self: &Arc<Self>) -> Busy {
        self.with(|inner| inner.phase = Phase::Busy(None));
        Busy(self.clone())
    }

    /// The running request must be over by `until`.
    pub(crate) fn bound(&self, until: Instant) {
        self.with(|inner| inner.phase = Phase::Busy(Some(until)));
    }

    /// The client may still be sending when we close: its bytes must be read, or it never sees its answer.
    pub(crate) fn must_linger(&self) {
        self.with(|inner| inner.linger = true);
    }

    /// What the raw head of the request that begins was found to be, if anybody read it.
    pub(crate) fn next_head(&self) -> Option<Seen> {
        self.with(|inner| inner.heads.as_mut().map(Heads::next))
    }

    fn came(&self, bytes: &[u8]) {
        self.with(|inner| {
            match inner.phase {
                _ if bytes.is_empty() => inner.ended = true,
                Phase::Idle(_) => inner.phase = Phase::Head(Instant::now()),
                Phase::Head(_) | Phase::Busy(_) => {}
            }
            if let Some(heads) = &mut inner.heads {
                heads.feed(bytes);
            }
        });
    }
}

/// A request is being answered. Lives in the answer's body.
#[derive(Debug)]
pub(crate) struct Busy(Arc<ConnState>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.with(|inner| inner.phase = Phase::Idle(Instant::now()));
    }
}

/// Limits named in answers to unreadable heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadLimits {
    pub(crate) bytes: usize,
    pub(crate) count: usize,
}

/// The socket.
pub(crate) struct ClientIo {
    stream: TcpStream,
    state: Arc<ConnState>,
    limits: HeadLimits,
    /// Our own words, instead of what hyper is writing.
    instead: Bytes,
}

impl ClientIo {
    pub(crate) fn new(stream: TcpStream, state: Arc<ConnState>, limits: HeadLimits) -> Self {
        state.with(|inner| inner.heads = Some(Heads::new(limits.bytes.max(LEAST_BUFFER))));
        Self { stream, state, limits, instead: Bytes::new() }
    }

    /// Answers and closes, outside of hyper.
    pub(crate) async fn refuse(self, status: u16, linger: Duration) {
        if let Some(answer) = unreadable_head(status, self.limits.bytes, self.limits.count) {
            let mut stream = self.stream;
            let write = timeout(linger, stream.write_all(answer.as_bytes())).await;
            if matches!(write, Ok(Ok(()))) {
                drain(stream, linger).await;
            }
        }
    }

    /// Closes. If the client may still be sending, reads on for a while: closing with unread bytes resets the
    /// connection, and the reset may overtake the answer.
    pub(crate) async fn close(self, linger: Duration) {
        let reads_on = self.state.with(|inner| inner.linger && !inner.ended);
        if reads_on {
            drain(self.stream, linger).await;
        }
    }
}

async fn drain(mut stream: TcpStream, linger: Duration) {
    let reading = async {
        stream.shutdown().await?;
        let mut sink = vec![0; 16 * 1024];
        while stream.read(&mut sink).await? > 0 {}
        io::Result::Ok(())
    };
    // However it ends, the connection is over.
    let _over = timeout(linger, reading).await;
}

/// The status of an answer that hyper made by itself to an unreadable head: nothing but a head, with a length of 0 and
/// without the request id that every answer of ours carries.
fn status_of_wordless(state: &ConnState, bytes: &[u8]) -> Option<u16> {
    let rest = bytes.strip_prefix(b"HTTP/1.1 4")?;
    let is_ours =
        matches!(state.phase(), Phase::Busy(_)) || memchr::memmem::find(rest, b"x-request-id").is_some();
    let is_head =
        rest.ends_with(b"\r\n\r\n") && memchr::memmem::find(rest, b"content-length: 0\r\n").is_some();
    if is_ours || !is_head {
        return None;
    }
    let tail: u16 = std::str::from_utf8(rest.get(..2)?).ok()?.parse().ok()?;
    Some(400 + tail)
}

impl ClientIo {
    /// Whether `bytes` is swallowed because our own words go out instead.
    fn replaces(&mut self, bytes: &[u8]) -> bool {
        let answer = status_of_wordless(&self.state, bytes)
            .and_then(|status| unreadable_head(status, self.limits.bytes, self.limits.count));
        if let Some(answer) = answer {
            self.instead = Bytes::from(answer);
            self.state.must_linger();
            return true;
        }
        false
    }

    fn poll_instead(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.instead.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.instead))?;
            self.instead.advance(written);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for ClientIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        self.state.came(&buffer.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_instead(context))?;
        if self.replaces(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_instead(context))?;
        if let [only] = slices
            && self.replaces(only)
        {
            return Poll::Ready(Ok(only.len()));
        }
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_instead(context))?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_instead(context))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
