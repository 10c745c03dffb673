//! Merges the layers of a configuration: defaults, then the file, then the environment, then flags.
//!
//! The crate figment merges the layers; this module prepares and keeps them, so that every value can be
//! traced to its source.

use std::path::{Path, PathBuf};

use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use warden_policies::defaults::DEFAULTS_TEXT;

use super::credentials;
use super::folder::{self, FolderModel};
use super::tree::{ConfigNode, ConfigValue};
use super::variables;
use crate::arguments;
use crate::problem::{ConfigPlace, ConfigProblem, ConfigProblems};
use crate::schema::validate::validate;
use crate::schema::{compiled_in, root_schema};
use crate::settings::{ConfigSettings, ModelConfig};

/// Prefix of environment variables; two underscores separate sections and keys after it.
pub const ENV_PREFIX: &str = "LLAMA_WARDEN_";

/// Sources of settings, in order of rising priority.
#[derive(Clone, Debug, Default)]
pub struct ConfigSources {
    /// The configuration file.
    pub file: Option<PathBuf>,
    /// All environment variables; those without [`ENV_PREFIX`] are ignored.
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
            path: path.iter().map(|&key| key.to_owned()).collect(),
            value: ConfigNode::new(ConfigValue::Raw(value.into())),
        }
    }
}

#[derive(Clone, Debug)]
enum LayerOrigin {
    Default,
    /// A model file found in a folder.
    Found(PathBuf),
    File {
        path: PathBuf,
        text: String,
    },
    Env(String),
    Flag(String),
}

/// Settings from one source.
#[derive(Clone, Debug)]
pub(crate) struct ConfigLayer {
    origin: LayerOrigin,
    pub(crate) tree: ConfigNode,
}

impl ConfigLayer {
    /// Creates the layer of one environment variable.
    pub(crate) fn from_variable(name: String, path: &[String], value: String) -> Self {
        let mut tree = ConfigNode::table();
        tree.set(path, ConfigNode::new(ConfigValue::Raw(value)));
        Self { origin: LayerOrigin::Env(name), tree }
    }

    /// Returns the place of a byte offset in this layer.
    pub(crate) fn place(&self, byte: Option<usize>) -> ConfigPlace {
        match &self.origin {
            LayerOrigin::Default => ConfigPlace::Default,
            LayerOrigin::Found(path) => ConfigPlace::File { path: path.clone(), line: 0 },
            LayerOrigin::File { path, text } => ConfigPlace::in_file(path, text, byte),
            LayerOrigin::Env(name) => ConfigPlace::Env(name.clone()),
            LayerOrigin::Flag(flag) => ConfigPlace::Flag(flag.clone()),
        }
    }
}

impl Provider for ConfigLayer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.place(None).to_string())
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        Ok(Map::from([(Profile::Default, self.tree.to_dict())]))
    }
}

/// A figment provider for a table that has no source.
pub(crate) struct MergedTable(pub(crate) Dict);

impl Provider for MergedTable {
    fn metadata(&self) -> Metadata {
        Metadata::named("merged")
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        Ok(Map::from([(Profile::Default, self.0.clone())]))
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
    /// All sections except `models`, merged, for display.
    pub merged: Dict,
    /// Compiled-in numbers that the configuration sets, with their sources.
    pub internal: Vec<(String, ConfigPlace)>,
    /// Folders that are searched for models.
    pub folders: Vec<PathBuf>,
    /// Configured models that are skipped, because they name no file and the folders contain none of that
    /// name.
    pub skipped_models: Vec<String>,
    layers: Vec<ConfigLayer>,
}

impl LoadedConfig {
    /// Returns the source of the value at a path. For a key of a model, this may be the section for all
    /// models.
    pub fn place(&self, path: &[String]) -> ConfigPlace {
        place(&self.layers, path).unwrap_or(ConfigPlace::Nowhere)
    }

    /// Merges one model's table with the defaults for all models. Computed on demand: stored tables of 1,000
    /// models would repeat all defaults 1,000 times (12 MiB).
    pub fn merged_table(&self, model: &str) -> Dict {
        // Extraction cannot fail, because any dictionary can be read as a dictionary.
        merge_model(&self.settings.defaults, self.own_table(model)).extract().unwrap_or_default()
    }

