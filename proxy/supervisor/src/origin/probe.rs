//! Probes an endpoint and reads its list of models.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, HeaderValue, LOCATION};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::time::timeout;
use warden_policies::secrets;

use super::RemoteOrigin;

/// Every endpoint with OpenAI's API has this path, and the request costs nothing.
const MODELS_PATH: &str = "/v1/models";

/// Size limit of a list. Vendors of thousands of models need a few megabytes.
const MAX_LIST_BYTES: usize = 16 << 20;

const LIST_BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// JSON pointers to fields with a model's context length in tokens.
const CONTEXT_FIELDS: [&str; 4] = ["/context_length", "/max_model_len", "/context_window", "/meta/n_ctx"];

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EndpointInfo {
    pub(crate) n_ctx: Option<u32>,
    /// Note about a possible misconfiguration.
    pub(crate) note: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ProbeFailure {
    /// The endpoint may be busy.
    Timeout(String),
    Refused(String),
}

pub(crate) async fn probe(
    origin: &RemoteOrigin,
    model: &str,
    limit: Duration,
) -> Result<EndpointInfo, ProbeFailure> {
    let asked = timeout(limit, request_list(origin)).await;
    let ProbeAnswer { status, location, body } = match asked {
        Ok(answer) => answer.map_err(ProbeFailure::Refused)?,
        Err(_) => return Err(ProbeFailure::Timeout(format!("it does not answer within {limit:?}"))),
    };
    let code = status.as_u16();
    let refused = |why: String| Err(ProbeFailure::Refused(why));
    let note = |note: String| Ok(EndpointInfo { n_ctx: None, note: Some(note) });
    match status {
        StatusCode::UNAUTHORIZED if origin.has_key() => {
            refused(format!("it refuses the key in `key_file` (status {code})"))
        }
        StatusCode::UNAUTHORIZED => {
            refused(format!("it wants a key (status {code}): name its file in `key_file`"))
        }
        status if status.is_server_error() => {
            refused(format!("it answers `GET {MODELS_PATH}` with status {code}"))
        }
        status if status.is_redirection() => {
            let to = location.map(|to| format!(" to `{}`", secrets::redact_text(&to))).unwrap_or_default();
            refused(format!("it sends requests elsewhere{to} (status {code}): name that address in `url`"))
        }
        // A key may lack only the right to list models.
        StatusCode::FORBIDDEN => note(format!("the endpoint lists no models for this key (status {code})")),
        StatusCode::NOT_FOUND => {
            note(format!("the endpoint has nothing at `{origin}{MODELS_PATH}`: is `url` right?"))
        }
        status if !status.is_success() => {
            note(format!("the endpoint answers `GET {MODELS_PATH}` with status {code}"))
        }
        _ => Ok(parse_list(&body, model)),
    }
}

struct ProbeAnswer {
    status: StatusCode,
    location: Option<String>,
    /// Body of the answer; empty if incomplete in time, because the head alone is a sign of life.
    body: Bytes,
}

async fn request_list(origin: &RemoteOrigin) -> Result<ProbeAnswer, String> {
    let wire = origin.connect().await.map_err(|error| format!("cannot connect: {error}"))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(wire)).await.map_err(|error| format!("cannot connect: {error}"))?;
    let mut request = Request::new(Empty::<Bytes>::new());
    *request.uri_mut() = http::Uri::from_static(MODELS_PATH);
    let headers = request.headers_mut();
    headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
    origin.address_request(&mut request).map_err(|error| error.to_string())?;
    let answered = async {
        let response = sender.send_request(request).await.map_err(|error| format!("no answer: {error}"))?;
        let status = response.status();
        let location = response.headers().get(LOCATION).and_then(|to| to.to_str().ok()).map(str::to_owned);
        let body =
            timeout(LIST_BODY_TIMEOUT, Limited::new(response.into_body(), MAX_LIST_BYTES).collect()).await;
        let body = body.ok().and_then(Result::ok).map(http_body_util::Collected::to_bytes);
        Ok(ProbeAnswer { status, location, body: body.unwrap_or_default() })
    };
    tokio::pin!(answered);
    tokio::select! {
        biased;
        answer = &mut answered => answer,
        // The closed connection may still have unread data.
        _ = connection => answered.await,
    }
}

