//! The view *Diagnose*: what runs, what was found last, reports that lie in `reports` of the state directory, and how to make one
//! in a terminal. Pure.

use std::path::Path;

use warden_pages::Html;
use warden_policies::{ByteSize, ModelName};

use super::part::{link, moment};
use super::reports::{Written, plain};
use crate::diagnosis::{About, Ended, Now, View, WORKLOADS};

/// Models for which the command is shown.
const SHOWN: usize = 10;
/// What stands in `<main>`.
pub(crate) fn view<'a>(
    reports: &[Written],
    folder: &Path,
    models: impl Iterator<Item = &'a ModelName>,
    diagnoses: &View,
) -> Html {
    let mut html = Html::new();
    html.element("h1", &[], "Diagnose");
    html.within("p", &[], |p| {
        p.text("An experiment starts a fresh llama-server beside those that serve, sends it one kind of request again and again, and says ");
        p.text("whether its memory grows without an end, by how much, and who pays. It needs the memory of one more process.");
    });
    if let Some(now) = &diagnoses.now {
        running(&mut html, now);
    }
    if let Some(last) = &diagnoses.last {
        ended(&mut html, last);
    }
    listed(&mut html, reports);
    html.element("h2", &[], "In a terminal");
    html.within("p", &[], |p| {
        p.text("What llama-warden diagnose writes into ").element("code", &[], folder.display());
        p.text(" is listed here, too. There it can do more: look for what stops a leak, compare builds, run under a tool.");
    });
    for model in models.take(SHOWN) {
        let path = folder.join(format!("{}.html", plain(model.as_str())));
        html.element(
            "pre",
            &[("tabindex", &"0"), ("role", &"region"), ("aria-label", &format_args!("Command for {model}"))],
            format_args!(
                "llama-warden diagnose --config FILE --model {} --html {}",
                quoted(model.as_str()),
                quoted(&path.to_string_lossy())
            ),
        );
    }
    html
}

/// What one is about: of which model, with what, by whom.
fn about(html: &mut Html, about: &About) {
    html.text(format_args!("of {}, ", about.model));
    html.text(about.workload.map_or_else(|| "everything it can do".to_owned(), |one| one.to_string()));
    html.text(format_args!("; asked for by {} ", about.by)).raw(&moment(&about.began));
}

/// The one that runs.
fn running(html: &mut Html, now: &Now) {
    html.within("section", &[("aria-labelledby", &"runs")], |section| {
        section.element("h2", &[("id", &"runs")], "Now");
        section.within("p", &[], |p| {
            p.text("A diagnosis runs ");
            about(p, &now.about);
            p.text(". ");
            if let Some(because) = &now.because {
                p.text(format_args!("It is being ended: {because}. "));
            }
            let value = format!("end-diagnosis {}", now.about.model);
            let told = "ends it; what it has found so far is written";
            p.element(
                "button",
                &[("form", &"act"), ("name", &"do"), ("value", &value), ("title", &told)],
                "end it",
            );
        });
        lines(section, "What the diagnosis says", &now.lines);
    });
}

/// The one that ended last.
fn ended(html: &mut Html, last: &Ended) {
    html.within("section", &[("aria-labelledby", &"last")], |section| {
        section.element("h2", &[("id", &"last")], "The last one");
        section.within("p", &[("class", &if last.found { "good" } else { "bad" })], |p| {
            p.text(format_args!("{} ", last.outcome));
            p.raw(&moment(&last.at));
        });
        section.within("p", &[], |p| {
            p.text("A diagnosis ");
            about(p, &last.about);
            p.text(". ");
            if last.has_report {
                link(p, &address(&last.about.report), "Read its report");
            }
        });
        section.within("details", &[("id", &"said")], |details| {
            details.element("summary", &[], "What it said");
            lines(details, "What the last diagnosis said", &last.lines);
        });
    });
}

fn lines(html: &mut Html, name: &str, lines: &[String]) {
    if !lines.is_empty() {
        let about: warden_pages::html::Attributes =
            &[("class", &"log"), ("tabindex", &"0"), ("role", &"region"), ("aria-label", &name)];
        html.element("pre", about, lines.join("\n"));
    }
}

