//! A client's connection as hyper sees it. Records how long the connection is idle or within a request head,
//! and whether to linger before the close. Adds an error text to hyper's own answers to unreadable heads,
//! which have no body.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep, timeout};

use crate::client::{ClientStream, announces_close, tcp_stream};
use crate::protocol::{ConnPhase, ConnState};
use crate::refusal::{HeadLimits, unreadable_head};

/// Interval for checking whether a client has left while hyper does not read.
const LEFT_CHECK_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) struct ClientIo {
    stream: ClientStream,
    state: Arc<ConnState>,
    limits: HeadLimits,
    /// The gateway's answer, sent instead of hyper's answer.
    own_answer: Bytes,
    /// True if hyper has unprocessed bytes and does not read on, so that it misses a client's disconnect.
    unread: bool,
    /// Next check whether the client has left.
    next_check: Option<Pin<Box<Sleep>>>,
    /// True if the socket did not take all bytes of the last write.
    blocked: bool,
}

impl ClientIo {
    pub(crate) fn new(stream: ClientStream, state: Arc<ConnState>, limits: HeadLimits) -> Self {
        Self {
            stream,
            state,
            limits,
            own_answer: Bytes::new(),
            unread: false,
            next_check: None,
            blocked: false,
        }
    }

    /// Sends a refusal and closes the connection, without hyper.
    pub(crate) async fn refuse(self, status: u16, linger: Duration) {
        if let Some(answer) = unreadable_head(status, &self.limits) {
            self.send_and_close(&answer, linger).await;
        }
    }

    /// Sends `answer` and closes the connection, without hyper.
    pub(crate) async fn send_and_close(mut self, answer: &str, linger: Duration) {
        let write = timeout(linger, self.stream.write_all(answer.as_bytes())).await;
        if matches!(write, Ok(Ok(()))) {
            drain(&mut self.stream, linger).await;
        }
    }

    /// Closes the connection. If the client may still be sending, reads for a while first: a close with
    /// unread bytes resets the connection, and the client may see the reset before the answer.
    pub(crate) async fn close(mut self, linger: Duration) {
        if self.state.lingers() {
            drain(&mut self.stream, linger).await;
        } else if announces_close(&self.stream) {
            // A failure does not matter, because the connection ends anyway.
            let _over = timeout(linger, self.stream.shutdown()).await;
        }
    }

    /// Checks at intervals whether the client has left while hyper does not read.
    fn poll_left(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if !self.unread {
            return Ok(());
        }
        if !matches!(self.state.phase(), ConnPhase::Busy(_)) {
            self.next_check = None;
            return Ok(());
        }
        let look = self.next_check.get_or_insert_with(|| Box::pin(sleep(LEFT_CHECK_INTERVAL)));
        while look.as_mut().poll(context).is_ready() {
            if has_left(tcp_stream(&self.stream)) {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            look.as_mut().reset(Instant::now() + LEFT_CHECK_INTERVAL);
        }
        Ok(())
    }

    fn note_write<T>(&mut self, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_pending() != self.blocked {
            self.blocked = result.is_pending();
            self.state.set_blocked(self.blocked);
        }
        result
    }
}

/// Returns whether the client has closed its side or vanished, even with unread bytes.
fn has_left(stream: &TcpStream) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut files = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut files, Some(&now)), Ok(1..)) && files[0].revents().intersects(gone)
}

/// Makes the kernel drop unsent bytes at the close, instead of keeping them for minutes.
fn reset_on_close(stream: &TcpStream) {
    if let Err(error) = stream.set_zero_linger() {
        tracing::debug!(%error, "cannot reset a connection");
    }
}

async fn drain(stream: &mut ClientStream, linger: Duration) {
    let reading = async {
        stream.shutdown().await?;
        let mut sink = vec![0; 16 * 1024];
        while stream.read(&mut sink).await? > 0 {}
        io::Result::Ok(())
    };
    let _over = timeout(linger, reading).await;
}

/// Returns whether a head contains `words`, in upper or lower case.
fn contains_words(head: &[u8], words: &[u8]) -> bool {
    head.windows(words.len()).any(|window| window.eq_ignore_ascii_case(words))
}

/// Returns the status of hyper's own answer to an unreadable head, which lacks a request id.
fn bare_answer_status(state: &ConnState, bytes: &[u8]) -> Option<u16> {
    let rest = bytes.strip_prefix(b"HTTP/1.1 4")?;
    let is_ours = matches!(state.phase(), ConnPhase::Busy(_)) || contains_words(rest, b"x-request-id");
    let is_head = rest.ends_with(b"\r\n\r\n") && contains_words(rest, b"content-length: 0\r\n");
    if is_ours || !is_head {
        return None;
    }
    let tail: u16 = std::str::from_utf8(rest.get(..2)?).ok()?.parse().ok()?;
    Some(400 + tail)
}

impl ClientIo {
    /// Returns whether the gateway's answer replaces `bytes`.
    fn replace_bare_answer(&mut self, bytes: &[u8]) -> bool {
        let answer =
            bare_answer_status(&self.state, bytes).and_then(|status| unreadable_head(status, &self.limits));
        if let Some(answer) = answer {
            self.own_answer = Bytes::from(answer);
            self.state.must_linger();
            return true;
        }
        false
    }

    fn poll_instead(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.own_answer.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.own_answer))?;
            self.own_answer.advance(written);
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
        let start = buffer.filled().len();
        self.unread = false;
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        self.unread = true;
        self.state.note_bytes(&buffer.filled()[start..]);
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
        if self.replace_bare_answer(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.note_write(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_instead(context))?;
        if let [only] = slices
            && self.replace_bare_answer(only)
        {
            return Poll::Ready(Ok(only.len()));
        }
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.note_write(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_instead(context))?;
        self.poll_left(context)?;
        let result = Pin::new(&mut self.stream).poll_flush(context);
        self.note_write(result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_instead(context))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl Drop for ClientIo {
    fn drop(&mut self) {
        if self.state.is_aborted() {
            reset_on_close(tcp_stream(&self.stream));
        }
    }
}
