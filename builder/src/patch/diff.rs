//! The escape hatch: a user's plain `.patch`, for the revisions that it names, and placed strictly.
//!
//! Every line of context and every removed line must stand where the patch says it stands. There is no fuzz, no
//! offset and no merge: a patch that does not fit exactly is refused with the line that differs.

use diffy::Line;
use diffy::patch_set::{FileOperation, FilePatch, ParseOptions, PatchKind, PatchSet as Patches};

use super::{Diff, Edits, FileEdit, Overlay, Reason, Status, Tree};
use crate::error::Result;
use crate::source::Revision;

/// What a diff would do to a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    /// What keeps it from being verified, or from being applied at all.
    pub reasons: Vec<Reason>,
    /// What would change; none when it is refused or not for this revision.
    pub edits: Option<Edits>,
}

/// One file of a diff that can be used.
#[derive(Debug)]
struct FileDiff<'a> {
    path: String,
    /// Whether the file must not be there yet.
    creates: bool,
    text: diffy::Patch<'a, [u8]>,
}

/// Says what is wrong with a diff before any tree is seen: unreadable, or beyond what is done with diffs.
///
/// # Errors
///
/// One line, without the file's name.
pub fn validate(diff: &Diff) -> std::result::Result<(), String> {
    parse(&diff.content).map(drop)?;
    for bound in [&diff.first, &diff.last].into_iter().flatten() {
        build_number(bound).ok_or_else(|| format!("`{bound}` is not a build such as b8000"))?;
    }
    let first = diff.first.as_deref().and_then(build_number);
    let last = diff.last.as_deref().and_then(build_number);
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

/// Places a diff into a tree. Reads, and writes nothing.
///
/// # Errors
///
/// A file of the tree is there and cannot be read.
pub fn place(diff: &Diff, tree: &dyn Tree) -> Result<Placed> {
    let reason = |status, file: Option<&str>, line, text: String| Reason {
        status,
        part: format!("diff `{}`", diff.file),
        fix: None,
        file: file.map(str::to_owned),
        line,
        text,
    };
    let mut reasons = Vec::new();
    match in_range(diff, &tree.revision()) {
        Range::Inside => {}
        Range::Outside(why) => {
            return Ok(Placed { reasons: vec![reason(Status::NotApplicable, None, None, why)], edits: None });
        }
        Range::Unknown(why) => reasons.push(reason(Status::Unverified, None, None, why)),
    }
    let files = match parse(&diff.content) {
        Ok(files) => files,
        Err(why) => {
            return Ok(Placed { reasons: vec![reason(Status::Refused, None, None, why)], edits: None });
        }
    };
    // A diff may hold one file twice: the second time it is the file as it became.
    let mut overlay = Overlay::new(tree);
    let mut edits: Vec<FileEdit> = Vec::new();
    for file in files {
        let before = overlay.read(&file.path)?;
        match strictly(&file, before.as_deref()) {
            Ok(after) => {
                overlay.put(file.path.clone(), after.clone());
                match edits.iter_mut().find(|edit| edit.path == file.path) {
                    Some(edit) => edit.after = after,
                    None => edits.push(FileEdit { path: file.path, before, after, inserted: Vec::new() }),
                }
            }
            Err((line, why)) => {
                let refused = reason(Status::Refused, Some(&file.path), line, why);
                return Ok(Placed { reasons: vec![refused], edits: None });
            }
        }
    }
    Ok(Placed { reasons, edits: Some(Edits(edits)) })
}

/// The file after the diff; or the line at which it does not fit, and why.
fn strictly(
    file: &FileDiff<'_>,
    before: Option<&[u8]>,
) -> std::result::Result<Vec<u8>, (Option<usize>, String)> {
    let before = match (before, file.creates) {
        (Some(_), true) => {
            return Err((None, "the diff creates this file, which is there already".to_owned()));
        }
        (None, false) => return Err((None, "there is no such file".to_owned())),
        (before, _) => before.unwrap_or_default(),
    };
    let lines: Vec<&[u8]> = before.split_inclusive(|byte| *byte == b'\n').collect();
    let mut after = Vec::with_capacity(before.len());
    let mut next = 0;
    for hunk in file.text.hunks() {
        let range = hunk.old_range();
        // A hunk without old lines names the line after which it goes.
        let start = if range.is_empty() { range.start() } else { range.start().saturating_sub(1) };
        let kept = lines.get(next..start).ok_or_else(|| {
            (Some(range.start()), format!("the file has {} lines, the diff expects more", lines.len()))
        })?;
        after.extend(kept.iter().copied().flatten());
        next = start;
        for line in hunk.lines() {
            let (old, new) = match line {
                Line::Context(text) => (Some(*text), Some(*text)),
                Line::Delete(text) => (Some(*text), None),
                Line::Insert(text) => (None, Some(*text)),
            };
            if let Some(old) = old {
                let found = lines.get(next).copied();
                if found != Some(old) {
                    return Err((Some(next + 1), mismatch(old, found)));
                }
                next += 1;
            }
            after.extend_from_slice(new.unwrap_or_default());
        }
        // Text without a newline can only be the last of a file.
        if after.last().is_some_and(|last| *last != b'\n') && next < lines.len() {
            return Err((Some(next), "the diff ends the file here, and the file goes on".to_owned()));
        }
    }
    after.extend(lines.get(next..).unwrap_or_default().iter().copied().flatten());
    Ok(after)
}

fn mismatch(expected: &[u8], found: Option<&[u8]>) -> String {
    let Some(found) = found else { return format!("expected {}, the file ends before", quoted(expected)) };
    if expected.trim_ascii_end() == found.trim_ascii_end() {
        return format!(
            "expected {}, found the same text with another end of line or other blanks after it",
            quoted(expected)
        );
    }
    format!("expected {}, found {}", quoted(expected), quoted(found))
}

/// A line, short enough for a message.
fn quoted(line: &[u8]) -> String {
    const SHOWN: usize = 60;
    let text = String::from_utf8_lossy(line);
    let text = text.trim();
    let cut: String = text.chars().take(SHOWN).collect();
    if cut.len() == text.len() { format!("`{text}`") } else { format!("`{cut}…`") }
}

/// Reads a diff, git's or a plain one. What cannot be done strictly is refused here.
fn parse(content: &[u8]) -> std::result::Result<Vec<FileDiff<'_>>, String> {
    let starts =
        |prefix: &[u8]| content.split(|byte| *byte == b'\n').filter(|line| line.starts_with(prefix)).count();
    let options = if starts(b"diff --git ") > 0 { ParseOptions::gitdiff() } else { ParseOptions::unidiff() };
    let mut files = Vec::new();
    for patch in Patches::parse_bytes(content, options) {
        let patch = patch.map_err(|error| format!("it cannot be read as a unified diff: {error}"))?;
        files.push(usable(patch)?);
    }
    // The parser skips what it takes for a remark. A hunk among it would silently be lost.
    let read: usize = files.iter().map(|file| file.text.hunks().len()).sum();
    let written = starts(b"@@ -");
    if read != written {
        return Err(format!("it has {written} hunks, and only {read} can be read: is a header damaged?"));
    }
    Ok(files)
}

