//! The view *Builds*: the build that each model runs and will run, its content, checks and canaries. Turns
//! values into markup; only [`StoredBuilds::read`] reads the store.

use std::path::Path;

use warden_builder::{BuildChoices, BuildId, BuildStore, Provenance};
use warden_pages::{BadgeTone, Html, badge};
use warden_policies::ByteSize;
use warden_supervisor::{CanaryState, CanaryView};

use super::hub::PageSnapshot;
use super::part::{moment_element, write_link};
use crate::admin::query::address_with_query;
use crate::cli::builds::{default_state, row};

/// Content of the store of builds.
#[derive(Debug, Default)]
pub(crate) struct StoredBuilds {
    pub(crate) builds: Vec<Provenance>,
    pub(crate) damaged: Vec<String>,
    pub(crate) in_use: Option<BuildId>,
    pub(crate) choices: BuildChoices,
    /// Error if the store could not be read.
    pub(crate) error: Option<String>,
}

impl StoredBuilds {
    /// Reads the store in the data folder. Blocks.
    pub(crate) fn read(data: &Path) -> Self {
        let store = BuildStore::new(data);
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
            error: None,
        }
    }
}

/// Returns the content of the page's `<main>` element.
pub(crate) fn builds_view(picture: &PageSnapshot, shelf: &StoredBuilds, data: &Path) -> Html {
    let mut html = Html::new();
    html.element("h1", &[], "Builds");
    write_models(&mut html, picture, data);
    let tried = picture.status.fleet.models.iter().filter_map(|model| model.canary.as_deref());
    let mut tried = tried.peekable();
    if tried.peek().is_some() {
        html.element("h2", &[], "Canaries");
        tried.for_each(|one| write_canary(&mut html, one));
    }
    html.element("h2", &[], "In the store");
    if let Some(trouble) = &shelf.error {
        html.element("p", &[("class", &"bad")], format_args!("The store cannot be read: {trouble}"));
    }
    html.list(shelf.damaged.iter().map(|damaged| format!("cannot be used: {damaged}")));
    if shelf.builds.is_empty() {
        html.within("p", &[], |p| {
            p.text("There is none in ").element("code", &[], data.join("builds").display());
            p.text(". ").element("code", &[], "llama-warden build").text(" makes one.");
        });
        return html;
    }
    let titles = ["Build", "Made", "llama.cpp", "On", "For", "Fixes", "Verified", "Size", "Stands"];
    html.within("table", &[("class", &"builds"), ("id", &"rows")], |table| {
        table.element("caption", &[("class", &"unseen")], "Builds in the store, the latest first");
        write_head(table, &titles);
        table.within("tbody", &[], |body| {
            for build in &shelf.builds {
                body.within("tr", &[("id", &format_args!("b-{}", build.id)), ("class", &"row")], |tr| {
                    let cells = row(build);
                    for (title, text) in titles.iter().zip(&cells) {
                        tr.within("td", &[("data-title", title), ("class", &"says")], |td| match *title {
                            "Build" => {
                                td.element("code", &[], text);
                            }
                            "Made" => {
                                td.raw(&moment_element(text));
                            }
                            _ => {
                                td.text(text);
                            }
                        });
                    }
                    tr.within("td", &[("data-title", &"Stands"), ("class", &"says")], |td| {
                        let word = default_state(&build.id, shelf.in_use.as_ref(), &shelf.choices);
                        match word {
                            "in use" => {
                                td.raw(&badge(BadgeTone::Good, word));
                            }
                            "rejected" => {
                                td.raw(&badge(BadgeTone::Bad, word));
                            }
                            word => {
                                td.text(word);
                            }
                        }
                        let chosen = shelf.choices.chosen.iter().rev().find(|one| one.build == build.id);
                        if let Some(why) = shelf.choices.rejected(&build.id).or(chosen) {
                            td.element("div", &[("class", &"quiet small")], &why.why);
                        }
                        write_checks(td, build);
                    });
                });
            }
        });
    });
    html
}

fn write_head(table: &mut Html, titles: &[&str]) {
    table.within("thead", &[], |head| {
        head.within("tr", &[], |row| {
            for title in titles {
                row.element("th", &[("scope", &"col")], title);
            }
        });
    });
}

