//! The stages of a forwarded request: read its body, find its model, apply the model's rules, wait for a
//! lease, send the request.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, StatusCode};
use tokio::time::{Instant, timeout};
use warden_policies::ModelName;
use warden_policies::dispatch::LeaseKind;
use warden_policies::modes::{OnDeath, WhileLoading};
use warden_policies::quarantine::RequestStanding;
use warden_supervisor::{LeaseAddress, LeaseDenied, ResolveError};

use super::conversation::{self, ConversationHint};
use super::{
    AnsweredRequest, ClientBody, ForwardRequest, HttpExchange, RefusedRequest, naming, prompt_size, tried,
};
use crate::access::keys::{self, ClientAccess};
use crate::answer::assemble::{self, AnswerFormat};
use crate::answer::remember::TurnRecorder;
use crate::answer::teller::LoadingNoticeForm;
use crate::backend::again::{BackendSearch, RepeatableRequest};
use crate::backend::attempts::{BackendAttempts, RelayedAnswer};
use crate::backend::backends::{BackendLease, BoxFuture};
use crate::backend::line_limits::check_lines;
use crate::backend::message::{RepeatPolicy, UpstreamRequest};
use crate::backend::unread_body::is_sent_without_body;
use crate::backend::upstream::UpstreamContext;
use crate::body::intake::{BodyIntake, BodyModel};
use crate::body::limits::BodyLimits;
use crate::body::request_copy::RequestCopy;
use crate::protocol::{headers, query, wire};
use crate::refusal::RequestRefusal;

use crate::route::target::ModelPath;
use crate::route::{self, BodyShape, RouteEffect};
use crate::rules;

/// Properties of a request whose head and body have the form that the backend gets.
struct PreparedRequest {
    model: ModelName,
    /// Prompt tokens; set if admission depends on their number.
    tokens: Option<u64>,
    assemble: Option<AnswerFormat>,
    sets: Option<(String, Bytes)>,
    /// The request may cause its model to be loaded.
    loads: bool,
    /// Time within which a canary must begin its answer.
    patience: Duration,
}

/// A streaming request whose model is not loaded yet. Its client gets the head of the answer first.
pub(super) struct WaitingStream {
    pub(super) manner: LoadingNoticeForm,
    /// Interval of keep-alives to the client.
    pub(super) interval: Duration,
    /// Start of the wait.
    pub(super) since: Instant,
    lease: BoxFuture<'static, Result<Arc<dyn BackendLease>, LeaseDenied>>,
    prepared: PreparedRequest,
    parts: Box<Parts>,
    intake: Box<BodyIntake>,
    limits: BodyLimits,
}

/// Progress of a forwarded request.
#[expect(clippy::large_enum_variant, reason = "one per request, and never in a collection")]
pub(super) enum ForwardResult {
    Answered(AnsweredRequest),
    Waiting(Box<WaitingStream>),
}

