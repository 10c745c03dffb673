//! The layers of a configuration, and what they come to: defaults, then the file, then the environment, then flags.
//!
//! figment merges; this module only prepares the layers and remembers them, so that every value can be traced to where
//! it was written.

use std::path::{Path, PathBuf};

use figment::value::{Dict, Map};
use figment::{Figment, Metadata, Profile, Provider};
use warden_policies::defaults::TEXT;

use super::problem::{Place, Problem, Problems};
use super::schema::{COMPILED_IN, is_set_in_diagnose};
use super::settings::{Model, Settings};
use super::tree::{Kind, Node};
use super::validate::validate;
use super::variables;

/// Prefix of environment variables. Sections and keys are separated by two underscores.
pub(crate) const ENV_PREFIX: &str = "LLAMA_WARDEN_";

/// Where settings may come from, lowest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sources {
    /// The configuration file.
    pub(crate) file: Option<PathBuf>,
    /// All environment variables; those that are not ours are passed over.
    pub(crate) env: Vec<(String, String)>,
    /// Settings from flags.
    pub(crate) flags: Vec<FlagSetting>,
}

/// One setting from a flag.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FlagSetting {
    /// Where it was written, for people: `flag --port`.
    pub(crate) flag: String,
    /// What it sets.
    pub(crate) path: Vec<String>,
    /// To what.
    pub(crate) value: Node,
}

impl FlagSetting {
    /// Text of a flag; the schema decides its type.
    pub(crate) fn raw(flag: &str, path: &[&str], value: impl Into<String>) -> Self {
        Self {
            flag: format!("flag {flag}"),
            path: path.iter().map(|&key| key.to_owned()).collect(),
            value: Node::new(Kind::Raw(value.into())),
        }
    }
}

#[derive(Clone, Debug)]
enum Origin {
    Default,
    File { path: PathBuf, text: String },
    Env(String),
    Flag(String),
}

/// One place where settings were written.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    origin: Origin,
    /// What was written.
    pub(super) tree: Node,
}

impl Layer {
    /// What one environment variable sets.
    pub(super) fn of_variable(name: String, path: &[String], value: String) -> Self {
        let mut tree = Node::table();
        tree.set(path, Node::new(Kind::Raw(value)));
        Self { origin: Origin::Env(name), tree }
    }

    /// Where a byte of it is.
    pub(super) fn place(&self, byte: Option<usize>) -> Place {
        match &self.origin {
            Origin::Default => Place::Default,
            Origin::File { path, text } => Place::in_file(path, text, byte),
            Origin::Env(name) => Place::Env(name.clone()),
            Origin::Flag(flag) => Place::Flag(flag.clone()),
        }
    }
}

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.place(None).to_string())
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        Ok(Map::from([(Profile::Default, self.tree.to_dict())]))
    }
}

/// A table without a place of its own.
pub(super) struct Plain(pub(super) Dict);

impl Provider for Plain {
    fn metadata(&self) -> Metadata {
        Metadata::named("merged")
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        Ok(Map::from([(Profile::Default, self.0.clone())]))
    }
}

/// A configuration whose keys and values are right by themselves. What they mean is checked by
/// [`super::resolve`].
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    /// Everything but the models.
    pub(crate) settings: Settings,
    /// What holds for all models.
    pub(crate) defaults: Model,
    /// The models in the order of the file, and as one table each.
    pub(crate) models: Vec<(String, Model, Dict)>,
    /// The configuration file.
    pub(crate) file: Option<PathBuf>,
    /// All of it, merged, for display.
    pub(crate) merged: Dict,
    layers: Vec<Layer>,
}

impl Loaded {
    /// Where the value under a path comes from. For a model, that may be the section for all models.
    pub(crate) fn place(&self, path: &[String]) -> Place {
        place(&self.layers, path).unwrap_or(Place::Nowhere)
    }

    /// Where an item of the list under a path was written: its own line, in a list over several.
    pub(crate) fn item_place(&self, path: &[String], index: usize) -> Place {
        let item = |path: &[String]| {
            self.layers.iter().rev().find_map(|layer| {
                let Kind::List(items) = &layer.tree.find(path)?.kind else { return None };
                let span = items.get(index).and_then(|item| item.span.as_ref());
                Some(layer.place(Some(span?.start)))
            })
        };
        let found = if written(&self.layers, path).is_some() { item(path) } else { item(&inherited(path)) };
        found.unwrap_or_else(|| self.place(path))
    }
}

