//! How a curve goes on beyond what was measured: like a line, or like a pool that keeps every buffer that became too small.

use super::{numbers, slopes};
use warden_policies::units::exact;

/// With fewer lengths above one micro-batch two prices always fit.
const MIN_HOARD_POINTS: usize = 5;
/// A pool that hoards has to explain the measurements so much better than a line: less is chance.
const HOARD_ERROR_RATIO: f64 = 4.0;

/// Tokens in all buffers that a pool holds after a prompt, if each micro-batch asks for one of as many tokens as the prompt has
/// so far, one that is large enough is used again, and one that is too small is kept.
pub(super) fn hoarded(tokens: u64, ubatch: u64) -> f64 {
    let look_ahead = numbers().look_ahead;
    let (mut held, mut largest, mut seen) = (0.0, 0.0, 0);
    while seen < tokens {
        seen = tokens.min(seen + ubatch.max(1));
        if exact(seen) > largest {
            largest = exact(seen) * look_ahead;
            held += largest;
        }
    }
    held
}

/// How the curve goes on: bytes for each token, and for each token of [`hoarded`]. `None` without a point.
pub(super) fn beyond(points: &[(u64, f64)], ubatch: u64) -> Option<(f64, f64)> {
    let last = *points.last()?;
    let above: Vec<(u64, f64)> = points.iter().copied().filter(|(tokens, _)| *tokens > ubatch).collect();
    // Distances from the last point: tokens hoarded, tokens, bytes.
    let end = hoarded(last.0, ubatch);
    let rows: Vec<(f64, f64, f64)> = above
        .iter()
        .rev()
        .skip(1)
        .map(|(tokens, bytes)| (end - hoarded(*tokens, ubatch), exact(last.0 - tokens), last.1 - bytes))
        .collect();
    if rows.len() + 1 >= MIN_HOARD_POINTS
        && let Some(hoards) = pool(&rows)
    {
        return Some(hoards);
    }
    let upper: Vec<(u64, f64)> = points.iter().copied().filter(|(tokens, _)| *tokens >= last.0 / 2).collect();
    let mut slopes = slopes(if upper.len() > 1 { &upper } else { points }, 0);
    slopes.sort_by(f64::total_cmp);
    let slope = slopes.get(slopes.len() / 2).copied().unwrap_or_else(|| last.1 / exact(last.0.max(1)));
    Some((slope, 0.0))
}

/// Least squares of a pool that hoards and a price per token, neither below zero; `None` if a price alone does nearly as well.
fn pool(rows: &[(f64, f64, f64)]) -> Option<(f64, f64)> {
    let sum = |of: fn(&(f64, f64, f64)) -> f64| rows.iter().map(of).sum::<f64>();
    let (hh, tt, ht) = (sum(|r| r.0 * r.0), sum(|r| r.1 * r.1), sum(|r| r.0 * r.1));
    let (hy, ty) = (sum(|r| r.0 * r.2), sum(|r| r.1 * r.2));
    let error = |(token, buffer): (f64, f64)| -> f64 {
        rows.iter().map(|r| (r.2 - buffer * r.0 - token * r.1).powi(2)).sum()
    };
    let line = error((ty / tt, 0.0));
    let mut best = (0.0, (hy / hh).max(0.0));
    let both = hh * tt - ht * ht;
    // Where the two columns hardly differ, one of them is enough.
    if both > 1e-9 * hh * tt {
        let found = ((ty * hh - hy * ht) / both, (hy * tt - ty * ht) / both);
        if found.0 >= 0.0 && found.1 >= 0.0 && error(found) < error(best) {
            best = found;
        }
    }
    (HOARD_ERROR_RATIO * error(best) < line).then_some(best)
}
