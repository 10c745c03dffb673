//! The overview: a row for each model, then GPUs and host. Turns a picture of the fleet into markup.

use std::cmp::{Ordering, Reverse};
use std::fmt::Write as _;

use maud::{Markup, html};
use warden_admin::growth_text;
use warden_admin::memory_use::{MemoryUse, backend_memory_use};
use warden_admin::query::{QueryPairs, address_with_query};
use warden_policies::growth::GrowthVerdict;
use warden_policies::reclaim::ReclaimParts;
use warden_policies::{ByteSize, MemoryKind, secrets};
use warden_supervisor::{BackendView, CanaryState, ModelState, ModelView};

use crate::files::content_hash;
use crate::hub::PageSnapshot;
use crate::markup::{BadgeTone, badge, table_head, words};
use crate::pace::RequestRates;
use crate::part::{
    has_words, memory_bar, model_link, moment_element, page_link, rate_text, search_field, seconds_text,
    sentence, usage_bar,
};

/// Rows in one part of the list: few enough for a browser to lay them out without a stutter.
const ROWS_PER_PART: usize = 100;
const MAX_SHOWN_PROCESSES: usize = 4;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OverviewQuery {
    /// Words, all of which must occur in a model's name, aliases or state.
    pub(crate) words: String,
    pub(crate) sort: RowOrder,
    pub(crate) part: usize,
}

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

pub(crate) fn overview_view(picture: &PageSnapshot, wish: &OverviewQuery) -> Markup {
    let models = picture.status.fleet.models.iter();
    let found = models.filter(|model| has_words(&wish.words, &searched_text(model)));
    let mut rows: Vec<OverviewRow> = found.map(|model| make_row(picture, model)).collect();
    sort_rows(&mut rows, wish.sort);
    let parts = rows.len().div_ceil(ROWS_PER_PART).max(1);
    let part = wish.part.min(parts - 1);
    html! {
        h1 { "Overview" }
        (instance_facts(picture))
        section aria-labelledby="models" {
            h2 id="models" { "Models" }
            p class="count quiet" id="count" { (summary_text(picture, rows.len())) }
            @if rows.iter().any(|row| !row.processes.is_empty()) {
                (bar_legend())
            }
            @if !rows.is_empty() {
                table role="table" class="models" id="rows" {
                    caption class="unseen" { "Models, their memory and their requests" }
                    (table_head(TITLES))
                    tbody role="rowgroup" {
                        @for row in rows.iter().skip(part * ROWS_PER_PART).take(ROWS_PER_PART) {
                            (model_row(picture, row))
                        }
                    }
                }
            }
            @if parts > 1 {
                (part_links(wish, part, parts, rows.len()))
            }
        }
        (machine_section(picture))
    }
}

const TITLES: [&str; 10] = [
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

fn bar_legend() -> Markup {
    const PARTS: [(&str, &str); 4] = [
        ("weights", "weights"),
        ("cache", "KV and caches, declared"),
        ("other", "other"),
        ("growth", "growth"),
    ];
    html! {
        ul class="legend small" aria-label="Parts of the bars" {
            @for (part, word) in PARTS {
                li {
                    svg viewBox="0 0 26 12" aria-hidden="true" {
                        rect class={ "part-" (part) } width="26" height="12" {}
                    }
                    (word)
                }
            }
        }
    }
}

/// Returns the form that filters and sorts, which is not refreshed: a user's typing must not be disturbed.
pub(crate) fn overview_form(wish: &OverviewQuery) -> Markup {
    html! {
        form method="get" action="/page/" class="filter" role="search" {
            label for="filter" { "Filter" }
            (search_field(&wish.words, Some("name or state")))
            label for="sort" { "Sort by" }
            select id="sort" name="sort" {
                @for (sort, word, told) in RowOrder::ALL {
                    option value=(word) selected[sort == wish.sort] { (told) }
                }
            }
            button { "Show" }
        }
    }
}

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
    let holds = |backend| (backend, backend_memory_use(backend, budget, plan, &picture.status.fleet));
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
        RowOrder::State => rows.sort_by_key(|row| Reverse(urgency(row.model))),
        RowOrder::Memory => rows.sort_by(|a, b| most(a.share(), b.share())),
        RowOrder::Queue => rows.sort_by_key(|row| Reverse(row.model.waiting)),
        RowOrder::Requests => rows.sort_by(|a, b| most(a.pace.requests, b.pace.requests)),
    }
}

fn urgency(model: &ModelView) -> (BadgeTone, GrowthVerdict) {
    (state_tone(model), worst_verdict(model).unwrap_or_default())
}

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
            let _infallible = write!(text, ", {models} {}", state.as_str());
        }
    }
    if shown < all.len() {
        let _infallible = write!(text, "; {shown} shown");
    }
    text
}

