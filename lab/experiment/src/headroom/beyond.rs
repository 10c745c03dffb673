//! Continues a curve beyond the measured lengths: as a line, or as a pool of outgrown buffers.

use super::{headroom_config, slopes};
use warden_policies::units::as_f64;

/// Two free parameters always fit fewer lengths.
const MIN_HOARD_POINTS: usize = 5;
/// The pool is assumed only if the line's error is this many times larger; smaller ratios are chance.
const HOARD_ERROR_RATIO: f64 = 4.0;

/// Returns the tokens in all buffers of a pool after a prompt. Each micro-batch requests a buffer for all
/// tokens so far; the pool reuses a buffer that is large enough and keeps outgrown ones.
pub(super) fn hoarded_tokens(tokens: u64, ubatch: u64) -> f64 {
    let look_ahead = headroom_config().look_ahead;
    let (mut held, mut largest, mut seen) = (0.0, 0.0, 0);
    while seen < tokens {
        seen = tokens.min(seen + ubatch.max(1));
        if as_f64(seen) > largest {
            largest = as_f64(seen) * look_ahead;
            held += largest;
        }
    }
    held
}

/// Returns the slope beyond the last point: bytes per token, and bytes per token of [`hoarded_tokens`].
pub(super) fn continuation(points: &[(u64, f64)], ubatch: u64) -> Option<(f64, f64)> {
    let last = *points.last()?;
    let above: Vec<(u64, f64)> = points.iter().copied().filter(|(tokens, _)| *tokens > ubatch).collect();
    // Differences from the last point: hoarded tokens, tokens, bytes.
    let end = hoarded_tokens(last.0, ubatch);
    let rows: Vec<(f64, f64, f64)> = above
        .iter()
        .rev()
        .skip(1)
        .map(|(tokens, bytes)| {
            (end - hoarded_tokens(*tokens, ubatch), as_f64(last.0 - tokens), last.1 - bytes)
        })
        .collect();
    if rows.len() + 1 >= MIN_HOARD_POINTS
        && let Some(hoards) = fit_hoarding_pool(&rows)
    {
        return Some(hoards);
    }
    let upper: Vec<(u64, f64)> = points.iter().copied().filter(|(tokens, _)| *tokens >= last.0 / 2).collect();
    let mut slopes = slopes(if upper.len() > 1 { &upper } else { points }, 0);
    slopes.sort_by(f64::total_cmp);
    let slope = slopes.get(slopes.len() / 2).copied().unwrap_or_else(|| last.1 / as_f64(last.0.max(1)));
    Some((slope, 0.0))
}

/// Fits a pool plus a cost per token by non-negative least squares; `None` if the cost alone fits nearly as
/// well.
fn fit_hoarding_pool(rows: &[(f64, f64, f64)]) -> Option<(f64, f64)> {
    let sum = |of: fn(&(f64, f64, f64)) -> f64| rows.iter().map(of).sum::<f64>();
    let (hh, tt, ht) = (sum(|r| r.0 * r.0), sum(|r| r.1 * r.1), sum(|r| r.0 * r.1));
    let (hy, ty) = (sum(|r| r.0 * r.2), sum(|r| r.1 * r.2));
    let error = |(token, buffer): (f64, f64)| -> f64 {
        rows.iter().map(|r| (r.2 - buffer * r.0 - token * r.1).powi(2)).sum()
    };
    let line = error((ty / tt, 0.0));
    let mut best = (0.0, (hy / hh).max(0.0));
    let both = hh * tt - ht * ht;
    // With nearly proportional columns, one column suffices.
    if both > 1e-9 * hh * tt {
        let found = ((ty * hh - hy * ht) / both, (hy * tt - ty * ht) / both);
        if found.0 >= 0.0 && found.1 >= 0.0 && error(found) < error(best) {
            best = found;
        }
    }
    (HOARD_ERROR_RATIO * error(best) < line).then_some(best)
}
