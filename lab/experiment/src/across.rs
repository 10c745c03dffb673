//! Who pays, over all legs of an experiment together.
//!
//! In one leg every request brings much the same, so a leak for each request, for each image and for each token look
//! alike. Legs of different work tell them apart: what does not grow with text is not paid by requests.

use crate::Reading;
use crate::judge::{after_start, levels};
use warden_policies::growth::{Blame, GrowthPolicy, blame_of};
use warden_policies::sample::MemoryKind;

/// Who pays for the growth of one memory. `legs`: each leg's readings in order. The start of each leg is left out, and so
/// is what went into measured pools.
pub fn blame_across(series: MemoryKind, legs: &[&[Reading]], policy: &GrowthPolicy) -> Blame {
    let without_start = |readings: &&[Reading]| after_start(&levels(series, readings, false)).to_vec();
    let processes: Vec<_> = legs.iter().map(without_start).collect();
    blame_of(&processes, policy)
}
