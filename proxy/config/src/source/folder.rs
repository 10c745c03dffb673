//! Folders of models: each model file becomes a model named after the file, with its projector and a context
//! size that fits into memory.
//!
//! Settings found in this way have lower priority than the configuration, so `[models."name"]` extends or
//! overrides them.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use warden_policies::book::{self, MachineCapacity as Room, PlacementRequest, ServerBuild, ServerRun};
use warden_policies::defaults;
use warden_sensors::gpu::GpuSensors;

use crate::machine::{left_for_models, own_memory};
use crate::model_files::{self, ModelFile, ModelFileStamp};

/// Maximum depth of nested folders; the cache of a model hub has five levels.
const MAX_FOLDER_DEPTH: usize = 8;
/// Maximum default context in tokens, even if the model was trained with more; `args` may set more.
const MAX_DEFAULT_CONTEXT: u64 = 32_768;
/// Minimum default context in tokens, because a smaller context is of no use.
const MIN_DEFAULT_CONTEXT: u64 = 2_048;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FolderModel {
    pub(crate) name: String,
    pub(crate) file: PathBuf,
    pub(crate) projector: Option<PathBuf>,
    /// Context size in tokens; `None` leaves the choice to llama-server.
    pub(crate) context: Option<u64>,
}

/// Lists all model files with their stamps. If two lists differ, files were added, changed or removed.
///
/// # Errors
/// A folder cannot be read; its models are then unknown, which does not mean removed.
pub fn list_files(dirs: &[PathBuf]) -> Result<BTreeMap<PathBuf, ModelFileStamp>, (PathBuf, io::Error)> {
    let mut found = BTreeMap::new();
    for dir in dirs {
        walk_folder(dir, MAX_FOLDER_DEPTH, &mut found)?;
    }
    Ok(found)
}

