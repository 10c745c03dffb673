//! Settings of a server under test.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of a server under test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TrialSettings {
    /// Time limit of each start and each answer.
    pub(crate) timeout: Duration,
    /// The model is offloaded to a GPU, if the server sees one.
    pub(crate) gpu: bool,
    /// This machine's GPUs are hidden.
    pub(crate) hide_gpus: bool,
    /// Folder with libraries that the dynamic loader prefers.
    pub(crate) libraries: Option<PathBuf>,
    /// Additional environment variables.
    pub(crate) variables: Vec<(String, String)>,
}
