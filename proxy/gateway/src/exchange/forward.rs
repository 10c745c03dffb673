//! The stages of a forwarded request: body, model, rules, lease, and sending.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, StatusCode};
use hyper::body::Incoming;
use tokio::time::{Instant, timeout};
use warden_policies::ModelName;
use warden_policies::dispatch::LeaseKind;
use warden_policies::modes::{OnDeath, WhileLoading};
use warden_policies::quarantine::RequestStanding;
use warden_supervisor::{LeaseAddress, LeaseDenied, ResolveError};

use super::conversation::{self, ConversationHint};
use super::state::{AnsweredRequest, ClientBody, ForwardRequest, HttpExchange};
use super::{naming, prompt_size, tried};
use crate::access::{ClientAccess, keys};
use crate::answer::{AnswerFormat, LoadingNoticeForm, TurnRecorder};
use crate::backend::{
    BackendAttempts, BackendSearch, BoxFuture, RelayedAnswer, RepeatPolicy, RepeatableRequest, SharedLease,
    UpstreamRequest, check_lines, is_sent_without_body,
};
use crate::body::{BodyIntake, BodyLimits, BodyModel, ClientShare};
use crate::protocol::{headers, query, wire};
use crate::refusal::RequestRefusal;
use crate::route::target::ModelPath;
use crate::route::{self, BodyShape, RouteEffect};
use crate::rules;

/// A request in the form that the backend gets.
pub(super) struct PreparedRequest {
    pub(super) search: BackendSearch,
    pub(super) parts: Box<Parts>,
    pub(super) intake: Box<BodyIntake>,
    sets: Option<(String, Bytes)>,
}

/// A streaming request whose model is not loaded. Its client gets the head of the answer first.
pub(super) struct WaitingStream {
    pub(super) manner: LoadingNoticeForm,
    /// Interval of keep-alives to the client.
    pub(super) interval: Duration,
    pub(super) since: Instant,
    pub(super) prepared: PreparedRequest,
    lease: BoxFuture<'static, Result<Option<SharedLease>, LeaseDenied>>,
}

#[expect(clippy::large_enum_variant, reason = "one per request, and never in a collection")]
pub(super) enum ForwardResult {
    Answered(AnsweredRequest),
    Waiting(Box<WaitingStream>),
}

/// Forwards an admitted request until its answer begins or it has to wait for its model to load.
#[inline]
pub(super) async fn forward(
    exchange: &mut HttpExchange,
    asked: ForwardRequest,
) -> Result<ForwardResult, RequestRefusal> {
    let ForwardRequest { mut parts, body, named, held, access } = asked;
    let mut intake = begin_intake(exchange, &mut parts, body, held, &access)?;
    let is_plain = named.is_none();
    let wish = conversation::conversation_hint(&mut parts.headers);
    let named = named_in_target(exchange, &access, named, &mut parts)?;
    let model = find_model(exchange, &access, named, is_plain, &mut intake).await;
    exchange.flight.record.bytes_in = intake.len();
    let mut prepared = prepare(exchange, &access, model?, is_plain, parts, intake).await?;
    if wish != ConversationHint::None {
        // Boxed because few requests want an identifier, and the future of every request would grow.
        let word = Box::pin(conversation::conversation_id(exchange, wish, &mut prepared.intake)).await;
        exchange.conversation = word?;
    }
    let backends = &prepared.search.upstream.backends;
    if exchange.route.generates && backends.needs_conversation_key(&prepared.search.model) {
        let key = conversation::conversation_key(exchange, &prepared.intake);
        prepared.search.conversation = key;
        prepared.intake.sent.set_conversation(key);
        if backends.has_faulty_answers(&prepared.search.model) && conversation::may_be_empty(&prepared.intake)
        {
            prepared.intake.sent.note_may_be_empty();
        }
    }
    exchange.flight.progress.note_waiting();
    let canary = match prepared.search.upstream.backends.canary(&prepared.search.model) {
        // Boxed because canaries are rare, and the future of every request would grow.
        Some(canary) => Box::pin(tried::lease_canary(exchange, &canary, &mut prepared)).await?,
        None => None,
    };
    if canary.is_none()
        && let Some(manner) = loading_notice(exchange, &prepared)
    {
        // Boxed because this case is rare, and the future of every request would grow.
        return Box::pin(wait_for_lease(exchange, manner, prepared)).await;
    }
    let mut attempts = BackendAttempts::new(&prepared.search, &mut exchange.flight.record);
    let lease = match canary {
        Some(lease) => attempts.note_granted(Ok(Some(lease)))?,
        None => attempts.lease(&mut prepared.intake).await?,
    };
    let sending = pin!(send_request(exchange, prepared, lease));
    sending.await.map(ForwardResult::Answered)
}

