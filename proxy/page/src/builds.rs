//! The view *Builds*: the build that each model runs and will run, its content, checks and canaries. Turns
//! values into markup; only [`StoredBuilds::read`] reads the store.

use std::path::Path;

use maud::{Markup, html};
use warden_builder::{BuildChoices, BuildId, BuildStore, Provenance};
use warden_policies::ByteSize;
use warden_supervisor::{CanaryState, CanaryView, ModelView, canary_traffic};

use crate::build_text::{build_cells, default_state};
use crate::hub::PageSnapshot;
use crate::markup::{BadgeTone, badge, table_head, term_list, text_list};
use crate::part::{model_link, moment_element};

#[derive(Debug, Default)]
pub(crate) struct StoredBuilds {
    pub(crate) builds: Vec<Provenance>,
    pub(crate) damaged: Vec<String>,
    pub(crate) in_use: Option<BuildId>,
    pub(crate) choices: BuildChoices,
    pub(crate) bundled: Vec<BuildId>,
    pub(crate) error: Option<String>,
}

impl StoredBuilds {
    /// Reads the store in the data folder. Blocks.
    pub(crate) fn read(data: &Path) -> Self {
        let store = BuildStore::with_bundled(data);
        let listing = match store.list() {
            Ok(listing) => listing,
            Err(error) => return Self { error: Some(error.to_string()), ..Self::default() },
        };
        let damaged = listing.damaged.iter().map(|(path, why)| format!("{}: {why}", path.display()));
        Self {
            damaged: damaged.collect(),
            in_use: store.default_build().ok().flatten().map(|build| build.id),
            choices: store.choices().unwrap_or_default(),
            builds: listing.builds,
            bundled: listing.bundled,
            error: None,
        }
    }
}

/// Titles of the columns of [`build_cells`], and of the state.
const TITLES: [&str; 9] = ["Build", "Made", "llama.cpp", "On", "For", "Fixes", "Verified", "Size", "Stands"];

pub(crate) fn builds_view(picture: &PageSnapshot, shelf: &StoredBuilds, data: &Path) -> Markup {
    let models = &picture.status.fleet.models;
    let canaries: Vec<&CanaryView> = models.iter().filter_map(|model| model.canary.as_deref()).collect();
    html! {
        h1 { "Builds" }
        (builds_in_use(picture, data))
        @if !canaries.is_empty() {
            h2 { "Canaries" }
            @for canary in canaries {
                (canary_section(canary))
            }
        }
        h2 { "In the store" }
        @if let Some(trouble) = &shelf.error {
            p class="bad" { "The store cannot be read: " (trouble) }
        }
        (text_list(shelf.damaged.iter().map(|damaged| format!("cannot be used: {damaged}"))))
        @if shelf.builds.is_empty() {
            p {
                "There is none in " code { (data.join("builds").display()) }
                ". " code { "llama-warden build" } " makes one."
            }
        } @else {
            table role="table" class="builds" id="rows" {
                caption class="unseen" { "Builds in the store, the latest first" }
                (table_head(TITLES))
                tbody role="rowgroup" {
                    @for build in &shelf.builds {
                        (build_row(build, shelf))
                    }
                }
            }
        }
    }
}

fn build_row(build: &Provenance, shelf: &StoredBuilds) -> Markup {
    let bundled = shelf.bundled.contains(&build.id);
    let state = default_state(&build.id, shelf.in_use.as_ref(), &shelf.choices, bundled);
    let chosen = shelf.choices.chosen.iter().rev().find(|one| one.build == build.id);
    html! {
        tr role="row" id={ "b-" (build.id) } class="row" {
            @for (title, text) in TITLES.iter().zip(build_cells(build)) {
                td role="cell" data-title=(title) class="says" {
                    @match *title {
                        "Build" => { code { (text) } }
                        "Made" => { (moment_element(&text)) }
                        _ => { (text) }
                    }
                }
            }
            td role="cell" data-title="Stands" class="says" {
                @match state {
                    "in use" | "in use, bundled" => { (badge(BadgeTone::Good, state)) }
                    "rejected" => { (badge(BadgeTone::Bad, state)) }
                    _ => { (state) }
                }
                @if let Some(why) = shelf.choices.rejected(&build.id).or(chosen) {
                    div class="quiet small" { (why.why) }
                }
                (passed_checks(build))
            }
        }
    }
}

