//! Rounds of three processes, and what they say of the one in the middle.

use super::super::super::student;
use crate::growth::{Interval, stats};

/// A round that is farther from the middle of its like than so many deviations was disturbed, by something that lasted longer than a request.
const DISTURBED: f64 = 5.0;
/// Of so many rounds one may be left out.
const SPARED: usize = 4;

/// A visit of each, one behind the other: seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    pub(super) good: f64,
    pub(super) own: f64,
    pub(super) bad: f64,
}

impl Round {
    /// How far it is from this share of the way from good to bad, in logarithms.
    pub(super) fn beyond(&self, share: f64) -> f64 {
        self.own.ln() - (1.0 - share) * self.good.ln() - share * self.bad.ln()
    }

    /// How far the ends are apart.
    pub(super) fn span(&self) -> f64 {
        (self.bad / self.good).ln()
    }
}

/// Variance of [`Round::beyond`] where that of one process is 1.
pub(super) fn weight(share: f64) -> f64 {
    1.0 + (1.0 - share).powi(2) + share.powi(2)
}

/// How much processes of one build differ, from many small groups of them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Scatter {
    squares: f64,
    freedom: f64,
}

impl Scatter {
    /// Values whose variance is so many times that of one process.
    pub(super) fn with(mut self, values: &[f64], times: f64) -> Self {
        let (_, variance, freedom) = moments(values);
        self.squares += variance * freedom / times;
        self.freedom += freedom;
        self
    }

    pub(super) fn variance(self) -> f64 {
        self.squares / self.freedom.max(1.0)
    }
}

/// Mean, variance, and the degrees of freedom of that.
fn moments(values: &[f64]) -> (f64, f64, f64) {
    let count = f64::from(u32::try_from(values.len()).unwrap_or(u32::MAX)).max(1.0);
    let mean = values.iter().sum::<f64>() / count;
    let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    let freedom = count - 1.0;
    (mean, squares / freedom.max(1.0), freedom)
}

/// Those that are not far from the middle. Nothing is left out of a few.
pub(super) fn undisturbed(values: &[f64], deviation: f64) -> Vec<bool> {
    let middle = stats::median(&mut values.to_vec()).unwrap_or(0.0);
    let mut far: Vec<usize> =
        (0..values.len()).filter(|at| (values[*at] - middle).abs() > DISTURBED * deviation).collect();
    far.sort_by(|one, other| (values[*other] - middle).abs().total_cmp(&(values[*one] - middle).abs()));
    far.truncate(values.len() / SPARED);
    (0..values.len()).map(|at| !far.contains(&at)).collect()
}

/// A deviation of values of which some may be disturbed: that of the normal distribution with the same median of distances.
pub(super) fn robust(values: &[f64], least: f64) -> f64 {
    let middle = stats::median(&mut values.to_vec()).unwrap_or(0.0);
    let mut distances: Vec<f64> = values.iter().map(|value| (value - middle).abs()).collect();
    (1.4826 * stats::median(&mut distances).unwrap_or(0.0)).max(least)
}

/// On which side of a share of the way from the one end to the other a revision is.
#[derive(Debug)]
pub(super) struct Test {
    rounds: Vec<Round>,
    /// How far the ends are apart in them.
    pub(super) spans: Vec<f64>,
    /// How much processes differ, by these and all before them.
    pub(super) pooled: Scatter,
    /// However close rounds lie by chance, they differ by this much.
    least: f64,
}

impl Test {
    /// By those of these rounds that were not disturbed, and by how much processes differed before.
    pub(super) fn of(rounds: &[Round], before: Scatter, least: f64) -> Self {
        // From the middle, where a round scatters least: which were disturbed, and by how much the others scatter.
        let all: Vec<f64> = rounds.iter().map(|round| round.beyond(0.5)).collect();
        let known = (before.variance() * weight(0.5)).sqrt();
        let kept = undisturbed(&all, known.max(least));
        let rounds: Vec<Round> =
            rounds.iter().zip(kept).filter(|(_, kept)| *kept).map(|(round, _)| *round).collect();
        let beyond: Vec<f64> = rounds.iter().map(|round| round.beyond(0.5)).collect();
        let spans: Vec<f64> = rounds.iter().map(Round::span).collect();
        let pooled = before.with(&beyond, weight(0.5)).with(&spans, 2.0);
        Self { rounds, spans, pooled, least }
    }

    /// Mean, and its error.
    fn mean(&self, share: f64) -> (f64, f64) {
        let values: Vec<f64> = self.rounds.iter().map(|round| round.beyond(share)).collect();
        let (mean, own, freedom) = moments(&values);
        let variance = own.max(self.pooled.variance() * weight(share)).max(self.least.powi(2));
        (mean, (variance / (freedom + 1.0)).sqrt())
    }

    /// The chance of what was seen, or more, if it were at this share or nearer to the faster end.
    pub(super) fn above(&self, share: f64) -> f64 {
        let (mean, error) = self.mean(share);
        student::tail(mean / error, self.pooled.freedom)
    }

    /// The same, if it were nearer to the slower one.
    pub(super) fn below(&self, share: f64) -> f64 {
        let (mean, error) = self.mean(share);
        student::tail(-mean / error, self.pooled.freedom)
    }

    /// Its place between the ends, which were so far apart before, and how sure that is.
    pub(super) fn share(&self, spans: &[f64], chance: f64) -> Option<Interval> {
        let all: Vec<f64> = spans.iter().chain(&self.spans).copied().collect();
        let span = moments(&all).0;
        let (mean, error) = self.mean(0.5);
        let wide = student::quantile(chance, self.pooled.freedom) * error / span;
        let value = 0.5 + mean / span;
        (span > 0.0).then_some(Interval { value, low: value - wide, high: value + wide })
    }
}
