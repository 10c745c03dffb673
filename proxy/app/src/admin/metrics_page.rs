//! The tables of docs/metrics.md: printed from what is declared, and compared with what is exported.

use std::collections::{BTreeMap, BTreeSet};

use super::event_metrics::EventMetrics;
use super::families::Row;
use super::growth_metrics::GrowthMetrics;
use super::key_metrics::KeyMetrics;
use super::machine_metrics::MachineMetrics;
use super::metrics::OwnMetrics;
use super::model_metrics::ModelMetrics;
use super::report_metrics::ReportMetrics;
use super::request_metrics::RequestMetrics;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
const END: &str = "<!-- end -->\n";
const HEAD: &str = "| name | kind | labels | meaning |\n|---|---|---|---|\n";

/// The tables, each with its name.
fn tables() -> [(&'static str, Vec<Row>); 8] {
    [
        ("requests", RequestMetrics::rows()),
        ("models", ModelMetrics::rows()),
        ("events", EventMetrics::rows()),
        ("growth", GrowthMetrics::rows()),
        ("machine", MachineMetrics::rows()),
        ("reports", ReportMetrics::rows()),
        ("keys", KeyMetrics::rows()),
        ("own", OwnMetrics::rows()),
    ]
}

/// Every metric with its labels.
pub(super) fn declared() -> BTreeMap<String, (&'static str, BTreeSet<&'static str>)> {
    let rows = tables().into_iter().flat_map(|(_, rows)| rows);
    rows.map(|row| (row.name, (row.kind, row.labels.iter().copied().collect()))).collect()
}

fn table(rows: &[Row]) -> String {
    let line = |row: &Row| {
        let (labels, meaning) = (row.labels.join(", "), row.meaning.replace('|', "\\|"));
        format!("| `{}` | {} | {labels} | {meaning} |\n", row.name, row.kind)
    };
    rows.iter().map(line).collect()
}

/// The page with its tables as they are printed.
fn renewed(page: &str) -> Result<String, String> {
    let mut page = page.to_owned();
    for (name, rows) in tables() {
        let start = format!("<!-- metrics: {name} -->\n");
        let (before, rest) =
            page.split_once(&start).ok_or_else(|| format!("there is no `{}`", start.trim()))?;
        let (_, after) = rest.split_once(END).ok_or_else(|| format!("the table {name} has no end"))?;
        page = format!("{before}{start}{HEAD}{}{END}{after}", table(&rows));
    }
    Ok(page)
}

/// `WARDEN_RENEW_DOCS=1` writes the page anew.
#[test]
fn the_tables_of_metrics_are_those_that_are_declared() {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let renewed = renewed(&page).unwrap();
    if std::env::var_os("WARDEN_RENEW_DOCS").is_some() {
        std::fs::write(PAGE, &renewed).unwrap();
        return;
    }
    let differ = page.lines().zip(renewed.lines()).find(|(is, printed)| is != printed);
    assert!(page == renewed, "WARDEN_RENEW_DOCS=1 renews docs/metrics.md; it differs first in {differ:#?}");
}

#[test]
fn no_metric_is_declared_twice_and_each_says_what_it_means_in_sentences() {
    let rows: Vec<Row> = tables().into_iter().flat_map(|(_, rows)| rows).collect();
    assert_eq!(declared().len(), rows.len(), "two have one name");
    for row in rows {
        assert!(row.meaning.ends_with('.') || row.meaning.ends_with('…'), "{}: {}", row.name, row.meaning);
        // The library would write it twice.
        for unit in ["_total_total", "_seconds_seconds", "_bytes_bytes"] {
            assert!(!row.name.contains(unit), "{}", row.name);
        }
    }
}
