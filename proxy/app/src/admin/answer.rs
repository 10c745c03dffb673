//! What each admin route answers: JSON, JSON lines, or the text for Prometheus.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures_util::stream::{self, Stream, StreamExt};
use http::{HeaderMap, Method, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use warden_gateway::{Control, Gauges, Requests};
use warden_patches::mitigation::Advice;
use warden_policies::defaults::Probe;
use warden_policies::pool::{Facts, agent};
use warden_policies::{MemoryLimit, secrets};
use warden_supervisor::{ControlError, Fleet, FleetView, SharedSpec, StateView};

use super::canary::Tries;
use super::families::plain_text;
use super::metrics::Metrics;
use super::page::holds::Plans;
use super::page::hub::Desk;
use super::pool_metrics::Pool;
use super::route::{self, Mismatch, ROUTES, Route};
use crate::access_log::{AccessLog, AccessLogView};
use crate::advice::{self, Servers};
use crate::captures::Captures;
use crate::config::show::Kept;
use crate::probe::facts;
use crate::series::Store;
use crate::serve::leaving::Leaving;
use crate::serve::upgrade::order::{Orders, Refused};

pub(crate) type Body = UnsyncBoxBody<Bytes, Infallible>;

/// What `GET /status` answers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Status {
    pub(crate) instance: Instance,
    /// Budgets by model; models without one are left out.
    #[serde(default)]
    pub(crate) budgets: Budgets,
    /// What might be done about models whose memory grows; models without advice are left out.
    #[serde(default)]
    pub(crate) advice: BTreeMap<String, Vec<AdviceView>>,
    /// What each model does about memory, as it is written, those of the user's own sets with their set; models without are
    /// left out.
    #[serde(default)]
    pub(crate) mitigations: BTreeMap<String, Vec<String>>,
    /// The programs that each model runs, and the one that its next process will be; absent from versions that did not
    /// know.
    #[serde(default)]
    pub(crate) binaries: Option<Binaries>,
    /// Models that the configuration binds to a build or a program of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) bound: Vec<String>,
    /// The access log, if it has a file of its own.
    #[serde(default)]
    pub(crate) access_log: Option<AccessLogView>,
    /// What is written to the state directory, and what is missing there.
    #[serde(default)]
    pub(crate) state: StateView,
    pub(crate) fleet: FleetView,
}

impl Status {
    /// The program that the next process of a model will be; those that run stand behind it.
    pub(crate) fn next_binary(&self, model: &str) -> Option<&Path> {
        self.binaries.as_ref()?.get(model)?.first().map(PathBuf::as_path)
    }
}

pub(crate) type Binaries = BTreeMap<String, Vec<PathBuf>>;

/// The programs that the next process of each model will be.
pub(crate) fn next_binaries(models: &[SharedSpec]) -> Binaries {
    let one = |model: &SharedSpec| (model.name.as_str().to_owned(), vec![model.command.binary.clone()]);
    models.iter().map(one).collect()
}

/// A leak that a model looks like, and what helps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AdviceView {
    /// Its id in the list of leaks.
    pub(crate) leak: String,
    /// How likely, 0 to 1.
    pub(crate) confidence: f64,
    /// Mitigations to try, best first.
    pub(crate) mitigations: Vec<String>,
    /// All of it in one sentence.
    pub(crate) text: String,
}

impl From<&Advice> for AdviceView {
    fn from(advice: &Advice) -> Self {
        Self {
            leak: advice.leak.clone(),
            confidence: advice.confidence,
            mitigations: advice.mitigations.clone(),
            text: advice.sentence(),
        }
    }
}

/// What the configuration says that answers need: taken anew at each reload.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    pub(crate) budgets: Budgets,
    /// How the servers are started.
    pub(crate) servers: Servers,
    pub(crate) binaries: Binaries,
    /// Models that are bound to theirs.
    pub(crate) bound: Vec<String>,
    /// What a canary is made by.
    pub(crate) tries: Tries,
    /// What models were planned to need.
    pub(crate) plans: Plans,
    /// What was configured, to be shown.
    pub(crate) configuration: Option<Kept>,
}

