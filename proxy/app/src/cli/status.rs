//! The table of `llama-warden status`, as text. Pure.

use std::time::Duration;

use warden_admin::growth_text;
use warden_admin::memory_use::ModelBudget;
use warden_admin::status::AdminStatus;
use warden_policies::sample::HostMemory;
use warden_policies::{ByteSize, RecycleAction};
use warden_supervisor::{BackendView, ModelOutage, ModelView};

use crate::out;

const STATUS_COLUMNS: [&str; 11] =
    ["MODEL", "STATE", "PID", "GEN", "IN-FLIGHT", "WAITING", "MEMORY", "REQUESTS", "REPLACED", "AGE", "NOTE"];

/// Cuts long notes in the table, and shows them in full below their rows.
pub(crate) fn status_table(status: &AdminStatus) -> String {
    let instance = &status.instance;
    let memory = instance.memory_anon.map(|bytes| format!(", {}", ByteSize(bytes))).unwrap_or_default();
    let mut text = format!(
        "llama-warden {} (pid {}{memory}) on http://{} since {}\n\n",
        instance.version, instance.pid, instance.address, instance.started_at
    );
    if let Some(log) = status.access_log.as_ref().filter(|log| log.lost > 0 || log.failing.is_some()) {
        let now =
            log.failing.as_ref().map_or_else(String::new, |why| format!(", and it cannot be written: {why}"));
        text.truncate(text.len() - 1);
        text.extend([format!("access log {}: {} lines are missing{now}\n\n", log.path.display(), log.lost)]);
    }
    if let Some(trouble) = status.state.problem() {
        text.truncate(text.len() - 1);
        text.extend([trouble.as_str(), "\n\n"]);
    }
    let mut rows = Vec::new();
    // Lines below the table's head and below each row.
    let mut under = vec![Vec::new()];
    for model in &status.fleet.models {
        let budget = status.budgets.get(model.name.as_str()).copied().unwrap_or_default();
        for (row, lines) in model_rows(model, budget) {
            rows.push(row);
            under.push(lines);
        }
        // No other line says that VRAM budgets have no effect without a visible GPU.
        let blind =
            (budget.vram_soft.is_some() || budget.vram_hard.is_some()) && status.fleet.devices.is_empty();
        if let Some(last) = under.last_mut().filter(|_| blind) {
            last.push("VRAM: no GPU is visible here, so the budgets on it are off".to_owned());
        }
        if let Some(last) = under.last_mut() {
            last.extend(model_lines(status, model));
        }
        let tried = model.canary.as_ref().map(|canary| &canary.name);
        let processes = status.fleet.canaries.iter().filter(|own| Some(&own.name) == tried);
        for (row, lines) in processes.flat_map(|own| model_rows(own, budget)) {
            rows.push(row);
            under.push(lines);
        }
    }
    for (row, lines) in out::table(STATUS_COLUMNS, rows).lines().zip(under) {
        text.extend([row, "\n"]);
        text.extend(lines.iter().map(|line| format!("  {line}\n")));
    }
    let devices = growth_text::device_lines(&status.fleet.devices);
    if !devices.is_empty() {
        text.push('\n');
        text.extend(devices.iter().map(|line| format!("{line}\n")));
    }
    text
}

/// Returns a line per process of the model, each followed by the lines about it.
pub(super) fn model_words(status: &AdminStatus, model: &ModelView) -> Vec<String> {
    let budget = status.budgets.get(model.name.as_str()).copied().unwrap_or_default();
    let mut words = Vec::new();
    for (row, lines) in model_rows(model, budget) {
        let facts =
            STATUS_COLUMNS.iter().zip(&row).skip(1).filter(|(_, fact)| !["", "-"].contains(&fact.as_str()));
        let facts: Vec<String> =
            facts.map(|(head, fact)| format!("{} {fact}", head.to_ascii_lowercase())).collect();
        words.push(facts.join(", "));
        words.extend(lines.iter().map(|line| format!("  {line}")));
    }
    words.extend(model_lines(status, model));
    words
}

