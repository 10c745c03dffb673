//! Traces of requests, for a collector of OpenTelemetry: OTLP over HTTP. Off unless an endpoint is configured; then no request is
//! noted at all.
//!
//! ```text
//!  record of a request ─ spans ─> queue (bounded: who finds it full is counted and dropped) ─> one task ─ batches ─> collector
//! ```
//!
//! | file | job |
//! |---|---|
//! | `spans` | from a record to spans; pure |
//! | `proto` | how spans are spelled |
//! | `export` | the task: gathers, sends, tries again, gives up |
//! | `send` | one attempt to send |
//!
//! Nothing that a collector does or leaves reaches a request: the queue is asked for a place and never waited for.

mod export;
mod proto;
mod send;
mod spans;

use std::sync::Arc;

use tokio::sync::mpsc::{self, error::TrySendError};
use warden_gateway::Record;

pub(crate) use self::export::Exporter;
use self::proto::Span;
use crate::admin::metrics::Metrics;
use crate::config::resolve::telemetry::Collector;

/// What became of spans: the words in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The collector has them.
    Exported,
    /// Too many waited already.
    QueueFull,
    /// The collector could not be reached for too long.
    Undelivered,
    /// The collector does not take them.
    Rejected,
}

impl Fate {
    pub(crate) const ALL: [Self; 4] = [Self::Exported, Self::QueueFull, Self::Undelivered, Self::Rejected];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Exported => "exported",
            Self::QueueFull => "queue_full",
            Self::Undelivered => "undelivered",
            Self::Rejected => "rejected",
        }
    }
}

/// Takes the records of requests that are in a trace.
#[derive(Clone)]
pub(crate) struct Tracer {
    queue: mpsc::Sender<Vec<Span>>,
    metrics: Arc<Metrics>,
}

impl Tracer {
    /// A tracer, and what sends for it.
    pub(crate) fn new(collector: Collector, metrics: Arc<Metrics>) -> (Self, Exporter) {
        metrics.begin_spans();
        let (queue, waiting) = mpsc::channel(collector.numbers.queue.max(1));
        (Self { queue, metrics: metrics.clone() }, Exporter::new(collector, waiting, metrics))
    }

    /// A request has ended.
    pub(crate) fn tell(&self, record: &Record) {
        let Some(trace) = record.trace.as_deref().filter(|trace| trace.context.is_sampled()) else { return };
        match self.queue.try_reserve() {
            Ok(place) => place.send(spans::of(record, trace)),
            Err(full) => {
                let fate = match full {
                    TrySendError::Full(()) => Fate::QueueFull,
                    // Everything ends.
                    TrySendError::Closed(()) => Fate::Undelivered,
                };
                self.metrics.spans(fate, trace.parts.len() + 1);
            }
        }
    }
}