    /// Merges the settings that the layers contain for one model, without the defaults for all models.
    pub fn own_table(&self, model: &str) -> Dict {
        let path = ["models".to_owned(), model.to_owned()];
        let written = self.layers.iter().filter_map(|layer| layer.tree.find(&path));
        let merged = written.fold(Figment::new(), |merged, node| merged.merge(MergedTable(node.to_dict())));
        merged.extract().unwrap_or_default()
    }

    /// Returns the merged value at a path outside `models`.
    pub(crate) fn value(&self, path: &[String]) -> Option<&Value> {
        let (first, rest) = path.split_first()?;
        rest.iter().try_fold(self.merged.get(first)?, |value, key| value.as_dict()?.get(key))
    }

    /// Returns the source of one item of the list at a path. If the list spans several lines, names the
    /// item's line.
    pub fn item_place(&self, path: &[String], index: usize) -> ConfigPlace {
        let item = |path: &[String]| {
            self.layers.iter().rev().find_map(|layer| {
                let ConfigValue::List(items) = &layer.tree.find(path)?.kind else { return None };
                let span = items.get(index).and_then(|item| item.span.as_ref());
                Some(layer.place(Some(span?.start)))
            })
        };
        let found =
            if last_place(&self.layers, path).is_some() { item(path) } else { item(&defaults_path(path)) };
        found.unwrap_or_else(|| self.place(path))
    }
}

fn place(layers: &[ConfigLayer], path: &[String]) -> Option<ConfigPlace> {
    last_place(layers, path).or_else(|| last_place(layers, &defaults_path(path)))
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

/// Returns the source of the value at a path in the layer with the highest priority that sets it.
pub(crate) fn last_place(layers: &[ConfigLayer], path: &[String]) -> Option<ConfigPlace> {
    layers.iter().rev().find_map(|layer| {
        let node = layer.tree.find(path)?;
        let (last, parent) = path.split_last()?;
        let key = layer.tree.find(parent)?.entry(last)?.key_span.as_ref().map(|span| span.start);
        Some(layer.place(key.or(node.span.as_ref().map(|span| span.start))))
    })
}

/// Reads all layers and merges them.
///
/// # Errors
/// A layer cannot be read, or contains wrong keys or values; all problems are returned at once.
pub fn load_config(sources: ConfigSources) -> Result<LoadedConfig, ConfigProblems> {
    let mut layers = vec![defaults_layer()?];
    if let Some(path) = &sources.file {
        layers.push(file_layer(path)?);
    }
    let flags: Vec<ConfigLayer> = sources.flags.into_iter().map(flag_layer).collect();
    let handed = sources
        .env
        .iter()
        .find(|(name, _)| name == credentials::CREDENTIALS_VARIABLE)
        .map(|(_, value)| value.clone());
    let (variables, mut problems) = variables::environment_layers(sources.env, &[layers.as_slice(), &flags]);
    layers.extend(variables);
    layers.extend(flags);
    let mut internal = Vec::new();
    // Do not validate the defaults layer, which contains more than a configuration may set.
    for layer in layers.iter_mut().skip(1) {
        let mut tree = layer.tree.clone();
        problems.extend(validate(&mut tree, &|byte| layer.place(byte)));
        let filled = credentials::resolve_credentials(&mut tree, root_schema(), handed.as_deref(), &|byte| {
            layer.place(byte)
        });
        problems.extend(filled);
        let taken = compiled_in::move_internal(&mut tree);
        internal.extend(taken.into_iter().map(|(key, byte)| (key, layer.place(byte))));
        layer.tree = tree;
    }
    if !problems.is_empty() {
        return Err(ConfigProblems(problems));
    }
    let dirs = folders(&layers, sources.file.as_deref())?;
    let found = folder::scan_models(&dirs, sources.memory, &aliases(&layers)).map_err(|(path, error)| {
        let place =
            last_place(&layers, &["paths".to_owned(), "models".to_owned()]).unwrap_or(ConfigPlace::Nowhere);
        ConfigProblem::new(place, format!("the folder of models {} cannot be read: {error}", path.display()))
            .with_hint("name a folder that exists and that we may read (`paths.models`)")
    })?;
    for (index, found) in found.into_iter().enumerate() {
        layers.insert(1 + index, found_layer(found));
    }
    let mut loaded = merge_layers(layers, sources.file)?;
    if !dirs.is_empty() {
        let (models, left_out) = loaded.models.into_iter().partition(|(_, model)| has_model(model));
        loaded.models = models;
        loaded.skipped_models = left_out.into_iter().map(|(name, _)| name).collect();
    }
    Ok(LoadedConfig { internal, folders: dirs, ..loaded })
}

/// Returns the folders of models as absolute paths; paths in the file are relative to the file.
fn folders(layers: &[ConfigLayer], file: Option<&Path>) -> Result<Vec<PathBuf>, ConfigProblems> {
    let merged = layers.iter().fold(Figment::new(), |merged, layer| merged.merge(layer.clone()));
    let dirs: Vec<PathBuf> = match merged.extract_inner("paths.models") {
        Ok(dirs) => dirs,
        Err(error) if error.missing() => Vec::new(),
        Err(error) => return Err(type_problem(layers, &error, &[])),
    };
    let base = file.and_then(Path::parent).unwrap_or_else(|| Path::new(""));
    Ok(dirs.iter().map(|dir| std::path::absolute(base.join(dir)).unwrap_or_else(|_| dir.clone())).collect())
}

/// Returns true if the settings of a model name a model file or a remote model.
fn has_model(model: &ModelConfig) -> bool {
    model.model.is_some()
        || arguments::model_path(&model.args).or_else(|| arguments::remote_model(&model.args)).is_some()
        || model
            .env
            .keys()
            .any(|name| name.starts_with("LLAMA_ARG_MODEL") || name.starts_with("LLAMA_ARG_HF"))
}

/// Returns all aliases of configured models, and all names that have no process of their own.
fn aliases(layers: &[ConfigLayer]) -> Vec<String> {
    let table = |name: &str| {
        let name = name.to_owned();
        layers.iter().filter_map(move |layer| match &layer.tree.entry(&name)?.value.kind {
            ConfigValue::Table(entries) => Some(entries),
            _ => None,
        })
    };
    let tables = table("models").chain(table("remotes"));
    let lists = tables.flatten().filter_map(|model| match &model.value.entry("aliases")?.value.kind {
        ConfigValue::List(items) => Some(items),
        _ => None,
    });
    let names = table("names").chain(table("remotes")).flatten().map(|entry| entry.key.clone());
    let texts = lists.flatten().filter_map(|item| match &item.kind {
        ConfigValue::Text(text) | ConfigValue::Raw(text) => Some(text.clone()),
        _ => None,
    });
    texts.chain(names).collect()
}

/// Returns the settings for a model file that was found in a folder.
fn found_layer(found: FolderModel) -> ConfigLayer {
    let FolderModel { name, file, projector, context } = found;
    let mut tree = ConfigNode::table();
    let mut set = |keys: &[&str], value: String| {
        let path = ["models", &name].into_iter().chain(keys.iter().copied()).map(str::to_owned);
        tree.set(&path.collect::<Vec<_>>(), ConfigNode::new(ConfigValue::Text(value)));
    };
    set(&["model"], file.display().to_string());
    // Set environment variables instead of flags, because llama-server's flags override them.
    if let Some(context) = context {
        set(&["env", "LLAMA_ARG_CTX_SIZE"], context.to_string());
    }
    if let Some(projector) = projector {
        set(&["env", "LLAMA_ARG_MMPROJ"], projector.display().to_string());
    }
    ConfigLayer { origin: LayerOrigin::Found(file), tree }
}

fn merge_layers(layers: Vec<ConfigLayer>, file: Option<PathBuf>) -> Result<LoadedConfig, ConfigProblems> {
    let merged = layers.iter().fold(Figment::new(), |merged, layer| merged.merge(layer.clone()));
    let problem = |error: figment::Error, under: &[&str]| type_problem(&layers, &error, under);
    let mut settings: ConfigSettings = merged.extract().map_err(|error| problem(error, &[]))?;
    let mut written = std::mem::take(&mut settings.models);
    let mut all: Dict = merged.extract().map_err(|error| problem(error, &[]))?;
    all.remove("models");
    let defaults = Figment::from(MergedTable(settings.defaults.clone()))
        .extract()
        .map_err(|error| problem(error, &["defaults"]))?;
    let names = names_in_order(&layers);
    let mut models = Vec::with_capacity(names.len());
    for name in names {
        let own = written.remove(&name).unwrap_or_default();
        let model = merge_model(&settings.defaults, own).extract();
        let model = model.map_err(|error| problem(error, &["models", &name]))?;
        models.push((name, model));
    }
    let (internal, folders, left_out) = (Vec::new(), Vec::new(), Vec::new());
    Ok(LoadedConfig {
        settings,
        defaults,
        models,
        file,
        merged: all,
        internal,
        folders,
        skipped_models: left_out,
        layers,
    })
}

/// Merges one model's own table over the defaults for all models.
fn merge_model(defaults: &Dict, own: Dict) -> Figment {
    let mut beneath = defaults.clone();
    for list in ["args", "mitigations"] {
        if own.contains_key(list) {
            beneath.remove(list);
        }
    }
    // A model's own `binary` or `build` replaces both keys of the defaults.
    if own.contains_key("binary") || own.contains_key("build") {
        beneath.remove("binary");
        beneath.remove("build");
    }
    Figment::from(MergedTable(beneath)).merge(MergedTable(own))
}

fn names_in_order(layers: &[ConfigLayer]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for layer in layers {
        let Some(ConfigValue::Table(entries)) = layer.tree.entry("models").map(|entry| &entry.value.kind)
        else {
            continue;
        };
        for entry in entries {
            if !names.contains(&entry.key) {
                names.push(entry.key.clone());
            }
        }
    }
    names
}

/// Reports a value that the schema accepts but the type does not, such as a number too large for its type.
pub(crate) fn type_problem(layers: &[ConfigLayer], error: &figment::Error, under: &[&str]) -> ConfigProblems {
    let path: Vec<String> = under.iter().map(|&key| key.to_owned()).chain(error.path.clone()).collect();
    let place = place(layers, &path).unwrap_or(ConfigPlace::Nowhere);
    let what = match &error.kind {
        figment::error::Kind::InvalidValue(figment::error::Actual::Signed(number), _) => {
            format!("`{number}` is too large")
        }
        figment::error::Kind::InvalidValue(figment::error::Actual::Unsigned(number), _) => {
            format!("`{number}` is too large")
        }
        kind => kind.to_string(),
    };
    ConfigProblem::new(place, format!("`{}`: {what}", crate::problem::dotted_key(&path))).into()
}

/// Returns the compiled-in defaults in the form of a configuration file; sections about models are placed
/// under `[defaults]`.
fn defaults_layer() -> Result<ConfigLayer, ConfigProblems> {
    let document = toml_edit::Document::parse(DEFAULTS_TEXT).map_err(|error| {
        ConfigProblem::new(ConfigPlace::Default, format!("the compiled-in defaults: {error}"))
    })?;
    let mut tree = ConfigNode::table();
    let source = ConfigNode::from(document.as_item());
    let ConfigValue::Table(entries) = source.kind else {
        return Ok(ConfigLayer { origin: LayerOrigin::Default, tree });
    };
    for entry in entries {
        let (Some(home), ConfigValue::Table(keys)) =
            (compiled_in::section_path(&entry.key), entry.value.kind)
        else {
            continue;
        };
        for key in keys {
            let path: Vec<String> = home.iter().cloned().chain([key.key]).collect();
            tree.set(&path, key.value);
        }
    }
    Ok(ConfigLayer { origin: LayerOrigin::Default, tree })
}

pub(crate) fn file_layer(path: &Path) -> Result<ConfigLayer, ConfigProblems> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        ConfigProblem::new(
            ConfigPlace::File { path: path.to_owned(), line: 0 },
            format!("the configuration file cannot be read: {error}"),
        )
        .with_hint("check the path given with --config")
    })?;
    let document = toml_edit::Document::parse(text.clone()).map_err(|error| {
        let byte = error.span().map(|span| span.start);
        let message = error.message().lines().collect::<Vec<_>>().join(", ");
        ConfigProblem::new(ConfigPlace::in_file(path, &text, byte), format!("this is not TOML: {message}"))
    })?;
    let tree = ConfigNode::from(document.as_item());
    Ok(ConfigLayer { origin: LayerOrigin::File { path: path.to_owned(), text }, tree })
}

fn flag_layer(setting: FlagSetting) -> ConfigLayer {
    let mut tree = ConfigNode::table();
    tree.set(&setting.path, setting.value);
    ConfigLayer { origin: LayerOrigin::Flag(setting.flag), tree }
}

#[cfg(test)]
#[path = "layers_tests.rs"]
mod tests;
