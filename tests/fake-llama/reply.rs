//! Heads and small bodies with llama-server's headers.

use std::io;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::header::{HeaderName, HeaderValue};
use hyper::{Response, StatusCode, header};
use serde_json::{Value, json};

pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;

pub(crate) type Reply = Response<Body>;

pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

pub(crate) fn reply(status: StatusCode, content_type: &'static str, body: Body) -> Reply {
    let mut reply = Response::new(body);
    *reply.status_mut() = status;
    let headers = reply.headers_mut();
    headers.insert(header::SERVER, HeaderValue::from_static("llama.cpp"));
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static(""));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    if status.is_client_error() || status.is_server_error() {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    } else {
        headers.insert(HeaderName::from_static("keep-alive"), HeaderValue::from_static("timeout=5, max=100"));
    }
    reply
}

pub(crate) fn json_reply(status: StatusCode, value: &Value) -> Reply {
    reply(status, "application/json; charset=utf-8", full(value.to_string()))
}

pub(crate) fn ok(value: &Value) -> Reply {
    json_reply(StatusCode::OK, value)
}

pub(crate) fn error(status: u16, kind: &str, message: &str) -> Reply {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    json_reply(status, &json!({"error": {"message": message, "type": kind, "code": status.as_u16()}}))
}