fn parse_list(body: &[u8], model: &str) -> EndpointInfo {
    let list: Value = serde_json::from_slice(body).unwrap_or_default();
    let Some(all) = list["data"].as_array().filter(|all| !all.is_empty()) else {
        return EndpointInfo::default();
    };
    let Some(entry) = all.iter().find(|entry| entry["id"] == model) else {
        let note = format!("the endpoint lists models, and `{model}` (`model`) is not among them");
        return EndpointInfo { n_ctx: None, note: Some(note) };
    };
    let said = CONTEXT_FIELDS.iter().find_map(|place| entry.pointer(place)?.as_u64());
    EndpointInfo { n_ctx: said.and_then(|tokens| u32::try_from(tokens).ok()), note: None }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// Result for an endpoint that sends this and closes.
    async fn told(answer: &'static str) -> Result<EndpointInfo, ProbeFailure> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/api/v1", listener.local_addr().unwrap());
        let origin = RemoteOrigin::parse(&url, None).unwrap();
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut read = vec![0; 4096];
            let got = stream.read(&mut read).await.unwrap();
            let request = String::from_utf8_lossy(&read[..got]).into_owned();
            assert!(request.starts_with("GET /api/v1/models HTTP/1.1\r\n"), "{request}");
            assert!(request.contains("user-agent: llama-warden/"), "{request}");
            stream.write_all(answer.as_bytes()).await.unwrap();
            stream.shutdown().await.unwrap();
        };
        let (told, ()) = tokio::join!(probe(&origin, "m", Duration::from_secs(20)), server);
        told
    }

    #[tokio::test]
    async fn an_answer_tells_whether_requests_would_be_answered() {
        for (answer, wanted, words) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", true, ""),
            ("HTTP/1.0 200 OK\r\n\r\n{\"data\":[{\"id\":\"m\"}]}", true, ""),
            // The head alone is a sign of life.
            ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", true, ""),
            ("HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", true, "status 403"),
            ("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", true, "is `url` right?"),
            ("HTTP/1.1 429 Slow Down\r\nContent-Length: 0\r\n\r\n", true, "status 429"),
            ("HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", false, "wants a key"),
            ("HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", false, "status 503"),
            (
                "HTTP/1.1 301 Moved\r\nLocation: https://else.example/\r\nContent-Length: 0\r\n\r\n",
                false,
                "https://else.example/",
            ),
            ("SSH-2.0-x\r\n", false, "no answer"),
            ("", false, "no answer"),
        ] {
            let told = told(answer).await;
            assert_eq!(told.is_ok(), wanted, "{answer}: {told:?}");
            let said = match told {
                Ok(listed) => listed.note.unwrap_or_default(),
                Err(ProbeFailure::Refused(why) | ProbeFailure::Timeout(why)) => why,
            };
            assert!(said.contains(words) && words.is_empty() == said.is_empty(), "{answer}: {said}");
        }
        let gone = RemoteOrigin::parse("http://127.0.0.1:1", None).unwrap();
        let told = probe(&gone, "m", Duration::from_secs(20)).await;
        assert!(matches!(told, Err(ProbeFailure::Refused(why)) if why.starts_with("cannot connect")));
    }

    #[test]
    fn a_list_says_how_long_a_context_is_or_that_there_is_no_such_model() {
        let missing = || "the endpoint lists models, and `m` (`model`) is not among them".to_owned();
        let of = |list: Value| parse_list(list.to_string().as_bytes(), "m");
        let some = |n_ctx, is_missing: bool| EndpointInfo { n_ctx, note: is_missing.then(missing) };
        assert_eq!(of(json!({ "data": [{ "id": "m", "context_length": 8192 }] })), some(Some(8192), false));
        assert_eq!(
            of(json!({ "data": [{ "id": "m", "meta": { "n_ctx": 4096 } }] })),
            some(Some(4096), false)
        );
        assert_eq!(of(json!({ "data": [{ "id": "x" }, { "id": "m" }] })), some(None, false));
        assert_eq!(of(json!({ "data": [{ "id": "x" }] })), some(None, true));
        for unclear in [json!({ "data": [] }), json!([1]), json!("text"), json!({ "data": { "id": "x" } })] {
            assert_eq!(of(unclear), EndpointInfo::default());
        }
        assert_eq!(parse_list(b"<html>", "m"), EndpointInfo::default());
    }
}
