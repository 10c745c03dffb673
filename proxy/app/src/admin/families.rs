//! Declares metrics, so that what each is called, counts and says of itself stands in one place.
//!
//! The words behind a name are those of docs/metrics.md, whose tables are printed from here (`metrics_page`, a test, renews them);
//! their first sentence is the `# HELP` of the metric.

#[cfg(test)]
use prometheus_client::metrics::counter::Counter;
#[cfg(test)]
use prometheus_client::metrics::family::Family;
#[cfg(test)]
use prometheus_client::metrics::gauge::Gauge;
#[cfg(test)]
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry, Unit};

/// In front of every name.
pub(super) const PREFIX: &str = "llama_warden";

/// Structs of labels.
macro_rules! labels {
    ($($visible:vis $name:ident { $($field:ident: $type:ty),* })*) => {$(
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prometheus_client::encoding::EncodeLabelSet)]
        $visible struct $name { $($visible $field: $type),* }

        #[cfg(test)]
        impl super::families::Labels for $name {
            const NAMES: &'static [&'static str] = &[$(stringify!($field)),*];
        }
    )*};
}

/// A struct of metrics: each with its name, its unit if it has one, and what it means. What else the struct holds stands in
/// parentheses behind its name.
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

            /// What it declares, for the documentation.
            #[cfg(test)]
            pub(super) fn rows() -> Vec<super::families::Row> {
                vec![$(super::families::Row::of::<$type>($metric, families!(@unit $($unit)?), $meaning)),*]
            }
        }
    };
}

pub(super) use {families, labels};

/// The names of a set of labels.
#[cfg(test)]
pub(super) trait Labels {
    const NAMES: &'static [&'static str];
}

/// What a metric is.
#[cfg(test)]
pub(super) trait Shape {
    /// As Prometheus calls it.
    const KIND: &'static str;
    const LABELS: &'static [&'static str] = &[];
}

#[cfg(test)]
impl<N, A> Shape for Counter<N, A> {
    const KIND: &'static str = "counter";
}

#[cfg(test)]
impl<N, A> Shape for Gauge<N, A> {
    const KIND: &'static str = "gauge";
}

#[cfg(test)]
impl Shape for Histogram {
    const KIND: &'static str = "histogram";
}

#[cfg(test)]
impl<L: Labels, M: Shape, C> Shape for Family<L, M, C> {
    const KIND: &'static str = M::KIND;
    const LABELS: &'static [&'static str] = L::NAMES;
}

/// A metric as the documentation has it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg(test)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) kind: &'static str,
    pub(super) labels: &'static [&'static str],
    pub(super) meaning: &'static str,
}

#[cfg(test)]
impl Row {
    pub(super) fn of<M: Shape>(name: &str, unit: Option<Unit>, meaning: &'static str) -> Self {
        let unit = unit.map(|unit| format!("_{}", unit.as_str())).unwrap_or_default();
        let total = if M::KIND == "counter" { "_total" } else { "" };
        // Those of others have a prefix of their own.
        let prefix = if name.contains(':') { String::new() } else { format!("{PREFIX}_") };
        let name = format!("{prefix}{name}{unit}{total}");
        Self { name, kind: M::KIND, labels: M::LABELS, meaning }
    }
}

/// The library adds `_total` to counters and the unit to what has one.
pub(super) fn add(
    registry: &mut Registry,
    name: &str,
    unit: Option<Unit>,
    meaning: &str,
    metric: impl Metric,
) {
    let help = help(meaning);
    match unit {
        Some(unit) => registry.register_with_unit(name, help, unit, metric),
        None => registry.register(name, help, metric),
    }
}

/// The first sentence of what a metric means, without marks of Markdown and without its full stop, which the library adds.
fn help(meaning: &str) -> String {
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

/// The same for those who read the older format, in which a counter is declared by its whole name: `promtool check metrics`, and
/// whoever does not ask for `OpenMetrics`.
pub(crate) fn plain_text(open_metrics: &str) -> String {
    let mut counter = "";
    let mut text = String::with_capacity(open_metrics.len());
    let lines: Vec<&str> = open_metrics.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        let declared = line.strip_prefix("# HELP ").or_else(|| line.strip_prefix("# TYPE "));
        match declared.and_then(|rest| rest.split_once(' ')) {
            Some((name, words)) => {
                // `# HELP` comes first, and which kind it is stands in the next line.
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
            assert_eq!(help(meaning), wanted);
        }
    }

    #[test]
    fn the_older_format_declares_a_counter_by_its_whole_name() {
        let open = "# HELP a_b Some.\n# TYPE a_b counter\na_b_total{x=\"# TYPE\"} 1\n# HELP a_s Some.\n# TYPE a_s gauge\n\
                    # UNIT a_s seconds\na_s 2\n# EOF\n";
        let wanted = "# HELP a_b_total Some.\n# TYPE a_b_total counter\na_b_total{x=\"# TYPE\"} 1\n# HELP a_s Some.\n\
                      # TYPE a_s gauge\na_s 2\n";
        assert_eq!(plain_text(open), wanted);
    }
}
