//! Robust statistics of a short series: Sen's slope with bounds, and the Mann-Kendall trend test, corrected
//! for autocorrelation after Hamed and Rao.
//!
//! Sources: Sen, *Estimates of the regression coefficient based on Kendall's tau* (JASA 63, 1968); Hamed and
//! Rao, *A modified Mann-Kendall trend test for autocorrelated data* (J. Hydrology 204, 1998); Marriott and
//! Pope, *Bias in the estimation of autocorrelations* (Biometrika 41, 1954). Cost grows with the square of
//! the length.

use crate::growth::IntervalEstimate;

/// Beyond this correlation, 64 residuals count as one.
const MOST_AUTOREGRESSION: f64 = 0.97;

/// Converts a length for arithmetic.
pub fn length_as_f64(length: usize) -> f64 {
    u32::try_from(length).map_or(f64::MAX, f64::from)
}

/// Returns the median, the mean of the two middle values for an even count. Reorders the values.
pub fn median(values: &mut [f64]) -> Option<f64> {
    let middle = values.len() / 2;
    if values.is_empty() {
        return None;
    }
    let even = values.len().is_multiple_of(2);
    let (below, found, _) = values.select_nth_unstable_by(middle, f64::total_cmp);
    let found = *found;
    if even {
        let other = below.iter().copied().max_by(f64::total_cmp)?;
        return Some(f64::midpoint(other, found));
    }
    Some(found)
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TrendTest {
    /// Rising pairs minus falling pairs.
    pub(super) s: f64,
    /// Variance of `s` without a trend, corrected for ties.
    pub(super) var: f64,
}

impl TrendTest {
    pub(super) fn from_values(values: &[f64]) -> Self {
        let mut s = 0.0;
        for (i, early) in values.iter().enumerate() {
            for late in &values[i + 1..] {
                s += match late.total_cmp(early) {
                    std::cmp::Ordering::Greater => 1.0,
                    std::cmp::Ordering::Less => -1.0,
                    std::cmp::Ordering::Equal => 0.0,
                };
            }
        }
        let mut sorted = values.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let of = |n: f64| n * (n - 1.0) * (2.0 * n + 5.0);
        let ties: f64 =
            sorted.chunk_by(|a, b| a.total_cmp(b).is_eq()).map(|tied| of(length_as_f64(tied.len()))).sum();
        Self { s, var: (of(length_as_f64(values.len())) - ties) / 18.0 }
    }

    /// Returns `s` in standard deviations, with continuity correction; 0 if all values are equal.
    pub(super) fn z(self) -> f64 {
        if self.var <= 0.0 || self.s == 0.0 {
            return 0.0;
        }
        (self.s - self.s.signum()) / self.var.sqrt()
    }

    /// Scales the variance to allow for autocorrelation by the `factor` of [`hamed_rao_factor`].
    pub(super) fn widened(self, factor: f64) -> Self {
        Self { var: self.var * factor, ..self }
    }
}

/// Returns the factor, at least 1, by which autocorrelation widens the variance of the Mann-Kendall S.
/// `slope`: Sen's slope per step. A lag counts only if its autocorrelation exceeds `z_lag` deviations.
pub(super) fn hamed_rao_factor(values: &[f64], slope: f64, z_lag: f64) -> f64 {
    let n = length_as_f64(values.len());
    if values.len() < 4 {
        return 1.0;
    }
    let detrended: Vec<f64> = values.iter().enumerate().map(|(i, v)| v - slope * length_as_f64(i)).collect();
    let ranks = ranks(&detrended);
    let mean = ranks.iter().sum::<f64>() / n;
    let centred: Vec<f64> = ranks.iter().map(|rank| rank - mean).collect();
    let power: f64 = centred.iter().map(|c| c * c).sum();
    if power <= 0.0 {
        return 1.0;
    }
    let limit = z_lag / n.sqrt();
    let mut sum = 0.0;
    for lag in 1..values.len() {
        let rho: f64 = centred.iter().zip(&centred[lag..]).map(|(a, b)| a * b).sum::<f64>() / power;
        if rho.abs() > limit {
            let rest = n - length_as_f64(lag);
            sum += rest * (rest - 1.0) * (rest - 2.0) * rho;
        }
    }
    (1.0 + 2.0 / (n * (n - 1.0) * (n - 2.0)) * sum).max(1.0)
}

/// Returns the factor, at least 1, by which correlation between neighbours reduces the number of independent
/// residuals. The estimate is raised after Marriott and Pope, because a short series shows too little
/// correlation.
pub(super) fn autoregression_factor(rests: &[f64], deviation: f64) -> f64 {
    let cut: Vec<f64> = rests.iter().map(|rest| rest.clamp(-3.0 * deviation, 3.0 * deviation)).collect();
    let power: f64 = cut.iter().map(|rest| rest * rest).sum();
    if power <= 0.0 {
        return 1.0;
    }
    let found = cut.windows(2).map(|two| two[0] * two[1]).sum::<f64>() / power;
    let rho = (found + (1.0 + 4.0 * found) / length_as_f64(rests.len())).min(MOST_AUTOREGRESSION);
    ((1.0 + rho) / (1.0 - rho)).max(1.0)
}

/// Returns the rank of each value, counted from 1; equal values share their mean rank.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_unstable_by(|a, b| values[*a].total_cmp(&values[*b]));
    let mut ranks = vec![0.0; values.len()];
    let mut first = 0;
    for tied in order.chunk_by(|a, b| values[*a].total_cmp(&values[*b]).is_eq()) {
        let mean = f64::midpoint(length_as_f64(first) * 2.0, length_as_f64(tied.len()) + 1.0);
        for index in tied {
            ranks[*index] = mean;
        }
        first += tied.len();
    }
    ranks
}

