//! What is wrong with a configuration: where, what, and what to do about it. All problems of a file are told at once.

use std::fmt;
use std::path::{Path, PathBuf};

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a file.
    File {
        /// Its path.
        path: PathBuf,
        /// The line, from 1; 0 if unknown.
        line: usize,
    },
    /// In an environment variable.
    Env(String),
    /// On the command line: a flag, or the flags of llama-server.
    Flag(String),
    /// Compiled in.
    Default,
    /// Nowhere: something is missing.
    Nowhere,
}

impl Place {
    /// The place of a byte in a text file.
    pub fn in_file(path: &Path, text: &str, byte: Option<usize>) -> Self {
        let line =
            byte.and_then(|byte| text.get(..byte)).map_or(0, |before| before.matches('\n').count() + 1);
        Self::File { path: path.to_owned(), line }
    }
}

impl fmt::Display for Place {
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

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where.
    pub place: Place,
    /// The problem, in a sentence.
    pub message: String,
    /// The cure.
    pub hint: Option<String>,
}

impl Problem {
    /// A problem without a hint.
    pub fn new(place: Place, message: impl Into<String>) -> Self {
        Self { place, message: message.into(), hint: None }
    }

    /// Adds the cure.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// Everything that is wrong; never empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    /// Lines for a person: an error for each problem, with its hint after it.
    pub fn lines(&self) -> Vec<String> {
        self.0.iter().flat_map(|one| error_lines(&one.to_string(), one.hint.as_deref())).collect()
    }
}

/// `error: MESSAGE`, and `hint: HINT` if there is one.
pub fn error_lines(message: &str, hint: Option<&str>) -> Vec<String> {
    let mut lines = vec![format!("error: {message}")];
    lines.extend(hint.filter(|hint| !hint.is_empty()).map(|hint| format!("hint: {hint}")));
    lines
}

impl From<Problem> for Problems {
    fn from(problem: Problem) -> Self {
        Self(vec![problem])
    }
}

/// How alike two words are, from 0 to 1. One slip of a finger counts little, however short the word is.
pub fn alike(one: &str, other: &str) -> f64 {
    let alike = strsim::jaro_winkler(one, other);
    if strsim::osa_distance(one, other) == 1 { alike.max(0.95) } else { alike }
}

/// A key as TOML writes it: `models."org/name".args`.
pub fn dotted(path: &[String]) -> String {
    path.iter().map(|key| quoted(key)).collect::<Vec<_>>().join(".")
}

/// A key, in quotes where TOML needs them.
pub fn quoted(key: &str) -> String {
    let bare = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    if bare { key.to_owned() } else { toml_edit::Value::from(key).to_string() }
}
