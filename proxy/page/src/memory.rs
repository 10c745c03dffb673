//! The view *Memory*: for each kind of memory of a model the readings, the fitted growth law with its band,
//! budgets, declared caches, past actions and forecasts. Turns values into markup. [`memory_file()`] makes
//! a self-contained file with the same content.

use maud::{Markup, html};
use warden_admin::query::address_with_query;
use warden_admin::series::SeriesSpan;
use warden_admin::series::answer::{LimitForecast, MemoryData, SeriesData, SeriesList, SeriesStatus};
use warden_admin::series::ask::RANGES;
use warden_policies::{ByteSize, MemoryKind, Reason};
use warden_supervisor::FleetView;

use crate::drawn::series_plot;
use crate::markup::time::{UtcMoment, time_element};
use crate::markup::{badge, style, table_head, term_list, words};

const VIEW_PATH: &str = "/page/memory";
const FILE_PATH: &str = "/page/memory.html";

pub(crate) fn memory_view(data: &MemoryData) -> Markup {
    html! {
        h1 { "Memory of " (data.model) }
        (range_links(data))
        (memory_content(data))
    }
}

pub(crate) fn memory_file(data: &MemoryData) -> String {
    let content = html! {
        h1 { "Memory of " (data.model) }
        p class="quiet" {
            (unix_element(data.from)) " to " (unix_element(data.to))
            ", as it was kept by llama-warden " (unix_element(data.now)) "."
        }
        (memory_content(data))
    };
    style::self_contained(format_args!("Memory of {}", data.model), &content)
}

/// Returns the name of the self-contained file; all characters of the name are valid on any system.
pub(crate) fn memory_file_name(data: &MemoryData) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
    let model: String = data.model.chars().map(plain).take(60).collect();
    let at = UtcMoment::from_unix(to_signed(data.to)).rfc3339().replace(':', "");
    format!("memory-{model}-{at}.html")
}

struct RecordedModel<'a> {
    name: &'a str,
    /// Each kind of memory, with the bytes held now.
    memories: Vec<String>,
    from: u64,
    to: u64,
}

/// Lists the models with recorded memory and the bytes they hold now, for a request that names no model.
pub(crate) fn listing_view(listed: &SeriesList, fleet: &FleetView) -> Markup {
    html! {
        h1 { "Memory" }
        @if listed.series.is_empty() {
            p { "No memory was read yet: the first readings come some seconds after a process is ready." }
        }
        table role="table" {
            (table_head(["Model", "Memories", "Kept since", "Read last"]))
            tbody role="rowgroup" {
                @for model in recorded_models(listed, fleet) {
                    tr role="row" class="row" {
                        th role="rowheader" scope="row" {
                            a href=(view_address(model.name, &[("range", "1h")])) { (model.name) }
                        }
                        td role="cell" class="says" data-title="Memories" { (model.memories.join(", ")) }
                        td role="cell" data-title="Kept since" { (unix_element(model.from)) }
                        td role="cell" data-title="Read last" { (unix_element(model.to)) }
                    }
                }
            }
        }
        (storage_place(&listed.place))
    }
}

fn recorded_models<'a>(listed: &'a SeriesList, fleet: &FleetView) -> Vec<RecordedModel<'a>> {
    let mut models: Vec<RecordedModel<'_>> = Vec::new();
    for one in &listed.series {
        let held = held_now(one, fleet).map_or_else(String::new, |bytes| format!(" {}", ByteSize(bytes)));
        let memory = format!("{}{held}", memory_title(one.key.memory, one.key.replica, false));
        match models.last_mut() {
            Some(model) if model.name == one.key.model.as_str() => {
                model.memories.push(memory);
                model.from = model.from.min(one.from);
                model.to = model.to.max(one.to);
            }
            _ => models.push(RecordedModel {
                name: one.key.model.as_str(),
                memories: vec![memory],
                from: one.from,
                to: one.to,
            }),
        }
    }
    models
}

/// Returns the bytes that the processes of a replica hold now; `None` if unknown or no process runs.
fn held_now(one: &SeriesSpan, fleet: &FleetView) -> Option<u64> {
    let model = fleet.models.iter().find(|model| model.name == one.key.model)?;
    let backends = model.backends.iter().filter(|backend| backend.replica == one.key.replica);
    backends.filter_map(|backend| backend.held(one.key.memory)).reduce(u64::saturating_add)
}

/// Returns the content common to view and file: each kind of memory, then where the records are stored.
fn memory_content(data: &MemoryData) -> Markup {
    let replicas = data.series.iter().any(|series| series.replica > 0);
    html! {
        @if data.series.is_empty() {
            p { "There are no readings of it in this time." }
            // Without readings there is no plot, so list the past actions here.
            ul {
                @for mark in &data.marks {
                    li { (unix_element(mark.at / 1000)) " " (mark.kind.as_str()) ": " (mark.words) }
                }
            }
        }
        @for series in &data.series {
            (memory_section(data, series, replicas))
        }
        (storage_place(&data.place))
    }
}

