//! A snapshot of an instance for the screen, from `GET /status` or a recording ([`super::recording`]).
//! Pure. Every text has passed [`sanitize`], except names for routes.

use std::collections::BTreeMap;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use warden_policies::growth::{GrowthBlame, GrowthVerdict, SeriesGrowth, WorkUnit};
use warden_policies::lifecycle::BackendPhase;
use warden_policies::units::as_f64;
use warden_policies::{MemoryKind, WorkDone};
use warden_supervisor::{BackendView, DeviceView, EventKind, FleetEvent, ModelState, ModelView};

use super::look::{BAD, BUSY, GOOD, PLAIN, QUIET, WARN};
use super::rates::WorkRate;
use super::text::sanitize;
use crate::admin::answer::AdminStatus;
use crate::cli::status;
use crate::event_text::describe_event;
use crate::growth_text;
use ratatui_core::style::Color;

/// Snapshot of an instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct InstancePicture {
    /// PID and start of the instance; `None` for a recording.
    pub(super) instance: Option<(u32, Timestamp)>,
    /// Facts for the first line.
    pub(super) facts: Vec<String>,
    /// Memory of the machine.
    pub(super) gauges: Vec<MemoryGauge>,
    pub(super) rows: Vec<ModelRow>,
}

/// Bytes in use and in total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryShare {
    pub(super) used: u64,
    pub(super) total: u64,
}

impl MemoryShare {
    /// Fraction in use: 0 is empty, 1 full.
    pub(super) fn fraction(self) -> f64 {
        as_f64(self.used) / as_f64(self.total.max(1))
    }

    pub(super) fn tone(self) -> Color {
        match self.fraction() {
            fraction if fraction >= 0.95 => BAD,
            fraction if fraction >= 0.85 => WARN,
            _ => GOOD,
        }
    }
}

/// A memory of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MemoryGauge {
    /// `None` for host memory.
    pub(super) gpu: Option<u32>,
    pub(super) share: Option<MemoryShare>,
    /// Temperature, or a fault.
    pub(super) note: String,
    pub(super) faulty: bool,
}

/// Replica and generation of a process, and its work since its start.
pub(super) type ProcessWork = ((u32, Option<u64>), WorkDone);

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ModelRow {
    /// Name for routes, which may contain any character; `shown` is drawn.
    pub(super) name: String,
    pub(super) shown: String,
    pub(super) state: (&'static str, Color),
    /// Number of processes that take requests, and of all processes.
    pub(super) processes: (usize, usize),
    /// Number of running requests, and of slots if known.
    pub(super) busy: (u32, Option<u32>),
    pub(super) waiting: usize,
    /// Bytes of host memory of all processes.
    pub(super) host: Option<u64>,
    /// Memory of the process that is nearest to its host memory budget.
    pub(super) fill: Option<MemoryShare>,
    /// VRAM of all processes by GPU.
    pub(super) vram: BTreeMap<u32, u64>,
    /// Available from the second picture on.
    pub(super) rate: Option<WorkRate>,
    /// The worst verdict of all memories.
    pub(super) verdict: GrowthVerdict,
    /// Growth of the memory with the worst verdict, in bytes per request.
    pub(super) slope: Option<f64>,
    /// Growth in bytes per hour, at the request rate of the forecast.
    pub(super) hourly: Option<f64>,
    /// Seconds until the first limit is reached.
    pub(super) left: Option<f64>,
    /// Next action of the policy, and what delays it.
    pub(super) next: (String, Color),
    /// Lines of `llama-warden status` about the model.
    pub(super) words: Vec<String>,
    pub(super) work: Vec<ProcessWork>,
}

impl ModelRow {
    /// Sets the growth from the memory with the worst verdict; from the first one if several are equally bad.
    /// Each memory comes with a request rate.
    pub(super) fn set_growth<'a>(
        &mut self,
        all: impl Iterator<Item = (&'a SeriesGrowth, Option<f64>)>,
    ) -> Option<&'a SeriesGrowth> {
        let (worst, rate) =
            all.reduce(|worst, one| if one.0.verdict > worst.0.verdict { one } else { worst })?;
        self.verdict = worst.verdict;
        if worst.verdict < GrowthVerdict::Bounded {
            return None;
        }
        self.slope = worst.slope.map(|slope| slope.value);
        self.hourly = match worst.blame {
            Some(GrowthBlame::Pays { unit: WorkUnit::Hour, bytes_per_unit, .. }) => Some(bytes_per_unit),
            _ => self.slope.zip(rate).map(|(slope, rate)| slope * rate * 3600.0),
        };
        Some(worst)
    }
}

