//! The table of leaks: rates and their intervals.

use crate::leaks::Leaking;
use crate::recorded::{MIB, real};
use crate::seen::{Seen, is_right, is_wrong};

pub(crate) struct Row {
    pub(crate) kind: Leaking,
    pub(crate) runs: Vec<Seen>,
}

impl Row {
    pub(crate) const HEAD: &'static str = "| leak | found | suspected at | found at | MiB by then | wrong blame at first \
        | wrong at some time | right at first | right at the end | slope, % | forecasts too long by half | interval holds |\n\
        |---|---|---|---|---|---|---|---|---|---|---|---|";

    fn count(&self, what: impl Fn(&Seen) -> bool) -> usize {
        self.runs.iter().filter(|run| what(run)).count()
    }

    fn found(&self) -> usize {
        self.count(|run| run.found.is_some())
    }

    pub(crate) fn fell_back(&self) -> usize {
        self.count(|run| run.fell_back)
    }

    pub(crate) fn wrong_first(&self) -> usize {
        self.count(|run| is_wrong(self.kind.pays, run.first.as_ref()))
    }

    fn ever_wrong(&self) -> usize {
        self.count(|run| run.ever_wrong)
    }

    /// Returns the number of wrong blames if a single unit causes the leak.
    pub(crate) fn wrong_of_one(&self) -> usize {
        if self.kind.pays.len() == 1 { self.ever_wrong() } else { 0 }
    }

    fn right_first(&self) -> usize {
        self.count(|run| is_right(self.kind.pays, run.first.as_ref()))
    }

    fn right_last(&self) -> usize {
        self.count(|run| is_right(self.kind.pays, run.last.as_ref()))
    }

    /// Returns the number of runs without a right blame at the end.
    pub(crate) fn unsaid(&self) -> usize {
        self.runs.len() - self.right_last()
    }

    pub(crate) fn missed(&self) -> usize {
        self.runs.len() - self.found()
    }

    /// Returns the number of forecasts that are too long by half, and of all forecasts.
    pub(crate) fn too_long(&self) -> (usize, usize) {
        let all = || self.runs.iter().flat_map(|run| &run.told);
        (all().filter(|told| told.value > 1.5 * told.truth).count(), all().count())
    }

    /// Returns the number of forecasts whose interval misses the truth, and of all forecasts.
    pub(crate) fn astray(&self) -> (usize, usize) {
        let all = || self.runs.iter().flat_map(|run| &run.told);
        (all().filter(|told| !(told.low..=told.high).contains(&told.truth)).count(), all().count())
    }

    pub(crate) fn print(&self) {
        let middle_of =
            |what: &dyn Fn(&Seen) -> Option<f64>| middle(self.runs.iter().filter_map(what).collect());
        let (long, told) = self.too_long();
        println!(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {long}/{told} | {} |",
            self.kind.name,
            rate(self.found(), self.runs.len()),
            middle_of(&|run| run.suspected.map(real)),
            middle_of(&|run| run.found.map(real)),
            middle_of(&|run| run.found.map(|_| run.cost / MIB)),
            rate(self.wrong_first(), self.runs.len()),
            rate(self.ever_wrong(), self.runs.len()),
            self.right_first(),
            self.right_last(),
            middle_of(&|run| run.slope.map(|slope| 100.0 * slope)),
            rate(told - self.astray().0, told),
        );
    }
}

fn middle(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).map_or_else(|| "-".to_owned(), |value| format!("{value:.0}"))
}

fn wilson(hits: usize, of: usize) -> (f64, f64) {
    if of == 0 {
        return (0.0, 1.0);
    }
    let (n, z) = (real(of as u64), 1.96_f64);
    let rate = real(hits as u64) / n;
    let middle = rate + z * z / (2.0 * n);
    let half = z * (rate * (1.0 - rate) / n + z * z / (4.0 * n * n)).sqrt();
    let whole = 1.0 + z * z / n;
    (((middle - half) / whole).max(0.0), ((middle + half) / whole).min(1.0))
}

/// Formats a rate: `3/20 (5-36 %)`.
pub(crate) fn rate(hits: usize, of: usize) -> String {
    let (low, high) = wilson(hits, of);
    format!("{hits}/{of} ({:.0}-{:.0} %)", low * 100.0, high * 100.0)
}
