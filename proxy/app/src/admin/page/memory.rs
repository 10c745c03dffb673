//! The view *Memory*: for each kind of memory of a model the readings, the fitted growth law with its band,
//! budgets, declared caches, past actions and forecasts. Turns values into markup. [`memory_file()`] makes
//! a self-contained file with the same content.

use std::fmt::Write as _;

use warden_pages::time::{UtcMoment, time_element};
use warden_pages::{Html, badge, style, words};
use warden_policies::{ByteSize, MemoryKind, Reason};
use warden_supervisor::FleetView;

use super::drawn::series_plot;
use crate::series::answer::{LimitForecast, MemoryData, SeriesData, SeriesEntry, SeriesList, SeriesStatus};
use crate::series::ask::RANGES;

/// Path of the view.
const VIEW_PATH: &str = "/page/memory";

/// Returns the view of one model's memory, with links to other time ranges.
pub(crate) fn memory_view(data: &MemoryData) -> Html {
    let mut html = Html::new();
    html.element("h1", &[], format_args!("Memory of {}", data.model));
    range_links(&mut html, data);
    write_content(&mut html, data);
    html
}

/// Returns the content of [`memory_view`] as a self-contained file.
pub(crate) fn memory_file(data: &MemoryData) -> String {
    let mut html = Html::new();
    html.element("h1", &[], format_args!("Memory of {}", data.model));
    html.within("p", &[("class", &"quiet")], |p| {
        p.raw(&time_element(to_signed(data.from))).text(" to ").raw(&time_element(to_signed(data.to)));
        p.text(", as it was kept by llama-warden ").raw(&time_element(to_signed(data.now))).text(".");
    });
    write_content(&mut html, data);
    style::document(format_args!("Memory of {}", data.model), &html)
}

/// Returns the name of such a file; all its characters are valid on any system.
pub(crate) fn memory_file_name(data: &MemoryData) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
    let model: String = data.model.chars().map(plain).take(60).collect();
    let at = UtcMoment::from_unix(to_signed(data.to)).rfc3339().replace(':', "");
    format!("memory-{model}-{at}.html")
}

/// Lists the models with recorded memory and the bytes they hold now, for a request that names no model.
pub(crate) fn listing_view(listed: &SeriesList, fleet: &FleetView) -> Html {
    let mut html = Html::new();
    html.element("h1", &[], "Memory");
    if listed.series.is_empty() {
        html.element(
            "p",
            &[],
            "No memory was read yet: the first readings come some seconds after a process is ready.",
        );
    }
    let mut models: Vec<(&str, Vec<String>, u64, u64)> = Vec::new();
    for one in &listed.series {
        let held = held_now(one, fleet).map_or_else(String::new, |bytes| format!(" {}", ByteSize(bytes)));
        let memory = format!("{}{held}", memory_title(one.memory, one.replica, false));
        match models.last_mut().filter(|(name, ..)| *name == one.model.as_str()) {
            Some((_, memories, from, to)) => {
                memories.push(memory);
                (*from, *to) = ((*from).min(one.from), (*to).max(one.to));
            }
            None => models.push((one.model.as_str(), vec![memory], one.from, one.to)),
        }
    }
    html.within("table", &[], |table| {
        table.within("thead", &[], |head| {
            head.within("tr", &[], |row| {
                for name in ["Model", "Memories", "Kept since", "Read last"] {
                    row.element("th", &[("scope", &"col")], name);
                }
            });
        });
        table.within("tbody", &[], |body| {
            for (model, memories, from, to) in models {
                body.within("tr", &[("class", &"row")], |row| {
                    row.within("th", &[("scope", &"row")], |name| {
                        name.element("a", &[("href", &view_address(model, "range=1h"))], model);
                    });
                    row.element(
                        "td",
                        &[("class", &"says"), ("data-title", &"Memories")],
                        memories.join(", "),
                    );
                    for (title, at) in [("Kept since", from), ("Read last", to)] {
                        row.within("td", &[("data-title", &title)], |cell| {
                            cell.raw(&time_element(to_signed(at)));
                        });
                    }
                });
            }
        });
    });
    write_storage_place(&mut html, &listed.place);
    html
}

/// Returns the bytes that the processes of a replica hold now; `None` if no process runs, or its memory is
/// unknown.
fn held_now(one: &SeriesEntry, fleet: &FleetView) -> Option<u64> {
    let model = fleet.models.iter().find(|model| model.name == one.model)?;
    let backends = model.backends.iter().filter(|backend| backend.replica == one.replica);
    backends.filter_map(|backend| backend.held(one.memory)).reduce(u64::saturating_add)
}

