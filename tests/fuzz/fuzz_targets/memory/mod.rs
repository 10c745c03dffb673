//! Where a target puts what is read from files: in memory where there is such a place.

use std::path::PathBuf;

/// A path of this process's own.
pub fn path(end: &str) -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let folder = if memory.is_dir() { memory } else { std::env::temp_dir() };
    folder.join(format!("warden-fuzz-{}{end}", std::process::id()))
}