fn walk_folder(
    dir: &Path,
    depth: usize,
    found: &mut BTreeMap<PathBuf, ModelFileStamp>,
) -> Result<(), (PathBuf, io::Error)> {
    let failed = |error| (dir.to_owned(), error);
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        // Skip a subfolder that cannot be read: it may have just vanished, or belong to another user.
        Err(error)
            if depth < MAX_FOLDER_DEPTH
                && matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) =>
        {
            return Ok(());
        }
        Err(error) => return Err(failed(error)),
    };
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let path = entry.path();
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        match entry.file_type() {
            // Follow links to files, as in caches of model hubs, but not to folders, which may form cycles.
            Ok(kind) if kind.is_dir() && !hidden && depth > 0 => walk_folder(&path, depth - 1, found)?,
            Ok(kind) if !kind.is_dir() && !hidden && is_gguf(&path) => {
                found.extend(model_files::file_stamp(&path).map(|stamp| (path, stamp)));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns true for the name of a model file, which must be valid UTF-8 because it becomes the model's name.
fn is_gguf(path: &Path) -> bool {
    path.to_str().is_some()
        && !model_stem(path).is_empty()
        && path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// Returns the models in these folders. Skips files that are no models or are incomplete, and models whose
/// name is in `taken`. Fails like [`list_files`].
pub(crate) fn scan_models(
    dirs: &[PathBuf],
    memory: u64,
    taken: &[String],
) -> Result<Vec<FolderModel>, (PathBuf, io::Error)> {
    if dirs.is_empty() {
        return Ok(Vec::new());
    }
    let mut models: Vec<(PathBuf, PathBuf, Arc<ModelFile>)> = Vec::new();
    let mut projectors: Vec<PathBuf> = Vec::new();
    let mut seen: Vec<PathBuf> = Vec::new();
    for dir in dirs {
        for file in list_files(std::slice::from_ref(dir))?.into_keys() {
            let real = file.canonicalize().unwrap_or_else(|_| file.clone());
            if seen.contains(&real) || split_part(&file).is_some_and(|(_, number)| number > 1) {
                continue;
            }
            seen.push(real);
            match model_files::read_model_file(&file) {
                Ok(facts) if is_projector(&file, &facts) => projectors.push(file),
                Ok(facts) if is_model(&facts) => models.push((dir.clone(), file, facts)),
                Ok(_) => {}
                Err(why) => tracing::debug!("{}: skipped: {why}", file.display()),
            }
        }
    }
    // Sort by depth: of two files with the same name, the less deeply nested one gets the short name.
    models.sort_by_key(|(dir, file, _)| (file.components().count() - dir.components().count(), file.clone()));
    let room = left_for_models(memory, &own_memory(&GpuSensors::open()), &defaults().loading);
    let mut found: BTreeMap<String, FolderModel> = BTreeMap::new();
    for (dir, file, facts) in &models {
        let short = model_stem(file);
        let long = file.strip_prefix(dir).unwrap_or(file).with_extension("").display().to_string();
        let whole = file.with_extension("").display().to_string();
        let free = |name: &String| !found.contains_key(name) && !taken.contains(name);
        let Some(name) = [short, long, whole].into_iter().find(free) else { continue };
        let alone = models.iter().filter(|(_, other, _)| other.parent() == file.parent()).count() == 1;
        let projector = find_projector(file, alone, &projectors);
        let context = default_context(facts, projector.as_deref(), &room);
        drop(found.insert(name.clone(), FolderModel { name, file: file.clone(), projector, context }));
    }
    Ok(found.into_values().collect())
}

/// Parses `name-00002-of-00003.gguf` into the name and the number of the part.
fn split_part(file: &Path) -> Option<(String, u32)> {
    let stem = file.file_stem()?.to_str()?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits(count) && digits(number)).then(|| Some((name.to_owned(), number.parse().ok()?)))?
}

fn model_stem(file: &Path) -> String {
    let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    split_part(file).map_or(stem, |(name, _)| name)
}

fn is_projector(file: &Path, facts: &ModelFile) -> bool {
    matches!(facts.architecture.as_str(), "clip" | "mmproj")
        || facts.texts.get("general.type").is_some_and(|kind| kind == "mmproj")
        || (facts.architecture.is_empty() && model_stem(file).to_ascii_lowercase().contains("mmproj"))
}

/// Returns true if the file is a model, and not an adapter, a vocabulary or an importance matrix.
fn is_model(facts: &ModelFile) -> bool {
    let kind = facts.texts.get("general.type").map_or("model", String::as_str);
    kind == "model" && facts.has_tensors && facts.shape.is_ok()
}

/// Returns a model's projector: the only one in its folder if the model is alone there, else the one whose
/// name matches most of the model's name, apart from the quantisation.
fn find_projector(model: &Path, alone: bool, projectors: &[PathBuf]) -> Option<PathBuf> {
    let beside: Vec<&PathBuf> =
        projectors.iter().filter(|projector| projector.parent() == model.parent()).collect();
    if let ([only], true) = (beside.as_slice(), alone) {
        return Some((*only).clone());
    }
    let own = name_words(&model_stem(model));
    let fits = |projector: &&&PathBuf| {
        let its = name_words(&model_stem(projector));
        !its.is_empty() && its.len() <= own.len() && its.iter().zip(&own).all(|(one, other)| one == other)
    };
    // Projectors that match equally differ in precision, and in little else; take the last by name.
    beside
        .iter()
        .filter(fits)
        .max_by_key(|projector| name_words(&model_stem(projector)).len())
        .map(|one| (*one).clone())
}

fn name_words(stem: &str) -> Vec<String> {
    let lower = stem.to_ascii_lowercase();
    let all = lower.split(['-', '_', '.']).filter(|word| !word.is_empty() && *word != "mmproj");
    all.take_while(|word| !is_precision(word)).map(str::to_owned).collect()
}

fn is_precision(word: &str) -> bool {
    let digits = |rest: &str| rest.starts_with(|first: char| first.is_ascii_digit());
    matches!(word, "f16" | "f32" | "bf16" | "fp16" | "mxfp4" | "ud" | "model")
        || word.strip_prefix("iq").or_else(|| word.strip_prefix('q')).is_some_and(digits)
}

/// Returns the context size that the model was trained with, limited to the maximum and to the memory of
/// this machine without other models.
fn default_context(facts: &ModelFile, projector: Option<&Path>, room: &Room) -> Option<u64> {
    let shape = facts.shape.as_ref().ok()?;
    let bytes = projector.and_then(|path| std::fs::metadata(path).ok()).map_or(0, |facts| facts.len());
    let mut context = shape.context.min(MAX_DEFAULT_CONTEXT);
    while context > MIN_DEFAULT_CONTEXT {
        let run = ServerRun { context: Some(context), ..ServerRun::default() };
        let needs = book::predict_needs(shape, &run, ServerBuild::newest(!room.gpus.is_empty()), bytes);
        let one = PlacementRequest { name: String::new(), needs, gpus: Vec::new(), may_split: true };
        if book::fit_models(room, &[&one]).is_ok() {
            break;
        }
        context /= 2;
    }
    (context > 0).then_some(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_projectors_are_known_by_their_names() {
        let path = Path::new;
        assert_eq!(split_part(path("d/big-00002-of-00003.gguf")), Some(("big".to_owned(), 2)));
        assert_eq!(split_part(path("d/a-2-of-3.gguf")), None);
        assert_eq!(
            (model_stem(path("big-00001-of-00003.gguf")), model_stem(path("a.b.gguf"))),
            ("big".to_owned(), "a.b".to_owned())
        );
        let projectors: Vec<PathBuf> =
            ["d/mmproj-gemma-3-4b-f16.gguf", "d/mmproj-Qwen-VL-BF16.gguf", "e/mmproj.gguf"]
                .map(PathBuf::from)
                .to_vec();
        let of = |model: &str, alone| {
            find_projector(path(model), alone, &projectors).map(|path| path.display().to_string())
        };
        assert_eq!(of("d/gemma-3-4b-it-Q4_K_M.gguf", false).as_deref(), Some("d/mmproj-gemma-3-4b-f16.gguf"));
        assert_eq!(of("d/Qwen-VL-7B-Q8_0.gguf", false).as_deref(), Some("d/mmproj-Qwen-VL-BF16.gguf"));
        assert_eq!(of("d/llama-Q4_0.gguf", false), None);
        assert_eq!(of("e/any-Q4_0.gguf", true).as_deref(), Some("e/mmproj.gguf"));
        assert_eq!(of("e/any-Q4_0.gguf", false), None, "nobody knows whose it is");
    }

    #[test]
    fn files_in_folders_are_found_and_circles_and_hidden_ones_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("hub/models--a--b/snapshots/1")).unwrap();
        std::fs::create_dir_all(at(".hidden")).unwrap();
        for name in ["a.gguf", "B.GGUF", "c.txt", ".d.gguf", ".hidden/e.gguf", "blob"] {
            std::fs::write(at(name), "x").unwrap();
        }
        std::os::unix::fs::symlink(at("blob"), at("hub/models--a--b/snapshots/1/f.gguf")).unwrap();
        std::os::unix::fs::symlink(dir.path(), at("hub/circle")).unwrap();
        std::os::unix::fs::symlink(at("nowhere"), at("gone.gguf")).unwrap();
        assert!(list_files(&[dir.path().to_owned(), at("not-there")]).is_err(), "nobody knows what is in it");
        let found = list_files(&[dir.path().to_owned()]).unwrap();
        let names: Vec<String> =
            found.keys().map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect();
        assert_eq!(names, ["B.GGUF", "a.gguf", "f.gguf"]);
        assert_eq!(
            scan_models(&[dir.path().to_owned()], 1 << 30, &[]).unwrap(),
            [],
            "none of them is a model"
        );
    }
}
