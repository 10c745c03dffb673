//! `GET /requests`, `GET /requests/{id}` and `POST /requests/{id}/cancel`: what is in flight, what ended last, and how one is ended. Never
//! what a request says: where requests are recorded, one is shown as it was recorded.

use std::collections::BTreeMap;
use std::time::Duration;

use http::{Response, StatusCode};
use serde::{Deserialize, Serialize};
use warden_gateway::{NotCancelled, RequestState, RequestView, Told};
use warden_policies::{ModelName, defaults, units};
use warden_supervisor::{EventKind, FleetView, ModelState, ModelView};

use super::answer::{Admin, Body, error, json};
use super::query::Query;
use crate::captures::Capture;

/// Which requests are asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Filter {
    /// The model, by its name or an alias.
    pub(crate) model: Option<String>,
    pub(crate) state: Option<Wanted>,
    /// At most so many.
    pub(crate) limit: Option<usize>,
}

/// How far a request has to have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    InFlight,
    State(RequestState),
}

/// What `GET /requests` answers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RequestList {
    /// Requests in flight in all, whatever was asked for.
    pub(crate) in_flight: usize,
    /// Those that were asked for: in flight, the oldest first; then those that ended, the last one first.
    pub(crate) requests: Vec<RequestView>,
    /// How many more there are.
    pub(crate) left_out: usize,
}

/// What `GET /requests/{id}` answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct OneRequest {
    /// Those with that id: clients may give several the same.
    pub(crate) requests: Vec<RequestView>,
    /// The last of them as it was recorded, if its model's requests are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) recorded: Option<Capture>,
}

/// What `POST /requests/{id}/cancel` answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Cancelled {
    /// The request as it was then.
    pub(crate) cancelled: RequestView,
    /// It had been told before.
    pub(crate) again: bool,
}

fn whole<T: std::str::FromStr>(name: &str, text: Option<String>) -> Result<Option<T>, String> {
    let read = |text: String| text.parse().map_err(|_| format!("`{name}={text}` is no whole number"));
    text.map(read).transpose()
}

impl Filter {
    /// Reads the query of a `GET`.
    ///
    /// # Errors
    ///
    /// In words: a name or a value that means nothing, with those that do.
    pub(crate) fn of(query: Option<&str>) -> Result<Self, String> {
        let mut given = Query::read(query)?;
        let (model, limit) = (given.take("model"), whole("limit", given.take("limit"))?);
        let state = given.take("state").map(|name| Wanted::of(&name)).transpose()?;
        match given.left() {
            Some(other) => Err(format!("`{other}` is none of `model`, `state`, `limit`")),
            None => Ok(Self { model, state, limit }),
        }
    }
}

impl Wanted {
    fn of(name: &str) -> Result<Self, String> {
        if name == "in_flight" {
            return Ok(Self::InFlight);
        }
        let known = RequestState::ALL.into_iter().find(|state| state.as_str() == name);
        known.map(Self::State).ok_or_else(|| {
            let names = RequestState::ALL.map(RequestState::as_str).join(", ");
            format!("`state={name}` is none of in_flight, {names}")
        })
    }

    fn takes(self, request: &RequestView) -> bool {
        match self {
            Self::InFlight => request.is_in_flight(),
            Self::State(state) => request.state == state,
        }
    }
}

/// The number of the request that is meant, where several have its id.
///
/// # Errors
///
/// In words: the query says something else.
pub(crate) fn number_of(query: Option<&str>) -> Result<Option<u64>, String> {
    let mut given = Query::read(query)?;
    let number = whole("number", given.take("number"))?;
    match given.left() {
        Some(other) => Err(format!("`{other}` is not `number`")),
        None => Ok(number),
    }
}

/// Adds what only the fleet knows: which replica, and whether a request waits for its model.
pub(crate) fn placed(mut requests: Vec<RequestView>, fleet: &FleetView) -> Vec<RequestView> {
    let models: BTreeMap<&str, &ModelView> =
        fleet.models.iter().map(|model| (model.name.as_str(), &**model)).collect();
    for request in &mut requests {
        let Some(model) = request.model.as_ref().and_then(|name| models.get(name.as_str())) else { continue };
        if request.state == RequestState::Queued && model.state != ModelState::Loaded {
            request.state = RequestState::Loading;
        }
        let generation = request.generation.filter(|_| request.is_in_flight());
        request.replica = generation.and_then(|generation| {
            let own = model.backends.iter().find(|backend| backend.generation == Some(generation));
            own.map(|backend| backend.replica)
        });
    }
    requests
}