fn model_lines(status: &AdminStatus, model: &ModelView) -> Vec<String> {
    let name = model.name.as_str();
    let mut lines = Vec::new();
    lines.extend(model.warm.as_ref().map(|warm| format!("last replacement: {warm}")));
    lines.extend(pin_line(model));
    let refused = model.quarantine.requests.iter().filter(|known| known.refused).count();
    if refused > 0 {
        lines.push(format!(
            "{refused} request(s) refused because the server died of them: `llama-warden quarantine list`"
        ));
    }
    let mitigations = status.mitigations.get(name);
    lines.extend(mitigations.map(|all| format!("mitigations: {}", all.join(", "))));
    let advice = status.advice.get(name).into_iter().flatten();
    lines.extend(advice.map(|one| format!("looks like: {}", one.text)));
    lines.extend(model.canary.as_deref().map(super::canary::summary_line));
    lines
}

fn pin_line(model: &ModelView) -> Option<String> {
    let who = model.pin.by.as_ref().map(|by| format!(" (by {by})")).unwrap_or_default();
    match (model.pin.pinned, who.is_empty()) {
        (true, _) => Some(format!("pinned: never unloaded for another model{who}")),
        (false, false) => Some(format!("it may be unloaded for another model{who}")),
        (false, true) => None,
    }
}

/// A row, and the lines below it.
type StatusRow = (Vec<String>, Vec<String>);

fn model_rows(model: &ModelView, budget: ModelBudget) -> Vec<StatusRow> {
    let with_process: Vec<&BackendView> =
        model.backends.iter().filter(|backend| backend.pid.is_some()).collect();
    let whole = model_note(model);
    let short = shorten_note(&whole, MAX_NOTE_CHARS);
    let cut = short != whole;
    if with_process.is_empty() {
        let mut lines: Vec<String> = cut.then_some(whole).into_iter().collect();
        lines.extend(model.outage.as_ref().map(outage_line));
        lines.extend(
            model.remote.as_ref().map(|remote| format!("served by {} as `{}`", remote.url, remote.model)),
        );
        lines.extend(model.replace_note.clone().filter(|_| model.remote.is_some()));
        let endpoint = model.backends.first().filter(|_| model.remote.is_some());
        return vec![(status_row(model, budget, endpoint, Some(&short)), lines)];
    }
    with_process
        .iter()
        .enumerate()
        .map(|(index, backend)| {
            let mut lines = growth_text::process_lines(backend);
            // Add the whole note below the row, unless another line contains it.
            if cut && index == 0 && !lines.iter().any(|line| line.contains(&whole)) {
                lines.insert(0, whole.clone());
            }
            lines.extend(growth_text::no_reclaim_note(backend, budget != ModelBudget::default()));
            lines.extend(backend.report.as_ref().map(growth_text::context_lines).unwrap_or_default());
            (status_row(model, budget, Some(backend), (index == 0).then_some(short.as_str())), lines)
        })
        .collect()
}

/// `note` is given only for the first row of a model.
fn status_row(
    model: &ModelView,
    budget: ModelBudget,
    backend: Option<&BackendView>,
    note: Option<&str>,
) -> Vec<String> {
    let dash = || "-".to_owned();
    let of = |value: Option<String>| value.unwrap_or_else(dash);
    let restarts: u64 = model.recycles.iter().map(|(_, count)| count).sum();
    let limit = budget.soft.or(budget.hard).map(|limit| format!(" of {limit}")).unwrap_or_default();
    let memory = |host: HostMemory| format!("{}{limit}", ByteSize(host.charged()));
    let once = |text: String| if note.is_some() { text } else { String::new() };
    let state = match backend {
        Some(backend) if model.backends.len() > 1 => backend.phase.as_str().to_owned(),
        _ => model.state.as_str().to_owned(),
    };
    vec![
        once(model.name.to_string()),
        state,
        of(backend.and_then(|backend| backend.pid).map(|pid| pid.to_string())),
        of(backend.and_then(|backend| backend.generation).map(|generation| generation.to_string())),
        of(backend.map(|backend| match backend.slots {
            Some(slots) => format!("{}/{slots}", backend.in_flight),
            None => backend.in_flight.to_string(),
        })),
        once(format!("{}/{}", model.waiting, model.queue_depth)),
        of(backend.and_then(|backend| backend.host).map(memory)),
        of(backend.map(|backend| backend.work.requests.to_string())),
        once(if model.crashes == 0 {
            restarts.to_string()
        } else {
            format!("{restarts} (+{} crashes)", model.crashes)
        }),
        of(backend.and_then(|backend| backend.ready_since).map(|since| short_age(since.elapsed()))),
        note.unwrap_or_default().to_owned(),
    ]
}

const MAX_NOTE_CHARS: usize = 60;

