//! Reads the layers of a configuration (defaults, then the file, then the environment, then flags), and
//! merges them into one tree.

use std::path::{Path, PathBuf};

use warden_policies::defaults::DEFAULTS_TEXT;

use super::credentials;
use super::folder::{self, FolderModel};
use super::other_program;
use super::tree::{ConfigNode, ConfigValue, TableEntry};
use super::variables;
use crate::arguments;
use crate::problem::{ConfigPlace, ConfigProblem, ConfigProblems, SourceLines, dotted_key, owned_path};
use crate::schema::compiled_in;
use crate::schema::root::root_schema;
use crate::schema::validate::validate;
use crate::settings::{ConfigSettings, ModelConfig};

/// Sources of settings, in order of rising priority.
#[derive(Clone, Debug, Default)]
pub struct ConfigSources {
    /// The configuration file.
    pub file: Option<PathBuf>,
    /// All environment variables; those without [`variables::ENV_PREFIX`] are ignored.
    pub env: Vec<(String, String)>,
    /// Settings of the command line.
    pub flags: Vec<FlagSetting>,
    /// Memory of this machine in bytes, which limits the context of models found in folders.
    pub memory: u64,
}

/// A setting from the command line.
#[derive(Clone, Debug, PartialEq)]
pub struct FlagSetting {
    /// Source as named in messages, such as `flag --port`.
    pub flag: String,
    /// Path of the key that the flag sets.
    pub path: Vec<String>,
    /// Value of the key.
    pub value: ConfigNode,
}

impl FlagSetting {
    /// Creates a setting from the text of a flag; the schema decides its type.
    pub fn raw(flag: &str, path: &[&str], value: impl Into<String>) -> Self {
        Self {
            flag: format!("flag {flag}"),
            path: owned_path(path),
            value: ConfigNode::new(ConfigValue::Raw(value.into())),
        }
    }
}

/// A configuration in which each key and value is valid by itself. [`crate::resolve`] checks them together.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    /// All settings except those of single models.
    pub settings: ConfigSettings,
    /// Settings that apply to all models.
    pub defaults: ModelConfig,
    /// Models in the order of the file.
    pub models: Vec<(String, ModelConfig)>,
    /// The configuration file.
    pub file: Option<PathBuf>,
    /// Compiled-in numbers that the configuration sets, with their sources.
    pub internal: Vec<(String, ConfigPlace)>,
    /// Folders that are searched for models.
    pub folders: Vec<PathBuf>,
    /// Configured models that are skipped: they name no file, and no folder has a model of that name.
    pub skipped_models: Vec<String>,
    pub(crate) tree: ConfigNode,
}

impl LoadedConfig {
    /// Returns the source of the value at a path; for a model's key, it may be the section for all models.
    pub fn place(&self, path: &[String]) -> ConfigPlace {
        place(&self.tree, path)
    }

    /// Returns the source of one item of the list at a path: its own line in a list of several lines.
    pub fn item_place(&self, path: &[String], index: usize) -> ConfigPlace {
        let list = self.tree.find(path).or_else(|| self.tree.find(&defaults_path(path)));
        let item = list.and_then(|list| list.items().get(index));
        item.map_or_else(|| self.place(path), |item| item.place.clone())
    }

    /// Merges one model's table with the defaults for all models. Computed on demand: stored tables of 1,000
    /// models would repeat all defaults 1,000 times (12 MiB).
    pub(crate) fn merged_table(&self, model: &str) -> ConfigNode {
        merge_model(self.tree.find(&["defaults"]), self.own_table(model))
    }

    /// Returns the paths of the keys in a model's own table that do not fit its `command`.
    pub(crate) fn refused_keys(&self, model: &str) -> Vec<Vec<String>> {
        let own = self.own_table(model);
        own.map_or_else(Vec::new, |own| other_program::refused_keys(self.tree.find(&["defaults"]), own))
    }

    pub(crate) fn own_table(&self, model: &str) -> Option<&ConfigNode> {
        self.tree.find(&["models", model])
    }
}

fn place(tree: &ConfigNode, path: &[String]) -> ConfigPlace {
    let found = tree.place_of(path).or_else(|| tree.place_of(&defaults_path(path)));
    found.cloned().unwrap_or(ConfigPlace::Nowhere)
}

/// Returns the path for all models that corresponds to a model's key; empty for any other path.
fn defaults_path(path: &[String]) -> Vec<String> {
    match path {
        [models, _, rest @ ..] if models == "models" && !rest.is_empty() => {
            std::iter::once("defaults".to_owned()).chain(rest.to_vec()).collect()
        }
        _ => Vec::new(),
    }
}

