//! Reads the memory of processes, and decides when one is to give memory back or to be replaced.

mod answer_probe;
mod judge;
mod offload;
mod reclaim_steps;
mod sample;
pub(super) mod words;