pub(crate) type Budgets = BTreeMap<String, Budget>;

/// The budgets of one model: bytes, a share like `"80%"`, or `"auto"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Budget {
    /// Of host memory: replaced when quiet above this.
    pub(crate) soft: Option<MemoryLimit>,
    /// Of host memory: drained now above this.
    pub(crate) hard: Option<MemoryLimit>,
    /// Of VRAM, on each GPU: replaced when quiet above this.
    #[serde(default)]
    pub(crate) vram_soft: Option<MemoryLimit>,
    /// Of VRAM: drained now above this.
    #[serde(default)]
    pub(crate) vram_hard: Option<MemoryLimit>,
}

/// The budgets of a fleet.
pub(crate) fn budgets(models: &[SharedSpec]) -> Budgets {
    let budget = |model: &SharedSpec| Budget {
        soft: model.recycle.host_soft,
        hard: model.recycle.host_hard,
        vram_soft: model.recycle.vram_soft,
        vram_hard: model.recycle.vram_hard,
    };
    let all = models.iter().map(|model| (model.name.as_str().to_owned(), budget(model)));
    all.filter(|(_, budget)| *budget != Budget::default()).collect()
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Instance {
    pub(crate) pid: u32,
    pub(crate) version: String,
    pub(crate) address: String,
    pub(crate) admin_socket: String,
    /// When it started, RFC 3339.
    pub(crate) started_at: String,
    /// Its record of replacements.
    pub(crate) ledger: String,
    /// Where its builds are.
    #[serde(default)]
    pub(crate) data_dir: String,
    /// Its own memory in bytes (`RssAnon`), where it can be read.
    #[serde(default)]
    pub(crate) memory_anon: Option<u64>,
}

/// What `POST /drain` answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Left {
    /// Whether probes and balancers hear that no more requests should be sent here.
    pub(crate) draining: bool,
    /// Requests that run.
    pub(crate) in_flight: usize,
}

/// What the answers are made of. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Admin {
    pub(crate) fleet: Fleet,
    pub(crate) metrics: Arc<Metrics>,
    /// Budgets and commands, as last configured.
    pub(crate) told: watch::Receiver<Told>,
    /// Numbers of the gateway.
    pub(crate) gauges: Arc<Gauges>,
    /// What the gateway is told, and what keys have used.
    pub(crate) gateway: Control,
    pub(crate) access: AccessLog,
    /// Those in flight, and those that ended last.
    pub(crate) requests: Requests,
    /// Who asks, in words.
    pub(crate) by: Arc<str>,
    pub(crate) instance: Arc<Instance>,
    /// What all who look at the page share.
    pub(crate) page: Arc<Desk>,
    /// The last requests of models whose requests are recorded.
    pub(crate) captures: Captures,
    /// What memory did.
    pub(crate) series: Store,
    /// Where another program is asked to take our place.
    pub(crate) upgrades: Orders,
    /// Whether we leave a group of instances.
    pub(crate) leaving: Arc<Leaving>,
    /// The settings of `[probe]`: what probes and balancers hear from us.
    pub(crate) probe: Arc<Probe>,
    /// Connections that may be open.
    pub(crate) connections: usize,
    /// Ends answers that would go on for ever.
    pub(crate) stop: CancellationToken,
}

