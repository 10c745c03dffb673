//! A connection to a backend. It has no task: the task that waits for its answer polls it. So an answer needs
//! no task switch, and all data that arrived between two polls is passed on in one piece.
//!
//! ```text
//!   send  --polls--> request out, head in
//!   poll_piece -----> all of the body that has arrived (never waits for more)
//!   settle ---------> idle and reusable? Then the connection is not polled until it is used again
//!   detach ---------> polled by a task of its own, for an answer that comes before its request was sent: the
//!                     rest of the request must be sent even if the client does not read
//! ```
//!
//! Dropping the connection closes it at once, so that llama-server notices that its client has left.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::sleep;
use tokio_util::either::Either;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use warden_supervisor::{EndpointStream, LeaseAddress, ListenAddress, private_dir};

use crate::backend::{ConnWaker, RequestBody, ends_connection};

/// Retry interval while the server's listen backlog is full. An idle machine accepts within microseconds.
const BACKLOG_PAUSE: Duration = Duration::from_millis(1);

/// Size up to which arrived frames of an answer are joined into one piece.
const JOINED_FRAME_BYTES: usize = 64 * 1024;

/// Frames of this size are not joined: copying would cost more than passing on another piece.
const LARGE_FRAME_BYTES: usize = 8 * 1024;

/// Maximum number of polls in a row while the connection stays due without an answer; then other tasks run.
const DRIVES_PER_TURN: usize = 3;

pub(crate) enum IncompleteAnswer {
    Broken,
    TooLong,
}

pub(crate) struct UpstreamConn {
    sender: SendRequest<RequestBody>,
    /// `None` after the connection has ended or got its own task.
    connection: Option<Box<Connection<TokioIo<UpstreamSocket>, RequestBody>>>,
    task: Option<AbortOnDropHandle<()>>,
    conn_waker: Arc<ConnWaker>,
    waker: Waker,
    /// Error of the connection, reported after the pieces received before it.
    failure: Option<hyper::Error>,
    /// True if the last request had `Connection: close`.
    is_closing: bool,
    /// Counts as an open connection of the pool.
    _open: Arc<()>,
}

impl std::fmt::Debug for UpstreamConn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpstreamConn").field("conn_waker", &self.conn_waker).finish_non_exhaustive()
    }
}

pub(crate) enum UpstreamSendError {
    /// The connection returned the request: no byte was sent.
    Unsent(Box<Request<RequestBody>>),
    /// The backend may have got the request, and sent no byte of an answer.
    Sent(hyper::Error),
    /// The answer broke off within its head.
    Begun(hyper::Error),
}

impl UpstreamConn {
    /// Connects. `head` is the largest response head, in bytes; `open` is held as long as the connection.
    pub(crate) async fn connect(address: &LeaseAddress, head: usize, open: Arc<()>) -> io::Result<Self> {
        let stream = open_stream(address).await?;
        let conn_waker = ConnWaker::new();
        let socket = UpstreamSocket { stream, conn_waker: conn_waker.clone() };
        let (sender, connection) = Builder::new()
            .max_buf_size(head)
            .handshake(TokioIo::new(socket))
            .await
            .map_err(io::Error::other)?;
        let waker = Waker::from(conn_waker.clone());
        let connection = Some(Box::new(connection));
        Ok(Self {
            sender,
            connection,
            task: None,
            conn_waker,
            waker,
            failure: None,
            is_closing: false,
            _open: open,
        })
    }

    /// Sends a request and waits for the head of its answer. Dropping future and value closes the connection.
    pub(crate) async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, UpstreamSendError> {
        self.is_closing |= ends_connection(request.headers());
        self.conn_waker.reset_heard();
        let mut answer = pin!(self.sender.try_send_request(request));
        let result = std::future::poll_fn(|context| {
            self.conn_waker.start_driving(context.waker());
            let mut result = Poll::Pending;
            for _ in 0..DRIVES_PER_TURN {
                let moved = self.drive();
                // Only the connection produces the answer. The waker serves if the runtime forces a yield.
                result = answer.as_mut().poll(&mut Context::from_waker(&self.waker));
                if result.is_ready() || !(moved && self.conn_waker.is_due()) {
                    break;
                }
            }
            if self.conn_waker.stop_driving() && result.is_pending() {
                context.waker().wake_by_ref();
            }
            result
        });
        result.await.map_err(|mut error| match error.take_message() {
            Some(request) => UpstreamSendError::Unsent(Box::new(request)),
            None if self.conn_waker.has_heard() => UpstreamSendError::Begun(error.into_error()),
            None => UpstreamSendError::Sent(error.into_error()),
        })
    }

