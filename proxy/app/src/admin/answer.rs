//! Answers of the admin routes: JSON, JSON lines, or text for Prometheus.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, Stream, StreamExt};
use http::{HeaderMap, Method, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use warden_gateway::{GatewayControl, GatewayGauges, RequestRegistry};
use warden_patches::mitigation::LeakAdvice;
use warden_policies::defaults::Probe;
use warden_policies::pool::{InstanceFacts, agent};
use warden_policies::secrets;
use warden_supervisor::{ControlError, Fleet, FleetView, SharedSpec, StateView};

use super::canary::CanarySettings;
use super::families::to_plain_text;
use super::leaving::LeaveControl;
use super::memory_use::{BudgetsByModel, PlannedModels};
use super::metrics::MetricsRegistry;
use super::page::hub::PageHub;
use super::pool_metrics::PoolSnapshot;
use super::route::{self, AdminRoute, ROUTE_LIST, RouteError};
use super::upgrade_order::{OrderError, UpgradeOrders};
use crate::access_log::{AccessLog, AccessLogView};
use crate::advice::{self, AdvisedServers};
use crate::captures::CaptureStore;
use crate::config::show::DisplayedConfig;
use crate::probe::facts;
use crate::series::SeriesStore;

pub(crate) type AdminBody = UnsyncBoxBody<Bytes, Infallible>;

pub(crate) const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
pub(crate) const OPEN_METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The answer to `GET /status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct AdminStatus {
    pub(crate) instance: InstanceInfo,
    /// Budgets by model; models without a budget are left out.
    #[serde(default)]
    pub(crate) budgets: BudgetsByModel,
    /// Advice on models whose memory grows; models without advice are left out.
    #[serde(default)]
    pub(crate) advice: BTreeMap<String, Vec<AdviceView>>,
    /// Mitigations by model, as written in the configuration; a mitigation from a user-defined set names the
    /// set. Models without mitigations are left out.
    #[serde(default)]
    pub(crate) mitigations: BTreeMap<String, Vec<String>>,
    /// Programs by model: of the next process first, then of running ones. Absent from older versions.
    #[serde(default)]
    pub(crate) binaries: Option<BinariesByModel>,
    /// Models for which the configuration names a certain build or program.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) bound: Vec<String>,
    /// The access log, if it is a separate file.
    #[serde(default)]
    pub(crate) access_log: Option<AccessLogView>,
    #[serde(default)]
    pub(crate) state: StateView,
    pub(crate) fleet: FleetView,
}

impl AdminStatus {
    pub(crate) fn next_binary(&self, model: &str) -> Option<&Path> {
        self.binaries.as_ref()?.get(model)?.first().map(PathBuf::as_path)
    }
}

pub(crate) type BinariesByModel = BTreeMap<String, Vec<PathBuf>>;

pub(crate) fn next_binaries(models: &[SharedSpec]) -> BinariesByModel {
    let one = |model: &SharedSpec| (model.name.as_str().to_owned(), vec![model.command.binary.clone()]);
    models.iter().map(one).collect()
}

/// A known leak that a model's growth resembles, and its mitigations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AdviceView {
    pub(crate) leak: String,
    /// Confidence that the leak is this one, 0 to 1.
    pub(crate) confidence: f64,
    /// Mitigations to try, best first.
    pub(crate) mitigations: Vec<String>,
    pub(crate) text: String,
}

impl From<&LeakAdvice> for AdviceView {
    fn from(advice: &LeakAdvice) -> Self {
        Self {
            leak: advice.leak.clone(),
            confidence: advice.confidence,
            mitigations: advice.mitigations.clone(),
            text: advice.sentence(),
        }
    }
}

/// Parts of the configuration that answers need; replaced at each reload.
#[derive(Clone, Debug, Default)]
pub(crate) struct AdminConfig {
    pub(crate) budgets: BudgetsByModel,
    /// Start commands of the servers, for advice.
    pub(crate) servers: AdvisedServers,
    pub(crate) binaries: BinariesByModel,
    pub(crate) bound: Vec<String>,
    pub(crate) tries: CanarySettings,
    pub(crate) plans: PlannedModels,
    pub(crate) configuration: Option<DisplayedConfig>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InstanceInfo {
    pub(crate) pid: u32,
    pub(crate) version: String,
    pub(crate) address: String,
    pub(crate) admin_socket: String,
    /// Start time, RFC 3339.
    pub(crate) started_at: String,
    pub(crate) ledger: String,
    #[serde(default)]
    pub(crate) data_dir: String,
    /// Anonymous memory of llama-warden in bytes (`RssAnon`), where it can be read.
    #[serde(default)]
    pub(crate) memory_anon: Option<u64>,
}

/// The answer to `POST /drain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DrainReport {
    /// The instance asks probes and load balancers to send it no more requests.
    pub(crate) draining: bool,
    pub(crate) in_flight: usize,
}

#[derive(Clone)]
pub(crate) struct GatewayAccess {
    pub(crate) control: GatewayControl,
    pub(crate) gauges: Arc<GatewayGauges>,
    /// Requests in flight, and the latest that ended.
    pub(crate) requests: RequestRegistry,
    pub(crate) max_connections: usize,
}

impl GatewayAccess {
    fn is_draining(&self) -> bool {
        self.gauges.draining.load(Ordering::Relaxed)
    }

    fn is_full(&self) -> bool {
        self.gauges.connections.load(Ordering::Relaxed) >= self.max_connections
    }
}

#[derive(Clone)]
pub(crate) struct InstanceRecords {
    pub(crate) access: AccessLog,
    /// Latest recorded requests.
    pub(crate) captures: CaptureStore,
    pub(crate) series: SeriesStore,
}

/// State from which admin answers are made. Cheap to clone.
#[derive(Clone)]
pub(crate) struct AdminState {
    pub(crate) fleet: Fleet,
    pub(crate) metrics: Arc<MetricsRegistry>,
    pub(crate) config: watch::Receiver<AdminConfig>,
    pub(crate) gateway: GatewayAccess,
    pub(crate) records: InstanceRecords,
    /// Name of the caller, for events and the ledger.
    pub(crate) caller: Arc<str>,
    pub(crate) instance: Arc<InstanceInfo>,
    pub(crate) page: Arc<PageHub>,
    pub(crate) upgrades: UpgradeOrders,
    pub(crate) leaving: Arc<LeaveControl>,
    pub(crate) probe: Arc<Probe>,
    /// Ends streamed answers when cancelled.
    pub(crate) stop: CancellationToken,
}

impl AdminState {
    /// Answers a request. `headers` decide the format of metrics.
    pub(crate) async fn answer(
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
            AdminRoute::Request(id) => self.request_answer(&id),
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

    /// Returns all metrics in the `OpenMetrics` format. `of_keys`: includes the metrics of API keys, whose
    /// names may identify people. Without them, the metric for endpoint pickers is included.
    pub(crate) fn metrics_text(&self, of_keys: bool) -> String {
        let budgets = self.config.borrow().budgets.clone();
        let keys = if of_keys { self.gateway.control.key_counts() } else { Vec::new() };
        let view = self.fleet.view();
        let facts = self.facts_from_view(&view);
        let pool = PoolSnapshot {
            line: Some(agent::agent_answer(&facts, self.probe.horizon.as_secs_f64())),
            facts,
            contexts: facts::context_use(&view, &self.gateway.requests.context_holdings()),
            vllm: self.probe.vllm,
            pickers: !of_keys,
        };
        self.metrics.set_lost_lines(self.records.access.lost(), crate::logging::lost_lines());
        self.metrics.note_state(&self.fleet.state_writer().view());
        self.metrics.text(&pool, &view, &budgets, &self.gateway.gauges, &keys, own_memory())
    }

    /// Returns current facts for load balancers that spread requests over several instances.
    pub(crate) fn facts(&self) -> InstanceFacts {
        self.facts_from_view(&self.fleet.view())
    }

    fn facts_from_view(&self, view: &FleetView) -> InstanceFacts {
        facts::pool_facts(view, self.gateway.is_draining(), self.gateway.is_full())
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

    pub(crate) fn with_caller(&self, by: &str) -> Self {
        Self { caller: by.into(), ..self.clone() }
    }

    fn status(&self) -> AdminStatus {
        let mut status = self.status_without_processes();
        let binaries = status.binaries.take().unwrap_or_default();
        status.binaries = Some(with_running_binaries(binaries, &status.fleet));
        status
    }

    pub(crate) fn status_without_processes(&self) -> AdminStatus {
        let instance = InstanceInfo { memory_anon: own_memory(), ..(*self.instance).clone() };
        let config = self.config.borrow().clone();
        let fleet = (*self.fleet.view()).clone();
        let advice = advice::advise_fleet(&config.servers, &fleet).into_iter();
        let servers = config.servers.iter().filter(|(_, server)| !server.displayed_mitigations.is_empty());
        AdminStatus {
            instance,
            budgets: config.budgets,
            advice: advice.map(|(model, all)| (model, all.iter().map(AdviceView::from).collect())).collect(),
            mitigations: servers
                .map(|(model, server)| (model.clone(), server.displayed_mitigations.clone()))
                .collect(),
            binaries: Some(config.binaries),
            bound: config.bound,
            access_log: self.records.access.view(),
            state: self.fleet.state_writer().view(),
            fleet,
        }
    }

    fn unknown_model(&self, model: &str) -> Response<AdminBody> {
        match self.fleet.resolve(Some(model)) {
            Err(unknown) => error_response(StatusCode::NOT_FOUND, &unknown.to_string()),
            Ok(_) => error_response(StatusCode::NOT_FOUND, &format!("there are no logs of `{model}`")),
        }
    }
}

/// Adds the programs of running processes, which may differ from the next process's after a reload.
fn with_running_binaries(mut binaries: BinariesByModel, fleet: &FleetView) -> BinariesByModel {
    for model in fleet.models.iter().chain(&fleet.canaries) {
        let all = binaries.entry(model.name.as_str().to_owned()).or_default();
        for pid in model.backends.iter().filter_map(|backend| backend.pid) {
            match std::fs::read_link(format!("/proc/{pid}/exe")) {
                Ok(program) if !all.contains(&program) => all.push(program),
                _ => {}
            }
        }
    }
    binaries
}

pub(crate) fn error_response(status: StatusCode, message: &str) -> Response<AdminBody> {
    json_response(status, &json!({ "error": message }))
}

/// Prometheus lists the formats that it reads; a client that lists none gets the older format.
pub(crate) fn wants_open_metrics(headers: &HeaderMap) -> bool {
    let named = |value: &http::HeaderValue| {
        value.to_str().is_ok_and(|text| text.to_ascii_lowercase().contains("application/openmetrics-text"))
    };
    headers.get_all(header::ACCEPT).iter().any(named)
}

fn own_memory() -> Option<u64> {
    warden_sensors::host_memory(std::process::id()).ok().map(|memory| memory.anon)
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

pub(super) fn json_response(status: StatusCode, value: &impl Serialize) -> Response<AdminBody> {
    // The last output of a process may quote a key, and operators share these answers, so hide secrets.
    match serde_json::to_value(value) {
        Ok(value) => {
            make_response(status, "application/json", full_body(format!("{}\n", secrets::redact_json(value))))
        }
        Err(problem) => make_response(
            StatusCode::INTERNAL_SERVER_ERROR,
            "text/plain",
            full_body(format!("cannot write the answer: {problem}\n")),
        ),
    }
}

fn full_body(text: String) -> AdminBody {
    Full::new(Bytes::from(text)).boxed_unsync()
}

fn make_response(status: StatusCode, kind: &'static str, body: AdminBody) -> Response<AdminBody> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static(kind));
    response
}

type LineEncoder<T> = fn(&T) -> Result<Frame<Bytes>, Infallible>;

/// Streams JSON lines: the kept items, then new ones until the client leaves or `stop` is cancelled.
fn stream_lines<T>(
    kept: Vec<T>,
    more: Option<Receiver<T>>,
    stop: CancellationToken,
    line: LineEncoder<T>,
) -> Response<AdminBody>
where
    T: Serialize + Clone + Send + 'static,
{
    let kept = stream::iter(kept).map(move |item| line(&item));
    let body = match more {
        None => StreamBody::new(kept).boxed_unsync(),
        Some(receiver) => StreamBody::new(kept.chain(follow_receiver(receiver, stop, line))).boxed_unsync(),
    };
    make_response(StatusCode::OK, "application/jsonl", body)
}

fn follow_receiver<T>(
    receiver: Receiver<T>,
    stop: CancellationToken,
    line: LineEncoder<T>,
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
            // A client that reads too slowly gets the number of missed items, and delays no other client.
            Err(RecvError::Lagged(missed)) => {
                Some((raw_line(&json!({ "missed": missed })), (receiver, stop)))
            }
            Err(RecvError::Closed) => None,
        }
    })
}

fn redacted_line<T: Serialize>(item: &T) -> Result<Frame<Bytes>, Infallible> {
    match serde_json::to_value(item) {
        Ok(value) => raw_line(&secrets::redact_json(value)),
        Err(_) => Ok(Frame::data(Bytes::new())),
    }
}

/// Serializes an item as a JSON line with nothing hidden, for clients that asked to see secrets.
#[expect(clippy::unnecessary_wraps, reason = "the shape that a streamed body asks for")]
fn raw_line<T: Serialize>(item: &T) -> Result<Frame<Bytes>, Infallible> {
    let text = serde_json::to_string(item).map(|text| format!("{text}\n")).unwrap_or_default();
    Ok(Frame::data(Bytes::from(text)))
}

#[cfg(test)]
#[path = "answer_tests.rs"]
pub(crate) mod tests;