fn shorten_note(text: &str, letters: usize) -> String {
    if text.chars().count() <= letters {
        return text.to_owned();
    }
    let kept: String = text.chars().take(letters).collect();
    let words = kept.rsplit_once(' ').map_or(kept.as_str(), |(words, _)| words);
    format!("{}…", words.trim_end_matches([',', ';', ':', '.']))
}

pub(super) fn model_note(model: &ModelView) -> String {
    if let Some(failure) = &model.last_failure {
        return failure.message.clone();
    }
    if let Some(lost) = model.backends.iter().find_map(|backend| backend.degraded.as_ref()) {
        return format!("degraded: {lost}");
    }
    let Some(policy) = &model.policy else { return String::new() };
    if let Some(held) = &policy.held {
        return held.to_string();
    }
    match (policy.decision.action, policy.decision.reason) {
        (RecycleAction::Observe, _) | (_, None) => String::new(),
        (RecycleAction::RecycleWhenQuiet, Some(reason)) => format!("will be replaced when quiet: {reason}"),
        (_, Some(reason)) => format!("is replaced: {reason}"),
    }
}

fn outage_line(outage: &ModelOutage) -> String {
    let at = i64::try_from(outage.next_start_unix_ms)
        .ok()
        .and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
    let at = at.map_or_else(|| "soon".to_owned(), |at| format!("at {}", at.strftime("%H:%M:%S UTC")));
    let sooner = if outage.watching { ", or when a file that it needs changes" } else { "" };
    let callers = if outage.refusing { "requests are refused" } else { "requests wait" };
    format!("next start {at}{sooner}; until then {callers}; {}", outage.cure)
}