/// Forwards an admitted request until its answer begins, or until it has to wait for its model to load.
#[inline]
pub(super) async fn forward(
    exchange: &mut HttpExchange,
    asked: ForwardRequest,
) -> Result<ForwardResult, RefusedRequest> {
    let ForwardRequest { mut parts, body, named, held, access } = asked;
    let shared = exchange.shared.clone();
    let limits = BodyLimits::for_size(&shared.config, exchange.route.size);
    let printer = shared.prints.begin(&parts.method, &route::decoded_path(parts.uri.path()));
    let budget = shared.budget.for_client(held, access.held_share());
    exchange.budget = Some(budget.clone());
    let unread = ClientBody::before_reading(&body);
    let mut intake = BodyIntake::begin(&mut parts.headers, body, budget, limits, printer)
        .map_err(|refusal| unread.with_refusal(refusal))?;
    exchange.body = Some(intake.sent.clone());
    let is_plain = named.is_none();
    let wish = conversation::conversation_hint(&mut parts.headers);
    let named = named_in_target(exchange, &access, named, &mut parts)
        .map_err(|refusal| unread.with_refusal(refusal))?;
    let prepared = prepare(exchange, &access, named, is_plain, &mut parts, &mut intake).await;
    let mut prepared = prepared.map_err(|refusal| ClientBody::after_intake(&intake).with_refusal(refusal))?;
    if wish != ConversationHint::None {
        // Boxed because few requests ask for it, and the future of every request would grow.
        let word = Box::pin(conversation::conversation_id(exchange, wish, &mut intake)).await;
        exchange.conversation =
            word.map_err(|refusal| ClientBody::after_intake(&intake).with_refusal(refusal))?;
    }
    exchange.flight.progress.note_waiting();
    if let Some(canary) = shared.upstream.backends.canary(&prepared.model) {
        prepared.patience = canary.patience;
        // Boxed because canaries are rare, and the future of every request would grow.
        let tried =
            Box::pin(tried::lease_canary(exchange, &canary, &prepared.model, prepared.tokens, &mut intake));
        let lease = tried.await.map_err(|refusal| ClientBody::after_intake(&intake).with_refusal(refusal))?;
        if let Some(lease) = lease {
            let lease = prepared.attempts(exchange, &limits).note_granted(Ok(lease));
            let lease = lease.map_err(|refusal| ClientBody::after_intake(&intake).with_refusal(refusal))?;
            return send_request(exchange, prepared, parts, intake, limits, lease)
                .await
                .map(ForwardResult::Answered);
        }
    }
    if let Some(manner) = loading_notice(exchange, &prepared, &intake) {
        // Boxed because this case is rare, and the future of every request would grow.
        return Box::pin(wait_for_lease(exchange, manner, prepared, parts, intake, limits)).await;
    }
    let lease = if prepared.loads {
        prepared.attempts(exchange, &limits).lease(&mut intake).await
    } else {
        // Boxed because this case is rare, and the future of every request would grow.
        let mut attempts = prepared.attempts(exchange, &limits);
        Box::pin(attempts.lease_loaded(&mut intake)).await
    };
    let lease = lease.map_err(|refusal| ClientBody::after_intake(&intake).with_refusal(refusal))?;
    let sending = pin!(send_request(exchange, prepared, parts, intake, limits, lease));
    sending.await.map(ForwardResult::Answered)
}

/// Returns the form of progress messages for a stream whose model is being loaded. `None` if a process
/// serves the model, or if the client gets only the model's answer.
fn loading_notice(
    exchange: &HttpExchange,
    prepared: &PreparedRequest,
    intake: &BodyIntake,
) -> Option<LoadingNoticeForm> {
    let HttpExchange { shared, route, .. } = exchange;
    if !(route.generates && prepared.loads && intake.is_stream()) || prepared.assemble.is_some() {
        return None;
    }
    let mode = exchange.rules(&prepared.model).map_or(WhileLoading::default(), |rules| rules.loading);
    let manner = match mode {
        WhileLoading::Off => return None,
        WhileLoading::Reasoning if route.shape == Some(BodyShape::Chat) => LoadingNoticeForm::Reasoning,
        WhileLoading::Comment | WhileLoading::Reasoning => LoadingNoticeForm::Comments,
    };
    shared.upstream.backends.next_process(&prepared.model).map(|_| manner)
}

/// Waits for a lease of a model that is not loaded. If the lease is granted or refused soon, the client
/// gets an ordinary response, so that a refusal has its own status.
async fn wait_for_lease(
    exchange: &mut HttpExchange,
    manner: LoadingNoticeForm,
    prepared: PreparedRequest,
    parts: Box<Parts>,
    intake: Box<BodyIntake>,
    limits: BodyLimits,
) -> Result<ForwardResult, RefusedRequest> {
    let (upstream, since) = (exchange.shared.upstream.clone(), Instant::now());
    let config = &exchange.shared.config.upstream;
    let every = match manner {
        LoadingNoticeForm::Comments => config.comment_interval,
        LoadingNoticeForm::Reasoning => config.reasoning_interval,
    };
    prepared.attempts(exchange, &limits).note_waiting();
    let (model, kind, tokens) = (prepared.model.clone(), exchange.route.kind, prepared.tokens);
    let mut lease: BoxFuture<'static, _> =
        Box::pin(async move { upstream.backends.lease(&model, kind, tokens).await });
    let Ok(granted) = timeout(every, &mut lease).await else {
        let waits = WaitingStream { manner, interval: every, since, lease, prepared, parts, intake, limits };
        return Ok(ForwardResult::Waiting(Box::new(waits)));
    };
    send_when_granted(exchange, prepared, parts, intake, limits, granted).await.map(ForwardResult::Answered)
}

