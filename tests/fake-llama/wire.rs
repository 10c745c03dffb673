//! Socket below hyper that can misbehave: a request handler can replace hyper's next bytes by its own, after
//! which the connection ends.
//!
//! hyper parses requests and frames valid answers; only invalid bytes bypass it.
//!
//! ```text
//! Clean --replace(bytes)--> Raw --all written--> Cut      every later write fails, so hyper closes
//! Clean --cut()---------------------------------> Cut
//! ```

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

#[derive(Debug, Default)]
enum Mode {
    #[default]
    Clean,
    Raw(Bytes),
    Cut,
}

type Call = Box<dyn FnOnce() + Send>;

#[derive(Clone, Default)]
pub(crate) struct Wire {
    mode: Arc<Mutex<Mode>>,
    finish: Arc<Notify>,
    first: Arc<Mutex<Option<Call>>>,
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").field("mode", &self.mode).finish_non_exhaustive()
    }
}

impl Wire {
    /// Sends these bytes instead of hyper's next ones, then ends the connection.
    pub(crate) fn replace(&self, bytes: impl Into<Bytes>) {
        *self.lock() = Mode::Raw(bytes.into());
    }

    /// Makes hyper's next write fail, so that the connection ends without another byte.
    pub(crate) fn cut(&self) {
        *self.lock() = Mode::Cut;
    }

    /// Calls the function when the next byte has been handed to the kernel.
    pub(crate) fn at_first_byte(&self, call: impl FnOnce() + Send + 'static) {
        *self.first.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(call));
    }

    fn wrote(&self, bytes: usize) {
        if bytes > 0
            && let Some(call) = self.first.lock().unwrap_or_else(PoisonError::into_inner).take()
        {
            call();
        }
    }

    /// Ends the connection after the present answer, although its head promised keep-alive.
    pub(crate) fn close_after_answer(&self) {
        self.finish.notify_one();
    }

    pub(crate) async fn asked_to_close(&self) {
        self.finish.notified().await;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Mode> {
        self.mode.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub(crate) struct Tap<I> {
    io: I,
    wire: Wire,
}

impl<I> Tap<I> {
    pub(crate) fn new(io: I, wire: Wire) -> Self {
        Self { io, wire }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Tap<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Tap<I> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let mut mode = this.wire.lock();
        if matches!(*mode, Mode::Clean) {
            drop(mode);
            let written = ready!(Pin::new(&mut this.io).poll_write(cx, buf))?;
            this.wire.wrote(written);
            return Poll::Ready(Ok(written));
        }
        while let Mode::Raw(bytes) = &mut *mode {
            if bytes.is_empty() {
                *mode = Mode::Cut;
                break;
            }
            let written = ready!(Pin::new(&mut this.io).poll_write(cx, bytes))?;
            bytes.advance(written);
            this.wire.wrote(written);
        }
        Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
