//! A patched file that somebody edited: what is theirs, and where it differs.

use diffy::{DiffOptions, Line};

use super::journal::AppliedSet;
use crate::marker::marked;

/// Lines that a refusal shows; whoever edited a file finds the rest from there.
const SHOWN: usize = 12;

/// A file without the lines that carry a marker of one of these sets.
pub(super) fn without_marked(content: &[u8], sets: &[AppliedSet]) -> Vec<u8> {
    let ours = |line: &[u8]| {
        let line = String::from_utf8_lossy(line);
        marked(&line).is_some_and(|(set, _)| sets.iter().any(|applied| applied.id == set))
    };
    content.split_inclusive(|byte| *byte == b'\n').filter(|line| !ours(line)).flatten().copied().collect()
}

/// The lines in which a file differs from what it should be.
pub(super) fn differences(path: &str, expected: &[u8], found: &[u8]) -> String {
    let diff = DiffOptions::new().set_context_len(0).create_patch_bytes(expected, found);
    let mut lines = Vec::new();
    for hunk in diff.hunks() {
        let mut number = hunk.new_range().start();
        for line in hunk.lines() {
            let (sign, text) = match line {
                Line::Delete(text) => ('-', text),
                Line::Insert(text) => ('+', text),
                Line::Context(_) => continue,
            };
            lines.push(format!("  {path}:{number}: {sign}{}", String::from_utf8_lossy(text).trim_end()));
            number += usize::from(sign == '+');
        }
    }
    let more = lines.len().saturating_sub(SHOWN);
    lines.truncate(SHOWN);
    if more > 0 {
        lines.push(format!("  {path}: and {more} more lines"));
    }
    lines.join("\n")
}