/// Sends a request whose whole body is held, once its lease is granted.
async fn send_when_granted(
    exchange: &mut HttpExchange,
    prepared: PreparedRequest,
    parts: Box<Parts>,
    intake: Box<BodyIntake>,
    limits: BodyLimits,
    granted: Result<Arc<dyn BackendLease>, LeaseDenied>,
) -> Result<AnsweredRequest, RefusedRequest> {
    let lease = prepared.attempts(exchange, &limits).note_granted(granted);
    let lease = lease.map_err(|refusal| ClientBody::Complete.with_refusal(refusal))?;
    send_request(exchange, prepared, parts, intake, limits, lease).await
}

impl WaitingStream {
    pub(super) fn model(&self) -> &ModelName {
        &self.prepared.model
    }

    /// Waits for the lease and sends the request.
    pub(super) async fn forward(
        self,
        exchange: &mut HttpExchange,
    ) -> Result<AnsweredRequest, RefusedRequest> {
        let Self { lease, prepared, parts, intake, limits, .. } = self;
        let granted = lease.await;
        send_when_granted(exchange, prepared, parts, intake, limits, granted).await
    }
}

impl PreparedRequest {
    fn attempts<'a>(&'a self, exchange: &'a mut HttpExchange, limits: &'a BodyLimits) -> BackendAttempts<'a> {
        BackendAttempts {
            upstream: &exchange.shared.upstream,
            record: &mut exchange.flight.record,
            progress: &exchange.flight.progress,
            model: &self.model,
            kind: exchange.route.kind,
            tokens: self.tokens,
            may_load: self.loads,
            limits,
            died: None,
            patience: self.patience,
        }
    }
}

