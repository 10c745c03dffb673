//! Events and logs, newest first, filtered by model and by words. Turns values into markup; likely secrets
//! are hidden.

use std::collections::BTreeMap;
use std::mem::{Discriminant, discriminant};

use maud::{Markup, html};
use warden_admin::query::QueryPairs;
use warden_policies::{ModelName, secrets};
use warden_supervisor::{EventKind, FleetEvent, LogLine};

use crate::markup::{BadgeTone, badge, table_head};
use crate::part::{has_words, model_link, moment_element, search_field, sentence};

const MAX_EVENTS: usize = 300;
const MAX_LINES: usize = 500;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EventFilter {
    /// Name of the model; empty for all models.
    pub(crate) model: String,
    /// Words, all of which must occur.
    pub(crate) words: String,
}

impl EventFilter {
    pub(crate) fn from_query(ask: &QueryPairs) -> Self {
        let get = |name| ask.get(name).unwrap_or_default().to_owned();
        Self { model: get("model"), words: get("q") }
    }

    /// Returns the filter form. `all`: adds an entry for all models.
    pub(crate) fn form<'a>(
        &self,
        path: &str,
        models: impl Iterator<Item = &'a ModelName>,
        all: bool,
    ) -> Markup {
        html! {
            form method="get" action=(path) class="filter" role="search" {
                label for="model" { "Model" }
                select id="model" name="model" {
                    @if all {
                        option value="" { "all" }
                    }
                    @for model in models {
                        option value=(model) selected[model.as_str() == self.model] { (model) }
                    }
                }
                label for="filter" { "Words" }
                (search_field(&self.words, None))
                button { "Show" }
            }
        }
    }

    fn has_model(&self, event: &FleetEvent) -> bool {
        self.model.is_empty() || event.model.as_ref().is_some_and(|model| model.as_str() == self.model)
    }
}

pub(crate) fn events_view(all: &[FleetEvent], wish: &EventFilter) -> Markup {
    let mut found: Vec<(&FleetEvent, String)> = Vec::new();
    for event in all.iter().rev().filter(|event| wish.has_model(event)) {
        let text = secrets::redact_text(&event.kind.sentence());
        let model = event.model.as_ref().map_or("", |model| model.as_str());
        if has_words(&wish.words, &format!("{model} {text}")) {
            found.push((event, text));
        }
    }
    let folded = fold_failed_starts(&found);
    html! {
        h1 { "Events" }
        p class="quiet count" { (count_text(found.len(), all.len(), MAX_EVENTS, "events")) }
        table role="table" class="events" id="rows" {
            caption class="unseen" { "Events, the latest first" }
            (table_head(["When", "Model", "Process", "What"]))
            tbody role="rowgroup" {
                @for &(event, text, again) in folded.iter().take(MAX_EVENTS) {
                    (event_row(event, text, again))
                }
            }
        }
    }
}

/// Returns the row of an event, with the number of earlier events of its kind.
fn event_row(event: &FleetEvent, text: &str, again: u64) -> Markup {
    html! {
        tr role="row" id={ "e-" (event.id) } class="row" {
            td role="cell" data-title="When" { (moment_element(&event.at)) }
            td role="cell" data-title="Model" class="name" {
                @if let Some(model) = &event.model {
                    (model_link("/page/events", model.as_str()))
                }
            }
            td role="cell" data-title="Process" {
                @if let Some(generation) = event.generation { (generation) }
            }
            td role="cell" data-title="What" class="says" {
                @if let Some((tone, word)) = event_badge(&event.kind) {
                    (badge(tone, word)) " "
                }
                (sentence(text))
                @if again > 0 {
                    div class="quiet small" {
                        "and " (again) " times before, between the same failed starts"
                    }
                }
            }
        }
    }
}

/// Kind of an event, the part of its text that distinguishes it from other events of this kind, and its row.
type LatestEvent<'a> = (Discriminant<EventKind>, &'a str, usize);

