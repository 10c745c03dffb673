//! Finds the unit of work that causes growth, from all legs (runs of one process) of an experiment together.
//!
//! Within one leg all requests do much the same work, so leaks per request, per image and per token look
//! alike. Legs with different work separate them: if text causes no growth, the leak is not one per request.

use crate::LegReading;
use crate::judge::{after_start, levels};
use warden_policies::growth::{GrowthBlame, GrowthPolicy, blame_processes};
use warden_policies::sample::MemoryKind;

/// Finds the unit of work that causes the growth of one kind of memory. `legs` holds each leg's readings in
/// order. The start of each leg, and growth within measured pools, are left out.
pub fn blame_across(series: MemoryKind, legs: &[&[LegReading]], policy: &GrowthPolicy) -> GrowthBlame {
    let without_start = |readings: &&[LegReading]| after_start(&levels(series, readings, false)).to_vec();
    let processes: Vec<_> = legs.iter().map(without_start).collect();
    blame_processes(&processes, policy)
}
