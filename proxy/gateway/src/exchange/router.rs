//! The routes that llama-server answers without a model process when it runs as a router of several models.
//! The gateway answers them in the same way.
//!
//! | route | answer |
//! |---|---|
//! | `POST /models/load` | starts to load the model, as its first request would; does not wait for the end |
//! | `POST /models/unload` | starts to unload it: its requests finish, then its processes end; does not wait |
//! | `GET /props` | without a model name, if there are several: describes the router (`role: router`) |
//! | `POST`, `DELETE /models`, `GET /models/sse` | refused |
//!
//! A client that may use a model may load and unload it. Only operators may unload a pinned model.

use std::future::Future as _;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use http::Method;
use http::request::Parts;
use serde_json::json;
use warden_policies::dispatch::LeaseKind;
use warden_supervisor::{ModelState, ModelView, PromptFacts, ResolveError};

use super::forward;
use super::local_routes::{LocalAnswer, json_answer};
use super::state::{ForwardRequest, HttpExchange};
use crate::access::ClientAccess;
use crate::backend::{LeaseDemand, LeaseMode};
use crate::body::BodyIntake;
use crate::refusal::RequestRefusal;
use crate::route;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RouterCall {
    Load,
    Unload,
    Props,
    Download,
    Events,
}

impl RouterCall {
    pub(super) fn from_request(exchange: &mut HttpExchange, asked: &ForwardRequest) -> Option<Self> {
        let may_be = matches!(exchange.route.name, "router" | "props");
        if !may_be || exchange.drop_in || asked.named.is_some() {
            return None;
        }
        let is_get = matches!(asked.parts.method, Method::GET | Method::HEAD);
        match (&asked.parts.method, &*route::decoded_path(asked.parts.uri.path())) {
            (&Method::POST, "/models/load") => Some(Self::Load),
            (&Method::POST, "/models/unload") => Some(Self::Unload),
            (&Method::POST | &Method::DELETE, "/models") => Some(Self::Download),
            (_, "/models/sse") if is_get => Some(Self::Events),
            (_, "/props") if is_get && forward::model_in_query(&asked.parts).is_none() => {
                let several = exchange.resolve(&asked.access, None);
                let is_router = matches!(several, Err(RequestRefusal::Resolve(ResolveError::Missing { .. })));
                is_router.then_some(Self::Props)
            }
            _ => None,
        }
    }
}

pub(super) async fn answer_router_call(
    exchange: &mut HttpExchange,
    call: RouterCall,
    asked: ForwardRequest,
) -> Result<LocalAnswer, RequestRefusal> {
    match call {
        RouterCall::Props => Ok(router_props()),
        RouterCall::Download => Err(RequestRefusal::NoDownloads),
        RouterCall::Events => Err(RequestRefusal::NoModelEvents),
        RouterCall::Load | RouterCall::Unload => change_load_state(exchange, call, asked).await,
    }
}

/// Builds the answer of llama-server's router to `/props`, which its web page reads.
fn router_props() -> LocalAnswer {
    json_answer(&json!({
        "role": "router",
        "max_instances": 0,
        "models_autoload": true,
        "model_alias": "llama-warden",
        "model_path": "none",
        "default_generation_settings": { "params": {}, "n_ctx": 0 },
        "build_info": concat!("llama-warden ", env!("CARGO_PKG_VERSION")),
    }))
}

async fn change_load_state(
    exchange: &mut HttpExchange,
    call: RouterCall,
    asked: ForwardRequest,
) -> Result<LocalAnswer, RequestRefusal> {
    let ForwardRequest { mut parts, body, held, access, .. } = asked;
    let mut intake = forward::begin_intake(exchange, &mut parts, body, held, &access)?;
    let model = requested_model(exchange, &access, &parts, &mut intake).await?;
    match call {
        RouterCall::Load => load_model(exchange, &model)?,
        _ => unload_model(exchange, &access, &model)?,
    }
    Ok(json_answer(&json!({ "success": true })))
}

async fn requested_model(
    exchange: &mut HttpExchange,
    access: &ClientAccess,
    parts: &Parts,
    intake: &mut BodyIntake,
) -> Result<Arc<ModelView>, RequestRefusal> {
    let taken = intake.take_all().await;
    exchange.flight.record.bytes_in = intake.len();
    if !taken? {
        return Err(RequestRefusal::Busy);
    }
    let name = match forward::model_in_query(parts) {
        Some(name) => exchange.resolve(access, Some(&name))?,
        None => forward::named_in_body(exchange, access, intake)?,
    };
    exchange.flight.record.model = Some(name.clone());
    let view = exchange.shared.upstream.backends.view();
    match view.models.iter().find(|model| model.name == name) {
        Some(model) if model.remote.is_some() => Err(RequestRefusal::NotThere { model: name }),
        Some(model) => Ok(Arc::clone(model)),
        // The supervisor has removed the model a moment ago.
        None => Err(access.refuse_hidden(&*exchange.shared.upstream.backends, name.as_str())),
    }
}

/// Loads a model as a request without a slot would. Reports at once if the model cannot be loaded.
fn load_model(exchange: &HttpExchange, model: &ModelView) -> Result<(), RequestRefusal> {
    let name = model.name.clone();
    if matches!(model.state, ModelState::Loaded | ModelState::Loading) {
        return Err(RequestRefusal::AlreadyLoaded { model: name });
    }
    let upstream = exchange.shared.upstream.clone();
    let backends = upstream.backends.clone();
    let wanted = name.clone();
    let demand = LeaseDemand { kind: LeaseKind::Aux, prompt: PromptFacts::default(), mode: LeaseMode::First };
    let mut lease = Box::pin(async move { backends.lease(&wanted, demand).await.map(drop) });
    // The first poll returns an immediate refusal.
    let mut context = Context::from_waker(Waker::noop());
    match lease.as_mut().poll(&mut context) {
        Poll::Ready(granted) => {
            granted.map_err(|denied| RequestRefusal::Denied { model: name, denied })?;
        }
        Poll::Pending => {
            upstream.tasks.spawn(async move {
                if let Err(denied) = lease.await {
                    tracing::info!(model = %name, %denied, "a model that a client asked to load was not loaded");
                }
            });
        }
    }
    Ok(())
}

fn unload_model(
    exchange: &HttpExchange,
    access: &ClientAccess,
    model: &ModelView,
) -> Result<(), RequestRefusal> {
    let name = model.name.clone();
    if matches!(model.state, ModelState::Unloaded | ModelState::Failed) {
        return Err(RequestRefusal::NotRunning { model: name });
    }
    if model.pin.pinned && !access.is_operator() {
        return Err(RequestRefusal::Pinned { model: name });
    }
    let record = &exchange.flight.record;
    let by = match &record.key {
        Some(key) => format!("client, key {key}, {}", record.peer),
        None => format!("client, {}", record.peer),
    };
    let unloaded = exchange.shared.upstream.backends.unload(&name, &by);
    unloaded.map_err(|_| RequestRefusal::ShuttingDown)
}
