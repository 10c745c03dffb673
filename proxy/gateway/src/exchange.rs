//! One request's life.
//!
//! ```text
//!   Received -> [ ours? ] -> answered here
//!      | body taken in, model resolved
//!   Admitted -> lease (waits in the model's queue; the body is read ahead meanwhile)
//!   Leased   -> connection, reused or new ---- refused -------------------------+
//!   Connected-> request sent ----------------- handed back unsent --------------+-> next attempt
//!   Sent     -> head ------------------------- ended before any byte of a       |   (new lease)
//!      |                                       stream's answer, body still held +
//!      |         anything else that fails here: 502, executed maybe
//!   Streaming -> see `relay`
//! ```
//!
//! From the lease to the head: [`crate::attempts`]. Everything else of it is here.
//!
//! The whole life is one future. Dropping it, which is what happens when the client leaves, gives back the place in the
//! queue, the lease, the held bytes, and closes the connection to the backend.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION, ORIGIN};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body::Body as _;
use hyper::body::Incoming;
use tokio::time::Instant;
use warden_policies::ModelName;
use warden_policies::dispatch::LeaseKind;
use warden_policies::quarantine::Standing;
use warden_supervisor::ResolveError;

use crate::assemble::Kind;
use crate::attempts::{Message, Relayed, fits_line, fits_lines};
use crate::backends::Right;
use crate::budget::Share;
use crate::client_io::{Busy, ConnState};
use crate::cors;
use crate::dropin;
use crate::errors::Refusal;
use crate::forged;
use crate::gateway::{Peer, Shared};
use crate::headers;
use crate::intake::{Intake, Named};
use crate::keys::{self, Key};
use crate::live::Live;
use crate::names;
use crate::observe::{Flight, Outcome};
use crate::own;
use crate::prefix;
use crate::query;
use crate::raw_head::Seen;
use crate::relay::{AnswerBody, Relay, RelayTerms};
use crate::routes::{self, Own, Route};
use crate::tape::Tape;
use crate::target::{self, Upstream};
use crate::wire;

/// Answers one request, always: hyper wants to hear of errors, and there are none.
pub(crate) async fn answer(
    shared: Arc<Shared>,
    conn: Arc<ConnState>,
    peer: Peer,
    request: Request<Incoming>,
) -> Result<Response<AnswerBody>, Infallible> {
    let busy = conn.begin();
    let seen = conn.next_head();
    let (mut parts, body) = request.into_parts();
    let outside = if shared.config.api_prefix.is_empty() {
        false
    } else {
        prefix::strip(&parts.uri, &shared.config.api_prefix).map(|uri| parts.uri = uri).is_none()
    };
    let request_id = headers::given_request_id(&parts.headers).unwrap_or_else(headers::fresh_request_id);
    let upstream = target::is_upstream(parts.uri.path())
        .then(|| target::upstream(&parts.uri, &shared.backends.view(), shared.backends.takes_any_name()));
    let route = match &upstream {
        // Rules would not leave the body as it is.
        Some(Ok(named)) => Route { shape: None, ..routes::route(&parts.method, named.target.path()) },
        _ => routes::route(&parts.method, parts.uri.path()),
    };
    let own = match &upstream {
        Some(Ok(named)) if named.is_bare && parts.method == Method::GET => Some(Own::Bare(&named.name)),
        _ => routes::own(&parts.method, parts.uri.path()),
    };
    let live = shared.live.now();
    let drop_in = dropin::is(&shared);
    let own =
        own.and_then(|own| if drop_in { dropin::own(&shared, own, live.keys.is_some()) } else { Some(own) });
    let label = match &own {
        None => route.name,
        Some(Own::Health) => "health",
        Some(Own::Models | Own::Model(_)) => "models",
        Some(Own::Running) => "running",
        Some(Own::Bare(_)) => "upstream",
        Some(Own::Preflight) => "preflight",
        Some(Own::Forbidden) => "forbidden",
    };
    let flight = Flight::begin(
        shared.observer.clone(),
        shared.gauges.clone(),
        request_id.to_str().unwrap_or_default().to_owned(),
        peer.ip,
        parts.method.clone(),
        parts.version,
        label,
    );
    let origin = parts.headers.get(ORIGIN).cloned();
    let mut exchange = Exchange {
        shared,
        live,
        drop_in,
        conn,
        route,
        held: peer.held,
        request_id,
        origin,
        flight,
        key: None,
        tokens: None,
        assemble: None,
        sets: None,
        body_left: true,
    };
    let result = match own {
        _ if head_bytes(&parts) > exchange.shared.config.header_bytes
            || parts.headers.len() > exchange.shared.config.header_count =>
        {
            // Of both the narrower reason.
            Err(fits_line(&parts)
                .err()
                .unwrap_or(Refusal::HeadTooLarge { limit: exchange.shared.config.header_bytes }))
        }
        _ if outside => Err(Refusal::NoPrefix(exchange.shared.config.api_prefix.clone())),
        own => match (exchange.check(&parts, &body, seen, own.as_ref()), own) {
            (Err(refusal), _) => Err(refusal),
            (Ok(()), Some(own)) => exchange.own(&parts, &own),
            (Ok(()), None) => match exchange.forward(parts, upstream, body).await {
                Ok(relayed) => return Ok(exchange.deliver(relayed, busy).await),
                Err(refusal) => Err(refusal),
            },
        },
    };
    Ok(match result {
        Ok(words) => exchange.words(words, busy),
        Err(refusal) => exchange.refuse(&refusal, busy),
    })
}