/// Folds repeated failed starts of a model: only the latest event of each kind is listed, with the number of
/// earlier ones. Any other event of the model ends the fold. Latest first, as in the input.
fn fold_failed_starts<'a>(found: &'a [(&'a FleetEvent, String)]) -> Vec<(&'a FleetEvent, &'a str, u64)> {
    let mut rows: Vec<(&FleetEvent, &str, u64)> = Vec::new();
    // Row of the latest event of each kind, by model.
    let mut latest: BTreeMap<Option<&str>, Vec<LatestEvent<'_>>> = BTreeMap::new();
    for (event, text) in found {
        let of_model = latest.entry(event.model.as_ref().map(ModelName::as_str)).or_default();
        let kind = discriminant(&event.kind);
        let reason = match event.kind {
            // Process ids and pauses differ between starts, so ignore the text.
            EventKind::Starting { .. } | EventKind::Backoff { .. } => Some(""),
            EventKind::Crashed { .. } => Some(text.as_str()),
            _ => None,
        };
        let Some(reason) = reason else {
            of_model.clear();
            rows.push((event, text, 0));
            continue;
        };
        if let Some((.., row)) = of_model.iter().find(|known| (known.0, known.1) == (kind, reason)) {
            rows[*row].2 += 1;
        } else {
            of_model.push((kind, reason, rows.len()));
            rows.push((event, text, 0));
        }
    }
    rows
}

/// Returns the badge of an event that deserves attention.
fn event_badge(kind: &EventKind) -> Option<(BadgeTone, &'static str)> {
    Some(match kind {
        EventKind::Crashed { .. } | EventKind::CrashLoop { .. } => (BadgeTone::Bad, "crash"),
        EventKind::Failed { .. } => (BadgeTone::Bad, "failed"),
        EventKind::DriverLeak { .. } => (BadgeTone::Bad, "driver"),
        EventKind::RequestQuarantined { .. } => (BadgeTone::Bad, "quarantine"),
        EventKind::RecycleDone { entry } if entry.given_up => (BadgeTone::Idle, "given up"),
        EventKind::RecycleDone { entry } if entry.failed.is_some() => (BadgeTone::Bad, "not replaced"),
        EventKind::RecycleDone { .. } => (BadgeTone::Good, "replaced"),
        EventKind::Reclaimed { .. } => (BadgeTone::Good, "reclaimed"),
        EventKind::RecycleHeld { .. } => (BadgeTone::Warn, "held"),
        EventKind::PolicyOff { .. } => (BadgeTone::Warn, "policy off"),
        EventKind::QueueFull { .. } => (BadgeTone::Warn, "queue"),
        EventKind::Unwell { .. } => (BadgeTone::Warn, "unwell"),
        EventKind::Backoff { .. } => (BadgeTone::Warn, "waits"),
        EventKind::EndpointSilent { .. } => (BadgeTone::Warn, "silent"),
        EventKind::Verdict { growth, .. } if growth.verdict.grows() => {
            (BadgeTone::Warn, growth.verdict.as_str())
        }
        EventKind::Pinned { entry } if entry.pinned => (BadgeTone::Busy, "pinned"),
        EventKind::Pinned { .. } => (BadgeTone::Busy, "unpinned"),
        EventKind::Asked { .. } => (BadgeTone::Busy, "asked"),
        _ => return None,
    })
}

/// Returns the view *Logs* of a model's processes. `all`: the log lines; likely secrets are hidden here.
pub(crate) fn logs_view(all: &[LogLine], wish: &EventFilter) -> Markup {
    let lines = all.iter().rev().map(|line| (line, secrets::redact_text(&line.text)));
    let found: Vec<_> = lines.filter(|(_, text)| has_words(&wish.words, text)).collect();
    html! {
        h1 { "Logs" }
        @if wish.model.is_empty() {
            p { "No model is configured, or none of that name." }
        } @else {
            p class="quiet count" { (count_text(found.len(), all.len(), MAX_LINES, "lines")) }
            div class="log scroll" id="lines" tabindex="0" role="log" aria-live="off"
                aria-label="Output of the processes, the latest first"
            {
                @for (line, text) in found.iter().take(MAX_LINES) {
                    p {
                        (moment_element(&line.at)) " "
                        span class="quiet" { (line.generation) } " "
                        code { (text) }
                    }
                }
            }
        }
    }
}

fn count_text(found: usize, all: usize, most: usize, what: &str) -> String {
    let shown = if found > most { format!(", the latest {most} of them shown") } else { String::new() };
    if found == all {
        format!("{all} {what} are kept{shown}")
    } else {
        format!("{found} of {all} {what}{shown}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_policies::GenerationId;

    fn event(id: u64, model: &str, kind: EventKind) -> FleetEvent {
        let at = "2026-11-26T14:03:20Z".to_owned();
        FleetEvent { id, at, model: Some(ModelName::new(model)), generation: Some(GenerationId(id)), kind }
    }

    #[test]
    fn a_crash_loop_is_three_rows_and_another_reason_or_event_has_its_own() {
        let crashed = |message: &str| {
            let failure = warden_supervisor::BackendFailure {
                kind: warden_supervisor::FailureKind::Signal,
                message: message.to_owned(),
                lines: Vec::new(),
                failures: 1,
            };
            EventKind::Crashed { failure, outside: false }
        };
        let start = |pid: u32| EventKind::Starting { pid, replica: 0 };
        let pause = |delay_ms: u64| EventKind::Backoff { delay_ms, failures: 1 };
        let mut all = vec![event(1, "a", start(7)), event(2, "a", EventKind::Recovered)];
        for round in 0..20 {
            all.push(event(3 + round * 3, "a", start(10 + u32::try_from(round).unwrap())));
            all.push(event(4 + round * 3, "a", crashed(if round == 0 { "no file" } else { "SIGSEGV" })));
            all.push(event(5 + round * 3, "a", pause(round)));
        }
        all.push(event(70, "b", start(99)));
        let html = events_view(&all, &EventFilter::default()).into_string();
        // One row for `b`, three for the repeated start, crash and pause, one for the other crash, two for
        // the first events.
        assert_eq!(html.matches("class=\"row\"").count(), 1 + 3 + 1 + 2, "{html}");
        assert!(html.contains("and 18 times before") && html.contains("and 19 times before"), "{html}");
    }

    #[test]
    fn events_are_found_by_model_and_words_and_hide_what_is_hostile_or_secret() {
        let secret = "hf_abcdefghijklmnopqrstuvwxyzABCD1234";
        let all = [
            event(1, "a", EventKind::Recovered),
            event(
                2,
                "<img src=x onerror=alert(1)>",
                EventKind::Stopped { exit: format!("<script> {secret}") },
            ),
            event(3, "a", EventKind::QueueFull { waiting: 8 }),
        ];
        let whole = events_view(&all, &EventFilter::default()).into_string();
        assert!(!whole.contains("<script") && !whole.contains("<img") && !whole.contains(secret), "{whole}");
        assert!(whole.find("id=\"e-3\"") < whole.find("id=\"e-1\""), "the latest first");
        let wish =
            |model: &str, words: &str| EventFilter { model: model.to_owned(), words: words.to_owned() };
        let rows =
            |wish: &EventFilter| events_view(&all, wish).into_string().matches("class=\"row\"").count();
        assert_eq!(
            (rows(&wish("a", "")), rows(&wish("", "FULL queue")), rows(&wish("a", "nothing"))),
            (2, 1, 0)
        );
        let line = LogLine {
            at: "x".to_owned(),
            model: ModelName::new("a"),
            generation: GenerationId(1),
            stream: warden_supervisor::OutputStream::Stderr,
            text: format!("</code><script>\u{1b}[31m {secret}"),
        };
        let logged = crate::markup::finish_page(logs_view(&[line], &wish("a", "")));
        assert!(
            !logged.contains("<script") && !logged.contains(secret) && !logged.contains('\u{1b}'),
            "{logged}"
        );
    }
}
