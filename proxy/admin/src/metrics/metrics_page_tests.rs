//! The tables of docs/metrics.md: printed from the declarations, and compared with the exported metrics.

use std::collections::{BTreeMap, BTreeSet};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Unit;

use super::event_metrics::EventMetrics;
use super::families::PREFIX;
use super::growth_metrics::GrowthMetrics;
use super::key_metrics::KeyMetrics;
use super::machine_metrics::MachineMetrics;
use super::model_metrics::ModelMetrics;
use super::pool_metrics::{PoolMetrics, VllmMetrics};
use super::registry::OwnMetrics;
use super::report_metrics::ReportMetrics;
use super::request_metrics::RequestMetrics;
use crate::printed::{TABLE_END_MARK, check_page};

/// Label names of a set of labels.
pub(super) trait LabelNames {
    const NAMES: &'static [&'static str];
}

/// Kind and labels of a metric type.
pub(super) trait MetricShape {
    /// Prometheus' name of the metric type.
    const KIND: &'static str;
    const LABELS: &'static [&'static str] = &[];
}

impl<N, A> MetricShape for Counter<N, A> {
    const KIND: &'static str = "counter";
}

impl<N, A> MetricShape for Gauge<N, A> {
    const KIND: &'static str = "gauge";
}

impl MetricShape for Histogram {
    const KIND: &'static str = "histogram";
}

impl<L: LabelNames, M: MetricShape, C> MetricShape for Family<L, M, C> {
    const KIND: &'static str = M::KIND;
    const LABELS: &'static [&'static str] = L::NAMES;
}

/// A metric as a row of the documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MetricRow {
    pub(super) name: String,
    pub(super) kind: &'static str,
    pub(super) labels: &'static [&'static str],
    pub(super) meaning: &'static str,
}

impl MetricRow {
    pub(super) fn of<M: MetricShape>(name: &str, unit: Option<Unit>, meaning: &'static str) -> Self {
        let unit = unit.map(|unit| format!("_{}", unit.as_str())).unwrap_or_default();
        let total = if M::KIND == "counter" { "_total" } else { "" };
        // Metrics with another project's names keep the prefix of that project.
        let prefix = if name.contains(':') { String::new() } else { format!("{PREFIX}_") };
        let name = format!("{prefix}{name}{unit}{total}");
        Self { name, kind: M::KIND, labels: M::LABELS, meaning }
    }
}

const HEAD: &str = "| name | kind | labels | meaning |\n|---|---|---|---|\n";

/// The tables with their names.
fn tables() -> [(&'static str, Vec<MetricRow>); 10] {
    [
        ("requests", RequestMetrics::rows()),
        ("models", ModelMetrics::rows()),
        ("events", EventMetrics::rows()),
        ("growth", GrowthMetrics::rows()),
        ("machine", MachineMetrics::rows()),
        ("reports", ReportMetrics::rows()),
        ("keys", KeyMetrics::rows()),
        ("own", OwnMetrics::rows()),
        ("pool", PoolMetrics::rows()),
        ("vllm", VllmMetrics::rows()),
    ]
}

/// Kind and labels of every declared metric, by name.
pub(super) fn declared() -> BTreeMap<String, (&'static str, BTreeSet<&'static str>)> {
    let rows = tables().into_iter().flat_map(|(_, rows)| rows);
    rows.map(|row| (row.name, (row.kind, row.labels.iter().copied().collect()))).collect()
}

fn table(rows: &[MetricRow]) -> String {
    let line = |row: &MetricRow| {
        let (labels, meaning) = (row.labels.join(", "), row.meaning.replace('|', "\\|"));
        format!("| `{}` | {} | {labels} | {meaning} |\n", row.name, row.kind)
    };
    rows.iter().map(line).collect()
}

/// `WARDEN_RENEW_DOCS=1` rewrites the page.
#[test]
fn the_tables_of_metrics_are_those_that_are_declared() {
    let tables = tables().map(|(name, rows)| {
        let start = format!("<!-- metrics: {name} -->\n");
        let whole = format!("{start}{HEAD}{}{TABLE_END_MARK}", table(&rows));
        (start, whole)
    });
    check_page("metrics.md", tables).unwrap();
}

#[test]
fn no_metric_is_declared_twice_and_each_says_what_it_means_in_sentences() {
    let rows: Vec<MetricRow> = tables().into_iter().flat_map(|(_, rows)| rows).collect();
    assert_eq!(declared().len(), rows.len(), "two have one name");
    for row in rows {
        assert!(row.meaning.ends_with('.') || row.meaning.ends_with('…'), "{}: {}", row.name, row.meaning);
        // The library would add the suffix twice.
        for unit in ["_total_total", "_seconds_seconds", "_bytes_bytes"] {
            assert!(!row.name.contains(unit), "{}", row.name);
        }
    }
}
