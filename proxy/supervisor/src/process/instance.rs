//! By which process id an instance is known: that of its first process, which its successors keep.

use std::sync::OnceLock;

static ROOT: OnceLock<u32> = OnceLock::new();

/// We go on for the instance whose first process is this. Once, before anything else.
pub fn succeed(root: u32) {
    // A second call cannot make another instance of us.
    let _known = ROOT.set(root);
}

/// The process id of the instance.
pub fn id() -> u32 {
    ROOT.get().copied().unwrap_or_else(std::process::id)
}
