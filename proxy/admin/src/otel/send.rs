//! One attempt to send spans: OTLP over HTTP, as specified (1.x, "OTLP/HTTP").

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::time::timeout;
use warden_config::resolve::telemetry::TraceCollector;

use super::proto::ExportResponse;

/// Limit of an answer; an error is usually one sentence.
const MAX_ANSWER_BYTES: usize = 64 << 10;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum SpanSendError {
    /// A retry may help.
    Later {
        why: String,
        /// The collector requested this wait.
        after: Option<Duration>,
    },
    Never(String),
}

/// If the collector accepts the request, returns the number of spans that it rejected, with the reason.
pub(super) async fn send_spans(
    collector: &TraceCollector,
    body: Bytes,
) -> Result<(u64, String), SpanSendError> {
    let limit = collector.numbers.timeout;
    let later = |why: String| SpanSendError::Later { why, after: None };
    match timeout(limit, exchange_once(collector, body)).await {
        Ok(Ok((status, headers, answer))) => interpret_answer(status, &headers, &answer),
        Ok(Err(why)) => Err(later(why)),
        Err(_) => Err(later(format!("it does not answer within {limit:?}"))),
    }
}

async fn exchange_once(
    collector: &TraceCollector,
    body: Bytes,
) -> Result<(StatusCode, HeaderMap, Bytes), String> {
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = collector.path.parse::<Uri>().map_err(|error| error.to_string())?;
    let headers = request.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
    headers.insert(USER_AGENT, HeaderValue::from_static(concat!("llama-warden/", env!("CARGO_PKG_VERSION"))));
    // This call removes unknown headers, so make it before adding the configured headers.
    collector.origin.address_request(&mut request).map_err(|error| error.to_string())?;
    for (name, value) in &collector.headers {
        request.headers_mut().insert(name, value.clone());
    }
    let wire = collector.origin.connect().await.map_err(|error| format!("cannot connect: {error}"))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(wire)).await.map_err(|error| format!("cannot connect: {error}"))?;
    let answered = async {
        let answer = sender.send_request(request).await.map_err(|error| format!("no answer: {error}"))?;
        let (parts, body) = answer.into_parts();
        // The status alone shows whether the collector accepted the spans, so a missing body is no failure.
        let body =
            Limited::new(body, MAX_ANSWER_BYTES).collect().await.map(http_body_util::Collected::to_bytes);
        Ok((parts.status, parts.headers, body.unwrap_or_default()))
    };
    tokio::pin!(answered);
    tokio::select! {
        biased;
        answer = &mut answered => answer,
        _ = connection => answered.await,
    }
}

fn interpret_answer(
    status: StatusCode,
    headers: &HeaderMap,
    answer: &Bytes,
) -> Result<(u64, String), SpanSendError> {
    if status.is_success() {
        // The collector accepted the spans, so an unreadable body does not matter.
        let told =
            ExportResponse::decode(answer.clone()).unwrap_or_default().partial_success.unwrap_or_default();
        return Ok((u64::try_from(told.rejected_spans).unwrap_or(0), told.error_message));
    }
    let why = format!("it answers with {status}");
    match status.as_u16() {
        429 | 502 | 503 | 504 => Err(SpanSendError::Later { why, after: retry_after(headers) }),
        _ => Err(SpanSendError::Never(why)),
    }
}

/// `Retry-After` is a number of seconds or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = jiff::fmt::rfc2822::parse(text).ok()?.timestamp();
    date.duration_since(crate::clock::now()).try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::super::proto::PartialSuccess;
    use super::*;

    fn with(after: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::from_static(after))])
    }

    proptest::proptest! {
        /// Any answer of a collector means success, a retry, or a rejection.
        #[test]
        fn any_answer_means_something(
            status in 100..1000_u16,
            after in crate::mutated::mutated(&["7", "99999999999999999999", "Fri, 06 Nov 2099 08:49:37 GMT", "Fri, 31 Dec 9999 23:59:60 -9999"]),
            body in crate::mutated::mutated(&["\u{a}\u{7}\u{8}\u{3}\u{12}\u{3}old", "\u{a}\u{12}\u{8}\u{7f}\u{12}\u{e}rejected spans"]),
        ) {
            let mut headers = HeaderMap::new();
            if let Ok(after) = HeaderValue::from_bytes(&after) {
                headers.insert(RETRY_AFTER, after);
            }
            let status = StatusCode::from_u16(status).unwrap();
            let is_taken = interpret_answer(status, &headers, &body.into()).is_ok();
            proptest::prop_assert_eq!(is_taken, status.is_success());
        }
    }

    #[test]
    fn an_answer_says_whether_it_is_worth_another_attempt() {
        let none = HeaderMap::new();
        let judge = |status: u16, headers: &HeaderMap, body: &'static [u8]| {
            interpret_answer(StatusCode::from_u16(status).unwrap(), headers, &Bytes::from_static(body))
        };
        assert_eq!(judge(200, &none, b""), Ok((0, String::new())));
        assert_eq!(judge(202, &none, b"<html>rubbish"), Ok((0, String::new())));
        let partial = Some(PartialSuccess { rejected_spans: 3, error_message: "too old".to_owned() });
        let body = ExportResponse { partial_success: partial }.encode_to_vec();
        assert_eq!(interpret_answer(StatusCode::OK, &none, &body.into()), Ok((3, "too old".to_owned())));
        for status in [400, 401, 404, 413, 500, 501, 301] {
            assert!(matches!(judge(status, &none, b""), Err(SpanSendError::Never(_))), "{status}");
        }
        for status in [429, 502, 503, 504] {
            let Err(SpanSendError::Later { after, .. }) = judge(status, &with("7"), b"") else {
                panic!("{status}")
            };
            assert_eq!(after, Some(Duration::from_secs(7)));
        }
        assert_eq!(retry_after(&none), None);
        assert_eq!(retry_after(&with("soon")), None);
        assert_eq!(retry_after(&with("Sun, 06 Nov 1994 08:49:37 GMT")), None, "it is over");
        assert!(retry_after(&with("Fri, 06 Nov 2099 08:49:37 GMT")).is_some());
    }
}
