//! Macros that declare metrics, so that name, unit, labels and meaning of a metric are written once.
//!
//! docs/metrics.md explains the terms. Its tables are generated from these declarations by a test in
//! `metrics_page`; the first sentence of a meaning is the `# HELP` of the metric.

#[cfg(test)]
use prometheus_client::metrics::counter::Counter;
#[cfg(test)]
use prometheus_client::metrics::family::Family;
#[cfg(test)]
use prometheus_client::metrics::gauge::Gauge;
#[cfg(test)]
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry, Unit};

/// Prefix of every name.
pub(super) const PREFIX: &str = "llama_warden";

/// Declares structs of labels.
macro_rules! labels {
    ($($visible:vis $name:ident { $($field:ident: $type:ty),* })*) => {$(
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prometheus_client::encoding::EncodeLabelSet)]
        $visible struct $name { $($visible $field: $type),* }

        #[cfg(test)]
        impl super::families::LabelNames for $name {
            const NAMES: &'static [&'static str] = &[$(stringify!($field)),*];
        }
    )*};
}

/// Declares a struct of metrics, each with its name, optional unit and meaning. Other fields of the
/// struct are given in parentheses after its name.
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
                $(super::families::add(registry, $metric, families!(@unit $($unit)?), $meaning, self.$field.clone());)*
            }

            /// The declared metrics, for the documentation.
            #[cfg(test)]
            pub(super) fn rows() -> Vec<super::families::MetricRow> {
                vec![$(super::families::MetricRow::of::<$type>($metric, families!(@unit $($unit)?), $meaning)),*]
            }
        }
    };
}

pub(super) use {families, labels};

/// Label names of a set of labels.
#[cfg(test)]
pub(super) trait LabelNames {
    const NAMES: &'static [&'static str];
}

/// Kind and labels of a metric type.
#[cfg(test)]
pub(super) trait MetricShape {
    /// Prometheus' word for the kind.
    const KIND: &'static str;
    const LABELS: &'static [&'static str] = &[];
}

#[cfg(test)]
impl<N, A> MetricShape for Counter<N, A> {
    const KIND: &'static str = "counter";
}

#[cfg(test)]
impl<N, A> MetricShape for Gauge<N, A> {
    const KIND: &'static str = "gauge";
}

#[cfg(test)]
impl MetricShape for Histogram {
    const KIND: &'static str = "histogram";
}

#[cfg(test)]
impl<L: LabelNames, M: MetricShape, C> MetricShape for Family<L, M, C> {
    const KIND: &'static str = M::KIND;
    const LABELS: &'static [&'static str] = L::NAMES;
}

/// A metric as a row of the documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg(test)]
pub(super) struct MetricRow {
    pub(super) name: String,
    pub(super) kind: &'static str,
    pub(super) labels: &'static [&'static str],
    pub(super) meaning: &'static str,
}

#[cfg(test)]
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

/// Returns the first sentence of a meaning, without Markdown and without its full stop, which the library
/// adds.
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

/// Converts to the older text format, in which a counter is declared by its full name with `_total`. For
/// `promtool check metrics` and clients that do not ask for `OpenMetrics`.
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
