//! Problems of a configuration: source, message and hint. All problems of a file are reported together.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigPlace {
    /// The value is in a file.
    File {
        /// Path of the file.
        path: Arc<Path>,
        /// Line, from 1; 0 if unknown.
        line: usize,
    },
    /// The value is in this environment variable.
    Env(String),
    /// The value is on the command line: in a flag of llama-warden, or in the flags of llama-server.
    Flag(String),
    /// The value is a compiled-in default.
    Default,
    /// There is no source, because something is missing.
    Nowhere,
}

impl ConfigPlace {
    /// Returns the place of a whole file.
    pub fn whole_file(path: &Path) -> Self {
        Self::File { path: path.into(), line: 0 }
    }
}

/// A text file whose byte offsets are converted to lines.
pub(crate) struct SourceLines {
    path: Arc<Path>,
    ends: Vec<usize>,
}

impl SourceLines {
    pub(crate) fn new(path: &Path, text: &str) -> Self {
        Self { path: path.into(), ends: text.match_indices('\n').map(|(end, _)| end).collect() }
    }

    /// Returns the line in which a range of bytes begins; the whole file if there is no range.
    pub(crate) fn place(&self, span: Option<Range<usize>>) -> ConfigPlace {
        let line = span.map_or(0, |span| self.ends.partition_point(|end| *end < span.start) + 1);
        ConfigPlace::File { path: Arc::clone(&self.path), line }
    }
}

impl fmt::Display for ConfigPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, line: 0 } => write!(f, "{}", path.display()),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Env(name) => write!(f, "environment variable {name}"),
            Self::Flag(name) => f.write_str(name),
            Self::Default => f.write_str("default"),
            Self::Nowhere => f.write_str("configuration"),
        }
    }
}

/// A problem of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigProblem {
    /// Source of the faulty value.
    pub place: ConfigPlace,
    /// Description, in a sentence.
    pub message: String,
    /// Advice, if any.
    pub hint: Option<String>,
}

impl ConfigProblem {
    /// Creates a problem without a hint.
    pub fn new(place: ConfigPlace, message: impl Into<String>) -> Self {
        Self { place, message: message.into(), hint: None }
    }

    /// Adds a hint.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// All problems of a configuration; never empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct ConfigProblems(pub Vec<ConfigProblem>);

impl ConfigProblems {
    /// Lines to print: an error per problem, followed by its hint.
    pub fn lines(&self) -> Vec<String> {
        self.0.iter().flat_map(|one| error_lines(&one.to_string(), one.hint.as_deref())).collect()
    }
}

/// Formats `error: MESSAGE`, and `hint: HINT` if there is one.
pub fn error_lines(message: &str, hint: Option<&str>) -> Vec<String> {
    let mut lines = vec![format!("error: {message}")];
    lines.extend(hint.filter(|hint| !hint.is_empty()).map(|hint| format!("hint: {hint}")));
    lines
}

impl From<ConfigProblem> for ConfigProblems {
    fn from(problem: ConfigProblem) -> Self {
        Self(vec![problem])
    }
}

/// Returns the similarity of two words, from 0 to 1. A single typing error counts little even in short words.
pub fn similarity(one: &str, other: &str) -> f64 {
    let alike = strsim::jaro_winkler(one, other);
    if strsim::osa_distance(one, other) == 1 { alike.max(0.95) } else { alike }
}

pub(crate) fn owned_path(path: &[&str]) -> Vec<String> {
    path.iter().map(|&key| key.to_owned()).collect()
}

/// Formats a key path as TOML: `models."org/name".args`.
pub fn dotted_key(path: &[String]) -> String {
    path.iter().map(|key| quoted_key(key)).collect::<Vec<_>>().join(".")
}

/// Formats a key as TOML, in quotes if needed.
pub fn quoted_key(key: &str) -> String {
    let bare = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    if bare { key.to_owned() } else { toml_edit::Value::from(key).to_string() }
}