pub(super) fn begin_intake(
    exchange: &mut HttpExchange,
    parts: &mut Parts,
    body: Incoming,
    held: Arc<ClientShare>,
    access: &ClientAccess,
) -> Result<Box<BodyIntake>, RequestRefusal> {
    let shared = &exchange.shared;
    let limits = BodyLimits::for_size(&shared.config, exchange.route.size);
    let printer = shared.prints.begin(&parts.method, &route::decoded_path(parts.uri.path()));
    let budget = shared.budget.for_client(held, access.held_share());
    exchange.budget = Some(budget.clone());
    let intake = BodyIntake::begin(&mut parts.headers, body, budget, limits, printer)?;
    exchange.body = ClientBody::Read(intake.sent.clone());
    Ok(intake)
}

/// Returns `None` if a process serves the model, or if the client wants only the model's answer.
fn loading_notice(exchange: &HttpExchange, prepared: &PreparedRequest) -> Option<LoadingNoticeForm> {
    let PreparedRequest { search, intake, .. } = prepared;
    let route = exchange.route;
    if !(route.generates && search.may_load && intake.is_stream()) {
        return None;
    }
    let mode = exchange.rules(&search.model).map_or(WhileLoading::default(), |rules| rules.loading);
    let manner = match mode {
        WhileLoading::Off => return None,
        WhileLoading::Reasoning if route.shape == Some(BodyShape::Chat) => LoadingNoticeForm::Reasoning,
        WhileLoading::Comment | WhileLoading::Reasoning => LoadingNoticeForm::Comments,
    };
    search.upstream.backends.next_process(&search.model).map(|_| manner)
}

/// Waits for a lease of an unloaded model. If the lease is granted or refused soon, the client gets an
/// ordinary response with the status of the refusal.
async fn wait_for_lease(
    exchange: &mut HttpExchange,
    manner: LoadingNoticeForm,
    prepared: PreparedRequest,
) -> Result<ForwardResult, RequestRefusal> {
    let since = Instant::now();
    let config = &exchange.shared.config.upstream;
    let interval = match manner {
        LoadingNoticeForm::Comments => config.comment_interval,
        LoadingNoticeForm::Reasoning => config.reasoning_interval,
    };
    BackendAttempts::new(&prepared.search, &mut exchange.flight.record).note_waiting();
    let search = prepared.search.clone();
    let mut lease: BoxFuture<'static, _> = Box::pin(async move { search.first_lease().await });
    let Ok(granted) = timeout(interval, &mut lease).await else {
        let waits = WaitingStream { manner, interval, since, prepared, lease };
        return Ok(ForwardResult::Waiting(Box::new(waits)));
    };
    send_when_granted(exchange, prepared, granted).await.map(ForwardResult::Answered)
}

async fn send_when_granted(
    exchange: &mut HttpExchange,
    prepared: PreparedRequest,
    granted: Result<Option<SharedLease>, LeaseDenied>,
) -> Result<AnsweredRequest, RequestRefusal> {
    let lease = BackendAttempts::new(&prepared.search, &mut exchange.flight.record).note_granted(granted)?;
    send_request(exchange, prepared, lease).await
}

impl WaitingStream {
    pub(super) async fn forward(
        self,
        exchange: &mut HttpExchange,
    ) -> Result<AnsweredRequest, RequestRefusal> {
        let Self { lease, prepared, .. } = self;
        let granted = lease.await;
        send_when_granted(exchange, prepared, granted).await
    }
}