/// Sends a request that has a lease, and waits until its answer begins. Inlined, so that its future is
/// built in place.
#[inline]
async fn send_request(
    exchange: &mut HttpExchange,
    prepared: PreparedRequest,
    parts: Box<Parts>,
    mut intake: Box<BodyIntake>,
    limits: BodyLimits,
    lease: Arc<dyn BackendLease>,
) -> Result<AnsweredRequest, RefusedRequest> {
    let rest = ClientBody::after_intake(&intake);
    let shared = exchange.shared.clone();
    let (model, kind) = (&prepared.model, exchange.route.kind);
    // If the budget had no room to hold the whole body, a slot waits for the rest from here on.
    let limits =
        if kind == LeaseKind::Slot { intake.tighten_limits(&shared.config.server, limits) } else { limits };
    let rules = exchange.rules(model);
    let on_death = rules.map_or(OnDeath::default(), |rules| rules.on_death);
    let timeout = rules.and_then(|rules| rules.timeout).unwrap_or(shared.config.upstream.exchange_timeout);
    if let Some(recorder) = exchange.live.recorders.get(model).filter(|_| kind == LeaseKind::Slot) {
        let id = &exchange.flight.record.request_id;
        intake.record(RequestCopy::new(recorder.clone(), id, &parts.method, parts.uri.path()));
    }
    if exchange.route.effect == RouteEffect::Pauses {
        if lease.saves_for_us() {
            return Err(rest.with_refusal(RequestRefusal::SlotFiles));
        }
        lease.note_pause();
    }
    let is_page = parts.method == Method::GET && parts.uri.path() == "/";
    let generates =
        exchange.route.shape.filter(|_| exchange.route.generates).and_then(AnswerFormat::from_shape);
    let kept = generates.filter(|_| lease.keeps_turns()).map(|kind| {
        // An `infill` prompt is composed of parts that occur in no other request.
        let is_whole = exchange.route.name != "infill";
        let understood =
            matches!(kind, AnswerFormat::Chat | AnswerFormat::Text | AnswerFormat::Native) && is_whole;
        (route::decoded_path(parts.uri.path()).into_owned(), understood)
    });
    let repeating = RepeatPolicy {
        generates: exchange.route.generates,
        repeats: exchange.route.computes && on_death == OnDeath::Continue,
        remembers: kept.is_some(),
        max_bytes: shared.config.upstream.replay_bytes.in_memory(),
    };
    let text_bytes = intake.text_bytes().unwrap_or(0);
    // This guess is used if the tokens were not counted.
    let guess = text_bytes / keys::BYTES_PER_TOKEN;
    let message =
        UpstreamRequest::new(parts, intake, repeating).map_err(|refusal| rest.with_refusal(refusal))?;
    let remember = kept.map(|(path, understood)| {
        let limit = shared.config.upstream.continue_bytes.in_memory();
        Box::new(TurnRecorder::from_request(&message, &path, understood, limit))
    });
    exchange.flight.progress.note_asked(message.streams(), prepared.tokens, guess);
    if kind == LeaseKind::Slot {
        let counted = prepared.tokens.map(|tokens| tokens.saturating_mul(keys::BYTES_PER_TOKEN));
        exchange.flight.prompt_bytes = counted.unwrap_or(text_bytes);
    }
    let deadline = Instant::now() + timeout;
    exchange.conn.set_deadline(deadline + shared.config.server.keep_alive);
    let relayed = {
        let mut attempts = prepared.attempts(exchange, &limits);
        let running = pin!(attempts.run(lease, message, deadline));
        running.await
    };
    let PreparedRequest { model, tokens, assemble, sets, .. } = prepared;
    let relayed = relayed.and_then(|relayed| check_relayed(relayed, &model, is_page));
    let mut relayed = relayed.map_err(|refusal| rest.with_refusal(refusal))?;
    let is_begun = relayed.response.status().is_success() && assemble::is_events(relayed.response.headers());
    let again = relayed.message.take().filter(|_| is_begun).map(|message| {
        let (upstream, progress) = (shared.upstream.clone(), exchange.flight.progress.clone());
        let search = BackendSearch { upstream, progress, model, kind, tokens, limits, deadline };
        Box::new(RepeatableRequest { search, message })
    });
    Ok(AnsweredRequest { relayed, rest, assemble, sets, again, remember })
}

