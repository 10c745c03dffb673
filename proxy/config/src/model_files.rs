//! A cache of parsed model files, because reloads, memory plans and model folders read the same files
//! repeatedly.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::SystemTime;

use warden_builder::gguf::{self, GgufFacts};
use warden_policies::book::{GgufDescription, ModelShape};

/// Size in bytes and modification time of a file.
pub type ModelFileStamp = (u64, Option<SystemTime>);

/// The facts from a model file that llama-warden uses.
pub struct ModelFile {
    /// Text values of the metadata by key, without long ones.
    pub texts: BTreeMap<String, String>,
    /// Value of `general.architecture`.
    pub architecture: String,
    /// True if the file has tensors; a file with only a vocabulary has none.
    pub has_tensors: bool,
    /// Dimensions that determine memory needs, or the reason why they are unknown.
    pub shape: Result<ModelShape, String>,
}

impl ModelFile {
    fn from_facts(facts: GgufFacts) -> Self {
        let architecture = facts.architecture().to_owned();
        let has_tensors = !facts.tensors.is_empty();
        let described = GgufDescription {
            architecture: architecture.clone(),
            numbers: facts.numbers,
            lengths: facts.lengths,
            tensors: facts.tensors.into_iter().map(|tensor| (tensor.name, tensor.bytes)).collect(),
        };
        Self { texts: facts.texts, architecture, has_tensors, shape: ModelShape::from_file(&described) }
    }
}

type ModelFileCache = HashMap<PathBuf, (ModelFileStamp, Arc<ModelFile>)>;

static MODEL_FILE_CACHE: LazyLock<Mutex<ModelFileCache>> = LazyLock::new(Mutex::default);

/// Maximum number of cached files; more than any model folder has.
const MAX_CACHED_FILES: usize = 4096;

/// Returns size and modification time of a file, by which a change of its content is recognised.
pub fn file_stamp(path: &Path) -> Option<ModelFileStamp> {
    let facts = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some((facts.len(), facts.modified().ok()))
}

/// Reads a model file, or takes it from the cache.
///
/// # Errors
/// The file cannot be read, or is not a GGUF file.
pub fn read_model_file(path: &Path) -> Result<Arc<ModelFile>, String> {
    let stamp = file_stamp(path);
    let known = || MODEL_FILE_CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    if let (Some(stamp), Some((of, file))) = (stamp, known().get(path))
        && *of == stamp
    {
        return Ok(Arc::clone(file));
    }
    let file = Arc::new(ModelFile::from_facts(gguf::read(path).map_err(|error| error.to_string())?));
    if let Some(stamp) = stamp {
        let mut known = known();
        if known.len() >= MAX_CACHED_FILES {
            known.clear();
        }
        known.insert(path.to_owned(), (stamp, Arc::clone(&file)));
    }
    Ok(file)
}
