//! The overview: a row for each model, then GPUs and host. Turns a picture of the fleet into markup.

use std::cmp::Ordering;
use std::fmt::Write as _;

use warden_pages::{BadgeTone, Html, badge};
use warden_policies::growth::GrowthVerdict;
use warden_policies::reclaim::ReclaimParts;
use warden_policies::{ByteSize, MemoryKind, secrets};
use warden_supervisor::{BackendView, CanaryState, ModelState, ModelView};

use super::holds::{self, MemoryUse};
use super::hub::PageSnapshot;
use super::pace::RequestRates;
use super::part::{memory_bar, moment_element, rate_text, seconds_text, write_link, write_sentence};
use super::search::has_words;
use crate::admin::query::{QueryPairs, address_with_query};
use crate::cli::growth;

/// Rows in one part of the list: few enough for a browser to lay them out without a stutter.
pub(super) const ROWS_PER_PART: usize = 100;
/// Most processes shown in a model's row.
const MAX_SHOWN_PROCESSES: usize = 4;

/// Filter, order and part of the list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OverviewQuery {
    /// Words, all of which must occur in a model's name, aliases or state.
    pub(crate) words: String,
    pub(crate) sort: RowOrder,
    pub(crate) part: usize,
}

/// Order of the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RowOrder {
    #[default]
    Configured,
    Name,
    /// Most urgent first.
    State,
    /// Nearest to its budget first.
    Memory,
    /// Longest queue first.
    Queue,
    /// Most requests first.
    Requests,
}

impl RowOrder {
    const ALL: [(Self, &'static str, &'static str); 6] = [
        (Self::Configured, "configured", "as configured"),
        (Self::Name, "name", "name"),
        (Self::State, "state", "state, worst first"),
        (Self::Memory, "memory", "memory, fullest first"),
        (Self::Queue, "queue", "queue, longest first"),
        (Self::Requests, "requests", "requests, most first"),
    ];

    fn word(self) -> &'static str {
        Self::ALL.iter().find(|(sort, ..)| *sort == self).map_or("", |(_, word, _)| word)
    }
}

impl OverviewQuery {
    pub(crate) fn from_query(ask: &QueryPairs) -> Self {
        let sort = ask.get("sort").unwrap_or_default();
        Self {
            words: ask.get("q").unwrap_or_default().to_owned(),
            sort: RowOrder::ALL
                .iter()
                .find(|(_, word, _)| *word == sort)
                .map_or(RowOrder::default(), |all| all.0),
            part: ask.get("part").and_then(|part| part.parse().ok()).unwrap_or(0),
        }
    }

    /// Returns the address of another part of the list, with the same filter and order.
    fn part_address(&self, part: usize) -> String {
        let part = part.to_string();
        address_with_query("/page/", &[("q", &self.words), ("sort", self.sort.word()), ("part", &part)])
    }
}

/// Values of one row.
struct OverviewRow<'a> {
    model: &'a ModelView,
    /// The shown processes, each with its use of each kind of memory.
    processes: Vec<(&'a BackendView, Vec<MemoryUse>)>,
    pace: RequestRates,
}

impl OverviewRow<'_> {
    /// Returns the largest share of a budget that any kind of the model's memory uses.
    fn share(&self) -> f64 {
        let all = self.processes.iter().flat_map(|(_, holds)| holds);
        all.filter(|holds| holds.soft.or(holds.hard).is_some()).map(MemoryUse::share).fold(0.0, f64::max)
    }
}

/// Returns the content of the page's `<main>` element.
pub(crate) fn overview_view(picture: &PageSnapshot, wish: &OverviewQuery) -> Html {
    let fleet = &picture.status.fleet;
    let mut rows: Vec<OverviewRow> = fleet
        .models
        .iter()
        .filter(|model| has_words(&wish.words, &searched_text(model)))
        .map(|model| make_row(picture, model))
        .collect();
    sort_rows(&mut rows, wish.sort);
    let (all, parts) = (rows.len(), rows.len().div_ceil(ROWS_PER_PART).max(1));
    let part = wish.part.min(parts - 1);
    let mut html = Html::new();
    html.element("h1", &[], "Overview");
    write_head(&mut html, picture);
    html.within("section", &[("aria-labelledby", &"models")], |section| {
        section.element("h2", &[("id", &"models")], "Models");
        section.element("p", &[("class", &"count quiet"), ("id", &"count")], summary_text(picture, all));
        if rows.iter().any(|row| !row.processes.is_empty()) {
            write_legend(section);
        }
        if all > 0 {
            section.within("table", &[("class", &"models"), ("id", &"rows")], |table| {
                table.element("caption", &[("class", &"unseen")], "Models, their memory and their requests");
                write_titles(table);
                table.within("tbody", &[], |body| {
                    for row in rows.iter().skip(part * ROWS_PER_PART).take(ROWS_PER_PART) {
                        write_row(body, picture, row);
                    }
                });
            });
        }
        if parts > 1 {
            write_part_links(section, wish, part, parts, all);
        }
    });
    write_machine(&mut html, picture);
    html
}