impl InstancePicture {
    pub(super) fn from_status(status: &AdminStatus) -> Self {
        let (instance, fleet) = (&status.instance, &status.fleet);
        let mut facts = vec![
            sanitize(&format!("llama-warden {}", instance.version)),
            sanitize(&format!("http://{}", instance.address)),
        ];
        facts.extend(instance.memory_anon.map(|bytes| format!("itself {}", super::text::short_bytes(bytes))));
        let host = fleet.host.map(|host| MemoryGauge {
            gpu: None,
            share: Some(MemoryShare { used: host.total.saturating_sub(host.available), total: host.total }),
            note: String::new(),
            faulty: false,
        });
        let models = fleet.models.iter().chain(&fleet.canaries);
        Self {
            instance: Some((instance.pid, instance.started_at.parse().unwrap_or_default())),
            facts,
            gauges: host.into_iter().chain(fleet.devices.iter().map(gauge)).collect(),
            rows: models.map(|model| row(status, model)).collect(),
        }
    }
}

fn gauge(device: &DeviceView) -> MemoryGauge {
    let share = device.used.zip(device.total).map(|(used, total)| MemoryShare { used, total });
    let mut notes = Vec::new();
    notes.extend(device.temperature.map(|degrees| format!("{degrees}°C")));
    notes.extend(device.xid.map(|xid| format!("Xid {xid}")));
    notes.extend(device.leak.clone());
    let faulty = device.xid.is_some() || device.leak.is_some();
    MemoryGauge { gpu: Some(device.gpu.0), share, note: sanitize(&notes.join(", ")), faulty }
}

fn row(status: &AdminStatus, model: &ModelView) -> ModelRow {
    // A process of this instance has a PID; a remote endpoint has none.
    let is_there = |one: &&BackendView| one.pid.is_some() || model.remote.is_some();
    let processes: Vec<&BackendView> = model.backends.iter().filter(is_there).collect();
    let slots = processes.iter().map(|one| one.slots).try_fold(0_u32, |sum, slots| Some(sum + slots?));
    let held: Vec<u64> = processes.iter().filter_map(|one| one.held(MemoryKind::Host)).collect();
    let mut vram = BTreeMap::new();
    for one in processes.iter().flat_map(|one| &one.memory.vram) {
        *vram.entry(one.gpu.0).or_insert(0_u64) += one.bytes;
    }
    let forecasts = processes.iter().flat_map(|one| &one.memory.forecasts);
    let left = forecasts.filter_map(|one| one.forecast.seconds).map(|seconds| seconds.value);
    let work = |one: &&BackendView| ((one.replica, one.generation.map(|generation| generation.0)), one.work);
    let mut row = ModelRow {
        name: model.name.as_str().to_owned(),
        shown: sanitize(model.name.as_str()),
        state: state(model, &processes),
        processes: (
            processes.iter().filter(|one| one.phase == BackendPhase::Ready).count(),
            processes.len().max(model.backends.len()),
        ),
        busy: (processes.iter().map(|one| one.in_flight).sum(), slots.filter(|_| !processes.is_empty())),
        waiting: model.waiting,
        host: (!held.is_empty()).then(|| held.iter().sum()),
        fill: processes
            .iter()
            .filter_map(|one| fill(one))
            .max_by(|a, b| a.fraction().total_cmp(&b.fraction())),
        vram,
        left: left.filter(|seconds| seconds.is_finite()).min_by(f64::total_cmp),
        next: next(model),
        words: status::model_words(status, model).iter().map(|line| sanitize(line)).collect(),
        work: processes.iter().map(work).collect(),
        ..ModelRow::default()
    };
    let growth = processes
        .iter()
        .flat_map(|one| one.memory.growth.iter().map(|growth| (growth, one.memory.request_rate)));
    row.set_growth(growth);
    row
}

