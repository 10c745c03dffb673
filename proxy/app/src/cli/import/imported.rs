//! What an import has read: models and settings, and settings without an equivalent.

use serde_json::Value;

use crate::exit::CommandError;

pub(super) type EnvLookup<'a> = &'a dyn Fn(&str) -> Option<String>;

#[derive(Debug, Default)]
pub(super) struct ImportedModel {
    pub(super) name: String,
    /// Written into the file as comments for the operator.
    pub(super) notes: Vec<String>,
    pub(super) command: ImportedCommand,
    pub(super) model: Option<String>,
    pub(super) aliases: Vec<String>,
    pub(super) loading: ImportedLoading,
    pub(super) max_in_flight: Option<u64>,
    pub(super) upstream_model: Option<String>,
    /// In seconds.
    pub(super) stop_grace: Option<u64>,
    pub(super) requests: ImportedRequests,
    pub(super) listing: Vec<(&'static str, Value)>,
}

#[derive(Debug, Default)]
pub(super) struct ImportedCommand {
    pub(super) wrapper: Vec<String>,
    pub(super) binary: Option<String>,
    pub(super) directory: Option<String>,
    pub(super) args: Vec<String>,
    pub(super) mitigations: Vec<String>,
    pub(super) env: Vec<(String, String)>,
    /// Words of another program than llama-server; `binary` and `args` are then empty.
    pub(super) other_program: Vec<String>,
    /// Path by which that program shows that it is ready.
    pub(super) ready: Option<String>,
}

#[derive(Debug, Default)]
pub(super) struct ImportedLoading {
    pub(super) preload: bool,
    pub(super) pin: bool,
    /// Groups in which at most one model is loaded.
    pub(super) groups: Vec<String>,
    /// Idle time in seconds after which the model is unloaded.
    pub(super) ttl: Option<u64>,
    /// Chats show the loading progress.
    pub(super) is_shown: bool,
}

#[derive(Debug, Default)]
pub(super) struct ImportedRequests {
    pub(super) strip: Vec<String>,
    pub(super) set: Vec<(String, Value)>,
    pub(super) default: Vec<(String, Value)>,
    pub(super) system_prompt: Option<String>,
    pub(super) names: Vec<NameVariant>,
}

#[derive(Debug, Default)]
pub(super) struct NameVariant {
    pub(super) name: String,
    pub(super) set: Vec<(String, Value)>,
}

impl ImportedModel {
    pub(super) fn answers_to(&self, name: &str) -> bool {
        self.all_names().any(|own| own == name)
    }

    pub(super) fn note_windows(&mut self) {
        let ImportedCommand { args, binary, wrapper, other_program, .. } = &self.command;
        let words = args.iter().chain(&self.model).chain(binary).chain(wrapper).chain(other_program);
        if words.into_iter().any(|word| is_windows_path(word)) {
            let note = "its paths are those of Windows: write where the files are on this machine \
                        (in WSL `C:\\x` is `/mnt/c/x`)";
            self.notes.push(note.to_owned());
        }
    }

    pub(super) fn all_names(&self) -> impl Iterator<Item = &String> {
        let variants =
            self.requests.names.iter().map(|variant| &variant.name).filter(|name| **name != self.name);
        std::iter::once(&self.name).chain(&self.aliases).chain(variants)
    }

    /// Sets a mitigation instead of a flag, because the flag differs between builds.
    pub(super) fn set_mmap(&mut self, on: bool) {
        self.command.mitigations.retain(|item| item != NO_MMAP);
        if !on {
            self.command.mitigations.push(NO_MMAP.to_owned());
        }
    }
}

/// Builds map the model's file by default; this mitigation reads the file instead.
const NO_MMAP: &str = "no-mmap";

#[derive(Debug)]
pub(super) struct ImportedRemote {
    pub(super) name: String,
    pub(super) url: String,
    pub(super) model: Option<String>,
    pub(super) aliases: Vec<String>,
    pub(super) key_file: Option<String>,
    pub(super) requests: ImportedRequests,
}

impl ImportedRemote {
    pub(super) fn all_names(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.name).chain(&self.aliases)
    }
}

#[derive(Debug)]
pub(super) struct ImportedSelector {
    pub(super) name: String,
    pub(super) models: Vec<String>,
}

