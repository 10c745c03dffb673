//! Helpers for locating toolkits, and the error about an incomplete one.

use std::path::{Path, PathBuf};

use crate::error::BuilderError;
use crate::plan::backend::ComputeBackend;

pub(super) fn missing_part(
    backend: ComputeBackend,
    missing: impl Into<String>,
    cure: impl Into<String>,
) -> BuilderError {
    BuilderError::Toolkit { backend, missing: missing.into(), cure: cure.into() }
}

/// Subfolders with a name prefix, the highest version first. Versions are compared as numbers: `cuda-12.10`
/// comes before `cuda-12.8`.
pub(super) fn versioned_folders(parent: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let mut found: Vec<(Vec<u32>, PathBuf)> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let numbers = name.strip_prefix(prefix)?.split('.').map(str::parse);
            Some((numbers.collect::<Result<_, _>>().ok()?, entry.path()))
        })
        .collect();
    found.sort();
    found.into_iter().rev().map(|(_, path)| path).collect()
}

/// Parent of the program's `bin` folder, after resolving links.
pub(super) fn program_home(program: &Path) -> PathBuf {
    let real = program.canonicalize().unwrap_or_else(|_| program.to_owned());
    real.ancestors().nth(2).unwrap_or(Path::new("/")).to_owned()
}