fn fill(process: &BackendView) -> Option<MemoryShare> {
    let budget = process.memory.budgets.iter().find(|one| one.series == MemoryKind::Host)?.budget;
    Some(MemoryShare { used: process.held(MemoryKind::Host)?, total: budget.soft.or(budget.hard)? })
}

fn state(model: &ModelView, processes: &[&BackendView]) -> (&'static str, Color) {
    let tone = match model.state {
        ModelState::Loaded if processes.iter().any(|one| one.degraded.is_some()) => {
            return ("degraded", WARN);
        }
        ModelState::Loaded => GOOD,
        ModelState::Unloaded => QUIET,
        ModelState::Loading | ModelState::Draining => BUSY,
        ModelState::Backoff | ModelState::Failed => BAD,
    };
    (model.state.as_str(), tone)
}

/// The most important message for an operator.
fn next(model: &ModelView) -> (String, Color) {
    let note = status::model_note(model);
    let tone = match model.state {
        _ if note.is_empty() => QUIET,
        ModelState::Failed | ModelState::Backoff => BAD,
        _ => WARN,
    };
    let concise = model.last_failure.is_some() || note.starts_with("degraded");
    match model.policy.as_ref().and_then(growth_text::next_action).filter(|_| !concise) {
        // A reason to do nothing is not a warning.
        Some(planned) if note.is_empty() => (sanitize(&planned), PLAIN),
        Some(planned) => (sanitize(&planned), tone),
        None => (sanitize(&note), tone),
    }
}

/// A line in the list of events.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct EventLine {
    /// Time in the viewer's zone.
    pub(super) time: String,
    /// Time in seconds since 1970, or since the start of a recording's process.
    pub(super) at: f64,
    /// Name of the model for routes.
    pub(super) model: Option<String>,
    pub(super) text: String,
    pub(super) tone: Color,
    /// The event says that a memory began to look like a leak.
    pub(super) leaks: bool,
}

impl EventLine {
    pub(super) fn from_event(event: &FleetEvent, zone: &TimeZone) -> Self {
        let at: Timestamp = event.at.parse().unwrap_or_default();
        let generation = event.generation.map(|generation| format!("{generation} ")).unwrap_or_default();
        let leaks = matches!(&event.kind, EventKind::Verdict { growth, .. } if growth.verdict.grows());
        let tone = match &event.kind {
            EventKind::RecycleDone { entry } if entry.given_up => PLAIN,
            EventKind::RecycleDone { entry } if entry.failed.is_none() => GOOD,
            EventKind::RecycleDone { .. } | EventKind::Crashed { .. } | EventKind::Failed { .. } => BAD,
            EventKind::Reclaimed { .. } => GOOD,
            EventKind::Unloaded { .. } | EventKind::MakesRoom { .. } => QUIET,
            _ if leaks => WARN,
            _ => PLAIN,
        };
        Self {
            time: at.to_zoned(zone.clone()).strftime("%H:%M:%S").to_string(),
            at: at.duration_since(Timestamp::UNIX_EPOCH).as_secs_f64(),
            model: event.model.as_ref().map(|model| model.as_str().to_owned()),
            text: sanitize(&format!("{generation}{}", describe_event(&event.kind))),
            tone,
            leaks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_has_the_viewers_time_and_no_letter_that_a_terminal_obeys() {
        let line = r#"{"id":1,"at":"2026-01-02T02:00:30Z","model":"a\u001b[2J","generation":3,"kind":"endpoint_answers","url":"http://a\u001b]0;x\u0007"}"#;
        let event: FleetEvent = serde_json::from_str(line).unwrap();
        let shown = EventLine::from_event(&event, &TimeZone::fixed(jiff::tz::offset(2)));
        assert_eq!((shown.time.as_str(), shown.at), ("04:00:30", 1_767_319_230.0));
        assert_eq!(shown.text, "g3 the endpoint `http://a?]0;x?` answers");
        assert_eq!(shown.model.as_deref(), Some("a\u{1b}[2J"), "routes need it so");
    }
}
