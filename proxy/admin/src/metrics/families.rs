//! Macros that declare metrics, so that name, unit, labels and meaning of a metric are written once.
//!
//! docs/metrics.md explains the terms. Its tables are generated from these declarations by a test in
//! `metrics_page_tests`; the first sentence of a meaning is the `# HELP` of the metric.

use std::hash::Hash;
use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry, Unit};

pub(super) const PREFIX: &str = "llama_warden";

macro_rules! labels {
    ($($visible:vis $name:ident { $($field:ident: $type:ty),* })*) => {$(
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prometheus_client::encoding::EncodeLabelSet)]
        $visible struct $name { $($visible $field: $type),* }

        #[cfg(test)]
        impl super::metrics_page_tests::LabelNames for $name {
            const NAMES: &'static [&'static str] = &[$(stringify!($field)),*];
        }
    )*};
}

/// Declares a struct of metrics, each with its name, optional unit and meaning. Other fields of the struct
/// follow its name in parentheses.
macro_rules! families {
    (@new) => { Default::default() };
    (@new $value:expr) => { $value };
    (@unit) => { None };
    (@unit $unit:expr) => { Some($unit) };
    ($visible:vis struct $name:ident ($($other:ident: $other_type:ty),*) {
        $($field:ident: $type:ty $([$value:expr])? = $metric:literal $(in $unit:expr)?, $meaning:literal;)*
    }) => {
        $visible struct $name { $($other: $other_type,)* $($field: $type,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($other: Default::default(),)* $($field: families!(@new $($value)?),)* }
            }
        }

        impl $name {
            pub(super) fn register(&self, registry: &mut prometheus_client::registry::Registry) {
                use super::families::add;
                $(add(registry, $metric, families!(@unit $($unit)?), $meaning, self.$field.clone());)*
            }

            #[cfg(test)]
            pub(super) fn rows() -> Vec<super::metrics_page_tests::MetricRow> {
                use super::metrics_page_tests::MetricRow;
                vec![$(MetricRow::of::<$type>($metric, families!(@unit $($unit)?), $meaning)),*]
            }
        }

        impl super::families::ClearGauges for $name {
            fn clear_gauges(&self) {
                $(super::families::ClearGauges::clear_gauges(&self.$field);)*
            }
        }
    };
}

pub(super) use {families, labels};

/// Removes the lines of gauges with labels, so that unknown values have no line.
pub(super) trait ClearGauges {
    fn clear_gauges(&self) {}
}

impl<L, N, A, C> ClearGauges for Family<L, Gauge<N, A>, C>
where
    L: Clone + Hash + Eq,
    C: MetricConstructor<Gauge<N, A>>,
{
    fn clear_gauges(&self) {
        self.clear();
    }
}

impl<L, N, A, C> ClearGauges for Family<L, Counter<N, A>, C> {}
impl<L, C> ClearGauges for Family<L, Histogram, C> {}
impl<N, A> ClearGauges for Counter<N, A> {}
impl<N, A> ClearGauges for Gauge<N, A> {}

/// Registers a metric. The library appends the unit to the name, and `_total` to the name of a counter.
pub(super) fn add(
    registry: &mut Registry,
    name: &str,
    unit: Option<Unit>,
    meaning: &str,
    metric: impl Metric,
) {
    let help = help_text(meaning);
    match unit {
        Some(unit) => registry.register_with_unit(name, help, unit, metric),
        None => registry.register(name, help, metric),
    }
}

/// Returns the first sentence of a meaning, without Markdown or the full stop, which the library adds.
fn help_text(meaning: &str) -> String {
    let sentence = meaning.split_once(". ").map_or(meaning, |(first, _)| first).trim_end_matches('.');
    let mut text = String::with_capacity(sentence.len());
    let mut rest = sentence;
    while let Some((before, link)) = rest.split_once('[') {
        let Some((words, after)) = link.split_once("](") else { break };
        let Some((_, after)) = after.split_once(')') else { break };
        text.extend([before, words]);
        rest = after;
    }
    text.push_str(rest);
    text.retain(|c| c != '`');
    text
}

/// Converts to the older text format, in which a counter is declared by its full name with `_total`.
/// `promtool check metrics`, and clients that do not accept `OpenMetrics`, read this format.
pub(crate) fn to_plain_text(open_metrics: &str) -> String {
    let mut counter = "";
    let mut text = String::with_capacity(open_metrics.len());
    let lines: Vec<&str> = open_metrics.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        let declared = line.strip_prefix("# HELP ").or_else(|| line.strip_prefix("# TYPE "));
        match declared.and_then(|rest| rest.split_once(' ')) {
            Some((name, words)) => {
                // The kind is in the `# TYPE` line, which may follow the `# HELP` line.
                let kind = lines[at..].iter().take(2).find_map(|line| line.strip_prefix("# TYPE "));
                if kind.is_some_and(|kind| kind.strip_prefix(name) == Some(" counter")) {
                    counter = name;
                }
                let total = if counter == name { "_total" } else { "" };
                text.extend([&line[..7], name, total, " ", words, "\n"]);
            }
            None if line.starts_with("# ") => {}
            None => text.extend([line, "\n"]),
        }
    }
    text
}

labels! {
    pub(super) ModelLabel { model: String }
}

pub(crate) type FloatGauge = Gauge<f64, AtomicU64>;

pub(super) fn to_gauge(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_is_the_first_sentence_in_plain_words() {
        for (meaning, wanted) in [
            ("Requests on a backend.", "Requests on a backend"),
            ("`RssAnon` of it. More of that.", "RssAnon of it"),
            (
                "Those of [canaries](canary.md#a) that ended: `worse`. And so on.",
                "Those of canaries that ended: worse",
            ),
            ("A [bracket", "A [bracket"),
        ] {
            assert_eq!(help_text(meaning), wanted);
        }
    }

    #[test]
    fn the_older_format_declares_a_counter_by_its_whole_name() {
        let open = "# HELP a_b Some.\n# TYPE a_b counter\na_b_total{x=\"# TYPE\"} 1\n# HELP a_s Some.\n# TYPE a_s gauge\n\
                    # UNIT a_s seconds\na_s 2\n# EOF\n";
        let wanted = "# HELP a_b_total Some.\n# TYPE a_b_total counter\na_b_total{x=\"# TYPE\"} 1\n# HELP a_s Some.\n\
                      # TYPE a_s gauge\na_s 2\n";
        assert_eq!(to_plain_text(open), wanted);
    }
}
