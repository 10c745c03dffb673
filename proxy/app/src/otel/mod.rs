//! Traces of requests for an OpenTelemetry collector: OTLP over HTTP. Requests record trace data only if an
//! endpoint is configured.
//!
//! ```text
//!  record of a request ─ spans ─> bounded queue (full: counted and dropped) ─> one task ─ batches ─>
//!  collector
//! ```
//!
//! A slow or failing collector never delays a request: if the queue is full, the spans are dropped.

mod export;
mod proto;
mod send;
mod spans;

use std::sync::Arc;

use tokio::sync::mpsc::{self, error::TrySendError};
use warden_gateway::RequestRecord;

pub(crate) use self::export::SpanExporter;
use self::proto::OtlpSpan;
use crate::admin::metrics::{MetricsRegistry, SpanOutcome};
use crate::config::resolve::telemetry::TraceCollector;

/// Queues the spans of each request that is part of a trace.
#[derive(Clone)]
pub(crate) struct RequestTracer {
    queue: mpsc::Sender<Vec<OtlpSpan>>,
    metrics: Arc<MetricsRegistry>,
}

impl RequestTracer {
    pub(crate) fn new(collector: TraceCollector, metrics: Arc<MetricsRegistry>) -> (Self, SpanExporter) {
        metrics.initialize_spans();
        let (queue, waiting) = mpsc::channel(collector.numbers.queue.max(1));
        (Self { queue, metrics: metrics.clone() }, SpanExporter::new(collector, waiting, metrics))
    }

    pub(crate) fn queue_spans(&self, record: &RequestRecord) {
        let Some(trace) = record.trace.as_deref().filter(|trace| trace.context.is_sampled()) else { return };
        match self.queue.try_reserve() {
            Ok(place) => place.send(spans::request_spans(record, trace)),
            Err(full) => {
                let fate = match full {
                    TrySendError::Full(()) => SpanOutcome::QueueFull,
                    // The exporter has ended.
                    TrySendError::Closed(()) => SpanOutcome::Undelivered,
                };
                self.metrics.count_spans(fate, trace.parts.len() + 1);
            }
        }
    }
}