/// Bytes of a request head. hyper looks at its limit only while a head is incomplete, so one that comes in few large
/// pieces passes there.
fn head_bytes(parts: &Parts) -> usize {
    let target = parts.uri.path_and_query().map_or(0, |target| target.as_str().len());
    let fields: usize = parts.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    target + fields
}

pub(crate) struct Exchange {
    pub(crate) shared: Arc<Shared>,
    /// What was configured when the request began.
    pub(crate) live: Arc<Live>,
    /// We stand in the place of a single llama-server.
    drop_in: bool,
    pub(crate) conn: Arc<ConnState>,
    pub(crate) route: Route,
    /// What is held of the bodies of this client.
    held: Arc<Share>,
    pub(crate) request_id: HeaderValue,
    origin: Option<HeaderValue>,
    pub(crate) flight: Flight,
    /// The client's key, where keys are asked for.
    pub(crate) key: Option<Arc<Key>>,
    /// Tokens of the prompt, where admission wants to know.
    pub(crate) tokens: Option<u64>,
    /// The answer is put together from a stream of this dialect.
    pub(crate) assemble: Option<Kind>,
    /// What it sets in its backend: the route and the body.
    sets: Option<(String, Bytes)>,
    /// The client may still be sending its body.
    body_left: bool,
}

impl Exchange {
    /// What can be said before the body is read.
    fn check(
        &mut self,
        parts: &Parts,
        body: &Incoming,
        seen: Option<Seen>,
        own: Option<&Own<'_>>,
    ) -> Result<(), Refusal> {
        wire::check(parts, body, seen).map_err(Refusal::Wire)?;
        // Until here, a refusal ended the connection.
        self.body_left = !body.is_end_stream();
        // Probes come under any name, and learn nothing by it.
        if !matches!(own, Some(Own::Health)) {
            names::check(&self.live.names, parts)?;
            forged::check(&self.live.cors.origins, parts)?;
        }
        self.admit(&parts.headers, own)
    }

    fn own(&mut self, parts: &Parts, own: &Own<'_>) -> Result<own::Words, Refusal> {
        self.body_left = false;
        let view = || self.shared.backends.view();
        match own {
            Own::Health if self.shared.stop.is_cancelled() => Err(Refusal::ShuttingDown),
            Own::Health if self.drop_in && dropin::is_loading(&self.shared) => Err(Refusal::Loading),
            Own::Health => own::health(&view()),
            Own::Models => Ok(own::models(&view(), self.shared.started, &|model| self.shows(&model.name))),
            Own::Running => Ok(own::running(&view(), &|model| self.shows(&model.name))),
            Own::Bare(name) => {
                self.resolve_path(name)?;
                let place = format!("{}{}", self.shared.config.api_prefix, target::with_slash(&parts.uri));
                Ok(own::redirect(&place))
            }
            Own::Model(name) => {
                let resolved = self.resolve(Some(name))?;
                own::model(&view(), resolved.as_str(), self.shared.started).ok_or_else(|| {
                    ResolveError::Unknown { name: name.clone().into_owned(), known: self.known() }.into()
                })
            }
            Own::Preflight => Ok((self.live.cors.preflight(&parts.headers), Bytes::new())),
            Own::Forbidden => {
                // A client may send through its tunnel before it knows that there is none: nothing behind is a request.
                self.body_left = true;
                Err(Refusal::Method(parts.method.clone()))
            }
        }
    }