impl Admin {
    /// `headers` say in which format metrics are wanted.
    pub(crate) async fn answer(
        &self,
        method: &Method,
        path: &str,
        query: Option<&str>,
        headers: &HeaderMap,
    ) -> Response<Body> {
        match route::route(method, path, query) {
            Ok(Route::Status) => json(StatusCode::OK, &self.status()),
            Ok(Route::Metrics) => {
                let text = self.metrics_text(true);
                if wants_open_metrics(headers) {
                    respond(
                        StatusCode::OK,
                        "application/openmetrics-text; version=1.0.0; charset=utf-8",
                        full(text),
                    )
                } else {
                    respond(
                        StatusCode::OK,
                        "text/plain; version=0.0.4; charset=utf-8",
                        full(plain_text(&text)),
                    )
                }
            }
            Ok(Route::Events { follow }) => {
                let tail = self.fleet.events();
                lines(tail.events, follow.then_some(tail.receiver), self.stop.clone(), line)
            }
            Ok(Route::Series(query)) => self.series(query.as_deref()).await,
            Ok(Route::Logs { model, follow, reveal }) => match self.fleet.logs(&model) {
                Some(tail) => {
                    let line = if reveal { as_it_is } else { line };
                    lines(tail.lines, follow.then_some(tail.receiver), self.stop.clone(), line)
                }
                None => self.unknown(&model),
            },
            Ok(Route::Restart(model)) => match self.fleet.restart(&model).await {
                Ok(entries) => json(StatusCode::OK, &serde_json::json!({ "entries": entries })),
                Err(error) => control_error(&error),
            },
            Ok(Route::Drain(model)) => match self.fleet.drain(&model).await {
                Ok(()) => json(StatusCode::OK, &serde_json::json!({ "drained": model })),
                Err(error) => control_error(&error),
            },
            Ok(Route::Leave { undo }) => self.leave(undo),
            Ok(Route::Reclaim(model)) => match self.fleet.reclaim(&model).await {
                Ok(entries) => json(StatusCode::OK, &serde_json::json!({ "entries": entries })),
                Err(error) => control_error(&error),
            },
            Ok(Route::Pin(model, pinned)) => match self.fleet.pin(&model, pinned, &self.by).await {
                Ok(pin) => json(StatusCode::OK, &pin),
                Err(error) => control_error(&error),
            },
            Ok(Route::Canary(model, order)) => self.canary(&model, order).await,
            Ok(Route::Requests(filter)) => self.requests_answer(filter),
            Ok(Route::Request(id)) => self.request_answer(&id),
            Ok(Route::CancelRequest { id, number }) => self.cancel_answer(&id, number),
            Ok(Route::Upgrade(Err(problem))) => error(StatusCode::BAD_REQUEST, &problem),
            Ok(Route::Upgrade(Ok((to, wait)))) => match self.upgrades.give(to, wait, self.by.clone()).await {
                Ok(upgraded) => json(StatusCode::OK, &upgraded),
                Err(Refused::UnderWay) => {
                    error(StatusCode::CONFLICT, "another upgrade is under way: wait for its end")
                }
                Err(Refused::Failed(why)) => {
                    error(StatusCode::CONFLICT, &format!("no upgrade, everything goes on as before: {why}"))
                }
            },
            Ok(Route::Release(which)) => match self.fleet.release_requests(which.as_deref()) {
                Ok(released) => json(StatusCode::OK, &serde_json::json!({ "released": released })),
                Err(unknown) => error(StatusCode::NOT_FOUND, &unknown.to_string()),
            },
            Err(Mismatch::NotFound) => {
                error(StatusCode::NOT_FOUND, &format!("there is no route {path}: the routes are {ROUTES}"))
            }
            Err(Mismatch::Method(wanted)) => {
                error(StatusCode::METHOD_NOT_ALLOWED, &format!("{path} is for {wanted}, not for {method}"))
            }
        }
    }

    /// All metrics, in the format of `OpenMetrics`; those of keys, which are somebody's names, only if they are wanted, and the one for pickers
    /// where those are not.
    pub(crate) fn metrics_text(&self, of_keys: bool) -> String {
        let budgets = self.told.borrow().budgets.clone();
        let keys = if of_keys { self.gateway.key_counts() } else { Vec::new() };
        let view = self.fleet.view();
        let facts = self.facts_of(&view);
        let line = Some(agent::line(&facts, self.probe.horizon.as_secs_f64()));
        let contexts = facts::contexts(&view, &self.requests.held());
        self.metrics.note_pool(Pool { facts, contexts, line, vllm: self.probe.vllm, pickers: !of_keys });
        self.metrics.lost_lines(self.access.lost(), crate::logging::lost());
        self.metrics.note_state(&self.fleet.state_writer().view());
        self.metrics.text(&view, &budgets, &self.gauges, &keys, own_memory())
    }

