//! How a server is tried.

use std::path::PathBuf;
use std::time::Duration;

/// How a server is tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Trial {
    /// Bounds each start and each answer.
    pub(crate) timeout: Duration,
    /// Whether the model goes to a GPU, if the server sees one.
    pub(crate) gpu: bool,
    /// Whether this machine's GPUs are hidden from it.
    pub(crate) hide: bool,
    /// A folder with libraries that its loader takes before others.
    pub(crate) libraries: Option<PathBuf>,
    /// Variables that it gets.
    pub(crate) variables: Vec<(String, String)>,
}
