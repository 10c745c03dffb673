//! The view *Diagnose*: reports in the folder `reports` of the state directory, and the command that writes
//! a report. Pure.

use std::path::Path;

use warden_pages::Html;
use warden_policies::{ByteSize, ModelName};

use super::part::write_link;
use super::reports::{ReportFile, plain_file_name};

/// Most models for which the command is shown.
const MAX_MODELS: usize = 10;
/// Returns the content of the page's `<main>` element.
pub(crate) fn diagnose_view<'a>(
    reports: &[ReportFile],
    folder: &Path,
    models: impl Iterator<Item = &'a ModelName>,
) -> Html {
    let mut html = Html::new();
    html.element("h1", &[], "Diagnose");
    html.within("p", &[], |p| {
        p.text("An experiment starts a fresh llama-server next to those that serve, sends it one kind of request repeatedly, and reports ");
        p.text("whether its memory grows without an end, by how much, and for which work. It needs the memory of one more process.");
    });
    list_reports(&mut html, reports);
    html.element("h2", &[], "In a terminal");
    html.within("p", &[], |p| {
        p.text("Reports that llama-warden diagnose writes into ").element("code", &[], folder.display());
        p.text(" are listed here.");
    });
    for model in models.take(MAX_MODELS) {
        let path = folder.join(format!("{}.html", plain_file_name(model.as_str())));
        html.element(
            "pre",
            &[("tabindex", &"0"), ("role", &"region"), ("aria-label", &format_args!("Command for {model}"))],
            format_args!(
                "llama-warden diagnose --config FILE --model {} --html {}",
                quote_word(model.as_str()),
                quote_word(&path.to_string_lossy())
            ),
        );
    }
    html
}

/// Lists the reports.
fn list_reports(html: &mut Html, reports: &[ReportFile]) {
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
                        ("id", &format_args!("r-{}", super::files::content_hash(report.name.as_bytes()))),
                    ],
                    |tr| {
                        tr.within("th", &[("scope", &"row")], |th| {
                            if report.is_too_large() {
                                th.text(&report.name);
                                let told = "too large to be shown here: open the file";
                                th.element("div", &[("class", &"quiet small")], told);
                            } else {
                                write_link(th, &report_path(&report.name), &report.name);
                            }
                        });
                        tr.within("td", &[("data-title", &"Written")], |td| {
                            td.raw(&warden_pages::time::time_element(report.at));
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

/// Percent-encodes a name for a path.
fn report_path(name: &str) -> String {
    let mut path = String::from("/page/reports/");
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => path.push(char::from(byte)),
            other => path.extend(["%", &hex::encode_upper([other])]),
        }
    }
    path
}

/// Quotes a word for a shell. A word that cannot be quoted is returned unchanged, because it is only
/// displayed.
fn quote_word(word: &str) -> String {
    shlex::try_quote(word).map_or_else(|_| word.to_owned(), std::borrow::Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_listed_and_names_stay_text() {
        let report = |name: &str, bytes| ReportFile { name: name.to_owned(), at: 0, bytes };
        let reports =
            [report("b <x>.html", 9), report("large.html", super::super::reports::MAX_REPORT_BYTES + 1)];
        let model = ModelName::new("a <b>'; rm -rf /");
        let html = diagnose_view(&reports, Path::new("/state/reports"), [&model].into_iter());
        insta::assert_snapshot!(html.as_str().replace("><", ">\n<"));
        assert!(!html.as_str().contains("<script") && !html.as_str().contains("<b>"));
        assert_eq!(report_path("b <x>.html"), "/page/reports/b%20%3Cx%3E.html");
    }
}
