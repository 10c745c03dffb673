//! Place for files that a target reads: in memory if possible.

use std::path::PathBuf;

/// Returns a path of this process's own.
pub fn path(end: &str) -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let folder = if memory.is_dir() { memory } else { std::env::temp_dir() };
    folder.join(format!("warden-fuzz-{}{end}", std::process::id()))
}
