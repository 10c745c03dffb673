//! Location of a repository: a URL, a folder, or a name defined in the configuration.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use super::fault::GitError;
use crate::error::{Result, io_error};

/// Supported URL schemes. ssh is excluded: it would need keys, agents and prompts.
const URL_SCHEMES: [&str; 4] = ["https://", "http://", "git://", "file://"];

/// Location of a repository.
#[derive(Clone, PartialEq, Eq)]
pub enum GitLocation {
    /// A server; fetched commits are cached.
    Url(String),
    /// A repository on disk, read in place: bare, with a worktree, or a linked worktree.
    Path(PathBuf),
}

/// A location with an optional default revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GitSource {
    /// Location of the repository.
    pub location: GitLocation,
    /// A tag, a branch or a commit; `None`: the repository's `HEAD`.
    pub reference: Option<String>,
}

impl GitSource {
    /// Parses user input: a configured name, a URL, or a path; each may end in `#REF`.
    ///
    /// # Errors
    /// Fails on an unsupported URL or an empty reference.
    pub fn parse(text: &str, names: &BTreeMap<String, String>) -> Result<Self> {
        let written = names.get(text).map_or(text, String::as_str);
        let (place, reference) = match written.split_once('#') {
            // A folder's name may contain `#`.
            Some(_) if Path::new(written).exists() => (written, None),
            Some((place, reference)) => (place, Some(reference)),
            None => (written, None),
        };
        let refuse = |why: &str| {
            let names = names.keys().cloned().collect();
            Err(GitError::Source { text: redact_url(written), why: why.to_owned(), names }.into())
        };
        if reference == Some("") {
            return refuse("after `#` a tag, a branch or a commit is needed");
        }
        if place.is_empty() {
            return refuse("it is empty");
        }
        let location = if let Some(path) = place.strip_prefix("file://") {
            local_path(path)?
        } else if URL_SCHEMES.iter().any(|scheme| place.starts_with(scheme)) {
            if host(place).is_empty() {
                return refuse("the URL has no host");
            }
            GitLocation::Url(place.trim_end_matches('/').to_owned())
        } else if place.contains("://") || is_ssh(place) {
            return refuse(
                "only https, http, git and file are understood; for ssh, clone it and give the folder",
            );
        } else if !place.contains('/') && !Path::new(place).exists() {
            return refuse("no repository has that name, and no folder either");
        } else {
            local_path(place)?
        };
        Ok(Self { location, reference: reference.map(str::to_owned) })
    }
}

fn local_path(path: &str) -> Result<GitLocation> {
    std::path::absolute(path).map(GitLocation::Path).map_err(io_error("finding", path))
}

/// Recognizes `git@github.com:owner/name`.
fn is_ssh(text: &str) -> bool {
    text.split_once(':').is_some_and(|(host, _)| host.contains('@') && !host.contains('/'))
}

impl GitLocation {
    /// The server's host; empty for folders.
    pub fn host(&self) -> &str {
        match self {
            Self::Url(url) => host(url),
            Self::Path(_) => "",
        }
    }
}

/// Hides user and password of a URL.
impl fmt::Display for GitLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Url(url) => f.write_str(&redact_url(url)),
            Self::Path(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Hides user and password, too: debug output ends up in logs.
impl fmt::Debug for GitLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GitLocation({self})")
    }
}

/// Splits a URL into scheme, authority and rest.
fn authority(url: &str) -> Option<(&str, &str, &str)> {
    let (scheme, rest) = url.split_once("://")?;
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    Some((scheme, &rest[..end], &rest[end..]))
}

fn host(url: &str) -> &str {
    authority(url).map_or("", |(_, authority, _)| authority.rsplit('@').next().unwrap_or(authority))
}

pub(super) fn url_credentials(url: &str) -> Option<&str> {
    authority(url)?.1.rsplit_once('@').map(|(secret, _)| secret)
}

pub(crate) fn redact_url(url: &str) -> String {
    match authority(url) {
        Some((scheme, authority, rest)) if authority.contains('@') => {
            format!("{scheme}://{}{rest}", host(url))
        }
        _ => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::BuilderError;

    fn names() -> BTreeMap<String, String> {
        [("fork", "https://example.org/fork#v1"), ("here", "/srv/llama")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into()
    }

    fn parse(text: &str) -> (String, Option<String>) {
        let named = GitSource::parse(text, &names()).unwrap();
        (named.location.to_string(), named.reference)
    }

    #[test]
    fn names_urls_and_paths_are_told_apart() {
        assert_eq!(parse("fork"), ("https://example.org/fork".into(), Some("v1".into())));
        assert_eq!(parse("here"), ("/srv/llama".into(), None));
        assert_eq!(parse("https://example.org/a/"), ("https://example.org/a".into(), None));
        assert_eq!(parse("https://example.org/a#b1"), ("https://example.org/a".into(), Some("b1".into())));
        assert_eq!(parse("/some/where"), ("/some/where".into(), None));
        assert_eq!(parse("file:///some/where"), ("/some/where".into(), None));
    }

    #[test]
    fn what_cannot_be_fetched_from_is_refused_with_the_known_names() {
        for text in [
            "ssh://git@example.org/a",
            "git@example.org:a/b",
            "",
            "https://",
            "fork#",
            "ftp://example.org/x",
            "frok",
        ] {
            let error = GitSource::parse(text, &names()).unwrap_err();
            assert!(matches!(&error, BuilderError::Git(GitError::Source { .. })), "{text}: {error}");
            assert!(error.hint().unwrap().contains("fork, here"), "{error}");
        }
    }

    #[test]
    fn a_password_in_a_url_is_shown_nowhere() {
        let named = GitSource::parse("https://me:secret@example.org:8443/a", &names()).unwrap();
        assert_eq!(named.location.to_string(), "https://example.org:8443/a");
        assert_eq!(named.location.host(), "example.org:8443");
        assert!(!format!("{named:?}").contains("secret"));
        assert_eq!(named.location, GitLocation::Url("https://me:secret@example.org:8443/a".into()));
        let refused = GitSource::parse("ssh://me:secret@example.org/a", &names()).unwrap_err();
        assert!(!refused.to_string().contains("secret"), "{refused}");
    }
}
