//! Finds builds of llama-server in the store, for models that name one by id or take the newest.

use std::path::{Path, PathBuf};

/// The binary of a build: by id or the beginning of one, or the newest. `Ok(None)` if there is none; an error if the
/// beginning fits several.
pub(crate) fn find(data_dir: &Path, id: Option<&str>) -> Result<Option<PathBuf>, String> {
    // The store comes with the builder.
    let _ = (data_dir, id);
    Ok(None)
}