#[derive(Debug)]
pub(super) struct UnsupportedSetting {
    pub(super) setting: String,
    pub(super) nearest: String,
    /// Empty for a global setting.
    pub(super) models: Vec<String>,
}

impl UnsupportedSetting {
    pub(super) fn describe(&self, most: usize) -> String {
        let Self { setting: what, nearest, models } = self;
        let shown: Vec<String> = models.iter().take(most).map(|model| format!("`{model}`")).collect();
        let more = models.len().saturating_sub(most);
        let of = match (models.len(), more) {
            (0, _) => String::new(),
            (1, _) => format!("model {}: ", shown.join("")),
            (_, 0) => format!("models {}: ", shown.join(", ")),
            (_, more) => format!("models {} and {more} more: ", shown.join(", ")),
        };
        format!("{of}{what}: {nearest}")
    }
}

#[derive(Debug, Default)]
pub(super) struct ImportedListener {
    pub(super) host: Option<String>,
    pub(super) port: Option<u16>,
    pub(super) tls_cert: Option<String>,
    pub(super) tls_key: Option<String>,
    pub(super) api_prefix: Option<String>,
}

#[derive(Debug, Default)]
pub(super) struct ImportedConfig {
    pub(super) listener: ImportedListener,
    pub(super) log_level: Option<String>,
    /// A folder provides the models that name no file.
    pub(super) has_folder: bool,
    pub(super) folders: Vec<String>,
    pub(super) defaults: Option<ImportedModel>,
    pub(super) max_loaded: Option<u32>,
    /// In seconds, for all models.
    pub(super) start_timeout: Option<u64>,
    /// In seconds, for all models.
    pub(super) stop_grace: Option<u64>,
    pub(super) models: Vec<ImportedModel>,
    pub(super) remotes: Vec<ImportedRemote>,
    pub(super) selectors: Vec<ImportedSelector>,
    pub(super) unmatched: Vec<UnsupportedSetting>,
}

impl ImportedConfig {
    pub(super) fn add_unsupported(&mut self, what: impl Into<String>, nearest: impl Into<String>) {
        self.unmatched.push(UnsupportedSetting {
            setting: what.into(),
            nearest: nearest.into(),
            models: Vec::new(),
        });
    }

    /// Merges equal settings of several models into one entry.
    pub(super) fn add_unsupported_of(
        &mut self,
        model: &str,
        what: impl Into<String>,
        nearest: impl Into<String>,
    ) {
        let what = what.into();
        let nearest = nearest.into();
        let is_same = |left: &&mut UnsupportedSetting| {
            left.setting == what && left.nearest == nearest && !left.models.is_empty()
        };
        match self.unmatched.iter_mut().find(is_same) {
            Some(same) if same.models.iter().any(|own| own == model) => {}
            Some(same) => same.models.push(model.to_owned()),
            None => self.unmatched.push(UnsupportedSetting {
                setting: what,
                nearest,
                models: vec![model.to_owned()],
            }),
        }
    }

    /// Fails if two models, or a model and an alias, have one name: clients could not distinguish them.
    pub(super) fn check_names(&self, from: &str) -> Result<(), CommandError> {
        let mut seen = std::collections::BTreeMap::<&str, &str>::new();
        for model in &self.models {
            for name in model.all_names() {
                if let Some(other) = seen.insert(name, &model.name) {
                    return Err(CommandError::usage(
                        format!(
                            "{from}: the name `{name}` is used twice, by `{other}` and by `{}`",
                            model.name
                        ),
                        "give each model and each alias a name of its own",
                    ));
                }
            }
        }
        Ok(())
    }
}

pub(super) fn is_listed(words: &str, word: &str) -> bool {
    words.split_whitespace().any(|known| known == word)
}

/// In a Windows path, `\` is an ordinary character.
pub(super) fn is_windows_path(word: &str) -> bool {
    let bytes = word.as_bytes();
    let drive = |at: usize| {
        bytes[at].is_ascii_alphabetic()
            && bytes.get(at + 1..at + 3) == Some(b":\\")
            && at.checked_sub(1).is_none_or(|before| !bytes[before].is_ascii_alphanumeric())
    };
    (0..bytes.len()).any(drive) || (word.contains(".exe") && word.contains('\\'))
}
