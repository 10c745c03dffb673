//! Decides if a build may automatically replace the default build: same llama.cpp, not older, GPU kept.

use std::fmt;
use std::path::Path;

use crate::plan::BuildPlan;
use crate::source::ExaminedSource;

/// Names of upstream's sources: its repository, now and formerly, and the package that contains its source.
const UPSTREAM_NAMES: [&str; 4] =
    ["ggml-org/llama.cpp", "ggerganov/llama.cpp", "llama_cpp_python", "llama-cpp-python"];
/// Lineage of sources with one of [`UPSTREAM_NAMES`], and of folders and archives with this name.
const UPSTREAM_LINEAGE: &str = "llama.cpp";
const ARCHIVE_EXTENSIONS: [&str; 4] = [".tar.gz", ".tgz", ".tar.xz", ".zip"];

/// Reason why a new build does not become the default automatically.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SuccessorObstacle {
    /// Built from another llama.cpp.
    OtherLineage {
        /// Lineage of the new build, such as `ikawrakow/ik_llama.cpp`.
        new: String,
        /// Lineage of the default build.
        in_use: String,
    },
    /// Built for the CPU only, while the default build uses a GPU.
    NoGpu,
    /// Built from an older revision.
    Older {
        /// Version of the new build.
        new: String,
        /// Version of the default build, which is newer.
        in_use: String,
    },
}

impl fmt::Display for SuccessorObstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherLineage { new, in_use } => {
                write!(f, "it is made of {new}, and the one in use of {in_use}")
            }
            Self::NoGpu => f.write_str("it computes on the CPU alone, and the one in use on a GPU"),
            Self::Older { new, in_use } => write!(f, "it is older: {new}, and the one in use is {in_use}"),
        }
    }
}

struct SourceOrigin {
    lineage: String,
    number: Option<u32>,
    /// Version numbers at the end of the source's name, such as those of a release.
    version: Vec<u32>,
}

/// Checks that a build of the plan `new` may automatically replace the default build of the plan `in_use`.
///
/// # Errors
/// Returns the obstacle. A revision of unknown age counts as newer, since it was built on purpose.
pub fn check_successor(in_use: &BuildPlan, new: &BuildPlan) -> Result<(), SuccessorObstacle> {
    check_sources(&in_use.source, &new.source)?;
    if in_use.recipe.backend.has_gpu() && !new.recipe.backend.has_gpu() {
        return Err(SuccessorObstacle::NoGpu);
    }
    Ok(())
}

fn check_sources(in_use: &ExaminedSource, new: &ExaminedSource) -> Result<(), SuccessorObstacle> {
    let (old, new) = (source_origin(in_use), source_origin(new));
    if old.lineage != new.lineage {
        return Err(SuccessorObstacle::OtherLineage { new: new.lineage, in_use: old.lineage });
    }
    if let (Some(before), Some(after)) = (old.number, new.number) {
        return if after < before {
            Err(SuccessorObstacle::Older { new: format!("b{after}"), in_use: format!("b{before}") })
        } else {
            Ok(())
        };
    }
    if !old.version.is_empty() && !new.version.is_empty() && new.version < old.version {
        let text = |version: &[u32]| version.iter().map(u32::to_string).collect::<Vec<_>>().join(".");
        return Err(SuccessorObstacle::Older { new: text(&new.version), in_use: text(&old.version) });
    }
    Ok(())
}

fn source_origin(found: &ExaminedSource) -> SourceOrigin {
    let given = found.given.to_string_lossy();
    let number = found.revision.build_number;
    if found.kind == "git" && given.contains("://") {
        return SourceOrigin {
            lineage: unify_upstream(repository_name(&given)),
            number,
            version: Vec::new(),
        };
    }
    let name =
        Path::new(&*given).file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let stem = ARCHIVE_EXTENSIONS.iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or(&name);
    let (lineage, version) = match stem.rsplit_once('-') {
        Some((name, end)) if is_revision(end) => (name, version_numbers(end)),
        _ => (stem, Vec::new()),
    };
    SourceOrigin { lineage: unify_upstream(lineage.trim_end_matches(".git").to_owned()), number, version }
}

/// `owner/name` of a repository's URL.
fn repository_name(url: &str) -> String {
    let path = url.trim_end_matches('/').trim_end_matches(".git");
    let mut parts = path.rsplit('/');
    let (name, owner) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    format!("{owner}/{name}").to_ascii_lowercase()
}

