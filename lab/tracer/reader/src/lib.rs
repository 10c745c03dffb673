//! Reads what the tracer publishes (`lab/tracer`), and names the places that allocate.
//!
//! ```text
//!   library ──> a file ──> LD_PRELOAD ──> DIR/PID.trace ──> Snapshot ──┐
//!                                         /proc/PID/maps ──> Modules ──┼──> places, and what grew between two snapshots
//!                                                                      ┘
//! ```
//!
//! It carries the library itself, so that nothing has to be installed beside the program. It starts nothing and decides
//! nothing.
//!
//! | file | job |
//! |---|---|
//! | `layout` | the published file, shared with the tracer |
//! | `snapshot` | its bytes as numbers |
//! | `modules`, `symbols` | addresses as functions |
//! | `preload` | what cannot be traced |
//! | `places` | call sites that mean the same to a reader, and what grew |

#[path = "../../src/layout.rs"]
pub mod layout;
mod modules;
mod places;
mod preload;
mod snapshot;
mod symbols;

use std::io;
use std::path::{Path, PathBuf};

pub use layout::Kind;
pub use modules::Modules;
pub use places::{Memory, Place, places};
pub use preload::{Obstacle, obstacle};
pub use snapshot::{Losses, Site, Snapshot, TraceError};
pub use symbols::{Frame, Symbols};

/// The variable that names the folder to publish in.
pub const VARIABLE: &str = "LLAMA_WARDEN_TRACE";

/// The library; empty in a program that was built without it.
static LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libwarden_tracer.so"));

/// Whether the library is in this program.
pub fn is_carried() -> bool {
    !LIBRARY.is_empty()
}

/// Writes the library into a folder, to be preloaded from there; returns its path.
///
/// # Errors
/// This program was built without it, or the folder cannot be written.
pub fn write_library(folder: &Path) -> io::Result<PathBuf> {
    if !is_carried() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "this program was built without the tracer"));
    }
    let path = folder.join("libwarden_tracer.so");
    std::fs::write(&path, LIBRARY)?;
    Ok(path)
}