    /// Returns the arrived part of the answer's body in one piece; `None` at the end of the body.
    pub(crate) fn poll_piece(
        &mut self,
        body: &mut Incoming,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, hyper::Error>>> {
        if let Some(failure) = self.failure.take() {
            return Poll::Ready(Some(Err(failure)));
        }
        if self.task.is_some() {
            return poll_data(body, context);
        }
        self.conn_waker.start_driving(context.waker());
        let piece = self.gather_pieces(body);
        if self.conn_waker.stop_driving() && piece.is_pending() {
            context.waker().wake_by_ref();
        }
        piece
    }

    pub(crate) async fn read_all(
        &mut self,
        mut body: Incoming,
        limit: usize,
    ) -> Result<Vec<u8>, IncompleteAnswer> {
        let mut all = Vec::new();
        while let Some(piece) = std::future::poll_fn(|context| self.poll_piece(&mut body, context)).await {
            let piece = piece.map_err(|_| IncompleteAnswer::Broken)?;
            if all.len() + piece.len() > limit {
                return Err(IncompleteAnswer::TooLong);
            }
            all.extend_from_slice(&piece);
        }
        Ok(all)
    }

    fn gather_pieces(&mut self, body: &mut Incoming) -> Poll<Option<Result<Bytes, hyper::Error>>> {
        let mut first: Option<Bytes> = None;
        let mut joined = BytesMut::new();
        let mut looks = 0;
        loop {
            self.drive();
            // Only the connection fills the body, and it was polled just now, so no wake-up is needed.
            match poll_data(body, &mut Context::from_waker(Waker::noop())) {
                Poll::Ready(Some(Ok(piece))) => {
                    match first.take() {
                        None if !joined.is_empty() => joined.extend_from_slice(&piece),
                        None if piece.len() >= LARGE_FRAME_BYTES || body.is_end_stream() => {
                            return Poll::Ready(Some(Ok(piece)));
                        }
                        None => first = Some(piece),
                        Some(first) => {
                            joined.reserve((first.len() + piece.len()).max(LARGE_FRAME_BYTES / 2));
                            joined.extend_from_slice(&first);
                            joined.extend_from_slice(&piece);
                        }
                    }
                    if joined.len() >= JOINED_FRAME_BYTES || body.is_end_stream() {
                        break;
                    }
                }
                Poll::Pending => {
                    looks += 1;
                    if looks >= DRIVES_PER_TURN || !self.conn_waker.is_due() {
                        break;
                    }
                }
                Poll::Ready(None) if first.is_none() && joined.is_empty() => return Poll::Ready(None),
                Poll::Ready(Some(Err(error))) if first.is_none() && joined.is_empty() => {
                    return Poll::Ready(Some(Err(error)));
                }
                Poll::Ready(end) => {
                    self.failure = end.and_then(Result::err);
                    break;
                }
            }
        }
        match first {
            Some(first) => Poll::Ready(Some(Ok(first))),
            None if joined.is_empty() => Poll::Pending,
            None => Poll::Ready(Some(Ok(joined.freeze()))),
        }
    }

    /// Polls the connection until it stops making progress. Returns false if it was not due.
    fn drive(&mut self) -> bool {
        let Some(connection) = &mut self.connection else { return false };
        if !self.conn_waker.take_due() {
            return false;
        }
        if let Poll::Ready(result) = Pin::new(connection).poll(&mut Context::from_waker(&self.waker)) {
            if let Err(error) = result {
                tracing::debug!(%error, "a connection to a backend ended");
            }
            // Dropping the connection returns a request that it has not yet taken from its queue.
            self.connection = None;
        }
        true
    }

    /// Returns whether the connection can be used again. From now on, it wakes no task.
    pub(crate) fn settle(&mut self) -> bool {
        self.conn_waker.start_driving_alone();
        for _ in 0..DRIVES_PER_TURN {
            if !self.drive() {
                break;
            }
        }
        self.conn_waker.stop_driving();
        self.connection.is_some() && self.sender.is_ready() && !self.is_closing
    }

    /// Gives the connection its own task, after which the connection can send no further request.
    pub(crate) fn detach(&mut self, tracker: &TaskTracker) {
        let Some(connection) = self.connection.take() else { return };
        let task = tracker.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to a backend ended");
            }
        });
        self.task = Some(AbortOnDropHandle::new(task));
    }
}

/// Drops trailers, because no client of llama-server expects any.
fn poll_data(body: &mut Incoming, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, hyper::Error>>> {
    loop {
        match std::task::ready!(Pin::new(&mut *body).poll_frame(context)) {
            Some(Ok(frame)) => {
                if let Ok(piece) = frame.into_data() {
                    return Poll::Ready(Some(Ok(piece)));
                }
            }
            Some(Err(error)) => return Poll::Ready(Some(Err(error))),
            None => return Poll::Ready(None),
        }
    }
}

/// Opens a socket. A Unix socket with a full backlog (llama-server's holds 128 connections) fails at once
/// instead of waiting, so that error is retried and is no refusal.
async fn open_stream(address: &LeaseAddress) -> io::Result<UpstreamStream> {
    match address {
        LeaseAddress::Process(ListenAddress::Unix(path)) => loop {
            match UnixStream::connect(path).await {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(BACKLOG_PAUSE).await,
                done => {
                    let stream = done?;
                    let peer = stream.peer_cred().ok().map(|peer| peer.uid());
                    if private_dir::may_answer(path, peer) {
                        return Ok(Either::Left(Either::Left(stream)));
                    }
                    let why = "another user answers on the socket of this process; nothing was sent";
                    tracing::error!(socket = %path.display(), ?peer, "{why}");
                    return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
                }
            }
        },
        LeaseAddress::Process(ListenAddress::Tcp(address)) => {
            let stream = TcpStream::connect(address).await?;
            // With Nagle's algorithm, an answer to a small request waits 40 ms for an acknowledgement.
            stream.set_nodelay(true)?;
            Ok(Either::Left(Either::Right(stream)))
        }
        // Boxed, because remote endpoints are rare and would enlarge the future of every request.
        LeaseAddress::Remote(origin) => Box::pin(origin.connect()).await.map(Either::Right),
    }
}

type UpstreamStream = Either<Either<UnixStream, TcpStream>, EndpointStream>;

/// A socket that records received bytes in the waker.
struct UpstreamSocket {
    stream: UpstreamStream,
    conn_waker: Arc<ConnWaker>,
}

impl AsyncRead for UpstreamSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.conn_waker.note_bytes();
        }
        read
    }
}

impl AsyncWrite for UpstreamSocket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