/// Those that are asked for, `model` by the name that the fleet has for it.
fn listed(all: Vec<RequestView>, filter: &Filter, model: Option<&str>) -> RequestList {
    let in_flight = all.iter().filter(|one| one.is_in_flight()).count();
    let is_meant = |one: &RequestView| {
        let of_model = |name| one.model.as_ref().is_some_and(|own| own.as_str() == name);
        model.is_none_or(of_model) && filter.state.is_none_or(|wanted| wanted.takes(one))
    };
    let mut requests: Vec<RequestView> = all.into_iter().filter(is_meant).collect();
    let limit = filter.limit.unwrap_or(defaults().server.requests_listed);
    let left_out = requests.len().saturating_sub(limit);
    requests.truncate(limit);
    RequestList { in_flight, requests, left_out }
}

/// Milliseconds for people: `12 ms`, `1.2 s`, `11 min 5 s`.
pub(crate) fn took(ms: f64) -> String {
    let time = Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default();
    match time.as_secs() {
        0 => format!("{ms:.0} ms"),
        1..60 => format!("{:.1} s", ms / 1e3),
        _ => units::span(time),
    }
}

/// A time and what was done in it: `1.2 s, 4096`; what is not known is left out.
pub(crate) fn short(ms: Option<f64>, tokens: u64) -> String {
    match (ms, tokens) {
        (None, 0) => "-".to_owned(),
        (None, tokens) => tokens.to_string(),
        (Some(ms), 0) => took(ms),
        (Some(ms), tokens) => format!("{}, {tokens}", took(ms)),
    }
}

impl Admin {
    /// Those that are asked for.
    ///
    /// # Errors
    ///
    /// There is no such model.
    pub(crate) fn list_requests(&self, filter: &Filter) -> Result<RequestList, String> {
        let resolved = filter.model.as_deref().map(|name| self.fleet.resolve(Some(name))).transpose();
        let model = resolved.map_err(|unknown| unknown.to_string())?;
        let all = placed(self.requests.list(), &self.fleet.view());
        Ok(listed(all, filter, model.as_ref().map(ModelName::as_str)))
    }

    /// Those with this id, and the last of them as it was recorded. `None`: there is none any more.
    pub(crate) fn one_request(&self, id: &str) -> Option<OneRequest> {
        let mut requests = placed(self.requests.list(), &self.fleet.view());
        requests.retain(|one| one.id == id);
        let recorded = self.captures.of(id);
        (!requests.is_empty() || recorded.is_some()).then_some(OneRequest { requests, recorded })
    }

    pub(super) fn request_answer(&self, id: &str) -> Response<Body> {
        match self.one_request(id) {
            Some(one) => json(StatusCode::OK, &one),
            None => error(StatusCode::NOT_FOUND, &NotCancelled::Unknown { id: id.to_owned() }.to_string()),
        }
    }

    /// Tells a request to end, and tells that it was told.
    ///
    /// # Errors
    ///
    /// See [`NotCancelled`].
    pub(crate) fn cancel_request(&self, id: &str, number: Option<u64>) -> Result<Cancelled, NotCancelled> {
        let Told { request, again } = self.requests.cancel(id, number)?;
        let placed = placed(vec![request.clone()], &self.fleet.view());
        let cancelled = placed.into_iter().next().unwrap_or(request);
        if !again {
            let kind = EventKind::RequestCancelled {
                request: cancelled.id.clone(),
                state: cancelled.state.as_str().to_owned(),
                by: self.by.to_string(),
            };
            self.fleet.tell_of_request(cancelled.model.as_ref(), cancelled.generation, kind);
        }
        Ok(Cancelled { cancelled, again })
    }

    pub(super) fn requests_answer(&self, filter: Result<Filter, String>) -> Response<Body> {
        let filter = match filter {
            Ok(filter) => filter,
            Err(words) => return error(StatusCode::BAD_REQUEST, &words),
        };
        match self.list_requests(&filter) {
            Ok(list) => json(StatusCode::OK, &list),
            Err(unknown) => error(StatusCode::NOT_FOUND, &unknown),
        }
    }

    pub(super) fn cancel_answer(&self, id: &str, number: Result<Option<u64>, String>) -> Response<Body> {
        let number = match number {
            Ok(number) => number,
            Err(words) => return error(StatusCode::BAD_REQUEST, &words),
        };
        match self.cancel_request(id, number) {
            Ok(told) => json(StatusCode::OK, &told),
            Err(why) => {
                let status = match why {
                    NotCancelled::Unknown { .. } => StatusCode::NOT_FOUND,
                    NotCancelled::Ended { .. } | NotCancelled::Several { .. } => StatusCode::CONFLICT,
                };
                error(status, &why.to_string())
            }
        }
    }
}

#[cfg(test)]
#[path = "requests_tests.rs"]
pub(crate) mod tests;