/// What begins one: not refreshed, so that nobody's choice is disturbed.
pub(crate) fn form<'a>(models: impl Iterator<Item = &'a ModelName>) -> Html {
    let mut html = Html::new();
    html.within("section", &[("class", &"filter"), ("aria-label", &"Begin a diagnosis")], |all| {
        all.element("label", &[("for", &"diagnose-model")], "Model");
        all.within("select", &[("id", &"diagnose-model"), ("name", &"model"), ("form", &"act")], |select| {
            for model in models {
                select.element("option", &[("value", model)], model);
            }
        });
        all.element("label", &[("for", &"diagnose-work")], "Work");
        all.within(
            "select",
            &[("id", &"diagnose-work"), ("name", &"workload"), ("form", &"act")],
            |select| {
                select.element("option", &[("value", &"")], "everything it can do");
                for one in WORKLOADS {
                    select.element("option", &[("value", &one)], format_args!("{one}: {}", one.what()));
                }
            },
        );
        let told = "starts a process of its own beside what serves; in a spare moment alone";
        all.element(
            "button",
            &[("form", &"act"), ("name", &"do"), ("value", &"diagnose"), ("title", &told)],
            "diagnose",
        );
    });
    html
}

/// The reports that there are.
fn listed(html: &mut Html, reports: &[Written]) {
    html.element("h2", &[], "Reports");
    if reports.is_empty() {
        html.element("p", &[("class", &"quiet")], "There is none yet.");
        return;
    }
    html.within("table", &[("class", &"reports"), ("id", &"rows")], |table| {
        table.element("caption", &[("class", &"unseen")], "Reports, the latest first");
        table.within("thead", &[], |head| {
            head.within("tr", &[], |row| {
                for title in ["Report", "Written", "Size"] {
                    row.element("th", &[("scope", &"col")], title);
                }
            });
        });
        table.within("tbody", &[], |body| {
            for report in reports {
                body.within(
                    "tr",
                    &[
                        ("class", &"row"),
                        ("id", &format_args!("r-{}", super::files::hash(report.name.as_bytes()))),
                    ],
                    |tr| {
                        tr.within("th", &[("scope", &"row")], |th| {
                            if report.is_too_large() {
                                th.text(&report.name);
                                let told = "too large to be shown here: open the file";
                                th.element("div", &[("class", &"quiet small")], told);
                            } else {
                                link(th, &address(&report.name), &report.name);
                            }
                        });
                        tr.within("td", &[("data-title", &"Written")], |td| {
                            td.raw(&warden_pages::time::time(report.at));
                        });
                        tr.element(
                            "td",
                            &[("data-title", &"Size"), ("class", &"number")],
                            ByteSize(report.bytes),
                        );
                    },
                );
            }
        });
    });
}

/// A name as a part of a path.
fn address(name: &str) -> String {
    let mut path = String::from("/page/reports/");
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => path.push(char::from(byte)),
            other => path.extend(["%", &hex::encode_upper([other])]),
        }
    }
    path
}

/// A word for a shell. What no shell can take stays as it is, for people to see.
fn quoted(word: &str) -> String {
    shlex::try_quote(word).map_or_else(|_| word.to_owned(), std::borrow::Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use warden_policies::experiment::Workload;

    use super::*;

    fn about_it() -> About {
        About {
            model: "a <b>'; rm -rf /".to_owned(),
            workload: Some(Workload::ShortText),
            by: "page, 127.0.0.1".to_owned(),
            began: "2026-01-02T03:04:05Z".to_owned(),
            report: "a-20260102-030405.html".to_owned(),
        }
    }

    #[test]
    fn what_runs_what_was_found_and_what_lies_there_is_shown_and_names_stay_text() {
        let evil = "<script>alert(1)</script>".to_owned();
        let diagnoses = View {
            now: Some(Now { about: about_it(), lines: vec![evil.clone()], because: None }),
            last: Some(Ended {
                about: about_it(),
                at: "2026-01-02T04:04:05Z".to_owned(),
                found: true,
                outcome: evil.clone(),
                has_report: true,
                lines: vec![evil],
            }),
        };
        let report = |name: &str, bytes| Written { name: name.to_owned(), at: 0, bytes };
        let reports = [report("b <x>.html", 9), report("large.html", super::super::reports::LARGEST + 1)];
        let model = ModelName::new("a <b>'; rm -rf /");
        let html = view(&reports, Path::new("/state/reports"), [&model].into_iter(), &diagnoses);
        insta::assert_snapshot!(html.as_str().replace("><", ">\n<"));
        assert!(!html.as_str().contains("<script") && !html.as_str().contains("<b>"));
        assert_eq!(address("b <x>.html"), "/page/reports/b%20%3Cx%3E.html");
    }

    #[test]
    fn work_can_be_chosen() {
        let form = form([&ModelName::new("a\"><b>")].into_iter()).into_string();
        assert!(!form.contains("<b>") && form.matches("<option").count() == 12, "{form}");
    }
}
