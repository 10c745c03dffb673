//! Questions to the next server (probe, template, tokens), and the request for the rest.

use std::sync::Arc;

use bytes::Bytes;
use http::{Response, StatusCode};
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};

use super::request::NoContinuationReason;
use super::{ANSWER_BASE_BYTES, ANSWER_BYTES_PER_BYTE, ContinuationStop};
use crate::backend::{
    AttemptAnswer, BackendAttempts, BoxFuture, ConnectionPool, IncompleteAnswer, RelayedAnswer, SharedLease,
    UpstreamConn, UpstreamRequest, attempt_once,
};
use crate::protocol::headers::is_events;

pub(super) struct ProbedResponse {
    pub(super) response: Response<Incoming>,
    pub(super) conn: UpstreamConn,
    /// True if the whole probe was sent.
    pub(super) is_sent: bool,
    pub(super) pool: Arc<ConnectionPool>,
}

pub(super) fn side_request(
    message: &UpstreamRequest,
    path: Option<&'static str>,
    body: Vec<u8>,
    streams: bool,
) -> Result<UpstreamRequest, NoContinuationReason> {
    let beside = message.side_request(path, Bytes::from(body), streams);
    beside.ok_or_else(|| "the limit of held request bytes is reached".to_owned())
}

pub(super) struct ContinuationClient<'a> {
    pub(super) attempts: BackendAttempts<'a>,
    pub(super) message: Box<UpstreamRequest>,
    pub(super) lease: SharedLease,
    pub(super) revoked: BoxFuture<'static, ()>,
    pub(super) deadline: Instant,
}

impl ContinuationClient<'_> {
    /// Runs `future` until the lease is revoked or the deadline passes, which is no failure of the server.
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

    /// Reports a broken connection to the lease. `whole`: all of the request was sent.
    fn note_broken(&self, whole: bool) -> ContinuationStop {
        if let Some(print) = self.message.sent().fingerprint()
            && whole
        {
            self.lease.report_broken(print);
        }
        self.lease.doubt();
        ContinuationStop::NoWay("the process that followed ended, too".to_owned())
    }

    pub(super) async fn read_probe(&mut self, probed: ProbedResponse) -> Result<Vec<u8>, ContinuationStop> {
        let ProbedResponse { response, mut conn, is_sent, pool } = probed;
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

    /// Sends a question to `path`, or to the client's own route.
    pub(super) async fn ask(
        &mut self,
        path: Option<&'static str>,
        body: Vec<u8>,
    ) -> Result<Vec<u8>, ContinuationStop> {
        let limit = ANSWER_BASE_BYTES + body.len().saturating_mul(ANSWER_BYTES_PER_BYTE);
        let mut message = side_request(&self.message, path, body, false)?;
        self.attempts.note_side_question(&mut message);
        let AttemptAnswer { response, mut conn, pool } = self.attempt(&mut message).await?;
        if response.status() != StatusCode::OK {
            let asked = path.unwrap_or("that request");
            return Err(format!("its build answers {asked} with {}", response.status()).into());
        }
        let answer = self.read_all(&mut conn, response.into_body(), limit, true).await?;
        pool.put_back(conn, self.lease.server_facts());
        Ok(answer)
    }

    pub(super) async fn attempt(
        &mut self,
        message: &mut UpstreamRequest,
    ) -> Result<AttemptAnswer, ContinuationStop> {
        let lease = self.lease.clone();
        let search = self.attempts.search;
        let answer = self.until_deadline(attempt_once(&search.upstream, &lease, message)).await?;
        answer.map_err(|_| self.note_broken(message.sent().is_whole()))
    }

    pub(super) async fn request_rest(
        mut self,
        path: Option<&'static str>,
        body: Vec<u8>,
    ) -> Result<RelayedAnswer, ContinuationStop> {
        let mut message = side_request(&self.message, path, body, true)?;
        let lease = self.lease.clone();
        self.attempts.note_sent(&lease, &mut message);
        let answer = self.attempt(&mut message).await?;
        let status = answer.response.status();
        let headers = answer.response.headers();
        if status != StatusCode::OK || !is_events(headers) {
            return Err(format!("the process that follows answers with {status} and no stream").into());
        }
        let Self { lease, revoked, deadline, message: own, .. } = self;
        let mut relayed = answer.with_lease(lease, revoked, message.sent(), deadline);
        relayed.message = Some(own);
        Ok(relayed)
    }
}
