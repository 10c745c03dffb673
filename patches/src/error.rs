//! The error type of this crate. Messages name the operation; [`PatchError::hint`] gives the remedy.

use std::io;
use std::path::{Path, PathBuf};

/// Result type of this crate.
pub type Result<T> = std::result::Result<T, PatchError>;

/// Class of an [`PatchError`], by who has to act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchErrorClass {
    /// The caller's arguments are wrong.
    Input,
    /// The machine lacks disk space or a permission.
    Machine,
    /// A patch set is not known to be right for this source, so it is not applied.
    Refused,
}

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum PatchError {
    #[error("{file}{}: {}{why}", line_suffix(*.line), key_prefix(.key))]
    Set {
        /// Path of the file as the user knows it.
        file: String,
        /// Line in the file, from 1; `None` if the file is missing or the error has no position.
        line: Option<usize>,
        /// Key, such as `hook[2].anchor`; may be empty.
        key: String,
        why: String,
    },
    #[error("there is no patch set `{id}`; there are: {}", join_ids(.known))]
    NoSuchSet { id: String, known: Vec<String> },
    #[error("{}", describe_refusals(.0))]
    Refused(Vec<SetRefusal>),
    #[error("{path}: {why}")]
    Folder {
        path: PathBuf,
        /// Description; differing lines follow on separate lines.
        why: String,
        cure: String,
        /// `true`: the folder's content forbids the operation; `false`: this machine does.
        refused: bool,
    },
    #[error(transparent)]
    Tree(Box<dyn std::error::Error + Send + Sync>),
    #[error("{doing} {path}: {source}")]
    Io {
        /// The operation, such as `reading`.
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

/// Reasons why a patch set is not applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetRefusal {
    /// Id of the set.
    pub set: String,
    /// Only the fingerprints are unknown, so that `--allow-unverified` would apply the set.
    pub unverified: bool,
    /// Reasons, one line each.
    pub reasons: Vec<String>,
}

fn describe_refusals(all: &[SetRefusal]) -> String {
    let one = |refusal: &SetRefusal| {
        let why = if refusal.unverified { "is not verified for" } else { "is refused for" };
        let reasons = refusal.reasons.iter().map(|reason| format!("\n  {reason}"));
        format!("the patch set `{}` {why} this source:{}", refusal.set, reasons.collect::<String>())
    };
    all.iter().map(one).collect::<Vec<_>>().join("\n")
}

impl PatchError {
    pub(crate) fn set(file: impl Into<String>, key: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Set { file: file.into(), line: None, key: key.into(), why: why.into() }
    }

    /// Class of the error by who has to act; callers map it to an exit code.
    pub const fn kind(&self) -> PatchErrorClass {
        match self {
            Self::Set { .. } | Self::NoSuchSet { .. } => PatchErrorClass::Input,
            Self::Refused(_) | Self::Folder { refused: true, .. } => PatchErrorClass::Refused,
            Self::Folder { .. } | Self::Tree(_) | Self::Io { .. } => PatchErrorClass::Machine,
        }
    }

    /// The remedy for the user, as one sentence.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Set { .. } => "docs/patches.md explains what a set.toml says".into(),
            Self::NoSuchSet { .. } => {
                "`llama-warden patches list` shows what there is; sets of your own come with --patches DIR"
                    .into()
            }
            Self::Refused(refusals) => {
                let cure = "build without it (--plain for none, --patch-set ID for some), or bring a set that \
                            knows this source (--patches DIR)";
                if refusals.iter().all(|refusal| refusal.unverified) {
                    format!("read what changed, then build with --allow-unverified, or {cure}")
                } else {
                    cure.into()
                }
            }
            Self::Folder { cure, .. } => cure.clone(),
            Self::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                "the disk is full".into()
            }
            Self::Tree(_) | Self::Io { .. } => return None,
        };
        Some(hint)
    }
}

/// Wraps an `io::Error`: `fs::read(path).map_err(io_error("reading", path))`.
pub(crate) fn io_error(
    doing: &'static str,
    path: impl Into<PathBuf>,
) -> impl FnOnce(io::Error) -> PatchError {
    let path = path.into();
    move |source| PatchError::Io { doing, path, source }
}

pub(crate) fn content_error(path: &Path, why: String, cure: &str) -> PatchError {
    PatchError::Folder { path: path.to_owned(), why, cure: cure.to_owned(), refused: true }
}

pub(crate) fn machine_error(path: &Path, why: &str, cure: &str) -> PatchError {
    PatchError::Folder { path: path.to_owned(), why: why.to_owned(), cure: cure.to_owned(), refused: false }
}

fn line_suffix(line: Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!(":{line}"))
}

fn key_prefix(key: &str) -> String {
    if key.is_empty() { String::new() } else { format!("`{key}`: ") }
}

fn join_ids(ids: &[String]) -> String {
    const SHOWN: usize = 12;
    if ids.is_empty() {
        return "none".to_owned();
    }
    let text = ids.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    match ids.len().checked_sub(SHOWN) {
        None | Some(0) => text,
        Some(more) => format!("{text} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_carries_its_reasons_and_the_way_out() {
        let refusal = |unverified| SetRefusal {
            set: "server".into(),
            unverified,
            reasons: vec!["a.cpp:3: moved".into()],
        };
        let set = |line, key: &str| PatchError::Set {
            file: "a/set.toml".into(),
            line,
            key: key.into(),
            why: "is empty".into(),
        };
        let io = |source: io::Error| PatchError::Io { doing: "writing", path: "/src/ggml.c".into(), source };
        let errors = [
            set(Some(7), "id"),
            set(None, ""),
            PatchError::NoSuchSet { id: "cuda".into(), known: vec!["cuda-memory".into(), "server".into()] },
            PatchError::NoSuchSet {
                id: "cuda".into(),
                known: (1..=14).map(|set| format!("set{set}")).collect(),
            },
            PatchError::NoSuchSet { id: "cuda".into(), known: Vec::new() },
            PatchError::Refused(vec![refusal(true)]),
            PatchError::Refused(vec![refusal(true), refusal(false)]),
            PatchError::Folder {
                path: "/src".into(),
                why: "it is patched already".into(),
                cure: "restore it first: `llama-warden patches restore /src`".into(),
                refused: true,
            },
            PatchError::Tree("the archive ended early".into()),
            io(io::ErrorKind::StorageFull.into()),
            io(io::Error::other("the kernel said no")),
        ];
        let told = errors.iter().map(|error| {
            let hint = error.hint().map(|hint| format!("    hint: {hint}\n")).unwrap_or_default();
            format!("{:?}: {error}\n{hint}", error.kind())
        });
        insta::assert_snapshot!(told.collect::<String>());
    }
}
