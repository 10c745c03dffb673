//! Parses and validates a user's plain `.patch`, independent of any tree.

use diffy::patch_set::{FileOperation, FilePatch, ParseOptions, PatchKind, PatchSet as Patches};

use super::SetDiff;

#[derive(Debug)]
pub(crate) struct FileDiff<'a> {
    pub(crate) path: String,
    /// The diff creates the file, which must not exist.
    pub(crate) creates: bool,
    pub(crate) text: diffy::Patch<'a, [u8]>,
}

/// Fails if a diff is unreadable or does more than supported, with one line that does not name the file.
pub(crate) fn validate_diff(diff: &SetDiff) -> Result<(), String> {
    parse_diff(&diff.content).map(drop)?;
    for bound in [&diff.first, &diff.last].into_iter().flatten() {
        parse_build_number(bound).ok_or_else(|| format!("`{bound}` is not a build such as b8000"))?;
    }
    let first = diff.first.as_deref().and_then(parse_build_number);
    let last = diff.last.as_deref().and_then(parse_build_number);
    if let (Some(first), Some(last)) = (first, last)
        && first > last
    {
        return Err(format!("the range b{first}..b{last} is empty"));
    }
    for commit in &diff.commits {
        if !is_commit(commit) {
            return Err(format!("`{commit}` is not a commit: seven to forty hexadecimal digits"));
        }
    }
    Ok(())
}

/// Parses a diff in git's or plain unified format. Accepts only changes to the text of ordinary files, and
/// new text files. Refuses deletions, renames, copies, file modes and binary content.
pub(crate) fn parse_diff(content: &[u8]) -> Result<Vec<FileDiff<'_>>, String> {
    let starts =
        |prefix: &[u8]| content.split(|byte| *byte == b'\n').filter(|line| line.starts_with(prefix)).count();
    let options = if starts(b"diff --git ") > 0 { ParseOptions::gitdiff() } else { ParseOptions::unidiff() };
    let mut files = Vec::new();
    for patch in Patches::parse_bytes(content, options) {
        let patch = patch.map_err(|error| format!("it cannot be read as a unified diff: {error}"))?;
        files.push(usable_file(patch)?);
    }
    // The parser skips text that it takes for a remark. A hunk in it would be lost silently.
    let read: usize = files.iter().map(|file| file.text.hunks().len()).sum();
    let written = starts(b"@@ -");
    if read != written {
        return Err(format!("it has {written} hunks, and only {read} can be read: is a header damaged?"));
    }
    Ok(files)
}

fn usable_file(diff: FilePatch<'_, [u8]>) -> Result<FileDiff<'_>, String> {
    let (creates, from, to) = match diff.operation() {
        FileOperation::Modify { original, modified } => (false, utf8_name(original)?, utf8_name(modified)?),
        FileOperation::Create(name) => (true, utf8_name(name)?, utf8_name(name)?),
        FileOperation::Delete(name) => return Err(unsupported_operation(&utf8_name(name)?, "deletes")),
        FileOperation::Rename { from, .. } => {
            return Err(unsupported_operation(&utf8_name(from)?, "renames"));
        }
        FileOperation::Copy { from, .. } => return Err(unsupported_operation(&utf8_name(from)?, "copies")),
    };
    let path = changed_path(&from, &to, creates)?;
    if diff.new_mode().is_some_and(|mode| *mode != diffy::patch_set::FileMode::Regular)
        || (diff.old_mode().is_some() && diff.old_mode() != diff.new_mode())
    {
        return Err(format!("it sets the mode of {path}: only the text of ordinary files can be changed"));
    }
    match diff.into_patch() {
        PatchKind::Text(text) if text.hunks().is_empty() => Err(format!("it changes nothing in {path}")),
        PatchKind::Text(text) => Ok(FileDiff { path, creates, text }),
        PatchKind::Binary(_) => Err(format!("it changes {path} as a binary file: only text can be changed")),
    }
}

fn unsupported_operation(path: &str, verb: &str) -> String {
    let path = path.strip_prefix("a/").unwrap_or(path);
    format!("it {verb} {path}: a diff here may change and create files, and no more")
}

fn utf8_name(name: &[u8]) -> Result<String, String> {
    String::from_utf8(name.to_vec()).map_err(|_| "a file's name in it is not UTF-8".to_owned())
}

/// The path of the changed file; a leading `a/` or `b/` is removed, as with `patch -p1`.
fn changed_path(from: &str, to: &str, creates: bool) -> Result<String, String> {
    let stripped = if creates {
        to.strip_prefix("b/").unwrap_or(to)
    } else {
        match (from.strip_prefix("a/"), to.strip_prefix("b/")) {
            (Some(from), Some(to)) if from == to => to,
            _ if from == to => to,
            _ => return Err(format!("it makes {to} of {from}: a diff here may not move files")),
        }
    };
    let inside = !stripped.is_empty()
        && !stripped.contains('\\')
        && stripped
            .split('/')
            .all(|part| !matches!(part, "" | "." | "..") && !part.eq_ignore_ascii_case(".git"));
    if inside { Ok(stripped.to_owned()) } else { Err(format!("`{stripped}` leads out of the tree")) }
}

pub(crate) fn parse_build_number(text: &str) -> Option<u32> {
    text.strip_prefix('b').unwrap_or(text).parse().ok()
}

fn is_commit(text: &str) -> bool {
    (7..=40).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