fn place(layers: &[Layer], path: &[String]) -> Option<Place> {
    written(layers, path).or_else(|| written(layers, &inherited(path)))
}

/// The path in the section for all models, for one of a model; nothing for others.
fn inherited(path: &[String]) -> Vec<String> {
    match path {
        [models, _, rest @ ..] if models == "models" && !rest.is_empty() => {
            std::iter::once("defaults".to_owned()).chain(rest.to_vec()).collect()
        }
        _ => Vec::new(),
    }
}

/// Where the value under a path was written last.
pub(super) fn written(layers: &[Layer], path: &[String]) -> Option<Place> {
    layers.iter().rev().find_map(|layer| {
        let node = layer.tree.find(path)?;
        let (last, parent) = path.split_last()?;
        let key = layer.tree.find(parent)?.entry(last)?.key_span.as_ref().map(|span| span.start);
        Some(layer.place(key.or(node.span.as_ref().map(|span| span.start))))
    })
}

/// Reads all layers and merges them.
pub(crate) fn load(sources: Sources) -> Result<Loaded, Problems> {
    let mut layers = vec![defaults_layer()?];
    if let Some(path) = &sources.file {
        layers.push(file_layer(path)?);
    }
    let flags: Vec<Layer> = sources.flags.into_iter().map(flag_layer).collect();
    let (variables, mut problems) = variables::layers(sources.env, &[layers.as_slice(), &flags]);
    layers.extend(variables);
    layers.extend(flags);
    for layer in &mut layers {
        let mut tree = layer.tree.clone();
        problems.extend(validate(&mut tree, &|byte| layer.place(byte)));
        layer.tree = tree;
    }
    if !problems.is_empty() {
        return Err(Problems(problems));
    }
    merge(layers, sources.file)
}

fn merge(layers: Vec<Layer>, file: Option<PathBuf>) -> Result<Loaded, Problems> {
    let merged = layers.iter().fold(Figment::new(), |merged, layer| merged.merge(layer.clone()));
    let problem = |error: figment::Error, under: &[&str]| problem(&layers, &error, under);
    let settings: Settings = merged.extract().map_err(|error| problem(error, &[]))?;
    let all: Dict = merged.extract().map_err(|error| problem(error, &[]))?;
    let defaults = Figment::from(Plain(settings.defaults.clone()))
        .extract()
        .map_err(|error| problem(error, &["defaults"]))?;
    let mut models = Vec::new();
    for name in names_in_order(&layers) {
        let own = settings.models.get(&name).cloned().unwrap_or_default();
        let mut beneath = settings.defaults.clone();
        for list in ["args", "mitigations"] {
            if own.contains_key(list) {
                beneath.remove(list);
            }
        }
        // One way to say which binary: a model's own choice replaces the other way in the defaults.
        if own.contains_key("binary") || own.contains_key("build") {
            beneath.remove("binary");
            beneath.remove("build");
        }
        let figment = Figment::from(Plain(beneath)).merge(Plain(own));
        let model = figment.extract().map_err(|error| problem(error, &["models", &name]))?;
        let table = figment.extract().map_err(|error| problem(error, &["models", &name]))?;
        models.push((name, model, table));
    }
    Ok(Loaded { settings, defaults, models, file, merged: all, layers })
}

