//! Replacements of processes: the checks before one, its steps and its result.

pub(super) mod needs;
pub(super) mod pace;
mod record;
mod replace;
mod tracker;

pub(crate) use self::record::{Replacement, decision_for};
pub(crate) use self::tracker::ReplacementTracker;
