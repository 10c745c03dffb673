//! Renders the page: findings, table, explanations, a plot for each memory of each leg, and sections for a
//! cure, the largest prompts and call sites where they were requested.

use warden_experiment::{LegFinding, SeriesFinding};
use warden_pages::{Html, badge, style, words};
use warden_policies::growth::GrowthVerdict;
use warden_policies::{ByteSize, phrases};

use super::curves;
use super::summary::{OverallResult, headline};
use super::table::{leg_name, table_rows, verdict_cell};
use super::{CureReport, DiagnoseReport, LegReport, UntriedSwitch};

pub(super) fn report_page(report: &DiagnoseReport) -> String {
    let findings: Vec<&LegFinding> = report.legs.iter().map(|leg| &leg.finding).collect();
    let mut html = Html::new();
    html.element("h1", &[], "llama-warden diagnose");
    let outlook = OverallResult::from_report(report);
    html.element("p", &[("class", &format_args!("lead {}", outlook.tone().class()))], outlook.sentence());
    html.list(headline(report));
    setup_facts(report, &mut html);
    if !findings.is_empty() || !report.skipped.is_empty() {
        html.element("h2", &[], "What was measured");
        write_table(&mut html, &table_rows(&findings, &report.skipped));
        html.list(report.notes());
        verdict_meanings(&findings, &mut html);
    }
    for leg in &report.legs {
        write_plots(report, leg, &mut html);
    }
    if let Some(cure) = &report.cure {
        write_comparison(cure, &mut html);
    }
    for one in &report.survival {
        html.element("h2", &[], format_args!("What stops the crash under {}", one.workload));
        html.list(one.sentences());
        write_table(&mut html, &one.rows());
        html.list(one.explanations());
        write_untried(&mut html, &one.left_out());
    }
    if let Some(between) = &report.between {
        html.element("h2", &[], "Which revision");
        html.list(between.sentences());
        write_table(&mut html, &between.rows());
        let said = between.answer_rows();
        if said.len() > 1 {
            html.element("h2", &[], "What the ends answer");
            write_table(&mut html, &said);
        }
    }
    if let Some(headroom) = &report.headroom {
        html.element("h2", &[], "The largest prompts");
        write_table(&mut html, &headroom.rows());
        html.list(headroom.sentences());
    }
    if !report.attribution.is_empty() {
        html.element("h2", &[], "Which call sites").element("pre", &[], report.attribution.join("\n"));
    }
    style::document("llama-warden diagnose", &html)
}

fn setup_facts(report: &DiagnoseReport, html: &mut Html) {
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
    html.terms(own.chain(under).chain(about.system.iter().cloned()).chain(devices).chain(command));
}

fn verdict_meanings(findings: &[&LegFinding], html: &mut Html) {
    let all = || findings.iter().flat_map(|finding| &finding.series);
    let found = words::ALL_VERDICTS
        .into_iter()
        .filter(|verdict| all().any(|series| verdict_cell(series) == verdict.as_str()));
    let found: Vec<GrowthVerdict> = found.collect();
    if found.is_empty() {
        return;
    }
    html.element("h3", &[], "What the words mean");
    let verdicts = found.into_iter().map(|verdict| (verdict.as_str(), words::explain_verdict(verdict)));
    html.terms(
        verdicts.chain(words::PLOT_TERMS.into_iter().filter(|(word, _)| ["law", "declared"].contains(word))),
    );
}

fn write_comparison(cure: &CureReport, html: &mut Html) {
    html.element("h2", &[], "With and without");
    html.list(cure.sentences());
    let rows = cure.rows();
    if rows.len() > 1 {
        write_table(html, &rows);
        html.list(cure.explanations());
    }
    write_untried(html, &cure.left_out());
}

fn write_untried(html: &mut Html, left_out: &[UntriedSwitch]) {
    if !left_out.is_empty() {
        html.within("details", &[], |details| {
            details.element("summary", &[], format_args!("Not tried: {}", left_out.len()));
            details.list(left_out.iter().map(|one| format!("{}: {}", one.item, one.why)));
        });
    }
}

/// A table; the first row is the head.
fn write_table(html: &mut Html, rows: &[Vec<String>]) {
    let Some((head, body)) = rows.split_first() else { return };
    html.within("div", &[("class", &"scroll"), ("tabindex", &0)], |scroll| {
        scroll.within("table", &[], |table| {
            table.within("thead", &[], |thead| {
                thead.within("tr", &[], |row| {
                    for title in head {
                        row.element("th", &[("scope", &"col")], title);
                    }
                });
            });
            table.within("tbody", &[], |tbody| {
                for row in body {
                    tbody.within("tr", &[], |cells| {
                        for (column, value) in row.iter().enumerate() {
                            // The last cell of a short row spans the remaining columns.
                            let last = column + 1 == row.len();
                            let wide = if last { head.len().saturating_sub(column).max(1) } else { 1 };
                            write_cell(cells, value, wide);
                        }
                    });
                }
            });
        });
    });
}

fn write_cell(row: &mut Html, value: &str, wide: usize) {
    let known = words::ALL_VERDICTS.into_iter().find(|verdict| verdict.as_str() == value);
    let says: warden_pages::html::HtmlAttributes<'_> =
        if wide > 1 { &[("colspan", &wide), ("class", &"says")] } else { &[] };
    row.within("td", says, |cell| {
        match known {
            Some(verdict) => cell.raw(&badge(words::verdict_tone(verdict), value)),
            None => cell.text(value),
        };
    });
}

fn write_plots(report: &DiagnoseReport, leg: &LegReport, html: &mut Html) {
    let finding = &leg.finding;
    html.element("h2", &[], leg_name(finding));
    html.element(
        "p",
        &[],
        format_args!(
            "{}; {} requests, {} images, {} prompt tokens evaluated, {} tokens generated",
            finding.workload.description(),
            finding.requests,
            finding.work.images,
            finding.work.prompt_tokens,
            finding.work.output_tokens
        ),
    );
    for found in &finding.series {
        html.raw(&curves::memory_plot(report, leg, found).figure(&plot_caption(found)));
    }
}

fn plot_caption(found: &SeriesFinding) -> Html {
    let mut words = Html::new();
    words.text(format_args!("{}: ", words::memory_name(found.series)));
    words.raw(&badge(words::verdict_tone(found.verdict), verdict_cell(found)));
    let slope =
        found.per_request.map_or_else(String::new, |slope| format!(", {}", phrases::slope_phrase(&slope)));
    words.text(format_args!("{slope}, from {} to {}", ByteSize(found.first), ByteSize(found.last)));
    words
}