    /// What matters of this moment to who spreads requests over several instances.
    pub(crate) fn facts(&self) -> Facts {
        self.facts_of(&self.fleet.view())
    }

    fn facts_of(&self, view: &FleetView) -> Facts {
        let draining = self.gauges.draining.load(Ordering::Relaxed);
        let full = self.gauges.connections.load(Ordering::Relaxed) >= self.connections;
        facts::facts(view, draining, full)
    }

    /// `POST /drain`: from now on probes and balancers hear that this instance leaves, or that it stays after all. Requests that run go on.
    fn leave(&self, undo: bool) -> Response<Body> {
        let changed = if undo { self.leaving.undo() } else { Ok(self.leaving.begin()) };
        let changed = match changed {
            Ok(changed) => changed,
            Err(ending) => return error(StatusCode::CONFLICT, &ending.to_string()),
        };
        if changed {
            self.fleet.note_asked(None, if undo { "stay" } else { "drain" }, &self.by);
        }
        let left = Left { draining: !undo, in_flight: self.leaving.in_flight() };
        json(StatusCode::OK, &left)
    }

    /// The same for somebody else, in words.
    pub(crate) fn asked_by(&self, by: &str) -> Self {
        Self { by: by.into(), ..self.clone() }
    }

    fn status(&self) -> Status {
        let mut status = self.seen();
        let binaries = status.binaries.take().unwrap_or_default();
        status.binaries = Some(running_too(binaries, &status.fleet));
        status
    }

    /// The same, as far as no process has to be looked at.
    pub(crate) fn seen(&self) -> Status {
        let instance = Instance { memory_anon: own_memory(), ..(*self.instance).clone() };
        let told = self.told.borrow().clone();
        let fleet = (*self.fleet.view()).clone();
        let advice = advice::of_fleet(&told.servers, &fleet);
        let advice =
            advice.into_iter().map(|(model, all)| (model, all.iter().map(AdviceView::from).collect()));
        let binaries = Some(told.binaries);
        let access_log = self.access.view();
        let shown = told.servers.iter().map(|(model, server)| (model.clone(), server.shown.clone()));
        Status {
            instance,
            budgets: told.budgets,
            advice: advice.collect(),
            mitigations: shown.filter(|(_, shown)| !shown.is_empty()).collect(),
            binaries,
            bound: told.bound,
            access_log,
            state: self.fleet.state_writer().view(),
            fleet,
        }
    }

    fn unknown(&self, model: &str) -> Response<Body> {
        match self.fleet.resolve(Some(model)) {
            Err(unknown) => error(StatusCode::NOT_FOUND, &unknown.to_string()),
            Ok(_) => error(StatusCode::NOT_FOUND, &format!("there are no logs of `{model}`")),
        }
    }
}

/// Adds the programs of the processes that run: after a reload they may be others than the next ones.
fn running_too(mut binaries: Binaries, fleet: &FleetView) -> Binaries {
    for model in fleet.models.iter().chain(&fleet.canaries) {
        let running = model.backends.iter().filter_map(|backend| {
            let program = std::fs::read_link(format!("/proc/{}/exe", backend.pid?)).ok()?;
            Some(program)
        });
        let all = binaries.entry(model.name.as_str().to_owned()).or_default();
        for program in running {
            if !all.contains(&program) {
                all.push(program);
            }
        }
    }
    binaries
}

/// An answer that says what is wrong.
pub(crate) fn error(status: StatusCode, message: &str) -> Response<Body> {
    json(status, &serde_json::json!({ "error": message }))
}