fn storage_place(place: &str) -> Markup {
    html! {
        p class="quiet small" { "Kept " (place) "." }
    }
}

fn range_links(data: &MemoryData) -> Markup {
    let span = data.to.saturating_sub(data.from).max(1);
    let model = data.model.as_str();
    let between =
        |from: u64, to: u64| view_address(model, &[("from", &from.to_string()), ("to", &to.to_string())]);
    let this_range = between(data.from, data.to);
    let shown = match &data.range {
        Some(name) => view_address(model, &[("range", name)]),
        None => this_range.clone(),
    };
    let file = format!("{}&file=1", shown.replacen(VIEW_PATH, FILE_PATH, 1));
    html! {
        nav class="ranges" aria-label="Time range" {
            ul class="legend" {
                @for (name, _) in RANGES {
                    @let current = data.range.as_deref() == Some(name);
                    (range_link(&view_address(model, &[("range", name)]), range_title(name), current))
                }
                (range_link(&between(data.from.saturating_sub(span), data.from), "earlier", false))
                @if data.to < data.now {
                    (range_link(&between(data.to, data.to.saturating_add(span)), "later", false))
                }
                (range_link(&this_range, "link to this range", data.range.is_none()))
                (range_link(&file, "as a file", false))
            }
        }
        p class="quiet" { (unix_element(data.from)) " to " (unix_element(data.to)) }
    }
}

fn range_link(address: &str, text: &str, current: bool) -> Markup {
    html! {
        li {
            @if current {
                a href=(address) aria-current="true" { strong { (text) } }
            } @else {
                a href=(address) { (text) }
            }
        }
    }
}

fn range_title(range: &str) -> &str {
    match range {
        "1h" => "1 hour",
        "6h" => "6 hours",
        "1d" => "1 day",
        "7d" => "7 days",
        "30d" => "30 days",
        other => other,
    }
}

fn view_address(model: &str, range: &[(&str, &str)]) -> String {
    address_with_query(VIEW_PATH, &[&[("model", model)][..], range].concat())
}

fn memory_title(memory: MemoryKind, replica: u32, replicas: bool) -> String {
    let memory = words::memory_name(memory);
    if replicas || replica > 0 { format!("{memory} of replica {replica}") } else { memory }
}

fn memory_section(data: &MemoryData, series: &SeriesData, replicas: bool) -> Markup {
    let what = memory_title(series.memory, series.replica, replicas);
    let id = format!("{}-{}", series.memory, series.replica);
    html! {
        section id={ "memory-" (id) } aria-labelledby={ "of-" (id) } {
            h2 id={ "of-" (id) } { (words::capitalize(&what)) }
            @if let Some(present) = &series.present {
                p {
                    (badge(words::verdict_tone(present.verdict), present.verdict.as_str()))
                    " " (present.means)
                }
            }
            (series_plot(data, series, &what).figure(None))
            @if let Some(present) = &series.present {
                (term_list(current_facts(present)))
            }
        }
    }
}

fn current_facts(present: &SeriesStatus) -> Vec<(&'static str, String)> {
    let size = |bytes: Option<u64>| bytes.map(|bytes| ByteSize(bytes).to_string()).unwrap_or_default();
    let mut kept: Vec<String> = present.kept.iter().cloned().collect();
    kept.extend(present.allowance.iter().cloned());
    let foretold = present.forecasts.iter().map(forecast_text).collect::<Vec<_>>();
    vec![
        ("holds now", format!("{} (process g{})", ByteSize(present.bytes), present.generation)),
        ("grows", present.slope.clone().unwrap_or_default()),
        ("who pays", present.blame.clone().unwrap_or_default()),
        ("declared caches", kept.join("\n")),
        ("soft budget", size(present.soft)),
        ("hard budget", size(present.hard)),
        ("forecast", foretold.join("\n")),
        ("next", present.next.clone().unwrap_or_default()),
    ]
}

fn forecast_text(foretold: &LimitForecast) -> String {
    let limit = match foretold.reason {
        Reason::HostSoft | Reason::VramSoft => "the soft budget",
        Reason::HostHard | Reason::VramHard => "the hard budget",
        Reason::MemoryExhausted => "the end of the memory",
        other => other.phrase(),
    };
    format!("{limit}, {}, {}", ByteSize(foretold.limit), foretold.words)
}

fn to_signed(unix: u64) -> i64 {
    i64::try_from(unix).unwrap_or(i64::MAX)
}

fn unix_element(unix: u64) -> Markup {
    time_element(to_signed(unix))
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
