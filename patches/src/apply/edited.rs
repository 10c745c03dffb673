//! Finds edits of the user in a patched file.

use diffy::{DiffOptions, Line};

use super::record::AppliedSet;
use crate::marker::parse_marker;

/// Maximum lines that a refusal shows.
const SHOWN_LINES: usize = 12;

/// A file's content without the lines marked by one of these sets.
pub(super) fn without_marked(content: &[u8], sets: &[AppliedSet]) -> Vec<u8> {
    content
        .split_inclusive(|byte| *byte == b'\n')
        .filter(|line| !is_ours(line, sets))
        .flatten()
        .copied()
        .collect()
}

/// Describes the lines in which a file differs from its original, without lines of these sets.
pub(super) fn describe_edits(path: &str, original: &[u8], found: &[u8], sets: &[AppliedSet]) -> String {
    let diff = DiffOptions::new().set_context_len(0).create_patch_bytes(original, found);
    let mut lines = Vec::new();
    for hunk in diff.hunks() {
        let mut number = hunk.new_range().start();
        for line in hunk.lines() {
            let (sign, text) = match line {
                Line::Delete(text) => ('-', text),
                Line::Insert(text) => ('+', text),
                Line::Context(_) => continue,
            };
            if sign == '-' || !is_ours(text, sets) {
                lines.push(format!("  {path}:{number}: {sign}{}", String::from_utf8_lossy(text).trim_end()));
            }
            number += usize::from(sign == '+');
        }
    }
    if lines.is_empty() {
        lines.push(format!(
            "  {path}: lines of the patches were changed or removed; --reverse takes all of them out"
        ));
    }
    let more = lines.len().saturating_sub(SHOWN_LINES);
    lines.truncate(SHOWN_LINES);
    if more > 0 {
        lines.push(format!("  {path}: and {more} more lines"));
    }
    lines.join("\n")
}

fn is_ours(line: &[u8], sets: &[AppliedSet]) -> bool {
    let line = String::from_utf8_lossy(line);
    parse_marker(&line).is_some_and(|(set, _)| sets.iter().any(|applied| applied.id == set))
}