/// Sends a request and waits until its answer begins. Inlined, so that its future is built in place.
#[inline]
async fn send_request(
    exchange: &mut HttpExchange,
    prepared: PreparedRequest,
    lease: SharedLease,
) -> Result<AnsweredRequest, RequestRefusal> {
    let PreparedRequest { mut search, parts, mut intake, sets } = prepared;
    let config = search.upstream.config.clone();
    let route = exchange.route;
    let kind = search.kind;
    let rules = exchange.rules(&search.model);
    let on_death = rules.map_or(OnDeath::default(), |rules| rules.on_death);
    let timeout = rules.and_then(|rules| rules.timeout).unwrap_or(config.upstream.exchange_timeout);
    if kind == LeaseKind::Slot {
        // From here on, a slot waits for any part of the body that did not fit into the budget.
        intake.tighten_limits(&config.server);
        search.limits = intake.limits;
    }
    if route.effect == RouteEffect::Pauses {
        if lease.saves_for_us() {
            return Err(RequestRefusal::SlotFiles);
        }
        lease.note_pause();
    }
    let is_llama_server = rules.is_none_or(|rules| !rules.other_program);
    let is_page = is_llama_server && parts.method == Method::GET && parts.uri.path() == "/";
    let kept = match route.shape.and_then(AnswerFormat::from_shape) {
        Some(format) if lease.keeps_turns() => {
            Some((format, route::decoded_path(parts.uri.path()).into_owned()))
        }
        _ => None,
    };
    let repeating = RepeatPolicy {
        generates: route.generates,
        repeats: route.computes && on_death == OnDeath::Continue,
        remembers: kept.is_some(),
        gets_read: is_llama_server,
        max_bytes: config.upstream.replay_bytes.in_memory(),
    };
    let text_bytes = intake.text_bytes().unwrap_or(0);
    let message = UpstreamRequest::new(parts, intake, repeating)?;
    let remember = kept.map(|(format, path)| {
        // An `infill` prompt is composed of parts that occur in no other request.
        let understood = matches!(format, AnswerFormat::Chat | AnswerFormat::Text | AnswerFormat::Native)
            && route.name != "infill";
        let limit = config.upstream.continue_bytes.in_memory();
        Box::new(TurnRecorder::from_request(&message, &path, understood, limit))
    });
    // The guess counts only if the tokens were not counted.
    let guess = text_bytes / keys::BYTES_PER_TOKEN;
    exchange.flight.progress.note_asked(message.streams, search.tokens, guess);
    if kind == LeaseKind::Slot {
        let counted = search.tokens.map(|tokens| tokens.saturating_mul(keys::BYTES_PER_TOKEN));
        exchange.flight.prompt_bytes = counted.unwrap_or(text_bytes);
    }
    let deadline = Instant::now() + timeout;
    exchange.conn.set_deadline(deadline + config.server.keep_alive);
    let relayed = {
        let mut attempts = BackendAttempts::new(&search, &mut exchange.flight.record);
        let running = pin!(attempts.run(lease, message, deadline));
        running.await?
    };
    let mut relayed = check_relayed(relayed, &search.model, is_page)?;
    let is_begun = relayed.response.status().is_success() && headers::is_events(relayed.response.headers());
    let again = match relayed.message.take() {
        Some(message) if is_begun => Some(Box::new(RepeatableRequest::new(search, message, deadline))),
        _ => None,
    };
    Ok(AnsweredRequest { relayed, sets, again, remember })
}

fn check_relayed(
    mut relayed: RelayedAnswer,
    model: &ModelName,
    is_page: bool,
) -> Result<RelayedAnswer, RequestRefusal> {
    // On failure, dropping `relayed` closes the backend connection.
    wire::check_answer(relayed.response.status(), relayed.response.headers())
        .map_err(|why| RequestRefusal::Garbled { model: model.clone(), why: why.to_owned() })?;
    if let LeaseAddress::Remote(_) = relayed.backend.lease.address() {
        headers::strip_host_policies(relayed.response.headers_mut());
        if relayed.response.status() == StatusCode::UNAUTHORIZED {
            // The endpoint refuses the operator's key, which the client cannot change.
            relayed.backend.lease.doubt();
            return Err(RequestRefusal::KeyThere { model: model.clone() });
        }
    }
    if is_page && relayed.response.status() == StatusCode::NOT_FOUND {
        // llama-server's own answer contains nothing more.
        return Err(RequestRefusal::NoPage);
    }
    Ok(relayed)
}

/// Reads the body until its model is known; reads a small body to its end.
#[inline]
async fn find_model(
    exchange: &mut HttpExchange,
    access: &ClientAccess,
    named: Option<ModelName>,
    is_plain: bool,
    intake: &mut BodyIntake,
) -> Result<ModelName, RequestRefusal> {
    let named = match named {
        // In drop-in mode every name resolves to the only model, so do not search a large body for a name.
        None if exchange.drop_in => Some(exchange.resolve(access, Some(""))?),
        named => named,
    };
    let rules = named.as_ref().and_then(|model| exchange.rules(model));
    let renamed = is_plain && rules.is_some_and(|rules| rules.upstream_model.is_some());
    intake.take_needed(named.is_none() || renamed, &exchange.shared.config).await?;
    named.map_or_else(|| named_in_body(exchange, access, intake), Ok)
}

