//! Where toolkits lie, and what is said of one that is not whole.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::plan::backend::Backend;

pub(super) fn missing(backend: Backend, missing: impl Into<String>, cure: impl Into<String>) -> Error {
    Error::Toolkit { backend, missing: missing.into(), cure: cure.into() }
}

/// Folders of the system whose name begins so, the highest version first: `cuda-12.8` comes before `cuda-12.10`
/// by name, so numbers are compared as numbers.
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

/// The folder above the `bin` that a program lies in, links followed.
pub(super) fn home_of(program: &Path) -> PathBuf {
    let real = program.canonicalize().unwrap_or_else(|_| program.to_owned());
    real.ancestors().nth(2).unwrap_or(Path::new("/")).to_owned()
}
