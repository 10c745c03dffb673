//! The page: the table, what there is to say beside it, and a plot for each memory of each leg.

use std::fmt::Write as _;

use warden_policies::experiment::{Finding, Reading};
use warden_policies::growth::Verdict;
use warden_policies::{ByteSize, Sample, Series};

use super::plot::{Curve, svg};
use super::table::{HEAD, MIB, notes, rows};
use super::{LegReport, Report};

/// See [`Report::html`].
pub(super) fn page(report: &Report) -> String {
    let findings: Vec<&Finding> = report.legs.iter().map(|leg| &leg.finding).collect();
    let about = &report.about;
    let mut text = String::from("<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">");
    text.push_str(
        "<meta name=\"viewport\" content=\"width=device-width\"><title>llama-warden diagnose</title>",
    );
    let _ = write!(text, "<style>{STYLE}</style></head><body><h1>llama-warden diagnose</h1>");
    let verdict = match (report.leaks, report.interrupted) {
        (true, _) => "A leak was found.",
        (false, true) => "Interrupted; no leak was found until then.",
        (false, false) => "No leak was found.",
    };
    let _ = write!(text, "<p class=\"verdict\">{verdict}</p><dl>");
    let pairs = [
        ("model", about.model.clone()),
        ("began", about.began.clone()),
        ("llama-server", about.server.clone()),
        ("command", about.command_line()),
        ("llama-warden", about.warden.clone()),
        (
            "GPUs",
            report
                .devices
                .iter()
                .map(|device| format!("{}: {}", device.gpu.0, device.name))
                .collect::<Vec<_>>()
                .join(", "),
        ),
    ];
    for (name, value) in pairs.iter().filter(|(_, value)| !value.is_empty()) {
        let _ = write!(text, "<dt>{name}</dt><dd>{}</dd>", escaped(value));
    }
    text.push_str("</dl><table>");
    for (index, row) in rows(&findings, &report.skipped).iter().enumerate() {
        let cell = if index == 0 { "th" } else { "td" };
        text.push_str("<tr>");
        for (column, value) in row.iter().enumerate() {
            // The last cell of a short row says what would be in all the others.
            let wide = if column + 1 == row.len() { HEAD.len() - column } else { 1 };
            let class = if Verdict::Leaking.as_str() == value { " class=\"leaking\"" } else { "" };
            let _ = write!(text, "<{cell}{class} colspan=\"{wide}\">{}</{cell}>", escaped(value));
        }
        text.push_str("</tr>");
    }
    text.push_str("</table>");
    for note in notes(&findings) {
        let _ = write!(text, "<p class=\"note\">{}</p>", escaped(&note));
    }
    for leg in &report.legs {
        plots(leg, &mut text);
    }
    text.push_str("</body></html>\n");
    text
}

fn plots(leg: &LegReport, text: &mut String) {
    let finding = &leg.finding;
    let _ = write!(
        text,
        "<h2>{}</h2><p>{}; {} requests, {} images, {} prompt tokens evaluated, {} tokens generated</p>",
        finding.workload,
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
        let slope = found.per_request.map_or_else(String::new, |slope| {
            format!(
                ", {:+.3} MiB a request ({:.3} to {:.3})",
                slope.value / MIB,
                slope.low / MIB,
                slope.high / MIB
            )
        });
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

fn memory(series: Series) -> String {
    match series {
        Series::Host => "host memory".to_owned(),
        Series::Vram(gpu) => format!("VRAM of GPU {}", gpu.0),
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
.leaking{color:#d33;font-weight:600}.verdict{font-size:1.2rem}.note{margin:.3rem 0}\
dt{float:left;width:8rem;color:#888}dd{margin-left:8rem;overflow-wrap:anywhere}\
figure{margin:1rem 0}svg{width:100%;max-width:48rem;height:auto}\
svg text{font-size:11px;fill:currentColor}.y{text-anchor:end}.x{text-anchor:middle}\
.grid{stroke:#8883}polyline{fill:none;stroke-width:1.5}.all{stroke:#2a7de1}.rest{stroke:#e1802a}";