    async fn forward(
        &mut self,
        mut parts: Parts,
        upstream: Option<Result<Upstream, Refusal>>,
        body: Incoming,
    ) -> Result<Relayed, Refusal> {
        let config = &self.shared.clone().config;
        let limits = config.limits(self.route.size);
        let printer = self.shared.prints.begin(&parts.method, &routes::plain(parts.uri.path()));
        let budget = self.shared.budget.of(self.held.clone(), self.key.as_ref().map(|key| key.held()));
        let mut intake = Intake::begin(&parts.headers, body, budget, limits, printer)?;
        let live = self.live.clone();
        let is_plain = upstream.is_none();
        let rules = |model: &ModelName| live.models.get(model).filter(|_| is_plain);
        let asked = match upstream.transpose().map_err(|refusal| self.told_of(refusal))? {
            Some(named) => {
                parts.uri = named.target.into();
                Some(named.name)
            }
            None => parts.uri.query().and_then(|query| query::parameter(query, "model")),
        };
        let named = match asked {
            Some(name) if is_plain => Some(self.resolve(Some(&name))?),
            Some(name) => Some(self.resolve_path(&name)?),
            // With `any_name`, every name means the only model, so that a large body need not be searched for one.
            None if self.drop_in => Some(self.resolve(Some(""))?),
            None => None,
        };
        let renamed = named.as_ref().and_then(rules).is_some_and(|rules| rules.upstream_model.is_some());
        let taken = intake.take(named.is_none() || renamed, config).await;
        self.body_left = !intake.is_whole();
        self.flight.record.bytes_in = intake.len();
        taken?;
        let model = match named {
            Some(model) => model,
            None => self.model(&intake)?,
        };
        self.flight.record.model = Some(model.clone());
        if let Some(rules) = rules(&model) {
            let applied = self.apply_rules(&model, rules, &mut parts, &mut intake).await;
            self.body_left = !intake.is_whole();
            applied?;
        }

        wire::sign(&mut parts.headers, parts.version);
        let conversation = headers::conversation(&parts.headers).filter(|_| self.drop_in);
        headers::to_backend(&mut parts.headers, &self.request_id);
        headers::set_conversation(&mut parts.headers, conversation);
        if self.key.is_some() {
            keys::strip(&mut parts.headers);
        }
        // Before a backend is waited for, and as it would go there.
        fits_lines(&parts)?;
        self.turn_away(&model, &intake)?;
        self.tokens = self.demand(&model, &parts.headers, &mut intake).await?;
        if is_plain {
            self.assemble = self.ask_for_a_stream(&model, &mut intake).await?;
        }
        self.turn_away(&model, &intake)?;
        if routes::sets(&parts.method, &self.route) && intake.take_all().await? {
            self.sets = intake.json().map(|body| (routes::plain(parts.uri.path()).into_owned(), body));
        }
        let right = self.lease(&model, &mut intake).await?;
        self.body_left = !intake.is_whole();
        if let Some(recorder) = live.recorders.get(&model).filter(|_| self.route.kind == LeaseKind::Slot) {
            intake.record(Tape::new(recorder.clone(), &parts.method, parts.uri.path()));
        }
        let is_page = parts.method == Method::GET && parts.uri.path() == "/";
        if routes::pauses(&parts.method, &self.route) {
            right.note_pause();
        }
        let message = Message::new(parts, intake, self.route, self.shared.config.replay_bytes)?;
        let relayed = self.attempts(model.clone(), right, message).await?;
        // Its connection ends here with it.
        wire::check_answer(relayed.response.status(), relayed.response.headers())
            .map_err(|why| Refusal::Garbled { model, why: why.to_owned() })?;
        if is_page && relayed.response.status() == StatusCode::NOT_FOUND {
            // llama-server's own answer says no more than that.
            return Err(Refusal::NoPage);
        }
        Ok(relayed)
    }

    /// Refuses a request that is known to kill its server, once all of it is here.
    fn turn_away(&self, model: &ModelName, intake: &Intake) -> Result<(), Refusal> {
        match intake.sent.print() {
            Some(print)
                if matches!(self.shared.backends.standing(model, print), Standing::Refused { .. }) =>
            {
                Err(self.quarantined(model, print, false))
            }
            _ => Ok(()),
        }
    }

    fn model(&self, intake: &Intake) -> Result<ModelName, Refusal> {
        let named = intake.named();
        if let Named::Model(name) = &named {
            return self.resolve(Some(name));
        }
        // The only model takes whatever comes and answers itself; with several, the reason must be ours.
        self.resolve(None).map_err(|refusal| match (named, refusal) {
            // Nobody can be asked whether there is such a route.
            (_, Refusal::Resolve(ResolveError::Missing { .. })) if self.route.name == routes::UNKNOWN => {
                Refusal::NoRoute
            }
            (Named::NotJson, Refusal::Resolve(ResolveError::Missing { known })) => Refusal::NotJson { known },
            (Named::NotText, Refusal::Resolve(ResolveError::Missing { known })) => {
                Refusal::ModelNotText { known }
            }
            (_, refusal) => refusal,
        })
    }

