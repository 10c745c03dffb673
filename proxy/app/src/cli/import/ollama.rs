//! Imports the models that Ollama keeps on this machine: manifests that reference blobs by their hashes.

use std::path::{Path, PathBuf};

use serde_json::Value;
use warden_supervisor::regular_file;

use super::imported::{EnvLookup, ImportedConfig, ImportedModel, is_listed};
use crate::exit::CommandError;

/// Maximum bytes of a manifest, a system prompt or a list of parameters: more than a hundred times the
/// largest of Ollama's own files.
const MAX_TEXT_BYTES: u64 = 4 << 20;
/// Manifests are in HOST/OWNER/MODEL/TAG, four levels deep.
const MAX_FOLDER_DEPTH: usize = 8;
const MAX_MANIFESTS: usize = 10_000;

const PARAMETER_FLAGS: [(&str, &str); 6] = [
    ("num_ctx", "-c"),
    ("num_gpu", "-ngl"),
    ("num_batch", "-b"),
    ("num_thread", "-t"),
    ("main_gpu", "-mg"),
    ("num_keep", "--keep"),
];
/// Parameters of Ollama that llama-server accepts in requests.
const REQUEST_PARAMETERS: &str = "temperature top_k top_p min_p typical_p repeat_penalty repeat_last_n \
                                  presence_penalty frequency_penalty seed stop mirostat mirostat_eta mirostat_tau";

/// Returns `given`, else the folder of `OLLAMA_MODELS`, else Ollama's default.
pub(super) fn models_folder(given: Option<&Path>, env: EnvLookup<'_>) -> Result<PathBuf, CommandError> {
    let home = env("HOME").map(|home| PathBuf::from(home).join(".ollama/models"));
    let usual =
        home.into_iter().chain(["/usr/share/ollama/.ollama/models".into(), "/var/lib/ollama/models".into()]);
    let mut places: Vec<PathBuf> = match (given, env("OLLAMA_MODELS")) {
        (Some(dir), _) => vec![dir.to_owned(), dir.join("models")],
        (None, Some(dir)) => vec![dir.into()],
        (None, None) => usual.collect(),
    };
    if let Some(at) = places.iter().position(|dir| dir.join("manifests").is_dir()) {
        return Ok(places.swap_remove(at));
    }
    let looked: Vec<String> = places.iter().map(|dir| dir.display().to_string()).collect();
    Err(CommandError::usage(
        format!("there are no models of Ollama in {}", looked.join(", ")),
        "name the folder that has `manifests` and `blobs`: `llama-warden import --from ollama DIR`",
    ))
}

pub(super) fn import_ollama(dir: &Path) -> Result<ImportedConfig, CommandError> {
    let manifests = dir.join("manifests");
    let mut files = Vec::new();
    collect_manifests(&manifests, MAX_FOLDER_DEPTH, &mut files)?;
    files.sort();
    let mut imported = ImportedConfig::default();
    for file in files {
        let parts: Vec<&str> =
            file.strip_prefix(&manifests).unwrap_or(&file).iter().filter_map(|part| part.to_str()).collect();
        let Some((name, alias)) = model_names(&parts) else {
            imported.add_unsupported(
                format!("the file {}", file.display()),
                "manifests lie in HOST/OWNER/MODEL/TAG",
            );
            continue;
        };
        let mut model =
            ImportedModel { name, aliases: alias.into_iter().collect(), ..ImportedModel::default() };
        import_layers(dir, &file, &mut model, &mut imported)?;
        if model.model.is_some() {
            imported.models.push(model);
        } else {
            imported.add_unsupported(
                format!("model `{}`", model.name),
                "it has no weights of its own on this machine",
            );
        }
    }
    Ok(imported)
}

fn collect_manifests(dir: &Path, depth: usize, files: &mut Vec<PathBuf>) -> Result<(), CommandError> {
    let too_much =
        |what: String| CommandError::usage(what, "name the folder that has `manifests` and `blobs`");
    if depth == 0 {
        return Err(too_much(format!(
            "{} has more than {MAX_FOLDER_DEPTH} folders within each other",
            dir.display()
        )));
    }
    let unreadable = |error: std::io::Error| {
        CommandError::hinted(
            format!("cannot read {}: {error}", dir.display()),
            "Ollama's folder may belong to its own user: run the import as that user, or as root",
        )
    };
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        if entry.file_type().map_err(unreadable)?.is_dir() {
            collect_manifests(&entry.path(), depth - 1, files)?;
        } else if files.len() == MAX_MANIFESTS {
            return Err(too_much(format!("{} has more than {MAX_MANIFESTS} manifests", dir.display())));
        } else {
            files.push(entry.path());
        }
    }
    Ok(())
}

/// Returns the name that Ollama lists, and for the tag `:latest` also the name without the tag.
fn model_names(parts: &[&str]) -> Option<(String, Option<String>)> {
    let [host, owner, model, tag] = parts else { return None };
    let short = match (host.starts_with("registry."), *owner) {
        (true, "library") => (*model).to_owned(),
        (true, owner) => format!("{owner}/{model}"),
        (false, owner) => format!("{host}/{owner}/{model}"),
    };
    let alias = (*tag == "latest").then(|| short.clone());
    Some((format!("{short}:{tag}"), alias))
}

