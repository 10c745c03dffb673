//! Exports sets as an ordinary patch series for one revision: one mail per set, for `git am`, `git apply` and
//! `patch -p1`.
//!
//! The bytes depend only on the tree and the sets, so that equal inputs give equal series.

mod rationale;

use std::fmt::Write as _;

use diffy::{DiffOptions, Hunk, Line, PatchFormatter};

use crate::edits::{FileEdit, TreeEdits};
use crate::error::{Result, io_error};
use crate::judgement::{PatchStatus, SetJudgement};
use crate::series::PatchSeries;
use crate::set::PatchSet;
use crate::tree::SourceTree;

const PATCH_AUTHOR: &str = "llama-warden <llama-warden@localhost>";
/// Date of the patches, constant so that equal series have equal bytes.
const PATCH_DATE: &str = "Thu, 1 Jan 1970 00:00:00 +0000";
/// First line of a git mail: a commit id, and the fixed date by which git recognizes patch mails.
const MAIL_MAGIC: &str = "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001";

pub use rationale::rationale;

/// A patch of a series.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PatchFile {
    /// File name, such as `0001-cuda-memory.patch`.
    pub name: String,
    /// Id of the set.
    pub set: String,
    /// Content of the file.
    pub content: Vec<u8>,
    /// File name of the page about the patch, such as `0001-cuda-memory.md`.
    pub page_name: String,
    /// The page: purpose, effect, cost and measurements.
    pub page: String,
    /// Some changed files have CR LF line ends: `git am` preserves those only with `--keep-cr`.
    pub crlf: bool,
}

/// Exports the sets that change something, one patch each, in order. With `only`, a single fix of the sets,
/// the mail describes only that fix.
///
/// # Errors
/// Fails if a patch cannot be formatted, which never happens for text files.
pub fn export(
    series: &PatchSeries,
    sets: &[&PatchSet],
    tree: &dyn SourceTree,
    only: Option<&str>,
) -> Result<Vec<PatchFile>> {
    let all: Vec<_> = series.edited().collect();
    let total = all.len();
    all.into_iter()
        .enumerate()
        .map(|(index, (judgement, edits))| {
            let number = index + 1;
            let set = sets.iter().find(|set| set.id == judgement.set);
            let fix = only.and_then(|only| set?.fix(only));
            let title = match (fix, set) {
                (Some(fix), _) => fix.title.as_str(),
                (None, Some(set)) => set.title.as_str(),
                (None, None) => "",
            };
            let mut content = mail_head(judgement, title, (number, total), tree, only).into_bytes();
            content.extend_from_slice(&mail_body(edits)?);
            content.extend_from_slice(
                concat!("-- \nllama-warden ", env!("CARGO_PKG_VERSION"), "\n\n").as_bytes(),
            );
            let crlf = edits.0.iter().any(|edit| edit.after.windows(2).any(|pair| pair == b"\r\n"));
            let stem = only.map_or_else(|| judgement.set.clone(), |only| format!("{}-{only}", judgement.set));
            let name = format!("{number:04}-{stem}.patch");
            let page = set.map(|set| rationale(set, judgement, only, tree)).unwrap_or_default();
            Ok(PatchFile {
                name,
                page_name: format!("{number:04}-{stem}.md"),
                page,
                set: judgement.set.clone(),
                content,
                crlf,
            })
        })
        .collect()
}

fn mail_head(
    judgement: &SetJudgement,
    title: &str,
    (number, total): (usize, usize),
    tree: &dyn SourceTree,
    only: Option<&str>,
) -> String {
    let one_line = title.split_whitespace().collect::<Vec<_>>().join(" ");
    // Non-ASCII characters would have to be encoded in a mail header.
    let plain: String = one_line.chars().map(|letter| if letter.is_ascii() { letter } else { '?' }).collect();
    let of = if total > 1 { format!(" {number}/{total}") } else { String::new() };
    let mut text = format!(
        "{MAIL_MAGIC}\nFrom: {PATCH_AUTHOR}\nDate: {PATCH_DATE}\nSubject: [PATCH{of}] {}: {plain}\nMIME-Version: 1.0\n\
         Content-Type: text/plain; charset=UTF-8\nContent-Transfer-Encoding: 8bit\n\n",
        judgement.set
    );
    let checked = match judgement.status {
        PatchStatus::Verified => "verified",
        PatchStatus::LocallyVerified => "locally verified",
        _ => "not verified",
    };
    let _infallible = writeln!(text, "For llama.cpp, {} ({checked} there).", tree.revision());
    for fix in judgement.fixes.iter().filter(|fix| only.is_none_or(|only| fix.fix == only)) {
        let _infallible = writeln!(text, "Fix {}: {}.", fix.fix, fix.status);
    }
    let has = |status| {
        matches!(status, PatchStatus::Verified | PatchStatus::LocallyVerified | PatchStatus::Unverified)
    };
    if judgement.fixes.iter().any(|fix| has(fix.status)) {
        text.push_str("Each fix is off until its environment variable is set.\n");
    }
    text.push_str("---\n");
    text
}

fn mail_body(edits: &TreeEdits) -> Result<Vec<u8>> {
    let mut stat = String::new();
    let mut diffs = Vec::new();
    let (mut added, mut removed) = (0, 0);
    let mut files: Vec<&FileEdit> = edits.0.iter().collect();
    files.sort_by(|left, right| left.path.cmp(&right.path));
    for edit in files {
        let mut options = DiffOptions::new();
        let before = edit.before.as_deref().unwrap_or_default();
        let old = if edit.before.is_some() { format!("a/{}", edit.path) } else { "/dev/null".to_owned() };
        options.set_original_filename(old).set_modified_filename(format!("b/{}", edit.path));
        let patch = options.create_patch_bytes(before, &edit.after);
        let lines = || patch.hunks().iter().flat_map(Hunk::lines);
        let plus = lines().filter(|line| matches!(line, Line::Insert(_))).count();
        let minus = lines().filter(|line| matches!(line, Line::Delete(_))).count();
        added += plus;
        removed += minus;
        let _infallible = writeln!(stat, " {} | {}", edit.path, plus + minus);
        diffs.extend_from_slice(format!("diff --git a/{0} b/{0}\n", edit.path).as_bytes());
        if edit.before.is_none() {
            diffs.extend_from_slice(b"new file mode 100644\n");
        }
        // Keep the blank on empty context lines: mail programs and older versions of `patch` mishandle
        // empty lines without a blank.
        PatchFormatter::new()
            .suppress_blank_empty(false)
            .write_patch_into(&patch, &mut diffs)
            .map_err(io_error("writing", &edit.path))?;
    }
    let count = edits.0.len();
    let files = if count == 1 { "file" } else { "files" };
    let _infallible =
        writeln!(stat, " {count} {files} changed, {added} insertions(+), {removed} deletions(-)\n");
    let mut all = stat.into_bytes();
    all.extend_from_slice(&diffs);
    Ok(all)
}

#[cfg(test)]
mod tests;
