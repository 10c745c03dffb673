//! Task of a canary: passes events of both builds to the trial, and acts on its verdict.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use warden_policies::canary::{ArmMemory, CanaryVerdict, TrialArm};
use warden_policies::growth::SeriesGrowth;
use warden_policies::lifecycle::BackendPhase;
use warden_policies::sample::HostMemory;

use super::FleetInner;
use super::canary::{CanaryStage, RunningCanary};
use crate::error::{BackendFailure, FailureKind};
use crate::sync::lock;
use crate::view::event::{EventKind, FleetEvent};
use crate::view::{FleetView, ModelState, ModelView};

const EVENT_GATHER_INTERVAL: Duration = Duration::from_millis(20);

impl FleetInner {
    /// Watches a canary until its end. Receives all events from the call on, not from the first poll.
    pub(super) fn watch_canary(
        self: Arc<Self>,
        running: Arc<RunningCanary>,
    ) -> impl Future<Output = ()> + Send + 'static {
        let mut events = self.context.records.journal.tail().receiver;
        let mut views = self.context.records.publisher.subscribe();
        let mut stage = running.stage.subscribe();
        async move {
            loop {
                let ended = async {
                    drop(stage.wait_for(|stage| matches!(stage, CanaryStage::Ended(_))).await);
                };
                let left = running.spec.numbers.time.saturating_sub(running.elapsed());
                let end = tokio::select! {
                    biased;
                    () = ended => return,
                    event = events.recv() => match event {
                        Ok(event) => record_event(&running, &event),
                        // The view shows missed events.
                        Err(RecvError::Lagged(_)) => None,
                        Err(RecvError::Closed) => return,
                    },
                    Ok(()) = views.changed() => record_view(&running, &views.borrow_and_update()),
                    () = running.recorded.notified() => {
                        tokio::time::sleep(EVENT_GATHER_INTERVAL).await;
                        None
                    }
                    () = tokio::time::sleep(left), if !left.is_zero() => None,
                };
                if let Some(verdict) = end.or_else(|| finished_verdict(&running)) {
                    self.end_canary(&running, verdict).await;
                }
            }
        }
    }
}

fn finished_verdict(running: &RunningCanary) -> Option<CanaryVerdict> {
    let runs = *running.stage.borrow() == CanaryStage::Runs;
    let (verdict, over) = lock(&running.trial).judge(running.elapsed());
    // A canary that was never ready is judged only at the end of its time: before that, an event reports a
    // failed start or short memory.
    let late = !runs && running.elapsed() >= running.spec.numbers.time;
    (over && runs || late).then_some(verdict)
}

/// Records an event. Returns a verdict if the event ends the canary at once.
fn record_event(running: &RunningCanary, event: &FleetEvent) -> Option<CanaryVerdict> {
    let model = event.model.as_ref()?;
    let arm = if *model == running.name {
        TrialArm::Canary
    } else if *model == running.model {
        TrialArm::Base
    } else {
        return None;
    };
    // An earlier canary of the model may still have processes.
    if arm == TrialArm::Canary && event.generation.is_some_and(|generation| generation <= running.after) {
        return None;
    }
    let runs = *running.stage.borrow() == CanaryStage::Runs;
    match (arm, &event.kind) {
        (TrialArm::Canary, EventKind::Starting { .. }) => running.advance_to(CanaryStage::Starts),
        (TrialArm::Canary, EventKind::Ready { .. }) => running.advance_to(CanaryStage::Runs),
        (
            TrialArm::Canary,
            EventKind::WaitsForRoom { message }
            | EventKind::LoadsAnew { message }
            | EventKind::FallsBack { message },
        ) => return Some(CanaryVerdict::undecided(format!("there is no room for it: {message}"))),
        (TrialArm::Canary, EventKind::MakesRoom { wanted }) => {
            return Some(CanaryVerdict::undecided(format!("there is no room for it: `{wanted}` needs it")));
        }
        (TrialArm::Canary, EventKind::Crashed { failure, .. }) if !runs => {
            return Some(start_verdict(failure, runs));
        }
        (TrialArm::Canary, EventKind::Failed { failure }) => return Some(start_verdict(failure, runs)),
        (arm, EventKind::Crashed { outside: false, .. }) => lock(&running.trial).record_death(arm),
        (arm, EventKind::Unwell { reason, .. }) => {
            lock(&running.trial).record_symptom(arm, reason.to_string());
        }
        _ => {}
    }
    None
}

/// `again`: an earlier process of the canary was ready.
fn start_verdict(failure: &BackendFailure, again: bool) -> CanaryVerdict {
    if again {
        CanaryVerdict::worse(format!("it does not start again: {}", failure.message))
    } else if failure.kind == FailureKind::OutOfMemory {
        CanaryVerdict::undecided(format!("there is no room for it: {}", failure.message))
    } else {
        CanaryVerdict::worse(format!("it does not start: {}", failure.message))
    }
}

/// Records memory and missed events of both builds. Returns a verdict if they end the canary at once.
fn record_view(running: &RunningCanary, view: &FleetView) -> Option<CanaryVerdict> {
    let base = view.models.iter().find(|model| model.name == running.model);
    let canary = view.canaries.iter().find(|model| model.name == running.name);
    let mut trial = lock(&running.trial);
    for (arm, model) in [(TrialArm::Base, base), (TrialArm::Canary, canary)] {
        if let Some(model) = model {
            trial.record_memory(arm, worst_memory(model));
        }
    }
    drop(trial);
    let canary = canary?;
    if canary.was_ready {
        running.advance_to(CanaryStage::Runs);
    } else if canary.backends.iter().any(|backend| backend.phase == BackendPhase::Starting) {
        running.advance_to(CanaryStage::Starts);
    }
    let failure = canary.last_failure.as_ref()?;
    (canary.state == ModelState::Failed).then(|| start_verdict(failure, canary.was_ready))
}

/// Worst state of each kind of memory in a model's processes.
fn worst_memory(model: &ModelView) -> ArmMemory {
    let mut growth: Vec<SeriesGrowth> = Vec::new();
    for one in model.backends.iter().flat_map(|backend| &backend.memory.growth) {
        match growth.iter_mut().find(|known| known.series == one.series) {
            Some(known) if known.verdict < one.verdict => *known = one.clone(),
            Some(_) => {}
            None => growth.push(one.clone()),
        }
    }
    let ready = model.backends.iter().filter_map(|backend| backend.host_at_ready);
    ArmMemory { growth, host_at_ready: ready.map(HostMemory::charged).max() }
}