/// Lists the builds and mitigations of each model.
fn write_models(html: &mut Html, picture: &PageSnapshot, data: &Path) {
    let store = BuildStore::new(data);
    let told = |path: &Path| match store.find_by_file(path) {
        Some(id) => format!("build {id}"),
        None => path.display().to_string(),
    };
    let status = &picture.status;
    html.element("h2", &[], "In use");
    html.within("table", &[("class", &"in-use")], |table| {
        table.element("caption", &[("class", &"unseen")], "Build of each model");
        write_head(table, &["Model", "Runs", "Next process", "Mitigations"]);
        table.within("tbody", &[], |body| {
            for model in status.fleet.models.iter().filter(|model| model.remote.is_none()) {
                let name = model.name.as_str();
                body.within("tr", &[], |tr| {
                    tr.within("th", &[("scope", &"row")], |th| {
                        write_link(th, &address_with_query("/page/memory", &[("model", name)]), name);
                    });
                    let mut runs: Vec<String> = model
                        .backends
                        .iter()
                        .filter(|backend| backend.pid.is_some())
                        .filter_map(|backend| backend.program.as_deref())
                        .map(told)
                        .collect();
                    runs.dedup();
                    tr.within("td", &[("data-title", &"Runs"), ("class", &"says")], |td| {
                        td.text(if runs.is_empty() { "nothing".to_owned() } else { runs.join(", ") });
                    });
                    tr.within("td", &[("data-title", &"Next process"), ("class", &"says")], |td| {
                        let next = status.next_binary(name).map(told).unwrap_or_default();
                        if runs == [next.clone()] {
                            td.element("span", &[("class", &"quiet")], "the same");
                        } else {
                            td.text(next);
                        }
                        if status.bound.iter().any(|bound| bound == name) {
                            td.element("div", &[("class", &"quiet small")], "bound by the configuration");
                        }
                    });
                    let mitigations = status.mitigations.get(name).map(|all| all.join(", "));
                    tr.within("td", &[("data-title", &"Mitigations"), ("class", &"says")], |td| {
                        td.text(mitigations.unwrap_or_else(|| "none configured".to_owned()));
                    });
                });
            }
        });
    });
}

/// Lists the checks that a build passed.
fn write_checks(td: &mut Html, build: &Provenance) {
    let verified = &build.verified;
    if verified.checks.is_empty() {
        return;
    }
    td.within("details", &[("id", &format_args!("p-{}", build.id))], |more| {
        more.element("summary", &[], format_args!("{} checks passed", verified.checks.len()));
        more.list(verified.checks.iter().map(|check| format!("{} ({:.1} s)", check.name, check.seconds)));
        more.list(verified.devices.iter().map(|device| format!("on {device}")));
        more.element("p", &[], format_args!("{}, {}", ByteSize(build.binary.size), build.host.name));
    });
}

fn write_canary(html: &mut Html, canary: &CanaryView) {
    let verdict = canary.verdict.as_str();
    let tone = match (canary.state, verdict) {
        (CanaryState::Starting | CanaryState::Running, _) => BadgeTone::Busy,
        (CanaryState::Ended, "worse") => BadgeTone::Bad,
        (CanaryState::Ended, "better_or_equal") => BadgeTone::Good,
        (CanaryState::Ended, _) => BadgeTone::Idle,
    };
    html.within("h3", &[], |h3| {
        h3.text(format_args!("{}: ", canary.model)).raw(&badge(tone, verdict.replace('_', " ")));
    });
    let what = canary.share.map_or_else(
        || "copies of requests; its answers are discarded".to_owned(),
        |share| format!("{:.0} % of conversations", share * 100.0),
    );
    html.terms([
        ("state", canary.state.as_str().to_owned()),
        ("program", canary.binary.display().to_string()),
        ("build", canary.build.clone().unwrap_or_default()),
        ("gets", what),
        ("its requests", canary.report.canary.requests.to_string()),
        ("of the model's own build", canary.report.base.requests.to_string()),
        ("words", canary.verdict.words().join("\n")),
    ]);
    html.within("p", &[("class", &"quiet")], |p| {
        p.text("Began ").raw(&moment_element(&canary.began_at));
        if let Some(ended) = &canary.ended_at {
            p.text(", ended ").raw(&moment_element(ended));
        }
        p.text(".");
    });
}
