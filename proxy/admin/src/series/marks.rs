//! Marks: a model's actions and events with their times, drawn with its memory. Pure.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use warden_policies::rollup::SeriesPolicy;
use warden_policies::{ByteSize, GenerationId, MemoryKind, ModelName, secrets};
use warden_supervisor::{EventKind, FleetEvent, LedgerEntry};

/// Kind of a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", from = "String")]
pub enum SeriesMarkKind {
    /// Another process took over.
    Replaced,
    /// A replacement failed.
    Failed,
    /// llama-warden asked the process to release memory.
    Reclaimed,
    /// No requests arrived, or another model needed the memory.
    Unloaded,
    /// The process exited unplanned, or cannot be started.
    Crashed,
    /// A canary began or ended.
    Canary,
    /// A changed configuration was applied, or an operator pinned or unpinned the model.
    Configured,
    /// Something else that deserves attention.
    Warned,
}

impl SeriesMarkKind {
    pub(crate) const ALL: [Self; 8] = [
        Self::Replaced,
        Self::Failed,
        Self::Reclaimed,
        Self::Unloaded,
        Self::Crashed,
        Self::Canary,
        Self::Configured,
        Self::Warned,
    ];

    /// Returns the name for JSON and for people.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Replaced => "replaced",
            Self::Failed => "failed",
            Self::Reclaimed => "reclaimed",
            Self::Unloaded => "unloaded",
            Self::Crashed => "crashed",
            Self::Canary => "canary",
            Self::Configured => "configured",
            Self::Warned => "warned",
        }
    }
}

impl From<String> for SeriesMarkKind {
    /// An unknown name comes from a later version and counts as a warning.
    fn from(name: String) -> Self {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name).unwrap_or(Self::Warned)
    }
}

/// An action or event with its time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeriesMark {
    /// In milliseconds since 1970.
    pub at: u64,
    /// Name of the model.
    pub model: ModelName,
    /// Absent if the mark concerns no particular replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<u32>,
    /// Absent if the mark concerns no particular kind of memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryKind>,
    /// Number of the process, if the mark concerns one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<GenerationId>,
    /// Kind of the mark.
    pub kind: SeriesMarkKind,
    /// Description, as a sentence.
    pub words: String,
}

/// Returns one mark for most events, but a mark per model for a changed configuration. `at` replaces an
/// invalid time of the event.
pub(super) fn marks_from_event(event: &FleetEvent, at: u64, most: usize) -> Vec<SeriesMark> {
    let at = event
        .at
        .parse::<jiff::Timestamp>()
        .ok()
        .and_then(|at| u64::try_from(at.as_millisecond()).ok())
        .unwrap_or(at);
    let words = |words: &str| shorten(&secrets::redact_text(words), most);
    let mark = |model: &ModelName, kind, text: &str| SeriesMark {
        at,
        model: model.clone(),
        replica: None,
        memory: None,
        generation: event.generation,
        kind,
        words: words(text),
    };
    if let EventKind::ConfigApplied { report } = &event.kind {
        let lists = [
            (&report.added, "added"),
            (&report.restarted, "its command changed: its processes are replaced"),
            (&report.updated, "its settings changed, in place"),
        ];
        let all = lists.into_iter().flat_map(|(models, what)| models.iter().map(move |model| (model, what)));
        return all
            .map(|(model, what)| {
                mark(model, SeriesMarkKind::Configured, &format!("configuration applied: {what}"))
            })
            .collect();
    }
    let Some(model) = &event.model else { return Vec::new() };
    let told = || event.kind.sentence();
    let one = match &event.kind {
        // The process was not replaced. The event that ended the process has its own mark.
        EventKind::RecycleDone { entry } if entry.given_up => return Vec::new(),
        EventKind::RecycleDone { entry } => SeriesMark {
            replica: Some(entry.replica),
            memory: entry.evidence.series,
            ..mark(
                model,
                if entry.failed.is_some() { SeriesMarkKind::Failed } else { SeriesMarkKind::Replaced },
                &replacement_text(entry),
            )
        },
        EventKind::Reclaimed { entry } => SeriesMark {
            replica: Some(entry.replica),
            memory: entry.series,
            ..mark(model, SeriesMarkKind::Reclaimed, &told())
        },
        EventKind::MakesRoom { .. } | EventKind::Unloaded { .. } | EventKind::LoadsAnew { .. } => {
            mark(model, SeriesMarkKind::Unloaded, &told())
        }
        EventKind::Crashed { .. } | EventKind::CrashLoop { .. } | EventKind::Failed { .. } => {
            mark(model, SeriesMarkKind::Crashed, &told())
        }
        EventKind::Pinned { .. } => mark(model, SeriesMarkKind::Configured, &told()),
        EventKind::CanaryBegan { .. } | EventKind::CanaryEnded { .. } => {
            mark(model, SeriesMarkKind::Canary, &told())
        }
        EventKind::PolicyOff { .. }
        | EventKind::FallsBack { .. }
        | EventKind::StartSearched { .. }
        | EventKind::Unwell { .. }
        | EventKind::VramUnknown { .. } => mark(model, SeriesMarkKind::Warned, &told()),
        EventKind::DriverLeak { gpu, .. } => SeriesMark {
            memory: gpu.map_or(Some(MemoryKind::Host), |gpu| Some(MemoryKind::Vram(gpu))),
            ..mark(model, SeriesMarkKind::Warned, &told())
        },
        _ => return Vec::new(),
    };
    vec![one]
}

