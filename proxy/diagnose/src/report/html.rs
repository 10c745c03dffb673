//! The page: what was found, the table, what there is to say beside it, a plot for each memory of each leg, and sections for
//! a cure, the largest prompts and call sites where those were asked for.

use std::fmt::Write as _;

use warden_policies::experiment::{Finding, Reading};
use warden_policies::growth::Verdict;
use warden_policies::{ByteSize, MemoryKind, Sample, phrases};

use super::plot::{Curve, svg};
use super::summary::{Outlook, headline};
use super::table::{name, rows};
use super::{CureReport, LegReport, NotTried, Report};

pub(super) fn page(report: &Report) -> String {
    let findings: Vec<&Finding> = report.legs.iter().map(|leg| &leg.finding).collect();
    let mut text = String::from("<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">");
    text.push_str(
        "<meta name=\"viewport\" content=\"width=device-width\"><title>llama-warden diagnose</title>",
    );
    let _ = write!(text, "<style>{STYLE}</style></head><body><h1>llama-warden diagnose</h1>");
    let _ = write!(text, "<p class=\"verdict\">{}</p>", Outlook::of(report).sentence());
    list(&mut text, &headline(report));
    facts(report, &mut text);
    if !findings.is_empty() || !report.skipped.is_empty() {
        text.push_str("<h2>What was measured</h2>");
        table(&mut text, &rows(&findings, &report.skipped));
        list(&mut text, &report.notes());
    }
    for leg in &report.legs {
        plots(leg, &mut text);
    }
    if let Some(cure) = &report.cure {
        with_and_without(cure, &mut text);
    }
    for one in &report.survival {
        let _ = write!(text, "<h2>What stops the crash under {}</h2>", one.workload);
        list(&mut text, &one.sentences());
        table(&mut text, &one.rows());
        list(&mut text, &one.explained());
        not_tried(&mut text, &one.left_out());
    }
    if let Some(between) = &report.between {
        text.push_str("<h2>Which revision</h2>");
        list(&mut text, &between.sentences());
        table(&mut text, &between.rows());
        let said = between.said();
        if said.len() > 1 {
            text.push_str("<h2>What the ends answer</h2>");
            table(&mut text, &said);
        }
    }
    if let Some(headroom) = &report.headroom {
        text.push_str("<h2>The largest prompts</h2>");
        table(&mut text, &headroom.rows());
        list(&mut text, &headroom.sentences());
    }
    if !report.attribution.is_empty() {
        let lines = escaped(&report.attribution.join("\n"));
        let _ = write!(text, "<h2>Which call sites</h2><pre>{lines}</pre>");
    }
    text.push_str("</body></html>\n");
    text
}

fn facts(report: &Report, text: &mut String) {
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
    text.push_str("<dl>");
    for (name, value) in own.chain(under).chain(about.system.iter().cloned()).chain(devices).chain(command) {
        if !value.is_empty() {
            let _ = write!(text, "<dt>{}</dt><dd>{}</dd>", escaped(&name), escaped(&value));
        }
    }
    text.push_str("</dl>");
}

fn with_and_without(cure: &CureReport, text: &mut String) {
    text.push_str("<h2>With and without</h2>");
    list(text, &cure.sentences());
    let rows = cure.rows();
    if rows.len() > 1 {
        table(text, &rows);
        list(text, &cure.explained());
    }
    not_tried(text, &cure.left_out());
}

fn not_tried(text: &mut String, left_out: &[NotTried]) {
    if !left_out.is_empty() {
        let _ = write!(text, "<details><summary>Not tried: {}</summary>", left_out.len());
        list(text, &left_out.iter().map(|one| format!("{}: {}", one.item, one.why)).collect::<Vec<_>>());
        text.push_str("</details>");
    }
}

/// The first row is the head.
fn table(text: &mut String, rows: &[Vec<String>]) {
    let columns = rows.first().map_or(0, Vec::len);
    text.push_str("<table>");
    for (index, row) in rows.iter().enumerate() {
        let cell = if index == 0 { "th" } else { "td" };
        text.push_str("<tr>");
        for (column, value) in row.iter().enumerate() {
            // The last cell of a short row says what would be in all the others.
            let wide = if column + 1 == row.len() { columns.saturating_sub(column).max(1) } else { 1 };
            let class = if Verdict::Leaking.as_str() == value { " class=\"leaking\"" } else { "" };
            let _ = write!(text, "<{cell}{class} colspan=\"{wide}\">{}</{cell}>", escaped(value));
        }
        text.push_str("</tr>");
    }
    text.push_str("</table>");
}

fn list(text: &mut String, lines: &[String]) {
    if lines.is_empty() {
        return;
    }
    text.push_str("<ul>");
    for line in lines {
        let _ = write!(text, "<li>{}</li>", escaped(line));
    }
    text.push_str("</ul>");
}

fn plots(leg: &LegReport, text: &mut String) {
    let finding = &leg.finding;
    let _ = write!(
        text,
        "<h2>{}</h2><p>{}; {} requests, {} images, {} prompt tokens evaluated, {} tokens generated</p>",
        name(finding),
        finding.workload.what(),
        finding.requests,
        finding.work.images,
        finding.work.prompt_tokens,
        finding.work.output_tokens
    );
    for found in &finding.series {
        let series = found.series;
        let points = |of: &dyn Fn(&Sample) -> Option<u64>| -> Vec<(u64, u64)> {
            let point = |reading: &Reading| Some((reading.sample.work.requests, of(&reading.sample)?));
            leg.readings.iter().filter_map(point).collect()
        };
        let mut curves =
            vec![Curve { class: "all", name: "all", points: points(&|sample| sample.charged(series)) }];
        let without = |sample: &Sample| Some(sample.charged(series)?.saturating_sub(sample.pooled(series)?));
        let without = points(&without);
        if without.iter().zip(&curves[0].points).any(|(a, b)| a.1 != b.1) {
            curves.push(Curve { class: "rest", name: "without what it keeps on purpose", points: without });
        }
        let slope =
            found.per_request.map_or_else(String::new, |slope| format!(", {}", phrases::slope(&slope)));
        let _ = write!(
            text,
            "<figure><figcaption>{}: {}{slope}, from {} to {}</figcaption>{}</figure>",
            memory(series),
            found.verdict.as_str(),
            ByteSize(found.first),
            ByteSize(found.last),
            svg(&curves)
        );
    }
}

fn memory(series: MemoryKind) -> String {
    match series {
        MemoryKind::Host => "host memory".to_owned(),
        MemoryKind::Vram(gpu) => format!("VRAM of GPU {}", gpu.0),
    }
}

fn escaped(text: &str) -> String {
    let mut safe = String::new();
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            c => safe.push(c),
        }
    }
    safe
}

const STYLE: &str = "\
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}\
th,td{text-align:left;padding:.2rem .8rem .2rem 0;border-bottom:1px solid #8884;white-space:nowrap}th{font-size:.75rem}\
.leaking{color:#d33;font-weight:600}.verdict{font-size:1.2rem}ul{margin:.5rem 0;padding-left:1.2rem}pre{overflow-x:auto;font-size:.85rem}\
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1.2rem}dt{color:#888}dd{margin:0;overflow-wrap:anywhere}\
figure{margin:1rem 0}svg{width:100%;max-width:48rem;height:auto}\
svg text{font-size:11px;fill:currentColor}.y{text-anchor:end}.x{text-anchor:middle}\
.grid{stroke:#8883}polyline{fill:none;stroke-width:1.5}.all{stroke:#2a7de1}.rest{stroke:#e1802a}";
