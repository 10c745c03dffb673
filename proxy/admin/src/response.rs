//! Answers to clients of the admin routes: JSON, JSON lines, or text for Prometheus. Likely secrets are hidden.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::stream::{self, Stream, StreamExt};
use http::{HeaderMap, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use serde::Serialize;
use serde_json::json;
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio_util::sync::CancellationToken;
use warden_policies::secrets;

/// Body of an answer.
pub type AdminBody = UnsyncBoxBody<Bytes, Infallible>;

pub(crate) const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
pub(crate) const OPEN_METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

pub(crate) fn error_response(status: StatusCode, message: &str) -> Response<AdminBody> {
    json_response(status, &json!({ "error": message }))
}

/// Prometheus lists the formats that it reads; a client that lists none gets the older format.
pub(crate) fn wants_open_metrics(headers: &HeaderMap) -> bool {
    let named = |value: &http::HeaderValue| {
        value.to_str().is_ok_and(|text| text.to_ascii_lowercase().contains("application/openmetrics-text"))
    };
    headers.get_all(header::ACCEPT).iter().any(named)
}

pub(crate) fn json_response(status: StatusCode, value: &impl Serialize) -> Response<AdminBody> {
    // The last output of a process may quote a key, and operators share these answers, so hide secrets.
    match serde_json::to_value(value) {
        Ok(value) => {
            make_response(status, "application/json", full_body(format!("{}\n", secrets::redact_json(value))))
        }
        Err(problem) => make_response(
            StatusCode::INTERNAL_SERVER_ERROR,
            "text/plain",
            full_body(format!("cannot write the answer: {problem}\n")),
        ),
    }
}

pub(crate) fn full_body(text: String) -> AdminBody {
    Full::new(Bytes::from(text)).boxed_unsync()
}

pub(crate) fn make_response(status: StatusCode, kind: &'static str, body: AdminBody) -> Response<AdminBody> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static(kind));
    response
}

pub(crate) type LineEncoder<T> = fn(&T) -> Result<Frame<Bytes>, Infallible>;

/// Streams JSON lines: the kept items, then new ones until the client leaves or `stop` is cancelled.
pub(crate) fn stream_lines<T>(
    kept: Vec<T>,
    more: Option<Receiver<T>>,
    stop: CancellationToken,
    line: LineEncoder<T>,
) -> Response<AdminBody>
where
    T: Serialize + Clone + Send + 'static,
{
    let kept = stream::iter(kept).map(move |item| line(&item));
    let body = match more {
        None => StreamBody::new(kept).boxed_unsync(),
        Some(receiver) => StreamBody::new(kept.chain(follow_receiver(receiver, stop, line))).boxed_unsync(),
    };
    make_response(StatusCode::OK, "application/jsonl", body)
}

fn follow_receiver<T>(
    receiver: Receiver<T>,
    stop: CancellationToken,
    line: LineEncoder<T>,
) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>>
where
    T: Serialize + Clone + Send + 'static,
{
    stream::unfold((receiver, stop), move |(mut receiver, stop)| async move {
        let next = tokio::select! {
            next = receiver.recv() => next,
            () = stop.cancelled() => return None,
        };
        match next {
            Ok(item) => Some((line(&item), (receiver, stop))),
            // A client that reads too slowly gets the number of missed items, and delays no other client.
            Err(RecvError::Lagged(missed)) => {
                Some((raw_line(&json!({ "missed": missed })), (receiver, stop)))
            }
            Err(RecvError::Closed) => None,
        }
    })
}

pub(crate) fn redacted_line<T: Serialize>(item: &T) -> Result<Frame<Bytes>, Infallible> {
    match serde_json::to_value(item) {
        Ok(value) => raw_line(&secrets::redact_json(value)),
        Err(_) => Ok(Frame::data(Bytes::new())),
    }
}

/// Serializes an item as a JSON line with nothing hidden, for clients that asked to see secrets.
#[expect(clippy::unnecessary_wraps, reason = "the shape that a streamed body asks for")]
pub(crate) fn raw_line<T: Serialize>(item: &T) -> Result<Frame<Bytes>, Infallible> {
    let text = serde_json::to_string(item).map(|text| format!("{text}\n")).unwrap_or_default();
    Ok(Frame::data(Bytes::from(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_tail_is_the_kept_lines_then_the_new_ones_and_ends_when_we_end() {
        let (sender, receiver) = tokio::sync::broadcast::channel(2);
        let stop = CancellationToken::new();
        let mut body = stream_lines(vec![1, 2], Some(receiver), stop.clone(), redacted_line).into_body();
        let mut next = async || {
            let frame = body.frame().await?.unwrap();
            Some(String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap())
        };
        assert_eq!(next().await.unwrap(), "1\n");
        assert_eq!(next().await.unwrap(), "2\n");
        sender.send(3).unwrap();
        assert_eq!(next().await.unwrap(), "3\n");
        for item in 4..8 {
            sender.send(item).unwrap();
        }
        assert_eq!(next().await.unwrap(), "{\"missed\":2}\n");
        assert_eq!(next().await.unwrap(), "6\n");
        assert_eq!(next().await.unwrap(), "7\n");
        stop.cancel();
        assert_eq!(next().await, None);
    }

    #[tokio::test]
    async fn without_follow_the_tail_ends() {
        let secret = "hf_abcdefghijklmnopqrstuvwxyzABCD1234";
        let text = async |how: LineEncoder<&'static str>| {
            let body = stream_lines(vec!["a", secret], None, CancellationToken::new(), how).into_body();
            String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap()
        };
        assert_eq!(text(redacted_line).await, "\"a\"\n\"***\"\n");
        assert_eq!(text(raw_line).await, format!("\"a\"\n\"{secret}\"\n"));
    }
}
