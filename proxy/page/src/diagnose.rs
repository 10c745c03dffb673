//! The view *Diagnose*: reports in the folder `reports` of the state directory, and the command that writes
//! a report. Pure.

use std::path::Path;

use maud::{Markup, html};
use warden_pages::table_head;
use warden_pages::time::time_element;
use warden_policies::{ByteSize, ModelName};

use crate::files::content_hash;
use crate::part::page_link;
use crate::reports::{ReportFile, plain_file_name};

/// Most models for which the command is shown.
const MAX_MODELS: usize = 10;

pub(crate) fn diagnose_view<'a>(
    reports: &[ReportFile],
    folder: &Path,
    models: impl Iterator<Item = &'a ModelName>,
) -> Markup {
    html! {
        h1 { "Diagnose" }
        p {
            "An experiment starts a fresh llama-server next to those that serve, sends it one kind of request "
            "repeatedly, and reports whether its memory grows without an end, by how much, and for which work. "
            "It needs the memory of one more process."
        }
        h2 { "Reports" }
        @if reports.is_empty() {
            p class="quiet" { "There is none yet." }
        } @else {
            table role="table" class="reports" id="rows" {
                caption class="unseen" { "Reports, the latest first" }
                (table_head(["Report", "Written", "Size"]))
                tbody role="rowgroup" {
                    @for report in reports {
                        (report_row(report))
                    }
                }
            }
        }
        h2 { "In a terminal" }
        p {
            "Reports that llama-warden diagnose writes into " code { (folder.display()) } " are listed here."
        }
        @for model in models.take(MAX_MODELS) {
            @let path = folder.join(format!("{}.html", plain_file_name(model.as_str())));
            pre tabindex="0" role="region" aria-label={ "Command for " (model) } {
                "llama-warden diagnose --config FILE --model " (quote_word(model.as_str()))
                " --html " (quote_word(&path.to_string_lossy()))
            }
        }
    }
}

fn report_row(report: &ReportFile) -> Markup {
    html! {
        tr role="row" class="row" id={ "r-" (content_hash(report.name.as_bytes())) } {
            th role="rowheader" scope="row" {
                @if report.is_too_large() {
                    (report.name)
                    div class="quiet small" { "too large to be shown here: open the file" }
                } @else {
                    (page_link(&report_path(&report.name), &report.name))
                }
            }
            td role="cell" data-title="Written" { (time_element(report.at)) }
            td role="cell" data-title="Size" class="number" { (ByteSize(report.bytes)) }
        }
    }
}

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

/// Quotes a word for a shell. An unquotable word is returned unchanged, because it is only displayed.
fn quote_word(word: &str) -> String {
    shlex::try_quote(word).map_or_else(|_| word.to_owned(), std::borrow::Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_listed_and_names_stay_text() {
        let report = |name: &str, bytes| ReportFile { name: name.to_owned(), at: 0, bytes };
        let reports = [report("b <x>.html", 9), report("large.html", crate::reports::MAX_REPORT_BYTES + 1)];
        let model = ModelName::new("a <b>'; rm -rf /");
        let html = diagnose_view(&reports, Path::new("/state/reports"), [&model].into_iter()).into_string();
        insta::assert_snapshot!(html.replace("><", ">\n<"));
        assert!(!html.contains("<script") && !html.contains("<b>"));
        assert_eq!(report_path("b <x>.html"), "/page/reports/b%20%3Cx%3E.html");
    }
}
