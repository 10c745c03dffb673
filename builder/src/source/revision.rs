//! Determines a tree's commit and build number from the traces of its history.
//!
//! The sources of evidence, in order of precedence: git metadata (a checkout, a worktree, a submodule, also
//! in an archive), generated version files, the archive's comment, the folder's name. The build number is
//! never computed: it is a count of commits, which a shallow copy cannot give.

use warden_patches::SourceRevision;

use super::tree::join_names;
use crate::git::parse_build_tag;

/// Maximum bytes of a file with evidence; `packed-refs` with all of upstream's tags has less than 1 MiB.
pub(super) const MAX_EVIDENCE_BYTES: u64 = 4 << 20;

/// Returns true if an archive's file may be evidence. `name` may have any parent.
pub(crate) fn is_evidence(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or(name);
    let in_git = name.split('/').any(|part| part == ".git");
    file == ".git"
        || (in_git && matches!(file, "HEAD" | "packed-refs" | "commondir"))
        || (in_git && name.contains("/refs/heads/"))
        || file == "build-info.cpp"
}

/// Evaluates the evidence. `read` returns a file's content by its name relative to the searched folder;
/// `top` is the name of the searched folder or archive.
pub(crate) fn find_revision(
    root: &str,
    top: &str,
    remark: Option<&str>,
    read: &dyn Fn(&str) -> Option<String>,
) -> SourceRevision {
    let folder = if root.is_empty() { top } else { root.rsplit('/').next().unwrap_or(root) };
    let remark = SourceRevision {
        commit: remark.filter(|text| is_commit(text)).map(str::to_owned),
        build_number: None,
    };
    let generated = read(&join_names(root, "common/build-info.cpp")).map(|text| from_generated(&text));
    let evidence = [from_git(root, read), generated, Some(remark), Some(from_name(folder))];
    evidence.into_iter().flatten().fold(SourceRevision::default(), |known, next| SourceRevision {
        commit: known.commit.or(next.commit),
        build_number: known.build_number.or(next.build_number),
    })
}

fn from_git(root: &str, read: &dyn Fn(&str) -> Option<String>) -> Option<SourceRevision> {
    let dot_git = join_names(root, ".git");
    let git = match read(&dot_git) {
        // A submodule or a worktree: `.git` is a file with the path of the metadata.
        Some(pointer) => resolve_path(root, pointer.trim().strip_prefix("gitdir:")?.trim()),
        None => dot_git,
    };
    let head = read(&join_names(&git, "HEAD"))?;
    // A worktree has its own HEAD and shares the rest.
    let common = read(&join_names(&git, "commondir"))
        .map_or_else(|| git.clone(), |path| resolve_path(&git, path.trim()));
    let packed = read(&join_names(&common, "packed-refs")).unwrap_or_default();
    let commit = match head.trim().strip_prefix("ref:") {
        Some(name) => read(&join_names(&common, name.trim()))
            .or_else(|| packed_ref(&packed, name.trim()))
            .map(|text| text.trim().to_owned())?,
        None => head.trim().to_owned(),
    };
    if !is_commit(&commit) {
        return None;
    }
    let build_number = find_build_tag(&packed, &commit);
    Some(SourceRevision { commit: Some(commit), build_number })
}

/// Resolves a relative path that may contain `..`. An absolute path, possible on disk, is returned as it is.
fn resolve_path(from: &str, path: &str) -> String {
    if path.starts_with('/') {
        return path.to_owned();
    }
    let mut parts: Vec<&str> = from.split('/').filter(|part| !part.is_empty()).collect();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            // A path above the searched folder exists on disk, but not in an archive.
            ".." if parts.last().is_none_or(|last| *last == "..") => parts.push(".."),
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    let start = if from.starts_with('/') { "/" } else { "" };
    format!("{start}{}", parts.join("/"))
}

fn packed_ref(packed: &str, name: &str) -> Option<String> {
    packed
        .lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(_, other)| *other == name)
        .map(|(id, _)| id.to_owned())
}

/// Number of the build tag on a commit. For an annotated tag, the commit is on the next line, after `^`.
fn find_build_tag(packed: &str, commit: &str) -> Option<u32> {
    let mut last = None;
    for line in packed.lines() {
        if let Some(peeled) = line.strip_prefix('^') {
            if peeled == commit && last.is_some() {
                return last;
            }
        } else if let Some((id, name)) = line.split_once(' ') {
            last = name.strip_prefix("refs/tags/").and_then(parse_build_tag);
            if id == commit && last.is_some() {
                return last;
            }
        }
    }
    None
}

/// Parses `int LLAMA_BUILD_NUMBER = 4447;` and `char const *LLAMA_COMMIT = "f7cd1330";`
fn from_generated(text: &str) -> SourceRevision {
    let value = |name: &str| {
        let line = text.lines().find(|line| line.contains(name))?;
        Some(line.split_once('=')?.1.trim().trim_end_matches(';').trim_matches('"').to_owned())
    };
    SourceRevision {
        commit: value("LLAMA_COMMIT").filter(|text| is_commit(text)),
        build_number: value("LLAMA_BUILD_NUMBER")
            .and_then(|number| number.parse().ok())
            .filter(|number| *number > 1),
    }
}

/// Parses folder names of archives: `llama.cpp-b9976`, `llama.cpp-0c1e57098...`, also with an extension.
fn from_name(name: &str) -> SourceRevision {
    let stem = ["tar.gz", "tgz", "tar.xz", "zip"]
        .iter()
        .find_map(|extension| name.strip_suffix(extension)?.strip_suffix('.'))
        .unwrap_or(name);
    let last = stem.rsplit('-').next().unwrap_or(stem);
    SourceRevision {
        // Full ids only: shorter hexadecimal words are often something else.
        commit: (last.len() == 40 && is_commit(last)).then(|| last.to_owned()),
        build_number: parse_build_tag(last),
    }
}

fn is_commit(text: &str) -> bool {
    (7..=40).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests;
