//! Carries out effects of the life-cycle machines, and handles what their processes and helpers report.

mod act;
mod probes;
mod reports;
mod spawn;
pub(super) mod spread;
