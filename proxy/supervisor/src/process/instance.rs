//! Identity of a running llama-warden over all handovers: the PID of its first process, which its
//! successors use, too.

use std::sync::OnceLock;

static ROOT: OnceLock<u32> = OnceLock::new();

/// Declares this process a successor of the process `root`. Call it once, before anything else.
pub fn set_root(root: u32) {
    // A second call has no effect.
    let _known = ROOT.set(root);
}

/// PID of the first process, by which the instance is known.
pub fn instance_pid() -> u32 {
    ROOT.get().copied().unwrap_or_else(std::process::id)
}