/// Returns the slopes between all pairs of points, except pairs with equal x.
fn slopes(xs: &[f64], ys: &[f64]) -> Vec<f64> {
    let mut slopes = Vec::with_capacity(xs.len() * xs.len() / 2);
    for i in 0..xs.len() {
        for j in i + 1..xs.len() {
            let run = xs[j] - xs[i];
            if run > 0.0 {
                slopes.push((ys[j] - ys[i]) / run);
            }
        }
    }
    slopes
}

/// Returns Sen's slope: the median slope of all pairs of points; `None` without two different x.
pub fn sen_slope(xs: &[f64], ys: &[f64]) -> Option<f64> {
    median(&mut slopes(xs, ys))
}

/// Returns Sen's slope with bounds `z` deviations to each side, from the variance `var` of S.
pub(super) fn sen_slope_with_bounds(xs: &[f64], ys: &[f64], var: f64, z: f64) -> Option<IntervalEstimate> {
    let mut slopes = slopes(xs, ys);
    let value = median(&mut slopes)?;
    let half = z * var.max(0.0).sqrt();
    let count = length_as_f64(slopes.len());
    let low = *value_at_rank(&mut slopes, (count - half) / 2.0 - 1.0)?;
    let high = *value_at_rank(&mut slopes, f64::midpoint(count, half))?;
    Some(IntervalEstimate { value, low: low.min(value), high: high.max(value) })
}

/// Returns the value at a rank counted from 0, rounded and clamped to the ends.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "cut to the length of a vector")]
fn value_at_rank(values: &mut [f64], rank: f64) -> Option<&mut f64> {
    let last = values.len().checked_sub(1)?;
    let rank = (rank.round().max(0.0) as usize).min(last);
    Some(values.select_nth_unstable_by(rank, f64::total_cmp).1)
}

/// Returns the scatter of points about a line of the given slope, as a robust standard deviation.
pub fn scatter(xs: &[f64], ys: &[f64], slope: f64) -> f64 {
    let mut rests: Vec<f64> = xs.iter().zip(ys).map(|(x, y)| y - slope * x).collect();
    let Some(middle) = median(&mut rests) else { return 0.0 };
    for rest in &mut rests {
        *rest = (*rest - middle).abs();
    }
    median(&mut rests).unwrap_or(0.0) * 1.4826
}

#[cfg(test)]
#[path = "stats_tests.rs"]
mod tests;