/// Writes the content common to view and file: each kind of memory, then where the records are stored.
fn write_content(html: &mut Html, data: &MemoryData) {
    if data.series.is_empty() {
        html.element("p", &[], "There are no readings of it in this time.");
        list_actions(html, data);
    }
    let replicas = data.series.iter().any(|series| series.replica > 0);
    for series in &data.series {
        write_section(html, data, series, replicas);
    }
    write_storage_place(html, &data.place);
}

fn write_storage_place(html: &mut Html, place: &str) {
    html.element("p", &[("class", &"quiet small")], format_args!("Kept {place}."));
}

/// Lists past actions; used if there is no plot to show them.
fn list_actions(html: &mut Html, data: &MemoryData) {
    html.within("ul", &[], |list| {
        for mark in &data.marks {
            list.within("li", &[], |line| {
                line.raw(&time_element(to_signed(mark.at / 1000))).text(format_args!(
                    " {}: {}",
                    mark.kind.as_str(),
                    mark.words
                ));
            });
        }
    });
}

/// Writes links to other time ranges, each with a complete URL.
fn range_links(html: &mut Html, data: &MemoryData) {
    let span = data.to.saturating_sub(data.from).max(1);
    let between = |from: u64, to: u64| view_address(&data.model, &format!("from={from}&to={to}"));
    html.within("nav", &[("class", &"ranges"), ("aria-label", &"Time range")], |nav| {
        nav.within("ul", &[("class", &"legend")], |list| {
            let mut link = |address: &str, text: &str, current: bool| {
                list.within("li", &[], |item| {
                    if current {
                        item.within("a", &[("href", &address), ("aria-current", &"true")], |name| {
                            name.element("strong", &[], text);
                        });
                    } else {
                        item.element("a", &[("href", &address)], text);
                    }
                });
            };
            for (name, _) in RANGES {
                let current = data.range.as_deref() == Some(name);
                link(&view_address(&data.model, &format!("range={name}")), range_title(name), current);
            }
            link(&between(data.from.saturating_sub(span), data.from), "earlier", false);
            if data.to < data.now {
                link(&between(data.to, data.to.saturating_add(span)), "later", false);
            }
            link(&between(data.from, data.to), "link to this range", data.range.is_none());
            let same = data
                .range
                .as_ref()
                .map_or_else(|| format!("from={}&to={}", data.from, data.to), |name| format!("range={name}"));
            link(
                &format!("{VIEW_PATH}.html?{}&file=1", encode_query(&data.model, &same)),
                "as a file",
                false,
            );
        });
    });
    html.within("p", &[("class", &"quiet")], |p| {
        p.raw(&time_element(to_signed(data.from))).text(" to ").raw(&time_element(to_signed(data.to)));
    });
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

fn view_address(model: &str, more: &str) -> String {
    format!("{VIEW_PATH}?{}", encode_query(model, more))
}

fn encode_query(model: &str, more: &str) -> String {
    let mut text = "model=".to_owned();
    for byte in model.bytes() {
        // Browsers leave these characters unescaped.
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            let _infallible = write!(text, "%{byte:02X}");
        }
    }
    format!("{text}&{more}")
}

fn memory_title(memory: MemoryKind, replica: u32, replicas: bool) -> String {
    let memory = words::memory_name(memory);
    if replicas || replica > 0 { format!("{memory} of replica {replica}") } else { memory }
}

fn write_section(html: &mut Html, data: &MemoryData, series: &SeriesData, replicas: bool) {
    let what = memory_title(series.memory, series.replica, replicas);
    let id = format!("{}-{}", series.memory, series.replica);
    html.within(
        "section",
        &[("id", &format_args!("memory-{id}")), ("aria-labelledby", &format_args!("of-{id}"))],
        |section| {
            let capital: String =
                what.chars().take(1).flat_map(char::to_uppercase).chain(what.chars().skip(1)).collect();
            section.element("h2", &[("id", &format_args!("of-{id}"))], capital);
            if let Some(present) = &series.present {
                section.within("p", &[], |p| {
                    p.raw(&badge(words::verdict_tone(present.verdict), present.verdict.as_str()));
                    p.text(format_args!(" {}", present.means));
                });
            }
            section.raw(&series_plot(data, series, &what).figure(&Html::new()));
            if let Some(present) = &series.present {
                section.terms(current_facts(present));
            }
        },
    );
}

/// Describes the current values in words.
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

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