    /// Waits for a lease and reads the body ahead meanwhile, because a client's leaving can only be seen behind it.
    async fn lease(&mut self, model: &ModelName, intake: &mut Intake) -> Result<Arc<dyn Right>, Refusal> {
        let shared = self.shared.clone();
        let lease = shared.backends.lease(model, self.route.kind, self.tokens);
        let granted = tokio::select! {
            biased;
            granted = lease => granted,
            refusal = intake.ahead() => return Err(refusal),
        };
        self.granted(model, granted)
    }

    pub(crate) fn relay(mut self, relayed: Relayed, busy: Busy) -> Response<AnswerBody> {
        let Relayed { response, backend } = relayed;
        let (mut parts, incoming) = response.into_parts();
        let version = parts.version;
        let config = &self.shared.config;
        let is_events = parts
            .headers
            .get(CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().to_ascii_lowercase().starts_with(b"text/event-stream"));
        let has_body = self.flight.record.method != Method::HEAD && parts.status != StatusCode::NOT_MODIFIED;
        headers::to_client(&mut parts.headers, &self.request_id, has_body);
        // Where we stand in its place and nothing is configured, llama-server's own word stands.
        if !(self.drop_in && self.live.cors.is_plain()) {
            cors::strip(&mut parts.headers);
            self.live.cors.mark(self.origin.as_ref(), &mut parts.headers);
        }
        wire::sign(&mut parts.headers, version);
        self.flight.record.status = parts.status.as_u16();
        self.flight.record.stream = is_events;
        if is_events && self.route.watches() && self.flight.record.method == Method::GET {
            backend.right.watches();
        }
        backend.right.note_progress(0);
        backend.right.note_answered(is_events, parts.status.is_success());
        if let Some((path, body)) = self.sets.take().filter(|_| parts.status.is_success()) {
            backend.right.note_setting(&path, body);
        }
        let terms = RelayTerms {
            tail_bytes: (self.route.kind == LeaseKind::Slot).then_some(config.tail_bytes),
            generates: self.route.generates,
            events: is_events.then_some((config.event_bytes, config.stream_idle)),
            dialect: self.route.dialect,
            // llama-server closes after a stream and after an error, whatever its headers promise.
            reusable: !is_events && parts.status.as_u16() < 400,
        };
        if !backend.sent.is_whole() {
            self.conn.must_linger();
            if self.body_left {
                // What still comes of the body must not be taken for the next request.
                parts.headers.insert(CONNECTION, HeaderValue::from_static("close"));
            }
        }
        let relay = Relay::new(incoming, self.flight, backend, &terms);
        let mut answer = Response::new(AnswerBody::relay(relay, busy));
        *answer.status_mut() = parts.status;
        *answer.headers_mut() = parts.headers;
        answer
    }

    fn words(self, (headers, body): own::Words, busy: Busy) -> Response<AnswerBody> {
        let status =
            if headers.contains_key(LOCATION) { StatusCode::PERMANENT_REDIRECT } else { StatusCode::OK };
        self.reply(status, headers, body, Outcome::Ok, busy)
    }

    pub(crate) fn refuse(self, refusal: &Refusal, busy: Busy) -> Response<AnswerBody> {
        tracing::debug!(request_id = self.flight.record.request_id, refusal = refusal.to_string(), "refused");
        let answer = refusal.answer(self.route.dialect);
        let mut headers: HeaderMap = answer.headers.into_iter().collect();
        if self.body_left {
            self.conn.must_linger();
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        self.reply(answer.status, headers, answer.body, refusal.outcome(), busy)
    }

    pub(crate) fn reply(
        mut self,
        status: StatusCode,
        mut headers: HeaderMap,
        body: Bytes,
        outcome: Outcome,
        busy: Busy,
    ) -> Response<AnswerBody> {
        headers.insert(headers::REQUEST_ID, self.request_id);
        self.live.cors.mark(self.origin.as_ref(), &mut headers);
        self.flight.record.status = status.as_u16();
        // Our own words are few: who has not taken them by then does not read.
        self.conn.bound(Instant::now() + self.shared.config.send_timeout);
        let mut answer = Response::new(AnswerBody::fixed(body, self.flight, outcome, busy));
        *answer.status_mut() = status;
        *answer.headers_mut() = headers;
        answer
    }
}