/// Checks that the answer can be passed on.
fn check_relayed(
    mut relayed: RelayedAnswer,
    model: &ModelName,
    is_page: bool,
) -> Result<RelayedAnswer, RequestRefusal> {
    // If this fails, the backend connection is dropped with `relayed`, which closes it.
    wire::check_answer(relayed.response.status(), relayed.response.headers())
        .map_err(|why| RequestRefusal::Garbled { model: model.clone(), why: why.to_owned() })?;
    if let LeaseAddress::Remote(_) = relayed.backend.lease.address() {
        headers::strip_host_policies(relayed.response.headers_mut());
        if relayed.response.status() == StatusCode::UNAUTHORIZED {
            // The remote endpoint refuses the operator's key; the client cannot do anything about that.
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

/// Reads the body as far as needed, and gives head and body the form that is sent to the backend.
#[inline]
async fn prepare(
    exchange: &mut HttpExchange,
    access: &ClientAccess,
    named: Option<ModelName>,
    is_plain: bool,
    parts: &mut Parts,
    intake: &mut BodyIntake,
) -> Result<PreparedRequest, RequestRefusal> {
    let (shared, route) = (exchange.shared.clone(), exchange.route);
    let upstream = &shared.upstream;
    let named = match named {
        // In drop-in mode every name resolves to the only model, so a large body need not be searched for a
        // name.
        None if exchange.drop_in => Some(exchange.resolve(access, Some(""))?),
        named => named,
    };
    let rules = named.as_ref().filter(|_| is_plain).and_then(|model| exchange.rules(model));
    let renamed = rules.is_some_and(|rules| rules.upstream_model.is_some());
    let taken = intake.take_needed(named.is_none() || renamed, &shared.config).await;
    exchange.flight.record.bytes_in = intake.len();
    taken?;
    let model = match named {
        Some(model) => model,
        None => named_in_body(exchange, access, intake)?,
    };
    exchange.flight.progress.set_model(&model);
    exchange.flight.record.model = Some(model.clone());
    if is_sent_without_body(&parts.method) {
        intake.discard().await?;
    }
    let rules = exchange.rules(&model);
    if rules.is_some_and(|rules| rules.remote) && !(is_plain && route.computes) {
        return Err(RequestRefusal::NotThere { model });
    }
    if let Some(rules) = rules.filter(|_| is_plain) {
        rules::apply_rules(&model, rules, route.shape, parts, intake).await?;
    }

    wire::add_via(&mut parts.headers, parts.version);
    let conversation = headers::stream_conversation_id(&parts.headers).filter(|_| exchange.drop_in);
    headers::prepare_for_backend(&mut parts.headers, &exchange.request_id);
    headers::set_stream_conversation_id(&mut parts.headers, conversation);
    if access.has_key() {
        keys::strip_key_headers(&mut parts.headers);
    }
    // Check the head in its final form, before waiting for a backend.
    check_lines(parts)?;
    if route.kind == LeaseKind::Slot {
        intake.take_rest().await?;
    }
    refuse_quarantined(upstream, &model, intake)?;
    let asked = parts.uri.query().and_then(|query| query::parameter(query, "autoload"));
    // Parse the value as llama-server's router does.
    let loads =
        asked.filter(|word| !word.is_empty()).map_or(route.loads, |word| word == "true" || word == "1");
    let tokens =
        prompt_size::prompt_tokens(upstream, route.kind, &model, &parts.headers, intake, loads).await?;
    let kind = exchange
        .rules(&model)
        .filter(|rules| is_plain && rules.assemble)
        .and(route.shape)
        .and_then(AnswerFormat::from_shape);
    let assemble = match kind {
        Some(kind) => assemble::request_stream(kind, intake).await?,
        None => None,
    };
    refuse_quarantined(upstream, &model, intake)?;
    let sets = if route.effect == RouteEffect::Sets && intake.take_all().await? {
        intake.json().map(|body| (route::decoded_path(parts.uri.path()).into_owned(), body))
    } else {
        None
    };
    Ok(PreparedRequest { model, tokens, assemble, sets, loads, patience: Duration::ZERO })
}

/// Returns the model named in path or query, and removes it from the path.
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
        None => {
            let asked = parts.uri.query().and_then(|query| query::parameter(query, "model"));
            asked.map(|name| exchange.resolve(access, Some(&name))).transpose()
        }
    }
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
    // With a single model any body is forwarded, and the model's server refuses an invalid one. With several
    // models the gateway has to say why no model is found.
    let route = exchange.route;
    exchange.resolve(access, None).map_err(|refusal| match (named, refusal) {
        // Without a model, no backend can say whether the route exists.
        (_, RequestRefusal::Resolve(ResolveError::Missing { .. })) if route.name == route::UNKNOWN_ROUTE => {
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

/// Refuses a request that is known to kill its server, once its whole body was read.
fn refuse_quarantined(
    upstream: &UpstreamContext,
    model: &ModelName,
    intake: &BodyIntake,
) -> Result<(), RequestRefusal> {
    match intake.sent.fingerprint() {
        Some(print)
            if matches!(
                upstream.backends.request_standing(model, print),
                RequestStanding::Refused { .. }
            ) =>
        {
            Err(upstream.quarantine_refusal(model, print, false))
        }
        _ => Ok(()),
    }
}
