//! Errors about git repositories, each with its remedy.

use crate::error::ErrorClass;

/// Errors about git repositories.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum GitError {
    #[error("`{text}` is no git source: {why}")]
    Source {
        text: String,
        why: String,
        /// Names defined in the configuration.
        names: Vec<String>,
    },
    #[error("{host} could not be asked for {reference}: {why}")]
    Unreachable { host: String, reference: String, why: String },
    #[error("{url} was refused: {why}")]
    Refused { url: String, why: String },
    #[error("git is not installed: it fetches from servers")]
    NoGit,
    #[error("{url} sends more than {most} MiB, which is more than any llama.cpp: nothing of it was taken")]
    TooLarge { url: String, most: u64 },
    #[error("{reference} of {url} is not in the cache, and the network is not to be used")]
    Offline { url: String, reference: String },
    #[error("{repository} has no tag, branch or commit `{reference}`{}", similar_suffix(.similar))]
    NoSuchReference { repository: String, reference: String, similar: Vec<String> },
    #[error("`{reference}` is the beginning of several commits in {repository}")]
    Ambiguous { repository: String, reference: String },
    #[error("{repository} lacks `{path}` of commit {commit}")]
    Missing {
        repository: String,
        /// Path of the file relative to the repository's root.
        path: String,
        commit: String,
    },
    #[error("commit {commit} was not written out: its entry `{entry}` {why}")]
    Unsafe { commit: String, entry: String, why: &'static str },
    #[error("the range {from}..{to} of {repository} {why}")]
    Range { repository: String, from: String, to: String, why: &'static str },
    #[error("there is no git repository at {path}")]
    NoRepository { path: String },
    #[error("{doing} {repository}: {why}")]
    Repository {
        /// The operation, such as `opening`.
        doing: &'static str,
        repository: String,
        why: String,
    },
}

impl GitError {
    /// An error of libgit2 during an operation, such as `opening`.
    pub(super) fn repository(doing: &'static str, repository: &str, error: &git2::Error) -> Self {
        Self::Repository { doing, repository: repository.to_owned(), why: error.message().to_owned() }
    }

    /// Class of the error by who has to act.
    pub const fn kind(&self) -> ErrorClass {
        match self {
            Self::Source { .. }
            | Self::NoRepository { .. }
            | Self::Offline { .. }
            | Self::NoSuchReference { .. }
            | Self::Ambiguous { .. }
            | Self::Unsafe { .. }
            | Self::Range { .. } => ErrorClass::Input,
            Self::Unreachable { .. }
            | Self::NoGit
            | Self::TooLarge { .. }
            | Self::Refused { .. }
            | Self::Missing { .. }
            | Self::Repository { .. } => ErrorClass::Machine,
        }
    }

    /// The remedy for the user.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Source { names, .. } => {
                format!("give a URL, the folder of a repository, or one of the names {}", names.join(", "))
            }
            Self::Missing { path, commit, repository } => format!(
                "it is a partial clone: `git -C {repository} cat-file -e {commit}:{path}` fetches it where the clone \
                 knows its server; else clone again without --filter"
            ),
            _ => return self.fixed_hint().map(str::to_owned),
        })
    }

    fn fixed_hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::NoRepository { .. } => {
                "give the folder that has `.git` in it, or a bare repository; for other folders there is \
                 --source PATH"
            }
            Self::Unreachable { why, .. } if why.contains("certificate") => {
                "git's setting `http.sslCAInfo`, or GIT_SSL_CAINFO, names the certificates that are trusted"
            }
            Self::Unreachable { .. } => {
                "check the network and the proxy settings; without a network, take a commit that is in the cache \
                 with --offline, a clone with --git PATH, or a folder or archive with --source PATH"
            }
            Self::Refused { .. } => {
                "no password is ever asked for: check the URL, let git's `credential.helper` know the password, \
                 put a token into the URL (https://TOKEN@HOST/...), or clone the repository and give its folder"
            }
            Self::NoGit => "install it: apt install git; or take a folder or archive with --source PATH",
            Self::TooLarge { .. } => "check the URL; a clone of your own can be given by its folder",
            Self::Offline { .. } => {
                "run it once without --offline, or take a folder or archive with --source PATH"
            }
            Self::NoSuchReference { reference, .. } if is_abbreviated(reference) => {
                "a server can be asked for a whole commit only: give all 40 digits, or a tag"
            }
            Self::Ambiguous { .. } => "give more digits",
            Self::Range { .. } => "it goes from older to newer and leaves out its beginning: A..B",
            Self::Repository { repository, .. } if repository.contains("://") => {
                "what was fetched lies in the folder `git` of the cache: should it be damaged, remove it there, \
                 and it is fetched again"
            }
            _ => return None,
        })
    }
}

pub(super) fn is_abbreviated(text: &str) -> bool {
    (7..40).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn similar_suffix(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!("; similar are: {}", names.join(", ")) }
}
