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
use warden_config::resolve::telemetry::TraceCollector;
use warden_gateway::RequestRecord;

pub use self::export::SpanExporter;
use self::proto::OtlpSpan;
use crate::metrics::{MetricsRegistry, SpanOutcome};

/// Queues the spans of each request that is part of a trace.
#[derive(Clone)]
pub struct RequestTracer {
    queue: mpsc::Sender<Vec<OtlpSpan>>,
    metrics: Arc<MetricsRegistry>,
}

impl RequestTracer {
    /// Creates the queue of spans, and the exporter that reads it.
    pub fn new(collector: TraceCollector, metrics: Arc<MetricsRegistry>) -> (Self, SpanExporter) {
        metrics.initialize_spans();
        let (queue, waiting) = mpsc::channel(collector.numbers.queue.max(1));
        (Self { queue, metrics: metrics.clone() }, SpanExporter::new(collector, waiting, metrics))
    }

    /// Queues the spans of a request that has ended, if its trace is sampled.
    pub fn queue_spans(&self, record: &RequestRecord) {
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
