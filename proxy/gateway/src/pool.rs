//! Connections to one generation: made, kept while idle, and closed at once when an exchange is given up, which is how
//! llama-server learns that its client has left.
//!
//! ```text
//!   checkout --> [ an idle one, fresh and open? ] --yes--> Link
//!                      | no                                 |  exchange ended clean: put back
//!                      v                                    |  anything else: dropped = closed
//!                   connect --> refused: proof that nothing was sent
//! ```
//!
//! A link is driven by its own task, which ends with the link. Nothing else here runs by itself.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use warden_supervisor::Endpoint;

use crate::request_body::RequestBody;

/// A server takes a connection off its backlog within microseconds, unless the machine is busy.
const BACKLOG_PAUSE: Duration = Duration::from_millis(1);

/// The idle connections of one generation.
#[derive(Debug)]
pub(crate) struct Pool {
    idle: Mutex<Vec<Idle>>,
    limits: PoolLimits,
    tracker: TaskTracker,
}

/// Numbers of a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolLimits {
    /// Time to connect.
    pub(crate) connect: Duration,
    /// An idle connection is not used again after this.
    pub(crate) idle: Duration,
    /// Idle connections kept.
    pub(crate) kept: usize,
    /// Bytes in a response head.
    pub(crate) head: usize,
}

#[derive(Debug)]
struct Idle {
    link: Link,
    since: Instant,
}

/// One connection. Dropping it closes it at once.
#[derive(Debug)]
pub(crate) struct Link {
    sender: SendRequest<RequestBody>,
    _driver: AbortOnDropHandle<()>,
}

/// Why a request has no answer.
pub(crate) enum SendError {
    /// It was handed back: not a byte of it was sent.
    Unsent(Box<Request<RequestBody>>),
    /// It may have been received.
    Sent(hyper::Error),
}

impl Pool {
    pub(crate) fn new(limits: PoolLimits, tracker: TaskTracker) -> Self {
        Self { idle: Mutex::default(), limits, tracker }
    }

    /// An idle connection, if a good one is left.
    pub(crate) async fn reuse(&self) -> Option<Link> {
        loop {
            let mut link = self.pop()?;
            // Ready at once, but for a connection whose last answer has ended this very moment.
            if let Ok(Ok(())) = timeout(self.limits.connect, link.sender.ready()).await {
                return Some(link);
            }
        }
    }

    fn pop(&self) -> Option<Link> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = idle.pop()?;
        if newest.since.elapsed() < self.limits.idle {
            return Some(newest.link);
        }
        // The others are older still.
        idle.clear();
        None
    }

    /// A new connection.
    pub(crate) async fn connect(&self, endpoint: &Endpoint) -> io::Result<Link> {
        let stream = timeout(self.limits.connect, open(endpoint))
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        let (sender, connection) = Builder::new()
            .max_buf_size(self.limits.head)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(io::Error::other)?;
        let task = self.tracker.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to a backend ended");
            }
        });
        Ok(Link { sender, _driver: AbortOnDropHandle::new(task) })
    }

    /// Keeps a connection whose last answer was read to its end.
    pub(crate) fn put(&self, link: Link) {
        if link.sender.is_closed() {
            return;
        }
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() >= self.limits.kept {
            idle.retain(|kept| !kept.link.sender.is_closed());
        }
        if idle.len() < self.limits.kept {
            idle.push(Idle { link, since: Instant::now() });
        }
    }
}

/// Connects. A Unix socket whose backlog is full (llama-server's has 128 places) says so at once instead of letting the
/// caller wait: that is no refusal.
async fn open(endpoint: &Endpoint) -> io::Result<UnixStream> {
    let Endpoint::Unix(path) = endpoint;
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(BACKLOG_PAUSE).await,
            done => return done,
        }
    }
}

impl Link {
    /// Sends a request and waits for the head of its answer. Dropping the future and then the link closes the
    /// connection.
    pub(crate) async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        self.sender.try_send_request(request).await.map_err(|mut error| match error.take_message() {
            Some(request) => SendError::Unsent(Box::new(request)),
            None => SendError::Sent(error.into_error()),
        })
    }
}