/// Reads all layers and merges them.
///
/// # Errors
/// A layer cannot be read, or contains wrong keys or values; all problems are returned at once.
pub fn load_config(sources: ConfigSources) -> Result<LoadedConfig, ConfigProblems> {
    let mut tree = defaults_tree()?;
    let file = sources.file.as_deref().map(file_tree).transpose()?;
    let flags: Vec<ConfigNode> = sources.flags.into_iter().map(flag_tree).collect();
    let credentials = sources.env.iter().find(|(name, _)| name == credentials::CREDENTIALS_VARIABLE);
    let credentials = credentials.map(|(_, value)| value.clone());
    let known: Vec<&ConfigNode> = std::iter::once(&tree).chain(&file).chain(&flags).collect();
    let (variables, mut problems) = variables::environment_trees(sources.env, &known);
    let mut layers: Vec<ConfigNode> = file.into_iter().chain(variables).chain(flags).collect();
    let mut internal = Vec::new();
    // Do not validate the defaults, which contain more than a configuration may set.
    for layer in &mut layers {
        problems.extend(validate(layer));
        problems.extend(credentials::resolve_credentials(layer, root_schema(), credentials.as_deref()));
        internal.extend(compiled_in::move_internal(layer));
    }
    if !problems.is_empty() {
        return Err(ConfigProblems(problems));
    }
    let taken: Vec<String> = layers.iter().flat_map(taken_names).collect();
    for layer in layers {
        tree.merge(layer);
    }
    let folders = model_folders(&tree, sources.file.as_deref());
    let found = folder::scan_models(&folders, sources.memory, &taken).map_err(|(path, error)| {
        let message = format!("the folder of models {} cannot be read: {error}", path.display());
        ConfigProblem::new(place(&tree, &owned_path(&["paths", "models"])), message)
            .with_hint("name a folder that exists and that we may read (`paths.models`)")
    })?;
    let mut beneath = found_tree(found);
    beneath.merge(tree);
    read_tree(beneath, sources.file, internal, folders)
}

/// Returns the folders of models as absolute paths; paths in the file are relative to the file.
fn model_folders(tree: &ConfigNode, file: Option<&Path>) -> Vec<PathBuf> {
    let base = file.and_then(Path::parent).unwrap_or_else(|| Path::new(""));
    let named = tree.find(&["paths", "models"]).map_or(&[][..], ConfigNode::items);
    let dirs = named.iter().filter_map(ConfigNode::text);
    dirs.map(|dir| std::path::absolute(base.join(dir)).unwrap_or_else(|_| dir.into())).collect()
}

/// Returns true if the settings of a model name a model file or a remote model.
fn has_model(model: &ModelConfig) -> bool {
    model.model.is_some()
        || model.runs_other_program()
        || arguments::model_path(&model.args).or_else(|| arguments::remote_model(&model.args)).is_some()
        || model
            .env
            .keys()
            .any(|name| name.starts_with("LLAMA_ARG_MODEL") || name.starts_with("LLAMA_ARG_HF"))
}

/// Returns all aliases of configured models, and all names that have no process of their own.
fn taken_names(layer: &ConfigNode) -> Vec<String> {
    let section = |name: &str| layer.find(&[name]).map_or(&[][..], ConfigNode::entries);
    let aliases =
        section("models").iter().chain(section("remotes")).filter_map(|one| one.value.entry("aliases"));
    let aliases = aliases.flat_map(|aliases| aliases.value.items()).filter_map(ConfigNode::text);
    let names = section("names").iter().chain(section("remotes")).map(|entry| entry.key.as_str());
    aliases.chain(names).map(str::to_owned).collect()
}

fn found_tree(found: Vec<FolderModel>) -> ConfigNode {
    let mut tree = ConfigNode::table();
    for FolderModel { name, file, projector, context } in found {
        let place = ConfigPlace::whole_file(&file);
        let mut set = |keys: &[&str], value: String| {
            let path = owned_path(&[&["models", name.as_str()][..], keys].concat());
            tree.set(&path, ConfigNode { place: place.clone(), kind: ConfigValue::Text(value) });
        };
        set(&["model"], file.display().to_string());
        // Set environment variables instead of flags, because llama-server's flags override them.
        if let Some(context) = context {
            set(&["env", "LLAMA_ARG_CTX_SIZE"], context.to_string());
        }
        if let Some(projector) = projector {
            set(&["env", "LLAMA_ARG_MMPROJ"], projector.display().to_string());
        }
    }
    tree
}