/// Writes the legend of the bars' colours.
fn write_legend(section: &mut Html) {
    section.within("ul", &[("class", &"legend small"), ("aria-label", &"Parts of the bars")], |list| {
        for (part, word) in [
            ("weights", "weights"),
            ("cache", "KV and caches, declared"),
            ("other", "other"),
            ("growth", "growth"),
        ] {
            list.within("li", &[], |item| {
                item.within("svg", &[("viewBox", &"0 0 26 12"), ("aria-hidden", &"true")], |svg| {
                    let class = format_args!("part-{part}");
                    svg.element("rect", &[("class", &class), ("width", &26), ("height", &12)], "");
                });
                item.text(word);
            });
        }
    });
}

/// Returns the form that filters and sorts. It is not refreshed, so that a user's typing is not disturbed.
pub(crate) fn overview_form(wish: &OverviewQuery) -> Html {
    let mut html = Html::new();
    html.within(
        "form",
        &[("method", &"get"), ("action", &"/page/"), ("class", &"filter"), ("role", &"search")],
        |form| {
            form.element("label", &[("for", &"filter")], "Filter");
            form.void(
                "input",
                &[
                    ("id", &"filter"),
                    ("name", &"q"),
                    ("type", &"search"),
                    ("value", &wish.words),
                    ("autocomplete", &"off"),
                    ("placeholder", &"name or state"),
                ],
            );
            form.element("label", &[("for", &"sort")], "Sort by");
            form.within("select", &[("id", &"sort"), ("name", &"sort")], |select| {
                for (sort, word, told) in RowOrder::ALL {
                    if sort == wish.sort {
                        select.element("option", &[("value", &word), ("selected", &"")], told);
                    } else {
                        select.element("option", &[("value", &word)], told);
                    }
                }
            });
            form.element("button", &[], "Show");
        },
    );
    html
}

/// Returns the text in which the filter searches.
fn searched_text(model: &ModelView) -> String {
    let mut text = format!("{} {}", model.name, model.state.as_str());
    for alias in &model.aliases {
        text.extend([" ", alias]);
    }
    text
}

fn make_row<'a>(picture: &'a PageSnapshot, model: &'a ModelView) -> OverviewRow<'a> {
    let name = model.name.as_str();
    let budget = picture.status.budgets.get(name).copied().unwrap_or_default();
    let plan = picture.plans.get(name).copied();
    let with_process = model.backends.iter().filter(|backend| backend.pid.is_some());
    let holds = |backend| (backend, holds::backend_memory_use(backend, budget, plan, &picture.status.fleet));
    OverviewRow {
        model,
        processes: with_process.map(holds).collect(),
        pace: picture.paces.get(name).copied().unwrap_or_default(),
    }
}

fn sort_rows(rows: &mut [OverviewRow], by: RowOrder) {
    let most = |a: f64, b: f64| b.partial_cmp(&a).unwrap_or(Ordering::Equal);
    // The sort is stable, so that rows of equal rank do not swap positions each second.
    match by {
        RowOrder::Configured => {}
        RowOrder::Name => rows.sort_by(|a, b| a.model.name.cmp(&b.model.name)),
        RowOrder::State => rows.sort_by_key(|row| std::cmp::Reverse(urgency(row.model))),
        RowOrder::Memory => rows.sort_by(|a, b| most(a.share(), b.share())),
        RowOrder::Queue => rows.sort_by_key(|row| std::cmp::Reverse(row.model.waiting)),
        RowOrder::Requests => rows.sort_by(|a, b| most(a.pace.requests, b.pace.requests)),
    }
}

fn urgency(model: &ModelView) -> (BadgeTone, GrowthVerdict) {
    (state_tone(model), worst_verdict(model).unwrap_or_default())
}

