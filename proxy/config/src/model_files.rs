//! What model files say, read once: a reload, a plan and a folder of models ask for the same again and again.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::SystemTime;

use warden_builder::gguf::{self, Facts};
use warden_policies::book::{Described, Shape};

/// Bytes, and when it was written.
pub type Stamp = (u64, Option<SystemTime>);

/// A model file, as far as anything here asks.
pub struct ModelFile {
    /// Texts by their keys, without long ones.
    pub texts: BTreeMap<String, String>,
    /// `general.architecture`.
    pub architecture: String,
    /// Whether the file has any tensors: a vocabulary alone has none.
    pub has_tensors: bool,
    /// For what it needs; else why that cannot be told.
    pub shape: Result<Shape, String>,
}

impl ModelFile {
    fn of(facts: Facts) -> Self {
        let architecture = facts.architecture().to_owned();
        let has_tensors = !facts.tensors.is_empty();
        let described = Described {
            architecture: architecture.clone(),
            numbers: facts.numbers,
            lengths: facts.lengths,
            tensors: facts.tensors.into_iter().map(|tensor| (tensor.name, tensor.bytes)).collect(),
        };
        Self { texts: facts.texts, architecture, has_tensors, shape: Shape::of(&described) }
    }
}

type Known = HashMap<PathBuf, (Stamp, Arc<ModelFile>)>;

static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

/// More than anybody has in a folder.
const MOST: usize = 4096;

/// What tells one version of a file from another.
pub fn stamp(path: &Path) -> Option<Stamp> {
    let facts = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some((facts.len(), facts.modified().ok()))
}

/// What a model file says; else why that is not known.
///
/// # Errors
/// The file cannot be read, or is no GGUF.
pub fn read(path: &Path) -> Result<Arc<ModelFile>, String> {
    let stamp = stamp(path);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let (Some(stamp), Some((of, file))) = (stamp, known().get(path))
        && *of == stamp
    {
        return Ok(Arc::clone(file));
    }
    let file = Arc::new(ModelFile::of(gguf::read(path).map_err(|error| error.to_string())?));
    if let Some(stamp) = stamp {
        let mut known = known();
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(path.to_owned(), (stamp, Arc::clone(&file)));
    }
    Ok(file)
}
