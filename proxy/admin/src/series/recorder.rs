//! The task that records the fleet: a reading whenever a process's memory was read, a mark for each action or
//! event.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use warden_policies::lifecycle::BackendPhase;
use warden_policies::rollup::{RollupContext, RollupReading};
use warden_policies::{GenerationId, MemoryKind, ModelName};
use warden_supervisor::{BackendView, Fleet, FleetEvent, FleetView, ModelView, StateKind, StateWriter};

use super::key::SeriesKey;
use super::marks;
use super::store::{SeriesStore, unix_millis};

/// Records until `stop` is cancelled, then writes the rest within a time limit.
pub async fn record_fleet(store: SeriesStore, fleet: Fleet, stop: CancellationToken) {
    let policy = *store.policy();
    let mut views = fleet.subscribe();
    let mut tail = fleet.events();
    let mut seen = RecordedReadings::default();
    let mut told = 0;
    let mut mark = |events: &[FleetEvent]| {
        for event in events.iter().filter(|event| event.id > told) {
            for mark in marks::marks_from_event(event, unix_millis(), policy.mark_bytes) {
                store.add_mark(mark);
            }
        }
        told = events.last().map_or(told, |last| last.id.max(told));
    };
    mark(&tail.events);
    let mut flush = tokio::time::interval(policy.flush);
    flush.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let state = fleet.state_writer().clone();
    // Allow one write at a time, so that writes do not queue up while the disk hangs.
    let flushing = Arc::new(AtomicBool::new(false));
    // `look`: time of the next look at a changed view.
    let mut changed = true;
    let mut look = Instant::now();
    loop {
        tokio::select! {
            next = tail.receiver.recv() => match next {
                Ok(event) => mark(&[event]),
                // The fleet still has the missed events.
                Err(RecvError::Lagged(_)) => {
                    tail = fleet.events();
                    mark(&tail.events);
                }
                Err(RecvError::Closed) => break,
            },
            Ok(()) = views.changed(), if !changed => changed = true,
            () = tokio::time::sleep_until(look), if changed => {
                changed = false;
                look = Instant::now() + policy.look;
                let view = Arc::clone(&views.borrow_and_update());
                for (key, reading) in seen.take_new(&view, unix_millis()) {
                    store.add_reading(&key, &reading);
                }
            }
            _ = flush.tick() => {
                start_write(&store, &state, &flushing);
            }
            () = stop.cancelled() => break,
        }
    }
    for (key, reading) in seen.take_new(&fleet.view(), unix_millis()) {
        store.add_reading(&key, &reading);
    }
    mark(&fleet.events().events);
    store.close();
    start_write(&store, &state, &Arc::default());
    if !state.wait_written(policy.patience).await {
        tracing::warn!("the disk is too slow: the latest memory readings are not kept");
    }
}

