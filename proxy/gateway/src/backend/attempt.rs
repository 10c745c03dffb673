//! One attempt on one generation: a connection, the request, the head of the answer.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use rustix::io::Errno;
use tokio::time::Instant;
use warden_supervisor::{LeaseAddress, ListenAddress};

use crate::backend::{
    BackendLease, BodyCheckpoint, BoxFuture, ConnectionPool, RequestBody, SharedLease, UpstreamConn,
    UpstreamContext, UpstreamRequest, UpstreamSendError, close_after_unread_body,
};
use crate::body::SentBody;

/// A backend's answer whose head has arrived.
pub(crate) struct RelayedAnswer {
    pub(crate) response: Response<Incoming>,
    /// Pieces of the answer's body that were already read.
    pub(crate) read_ahead: VecDeque<Bytes>,
    pub(crate) backend: Box<AnsweringBackend>,
    /// The request, if it asks for a stream and may be executed again.
    pub(crate) message: Option<Box<UpstreamRequest>>,
}

/// Lease and connection of an answer, released with it.
pub(crate) struct AnsweringBackend {
    pub(crate) lease: SharedLease,
    /// Resolves when `lease` is revoked.
    pub(crate) revoked: BoxFuture<'static, ()>,
    pub(crate) conn: UpstreamConn,
    pub(crate) pool: Arc<ConnectionPool>,
    pub(crate) sent: Arc<SentBody>,
    /// Deadline of the whole exchange.
    pub(crate) deadline: Instant,
    /// Deadline for a canary's answer to begin; then the request moves to the model's normal build.
    pub(crate) first_event_deadline: Option<Instant>,
}

pub(crate) struct AttemptAnswer {
    pub(crate) response: Response<Incoming>,
    pub(crate) conn: UpstreamConn,
    pub(crate) pool: Arc<ConnectionPool>,
}

impl AttemptAnswer {
    pub(crate) fn with_lease(
        self,
        lease: SharedLease,
        revoked: BoxFuture<'static, ()>,
        sent: Arc<SentBody>,
        deadline: Instant,
    ) -> RelayedAnswer {
        let Self { response, conn, pool } = self;
        let first_event_deadline = None;
        let backend = AnsweringBackend { lease, revoked, conn, pool, sent, deadline, first_event_deadline };
        RelayedAnswer { response, read_ahead: VecDeque::new(), backend: Box::new(backend), message: None }
    }
}

/// Makes one attempt on one generation, on a new connection if the backend has closed an idle one.
#[inline]
pub(crate) async fn attempt_once(
    upstream: &UpstreamContext,
    lease: &SharedLease,
    message: &mut UpstreamRequest,
) -> Result<AttemptAnswer, AttemptFailure> {
    let pool = upstream.pool(&**lease);
    let mut request = None;
    if let Some(mut conn) = pool.reuse() {
        let sending = build_request(upstream, message, lease);
        lease.note_sent(message.sent(), message.streams);
        match conn.send(sending).await {
            Ok(response) => return Ok(AttemptAnswer { response, conn, pool }),
            Err(UpstreamSendError::Sent(error)) => return Err(AttemptFailure::from_send_error(&error)),
            Err(UpstreamSendError::Begun(error)) => return Err(AttemptFailure::from_head_error(&error)),
            Err(UpstreamSendError::Unsent(unsent)) => request = Some(*unsent),
        }
    }
    let mut conn = match connect_to_generation(&**lease, &pool).await {
        Ok(conn) => conn,
        Err(error) => {
            tracing::debug!(%error, "cannot connect to a backend");
            if let Some(request) = request {
                message.put_back(request);
            }
            return Err(AttemptFailure::from_connect_error(&error));
        }
    };
    let request = request.unwrap_or_else(|| build_request(upstream, message, lease));
    lease.note_sent(message.sent(), message.streams);
    match conn.send(request).await {
        Ok(response) => Ok(AttemptAnswer { response, conn, pool }),
        Err(UpstreamSendError::Sent(error)) => Err(AttemptFailure::from_send_error(&error)),
        Err(UpstreamSendError::Begun(error)) => Err(AttemptFailure::from_head_error(&error)),
        Err(UpstreamSendError::Unsent(request)) => {
            message.put_back(*request);
            Err(AttemptFailure::Unsent)
        }
    }
}

/// A body that is still arriving gets a checkpoint at its end.
fn build_request(
    upstream: &UpstreamContext,
    message: &mut UpstreamRequest,
    lease: &SharedLease,
) -> Request<RequestBody> {
    let mut request = message.request();
    if let LeaseAddress::Remote(origin) = lease.address()
        && let Err(error) = origin.address_request(&mut request)
    {
        // Cannot happen: the configuration checked address and key, and the path was parsed.
        tracing::error!(%error, "cannot address a request to its endpoint");
    }
    close_after_unread_body(&mut request, lease.server_facts());
    request.body_mut().set_checkpoint(|| BodyCheckpoint::new(lease, upstream.tasks.clone()));
    request
}

/// Connects to a generation and checks that its own process listens at the address.
pub(crate) async fn connect_to_generation(
    lease: &dyn BackendLease,
    pool: &ConnectionPool,
) -> io::Result<UpstreamConn> {
    let conn = pool.connect(lease.address()).await?;
    // After the process has ended, another process may own its port and would get the request.
    let is_its_own =
        !matches!(lease.address(), LeaseAddress::Process(ListenAddress::Tcp(_))) || lease.is_running();
    is_its_own.then_some(conn).ok_or_else(|| io::ErrorKind::ConnectionRefused.into())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttemptFailure {
    /// No connection was made.
    Refused,
    /// This process is out of file descriptors, which is temporary and no fault of the backend.
    NoDescriptors,
    /// The connection was closed before a byte was sent.
    Unsent,
    /// The connection ended after at least a part of the request was sent, and before any byte of an answer.
    Sent,
    /// The connection ended within the head of the answer.
    Begun,
    /// The answer cannot be parsed.
    Garbled,
}

impl AttemptFailure {
    /// Label for traces, from a bounded set.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::NoDescriptors => "no_files",
            Self::Unsent => "unsent",
            Self::Sent => "died",
            Self::Begun => "died_in_its_head",
            Self::Garbled => "garbled",
        }
    }

    /// Returns whether the backend may have received the request.
    pub(super) fn was_sent(self) -> bool {
        matches!(self, Self::Sent | Self::Begun | Self::Garbled)
    }

    fn from_connect_error(error: &io::Error) -> Self {
        match Errno::from_io_error(error) {
            Some(Errno::MFILE | Errno::NFILE) => Self::NoDescriptors,
            _ => Self::Refused,
        }
    }

    fn from_send_error(error: &hyper::Error) -> Self {
        tracing::debug!(%error, "a backend's connection ended before its answer");
        if error.is_parse() { Self::Garbled } else { Self::Sent }
    }

    fn from_head_error(error: &hyper::Error) -> Self {
        tracing::debug!(%error, "a backend's answer broke off in its head");
        if error.is_parse() { Self::Garbled } else { Self::Begun }
    }
}