/// Applies the model's rules, and gives head and body the form that the backend gets.
#[inline]
async fn prepare(
    exchange: &mut HttpExchange,
    access: &ClientAccess,
    model: ModelName,
    is_plain: bool,
    mut parts: Box<Parts>,
    mut intake: Box<BodyIntake>,
) -> Result<PreparedRequest, RequestRefusal> {
    let upstream = exchange.shared.upstream.clone();
    if exchange.rules(&model).is_some_and(|rules| rules.other_program) {
        exchange.route = exchange.route.at_other_program(&parts.method);
    }
    let route = exchange.route;
    exchange.flight.progress.set_model(&model);
    exchange.flight.record.model = Some(model.clone());
    if is_sent_without_body(&parts.method) {
        intake.discard().await?;
    }
    let rules = exchange.rules(&model);
    if rules.is_some_and(|rules| rules.remote) && !(is_plain && route.computes) {
        return Err(RequestRefusal::NotThere { model });
    }
    if let Some(rules) = rules
        && is_plain
    {
        rules::apply_rules(&model, rules, route.shape, &mut parts, &mut intake).await?;
    }
    prepare_head(exchange, access, &mut parts)?;
    if route.kind == LeaseKind::Slot {
        intake.take_rest().await?;
    }
    let asked = parts.uri.query().and_then(|query| query::parameter(query, "autoload"));
    // llama-server's router parses the value in the same way.
    let may_load = match asked.as_deref() {
        None | Some("") => route.loads,
        Some(word) => word == "true" || word == "1",
    };
    let progress = exchange.flight.progress.clone();
    let mut search = BackendSearch::new(upstream, progress, model, route.kind, may_load, intake.limits);
    refuse_quarantined(&search, &intake)?;
    search.tokens = prompt_size::prompt_tokens(&search, &parts.headers, &mut intake).await?;
    refuse_quarantined(&search, &intake)?;
    let sets = if route.effect == RouteEffect::Sets && intake.take_all().await? {
        intake.json().map(|body| (route::decoded_path(parts.uri.path()).into_owned(), body))
    } else {
        None
    };
    Ok(PreparedRequest { search, parts, intake, sets })
}

fn prepare_head(
    exchange: &HttpExchange,
    access: &ClientAccess,
    parts: &mut Parts,
) -> Result<(), RequestRefusal> {
    wire::add_via(&mut parts.headers, parts.version);
    let id = if exchange.drop_in { headers::stream_conversation_id(&parts.headers) } else { None };
    headers::prepare_for_backend(&mut parts.headers, &exchange.request_id);
    headers::set_stream_conversation_id(&mut parts.headers, id);
    if access.has_key() {
        keys::strip_key_headers(&mut parts.headers);
    }
    // Check the final form of the head before waiting for a backend.
    check_lines(parts)
}

/// Returns the model named in path or query, and removes its name from the path.
fn named_in_target(
    exchange: &mut HttpExchange,
    access: &ClientAccess,
    named: Option<Result<ModelPath, RequestRefusal>>,
    parts: &mut Parts,
) -> Result<Option<ModelName>, RequestRefusal> {
    match named {
        Some(Ok(named)) => {
            parts.uri = named.target.into();
            naming::resolve_in_path(exchange.resolve(access, Some(&named.name)), exchange, access).map(Some)
        }
        // List only the names that this client may know.
        Some(Err(RequestRefusal::Upstream { .. })) => {
            Err(RequestRefusal::Upstream { known: naming::known_names(exchange, access) })
        }
        Some(Err(refusal)) => Err(refusal),
        None => model_in_query(parts).map(|name| exchange.resolve(access, Some(&name))).transpose(),
    }
}

pub(super) fn model_in_query(parts: &Parts) -> Option<String> {
    parts.uri.query().and_then(|query| query::parameter(query, "model"))
}

/// Returns the model named in the body, or the only model.
pub(super) fn named_in_body(
    exchange: &mut HttpExchange,
    access: &ClientAccess,
    intake: &BodyIntake,
) -> Result<ModelName, RequestRefusal> {
    let named = intake.named_model();
    if let BodyModel::Model(name) = &named {
        return exchange.resolve(access, Some(name));
    }
    // With a single model any body is forwarded, and llama-server refuses an invalid one. With several models
    // the gateway has to say why no model is found.
    let is_unknown_route = exchange.route.name == route::UNKNOWN_ROUTE;
    exchange.resolve(access, None).map_err(|refusal| match (named, refusal) {
        // Without a model, no backend can say whether the route exists.
        (_, RequestRefusal::Resolve(ResolveError::Missing { .. })) if is_unknown_route => {
            RequestRefusal::NoRoute
        }
        (BodyModel::NotJson, RequestRefusal::Resolve(ResolveError::Missing { known })) => {
            RequestRefusal::NotJson { known }
        }
        (BodyModel::NotText, RequestRefusal::Resolve(ResolveError::Missing { known })) => {
            RequestRefusal::ModelNotText { known }
        }
        (_, refusal) => refusal,
    })
}

/// Refuses a request that is known to kill its server, if its whole body has arrived.
fn refuse_quarantined(search: &BackendSearch, intake: &BodyIntake) -> Result<(), RequestRefusal> {
    let Some(print) = intake.sent.fingerprint() else { return Ok(()) };
    match search.upstream.backends.request_standing(&search.model, print) {
        RequestStanding::Refused { .. } => Err(search.quarantine_refusal(print, false)),
        RequestStanding::Clear | RequestStanding::Suspect => Ok(()),
    }
}
