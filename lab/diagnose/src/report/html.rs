//! Renders the report as an HTML page, with a plot for each kind of memory of each leg.

use maud::{Markup, html};
use warden_experiment::{LegFinding, SeriesFinding};
use warden_pages::{badge, style, table_head, term_list, text_list, words};
use warden_policies::growth::GrowthVerdict;
use warden_policies::{ByteSize, phrases};

use super::curves;
use super::summary::{OverallResult, headline};
use super::table::{leg_name, table_rows, verdict_cell};
use super::{CureReport, DiagnoseReport, LegReport, UntriedSwitch};

pub(super) fn report_page(report: &DiagnoseReport) -> String {
    let findings: Vec<&LegFinding> = report.legs.iter().map(|leg| &leg.finding).collect();
    let outlook = OverallResult::from_report(report);
    let page = html! {
        h1 { "llama-warden diagnose" }
        p class={ "lead " (outlook.tone().class()) } { (outlook.sentence()) }
        (text_list(headline(report)))
        (setup_facts(report))
        @if !findings.is_empty() || !report.skipped.is_empty() {
            h2 { "What was measured" }
            (table(&table_rows(&findings, &report.skipped)))
            (text_list(report.notes()))
            (verdict_meanings(&findings))
        }
        @for leg in &report.legs {
            (leg_plots(report, leg))
        }
        @if let Some(cure) = &report.cure {
            (comparison(cure))
        }
        @for one in &report.survival {
            h2 { "What stops the crash under " (one.workload) }
            (text_list(one.sentences()))
            (table(&one.rows()))
            (text_list(one.explanations()))
            (untried_switches(&one.left_out()))
        }
        @if let Some(between) = &report.between {
            @let said = between.answer_rows();
            h2 { "Which revision" }
            (text_list(between.sentences()))
            (table(&between.rows()))
            @if said.len() > 1 {
                h2 { "What the ends answer" }
                (table(&said))
            }
        }
        @if !report.attribution.is_empty() {
            h2 { "Which call sites" }
            pre { (report.attribution.join("\n")) }
        }
    };
    style::document("llama-warden diagnose", &page)
}

fn setup_facts(report: &DiagnoseReport) -> Markup {
    let about = &report.about;
    let own = [
        ("model", &about.model),
        ("began", &about.began),
        ("llama-server", &about.server),
        ("llama-warden", &about.warden),
    ];
    let under = about.under.iter().map(|tool| ("run under".to_owned(), tool.clone()));
    let own = own.into_iter().map(|(name, value)| (name.to_owned(), value.clone()));
    let devices = report.devices.iter().map(|device| (format!("GPU {}", device.gpu.0), device.name.clone()));
    let command = [("command".to_owned(), about.command_line())];
    term_list(own.chain(under).chain(about.system.iter().cloned()).chain(devices).chain(command))
}

fn verdict_meanings(findings: &[&LegFinding]) -> Markup {
    let all = || findings.iter().flat_map(|finding| &finding.series);
    let found: Vec<GrowthVerdict> = words::ALL_VERDICTS
        .into_iter()
        .filter(|verdict| all().any(|series| verdict_cell(series) == verdict.as_str()))
        .collect();
    let verdicts = found.iter().map(|verdict| (verdict.as_str(), words::explain_verdict(*verdict)));
    let terms = words::PLOT_TERMS.into_iter().filter(|(word, _)| ["law", "declared"].contains(word));
    html! {
        @if !found.is_empty() {
            h3 { "What the words mean" }
            (term_list(verdicts.chain(terms)))
        }
    }
}

fn comparison(cure: &CureReport) -> Markup {
    let rows = cure.rows();
    html! {
        h2 { "With and without" }
        (text_list(cure.sentences()))
        @if rows.len() > 1 {
            (table(&rows))
            (text_list(cure.explanations()))
        }
        (untried_switches(&cure.left_out()))
    }
}

fn untried_switches(left_out: &[UntriedSwitch]) -> Markup {
    html! {
        @if !left_out.is_empty() {
            details {
                summary { "Not tried: " (left_out.len()) }
                (text_list(left_out.iter().map(|one| format!("{}: {}", one.item, one.why))))
            }
        }
    }
}

/// The first row is the head.
fn table(rows: &[Vec<String>]) -> Markup {
    let Some((head, body)) = rows.split_first() else { return Markup::default() };
    html! {
        div class="scroll" tabindex="0" {
            table role="table" {
                (table_head(head))
                tbody role="rowgroup" {
                    @for row in body {
                        tr role="row" {
                            @for (column, value) in row.iter().enumerate() {
                                (cell(value, cell_width(head, row, column)))
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Returns the columns that a cell spans: the last cell of a short row fills the row.
fn cell_width(head: &[String], row: &[String], column: usize) -> usize {
    if column + 1 == row.len() { head.len().saturating_sub(column).max(1) } else { 1 }
}

fn cell(value: &str, wide: usize) -> Markup {
    let verdict = words::ALL_VERDICTS.into_iter().find(|verdict| verdict.as_str() == value);
    let span = (wide > 1).then_some(wide);
    html! {
        td role="cell" colspan=[span] class=[span.map(|_| "says")] {
            @if let Some(verdict) = verdict {
                (badge(words::verdict_tone(verdict), value))
            } @else {
                (value)
            }
        }
    }
}

fn leg_plots(report: &DiagnoseReport, leg: &LegReport) -> Markup {
    let finding = &leg.finding;
    html! {
        h2 { (leg_name(finding)) }
        p {
            (finding.workload.description()) "; " (finding.requests) " requests, "
            (finding.work.images) " images, " (finding.work.prompt_tokens) " prompt tokens evaluated, "
            (finding.work.output_tokens) " tokens generated"
        }
        @for found in &finding.series {
            (curves::memory_plot(report, leg, found).figure(Some(plot_caption(found))))
        }
    }
}

fn plot_caption(found: &SeriesFinding) -> Markup {
    html! {
        (words::memory_name(found.series)) ": "
        (badge(words::verdict_tone(found.verdict), verdict_cell(found)))
        @if let Some(slope) = &found.per_request {
            ", " (phrases::slope_phrase(slope))
        }
        ", from " (ByteSize(found.first)) " to " (ByteSize(found.last))
    }
}