fn model_row(picture: &PageSnapshot, row: &OverviewRow) -> Markup {
    let model = row.model;
    let slots: u32 = model.backends.iter().filter_map(|backend| backend.slots).sum();
    let busy: u32 = model.backends.iter().map(|backend| backend.in_flight).sum();
    let first_token = row.pace.first_p50.zip(row.pace.first_p99);
    html! {
        // A name may contain white space, which an id may not.
        tr role="row" id={ "m-" (content_hash(model.name.as_str().as_bytes())) } class="row" {
            th role="rowheader" scope="row" {
                (model_link("/page/memory", model.name.as_str()))
                @if !model.aliases.is_empty() {
                    div class="quiet small" { (model.aliases.join(", ")) }
                }
                @if let Some(remote) = &model.remote {
                    div class="quiet small" { "served by " (remote.url) }
                }
            }
            td role="cell" data-title="State" class="state" { (model_state(model)) }
            td role="cell" data-title="Holds" class="holding" { (held_memory(row)) }
            td role="cell" data-title="Slots" class="number" {
                (busy) @if slots > 0 { "/" (slots) }
            }
            td role="cell" data-title="Queue" class="number" { (model.waiting) "/" (model.queue_depth) }
            td role="cell" data-title="Requests/s" class="number" {
                (rate_text(row.pace.requests))
                @if row.pace.failed > 0.0 { " (" (rate_text(row.pace.failed)) " failed)" }
            }
            td role="cell" data-title="Tokens/s" class="number" { (rate_text(row.pace.output_tokens)) }
            td role="cell" data-title="First token, p50 / p99" class="number" {
                @if let Some((p50, p99)) = first_token {
                    (seconds_text(p50)) " / " (seconds_text(p99))
                } @else {
                    "–"
                }
            }
            td role="cell" data-title="Next action" class="says" { (next_actions(picture, model)) }
            td role="cell" data-title="Actions" class="do" { (action_buttons(model)) }
        }
    }
}

fn model_state(model: &ModelView) -> Markup {
    let verdict = worst_verdict(model).filter(|verdict| verdict.grows());
    let has_canary = model.canary.as_ref().is_some_and(|canary| canary.state != CanaryState::Ended);
    let refused = model.quarantine.requests.iter().filter(|known| known.refused).count();
    html! {
        (badge(state_tone(model), model.state.as_str()))
        @if let Some(verdict) = verdict {
            br;
            (badge(words::verdict_tone(verdict), verdict.as_str()))
        }
        @if model.pin.pinned {
            div class="quiet small" {
                "pinned" @if let Some(by) = &model.pin.by { " by " (by) }
            }
        }
        @if has_canary {
            div class="quiet small" { "a canary is running" }
        }
        @if let Some((reason, at)) = &model.last_replacement {
            div class="quiet small" title=(reason.phrase()) {
                "replaced " (moment_element(at)) ": " (reason.phrase())
            }
        }
        @if refused > 0 {
            div class="quiet small" { (refused) " request(s) refused" }
        }
    }
}

fn held_memory(row: &OverviewRow) -> Markup {
    let several = row.processes.len() > 1;
    html! {
        @if row.processes.is_empty() {
            span class="quiet" { "nothing" }
        }
        @for (backend, holds) in row.processes.iter().take(MAX_SHOWN_PROCESSES) {
            @if several {
                div class="quiet small" {
                    "process " (backend.generation.map_or(0, |generation| generation.0))
                    ", " (backend.phase.as_str())
                }
            }
            @if let Some(why) = &backend.memory.unmeasured {
                div class="quiet" { (why) }
            } @else if holds.is_empty() {
                div class="quiet" { "not read yet" }
            }
            @for one in holds {
                (memory_bar(row.model.name.as_str(), one))
            }
        }
        @if row.processes.len() > MAX_SHOWN_PROCESSES {
            div class="quiet small" {
                "and " (row.processes.len() - MAX_SHOWN_PROCESSES) " processes more"
            }
        }
    }
}

/// Returns the next action and when it is due, or the reason why the model does not serve.
fn next_actions(picture: &PageSnapshot, model: &ModelView) -> Markup {
    let said = next_action_texts(picture, model);
    html! {
        @match said.as_slice() {
            [] => { span class="quiet" { "nothing" } }
            [only] => { (sentence(only)) }
            [first, rest @ ..] => {
                (sentence(first))
                details id={ "d-" (content_hash(model.name.as_str().as_bytes())) } {
                    summary { (rest.len()) " more" }
                    ul {
                        @for one in rest {
                            li { (sentence(one)) }
                        }
                    }
                }
            }
        }
    }
}

