//! A self-test before the predecessor hands over: the program sends itself requests of a client and an
//! operator.
//!
//! The client's request is accepted, read, routed and answered on a thread of the gateway as usual, although
//! the listening sockets are still the predecessor's. The test does not use TLS: the certificate was read at
//! our start, and the test's client could not verify it.

use std::time::Duration;

use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{HOST, HeaderMap, HeaderValue};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::time::timeout;
use warden_admin::state::AdminState;
use warden_gateway::InwardConnector;

/// Limit in bytes of the answer: `/health` of a thousand models is smaller.
const MAX_ANSWER_BYTES: usize = 16 << 20;

pub(in crate::serve) struct SelfTest {
    inward: InwardConnector,
    admin: AdminState,
}

impl SelfTest {
    pub(in crate::serve) fn new(inward: InwardConnector, admin: AdminState) -> Self {
        Self { inward, admin }
    }

    /// Sends requests of a client and an operator; the error names the part that does not answer in time.
    pub(in crate::serve) async fn run(&self, limit: Duration) -> Result<(), String> {
        let asked = async {
            test_client(&self.inward).await.map_err(|why| format!("it does not answer a client: {why}"))?;
            test_operator(&self.admin).await
        };
        let late = || Err(format!("it does not answer a request of its own within {limit:?}"));
        if limit.is_zero() {
            // Do not run the test: whether an answer precedes a timeout of zero would be left to chance.
            return late();
        }
        timeout(limit, asked).await.unwrap_or_else(|_| late())
    }
}

async fn test_client(inward: &InwardConnector) -> Result<(), String> {
    let stream = inward.connect().await.map_err(|error| format!("cannot connect: {error}"))?;
    let wire = TokioIo::new(stream);
    let (mut sender, connection) = http1::handshake(wire).await.map_err(|error| error.to_string())?;
    let mut request = Request::new(Empty::<Bytes>::new());
    *request.uri_mut() = hyper::Uri::from_static("/health");
    request.headers_mut().insert(HOST, HeaderValue::from_static("localhost"));
    let asked = async {
        let answer = sender.send_request(request).await.map_err(|error| format!("no answer: {error}"))?;
        let status = answer.status();
        let whole = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect().await;
        whole.map_err(|error| format!("half an answer: {error}"))?;
        Ok(status)
    };
    tokio::pin!(asked);
    let status: Result<StatusCode, String> = tokio::select! {
        biased;
        status = &mut asked => status,
        _ended = connection => asked.await,
    };
    check_status(status?)
}

/// A missing key, an unknown host or a drain may refuse the request; a server error is a failure.
fn check_status(status: StatusCode) -> Result<(), String> {
    let fails = status.is_server_error() && status != StatusCode::SERVICE_UNAVAILABLE;
    if fails { Err(format!("`/health` says {status}")) } else { Ok(()) }
}

async fn test_operator(admin: &AdminState) -> Result<(), String> {
    let status = admin.answer(&Method::GET, "/status", None, &HeaderMap::new()).await.status();
    if status.is_success() {
        Ok(())
    } else {
        Err(format!("it does not answer an operator: `/status` says {status}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_says_that_it_fails_is_no_answer() {
        for (status, good) in [(200, true), (401, true), (421, true), (503, true), (500, false), (502, false)]
        {
            assert_eq!(check_status(StatusCode::from_u16(status).unwrap()).is_ok(), good, "{status}");
        }
    }
}
