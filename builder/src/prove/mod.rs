//! Verifies a patch set on this machine in an unreviewed tree.
//!
//! `conform` compiles and runs the set's own program with the tree's code; `compare` sends the same requests
//! to an unpatched and a patched server. Callers decide if the results suffice, and store them.

mod channel;
mod compare;
mod conform;
mod questions;

pub use compare::{BuildPair, PART_TIMEOUT, compare_builds};
pub use conform::run_conformance;

/// The current time for a record: RFC 3339 in UTC.
pub fn now() -> String {
    crate::clock::utc_now()
}

/// This machine for a record: host name, kernel, architecture and CPU.
pub fn host_description() -> String {
    let here = crate::store::BuildHost::current();
    let parts = [here.name, here.kernel, here.machine, here.cpu];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
}
