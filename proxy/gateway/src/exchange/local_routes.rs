//! The gateway's own routes: health, and the models that the client may use, with their processes.
//!
//! In drop-in mode llama-warden replaces a single llama-server, accepts every model name, and answers little
//! itself: llama-server's own list of models and CORS preflight are more complete. The gateway always answers
//! health, which must work while one process replaces another; before the first process is ready, it answers
//! like llama-server. A route is forwarded only to a ready process, so nothing here waits.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION};
use http::request::Parts;
use serde_json::{Value, json};
use warden_policies::ModelName;
use warden_supervisor::{FleetView, ModelState, ModelView, ResolveError};

use super::naming;
use super::state::HttpExchange;
use crate::access::ClientAccess;
use crate::clock;
use crate::refusal::RequestRefusal;
use crate::route::{self, LocalRoute, target};
use crate::rules::ListingRules;
use crate::shared::{GatewayShared, LiveConfig};

type ModelFilter<'a> = &'a dyn Fn(&ModelView) -> bool;

/// Headers and body of an answer. The status is 308 with a `Location` header, else 200.
pub(super) type LocalAnswer = (HeaderMap, Bytes);

pub(super) fn answer_locally(
    exchange: &HttpExchange,
    access: &ClientAccess,
    parts: &Parts,
    local: &LocalRoute,
) -> Result<LocalAnswer, RequestRefusal> {
    let shared = &exchange.shared;
    let backends = &*shared.upstream.backends;
    let live = &exchange.live;
    let view = backends.view();
    let resolve = |name: &str| naming::resolve(live, access, backends, Some(name)).map(|(model, _)| model);
    let shown = |model: &ModelView| access.may_use(&model.name);
    match local {
        LocalRoute::Health
            if shared.ends.stop.is_cancelled() || shared.gauges.draining.load(Ordering::Relaxed) =>
        {
            Err(RequestRefusal::ShuttingDown)
        }
        LocalRoute::Health if exchange.drop_in && is_loading(shared) => Err(RequestRefusal::Loading),
        LocalRoute::Health => health_answer(&backends.view()),
        LocalRoute::Models => {
            let names = naming::shown_names(live, access).filter_map(|name| {
                let model = resolve(name).ok().filter(|model| !model_listing(live, model).hidden)?;
                renamed_entry(&view, live, name, &model, shared.started)
            });
            let listed = |model: &ModelView| shown(model) && !model_listing(live, &model.name).hidden;
            Ok(models_answer(&view, live, shared.started, &listed, names.collect()))
        }
        LocalRoute::Running => Ok(running_answer(&backends.view(), &shown)),
        LocalRoute::Bare(name) => naming::resolve_in_path(resolve(name), exchange, access).map(|_| {
            redirect_answer(&format!("{}{}", shared.config.server.api_prefix, target::with_slash(&parts.uri)))
        }),
        LocalRoute::Model(name) => resolve(name).and_then(|resolved| {
            let model = if live.by_name.contains_key(name) && resolved.as_str() != name {
                renamed_entry(&view, live, name, &resolved, shared.started).map(|entry| json_answer(&entry))
            } else {
                model_answer(&view, live, &resolved, shared.started)
            };
            model.ok_or_else(|| {
                ResolveError::Unknown { name: name.clone(), known: access.names_with_aliases(backends) }
                    .into()
            })
        }),
        LocalRoute::Preflight => Ok((exchange.live.cors.preflight_headers(&parts.headers), Bytes::new())),
        // The page has another body type, so other code answers it.
        LocalRoute::Page | LocalRoute::Forbidden => {
            Err(RequestRefusal::Method(route::logged_method(&parts.method)))
        }
    }
}

pub(super) fn json_answer(body: &Value) -> LocalAnswer {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json; charset=utf-8"));
    (headers, Bytes::from(body.to_string()))
}

/// Answers `/health`. Fails while every model refuses its requests because no process of it starts, so that a
/// load balancer uses another instance. A model that is loading, being replaced, or loaded on demand is
/// healthy: its requests wait.
fn health_answer(view: &FleetView) -> Result<LocalAnswer, RequestRefusal> {
    let refusing = |model: &ModelView| {
        model.outage.as_ref().filter(|outage| outage.refusing).map(|outage| outage.next_start_unix_ms)
    };
    let starts: Option<Vec<u64>> = view.models.iter().map(|model| refusing(model)).collect();
    let Some(next) = starts.and_then(|starts| starts.into_iter().min()) else {
        return Ok(json_answer(&json!({ "status": "ok" })));
    };
    let left = next.saturating_sub(clock::unix_ms());
    Err(RequestRefusal::Down { after: Duration::from_secs(left.div_ceil(1000).max(1)) })
}

/// Answers `/v1/models` with all models that the client may use, in any state.
fn models_answer(
    view: &FleetView,
    live: &LiveConfig,
    created: u64,
    shown: ModelFilter<'_>,
    names: Vec<Value>,
) -> LocalAnswer {
    let models = || view.models.iter().filter(|model| shown(model));
    let ollama: Vec<Value> = models().map(|model| ollama_entry(model)).collect();
    let data: Vec<Value> = models().map(|model| model_entry(model, live, created)).chain(names).collect();
    json_answer(&json!({ "models": ollama, "object": "list", "data": data }))
}