fn builds_in_use(picture: &PageSnapshot, data: &Path) -> Markup {
    let store = BuildStore::with_bundled(data);
    let own = picture.status.fleet.models.iter().filter(|model| model.remote.is_none());
    html! {
        h2 { "In use" }
        table role="table" class="in-use" {
            caption class="unseen" { "Build of each model" }
            (table_head(["Model", "Runs", "Next process", "Mitigations"]))
            tbody role="rowgroup" {
                @for model in own {
                    (model_row(picture, model, &store))
                }
            }
        }
    }
}

fn model_row(picture: &PageSnapshot, model: &ModelView, store: &BuildStore) -> Markup {
    let told = |path: &Path| match store.find_by_file(path) {
        Some(id) => format!("build {id}"),
        None => path.display().to_string(),
    };
    let status = &picture.status;
    let name = model.name.as_str();
    let running = model.backends.iter().filter(|backend| backend.pid.is_some());
    let mut runs: Vec<String> = running.filter_map(|backend| backend.program.as_deref()).map(told).collect();
    runs.dedup();
    let next = status.next_binary(name).map(told).unwrap_or_default();
    let mitigations = status.mitigations.get(name).map(|all| all.join(", "));
    html! {
        tr role="row" {
            th role="rowheader" scope="row" { (model_link("/page/memory", name)) }
            td role="cell" data-title="Runs" class="says" {
                @if runs.is_empty() { "nothing" } @else { (runs.join(", ")) }
            }
            td role="cell" data-title="Next process" class="says" {
                @if runs == [next.clone()] {
                    span class="quiet" { "the same" }
                } @else {
                    (next)
                }
                @if status.bound.iter().any(|bound| bound == name) {
                    div class="quiet small" { "bound by the configuration" }
                }
            }
            td role="cell" data-title="Mitigations" class="says" {
                (mitigations.unwrap_or_else(|| "none configured".to_owned()))
            }
        }
    }
}

fn passed_checks(build: &Provenance) -> Markup {
    let verified = &build.verified;
    html! {
        @if !verified.checks.is_empty() {
            details id={ "p-" (build.id) } {
                summary { (verified.checks.len()) " checks passed" }
                (text_list(verified.checks.iter().map(|check| format!("{} ({:.1} s)", check.name, check.seconds))))
                (text_list(verified.devices.iter().map(|device| format!("on {device}"))))
                p { (ByteSize(build.binary.size)) ", " (build.host.name) }
            }
        }
    }
}

fn canary_section(canary: &CanaryView) -> Markup {
    let verdict = canary.verdict.as_str();
    let tone = match (canary.state, verdict) {
        (CanaryState::Starting | CanaryState::Running, _) => BadgeTone::Busy,
        (CanaryState::Ended, "worse") => BadgeTone::Bad,
        (CanaryState::Ended, "better_or_equal") => BadgeTone::Good,
        (CanaryState::Ended, _) => BadgeTone::Idle,
    };
    html! {
        h3 { (canary.model) ": " (badge(tone, verdict.replace('_', " "))) }
        (term_list([
            ("state", canary.state.as_str().to_owned()),
            ("program", canary.binary.display().to_string()),
            ("build", canary.build.clone().unwrap_or_default()),
            ("gets", canary_traffic(canary.share)),
            ("its requests", canary.report.canary.requests.to_string()),
            ("of the model's own build", canary.report.base.requests.to_string()),
            ("words", canary.verdict.words().join("\n")),
        ]))
        p class="quiet" {
            "Began " (moment_element(&canary.began_at))
            @if let Some(ended) = &canary.ended_at {
                ", ended " (moment_element(ended))
            }
            "."
        }
    }
}
