//! The routes `GET /requests` and `POST /requests/{id}/cancel`: lists requests in flight and ended, and
//! cancels a request. Never shows the content of a request.

use std::collections::BTreeMap;
use std::time::Duration;

use http::{Response, StatusCode};
use serde::{Deserialize, Serialize};
use warden_gateway::{CancelError, CancelledRequest, RequestState, RequestView};
use warden_policies::{ModelName, defaults, units};
use warden_supervisor::{EventKind, FleetView, ModelState, ModelView};

use crate::query::QueryPairs;
use crate::response::{AdminBody, error_response, json_response};
use crate::state::AdminState;

/// Filter of the list of requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestFilter {
    /// Name or alias of the model.
    pub model: Option<String>,
    /// State of the requests.
    pub state: Option<StateFilter>,
    /// Most requests in the list; `None`: the default.
    pub limit: Option<usize>,
}

/// Filter by state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateFilter {
    /// All states but [`RequestState::Ended`].
    InFlight,
    /// This state only.
    State(RequestState),
}

/// The answer to `GET /requests`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RequestList {
    /// Number of all requests in flight, regardless of the filter.
    pub in_flight: usize,
    /// Matching requests: first those in flight, oldest first, then the ended ones, latest first.
    pub requests: Vec<RequestView>,
    /// Number of matching requests beyond the limit.
    pub left_out: usize,
}

/// The answer to `POST /requests/{id}/cancel`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CancelReport {
    /// The request in its state when it was cancelled.
    pub cancelled: RequestView,
    /// The request had already been cancelled.
    pub again: bool,
}

fn parse_number<T: std::str::FromStr>(name: &str, text: Option<String>) -> Result<Option<T>, String> {
    let read = |text: String| text.parse().map_err(|_| format!("`{name}={text}` is no whole number"));
    text.map(read).transpose()
}

impl RequestFilter {
    /// Reads the query of a `GET`. The error is a sentence with the wrong name or value, and the valid ones.
    pub(crate) fn from_query(query: Option<&str>) -> Result<Self, String> {
        let mut given = QueryPairs::strict(query)?;
        let model = given.take("model");
        let limit = parse_number("limit", given.take("limit"))?;
        let state = given.take("state").map(|name| StateFilter::from_name(&name)).transpose()?;
        match given.unknown_name() {
            Some(other) => Err(format!("`{other}` is none of `model`, `state`, `limit`")),
            None => Ok(Self { model, state, limit }),
        }
    }
}

impl StateFilter {
    fn from_name(name: &str) -> Result<Self, String> {
        if name == "in_flight" {
            return Ok(Self::InFlight);
        }
        let known = RequestState::ALL.into_iter().find(|state| state.as_str() == name);
        known.map(Self::State).ok_or_else(|| {
            let names = RequestState::ALL.map(RequestState::as_str).join(", ");
            format!("`state={name}` is none of in_flight, {names}")
        })
    }

    fn matches(self, request: &RequestView) -> bool {
        match self {
            Self::InFlight => request.is_in_flight(),
            Self::State(state) => request.state == state,
        }
    }
}

/// Returns the parameter `number`, which selects one of several requests with the same id.
pub(crate) fn number_from_query(query: Option<&str>) -> Result<Option<u64>, String> {
    let mut given = QueryPairs::strict(query)?;
    let number = parse_number("number", given.take("number"))?;
    match given.unknown_name() {
        Some(other) => Err(format!("`{other}` is not `number`")),
        None => Ok(number),
    }
}

/// Adds facts known to the fleet: the replica, and whether a request waits for its model to load.
pub(crate) fn with_fleet_state(mut requests: Vec<RequestView>, fleet: &FleetView) -> Vec<RequestView> {
    let models: BTreeMap<&str, &ModelView> =
        fleet.models.iter().map(|model| (model.name.as_str(), &**model)).collect();
    for request in &mut requests {
        let Some(model) = request.model.as_ref().and_then(|name| models.get(name.as_str())) else { continue };
        if request.state == RequestState::Queued && model.state != ModelState::Loaded {
            request.state = RequestState::Loading;
        }
        let mut backends = model.backends.iter();
        let own = backends.find(|one| one.generation.is_some() && one.generation == request.generation);
        request.replica = if request.is_in_flight() { own.map(|backend| backend.replica) } else { None };
    }
    requests
}

