//! The task that sends spans in batches, with retries, and drops them after a time limit.

use std::sync::Arc;

use bytes::Bytes;
use prost::Message;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;
use warden_config::resolve::telemetry::TraceCollector;

use super::proto::{ExportRequest, KeyValue, OtlpResource, OtlpScope, OtlpSpan, ResourceSpans, ScopeSpans};
use super::send::{SpanSendError, send_spans};
use crate::metrics::{MetricsRegistry, SpanOutcome};

/// Sends queued spans to the collector.
pub struct SpanExporter {
    collector: TraceCollector,
    waiting: mpsc::Receiver<Vec<OtlpSpan>>,
    metrics: Arc<MetricsRegistry>,
    resource: OtlpResource,
    batch: Vec<OtlpSpan>,
    under_way: usize,
    /// The collector requested that no spans are sent before this time.
    not_before: Option<Instant>,
    /// The last delivery failed, and the exporter has logged this.
    failing: bool,
}

impl SpanExporter {
    pub(super) fn new(
        collector: TraceCollector,
        waiting: mpsc::Receiver<Vec<OtlpSpan>>,
        metrics: Arc<MetricsRegistry>,
    ) -> Self {
        let own = [
            ("service.version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
            ("service.instance.id".to_owned(), format!("{:032x}", rand::random::<u128>())),
        ];
        let all = own.iter().chain(&collector.resource);
        let attributes = all.map(|(key, value)| KeyValue::new(key, value.as_str())).collect();
        Self {
            resource: OtlpResource { attributes },
            collector,
            waiting,
            metrics,
            batch: Vec::new(),
            under_way: 0,
            not_before: None,
            failing: false,
        }
    }

    /// Cancelling `stop` leaves the exporter a limited time to send the remaining spans.
    pub async fn run(mut self, stop: CancellationToken) {
        tracing::info!(collector = %self.collector.origin, "traces of requests are exported");
        let patience = self.collector.numbers.flush;
        let time_is_up = async {
            stop.cancelled().await;
            sleep(patience).await;
        };
        tokio::select! {
            biased;
            () = self.send_batches(&stop) => {}
            () = time_is_up => {}
        }
        self.count_lost();
    }

    async fn send_batches(&mut self, stop: &CancellationToken) {
        loop {
            let more = self.gather(stop).await;
            let batch = std::mem::take(&mut self.batch);
            if !batch.is_empty() {
                self.under_way = batch.len();
                self.deliver(batch, stop).await;
                self.under_way = 0;
            }
            if !more {
                return;
            }
        }
    }

    /// Also logs the number: the program may end before the counter is read again.
    fn count_lost(&mut self) {
        self.waiting.close();
        let mut lost = self.batch.len() + self.under_way;
        while let Ok(spans) = self.waiting.try_recv() {
            lost += spans.len();
        }
        if lost > 0 {
            self.metrics.count_spans(SpanOutcome::Undelivered, lost);
            tracing::warn!(collector = %self.collector.origin, lost, "the last spans could not be sent in time");
        }
    }

    /// Gathers a full batch, or the spans of one interval. Returns false if no more spans will arrive.
    async fn gather(&mut self, stop: &CancellationToken) -> bool {
        // The first span starts the interval.
        let mut until = None;
        while self.batch.len() < self.collector.numbers.batch {
            let next = async {
                match until {
                    Some(until) => timeout_at(until, self.waiting.recv()).await.ok(),
                    None => Some(self.waiting.recv().await),
                }
            };
            let next = tokio::select! {
                biased;
                next = next => next,
                () = stop.cancelled() => {
                    while self.batch.len() < self.collector.numbers.batch {
                        let Ok(spans) = self.waiting.try_recv() else { return false };
                        self.batch.extend(spans);
                    }
                    return true;
                }
            };
            match next {
                None => break,
                Some(None) => return false,
                Some(Some(spans)) => {
                    until.get_or_insert_with(|| Instant::now() + self.collector.numbers.interval);
                    self.batch.extend(spans);
                }
            }
        }
        true
    }

    fn encode(&self, spans: Vec<OtlpSpan>) -> Bytes {
        let scope =
            OtlpScope { name: "llama-warden".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() };
        let scope_spans = vec![ScopeSpans { scope: Some(scope), spans }];
        let resource_spans = vec![ResourceSpans { resource: Some(self.resource.clone()), scope_spans }];
        ExportRequest { resource_spans }.encode_to_vec().into()
    }

    async fn deliver(&mut self, spans: Vec<OtlpSpan>, stop: &CancellationToken) {
        let numbers = self.collector.numbers.clone();
        let count = spans.len();
        let body = self.encode(spans);
        let since = Instant::now();
        let mut pause = numbers.retry_pause;
        loop {
            if !self.wait_allowed(stop).await {
                // The exporter logged the failure with which the collector requested the wait.
                return self.metrics.count_spans(SpanOutcome::Undelivered, count);
            }
            let (why, fate) = match send_spans(&self.collector, body.clone()).await {
                Ok((rejected, why)) => return self.count_arrived(count, rejected, &why),
                Err(SpanSendError::Never(why)) => (why, SpanOutcome::Rejected),
                Err(SpanSendError::Later { why, after }) => {
                    // Jitter, so that several senders do not retry at the same moment.
                    let jittered = pause.mul_f64(0.5 + rand::random::<f64>());
                    // Wait at least the default pause: a requested wait of 0 s would make this an endless
                    // loop.
                    let own = jittered.min(numbers.retry_pause_cap);
                    let named = after.map(|after| after.min(numbers.retry_after_cap).max(own));
                    // The requested wait also applies to later spans, even if the exporter drops these spans.
                    self.not_before = named.map(|named| Instant::now() + named);
                    let wait = named.unwrap_or(own);
                    pause = (pause * 2).min(numbers.retry_pause_cap);
                    if !stop.is_cancelled() && since.elapsed() + wait <= numbers.retry_for {
                        self.log_failure(&why, "they are kept for a while, and sent again");
                        if named.is_none() {
                            tokio::select! {
                                () = sleep(wait) => {}
                                () = stop.cancelled() => {}
                            }
                        }
                        continue;
                    }
                    (why, SpanOutcome::Undelivered)
                }
            };
            self.metrics.count_spans(fate, count);
            return self.log_failure(&why, "they are dropped");
        }
    }

    /// Waits as long as the collector has requested. Returns false if `stop` is cancelled first.
    async fn wait_allowed(&mut self, stop: &CancellationToken) -> bool {
        let Some(at) = self.not_before else { return true };
        tokio::select! {
            biased;
            () = sleep_until(at) => {
                self.not_before = None;
                true
            }
            () = stop.cancelled() => false,
        }
    }

    fn count_arrived(&mut self, count: usize, rejected: u64, why: &str) {
        let rejected = usize::try_from(rejected).unwrap_or(usize::MAX).min(count);
        self.metrics.count_spans(SpanOutcome::Exported, count - rejected);
        self.metrics.count_spans(SpanOutcome::Rejected, rejected);
        if rejected > 0 {
            let why = warden_policies::secrets::redact_text(why);
            tracing::debug!(rejected, "the collector rejects spans: {why}");
        }
        if std::mem::replace(&mut self.failing, false) {
            tracing::info!(collector = %self.collector.origin, "the collector takes spans again");
        }
    }

    /// Logs only the first failure since the last delivery.
    fn log_failure(&mut self, why: &str, what: &str) {
        if !std::mem::replace(&mut self.failing, true) {
            tracing::warn!(
                collector = %self.collector.origin,
                "spans cannot be sent: {why}; {what} (`llama_warden_trace_spans_total` counts them)"
            );
        }
    }
}

#[cfg(test)]
#[path = "export_tests.rs"]
mod tests;