fn next_action_texts(picture: &PageSnapshot, model: &ModelView) -> Vec<String> {
    let mut said = Vec::new();
    said.extend(model.last_failure.as_ref().map(|failure| failure.message.clone()));
    said.extend(model.outage.as_ref().map(|outage| outage.cure.clone()));
    said.extend(model.backends.iter().find_map(|backend| backend.degraded.clone()));
    said.extend(model.policy.as_ref().and_then(growth_text::next_action));
    if said.is_empty() {
        let next = model.backends.iter().filter_map(|backend| backend.next.as_ref());
        said.extend(next.into_iter().find_map(growth_text::next_action));
    }
    let waits = model.state == ModelState::Loading && model.backends.iter().all(|b| b.pid.is_none());
    if waits || model.remote.is_some() {
        said.extend(model.replace_note.clone());
    }
    let advice = picture.status.advice.get(model.name.as_str()).into_iter().flatten();
    said.extend(advice.map(|one| format!("looks like: {}", one.text)));
    // The last output of a server may quote a key, so hide secrets.
    said.iter().map(|one| secrets::redact_text(one)).collect()
}

fn action_buttons(model: &ModelView) -> Markup {
    let name = model.name.as_str();
    html! {
        @for (action, word, told) in allowed_actions(model) {
            // The title describes the action; the label names it.
            button form="act" name="do" value={ (action) " " (name) } title=(told)
                aria-label={ (word) " " (name) }
            {
                (word)
            }
        }
    }
}

/// Returns the actions that a model allows now: the action, the word on its button, and its description.
fn allowed_actions(model: &ModelView) -> Vec<(&'static str, &'static str, &'static str)> {
    if model.remote.is_some() {
        return vec![("restart", "try", "asks its endpoint now whether it answers")];
    }
    let mut actions = Vec::new();
    if model.backends.iter().any(|backend| backend.pid.is_some()) {
        actions.push(("restart", "restart", "a fresh process takes its place; no request fails"));
        if model.backends.iter().any(|backend| backend.reclaim.parts.is_some_and(ReclaimParts::any)) {
            actions.push(("reclaim", "reclaim", "makes it give unused memory back while it serves"));
        }
        let told = "lets running requests end and stops it; the next request loads it again";
        actions.push(("drain", "unload", told));
    } else if model.state == ModelState::Unloaded {
        actions.push(("load", "load", "starts it now"));
    } else {
        actions.push(("restart", "start", "tries again at once"));
    }
    actions.push(if model.pin.pinned {
        ("unpin", "unpin", "from now on it may be unloaded for another model")
    } else {
        ("pin", "pin", "from now on it is never unloaded for another model")
    });
    if !model.quarantine.requests.is_empty() {
        actions.push(("release", "release", "requests that are refused or suspected may be sent again"));
    }
    actions
}

fn part_links(wish: &OverviewQuery, part: usize, parts: usize, all: usize) -> Markup {
    let first = part * ROWS_PER_PART + 1;
    let last = ((part + 1) * ROWS_PER_PART).min(all);
    html! {
        nav aria-label="Parts of the list" class="parts" {
            span { (first) " to " (last) " of " (all) }
            @if part > 0 {
                (page_link(&wish.part_address(part - 1), "previous"))
            }
            @if part + 1 < parts {
                (page_link(&wish.part_address(part + 1), "next"))
            }
        }
    }
}

fn instance_facts(picture: &PageSnapshot) -> Markup {
    let instance = &picture.status.instance;
    let requests: f64 = picture.paces.values().map(|pace| pace.requests).sum();
    let tokens: f64 = picture.paces.values().map(|pace| pace.output_tokens).sum();
    let log = picture.status.access_log.as_ref().filter(|log| log.lost > 0);
    html! {
        p class="about" {
            "llama-warden " (instance.version) " serves " code { (instance.address) }
            " since " (moment_element(&instance.started_at)) "; "
            (rate_text(requests)) " requests and " (rate_text(tokens)) " tokens a second"
            @if let Some(bytes) = instance.memory_anon {
                "; it holds " (ByteSize(bytes)) " itself"
            }
        }
        @if let Some(log) = log {
            p class="warn" { (log.lost) " lines of the access log " (log.path.display()) " are missing" }
        }
        @if let Some(trouble) = picture.status.state.problem() {
            p class="warn" { (trouble) }
        }
    }
}

fn machine_section(picture: &PageSnapshot) -> Markup {
    let fleet = &picture.status.fleet;
    if fleet.devices.is_empty() && fleet.host.is_none() {
        return Markup::default();
    }
    html! {
        section aria-labelledby="machine" {
            h2 id="machine" { "The machine" }
            ul class="devices" {
                @if let Some(host) = fleet.host {
                    @let used = host.total.saturating_sub(host.available);
                    li {
                        div {
                            "host memory: " (ByteSize(used)) " of " (ByteSize(host.total)) " in use, "
                            (ByteSize(host.available)) " available"
                        }
                        (usage_bar(MemoryKind::Host, used, host.total))
                    }
                }
                @for (device, text) in fleet.devices.iter().zip(growth_text::device_lines(&fleet.devices)) {
                    li {
                        div { (text) }
                        @if let Some((used, total)) = device.used.zip(device.total) {
                            (usage_bar(MemoryKind::Vram(device.gpu), used, total))
                        }
                    }
                }
            }
        }
    }
}
