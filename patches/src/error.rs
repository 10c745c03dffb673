//! Everything that can go wrong here, as one type. Each message says what was being done to which thing; the cure,
//! where there is one, is in [`Error::hint`].

use std::io;
use std::path::{Path, PathBuf};

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// Whose turn it is to act on an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// What was asked for makes no sense as given: the caller's arguments are wrong.
    Input,
    /// The machine lacks something: disk, a permission.
    Machine,
    /// A patch set is not applied to this source, because it is not known to be right there.
    Refused,
}

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum Error {
    /// A patch set, or the list of mitigations, that cannot be used as it is written.
    #[error("{file}{}: {}{why}", at(*.line), key_of(.key))]
    Set {
        /// Its file, as the reader knows it.
        file: String,
        /// The line in it, from 1; none when the file is missing or the fault is nowhere in particular.
        line: Option<usize>,
        /// The key, such as `hook[2].anchor`; may be empty.
        key: String,
        why: String,
    },
    /// No patch set has this id.
    #[error("there is no patch set `{id}`; there are: {}", list(.known))]
    NoSuchSet { id: String, known: Vec<String> },
    /// Patch sets that were asked for are not applied to this source.
    #[error("{}", refusals(.0))]
    Refused(Vec<Refusal>),
    /// A folder that cannot be patched, or restored, as it is.
    #[error("{path}: {why}")]
    Folder {
        /// The folder or the file in question.
        path: PathBuf,
        /// What is wrong; the lines that differ follow on lines of their own.
        why: String,
        /// The cure.
        cure: String,
        /// Whether it is the folder's content that we refuse to touch.
        refused: bool,
    },
    /// A [`Tree`](crate::Tree) that somebody else provides could not be read.
    #[error(transparent)]
    Tree(Box<dyn std::error::Error + Send + Sync>),
    /// A file operation failed.
    #[error("{doing} {path}: {source}")]
    Io {
        /// What was being done, such as `reading`.
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

/// Why one patch set is not applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The set's id.
    pub set: String,
    /// Whether only the fingerprints are unknown, so that `--allow-unverified` would apply it.
    pub unverified: bool,
    /// One line each.
    pub reasons: Vec<String>,
}

fn refusals(all: &[Refusal]) -> String {
    let one = |refusal: &Refusal| {
        let why = if refusal.unverified { "is not verified for" } else { "is refused for" };
        let reasons = refusal.reasons.iter().map(|reason| format!("\n  {reason}"));
        format!("the patch set `{}` {why} this source:{}", refusal.set, reasons.collect::<String>())
    };
    all.iter().map(one).collect::<Vec<_>>().join("\n")
}

impl Error {
    /// Whose turn it is: an edge maps this to its exit code.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Set { .. } | Self::NoSuchSet { .. } => Kind::Input,
            Self::Refused(_) | Self::Folder { refused: true, .. } => Kind::Refused,
            Self::Folder { .. } | Self::Tree(_) | Self::Io { .. } => Kind::Machine,
        }
    }

    /// What the reader can do about it, as one sentence.
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

/// Shorthand for wrapping an `io::Error`: `fs::read(path).map_err(io_error("reading", path))`.
pub(crate) fn io_error(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
    let path = path.into();
    move |source| Error::Io { doing, path, source }
}

/// The folder's content is not what it must be.
pub(crate) fn refused(path: &Path, why: String, cure: &str) -> Error {
    Error::Folder { path: path.to_owned(), why, cure: cure.to_owned(), refused: true }
}

/// The machine does not allow it.
pub(crate) fn trouble(path: &Path, why: &str, cure: &str) -> Error {
    Error::Folder { path: path.to_owned(), why: why.to_owned(), cure: cure.to_owned(), refused: false }
}

fn at(line: Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!(":{line}"))
}

fn key_of(key: &str) -> String {
    if key.is_empty() { String::new() } else { format!("`{key}`: ") }
}

/// Some ids, shortened when there are many.
fn list(ids: &[String]) -> String {
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
        let refusal =
            |unverified| Refusal { set: "server".into(), unverified, reasons: vec!["a.cpp:3: moved".into()] };
        let set = |line, key: &str| Error::Set {
            file: "a/set.toml".into(),
            line,
            key: key.into(),
            why: "is empty".into(),
        };
        let io = |source: io::Error| Error::Io { doing: "writing", path: "/src/ggml.c".into(), source };
        let errors = [
            set(Some(7), "id"),
            set(None, ""),
            Error::NoSuchSet { id: "cuda".into(), known: vec!["cuda-memory".into(), "server".into()] },
            Error::NoSuchSet { id: "cuda".into(), known: (1..=14).map(|set| format!("set{set}")).collect() },
            Error::NoSuchSet { id: "cuda".into(), known: Vec::new() },
            Error::Refused(vec![refusal(true)]),
            Error::Refused(vec![refusal(true), refusal(false)]),
            Error::Folder {
                path: "/src".into(),
                why: "it is patched already".into(),
                cure: "restore it first: `llama-warden patches restore /src`".into(),
                refused: true,
            },
            Error::Tree("the archive ended early".into()),
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
