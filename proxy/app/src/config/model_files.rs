//! What model files say, read once: a reload, a plan and a folder of models ask for the same again and again.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::SystemTime;

use warden_builder::gguf::{self, Facts};
use warden_policies::book::{Described, Shape};

/// Bytes, and when it was written.
pub(crate) type Stamp = (u64, Option<SystemTime>);

type Known = HashMap<PathBuf, (Stamp, Arc<Facts>)>;

static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

/// More than anybody has in a folder.
const MOST: usize = 4096;

/// What tells one version of a file from another.
pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
    let facts = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some((facts.len(), facts.modified().ok()))
}

/// What a model file says; else why that is not known.
pub(crate) fn facts(path: &Path) -> Result<Arc<Facts>, String> {
    let stamp = stamp(path);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let (Some(stamp), Some((of, facts))) = (stamp, known().get(path))
        && *of == stamp
    {
        return Ok(Arc::clone(facts));
    }
    let facts = Arc::new(gguf::read(path).map_err(|error| error.to_string())?);
    if let Some(stamp) = stamp {
        let mut known = known();
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(path.to_owned(), (stamp, Arc::clone(&facts)));
    }
    Ok(facts)
}

/// Its shape, for what it needs.
pub(crate) fn shape(facts: &Facts) -> Result<Shape, String> {
    Shape::of(&Described {
        architecture: facts.architecture().to_owned(),
        numbers: facts.numbers.clone(),
        lengths: facts.lengths.clone(),
        tensors: facts.tensors.iter().map(|tensor| (tensor.name.clone(), tensor.bytes)).collect(),
    })
}
