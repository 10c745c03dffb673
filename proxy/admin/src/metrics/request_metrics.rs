//! Request metrics. The metrics for each combination of labels are looked up once and kept, because a
//! lookup by label texts costs more than counting.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Unit;
use warden_gateway::{RequestOutcome, RequestRecord};
use warden_policies::units::as_f64;
use warden_policies::{ModelName, QuickMap};

use super::families::ModelLabel;
use super::families::{families, labels};
use super::request_counts::RequestCounters;

/// Buckets in seconds, from the answer of a tokenizer to a generation of half an hour.
const REQUEST_BUCKETS: [f64; 14] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 1800.0];

/// Buckets in seconds per token, from a small model on a fast GPU to a large model on the CPU.
const TOKEN_BUCKETS: [f64; 12] = [0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0];

labels! {
    RequestLabels { model: String, route: &'static str, status: u16 }
    RouteLabels { model: String, route: &'static str }
    OutcomeLabels { model: String, outcome: &'static str }
}

/// Labels of a request: model, route, status, outcome.
type LabelTuple = (Option<ModelName>, &'static str, u16, &'static str);

struct RequestSeries {
    requests: Counter,
    outcomes: Counter,
    seconds: Histogram,
    /// Time to the first byte; looked up when a request first has such a time.
    ttfb: OnceLock<Histogram>,
    of_model: Option<ModelSeries>,
}

struct ModelSeries {
    tally: Arc<RequestCounters>,
    queue: Histogram,
    first_token: OnceLock<Histogram>,
    token: OnceLock<Histogram>,
    retries: Counter,
    continued: Counter,
    prompt_tokens: Counter,
    output_tokens: Counter,
    images: Counter,
    audio: Counter,
}

fn model_text(model: Option<&ModelName>) -> String {
    model.map(|model| model.as_str().to_owned()).unwrap_or_default()
}

fn request_histogram() -> Histogram {
    Histogram::new(REQUEST_BUCKETS)
}

fn token_histogram() -> Histogram {
    Histogram::new(TOKEN_BUCKETS)
}

families! {
    pub(super) struct RequestMetrics (
        counted: RwLock<QuickMap<LabelTuple, Arc<RequestSeries>>>,
        tallies: RwLock<BTreeMap<String, Arc<RequestCounters>>>
    ) {
        requests: Family<RequestLabels, Counter>
            = "requests",
            "Requests that ended. `status` is 0 if the client disconnected before there was one. `model` is \
             empty for requests that address none.";
        outcomes: Family<OutcomeLabels, Counter>
            = "request_outcomes",
            "Requests by how they ended: `ok`, `client_gone`, `upstream_died`, `upstream_garbled` (its \
             answer was not HTTP, or ambiguous), `upstream_stalled`, `timed_out`, `revoked`, \
             `cancelled_by_operator`, or why a request was denied or rejected: `no_model`, `unknown_model`, \
             `name` (`server.names`), `origin` (`server.cors`), `unknown_route` (no model named that could \
             know it), `two_models`, `unreadable_body` (rules could not be applied), `body_too_large`, \
             `buffers_full`, `queue_full` and others, each in the answer's own words.";
        retries: Family<ModelLabel, Counter>
            = "request_retries",
            "Further attempts to find a backend, each with proof that the last one executed nothing, or \
             after it died (`requests_continued`).";
        continued: Family<ModelLabel, Counter>
            = "requests_continued",
            "Requests whose server had died or was stopped before their answer was whole, and that were \
             executed once more or, as streams, for their rest.";
        request_seconds: Family<RouteLabels, Histogram, fn() -> Histogram>
            [Family::new_with_constructor(request_histogram)]
            = "request" in Unit::Seconds, "From the request's head to the end of its answer.";
        ttfb_seconds: Family<RouteLabels, Histogram, fn() -> Histogram>
            [Family::new_with_constructor(request_histogram)]
            = "ttfb" in Unit::Seconds, "From the request's head to the first byte of its answer, whatever its status.";
        queue_seconds: Family<ModelLabel, Histogram, fn() -> Histogram>
            [Family::new_with_constructor(request_histogram)]
            = "queue" in Unit::Seconds, "Time spent waiting for a backend.";
        first_token_seconds: Family<ModelLabel, Histogram, fn() -> Histogram>
            [Family::new_with_constructor(request_histogram)]
            = "first_token" in Unit::Seconds,
            "From the request's head to the first event of an answer that is generated as a stream. That is \
             its first token: queue, a load and the prompt are in it. Answers that a server sends in one \
             piece are not in it.";
        token_seconds: Family<ModelLabel, Histogram, fn() -> Histogram>
            [Family::new_with_constructor(token_histogram)]
            = "output_token" in Unit::Seconds,
            "Time for each further token of such an answer, its mean: from the first event to the end, by \
             the tokens after the first.";
        prompt_tokens: Family<ModelLabel, Counter> = "prompt_tokens", "Prompt tokens evaluated, as reported \
            in answers.";
        output_tokens: Family<ModelLabel, Counter> = "output_tokens", "Tokens generated, as reported in answers.";
        images: Family<ModelLabel, Counter> = "images", "Images in requests.";
        audio: Family<ModelLabel, Counter> = "audio", "Recordings in requests.";
    }
}

impl RequestMetrics {
    pub(super) fn count_request(&self, record: &RequestRecord) {
        let key = (record.model.clone(), record.route, record.answer_status(), record.outcome.as_str());
        let known = self.counted.read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        let counted = known.unwrap_or_else(|| {
            let counted = Arc::new(self.look_up(&key));
            self.counted.write().unwrap_or_else(PoisonError::into_inner).insert(key, counted.clone());
            counted
        });
        counted.requests.inc();
        counted.seconds.observe(record.total.as_secs_f64());
        counted.outcomes.inc();
        if let Some(first) = record.first_byte {
            let ttfb = counted.ttfb.get_or_init(|| {
                let model = model_text(record.model.as_ref());
                self.ttfb_seconds.get_or_create(&RouteLabels { model, route: record.route }).clone()
            });
            ttfb.observe(first.as_secs_f64());
        }
        if let Some(of_model) = &counted.of_model {
            of_model.tally.count_request(record);
            of_model.queue.observe(record.queued.as_secs_f64());
            if let Some(first) = record.first_token {
                self.record_tokens(of_model, first, record);
            }
            let add = |counter: &Counter, more: u64| {
                if more > 0 {
                    counter.inc_by(more);
                }
            };
            add(&of_model.retries, u64::from(record.retries));
            add(&of_model.continued, u64::from(record.continued));
            add(&of_model.prompt_tokens, record.work.prompt_tokens);
            add(&of_model.output_tokens, record.work.output_tokens);
            add(&of_model.images, record.work.images);
            add(&of_model.audio, record.work.audio);
        }
    }

    pub(super) fn tallies(&self) -> BTreeMap<String, Arc<RequestCounters>> {
        self.tallies.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records a stream's time to first token, and the time for each further token.
    fn record_tokens(&self, of_model: &ModelSeries, first: Duration, record: &RequestRecord) {
        let label = || ModelLabel { model: model_text(record.model.as_ref()) };
        let to_first =
            of_model.first_token.get_or_init(|| self.first_token_seconds.get_or_create(&label()).clone());
        to_first.observe(first.as_secs_f64());
        // A stream that broke off does not show the speed.
        let behind = record.work.output_tokens.saturating_sub(1);
        if behind > 0 && record.outcome == RequestOutcome::Ok {
            let each = of_model.token.get_or_init(|| self.token_seconds.get_or_create(&label()).clone());
            each.observe(record.total.saturating_sub(first).as_secs_f64() / as_f64(behind));
        }
    }

    /// Looks up the metrics for a combination of labels, which costs more than counting.
    fn look_up(&self, (model, route, status, outcome): &LabelTuple) -> RequestSeries {
        let text = model_text(model.as_ref());
        let route = *route;
        let status = *status;
        let outcome = *outcome;
        let label = ModelLabel { model: text.clone() };
        let labels = RouteLabels { model: text.clone(), route };
        let tally = || {
            let mut tallies = self.tallies.write().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(tallies.entry(text.clone()).or_default())
        };
        let of_model = model.as_ref().map(|_| ModelSeries {
            tally: tally(),
            queue: self.queue_seconds.get_or_create(&label).clone(),
            first_token: OnceLock::new(),
            token: OnceLock::new(),
            retries: self.retries.get_or_create(&label).clone(),
            continued: self.continued.get_or_create(&label).clone(),
            prompt_tokens: self.prompt_tokens.get_or_create(&label).clone(),
            output_tokens: self.output_tokens.get_or_create(&label).clone(),
            images: self.images.get_or_create(&label).clone(),
            audio: self.audio.get_or_create(&label).clone(),
        });
        RequestSeries {
            requests: self
                .requests
                .get_or_create(&RequestLabels { model: text.clone(), route, status })
                .clone(),
            outcomes: self.outcomes.get_or_create(&OutcomeLabels { model: text, outcome }).clone(),
            seconds: self.request_seconds.get_or_create(&labels).clone(),
            ttfb: OnceLock::new(),
            of_model,
        }
    }
}
