//! Logs and counts each request and each event.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use warden_admin::access_log::AccessLog;
use warden_admin::metrics::MetricsRegistry;
use warden_admin::otel::RequestTracer;
use warden_admin::state::AdminConfig;
use warden_config::advice::{self, AdvisedServers};
use warden_gateway::{GatewayObserver, RequestRecord};
use warden_patches::mitigation::LeakAdvice;
use warden_policies::growth::GrowthVerdict;
use warden_policies::{ModelName, secrets};
use warden_supervisor::{EventKind, Fleet, FleetEvent};

use crate::events_file::EventsFile;
use crate::logging;

pub(crate) struct RequestObserver {
    pub(crate) metrics: Arc<MetricsRegistry>,
    pub(crate) access: AccessLog,
    pub(crate) fleet: Fleet,
    /// Exports requests that are part of a trace.
    pub(crate) tracer: Option<RequestTracer>,
}

impl GatewayObserver for RequestObserver {
    fn request_done(&self, record: &RequestRecord) {
        self.metrics.request_done(record);
        self.access.write(record);
        if let Some(tracer) = &self.tracer {
            tracer.queue_spans(record);
        }
        if let (Some(model), Some(exchange)) = (&record.model, record.trial_exchange()) {
            self.fleet.note_exchange(model, &exchange);
        }
    }
}

/// Logs and counts events until `stop` is cancelled, and counts the reports of processes.
pub(crate) async fn log_events(
    fleet: Fleet,
    metrics: Arc<MetricsRegistry>,
    told: watch::Receiver<AdminConfig>,
    file: EventsFile,
    stop: CancellationToken,
) {
    let file = Arc::new(file);
    let tail = fleet.events();
    let mut receiver = tail.receiver;
    let mut views = fleet.subscribe();
    let mut advised = LoggedAdvice::default();
    let mut see = |event: &FleetEvent| {
        metrics.count_event(event);
        file.queue(event, fleet.state_writer());
        let advice = advice_for(event, &fleet, &told.borrow().servers);
        log_event(event, &advised.take_new(event, advice));
    };
    tail.events.iter().for_each(&mut see);
    loop {
        let next = tokio::select! {
            next = receiver.recv() => next,
            Ok(()) = views.changed() => {
                let view = Arc::clone(&views.borrow_and_update());
                metrics.count_reports(&view);
                continue;
            }
            // Still log the events that arrived before the stop.
            () = stop.cancelled() => match receiver.try_recv() {
                Ok(event) => Ok(event),
                Err(TryRecvError::Lagged(missed)) => Err(RecvError::Lagged(missed)),
                Err(TryRecvError::Empty | TryRecvError::Closed) => return,
            },
        };
        match next {
            Ok(event) => see(&event),
            Err(RecvError::Lagged(missed)) => {
                tracing::warn!(target: "event", missed, "events came faster than they could be counted; some are \
                                                         missing in the metrics");
            }
            Err(RecvError::Closed) => return,
        }
    }
}

/// The last advice by model, so that advice is logged only once; `status` always shows it.
#[derive(Default)]
struct LoggedAdvice(BTreeMap<ModelName, Vec<String>>);

impl LoggedAdvice {
    fn take_new(&mut self, event: &FleetEvent, advice: Vec<LeakAdvice>) -> Vec<LeakAdvice> {
        let Some(model) = &event.model else { return Vec::new() };
        let said = self.0.entry(model.clone()).or_default();
        let sentences: Vec<String> = advice.iter().map(LeakAdvice::sentence).collect();
        if sentences.iter().all(|sentence| said.contains(sentence)) {
            return Vec::new();
        }
        said.extend(sentences);
        advice
    }
}