fn names_in_order(layers: &[Layer]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for layer in layers {
        let Some(Kind::Table(entries)) = layer.tree.entry("models").map(|entry| &entry.value.kind) else {
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

/// What the schema let through and the types did not take; a number too large for its type, for one.
pub(super) fn problem(layers: &[Layer], error: &figment::Error, under: &[&str]) -> Problems {
    let path: Vec<String> = under.iter().map(|&key| key.to_owned()).chain(error.path.clone()).collect();
    let place = place(layers, &path).unwrap_or(Place::Nowhere);
    let what = match &error.kind {
        figment::error::Kind::InvalidValue(figment::error::Actual::Signed(number), _) => {
            format!("`{number}` is too large")
        }
        figment::error::Kind::InvalidValue(figment::error::Actual::Unsigned(number), _) => {
            format!("`{number}` is too large")
        }
        kind => kind.to_string(),
    };
    Problem::new(place, format!("`{}`: {what}", super::problem::dotted(&path))).into()
}

/// The compiled-in defaults in the shape of a configuration file: sections about models go under `[defaults]`.
fn defaults_layer() -> Result<Layer, Problems> {
    let document = toml_edit::Document::parse(TEXT)
        .map_err(|error| Problem::new(Place::Default, format!("the compiled-in defaults: {error}")))?;
    let mut tree = Node::table();
    let source = Node::from(document.as_item());
    let Kind::Table(entries) = source.kind else { return Ok(Layer { origin: Origin::Default, tree }) };
    for entry in entries {
        let path: Vec<String> = match entry.key.as_str() {
            "queue" | "quarantine" | "lifecycle" => vec!["defaults".to_owned(), entry.key],
            "recycle" => vec!["defaults".to_owned(), "policy".to_owned()],
            section if COMPILED_IN.contains(&section) => continue,
            "diagnose" => {
                let Kind::Table(keys) = entry.value.kind else { continue };
                for key in keys.into_iter().filter(|key| is_set_in_diagnose(&key.key)) {
                    tree.set(&[entry.key.clone(), key.key], key.value);
                }
                continue;
            }
            "model" => {
                let Kind::Table(keys) = entry.value.kind else { continue };
                for key in keys {
                    tree.set(&["defaults".to_owned(), key.key], key.value);
                }
                continue;
            }
            _ => vec![entry.key],
        };
        tree.set(&path, entry.value);
    }
    Ok(Layer { origin: Origin::Default, tree })
}

/// The layer of a file.
pub(super) fn file_layer(path: &Path) -> Result<Layer, Problems> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        Problem::new(
            Place::File { path: path.to_owned(), line: 0 },
            format!("the configuration file cannot be read: {error}"),
        )
        .hint("check the path given with --config")
    })?;
    let document = toml_edit::Document::parse(text.clone()).map_err(|error| {
        let byte = error.span().map(|span| span.start);
        let message = error.message().lines().collect::<Vec<_>>().join(", ");
        Problem::new(Place::in_file(path, &text, byte), format!("this is not TOML: {message}"))
    })?;
    let tree = Node::from(document.as_item());
    Ok(Layer { origin: Origin::File { path: path.to_owned(), text }, tree })
}

