//! Formats errors as `OpenAI` or Anthropic do: a response, the last event of a stream, or raw bytes.

use std::time::Duration;

use http::StatusCode;
use serde_json::{Value, json};

use super::whole_seconds;
use crate::protocol::fresh_request_id;

/// Values that answers to unreadable heads name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadLimits {
    pub(crate) bytes: usize,
    pub(crate) count: usize,
    pub(crate) retry_after: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorDialect {
    /// llama-server's format: `OpenAI`'s with a number for `code`.
    OpenAi,
    /// Format of `OpenAI`'s Responses API: like `OpenAi`, but the events of a stream have types.
    Responses,
    Anthropic,
}

const ERROR_SOURCE: &str = "llama-warden";

/// Reason why a stream ends before its answer is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamEnd {
    /// The backend is gone or unusable.
    Fault,
    Cancelled,
}

/// Builds the last event of a stream. Without `[DONE]`, no client takes the answer for complete.
pub(crate) fn stream_error(end: StreamEnd, message: &str, dialect: ErrorDialect, seen: u64) -> String {
    let (status, kind, code) = match end {
        StreamEnd::Fault => (502, "server_error", None),
        StreamEnd::Cancelled => {
            (super::cancelled_status().as_u16(), super::CANCELLED_KIND, Some(super::CANCELLED_CODE))
        }
    };
    match dialect {
        ErrorDialect::OpenAi => {
            let mut error = openai_error(status, kind, message, None, None);
            if let Some(code) = code {
                error["error"]["code"] = json!(code);
            }
            format!("data: {error}\n\n")
        }
        ErrorDialect::Responses => {
            format!("event: error\ndata: {}\n\n", responses_error(code.unwrap_or(kind), message, seen))
        }
        ErrorDialect::Anthropic => {
            format!("event: error\ndata: {}\n\n", anthropic_error("api_error", message))
        }
    }
}

/// Builds the last event of a stream from a non-streaming answer, with the message in `body`.
pub(crate) fn answer_error_event(status: u16, body: &[u8], dialect: ErrorDialect) -> String {
    let read = serde_json::from_slice::<Value>(body).ok().filter(|value| value["error"].is_object());
    let message = read.as_ref().and_then(|value| value["error"]["message"].as_str());
    let message = message
        .map_or_else(|| format!("the model answered with status {status} and no stream"), str::to_owned);
    match (dialect, read) {
        (ErrorDialect::OpenAi, Some(error)) => format!("data: {error}\n\n"),
        (ErrorDialect::Anthropic, Some(error)) if error["type"] == "error" => {
            format!("event: error\ndata: {error}\n\n")
        }
        _ if status == super::cancelled_status().as_u16() => {
            stream_error(StreamEnd::Cancelled, &message, dialect, 0)
        }
        (ErrorDialect::OpenAi, None) => stream_error(StreamEnd::Fault, &message, dialect, 0),
        (ErrorDialect::Anthropic, read) => {
            let kind = StatusCode::from_u16(status).map_or("api_error", anthropic_kind);
            let mut error = anthropic_error(kind, &message);
            restore_source(&mut error["error"], read.as_ref());
            format!("event: error\ndata: {error}\n\n")
        }
        (ErrorDialect::Responses, read) => {
            let kind =
                read.as_ref().and_then(|read| read["error"]["type"].as_str()).unwrap_or("server_error");
            let mut error = responses_error(kind, &message, 0);
            restore_source(&mut error, read.as_ref());
            format!("event: error\ndata: {error}\n\n")
        }
    }
}

/// Keeps the `source` of an answer that becomes an error event. The gateway is the source only if the answer
/// says so, or has no message.
fn restore_source(error: &mut Value, read: Option<&Value>) {
    if let (Some(read), Some(fields)) = (read, error.as_object_mut())
        && read["error"]["source"].is_null()
    {
        fields.remove("source");
    }
}

/// Builds the flat `error` event of the Responses API, with its sequence number.
fn responses_error(code: &str, message: &str, seen: u64) -> Value {
    json!({
        "type": "error", "code": code, "message": message, "param": null, "sequence_number": seen,
        "source": ERROR_SOURCE,
    })
}

/// Builds an answer with a remedy to a head that hyper rejects; `None` for other statuses.
pub(crate) fn unreadable_head(status: u16, limits: &HeadLimits) -> Option<String> {
    let HeadLimits { bytes, count, retry_after } = *limits;
    let message = match status {
        400 => "the request head is not valid HTTP/1.1".to_owned(),
        408 => "the request head did not arrive in time (`server.header_timeout`)".to_owned(),
        414 => "the request target is too long; send parameters in the body".to_owned(),
        431 => format!(
            "the request head is larger than {bytes} bytes (`server.header_bytes`) or has more than \
             {count} fields (`server.header_count`); send fewer or smaller headers"
        ),
        503 => "too many connections (`server.connections`, `server.connections_per_peer`); send again soon"
            .to_owned(),
        _ => return None,
    };
    raw_answer(status, &message, retry_after)
}

/// Builds an answer for a client without TLS on a TLS port.
pub(crate) fn not_tls_answer() -> String {
    raw_answer(400, "this port speaks TLS: use https:// in the address", Duration::ZERO).unwrap_or_default()
}

/// Builds a whole response as raw bytes, before the connection is closed.
fn raw_answer(status: u16, message: &str, retry_after: Duration) -> Option<String> {
    let kind = if status == 503 { "unavailable_error" } else { "invalid_request_error" };
    let reason = StatusCode::from_u16(status).ok()?.canonical_reason()?;
    let retry = if status == 503 {
        format!("retry-after: {}\r\n", whole_seconds(retry_after))
    } else {
        String::new()
    };
    let body = openai_error(status, kind, message, None, None).to_string();
    // The request has no id, so generate one for the client and the log.
    let id = fresh_request_id();
    let id = id.to_str().unwrap_or_default();
    tracing::debug!(request_id = id, status, message, "refused a connection without a valid request");
    Some(format!(
        "HTTP/1.1 {status} {reason}\r\ncontent-type: application/json; \
         charset=utf-8\r\nx-warden-executed: no\r\nx-request-id: {id}\r\n{retry}connection: \
         close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    ))
}

pub(super) fn openai_error(
    code: u16,
    kind: &str,
    message: &str,
    param: Option<&str>,
    details: Option<Value>,
) -> Value {
    let mut error = json!({ "code": code, "message": message, "type": kind, "source": ERROR_SOURCE });
    if let Some(param) = param {
        error["param"] = json!(param);
    }
    if let Some(details) = details {
        error["details"] = details;
    }
    json!({ "error": error })
}

pub(super) fn anthropic_error(kind: &str, message: &str) -> Value {
    json!({ "type": "error", "error": { "type": kind, "message": message, "source": ERROR_SOURCE } })
}

pub(super) fn anthropic_kind(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    }
}