/// Does nothing while an earlier write is running.
fn start_write(store: &SeriesStore, state: &StateWriter, flushing: &Arc<AtomicBool>) {
    if flushing.swap(true, Ordering::Relaxed) {
        return;
    }
    let store = store.clone();
    let done = Arc::clone(flushing);
    let given = state.write(StateKind::Series, 0, move || {
        // `flush` logs its failures, and keeps unwritten data.
        store.flush();
        done.store(false, Ordering::Relaxed);
        Ok(())
    });
    if !given {
        flushing.store(false, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct RecordedReadings(BTreeMap<(ModelName, u32), (Option<GenerationId>, u64)>);

impl RecordedReadings {
    fn take_new(&mut self, view: &FleetView, now: u64) -> Vec<(SeriesKey, RollupReading)> {
        let mut readings = Vec::new();
        let mut next = BTreeMap::new();
        for model in view.models.iter().chain(&view.canaries) {
            for backend in recorded_backends(model) {
                let place = (model.name.clone(), backend.replica);
                let this = (backend.generation, backend.memory.reading);
                if self.0.get(&place) != Some(&this) {
                    readings.extend(backend_readings(model, backend, now));
                }
                next.insert(place, this);
            }
        }
        self.0 = next;
        readings
    }
}

/// Returns the serving process of each replica. During a replacement this is the old process until the new
/// process is ready, so that the plot shows a single step.
fn recorded_backends(model: &ModelView) -> Vec<&BackendView> {
    let mut shown: BTreeMap<u32, &BackendView> = BTreeMap::new();
    for backend in model.backends.iter().filter(|backend| backend.memory.reading > 0) {
        let weight = |backend: &BackendView| (backend.phase == BackendPhase::Ready, backend.generation);
        let best = shown.entry(backend.replica).or_insert(backend);
        if weight(backend) > weight(best) {
            *best = backend;
        }
    }
    shown.into_values().collect()
}

fn backend_readings(model: &ModelView, backend: &BackendView, now: u64) -> Vec<(SeriesKey, RollupReading)> {
    let host = backend.host.map(|host| (MemoryKind::Host, host.charged()));
    let vram = backend.memory.vram.iter().map(|vram| (MemoryKind::Vram(vram.gpu), vram.bytes));
    let all = host.into_iter().chain(vram);
    all.map(|(memory, bytes)| {
        let key = SeriesKey { model: model.name.clone(), replica: backend.replica, memory };
        (key, RollupReading { at: now, bytes, lines: reading_lines(backend, memory) })
    })
    .collect()
}

/// Returns what the plot shows together with a reading.
fn reading_lines(backend: &BackendView, memory: MemoryKind) -> RollupContext {
    let growth = backend.memory.growth.iter().find(|growth| growth.series == memory);
    let budget =
        backend.memory.budgets.iter().find(|budget| budget.series == memory).map(|budget| budget.budget);
    // The settled size and the allowance exclude measured pools.
    let measured = match memory {
        MemoryKind::Host => {
            backend.memory.declared.iter().filter_map(|declared| declared.now).fold(0, u64::saturating_add)
        }
        MemoryKind::Vram(_) => 0,
    };
    let kept = growth.and_then(|growth| {
        let settled = growth.baseline?;
        let room = growth.fill.allowed.saturating_add(measured);
        (room > 0).then(|| (settled, settled.saturating_add(room)))
    });
    RollupContext {
        generation: backend.generation.map_or(0, |generation| generation.0),
        verdict: growth.map(|growth| growth.verdict).unwrap_or_default(),
        law: growth.and_then(|growth| growth.law),
        kept,
        soft: budget.and_then(|budget| budget.soft),
        hard: budget.and_then(|budget| budget.hard),
    }
}

#[cfg(test)]
mod tests {
    use warden_policies::growth::GrowthLine;
    use warden_policies::recycle::MemoryBudget;
    use warden_policies::sample::HostMemory;
    use warden_supervisor::BudgetView;

    use super::*;
    use crate::growth_fixture::{fleet, leaking};

    fn backend(generation: u64, phase: BackendPhase, reading: u64) -> BackendView {
        let mut backend = leaking();
        (backend.generation, backend.phase) = (Some(GenerationId(generation)), phase);
        backend.memory.reading = reading;
        backend.host = Some(HostMemory { anon: 1000 * generation + reading, swap: 0, rss: 0 });
        backend
    }

    #[test]
    fn each_reading_is_taken_once_with_what_is_drawn_beside_it() {
        let mut seen = RecordedReadings::default();
        let mut one = backend(3, BackendPhase::Ready, 1);
        one.memory.growth[0].law = Some(GrowthLine { level: 5, low: 4, high: 6 });
        one.memory.growth[0].baseline = Some(100);
        one.memory.growth[0].fill.allowed = 50;
        one.memory.budgets =
            vec![BudgetView { series: MemoryKind::Host, budget: MemoryBudget { soft: Some(7), hard: None } }];
        let found = seen.take_new(&fleet(vec![one.clone()]), 9);
        let kinds: Vec<String> = found.iter().map(|(key, _)| key.memory.to_string()).collect();
        assert_eq!(kinds, ["host", "vram0"]);
        let lines = found[0].1.lines;
        assert_eq!(
            (lines.generation, lines.kept, lines.soft, lines.hard),
            (3, Some((100, 150)), Some(7), None)
        );
        assert_eq!(lines.law.map(|law| law.level), Some(5));
        assert_eq!((found[0].1.at, found[0].1.bytes), (9, 3001));
        assert_eq!(seen.take_new(&fleet(vec![one.clone()]), 10), [], "something else has changed");
        one.memory.reading = 2;
        assert_eq!(seen.take_new(&fleet(vec![one]), 11).len(), 2);
    }

    #[test]
    fn a_replacement_is_one_step_from_the_old_process_to_the_new_one() {
        let mut seen = RecordedReadings::default();
        let mut at = |backends: Vec<BackendView>| -> Option<u64> {
            Some(seen.take_new(&fleet(backends), 9).first()?.1.lines.generation)
        };
        assert_eq!(at(vec![backend(1, BackendPhase::Ready, 1)]), Some(1));
        assert_eq!(
            at(vec![backend(1, BackendPhase::Ready, 2), backend(2, BackendPhase::Starting, 1)]),
            Some(1)
        );
        assert_eq!(
            at(vec![backend(1, BackendPhase::Draining, 3), backend(2, BackendPhase::Ready, 2)]),
            Some(2)
        );
        assert_eq!(at(vec![backend(1, BackendPhase::Draining, 4), backend(2, BackendPhase::Ready, 2)]), None);
        assert_eq!(at(vec![backend(2, BackendPhase::Suspect, 3)]), Some(2), "better than nothing");
        assert_eq!(at(vec![backend(3, BackendPhase::Starting, 0)]), None, "nothing was read of it");
    }
}
