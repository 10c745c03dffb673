//! Identity of an instance: the PID of its first process, which its successors keep.

use std::sync::OnceLock;

static ROOT: OnceLock<u32> = OnceLock::new();

/// Declares this process a successor of the instance with this root. Call once, before anything else.
pub fn set_root(root: u32) {
    // A second call has no effect.
    let _known = ROOT.set(root);
}

/// PID by which the instance is known.
pub fn instance_pid() -> u32 {
    ROOT.get().copied().unwrap_or_else(std::process::id)
}
