//! Figures of the measurement: one per round for each metric and each peer. The median is taken over ratios
//! within rounds, so that a slow period of the machine affects both sides.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use warden_rig::load::median;

pub(crate) const DIRECT: &str = "direct";
/// Peer to compare with.
pub(crate) const NGINX: &str = "nginx";

/// Name of a metric, with its unit.
pub(crate) type Metric = &'static str;

#[derive(Debug, Default)]
pub(crate) struct Figures {
    all: BTreeMap<(Metric, String), Vec<f64>>,
    metrics: Vec<Metric>,
    peers: Vec<String>,
    pub(crate) notes: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Spread {
    fn of(mut figures: Vec<f64>) -> Option<Self> {
        figures.retain(|figure| figure.is_finite());
        let median = (!figures.is_empty()).then(|| median(&mut figures))?;
        Some(Self { median, least: *figures.first()?, most: *figures.last()? })
    }
}

impl Figures {
    pub(crate) fn add(&mut self, metric: Metric, peer: &str, figure: f64) {
        if !self.metrics.contains(&metric) {
            self.metrics.push(metric);
        }
        if !self.peers.iter().any(|known| known == peer) {
            self.peers.push(peer.to_owned());
        }
        self.all.entry((metric, peer.to_owned())).or_default().push(figure);
    }

    /// Names of the llama-wardens, to which the targets apply.
    pub(crate) fn wardens(&self) -> Vec<String> {
        let others = [DIRECT, NGINX, "haproxy", "llama-swap"];
        self.peers.iter().filter(|peer| !others.contains(&peer.as_str())).cloned().collect()
    }

    fn rounds(&self, metric: Metric, peer: &str) -> &[f64] {
        self.all.get(&(metric, peer.to_owned())).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn plain(&self, metric: Metric, peer: &str) -> Option<Spread> {
        Spread::of(self.rounds(metric, peer).to_vec())
    }

    pub(crate) fn ratio(&self, metric: Metric, peer: &str) -> Option<Spread> {
        let pairs = self.rounds(metric, peer).iter().zip(self.rounds(metric, NGINX));
        Spread::of(pairs.map(|(one, nginx)| one / nginx).collect())
    }

    /// Returns the time that the peer adds to a direct request, as a multiple of the time that nginx adds.
    pub(crate) fn added_ratio(&self, metric: Metric, peer: &str) -> Option<Spread> {
        let direct = self.rounds(metric, DIRECT);
        let rounds = self.rounds(metric, peer).iter().zip(self.rounds(metric, NGINX)).zip(direct);
        Spread::of(rounds.map(|((one, nginx), direct)| (one - direct) / (nginx - direct)).collect())
    }

    pub(crate) fn table(&self) -> String {
        let mut text =
            format!("| | {} |\n|---|{}\n", self.peers.join(" | "), "---|".repeat(self.peers.len()));
        for metric in &self.metrics {
            let cells: Vec<String> = self.peers.iter().map(|peer| cell(self.plain(metric, peer))).collect();
            let _infallible = writeln!(text, "| {metric} | {} |", cells.join(" | "));
        }
        text
    }
}

fn cell(spread: Option<Spread>) -> String {
    match spread {
        None => "–".to_owned(),
        Some(Spread { median, least, most }) if least.total_cmp(&most).is_eq() => number(median),
        Some(Spread { median, least, most }) => {
            format!("{} ({}–{})", number(median), number(least), number(most))
        }
    }
}

pub(crate) fn number(figure: f64) -> String {
    match figure.abs() {
        large if large >= 1000.0 => {
            let digits = format!("{figure:.0}");
            let (sign, digits) = digits.strip_prefix('-').map_or(("", digits.as_str()), |rest| ("-", rest));
            let mut grouped = String::from(sign);
            for (at, digit) in digits.chars().enumerate() {
                if at > 0 && (digits.len() - at) % 3 == 0 {
                    grouped.push(',');
                }
                grouped.push(digit);
            }
            grouped
        }
        middle if middle >= 100.0 => format!("{figure:.0}"),
        middle if middle >= 10.0 => format!("{figure:.1}"),
        _ => format!("{figure:.2}"),
    }
}
