//! The three routes of the probe listener, open to every client that can reach it. All other paths are a 404.

use std::convert::Infallible;

use bytes::Bytes;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;

use super::board::ProbeBoard;
use crate::response::{METRICS_TYPE, OPEN_METRICS_TYPE, wants_open_metrics};

type ProbeResponse = Response<Full<Bytes>>;

const TEXT_TYPE: &str = "text/plain; charset=utf-8";

pub(super) async fn answer(
    board: &ProbeBoard,
    request: Request<Incoming>,
) -> Result<ProbeResponse, Infallible> {
    Ok(route_response(board, request.method(), request.uri().path(), request.headers()).await)
}

async fn route_response(
    board: &ProbeBoard,
    method: &Method,
    path: &str,
    headers: &HeaderMap,
) -> ProbeResponse {
    if !matches!(path, "/livez" | "/readyz" | "/metrics") {
        return text_response(
            StatusCode::NOT_FOUND,
            "there are GET /livez, GET /readyz and GET /metrics here\n",
        );
    }
    if !matches!(*method, Method::GET | Method::HEAD) {
        let mut answer =
            text_response(StatusCode::METHOD_NOT_ALLOWED, "nothing can be done here: use GET or HEAD\n");
        answer.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return answer;
    }
    match path {
        "/livez" => match board.check_alive() {
            Ok(()) => text_response(StatusCode::OK, "ok\n"),
            Err(age) => {
                let seconds = age.as_secs();
                text_response(
                    StatusCode::SERVICE_UNAVAILABLE,
                    format!("stuck: nothing has moved for {seconds} s\n"),
                )
            }
        },
        "/readyz" => match board.check_ready() {
            Ok(()) => text_response(StatusCode::OK, "ok\n"),
            Err(why) => text_response(StatusCode::SERVICE_UNAVAILABLE, format!("{}: {why}\n", why.as_str())),
        },
        _ => match board.metrics().await {
            Some(text) if wants_open_metrics(headers) => {
                make_response(StatusCode::OK, OPEN_METRICS_TYPE, text.open_metrics.clone())
            }
            Some(text) => make_response(StatusCode::OK, METRICS_TYPE, text.plain.clone()),
            None => text_response(StatusCode::SERVICE_UNAVAILABLE, "no metrics could be made in time\n"),
        },
    }
}

fn text_response(status: StatusCode, text: impl Into<Bytes>) -> ProbeResponse {
    make_response(status, TEXT_TYPE, text.into())
}

fn make_response(status: StatusCode, kind: &'static str, body: Bytes) -> ProbeResponse {
    let mut answer = Response::new(Full::new(body));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use warden_policies::defaults::Probe;
    use warden_policies::pool::{BalancedModel, InstanceFacts};

    use super::*;

    #[tokio::test]
    async fn each_route_says_what_it_is_for_and_nothing_else_is_told() {
        let numbers =
            Probe { patience: Duration::from_millis(1), ..warden_policies::defaults().probe.clone() };
        let board = ProbeBoard::new(numbers, std::sync::Arc::default());
        let none = HeaderMap::new();
        let ask = async |method: Method, path: &str| {
            route_response(&board, &method, path, &none).await.status().as_u16()
        };
        assert_eq!((ask(Method::GET, "/livez").await, ask(Method::GET, "/readyz").await), (200, 503));
        assert_eq!(ask(Method::GET, "/metrics").await, 503, "none was made");
        let models = vec![BalancedModel { slots: 1, ..BalancedModel::default() }];
        board.set_facts(InstanceFacts { models, ..InstanceFacts::default() });
        assert_eq!((ask(Method::HEAD, "/readyz").await, ask(Method::POST, "/readyz").await), (200, 405));
        for path in ["/", "/status", "/drain", "/readyz/", "/models/m/logs", "/page/"] {
            assert_eq!((ask(Method::GET, path).await, ask(Method::POST, path).await), (404, 404), "{path}");
        }
        let answer = route_response(&board, &Method::GET, "/readyz", &none).await;
        assert_eq!(answer.headers()[CACHE_CONTROL], "no-store");
    }
}
