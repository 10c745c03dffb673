//! Requests that the gateway sends to the next server to continue an answer: preparatory questions (probe,
//! template, tokens), and the request for the rest of the answer.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};

use super::request::NoContinuationReason;
use super::{ANSWER_BASE_BYTES, ANSWER_BYTES_PER_BYTE, ContinuationStop};
use crate::answer::assemble::is_events;
use crate::backend::attempts::{AnsweringBackend, BackendAttempts, RelayedAnswer};
use crate::backend::backends::{BackendLease, BoxFuture};
use crate::backend::message::UpstreamRequest;
use crate::backend::pool::ConnectionPool;
use crate::backend::upstream_conn::{IncompleteAnswer, UpstreamConn};

/// Response to a probe, its connection with a flag for a completely sent request, and the connection's pool.
pub(super) type ProbedResponse = (http::Response<Incoming>, (UpstreamConn, bool), Arc<ConnectionPool>);

/// Builds a request of the gateway with the head of the client's request.
pub(super) fn side_request(
    message: &UpstreamRequest,
    path: Option<&'static str>,
    body: Vec<u8>,
    streams: bool,
) -> Result<UpstreamRequest, NoContinuationReason> {
    let beside = message.side_request(path, Bytes::from(body), streams);
    beside.ok_or_else(|| "the limit of held request bytes is reached".to_owned())
}

/// Connection state for questions to the next server.
pub(super) struct ContinuationClient<'a> {
    pub(super) attempts: BackendAttempts<'a>,
    pub(super) message: Box<UpstreamRequest>,
    pub(super) lease: Arc<dyn BackendLease>,
    pub(super) revoked: BoxFuture<'static, ()>,
    pub(super) deadline: Instant,
}

impl ContinuationClient<'_> {
    /// Runs `future` until the lease is revoked or the deadline passes. Neither counts as a failure of the
    /// server.
    async fn until_deadline<T>(&mut self, future: impl Future<Output = T>) -> Result<T, ContinuationStop> {
        tokio::select! {
            biased;
            done = timeout_at(self.deadline, future) => done.map_err(|_| {
                ContinuationStop::NoWay("the whole would take longer than `upstream.exchange_timeout`".to_owned())
            }),
            () = &mut self.revoked => {
                if let Some(print) = self.message.sent().fingerprint() {
                    self.lease.report_lost(print);
                }
                Err(ContinuationStop::NoWay("the process that followed was stopped, too".to_owned()))
            }
        }
    }

    /// Reads a whole response body.
    pub(super) async fn read_all(
        &mut self,
        conn: &mut UpstreamConn,
        body: Incoming,
        limit: usize,
        is_sent: bool,
    ) -> Result<Vec<u8>, ContinuationStop> {
        self.until_deadline(conn.read_all(body, limit)).await?.map_err(|part| match part {
            IncompleteAnswer::Broken => self.note_broken(is_sent),
            IncompleteAnswer::TooLong => ContinuationStop::NotThisWay(
                "the answer of the process that follows exceeds the size limit".to_owned(),
            ),
        })
    }

    /// Reports a broken connection to the lease if the request was sent completely (`whole`): the request
    /// may have killed the server.
    fn note_broken(&self, whole: bool) -> ContinuationStop {
        if let Some(print) = self.message.sent().fingerprint().filter(|_| whole) {
            self.lease.report_broken(print);
        }
        self.lease.doubt();
        ContinuationStop::NoWay("the process that followed ended, too".to_owned())
    }

    /// Reads the whole response to a probe.
    pub(super) async fn read_probe(
        &mut self,
        (response, (mut conn, is_sent), pool): ProbedResponse,
    ) -> Result<Vec<u8>, ContinuationStop> {
        if response.status() != StatusCode::OK {
            let status = response.status();
            return Err(format!("the process that follows answers with {status} when asked for it").into());
        }
        let most = ANSWER_BASE_BYTES
            + self.message.json().map_or(0, |body| body.len()).saturating_mul(ANSWER_BYTES_PER_BYTE);
        let told = self.read_all(&mut conn, response.into_body(), most, is_sent).await?;
        pool.put_back(conn, self.lease.server_facts());
        Ok(told)
    }

    /// Sends a question to `path` and returns the answer.
    pub(super) async fn ask(
        &mut self,
        path: &'static str,
        body: Vec<u8>,
    ) -> Result<Vec<u8>, ContinuationStop> {
        self.ask_path(Some(path), body).await
    }

    /// Sends a question to the client's own route and returns the answer.
    pub(super) async fn ask_own_route(&mut self, body: Vec<u8>) -> Result<Vec<u8>, ContinuationStop> {
        self.ask_path(None, body).await
    }

    async fn ask_path(
        &mut self,
        path: Option<&'static str>,
        body: Vec<u8>,
    ) -> Result<Vec<u8>, ContinuationStop> {
        let limit = ANSWER_BASE_BYTES + body.len().saturating_mul(ANSWER_BYTES_PER_BYTE);
        let mut message = side_request(&self.message, path, body, false)?;
        self.attempts.note_side_question(&mut message);
        let lease = self.lease.clone();
        let BackendAttempts { upstream, .. } = self.attempts;
        let asked =
            self.until_deadline(BackendAttempts::attempt_once(upstream, &lease, &mut message)).await?;
        let Ok((response, mut conn, pool)) = asked else {
            return Err(self.note_broken(message.sent().is_whole()));
        };
        if response.status() != StatusCode::OK {
            let asked = path.unwrap_or("that request");
            return Err(format!("its build answers {asked} with {}", response.status()).into());
        }
        let answer = self.read_all(&mut conn, response.into_body(), limit, true).await?;
        pool.put_back(conn, lease.server_facts());
        Ok(answer)
    }

    /// Requests the stream that is the rest of the answer.
    pub(super) async fn request_rest(
        mut self,
        path: Option<&'static str>,
        body: Vec<u8>,
    ) -> Result<RelayedAnswer, ContinuationStop> {
        let mut message = side_request(&self.message, path, body, true)?;
        let lease = self.lease.clone();
        self.attempts.note_sent(&lease, &mut message);
        let BackendAttempts { upstream, .. } = self.attempts;
        let asked =
            self.until_deadline(BackendAttempts::attempt_once(upstream, &lease, &mut message)).await?;
        let Ok((response, conn, pool)) = asked else {
            return Err(self.note_broken(message.sent().is_whole()));
        };
        if response.status() != StatusCode::OK || !is_events(response.headers()) {
            let status = response.status();
            return Err(format!("the process that follows answers with {status} and no stream").into());
        }
        let Self { lease, revoked, deadline, .. } = self;
        let sent = message.sent();
        let backend = Box::new(AnsweringBackend {
            lease,
            revoked,
            conn,
            pool,
            sent,
            deadline,
            first_event_deadline: None,
        });
        Ok(RelayedAnswer { response, read_ahead: VecDeque::new(), backend, message: None })
    }
}
