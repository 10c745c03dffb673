//! Room in memory: asked of the loader, used, given back.

pub(super) mod dead_starts;
mod modes;
mod orders;
pub(super) mod room;
mod start_search;