fn unify_upstream(name: String) -> String {
    if UPSTREAM_NAMES.contains(&name.as_str()) { UPSTREAM_LINEAGE.to_owned() } else { name }
}

/// Returns true if the end of a name is a version, a build tag or a commit.
fn is_revision(text: &str) -> bool {
    let tag = text.strip_prefix(['b', 'v']).unwrap_or(text);
    let is_commit = text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_commit || (tag.starts_with(|first: char| first.is_ascii_digit()) && tag.bytes().all(is_digit_or_dot))
}

const fn is_digit_or_dot(byte: u8) -> bool {
    byte.is_ascii_digit() || byte == b'.'
}

fn version_numbers(text: &str) -> Vec<u32> {
    if text.len() == 40 {
        return Vec::new();
    }
    text.trim_start_matches(['b', 'v']).split('.').map_while(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use warden_patches::SourceRevision;

    use super::*;

    fn found(kind: &str, given: &str, build_number: Option<u32>) -> ExaminedSource {
        ExaminedSource {
            given: given.into(),
            kind: kind.into(),
            identity: String::new(),
            root: String::new(),
            server: "tools/server".into(),
            revision: SourceRevision { commit: None, build_number },
        }
    }

    fn git(url: &str, number: u32) -> ExaminedSource {
        found("git", url, Some(number))
    }

    const UPSTREAM_URL: &str = "https://github.com/ggml-org/llama.cpp";

    #[test]
    fn a_newer_revision_of_the_same_llama_cpp_succeeds_however_it_was_fetched() {
        let upstream = git(UPSTREAM_URL, 10_587);
        for new in [
            git(UPSTREAM_URL, 10_600),
            git("https://github.com/ggml-org/llama.cpp.git/", 10_587),
            found("archive", "/cache/llama_cpp_python-0.3.20.tar.gz", None),
            found("archive", "/tmp/llama.cpp-b10700.tar.gz", Some(10_700)),
            found("directory", "/home/me/llama.cpp", None),
        ] {
            assert_eq!(check_sources(&upstream, &new), Ok(()), "{}", new.given.display());
        }
        let release = |version| found("archive", &format!("/x/llama_cpp_python-{version}.tar.gz"), None);
        assert_eq!(check_sources(&release("0.3.9"), &release("0.3.20")), Ok(()));
        let mine = found("directory", "/home/me/mine", None);
        assert_eq!(check_sources(&mine, &mine), Ok(()));
    }

    #[test]
    fn a_fork_is_of_another_lineage_by_repository_archive_and_folder() {
        let upstream = git(UPSTREAM_URL, 10_587);
        for (new, lineage) in [
            (git("https://github.com/ikawrakow/ik_llama.cpp", 20_000), "ikawrakow/ik_llama.cpp"),
            (git("https://github.com/somebody/llama.cpp", 20_000), "somebody/llama.cpp"),
            (found("archive", "/tmp/ik.tar.gz", None), "ik"),
            (
                found("archive", "/tmp/ik_llama.cpp-8337e4cd3861406fc04e0854b1409cd1b027fbc9.zip", None),
                "ik_llama.cpp",
            ),
            (found("directory", "/home/me/turboquant", None), "turboquant"),
        ] {
            let why = check_sources(&upstream, &new).unwrap_err();
            assert!(matches!(&why, SuccessorObstacle::OtherLineage { new, .. } if new == lineage), "{why}");
            assert!(check_sources(&new, &upstream).is_err(), "the other way, too");
        }
    }

    #[test]
    fn an_older_revision_does_not_succeed_and_one_of_unknown_age_does() {
        let (new, old) = (git(UPSTREAM_URL, 10_587), git(UPSTREAM_URL, 8827));
        let why = check_sources(&new, &old).unwrap_err();
        assert_eq!(why.to_string(), "it is older: b8827, and the one in use is b10587");
        let release = |version| found("archive", &format!("/x/llama_cpp_python-{version}.tar.gz"), None);
        let why = check_sources(&release("0.3.20"), &release("0.3.9")).unwrap_err();
        assert_eq!(why.to_string(), "it is older: 0.3.9, and the one in use is 0.3.20");
        assert_eq!(check_sources(&new, &found("git", UPSTREAM_URL, None)), Ok(()));
    }
}