fn import_layers(
    dir: &Path,
    file: &Path,
    model: &mut ImportedModel,
    imported: &mut ImportedConfig,
) -> Result<(), CommandError> {
    let name = model.name.clone();
    let hint = format!("let Ollama repair it: `ollama pull {name}`");
    let wrong = |what: String| CommandError::usage(format!("{}: {what}", file.display()), hint.clone());
    let text = regular_file::read_text(file, MAX_TEXT_BYTES)
        .map_err(|error| wrong(format!("cannot be read: {error}")))?;
    let manifest: Value = serde_json::from_str(&text)
        .map_err(|error| wrong(format!("line {}: this is no manifest: {error}", error.line())))?;
    let blob = |digest: &str| {
        let path = dir.join("blobs").join(digest.replace(':', "-"));
        let is_name = !digest.contains('/');
        if is_name && path.is_file() {
            Ok(path)
        } else {
            Err(wrong(format!("its blob {} is missing", path.display())))
        }
    };
    for layer in manifest["layers"].as_array().into_iter().flatten() {
        let kind = layer["mediaType"].as_str().unwrap_or_default();
        let kind = kind.rsplit_once(".image.").map_or(kind, |(_, kind)| kind);
        let digest = layer["digest"].as_str().ok_or_else(|| wrong("a layer has no digest".to_owned()))?;
        let path = blob(digest)?;
        let shown = path.display().to_string();
        let read = || {
            regular_file::read_text(&path, MAX_TEXT_BYTES)
                .map_err(|error| wrong(format!("its blob {shown} cannot be read: {error}")))
        };
        match kind {
            "model" if model.model.is_none() => model.model = Some(shown),
            "projector" => model.command.args.extend(["--mmproj".to_owned(), shown]),
            "adapter" => model.command.args.extend(["--lora".to_owned(), shown]),
            "system" => model.requests.system_prompt = Some(read()?).filter(|text| !text.trim().is_empty()),
            "params" => {
                let text = read()?;
                let table = serde_json::from_str(&text)
                    .map_err(|error| wrong(format!("its parameters in {shown} are no JSON: {error}")))?;
                import_parameters(&table, model, imported);
            }
            "license" => model.notes.push(format!("its license: {shown}")),
            "template" => imported.add_unsupported(
                format!("model `{name}`: its template ({shown})"),
                "llama-server takes the template within the model's file, or one in Jinja with \
                 `--chat-template-file`",
            ),
            _ => imported.add_unsupported(
                format!("model `{name}`: its layer `{kind}` ({shown})"),
                "look whether llama-server has a flag for it",
            ),
        }
    }
    Ok(())
}

fn import_parameters(table: &Value, model: &mut ImportedModel, imported: &mut ImportedConfig) {
    for (key, value) in table.as_object().into_iter().flatten() {
        if let Some((_, flag)) = PARAMETER_FLAGS.iter().find(|(name, _)| name == key) {
            model.command.args.extend([(*flag).to_owned(), super::yaml::plain_text(value)]);
        } else if key == "num_predict" && value.as_i64().is_some_and(|count| count < 0) {
            model.notes.push(format!("num_predict {value}: no limit, as without it"));
        } else if key == "num_predict" {
            model.requests.default.push(("max_tokens".to_owned(), value.clone()));
        } else if is_listed(REQUEST_PARAMETERS, key) {
            model.requests.default.push((key.clone(), value.clone()));
        } else if let ("use_mmap", Some(on)) = (key.as_str(), value.as_bool()) {
            model.set_mmap(on);
        } else {
            imported.add_unsupported(
                format!("model `{}`: the parameter `{key}`", model.name),
                "llama-server has no such parameter",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    /// A folder with one model whose system prompt is the blob `sha256-a`, which the test makes.
    fn folder() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let base = tempfile::tempdir().unwrap();
        let tag = base.path().join("manifests/registry.ollama.ai/library/m/latest");
        fs::create_dir_all(tag.parent().unwrap()).unwrap();
        fs::create_dir(base.path().join("blobs")).unwrap();
        let layer = |kind: &str, digest: &str| {
            format!("{{\"mediaType\": \"application/vnd.ollama.image.{kind}\", \"digest\": \"{digest}\"}}")
        };
        let (model, system) = (layer("model", "sha256:m"), layer("system", "sha256:a"));
        fs::write(&tag, format!("{{\"layers\": [{model}, {system}]}}")).unwrap();
        fs::write(base.path().join("blobs/sha256-m"), "GGUF").unwrap();
        let blob = base.path().join("blobs/sha256-a");
        (base, tag, blob)
    }

    fn pipe(path: &Path) {
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, 0).unwrap();
    }

    #[test]
    fn what_a_manifest_names_is_neither_waited_for_nor_read_without_end() {
        let (base, _, blob) = folder();
        fs::write(&blob, "Be kind.").unwrap();
        assert_eq!(
            import_ollama(base.path()).unwrap().models[0].requests.system_prompt.as_deref(),
            Some("Be kind.")
        );
        fs::remove_file(&blob).unwrap();
        File::create(&blob).unwrap().set_len(3 << 30).unwrap();
        let refused = import_ollama(base.path()).err().unwrap().to_string();
        assert!(refused.contains("sha256-a") && refused.contains("larger than"), "{refused}");
        fs::remove_file(&blob).unwrap();
        pipe(&blob);
        assert!(import_ollama(base.path()).err().unwrap().to_string().contains("sha256-a"));
    }

    #[test]
    fn manifests_are_small_files_in_a_few_folders() {
        let (base, tag, blob) = folder();
        fs::write(&blob, "x").unwrap();
        fs::remove_file(&tag).unwrap();
        pipe(&tag);
        assert!(import_ollama(base.path()).err().unwrap().to_string().contains("no regular file"));
        fs::remove_file(&tag).unwrap();
        fs::create_dir_all(base.path().join("manifests/a/b/c/d/e/f/g/h/i")).unwrap();
        assert!(import_ollama(base.path()).err().unwrap().to_string().contains("folders within each other"));
    }
}