/// Returns the badge tone of a model's state.
fn state_tone(model: &ModelView) -> BadgeTone {
    let degraded = model.backends.iter().any(|backend| backend.degraded.is_some());
    match model.state {
        ModelState::Loaded if degraded => BadgeTone::Warn,
        ModelState::Loaded => BadgeTone::Good,
        ModelState::Loading | ModelState::Draining => BadgeTone::Busy,
        ModelState::Unloaded => BadgeTone::Idle,
        ModelState::Backoff => BadgeTone::Warn,
        ModelState::Failed => BadgeTone::Bad,
    }
}

/// Returns the worst verdict on the growth of any kind of the model's memory.
fn worst_verdict(model: &ModelView) -> Option<GrowthVerdict> {
    let all = model.backends.iter().flat_map(|backend| &backend.memory.growth);
    all.map(|growth| growth.verdict).max()
}

fn summary_text(picture: &PageSnapshot, shown: usize) -> String {
    let all = &picture.status.fleet.models;
    let count = |state: ModelState| all.iter().filter(|model| model.state == state).count();
    let mut text = match all.len() {
        0 => "No model is configured.".to_owned(),
        1 => "1 model".to_owned(),
        many => format!("{many} models"),
    };
    for state in [
        ModelState::Loaded,
        ModelState::Loading,
        ModelState::Draining,
        ModelState::Unloaded,
        ModelState::Backoff,
        ModelState::Failed,
    ] {
        let models = count(state);
        if models > 0 {
            let _ = write!(text, ", {models} {}", state.as_str());
        }
    }
    if shown < all.len() {
        let _ = write!(text, "; {shown} shown");
    }
    text
}

fn write_titles(table: &mut Html) {
    let all = [
        "Model",
        "State",
        "Holds",
        "Slots",
        "Queue",
        "Requests/s",
        "Tokens/s",
        "First token, p50 / p99",
        "Next action",
        "Actions",
    ];
    table.within("thead", &[], |head| {
        head.within("tr", &[], |row| {
            for title in all {
                row.element("th", &[("scope", &"col")], title);
            }
        });
    });
}

fn write_row(body: &mut Html, picture: &PageSnapshot, row: &OverviewRow) {
    let model = row.model;
    let name = model.name.as_str();
    // A name may contain white space, which an id may not.
    let id = super::files::content_hash(name.as_bytes());
    body.within("tr", &[("id", &format_args!("m-{id}")), ("class", &"row")], |tr| {
        tr.within("th", &[("scope", &"row")], |th| {
            write_link(th, &address_with_query("/page/memory", &[("model", name)]), name);
            if !model.aliases.is_empty() {
                th.element("div", &[("class", &"quiet small")], model.aliases.join(", "));
            }
            if let Some(remote) = &model.remote {
                th.element("div", &[("class", &"quiet small")], format_args!("served by {}", remote.url));
            }
        });
        write_cell(tr, "State", "state", |td| write_state(td, model));
        write_cell(tr, "Holds", "holding", |td| write_memory(td, row));
        let slots: u32 = model.backends.iter().filter_map(|backend| backend.slots).sum();
        let busy: u32 = model.backends.iter().map(|backend| backend.in_flight).sum();
        let slots = if slots > 0 { format!("{busy}/{slots}") } else { busy.to_string() };
        write_number(tr, "Slots", slots);
        write_number(tr, "Queue", format!("{}/{}", model.waiting, model.queue_depth));
        let mut requests = rate_text(row.pace.requests);
        if row.pace.failed > 0.0 {
            let _ = write!(requests, " ({} failed)", rate_text(row.pace.failed));
        }
        write_number(tr, "Requests/s", requests);
        write_number(tr, "Tokens/s", rate_text(row.pace.output_tokens));
        let first = match (row.pace.first_p50, row.pace.first_p99) {
            (Some(p50), Some(p99)) => format!("{} / {}", seconds_text(p50), seconds_text(p99)),
            _ => "–".to_owned(),
        };
        write_number(tr, "First token, p50 / p99", first);
        write_cell(tr, "Next action", "says", |td| write_next_action(td, picture, model));
        write_cell(tr, "Actions", "do", |td| write_actions(td, model));
    });
}

fn write_cell(tr: &mut Html, title: &str, class: &str, content: impl FnOnce(&mut Html)) {
    tr.within("td", &[("data-title", &title), ("class", &class)], content);
}

fn write_number(tr: &mut Html, title: &str, text: impl std::fmt::Display) {
    write_cell(tr, title, "number", |td| {
        td.text(text);
    });
}

