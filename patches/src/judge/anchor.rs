//! Finds an anchor, and the adjacent line where a statement may be inserted.

use regex::bytes::Regex;

use crate::scan::{ScannedSource, UTF8_BOM};
use crate::set::HookPosition;

/// Keywords whose body may be a single statement; a line inserted next to it would not belong to the keyword.
const CONTROL_KEYWORDS: [&str; 6] = ["if", "else", "for", "while", "do", "switch"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InsertPosition {
    pub(super) offset: usize,
    /// Offset of a byte in the adjacent line.
    pub(super) adjacent: usize,
}

/// All matches of an anchor in the code, at word boundaries. Runs of white space compare equal.
pub(super) fn find_anchor(
    source: &ScannedSource,
    anchor: &str,
    start: usize,
    end: usize,
) -> Vec<(usize, usize)> {
    let Some(pattern) = anchor_pattern(anchor) else { return Vec::new() };
    let code = source.code().as_bytes().get(start..end).unwrap_or_default();
    pattern.find_iter(code).map(|found| (start + found.start(), start + found.end())).collect()
}

/// Returns the first match in the raw text of an anchor that [`find_anchor`] does not find in the code.
pub(super) fn find_outside_of_code(
    source: &ScannedSource,
    anchor: &str,
    start: usize,
    end: usize,
) -> Option<usize> {
    let raw = source.raw().get(start..end)?;
    anchor_pattern(anchor)?.find(raw).map(|found| start + found.start())
}

fn anchor_pattern(anchor: &str) -> Option<Regex> {
    let words: Vec<String> = anchor.split_ascii_whitespace().map(regex::escape).collect();
    let is_word = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
    let trimmed = anchor.trim().as_bytes();
    let first = if is_word(trimmed.first()) { r"\b" } else { "" };
    let last = if is_word(trimmed.last()) { r"\b" } else { "" };
    Regex::new(&format!("(?-u){first}{}{last}", words.join(r"\s+"))).ok()
}

/// The position before or after an anchor, or why no statement may be inserted there.
pub(super) fn insert_position(
    source: &ScannedSource,
    at: HookPosition,
    anchor: (usize, usize),
    start: usize,
) -> Result<InsertPosition, String> {
    let (from, to) = anchor;
    if let Some(directive) = source.directives().iter().find(|range| range.start <= from && from < range.end)
    {
        if directive.start != from {
            return Err("the anchor stands inside of a preprocessor line, where no code runs".to_owned());
        }
        let at = match at {
            HookPosition::After => {
                source.next_line(directive.end.saturating_sub(1)).ok_or_else(|| NO_LINE_END.to_owned())?
            }
            _ => source.line_start(directive.start),
        };
        return check_is_code(source, at).map(|()| InsertPosition { offset: at, adjacent: from });
    }
    let structure = source.structure();
    if structure.get(from..to) != source.code().as_bytes().get(from..to) {
        return Err(
            "the anchor stands in an alternative of a conditional whose braces do not add up".to_owned()
        );
    }
    let boundary = last_boundary(structure, start, from).map_or(start, |place| place + 1);
    let lead = structure.get(boundary..from).unwrap_or_default();
    if let Some(word) = CONTROL_KEYWORDS.iter().find(|word| has_word(lead, word)) {
        return Err(format!("the anchor belongs to an `{word}` before it: a line beside it would not"));
    }
    if closes_more(lead) {
        return Err(
            "the anchor belongs to what stands in parentheses before it: a line beside it would not".into()
        );
    }
    let spot = if at == HookPosition::After {
        let next = source.next_line(to.saturating_sub(1)).ok_or_else(|| NO_LINE_END.to_owned())?;
        let tail = structure.get(to.saturating_sub(1)..next).unwrap_or_default().trim_ascii_end();
        let inner =
            tail.split_last().map(|(_, inner)| inner.get(1..).unwrap_or_default()).unwrap_or_default();
        if inner.iter().any(|byte| matches!(byte, b';' | b'{' | b'}')) {
            return Err("behind the anchor another statement stands on the same line".to_owned());
        }
        if !matches!(tail.last(), Some(b';' | b'{' | b'}' | b':')) {
            return Err("the anchor's statement goes on in the next line".to_owned());
        }
        InsertPosition { offset: next, adjacent: from }
    } else {
        let line = source.line_start(from);
        if last_boundary(structure, line, from).is_some() {
            return Err("before the anchor another statement stands on the same line".to_owned());
        }
        if structure.get(boundary..line).unwrap_or_default().iter().any(|byte| !byte.is_ascii_whitespace()) {
            return Err("the anchor's statement begins on a line before it".to_owned());
        }
        InsertPosition { offset: line, adjacent: from }
    };
    if in_parentheses(structure.get(start..spot.offset).unwrap_or_default()) {
        return Err("the line beside the anchor is inside of parentheses".to_owned());
    }
    check_is_code(source, spot.offset).map(|()| spot)
}

/// Fails if the line at this offset is in a multi-line comment, or before a byte order mark.
pub(super) fn check_is_code(source: &ScannedSource, at: usize) -> Result<(), String> {
    if source.comments().iter().any(|comment| comment.start < at && at < comment.end) {
        return Err("the line beside it would be part of a comment".to_owned());
    }
    if at == 0 && source.raw().starts_with(UTF8_BOM) {
        return Err("the line would come before the byte order mark of the file".to_owned());
    }
    Ok(())
}

const NO_LINE_END: &str = "the anchor's line is the file's last and has no line end";

/// Offset of the last end of a statement or label in a range; `::` is neither.
fn last_boundary(text: &[u8], start: usize, end: usize) -> Option<usize> {
    (start..end).rev().find(|at| match text.get(*at) {
        Some(b';' | b'{' | b'}') => true,
        Some(b':') => {
            text.get(at + 1) != Some(&b':') && at.checked_sub(1).and_then(|at| text.get(at)) != Some(&b':')
        }
        _ => false,
    })
}

/// Returns true if the text closes a parenthesis that was opened before the text.
fn closes_more(text: &[u8]) -> bool {
    let mut depth = 0usize;
    text.iter().any(|byte| {
        match byte {
            b'(' => depth += 1,
            b')' if depth == 0 => return true,
            b')' => depth -= 1,
            _ => {}
        }
        false
    })
}

fn has_word(text: &[u8], word: &str) -> bool {
    text.split(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_').any(|part| part == word.as_bytes())
}

/// Returns true if the innermost open bracket at the end of the text is a parenthesis or square bracket.
fn in_parentheses(text: &[u8]) -> bool {
    let mut open = Vec::new();
    for byte in text {
        match byte {
            b'(' | b'[' | b'{' => open.push(*byte),
            b')' | b']' | b'}' => {
                open.pop();
            }
            _ => {}
        }
    }
    open.last().is_some_and(|byte| *byte != b'{')
}
