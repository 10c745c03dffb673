//! Replacements of processes: the checks before one, its steps and its result.

pub(super) mod needs;
pub(super) mod pace;
pub(super) mod record;
mod replace;
pub(super) mod tracker;