/// Returns advice on a leak that an event reports. A mere suspicion leads to no advice in the log.
fn advice_for(event: &FleetEvent, fleet: &Fleet, servers: &AdvisedServers) -> Vec<LeakAdvice> {
    let (EventKind::Verdict { growth, .. }, Some(model)) = (&event.kind, &event.model) else {
        return Vec::new();
    };
    if growth.verdict < GrowthVerdict::Leaking {
        return Vec::new();
    }
    let view = fleet.view();
    let backends = view
        .models
        .iter()
        .chain(&view.canaries)
        .filter(|own| own.name == *model)
        .flat_map(|own| &own.backends);
    let same: Vec<_> = backends.filter(|backend| backend.generation == event.generation).collect();
    let work = same.first().map(|backend| backend.work).unwrap_or_default();
    // The event is newer than the view, so take its series from the event and the others from the view.
    let others =
        same.iter().flat_map(|backend| &backend.memory.growth).filter(|own| own.series != growth.series);
    advice::advise(servers.get(model.as_str()), work, others.chain([&**growth]))
}

fn log_event(event: &FleetEvent, advice: &[LeakAdvice]) {
    let model = event.model.as_ref().map(tracing::field::display);
    let generation = event.generation.map(|generation| generation.0);
    let text = secrets::redact_text(&event.kind.sentence());
    let loud = matches!(
        event.kind,
        EventKind::Suspect { refused: false, .. }
            | EventKind::Suspect { crash: Some(_), .. }
            | EventKind::CrashLoop { .. }
            | EventKind::Crashed { .. }
            | EventKind::Failed { .. }
            | EventKind::RecycleHeld { .. }
            | EventKind::PolicyOff { .. }
            | EventKind::Unwell { .. }
            | EventKind::SettingLost { .. }
            | EventKind::EndpointSilent { .. }
            | EventKind::VramUnknown { .. }
            | EventKind::DriverLeak { .. }
            | EventKind::PromptTooLarge { .. }
            | EventKind::RequestsSuspected { .. }
            | EventKind::RequestQuarantined { .. }
            | EventKind::QueueFull { .. }
    ) || matches!(&event.kind, EventKind::CanaryEnded { entry } if entry.canary.verdict.as_str() == "worse")
        || matches!(&event.kind, EventKind::Verdict { growth, .. } if growth.verdict.grows());
    if loud {
        tracing::warn!(target: "event", model, generation, "{text}");
    } else {
        tracing::info!(target: "event", model, generation, "{text}");
    }
    for one in advice {
        tracing::warn!(target: "event", model, generation, "looks like: {}", one.sentence());
    }
    // Log the last lines of the process only if the log filter hides the output of child processes.
    if let EventKind::Crashed { failure, .. } = &event.kind
        && !logging::shows_children()
    {
        for line in &failure.lines {
            tracing::warn!(target: "event", model, generation, "| {line}");
        }
    }
}

#[cfg(test)]
mod tests {
    use warden_policies::GenerationId;

    use super::*;

    fn advice(leak: &str) -> LeakAdvice {
        let (leak, title) = (leak.to_owned(), leak.to_owned());
        let (mitigations, others, references) = (Vec::new(), Vec::new(), Vec::new());
        LeakAdvice { leak, title, confidence: 0.9, mitigations, not_here: Vec::new(), others, references }
    }

    #[test]
    fn the_same_advice_is_said_once_for_each_model() {
        let event = |model: &str, generation| FleetEvent {
            id: 1,
            at: String::new(),
            model: Some(ModelName::new(model)),
            generation: Some(GenerationId(generation)),
            kind: EventKind::Suspect { refused: false, crash: None },
        };
        let mut advised = LoggedAdvice::default();
        assert_eq!(advised.take_new(&event("a", 1), vec![advice("x")]).len(), 1);
        assert_eq!(advised.take_new(&event("a", 2), vec![advice("x")]).len(), 0, "said");
        assert_eq!(advised.take_new(&event("b", 3), vec![advice("x")]).len(), 1, "another model");
        assert_eq!(
            advised.take_new(&event("a", 2), vec![advice("x"), advice("y")]).len(),
            2,
            "something new"
        );
        assert_eq!(advised.take_new(&event("a", 4), vec![advice("y")]).len(), 0);
    }
}