/// Applies the filter. `model`: the model's name to which the filter's name or alias resolves.
fn filter_requests(all: Vec<RequestView>, filter: &RequestFilter, model: Option<&str>) -> RequestList {
    let in_flight = all.iter().filter(|one| one.is_in_flight()).count();
    let is_meant = |one: &RequestView| {
        let of_model = |name| one.model.as_ref().is_some_and(|own| own.as_str() == name);
        model.is_none_or(of_model) && filter.state.is_none_or(|wanted| wanted.matches(one))
    };
    let mut requests: Vec<RequestView> = all.into_iter().filter(is_meant).collect();
    let limit = filter.limit.unwrap_or(defaults().server.requests_listed);
    let left_out = requests.len().saturating_sub(limit);
    requests.truncate(limit);
    RequestList { in_flight, requests, left_out }
}

/// Formats milliseconds: `12 ms`, `1.2 s`, `11 min 5 s`.
pub fn milliseconds_text(ms: f64) -> String {
    let time = Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default();
    match time.as_secs() {
        0 => format!("{ms:.0} ms"),
        1..60 => format!("{:.1} s", ms / 1e3),
        _ => units::format_span(time),
    }
}

/// Formats a time with its number of tokens, such as `1.2 s, 4096`; unknown parts are left out.
pub fn timing_text(ms: Option<f64>, tokens: u64) -> String {
    match (ms, tokens) {
        (None, 0) => "-".to_owned(),
        (None, tokens) => tokens.to_string(),
        (Some(ms), 0) => milliseconds_text(ms),
        (Some(ms), tokens) => format!("{}, {tokens}", milliseconds_text(ms)),
    }
}

impl AdminState {
    /// Lists the requests that match a filter.
    ///
    /// # Errors
    /// A sentence that names the unknown model.
    pub fn list_requests(&self, filter: &RequestFilter) -> Result<RequestList, String> {
        let resolved = filter.model.as_deref().map(|name| self.fleet.resolve(Some(name))).transpose();
        let model = resolved.map_err(|unknown| unknown.to_string())?;
        let all = with_fleet_state(self.gateway.requests.list(), &self.fleet.view());
        Ok(filter_requests(all, filter, model.as_ref().map(ModelName::as_str)))
    }

    /// Cancels a request. `number`: selects one of several requests with this id.
    ///
    /// # Errors
    /// There is no such request, it has ended, or there are several.
    pub fn cancel_request(&self, id: &str, number: Option<u64>) -> Result<CancelReport, CancelError> {
        let CancelledRequest { request, was_cancelled: again } = self.gateway.requests.cancel(id, number)?;
        let placed = with_fleet_state(vec![request.clone()], &self.fleet.view());
        let cancelled = placed.into_iter().next().unwrap_or(request);
        if !again {
            let kind = EventKind::RequestCancelled {
                request: cancelled.id.clone(),
                state: cancelled.state.as_str().to_owned(),
                by: self.caller.to_string(),
            };
            self.fleet.log_request_action(cancelled.model.as_ref(), cancelled.generation, kind);
        }
        Ok(CancelReport { cancelled, again })
    }

    pub(crate) fn requests_answer(&self, filter: Result<RequestFilter, String>) -> Response<AdminBody> {
        let filter = match filter {
            Ok(filter) => filter,
            Err(words) => return error_response(StatusCode::BAD_REQUEST, &words),
        };
        match self.list_requests(&filter) {
            Ok(list) => json_response(StatusCode::OK, &list),
            Err(unknown) => error_response(StatusCode::NOT_FOUND, &unknown),
        }
    }

    pub(crate) fn cancel_answer(&self, id: &str, number: Result<Option<u64>, String>) -> Response<AdminBody> {
        let number = match number {
            Ok(number) => number,
            Err(words) => return error_response(StatusCode::BAD_REQUEST, &words),
        };
        match self.cancel_request(id, number) {
            Ok(told) => json_response(StatusCode::OK, &told),
            Err(why) => {
                let status = match why {
                    CancelError::Unknown { .. } => StatusCode::NOT_FOUND,
                    CancelError::Ended { .. } | CancelError::Several { .. } => StatusCode::CONFLICT,
                };
                error_response(status, &why.to_string())
            }
        }
    }
}

#[cfg(test)]
#[path = "requests_tests.rs"]
mod tests;
