//! Reads the files that the tracer (`lab/tracer`) publishes, and names the places that allocate.
//!
//! ```text
//!   library ──> a file ──> LD_PRELOAD ──> DIR/PID.trace ──> TraceSnapshot ────┐
//!                                         /proc/PID/maps ──> ProcessModules ──┼──> places, growth since
//!                                                                             ┘    an earlier snapshot
//! ```
//!
//! The crate embeds the library, so that only the program needs to be installed. It starts no process.
//!
//! | file | content |
//! |---|---|
//! | `layout` | layout of the published file, shared with the tracer |
//! | `snapshot` | parses the file |
//! | `modules`, `symbols` | resolve addresses to functions |
//! | `preload` | detects programs that cannot be traced |
//! | `places` | groups call sites by the function that matters, and computes growth |

#[path = "../../src/layout.rs"]
pub mod layout;
mod modules;
mod places;
mod preload;
mod snapshot;
mod symbols;

use std::io;
use std::path::{Path, PathBuf};

pub use layout::AllocationKind;
pub use modules::ProcessModules;
pub use places::{AllocationPlace, TracedMemory, group_by_place};
pub use preload::{PreloadObstacle, preload_obstacle};
pub use snapshot::{CallSite, TraceError, TraceLosses, TraceSnapshot};
pub use symbols::{CallFrame, SymbolTables};

/// Environment variable with the folder in which traced processes publish.
pub const TRACE_VARIABLE: &str = "LLAMA_WARDEN_TRACE";

/// The embedded library; empty in a program built without it.
static LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libwarden_tracer.so"));

/// Returns true if this program embeds the library.
pub fn has_library() -> bool {
    !LIBRARY.is_empty()
}

/// Writes the library into a folder for preloading, and returns its path.
///
/// # Errors
/// The program was built without the library, or the folder is not writable.
pub fn write_library(folder: &Path) -> io::Result<PathBuf> {
    if !has_library() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "this program was built without the tracer"));
    }
    let path = folder.join("libwarden_tracer.so");
    std::fs::write(&path, LIBRARY)?;
    Ok(path)
}