fn replacement_text(entry: &LedgerEntry) -> String {
    let evidence = &entry.evidence;
    let mut text =
        format!("{} ({}): ", if entry.failed.is_some() { "not replaced" } else { "replaced" }, entry.reason);
    text.push_str(evidence.words.as_deref().unwrap_or_else(|| entry.reason.phrase()));
    if let Some(failed) = &entry.failed {
        let _infallible = write!(text, "; {failed}");
        return text;
    }
    let (before, after) = entry.memory_change();
    if let Some((before, after)) = before.zip(after) {
        let _infallible = write!(text, "; {} before, {} after", ByteSize(before), ByteSize(after));
    }
    let _infallible = write!(text, "; unavailable for {} ms", entry.gap_ms);
    if entry.cut > 0 {
        let _infallible = write!(text, "; {} requests cut", entry.cut);
    }
    text
}

/// Cuts a text to `most` bytes, at a character boundary.
fn shorten(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    let end = (0..=most.saturating_sub(3)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    format!("{}…", &text[..end])
}

#[derive(Debug, Default)]
pub(super) struct MarkHistory {
    of_model: BTreeMap<ModelName, VecDeque<SeriesMark>>,
    count: usize,
}

impl MarkHistory {
    /// Ignores a duplicate, and returns false. Beyond the limits, drops the oldest mark of this model or of
    /// the model with the most marks.
    pub(super) fn add(&mut self, mark: SeriesMark, policy: &SeriesPolicy) -> bool {
        let own = self.of_model.entry(mark.model.clone()).or_default();
        // Marks arrive in order of time, unless the clock was set back.
        let place = own.iter().rposition(|known| known.at <= mark.at).map_or(0, |place| place + 1);
        if place.checked_sub(1).and_then(|before| own.get(before)).is_some_and(|known| *known == mark) {
            return false;
        }
        own.insert(place, mark);
        self.count += 1;
        if own.len() > policy.marks_of_model.max(1) {
            own.pop_front();
            self.count -= 1;
        }
        while self.count > policy.marks.max(1) {
            let most = self.of_model.iter_mut().max_by_key(|(_, marks)| marks.len());
            if most.is_none_or(|(_, marks)| marks.pop_front().is_none()) {
                break;
            }
            self.count -= 1;
        }
        true
    }

    /// `from` and `to` are milliseconds since 1970.
    pub(super) fn of_model(&self, model: &str, from: u64, to: u64) -> Vec<SeriesMark> {
        let own = self.of_model.get(&ModelName::new(model)).into_iter().flatten();
        own.filter(|mark| (from..=to).contains(&mark.at)).cloned().collect()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &SeriesMark> {
        self.of_model.values().flatten()
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }
}

#[cfg(test)]
#[path = "marks_tests.rs"]
mod tests;
