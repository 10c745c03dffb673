//! Answers of the admin routes.

use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderMap, Method, Response, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::json;
use warden_supervisor::ControlError;

use crate::metrics::families::to_plain_text;
use crate::response::{
    AdminBody, METRICS_TYPE, OPEN_METRICS_TYPE, error_response, full_body, json_response, make_response,
    raw_line, redacted_line, stream_lines, wants_open_metrics,
};
use crate::route::{self, AdminRoute, ROUTE_LIST, RouteError};
use crate::state::AdminState;
use crate::upgrade_order::OrderError;

/// The answer to `POST /drain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainReport {
    /// The instance asks probes and load balancers to send it no more requests.
    pub draining: bool,
    /// Number of requests that have not ended.
    pub in_flight: usize,
}

impl AdminState {
    /// Answers a request. `headers` decide the format of metrics.
    pub async fn answer(
        &self,
        method: &Method,
        path: &str,
        query: Option<&str>,
        headers: &HeaderMap,
    ) -> Response<AdminBody> {
        match route::parse_route(method, path, query) {
            Ok(route) => self.answer_route(route, headers).await,
            Err(RouteError::NotFound) => error_response(
                StatusCode::NOT_FOUND,
                &format!("there is no route {path}: the routes are {ROUTE_LIST}"),
            ),
            Err(RouteError::Method(wanted)) => error_response(
                StatusCode::METHOD_NOT_ALLOWED,
                &format!("{path} is for {wanted}, not for {method}"),
            ),
        }
    }

    async fn answer_route(&self, route: AdminRoute, headers: &HeaderMap) -> Response<AdminBody> {
        match route {
            AdminRoute::Status => json_response(StatusCode::OK, &self.status()),
            AdminRoute::Metrics => self.metrics_answer(headers),
            AdminRoute::Events { follow } => {
                let tail = self.fleet.events();
                stream_lines(tail.events, follow.then_some(tail.receiver), self.stop.clone(), redacted_line)
            }
            AdminRoute::Series(query) => self.series_answer(query.as_deref()).await,
            AdminRoute::Logs { model, follow, reveal } => match self.fleet.logs(&model) {
                Some(tail) => {
                    let line = if reveal { raw_line } else { redacted_line };
                    stream_lines(tail.lines, follow.then_some(tail.receiver), self.stop.clone(), line)
                }
                None => self.unknown_model(&model),
            },
            AdminRoute::Restart(model) => {
                let entries = self.fleet.restart_by(&model, None).await;
                control_response(entries.map(|entries| json!({ "entries": entries })))
            }
            AdminRoute::Drain(model) => {
                let drained = self.fleet.drain_by(&model, None).await;
                control_response(drained.map(|()| json!({ "drained": model })))
            }
            AdminRoute::DrainInstance { undo } => self.drain_instance(undo),
            AdminRoute::Reclaim(model) => {
                let entries = self.fleet.reclaim_by(&model, None).await;
                control_response(entries.map(|entries| json!({ "entries": entries })))
            }
            AdminRoute::Pin(model, pinned) => {
                control_response(self.fleet.pin(&model, pinned, &self.caller).await)
            }
            AdminRoute::Canary(model, order) => self.canary(&model, order).await,
            AdminRoute::Requests(filter) => self.requests_answer(filter),
            AdminRoute::CancelRequest { id, number } => self.cancel_answer(&id, number),
            AdminRoute::Upgrade(Err(problem)) => error_response(StatusCode::BAD_REQUEST, &problem),
            AdminRoute::Upgrade(Ok((to, wait))) => self.upgrade_answer(to, wait).await,
            AdminRoute::Release(which) => match self.fleet.release_requests(which.as_deref()) {
                Ok(released) => json_response(StatusCode::OK, &json!({ "released": released })),
                Err(unknown) => error_response(StatusCode::NOT_FOUND, &unknown.to_string()),
            },
        }
    }

    fn metrics_answer(&self, headers: &HeaderMap) -> Response<AdminBody> {
        let text = self.metrics_text(true);
        let (kind, text) = if wants_open_metrics(headers) {
            (OPEN_METRICS_TYPE, text)
        } else {
            (METRICS_TYPE, to_plain_text(&text))
        };
        make_response(StatusCode::OK, kind, full_body(text))
    }

    async fn upgrade_answer(&self, to: Option<PathBuf>, wait: Option<Duration>) -> Response<AdminBody> {
        match self.upgrades.send(to, wait, self.caller.clone()).await {
            Ok(upgraded) => json_response(StatusCode::OK, &upgraded),
            Err(OrderError::UnderWay) => {
                error_response(StatusCode::CONFLICT, "another upgrade is under way: wait for its end")
            }
            Err(OrderError::Failed(why)) => error_response(
                StatusCode::CONFLICT,
                &format!("no upgrade, everything continues as before: {why}"),
            ),
        }
    }

    /// Announces to probes and load balancers that this instance leaves, or, with `undo`, that it stays.
    fn drain_instance(&self, undo: bool) -> Response<AdminBody> {
        let changed = if undo { self.leaving.undo() } else { Ok(self.leaving.begin()) };
        let changed = match changed {
            Ok(changed) => changed,
            Err(ending) => return error_response(StatusCode::CONFLICT, &ending.to_string()),
        };
        if changed {
            self.fleet.log_operator_action(None, if undo { "stay" } else { "drain" }, &self.caller);
        }
        let left = DrainReport { draining: !undo, in_flight: self.leaving.in_flight() };
        json_response(StatusCode::OK, &left)
    }

    fn unknown_model(&self, model: &str) -> Response<AdminBody> {
        match self.fleet.resolve(Some(model)) {
            Err(unknown) => error_response(StatusCode::NOT_FOUND, &unknown.to_string()),
            Ok(_) => error_response(StatusCode::NOT_FOUND, &format!("there are no logs of `{model}`")),
        }
    }
}

fn control_response<T: Serialize>(outcome: Result<T, ControlError>) -> Response<AdminBody> {
    let failure = match outcome {
        Ok(value) => return json_response(StatusCode::OK, &value),
        Err(failure) => failure,
    };
    let status = match failure {
        ControlError::Unknown(_) => StatusCode::NOT_FOUND,
        ControlError::StartFailed { .. } => StatusCode::BAD_GATEWAY,
        ControlError::GivenUp { .. }
        | ControlError::CannotReclaim { .. }
        | ControlError::CannotPin { .. }
        | ControlError::Remote { .. } => StatusCode::CONFLICT,
        ControlError::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
    };
    let lines = match &failure {
        ControlError::StartFailed { failure, .. } => failure.lines.clone(),
        _ => Vec::new(),
    };
    json_response(status, &json!({ "error": failure.to_string(), "lines": lines }))
}

#[cfg(test)]
#[path = "answer_tests.rs"]
pub(crate) mod tests;
