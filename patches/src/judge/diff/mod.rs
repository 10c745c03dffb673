//! Places a user's plain `.patch` for the revisions that it names.
//!
//! Every context line and every removed line must be at its exact position: no fuzz, no offset, no merge.

use diffy::Line;

use crate::edits::{FileEdit, TreeEdits};
use crate::error::Result;
use crate::judgement::{JudgementReason, PatchStatus};
use crate::set::SetDiff;
use crate::set::diff::{FileDiff, parse_build_number, parse_diff};
use crate::tree::{OverlayTree, SourceRevision, SourceTree};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PlacedDiff {
    pub(super) reasons: Vec<JudgementReason>,
    /// Changes; `None` if the diff is refused or is for other revisions.
    pub(super) edits: Option<TreeEdits>,
}

/// Places a diff into a tree, without writing.
pub(super) fn place_diff(diff: &SetDiff, tree: &dyn SourceTree) -> Result<PlacedDiff> {
    let reason = |status, why: String| JudgementReason::new(status, format!("diff `{}`", diff.file), why);
    let stopped = |reason| Ok(PlacedDiff { reasons: vec![reason], edits: None });
    let mut reasons = Vec::new();
    match in_range(diff, &tree.revision()) {
        RangeMatch::Inside => {}
        RangeMatch::Outside(why) => return stopped(reason(PatchStatus::NotApplicable, why)),
        RangeMatch::Unknown(why) => reasons.push(reason(PatchStatus::Unverified, why)),
    }
    let files = match parse_diff(&diff.content) {
        Ok(files) => files,
        Err(why) => return stopped(reason(PatchStatus::Refused, why)),
    };
    // A diff may contain a file twice: the second time, it applies to the changed file.
    let mut overlay = OverlayTree::new(tree);
    let mut edits: Vec<FileEdit> = Vec::new();
    for file in files {
        let before = overlay.read(&file.path)?;
        match apply_strictly(&file, before.as_deref()) {
            Ok(after) => {
                overlay.put(file.path.clone(), after.clone());
                match edits.iter_mut().find(|edit| edit.path == file.path) {
                    Some(edit) => edit.after = after,
                    None => edits.push(FileEdit { path: file.path, before, after, inserted: Vec::new() }),
                }
            }
            Err((line, why)) => return stopped(reason(PatchStatus::Refused, why).at(&file.path, line)),
        }
    }
    Ok(PlacedDiff { reasons, edits: Some(TreeEdits(edits)) })
}

/// The file after the diff, or the line that does not fit, with the reason.
fn apply_strictly(
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
        // A hunk without old lines starts with the number of the line before the insertion.
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
        // A line without newline must be the last of the file.
        if after.last().is_some_and(|last| *last != b'\n') && next < lines.len() {
            return Err((Some(next), "the diff ends the file here, and the file goes on".to_owned()));
        }
    }
    after.extend(lines.get(next..).unwrap_or_default().iter().copied().flatten());
    Ok(after)
}

fn mismatch(expected: &[u8], found: Option<&[u8]>) -> String {
    let Some(found) = found else {
        return format!("expected {}, the file ends before", quote_line(expected));
    };
    if expected.trim_ascii_end() == found.trim_ascii_end() {
        return format!(
            "expected {}, found the same text with another end of line or other blanks after it",
            quote_line(expected)
        );
    }
    format!("expected {}, found {}", quote_line(expected), quote_line(found))
}

fn quote_line(line: &[u8]) -> String {
    const SHOWN: usize = 60;
    let text = String::from_utf8_lossy(line);
    let text = text.trim();
    let cut: String = text.chars().take(SHOWN).collect();
    if cut.len() == text.len() { format!("`{text}`") } else { format!("`{cut}…`") }
}

enum RangeMatch {
    Inside,
    Outside(String),
    Unknown(String),
}

/// Checks if a diff is for a revision. A commit that the diff does not name may be in its range of builds.
fn in_range(diff: &SetDiff, revision: &SourceRevision) -> RangeMatch {
    let builds = diff.first.is_some() || diff.last.is_some();
    if diff.commits.is_empty() && !builds {
        return RangeMatch::Unknown("it does not say which builds or commits it is for".to_owned());
    }
    if let Some(commit) = revision.commit.as_deref().filter(|_| !diff.commits.is_empty()) {
        if diff.commits.iter().any(|named| same_commit(named, commit)) {
            return RangeMatch::Inside;
        }
        if !builds {
            return RangeMatch::Outside(format!("it is not for commit {}", revision.short_commit()));
        }
    } else if !builds {
        return RangeMatch::Unknown(
            "it is for certain commits, and this tree does not say which one it is".to_owned(),
        );
    }
    let name = |bound: &Option<String>| bound.clone().unwrap_or_default();
    let span = format!("{}..{}", name(&diff.first), name(&diff.last));
    let Some(number) = revision.build_number else {
        return RangeMatch::Unknown(format!(
            "it is for {span}, and this tree does not say which build it is"
        ));
    };
    let first = diff.first.as_deref().and_then(parse_build_number).unwrap_or(0);
    let last = diff.last.as_deref().and_then(parse_build_number).unwrap_or(u32::MAX);
    if (first..=last).contains(&number) {
        RangeMatch::Inside
    } else {
        RangeMatch::Outside(format!("it is for {span}, this is b{number}"))
    }
}

/// Returns true if two commit ids are equal; either may be abbreviated.
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