fn write_state(td: &mut Html, model: &ModelView) {
    td.raw(&badge(state_tone(model), model.state.as_str()));
    if let Some(verdict) = worst_verdict(model).filter(|verdict| verdict.grows()) {
        td.raw("<br>").raw(&badge(warden_pages::words::verdict_tone(verdict), verdict.as_str()));
    }
    if model.pin.pinned {
        let who = model.pin.by.as_ref().map(|by| format!(" by {by}")).unwrap_or_default();
        td.element("div", &[("class", &"quiet small")], format_args!("pinned{who}"));
    }
    let tried = model.canary.as_ref().filter(|canary| canary.state != CanaryState::Ended);
    if tried.is_some() {
        td.element("div", &[("class", &"quiet small")], "a canary is running");
    }
    if let Some((reason, at)) = &model.last_replacement {
        td.within("div", &[("class", &"quiet small"), ("title", &reason.phrase())], |last| {
            last.text("replaced ").raw(&moment_element(at)).text(format_args!(": {}", reason.phrase()));
        });
    }
    let refused = model.quarantine.requests.iter().filter(|known| known.refused).count();
    if refused > 0 {
        td.element("div", &[("class", &"quiet small")], format_args!("{refused} request(s) refused"));
    }
}

fn write_memory(td: &mut Html, row: &OverviewRow) {
    if row.processes.is_empty() {
        td.element("span", &[("class", &"quiet")], "nothing");
        return;
    }
    let several = row.processes.len() > 1;
    for (backend, holds) in row.processes.iter().take(MAX_SHOWN_PROCESSES) {
        if several {
            let generation = backend.generation.map_or(0, |generation| generation.0);
            let text = format!("process {generation}, {}", backend.phase.as_str());
            td.element("div", &[("class", &"quiet small")], text);
        }
        match &backend.memory.unmeasured {
            Some(why) => td.element("div", &[("class", &"quiet")], why),
            None if holds.is_empty() => td.element("div", &[("class", &"quiet")], "not read yet"),
            None => td,
        };
        for one in holds {
            memory_bar(td, row.model.name.as_str(), one);
        }
    }
    if row.processes.len() > MAX_SHOWN_PROCESSES {
        let more = row.processes.len() - MAX_SHOWN_PROCESSES;
        td.element("div", &[("class", &"quiet small")], format_args!("and {more} processes more"));
    }
}

/// Writes the next action and when it is due, or the reason why the model does not serve.
fn write_next_action(td: &mut Html, picture: &PageSnapshot, model: &ModelView) {
    let mut said = Vec::new();
    if let Some(failure) = &model.last_failure {
        said.push(failure.message.clone());
    }
    if let Some(outage) = &model.outage {
        said.push(outage.cure.clone());
    }
    said.extend(model.backends.iter().find_map(|backend| backend.degraded.clone()));
    said.extend(model.policy.as_ref().and_then(growth::next_action));
    if said.is_empty() {
        said.extend(
            model.backends.iter().filter_map(|backend| backend.next.as_ref()).find_map(growth::next_action),
        );
    }
    let waits = matches!(model.state, ModelState::Loading) && model.backends.iter().all(|b| b.pid.is_none());
    if waits || model.remote.is_some() {
        said.extend(model.replace_note.clone());
    }
    for one in picture.status.advice.get(model.name.as_str()).into_iter().flatten() {
        said.push(format!("looks like: {}", one.text));
    }
    // The last output of a server may quote a key, so hide secrets.
    let said: Vec<String> = said.iter().map(|one| secrets::redact_text(one)).collect();
    match said.as_slice() {
        [] => td.element("span", &[("class", &"quiet")], "nothing"),
        [first, rest @ ..] => {
            write_sentence(td, first);
            if rest.is_empty() {
                return;
            }
            td.within(
                "details",
                &[("id", &format_args!("d-{}", super::files::content_hash(model.name.as_str().as_bytes())))],
                |more| {
                    more.element("summary", &[], format_args!("{} more", rest.len()));
                    more.within("ul", &[], |list| {
                        for one in rest {
                            list.within("li", &[], |item| write_sentence(item, one));
                        }
                    });
                },
            )
        }
    };
}