fn read_tree(
    tree: ConfigNode,
    file: Option<PathBuf>,
    internal: Vec<(String, ConfigPlace)>,
    folders: Vec<PathBuf>,
) -> Result<LoadedConfig, ConfigProblems> {
    let fault = |error: Box<figment::Error>, under: &[&str]| type_problem(&tree, &error, under);
    let settings: ConfigSettings = tree.read().map_err(|error| fault(error, &[]))?;
    let shared = tree.find(&["defaults"]);
    let defaults = merge_model(shared, None).read().map_err(|error| fault(error, &["defaults"]))?;
    let mut models = Vec::new();
    let mut skipped_models = Vec::new();
    for TableEntry { key: name, value, .. } in tree.find(&["models"]).map_or(&[][..], ConfigNode::entries) {
        let model = merge_model(shared, Some(value)).read();
        let model: ModelConfig = model.map_err(|error| fault(error, &["models", name]))?;
        if folders.is_empty() || has_model(&model) {
            models.push((name.clone(), model));
        } else {
            skipped_models.push(name.clone());
        }
    }
    Ok(LoadedConfig { settings, defaults, models, file, internal, folders, skipped_models, tree })
}

fn merge_model(defaults: Option<&ConfigNode>, own: Option<&ConfigNode>) -> ConfigNode {
    let mut merged = other_program::defaults_for(defaults, own);
    let Some(own) = own else { return merged };
    // A model's own `binary` or `build` replaces both keys of the defaults.
    if own.entry("binary").or_else(|| own.entry("build")).is_some() {
        merged.take("binary");
        merged.take("build");
    }
    merged.merge(own.clone());
    merged
}

/// Reports a value that the schema accepts but the type does not, such as a number too large for its type.
pub(crate) fn type_problem(tree: &ConfigNode, error: &figment::Error, under: &[&str]) -> ConfigProblems {
    use figment::error::{Actual, Kind};
    let path: Vec<String> = owned_path(under).into_iter().chain(error.path.clone()).collect();
    let what = match &error.kind {
        Kind::InvalidValue(Actual::Signed(number), _) => format!("`{number}` is too large"),
        Kind::InvalidValue(Actual::Unsigned(number), _) => format!("`{number}` is too large"),
        kind => kind.to_string(),
    };
    ConfigProblem::new(place(tree, &path), format!("`{}`: {what}", dotted_key(&path))).into()
}

/// Returns the defaults as a configuration file, with sections about models under `[defaults]`.
fn defaults_tree() -> Result<ConfigNode, ConfigProblems> {
    let document = toml_edit::Document::parse(DEFAULTS_TEXT).map_err(|error| {
        ConfigProblem::new(ConfigPlace::Default, format!("the compiled-in defaults: {error}"))
    })?;
    let mut tree = ConfigNode { place: ConfigPlace::Default, ..ConfigNode::table() };
    let sections = ConfigNode::from_item(document.as_item(), &|_| ConfigPlace::Default);
    compiled_in::move_sections(sections, &mut tree);
    Ok(tree)
}

pub(crate) fn file_tree(path: &Path) -> Result<ConfigNode, ConfigProblems> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        let message = format!("the configuration file cannot be read: {error}");
        ConfigProblem::new(ConfigPlace::whole_file(path), message)
            .with_hint("check the path given with --config")
    })?;
    let lines = SourceLines::new(path, &text);
    let document = toml_edit::Document::parse(text.as_str()).map_err(|error| {
        let message = error.message().lines().collect::<Vec<_>>().join(", ");
        ConfigProblem::new(lines.place(error.span()), format!("this is not TOML: {message}"))
    })?;
    Ok(ConfigNode::from_item(document.as_item(), &|span| lines.place(span)))
}

fn flag_tree(setting: FlagSetting) -> ConfigNode {
    ConfigNode::with_value(&ConfigPlace::Flag(setting.flag), &setting.path, setting.value)
}

/// Loads a configuration file with this text, for tests.
#[cfg(test)]
pub(crate) fn loaded(text: &str) -> LoadedConfig {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("warden.toml");
    std::fs::write(&file, text).unwrap();
    load_config(ConfigSources { file: Some(file), ..ConfigSources::default() }).unwrap()
}

#[cfg(test)]
#[path = "layers_tests.rs"]
mod tests;
