//! A snapshot of an instance for the screen, from `GET /status`. [`sanitize`] has cleaned every text except
//! the names for routes. Pure.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use ratatui_core::style::Color;
use warden_admin::growth_text;
use warden_admin::status::AdminStatus;
use warden_policies::growth::{GrowthBlame, GrowthVerdict, SeriesGrowth, WorkUnit};
use warden_policies::lifecycle::BackendPhase;
use warden_policies::units::as_f64;
use warden_policies::{MemoryKind, WorkDone};
use warden_supervisor::{BackendView, DeviceView, EventKind, FleetEvent, ModelState, ModelView};

use super::look::{BAD, BUSY, GOOD, PLAIN, QUIET, WARN, sanitize};
use crate::cli::status;

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct InstancePicture {
    /// PID and start of the instance.
    pub(super) instance: Option<(u32, Timestamp)>,
    pub(super) facts: Vec<String>,
    pub(super) gauges: Vec<MemoryGauge>,
    pub(super) rows: Vec<ModelRow>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryShare {
    pub(super) used: u64,
    pub(super) total: u64,
}

impl MemoryShare {
    /// Returns 0 for empty, 1 for full.
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

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MemoryGauge {
    /// `None` for host memory.
    pub(super) gpu: Option<u32>,
    pub(super) share: Option<MemoryShare>,
    /// The GPU's temperature, fault and leak, separated by commas; empty for host memory.
    pub(super) note: String,
    pub(super) faulty: bool,
}

/// Replica, generation and work of a process since its start.
pub(super) type ProcessWork = ((u32, Option<u64>), WorkDone);

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ModelRow {
    /// Used in routes and not sanitized; the screen draws `shown`.
    pub(super) name: String,
    pub(super) shown: String,
    pub(super) state: (&'static str, Color),
    pub(super) load: RowLoad,
    /// Host memory of all processes, in bytes.
    pub(super) host: Option<u64>,
    /// Memory of the process nearest to its budget.
    pub(super) fill: Option<MemoryShare>,
    /// VRAM of all processes, in bytes by GPU.
    pub(super) vram: BTreeMap<u32, u64>,
    pub(super) growth: RowGrowth,
    /// The policy's next action, and the reason for a delay.
    pub(super) next: (String, Color),
    /// Lines of `llama-warden status` about the model.
    pub(super) words: Vec<String>,
    pub(super) work: Vec<ProcessWork>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RowLoad {
    /// Number of processes that take requests, and of all processes.
    pub(super) processes: (usize, usize),
    /// Number of running requests, and of slots if known.
    pub(super) busy: (u32, Option<u32>),
    pub(super) waiting: usize,
    /// `None` in the first picture.
    pub(super) rate: Option<WorkRate>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RowGrowth {
    pub(super) verdict: GrowthVerdict,
    /// Growth of the memory with the worst verdict, in bytes per request.
    pub(super) slope: Option<f64>,
    /// Growth in bytes per hour, at the request rate of the forecast.
    pub(super) hourly: Option<f64>,
    /// Seconds until the first limit is reached.
    pub(super) left: Option<f64>,
}

impl RowGrowth {
    /// Takes the worst verdict of all memories. The second value of each item is a request rate.
    fn take_worst<'a>(&mut self, all: impl Iterator<Item = (&'a SeriesGrowth, Option<f64>)>) {
        let worst = all.reduce(|worst, one| if one.0.verdict > worst.0.verdict { one } else { worst });
        let Some((worst, rate)) = worst else { return };
        self.verdict = worst.verdict;
        if worst.verdict < GrowthVerdict::Bounded {
            return;
        }
        self.slope = worst.slope.map(|slope| slope.value);
        self.hourly = match worst.blame {
            Some(GrowthBlame::Pays { unit: WorkUnit::Hour, bytes_per_unit, .. }) => Some(bytes_per_unit),
            _ => self.slope.zip(rate).map(|(slope, rate)| slope * rate * 3600.0),
        };
    }
}

impl InstancePicture {
    pub(super) fn from_status(status: &AdminStatus) -> Self {
        let instance = &status.instance;
        let fleet = &status.fleet;
        let mut facts = vec![
            sanitize(&format!("llama-warden {}", instance.version)),
            sanitize(&format!("http://{}", instance.address)),
        ];
        facts.extend(instance.memory_anon.map(|bytes| format!("itself {}", super::look::short_bytes(bytes))));
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
    // A remote endpoint has no PID.
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
    let all = processes
        .iter()
        .flat_map(|one| one.memory.growth.iter().map(|growth| (growth, one.memory.request_rate)));
    let left = left.filter(|seconds| seconds.is_finite()).min_by(f64::total_cmp);
    let mut growth = RowGrowth { left, ..RowGrowth::default() };
    growth.take_worst(all);
    ModelRow {
        name: model.name.as_str().to_owned(),
        shown: sanitize(model.name.as_str()),
        state: state(model, &processes),
        load: RowLoad {
            processes: (
                processes.iter().filter(|one| one.phase == BackendPhase::Ready).count(),
                processes.len().max(model.backends.len()),
            ),
            busy: (processes.iter().map(|one| one.in_flight).sum(), slots.filter(|_| !processes.is_empty())),
            waiting: model.waiting,
            rate: None,
        },
        host: (!held.is_empty()).then(|| held.iter().sum()),
        fill: processes
            .iter()
            .filter_map(|one| fill(one))
            .max_by(|a, b| a.fraction().total_cmp(&b.fraction())),
        vram,
        growth,
        next: next(model),
        words: status::model_words(status, model).iter().map(|line| sanitize(line)).collect(),
        work: processes.iter().map(work).collect(),
    }
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

fn next(model: &ModelView) -> (String, Color) {
    let note = status::model_note(model);
    let tone = match model.state {
        _ if note.is_empty() => QUIET,
        ModelState::Failed | ModelState::Backoff => BAD,
        _ => WARN,
    };
    let concise = model.last_failure.is_some() || note.starts_with("degraded");
    match model.policy.as_ref().and_then(growth_text::next_action).filter(|_| !concise) {
        // The reason for doing nothing is no warning.
        Some(planned) if note.is_empty() => (sanitize(&planned), PLAIN),
        Some(planned) => (sanitize(&planned), tone),
        None => (sanitize(&note), tone),
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct EventLine {
    /// Time of day in the operator's time zone.
    pub(super) time: String,
    /// Seconds since 1970.
    pub(super) at: f64,
    /// Used in routes and not sanitized.
    pub(super) model: Option<String>,
    pub(super) text: String,
    pub(super) tone: Color,
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
            text: sanitize(&format!("{generation}{}", event.kind.sentence())),
            tone,
        }
    }
}

/// In a shorter averaging window, the rates would jump with each request.
const RATE_WINDOW: Duration = Duration::from_secs(5);
const MAX_KEPT_SUMS: usize = 64;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct WorkRate {
    /// Ended requests per second.
    pub(super) requests: f64,
    /// Generated tokens of ended requests, per second.
    pub(super) tokens: f64,
}

impl WorkRate {
    fn from_work(work: WorkDone, time: Duration) -> Option<Self> {
        let each = |count: u64| as_f64(count) / time.as_secs_f64();
        (!time.is_zero()).then(|| Self { requests: each(work.requests), tokens: each(work.output_tokens) })
    }
}

#[derive(Debug, Default)]
pub(super) struct RateCounters(HashMap<String, WorkCounter>);

#[derive(Debug, Default)]
struct WorkCounter {
    last: Vec<ProcessWork>,
    sum: WorkDone,
    /// Earlier sums with their times, oldest first.
    kept: VecDeque<(Duration, WorkDone)>,
}

impl RateCounters {
    /// Sets the rates of the rows, from the second picture on. Forgets models that are not in the picture.
    pub(super) fn update_rates(&mut self, at: Duration, rows: &mut [ModelRow]) {
        let mut before = std::mem::take(&mut self.0);
        for row in rows {
            let first = || WorkCounter { last: row.work.clone(), ..WorkCounter::default() };
            let mut counter = before.remove(&row.name).unwrap_or_else(first);
            for (process, work) in &row.work {
                let earlier = counter.last.iter().find(|(own, _)| own == process);
                counter.sum += *work - earlier.map(|(_, work)| *work).unwrap_or_default();
            }
            counter.last.clone_from(&row.work);
            counter.kept.push_back((at, counter.sum));
            while counter.kept.len() > 2
                && (counter.kept.len() > MAX_KEPT_SUMS || counter.kept[1].0 + RATE_WINDOW <= at)
            {
                counter.kept.pop_front();
            }
            let (then, earlier) = counter.kept[0];
            row.load.rate = WorkRate::from_work(counter.sum - earlier, at.saturating_sub(then));
            self.0.insert(row.name.clone(), counter);
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

    /// Generation, requests and tokens of a process.
    type WorkCounts = (u64, u64, u64);

    fn row(work: &[WorkCounts]) -> ModelRow {
        let done = |&(generation, requests, output_tokens): &WorkCounts| {
            ((0, Some(generation)), WorkDone { requests, output_tokens, ..WorkDone::default() })
        };
        ModelRow { name: "m".to_owned(), work: work.iter().map(done).collect(), ..ModelRow::default() }
    }

    fn rate(pictures: &[(u64, &[WorkCounts])]) -> Option<WorkRate> {
        let mut counters = RateCounters::default();
        let rates = pictures.iter().map(|(second, work)| {
            let mut rows = [row(work)];
            counters.update_rates(Duration::from_secs(*second), &mut rows);
            rows[0].load.rate
        });
        rates.last().flatten()
    }

    #[test]
    fn a_rate_is_what_was_done_between_pictures_by_any_process() {
        assert_eq!(rate(&[(0, &[(1, 100, 900)])]), None, "one picture says nothing");
        let two = rate(&[(0, &[(1, 100, 900)]), (2, &[(1, 104, 920)])]);
        assert_eq!(two, Some(WorkRate { requests: 2.0, tokens: 10.0 }));
        // The next process starts at 0, so all its work is new.
        let next = rate(&[(0, &[(1, 100, 900)]), (1, &[(1, 101, 910), (2, 1, 5)]), (2, &[(2, 3, 9)])]);
        assert_eq!(next, Some(WorkRate { requests: 2.0, tokens: 9.5 }));
    }

    #[test]
    fn only_the_last_seconds_count_and_counters_that_fall_do_no_harm() {
        let pictures: Vec<(u64, [WorkCounts; 1])> =
            (0..100).map(|second| (second, [(1, second * 3, 0)])).collect();
        let pictures: Vec<(u64, &[WorkCounts])> =
            pictures.iter().map(|(second, work)| (*second, work.as_slice())).collect();
        assert_eq!(rate(&pictures), Some(WorkRate { requests: 3.0, tokens: 0.0 }));
        let fallen = rate(&[(0, &[(1, 100, 0)]), (20, &[(1, 7, 0)]), (40, &[(1, 27, 0)])]);
        assert_eq!(fallen, Some(WorkRate { requests: 1.0, tokens: 0.0 }));
    }

    #[test]
    fn a_model_that_is_gone_is_forgotten() {
        let mut counters = RateCounters::default();
        counters.update_rates(Duration::ZERO, &mut [row(&[(1, 1, 1)])]);
        counters.update_rates(Duration::from_secs(1), &mut []);
        assert!(counters.0.is_empty());
    }
}