/// Prometheus names the formats that it can read; who names none gets the one that everybody can.
pub(crate) fn wants_open_metrics(headers: &HeaderMap) -> bool {
    let named = |value: &http::HeaderValue| {
        value.to_str().is_ok_and(|text| text.to_ascii_lowercase().contains("application/openmetrics-text"))
    };
    headers.get_all(header::ACCEPT).iter().any(named)
}

fn own_memory() -> Option<u64> {
    warden_sensors::host_memory(std::process::id()).ok().map(|memory| memory.anon)
}

fn control_error(failure: &ControlError) -> Response<Body> {
    let status = match failure {
        ControlError::Unknown(_) => StatusCode::NOT_FOUND,
        ControlError::StartFailed { .. } => StatusCode::BAD_GATEWAY,
        ControlError::GivenUp { .. }
        | ControlError::CannotReclaim { .. }
        | ControlError::CannotPin { .. }
        | ControlError::Remote { .. } => StatusCode::CONFLICT,
        ControlError::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
    };
    let lines = match failure {
        ControlError::StartFailed { failure, .. } => failure.lines.clone(),
        _ => Vec::new(),
    };
    json(status, &serde_json::json!({ "error": failure.to_string(), "lines": lines }))
}

pub(super) fn json(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    // What a process said last may have quoted a key, and people show this to others.
    match serde_json::to_value(value) {
        Ok(value) => respond(status, "application/json", full(format!("{}\n", secrets::json(value)))),
        Err(problem) => respond(
            StatusCode::INTERNAL_SERVER_ERROR,
            "text/plain",
            full(format!("cannot write the answer: {problem}\n")),
        ),
    }
}

fn full(text: String) -> Body {
    Full::new(Bytes::from(text)).boxed_unsync()
}

fn respond(status: StatusCode, kind: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static(kind));
    response
}

/// How an item becomes a line.
type Line<T> = fn(&T) -> Result<Frame<Bytes>, Infallible>;

/// JSON lines: those kept, then those to come until the listener or we end.
fn lines<T>(kept: Vec<T>, more: Option<Receiver<T>>, stop: CancellationToken, line: Line<T>) -> Response<Body>
where
    T: Serialize + Clone + Send + 'static,
{
    let kept = stream::iter(kept).map(move |item| line(&item));
    let body = match more {
        None => StreamBody::new(kept).boxed_unsync(),
        Some(receiver) => StreamBody::new(kept.chain(following(receiver, stop, line))).boxed_unsync(),
    };
    respond(StatusCode::OK, "application/jsonl", body)
}

fn following<T>(
    receiver: Receiver<T>,
    stop: CancellationToken,
    line: Line<T>,
) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>>
where
    T: Serialize + Clone + Send + 'static,
{
    stream::unfold((receiver, stop), move |(mut receiver, stop)| async move {
        let next = tokio::select! {
            next = receiver.recv() => next,
            () = stop.cancelled() => return None,
        };
        match next {
            Ok(item) => Some((line(&item), (receiver, stop))),
            // A slow reader is told what it missed instead of holding up everybody.
            Err(RecvError::Lagged(missed)) => {
                Some((as_it_is(&serde_json::json!({ "missed": missed })), (receiver, stop)))
            }
            Err(RecvError::Closed) => None,
        }
    })
}

/// A line without secrets.
fn line<T: Serialize>(item: &T) -> Result<Frame<Bytes>, Infallible> {
    match serde_json::to_value(item) {
        Ok(value) => as_it_is(&secrets::json(value)),
        Err(_) => Ok(Frame::data(Bytes::new())),
    }
}

/// A line as it is, for whoever asks for it so.
#[expect(clippy::unnecessary_wraps, reason = "the shape that a streamed body asks for")]
fn as_it_is<T: Serialize>(item: &T) -> Result<Frame<Bytes>, Infallible> {
    let text = serde_json::to_string(item).map(|text| format!("{text}\n")).unwrap_or_default();
    Ok(Frame::data(Bytes::from(text)))
}

#[cfg(test)]
#[path = "answer_tests.rs"]
pub(crate) mod tests;