fn flag_layer(setting: FlagSetting) -> Layer {
    let mut tree = Node::table();
    tree.set(&setting.path, setting.value);
    Layer { origin: Origin::Flag(setting.flag), tree }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn path(dotted: &str) -> Vec<String> {
        dotted.split('.').map(str::to_owned).collect()
    }

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("warden.toml");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    #[test]
    fn with_no_source_everything_is_the_compiled_in_default() {
        let loaded = load(Sources::default()).unwrap();
        assert_eq!(loaded.settings.server.port, 8080);
        assert_eq!(loaded.defaults.queue.depth, 512);
        assert_eq!(loaded.defaults.replicas, 1);
        assert_eq!(loaded.defaults.policy.common.max_futile, 3);
        assert_eq!(loaded.place(&path("server.port")), Place::Default);
        assert!(loaded.models.is_empty());
    }

    #[test]
    fn flags_come_over_the_environment_over_the_file_over_the_defaults() {
        let (_dir, file) = file("[server]\nport = 1\nhost = \"0.0.0.0\"\nconnections = 7\n");
        let loaded = load(Sources {
            file: Some(file.clone()),
            env: vec![
                ("LLAMA_WARDEN_SERVER__PORT".into(), "2".into()),
                ("LLAMA_WARDEN_SERVER__HOST".into(), "::1".into()),
                ("LLAMA_WARDEN_CONFIG".into(), "x".into()),
                ("HOME".into(), "/".into()),
            ],
            flags: vec![FlagSetting::raw("--port", &["server", "port"], "3")],
        })
        .unwrap();
        assert_eq!(loaded.settings.server.port, 3);
        assert_eq!(loaded.place(&path("server.port")), Place::Flag("flag --port".into()));
        assert_eq!(loaded.settings.server.host, "::1");
        assert_eq!(loaded.place(&path("server.host")), Place::Env("LLAMA_WARDEN_SERVER__HOST".into()));
        assert_eq!(loaded.settings.server.connections, 7);
        assert_eq!(loaded.place(&path("server.connections")), Place::File { path: file, line: 4 });
    }

    #[test]
    fn a_model_has_its_own_values_over_those_for_all_models() {
        let (_dir, file) = file(
            "[defaults]\nargs = [\"-c\", \"1\"]\nbinary = \"a\"\nenv = { A = \"1\", B = \"1\" }\nqueue.depth = 9\n\
             [models.\"z.1\"]\nenv = { B = \"2\" }\npolicy.max_age = \"1h\"\n\
             [models.a]\nargs = [\"-t\", \"1\"]\nbuild = \"b\"\nqueue.wait = \"3s\"\n",
        );
        let loaded = load(Sources { file: Some(file.clone()), ..Sources::default() }).unwrap();
        let names: Vec<&str> = loaded.models.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(names, ["z.1", "a"], "in the order of the file");
        let (z, a) = (&loaded.models[0].1, &loaded.models[1].1);
        assert_eq!(z.args, ["-c", "1"]);
        assert_eq!((z.env["A"].as_str(), z.env["B"].as_str()), ("1", "2"));
        assert_eq!((z.queue.depth, z.queue.wait), (9, Duration::from_secs(300)));
        assert_eq!(z.policy.max_age, Some(Duration::from_secs(3600)));
        assert_eq!(a.args, ["-t", "1"]);
        assert_eq!((a.queue.depth, a.queue.wait), (9, Duration::from_secs(3)));
        assert_eq!((a.binary.as_ref(), a.build.as_deref()), (None, Some("b")));
        let depth: Vec<String> = ["models", "z.1", "queue", "depth"].map(str::to_owned).into();
        assert_eq!(loaded.place(&depth), Place::File { path: file, line: 5 });
    }

    #[test]
    fn what_is_wrong_in_the_environment_names_the_variable() {
        let error = load(Sources {
            env: vec![
                ("LLAMA_WARDEN_SERVER__PROT".into(), "2".into()),
                ("LLAMA_WARDEN_QUEUE__WAIT".into(), "soon".into()),
                ("LLAMA_WARDEN_SERVER__PORT".into(), "many".into()),
            ],
            ..Sources::default()
        })
        .unwrap_err();
        let told: Vec<String> = error.0.iter().map(ToString::to_string).collect();
        assert!(
            told[0].starts_with("environment variable LLAMA_WARDEN_SERVER__PROT: unknown key `prot`"),
            "{told:?}"
        );
        assert!(told[1].contains("unknown key `queue`"), "{told:?}");
        assert!(told[2].contains("`many` is text; a whole number is needed"), "{told:?}");
    }

    #[test]
    fn names_in_variables_stay_what_they_are() {
        let (_dir, file) = file("[models.Qwen3]\nmodel = \"a.gguf\"\n");
        let variables = |all: &[(&str, &str)]| Sources {
            file: Some(file.clone()),
            env: all
                .iter()
                .map(|(name, value)| (format!("{ENV_PREFIX}{name}"), (*value).to_owned()))
                .collect(),
            ..Sources::default()
        };
        let loaded = load(variables(&[
            ("DEFAULTS__ENV__GGML_CUDA_DISABLE_GRAPHS", "1"),
            ("MODELS__QWEN3__REPLICAS", "2"),
            ("MODELS__Other__MODEL", "b.gguf"),
            ("MODELS__Other__REPLICAS", "3"),
        ]))
        .unwrap();
        let told: Vec<_> =
            loaded.models.iter().map(|(name, model, _)| (name.as_str(), model.replicas)).collect();
        assert_eq!(told, [("Qwen3", 2), ("Other", 3)]);
        assert_eq!(loaded.models[0].1.env["GGML_CUDA_DISABLE_GRAPHS"], "1");
        let wrong = load(variables(&[("MODELS__QWEN__REPLICAS", "2"), ("MODELS__zzz__PRELOAD", "true")]))
            .unwrap_err();
        let told: Vec<_> =
            wrong.0.iter().map(|one| format!("{one} | {}", one.hint.clone().unwrap_or_default())).collect();
        assert_eq!(
            told,
            [
                "environment variable LLAMA_WARDEN_MODELS__QWEN__REPLICAS: there is no model `QWEN` | the nearest is \
                 `Qwen3`",
                "environment variable LLAMA_WARDEN_MODELS__zzz__PRELOAD: there is no model `zzz` | \
                 `LLAMA_WARDEN_MODELS__zzz__MODEL` would say which file it serves"
            ]
        );
    }

    #[test]
    fn a_file_that_is_not_toml_is_an_error_with_its_line() {
        let (_dir, file) = file("[server]\nport = = 1\n");
        let error = load(Sources { file: Some(file), ..Sources::default() }).unwrap_err().to_string();
        assert!(error.contains("warden.toml:2: this is not TOML"), "{error}");
        let error =
            load(Sources { file: Some("/no/such".into()), ..Sources::default() }).unwrap_err().to_string();
        assert!(error.starts_with("/no/such: the configuration file cannot be read"), "{error}");
    }
}
