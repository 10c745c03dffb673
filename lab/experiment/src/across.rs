//! Blames a unit of work over all legs of an experiment together.
//!
//! Within one leg every request brings much the same, so leaks per request, per image and per token look
//! alike. Legs with different work separate them: a leak that text does not cause is not paid per request.

use crate::LegReading;
use crate::judge::{after_start, levels};
use warden_policies::growth::{GrowthBlame, GrowthPolicy, blame_processes};
use warden_policies::sample::MemoryKind;

/// Finds the unit of work that pays for the growth of one memory. `legs` holds each leg's readings in
/// order. The start of each leg and growth into measured pools are left out.
pub fn blame_across(series: MemoryKind, legs: &[&[LegReading]], policy: &GrowthPolicy) -> GrowthBlame {
    let without_start = |readings: &&[LegReading]| after_start(&levels(series, readings, false)).to_vec();
    let processes: Vec<_> = legs.iter().map(without_start).collect();
    blame_processes(&processes, policy)
}