/// Writes buttons for the actions that the model allows now.
fn write_actions(td: &mut Html, model: &ModelView) {
    let name = model.name.as_str();
    let mut button = |action: &str, word: &str, told: &str| {
        let value = format!("{action} {name}");
        // The title describes the action; the label names it.
        let label = format!("{word} {name}");
        td.element(
            "button",
            &[("form", &"act"), ("name", &"do"), ("value", &value), ("title", &told), ("aria-label", &label)],
            word,
        );
    };
    if model.remote.is_some() {
        button("restart", "try", "asks its endpoint now whether it answers");
        return;
    }
    let runs = model.backends.iter().any(|backend| backend.pid.is_some());
    if runs {
        button("restart", "restart", "a fresh process takes its place; no request fails");
        let able = |backend: &BackendView| backend.reclaim.parts.is_some_and(ReclaimParts::any);
        if model.backends.iter().any(able) {
            button("reclaim", "reclaim", "makes it give unused memory back while it serves");
        }
        button("drain", "unload", "lets running requests end and stops it; the next request loads it again");
    } else if matches!(model.state, ModelState::Unloaded) {
        button("load", "load", "starts it now");
    } else {
        button("restart", "start", "tries again at once");
    }
    if model.pin.pinned {
        button("unpin", "unpin", "from now on it may be unloaded for another model");
    } else {
        button("pin", "pin", "from now on it is never unloaded for another model");
    }
    if !model.quarantine.requests.is_empty() {
        button("release", "release", "requests that are refused or suspected may be sent again");
    }
}

fn write_part_links(html: &mut Html, wish: &OverviewQuery, part: usize, parts: usize, all: usize) {
    html.within("nav", &[("aria-label", &"Parts of the list"), ("class", &"parts")], |nav| {
        let last = ((part + 1) * ROWS_PER_PART).min(all);
        nav.element("span", &[], format_args!("{} to {last} of {all}", part * ROWS_PER_PART + 1));
        if part > 0 {
            write_link(nav, &wish.part_address(part - 1), "previous");
        }
        if part + 1 < parts {
            write_link(nav, &wish.part_address(part + 1), "next");
        }
    });
}

/// Writes instance, version and overall rates.
fn write_head(html: &mut Html, picture: &PageSnapshot) {
    let instance = &picture.status.instance;
    let all: RequestRates = picture.paces.values().fold(RequestRates::default(), |sum, pace| RequestRates {
        requests: sum.requests + pace.requests,
        output_tokens: sum.output_tokens + pace.output_tokens,
        ..sum
    });
    html.within("p", &[("class", &"about")], |p| {
        p.text(format_args!("llama-warden {} serves ", instance.version));
        p.element("code", &[], &instance.address);
        p.text(" since ").raw(&moment_element(&instance.started_at));
        p.text(format_args!(
            "; {} requests and {} tokens a second",
            rate_text(all.requests),
            rate_text(all.output_tokens)
        ));
        if let Some(bytes) = instance.memory_anon {
            p.text(format_args!("; it holds {} itself", ByteSize(bytes)));
        }
    });
    if let Some(log) = &picture.status.access_log
        && log.lost > 0
    {
        html.element(
            "p",
            &[("class", &"warn")],
            format_args!("{} lines of the access log {} are missing", log.lost, log.path.display()),
        );
    }
    if let Some(trouble) = picture.status.state.problem() {
        html.element("p", &[("class", &"warn")], format_args!("{trouble}"));
    }
}

/// Writes bars of GPUs and host memory.
fn write_machine(html: &mut Html, picture: &PageSnapshot) {
    let fleet = &picture.status.fleet;
    if fleet.devices.is_empty() && fleet.host.is_none() {
        return;
    }
    html.within("section", &[("aria-labelledby", &"machine")], |section| {
        section.element("h2", &[("id", &"machine")], "The machine");
        section.within("ul", &[("class", &"devices")], |list| {
            if let Some(host) = fleet.host {
                let used = host.total.saturating_sub(host.available);
                list.within("li", &[], |item| {
                    let text = format!(
                        "host memory: {} of {} in use, {} available",
                        ByteSize(used),
                        ByteSize(host.total),
                        ByteSize(host.available)
                    );
                    item.element("div", &[], text);
                    super::part::usage_bar(item, MemoryKind::Host, used, host.total);
                });
            }
            for (device, text) in fleet.devices.iter().zip(growth::device_lines(&fleet.devices)) {
                list.within("li", &[], |item| {
                    item.element("div", &[], text);
                    if let (Some(used), Some(total)) = (device.used, device.total) {
                        super::part::usage_bar(item, MemoryKind::Vram(device.gpu), used, total);
                    }
                });
            }
        });
    });
}