/// Answers `/running` with the processes of the models that the client may use.
fn running_answer(view: &Arc<FleetView>, shown: ModelFilter<'_>) -> LocalAnswer {
    let processes = view.models.iter().filter(|model| shown(model)).flat_map(|model| {
        model.backends.iter().filter(|backend| backend.pid.is_some()).map(|backend| {
            json!({
                "model": model.name,
                "state": backend.phase,
                "replica": backend.replica,
                "generation": backend.generation,
                "in_flight": backend.in_flight,
                "slots": backend.slots,
                "waiting": model.waiting,
                "ready_seconds": backend.ready_since.map(|since| since.elapsed().as_secs()),
            })
        })
    });
    json_answer(&json!({ "running": processes.collect::<Vec<_>>() }))
}

fn redirect_answer(location: &str) -> LocalAnswer {
    let mut headers = HeaderMap::new();
    if let Ok(location) = HeaderValue::from_str(location) {
        headers.insert(LOCATION, location);
    }
    (headers, Bytes::new())
}

/// Answers `/v1/models/{id}` for a name or an alias.
fn model_answer(view: &FleetView, live: &LiveConfig, name: &ModelName, created: u64) -> Option<LocalAnswer> {
    view.models
        .iter()
        .find(|model| model.name == *name)
        .map(|model| json_answer(&model_entry(model, live, created)))
}

/// Returns the list fields that the configuration adds to a model.
fn model_listing<'a>(live: &'a LiveConfig, model: &ModelName) -> Cow<'a, ListingRules> {
    live.models.get(model).map_or_else(Cow::default, |rules| Cow::Borrowed(&rules.listing))
}

/// Describes a model as llama-server's model list does, and its state as llama-server's router does.
fn model_entry(model: &ModelView, live: &LiveConfig, created: u64) -> Value {
    let mut entry = json!({
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": if model.remote.is_some() { "remote" } else { "llamacpp" },
        "aliases": model.aliases,
        "status": { "value": model.state.as_str() },
    });
    if let Some(n_ctx) = model.n_ctx {
        entry["meta"] = json!({ "n_ctx": n_ctx });
    }
    if let Some(modalities) = model.modalities {
        entry["modalities"] = json!(modalities);
        let inputs = [("text", true), ("image", modalities.vision), ("audio", modalities.audio)];
        let inputs = inputs.into_iter().filter_map(|(name, takes)| takes.then_some(name));
        entry["architecture"] =
            json!({ "input_modalities": inputs.collect::<Vec<_>>(), "output_modalities": ["text"] });
    }
    if matches!(model.state, ModelState::Backoff | ModelState::Failed) {
        entry["status"]["failed"] = json!(true);
    }
    model_listing(live, &model.name).describe(&mut entry);
    entry
}

/// Describes an additional name that currently resolves to `model`.
fn renamed_entry(
    view: &FleetView,
    live: &LiveConfig,
    name: &str,
    model: &ModelName,
    created: u64,
) -> Option<Value> {
    let mut entry = model_entry(view.models.iter().find(|shown| shown.name == *model)?, live, created);
    (entry["id"], entry["aliases"], entry["means"]) = (json!(name), json!([]), json!(model));
    Some(entry)
}

/// Describes a model for the second list of llama-server's `/v1/models`, which clients of Ollama read.
fn ollama_entry(model: &ModelView) -> Value {
    let takes_more = model.modalities.is_some_and(|all| all.vision || all.audio || all.video);
    let capabilities: &[&str] = if takes_more { &["completion", "multimodal"] } else { &["completion"] };
    json!({ "name": model.name, "model": model.name, "type": "model", "capabilities": capabilities })
}

pub(crate) fn is_drop_in(shared: &GatewayShared) -> bool {
    shared.upstream.backends.takes_any_name()
}

/// Returns whether the gateway answers a local route in drop-in mode.
pub(super) fn keeps_route(shared: &GatewayShared, local: &LocalRoute, asks_for_keys: bool) -> bool {
    let theirs = match local {
        LocalRoute::Models => true,
        // A preflight has no API key; if keys are required, llama-server could not answer it.
        LocalRoute::Preflight => !asks_for_keys,
        _ => false,
    };
    !(theirs && is_up(&shared.upstream.backends.view()))
}

pub(super) fn is_loading(shared: &GatewayShared) -> bool {
    has_never_been_up(&shared.upstream.backends.view())
}

fn is_up(view: &FleetView) -> bool {
    view.models.iter().all(|model| model.state == ModelState::Loaded)
}

/// A model's state alone does not show this: it may be unknown while a process is up.
fn has_never_been_up(view: &FleetView) -> bool {
    view.models.iter().any(|model| model.state != ModelState::Loaded && !model.was_ready)
}