fn usable(diff: FilePatch<'_, [u8]>) -> std::result::Result<FileDiff<'_>, String> {
    let (creates, from, to) = match diff.operation() {
        FileOperation::Modify { original, modified } => (false, text(original)?, text(modified)?),
        FileOperation::Create(name) => (true, text(name)?, text(name)?),
        FileOperation::Delete(name) => return Err(refusal(&text(name)?, "deletes")),
        FileOperation::Rename { from, .. } => return Err(refusal(&text(from)?, "renames")),
        FileOperation::Copy { from, .. } => return Err(refusal(&text(from)?, "copies")),
    };
    let path = meant(&from, &to, creates)?;
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

fn refusal(path: &str, verb: &str) -> String {
    let path = path.strip_prefix("a/").unwrap_or(path);
    format!("it {verb} {path}: a diff here may change and create files, and no more")
}

fn text(name: &[u8]) -> std::result::Result<String, String> {
    String::from_utf8(name.to_vec()).map_err(|_| "a file's name in it is not UTF-8".to_owned())
}

/// The file that is meant: `a/` and `b/` in front go, as with `patch -p1`.
fn meant(from: &str, to: &str, creates: bool) -> std::result::Result<String, String> {
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

enum Range {
    Inside,
    Outside(String),
    Unknown(String),
}

/// Whether a diff is meant for a revision. Named commits speak first; a commit that is not named may still be within
/// the builds.
fn in_range(diff: &Diff, revision: &Revision) -> Range {
    let builds = diff.first.is_some() || diff.last.is_some();
    if diff.commits.is_empty() && !builds {
        return Range::Unknown("it does not say which builds or commits it is for".to_owned());
    }
    if let Some(commit) = revision.commit.as_deref().filter(|_| !diff.commits.is_empty()) {
        if diff.commits.iter().any(|named| same_commit(named, commit)) {
            return Range::Inside;
        }
        if !builds {
            return Range::Outside(format!("it is not for commit {}", revision.short_commit()));
        }
    } else if !builds {
        return Range::Unknown(
            "it is for certain commits, and this tree does not say which one it is".to_owned(),
        );
    }
    let name = |bound: &Option<String>| bound.clone().unwrap_or_default();
    let span = format!("{}..{}", name(&diff.first), name(&diff.last));
    let Some(number) = revision.build_number else {
        return Range::Unknown(format!("it is for {span}, and this tree does not say which build it is"));
    };
    let first = diff.first.as_deref().and_then(build_number).unwrap_or(0);
    let last = diff.last.as_deref().and_then(build_number).unwrap_or(u32::MAX);
    if (first..=last).contains(&number) {
        Range::Inside
    } else {
        Range::Outside(format!("it is for {span}, this is b{number}"))
    }
}

fn build_number(text: &str) -> Option<u32> {
    text.strip_prefix('b').unwrap_or(text).parse().ok()
}

fn is_commit(text: &str) -> bool {
    (7..=40).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether two commits, either of which may be shortened, are the same.
fn same_commit(left: &str, right: &str) -> bool {
    let length = left.len().min(right.len());
    length >= 7
        && left
            .get(..length)
            .zip(right.get(..length))
            .is_some_and(|(left, right)| left.eq_ignore_ascii_case(right))
}

#[cfg(test)]
mod tests;
