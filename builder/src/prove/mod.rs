//! Shows a patch set to be good in a tree that nobody has looked at, as far as this machine can.
//!
//! ```text
//!  conform:  the set's own program with the tree's code ── compiled ── each scenario played ──> Done, one for each
//!  compare:  two servers, plain and patched ── the same requests ── answers, reports, what comes back ──> Done
//! ```
//!
//! Nothing here decides what is good enough, and nothing is written down here: what was shown is a value.

mod channel;
mod compare;
mod conform;
mod questions;
mod report;

pub use compare::{PATIENCE, Pair, compare};
pub use conform::conform;

/// Now, as a record says it: RFC 3339 in UTC.
pub fn now() -> String {
    crate::clock::now()
}

/// This machine, as a record says it: its name, its kernel, its CPU.
pub fn host() -> String {
    let here = crate::store::Host::here();
    let parts = [here.name, here.kernel, here.machine, here.cpu];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
}