/// Uses the two largest units: `45s`, `2m05s`, `3h07m`, `5d02h`.
pub(super) fn short_age(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::sync::Arc;
    use warden_admin::status::{AdviceView, InstanceInfo};
    use warden_policies::lifecycle::BackendPhase;
    use warden_policies::reclaim::{ReclaimOutcome, ReclaimParts, ReclaimedBytes};
    use warden_policies::{GenerationId, MemoryLimit, ModelName, Reason, WorkDone};
    use warden_sensors::CudaReport;
    use warden_sensors::report::{ContextCounts, ContextReport, FixSettings};
    use warden_supervisor::{BackendFailure, FailureKind, FleetView, ModelState, ReadySince, ReclaimEntry};

    fn model(name: &str, state: ModelState, backends: Vec<BackendView>) -> ModelView {
        ModelView {
            state,
            waiting: 1,
            queue_depth: 9,
            backends,
            recycles: vec![(Reason::HostSoft, 2), (Reason::Operator, 1)],
            was_ready: true,
            ..ModelView::unloaded(ModelName::new(name))
        }
    }

    fn reported() -> CudaReport {
        let counts = ContextCounts { graphs_live: 3, ..ContextCounts::default() };
        CudaReport {
            pid: 4000,
            started_unix_ms: 1,
            active: std::collections::BTreeSet::new(),
            settings: FixSettings::default(),
            contexts: vec![ContextReport { context: 0, device: 0, live: true, counts, updated_unix_ms: 1 }],
        }
    }

    #[test]
    fn the_table_has_a_row_per_process_and_one_for_a_model_without() {
        let backend = |generation: u64, phase: BackendPhase| BackendView {
            degraded: None,
            replica: 0,
            generation: Some(GenerationId(generation)),
            phase,
            pid: Some(4000),
            program: None,
            ready_since: Some(ReadySince::from_age(Duration::from_secs(3700))),
            in_flight: 2,
            slots: Some(4),
            host: Some(HostMemory { anon: 3 << 30, swap: 0, rss: 0 }),
            host_at_ready: None,
            work: WorkDone { requests: 12, ..WorkDone::default() },
            report: None,
            memory: warden_supervisor::MemoryView::default(),
            health: warden_supervisor::HealthView::default(),
            reclaim: warden_supervisor::ReclaimView::default(),
            next: None,
        };
        let mut failed = model("b", ModelState::Failed, Vec::new());
        failed.crashes = 5;
        failed.last_failure = Some(BackendFailure {
            kind: FailureKind::BadModel,
            message: "no such file".into(),
            lines: Vec::new(),
            failures: 5,
        });
        let mut two = vec![backend(7, BackendPhase::Draining), backend(8, BackendPhase::Ready)];
        two[0].report = Some(reported());
        two[0].reclaim = warden_supervisor::ReclaimView {
            parts: Some(ReclaimParts::default()),
            wanted: true,
            ..warden_supervisor::ReclaimView::default()
        };
        let mut last = ReclaimEntry::new(ModelName::new("a"), 0, GenerationId(8), Reason::HostSoft);
        last.at = "2026-01-01T00:10:00Z".into();
        last.outcome = ReclaimOutcome::Partly;
        (last.heap, last.cuda) = (Some(ReclaimOutcome::TooSoon), Some(ReclaimOutcome::Done));
        last.given =
            ReclaimedBytes { graphs_host: 1 << 30, graphs_device: 300 << 20, ..ReclaimedBytes::default() };
        last.ms = 31;
        last.host_before = Some(HostMemory { anon: 4 << 30, swap: 0, rss: 0 });
        last.host_after = Some(HostMemory { anon: 3 << 30, swap: 0, rss: 0 });
        two[1].reclaim = warden_supervisor::ReclaimView {
            parts: Some(ReclaimParts { heap: true, cuda: true }),
            wanted: true,
            asking: true,
            count: 3,
            last: Some(last),
        };
        let mut once = two[1].clone();
        once.reclaim.count = 1;
        assert!(
            growth_text::process_lines(&once)
                .iter()
                .any(|line| line.contains("; requested once, at 2026-01"))
        );
        failed.outage = Some(ModelOutage {
            refusing: true,
            next_start_unix_ms: 1_800_000_000_000,
            watching: true,
            cure: "mend what the message names".into(),
        });
        let status = AdminStatus {
            bound: Vec::new(),
            instance: InstanceInfo {
                pid: 1,
                version: "0.1.0".into(),
                address: "127.0.0.1:8080".into(),
                started_at: "2026-01-01T00:00:00Z".into(),
                memory_anon: Some(5 << 20),
                ..InstanceInfo::default()
            },
            budgets: BTreeMap::from([(
                "a".into(),
                ModelBudget {
                    soft: Some(MemoryLimit::Bytes(ByteSize(4 << 30))),
                    hard: Some(MemoryLimit::Bytes(ByteSize(5 << 30))),
                    vram_hard: Some(MemoryLimit::Percent(90.0)),
                    ..ModelBudget::default()
                },
            )]),
            advice: BTreeMap::from([(
                "b".into(),
                vec![AdviceView {
                    leak: "x".into(),
                    confidence: 0.5,
                    mitigations: Vec::new(),
                    text: "a leak (`x`, possible)".into(),
                }],
            )]),
            mitigations: BTreeMap::from([(
                "a".into(),
                vec!["graph-cache-cap=16".into(), "count-turns=32 (your set mine)".into()],
            )]),
            binaries: None,
            access_log: Some(warden_admin::access_log::AccessLogView {
                path: "/var/log/a.log".into(),
                lost: 336,
                failing: Some("No space left on device".into()),
            }),
            state: warden_supervisor::StateView {
                waiting: 12,
                lost: [("events".to_owned(), 3)].into(),
                failing: BTreeMap::new(),
                silent_seconds: Some(61.5),
            },
            fleet: FleetView {
                number: 1,
                models: vec![Arc::new(model("a", ModelState::Loaded, two)), Arc::new(failed)],
                ..FleetView::default()
            },
        };
        let text = status_table(&status);
        insta::assert_snapshot!(text);
    }

    #[test]
    fn a_long_note_is_said_once_in_full_under_the_row() {
        let sentence =
            "the last 3 replacements did not bring memory down, so replacing by policy is off: raise it";
        assert_eq!(
            shorten_note(sentence, MAX_NOTE_CHARS),
            "the last 3 replacements did not bring memory down, so…"
        );
        assert_eq!(shorten_note("no such file", MAX_NOTE_CHARS), "no such file");
        let mut failed = model("b", ModelState::Failed, Vec::new());
        failed.last_failure = Some(BackendFailure {
            kind: FailureKind::Exit,
            message: sentence.into(),
            lines: Vec::new(),
            failures: 1,
        });
        let [(row, lines)] = model_rows(&failed, ModelBudget::default()).try_into().unwrap();
        assert_eq!(
            row.last().map(String::as_str),
            Some("the last 3 replacements did not bring memory down, so…")
        );
        assert_eq!(lines, [sentence]);
    }

    #[test]
    fn ages_are_short() {
        let texts = [5, 65, 3700, 90_000].map(|seconds| short_age(Duration::from_secs(seconds)));
        assert_eq!(texts, ["5s", "1m05s", "1h01m", "1d01h"]);
    }
}
