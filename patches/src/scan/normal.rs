//! Normalizes the text of a container, without comments and layout, and hashes it.
//!
//! The text of a container within a conditional begins with the directives that select it, because code
//! that depends on a macro is another version than code that is always compiled.
//!
//! Hashed text: a function from its (qualified) name, a struct from the keyword `struct`, to the closing
//! brace; comments removed; each run of white space replaced by one blank; trimmed. The hash is the first
//! 16 hexadecimal digits of its sha256. Anything before a function's name (`static`, the return type) is
//! excluded, as in the published tables of upstream's history. Lines inserted by our hooks are excluded, so
//! that a patched tree has the fingerprints of the original.

use std::ops::Range;

use sha2::{Digest, Sha256};

use super::{FoundContainer, ScannedSource};

/// Description of the hashed text, written into every `fingerprints.json`.
pub(crate) const NORMALISATION: &str = "strip // and /* */ comments, collapse white space, sha256[:16] of \
                                       name..closing brace (struct: from that word), behind the directives of the \
                                       conditionals around it";

pub(crate) const CONTAINER_DIGITS: usize = 16;
pub(crate) const PIECE_DIGITS: usize = 8;

/// A statement, head or preprocessor line of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CodePiece {
    pub(crate) line: usize,
    pub(crate) text: String,
    pub(crate) hash: String,
}

pub(crate) fn hash_containers(source: &ScannedSource, found: &[FoundContainer]) -> String {
    let text = |found: &FoundContainer| {
        let conditions: Vec<u8> = source
            .conditions(found.start)
            .flat_map(|condition| [condition.as_bytes(), b" "].concat())
            .collect();
        [conditions, normalize(source, found.name..found.end)].concat()
    };
    let texts: Vec<Vec<u8>> = found.iter().map(text).collect();
    hash_digits(&texts.join(&b' '), CONTAINER_DIGITS)
}

pub(crate) fn container_pieces(source: &ScannedSource, found: &FoundContainer) -> Vec<CodePiece> {
    let code = source.code().as_bytes();
    let range = found.name..found.end;
    let mut cuts: Vec<usize> = Vec::new();
    for (at, byte) in code.iter().enumerate().take(range.end).skip(range.start) {
        if matches!(byte, b';' | b'{' | b'}') {
            cuts.push(at + 1);
        }
    }
    for directive in source.directives() {
        if directive.start >= range.start && directive.end <= range.end {
            // A macro definition is a single piece.
            cuts.retain(|cut| *cut <= directive.start || *cut >= directive.end);
            cuts.extend([directive.start, directive.end]);
        }
    }
    cuts.push(range.end);
    cuts.sort_unstable();
    let mut pieces = Vec::new();
    let mut start = range.start;
    for cut in cuts {
        let text = normalize(source, start..cut);
        // A lone brace has no content.
        if !matches!(text.as_slice(), b"" | b"{" | b"}" | b";") {
            let first = first_code_byte(source, start..cut);
            pieces.push(CodePiece {
                line: source.line(first),
                hash: hash_digits(&text, PIECE_DIGITS),
                text: String::from_utf8_lossy(&text).into_owned(),
            });
        }
        start = cut;
    }
    pieces
}

/// The text of a range without comments, with white space collapsed.
fn normalize(source: &ScannedSource, range: Range<usize>) -> Vec<u8> {
    let mut text = Vec::with_capacity(range.len());
    for at in code_ranges(source, range) {
        for &byte in source.raw().get(at).unwrap_or_default() {
            if !is_blank(byte) {
                text.push(byte);
            } else if text.last().is_some_and(|last| *last != b' ') {
                text.push(b' ');
            }
        }
    }
    if text.last() == Some(&b' ') {
        text.pop();
    }
    text
}

/// Matches `\s` of Python and most regular expressions.
fn is_blank(byte: u8) -> bool {
    byte.is_ascii_whitespace() || byte == 0x0b
}

fn first_code_byte(source: &ScannedSource, range: Range<usize>) -> usize {
    let start = range.start;
    code_ranges(source, range)
        .flatten()
        .find(|at| source.raw().get(*at).is_some_and(|byte| !is_blank(*byte)))
        .unwrap_or(start)
}

fn code_ranges(source: &ScannedSource, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let comments = source.comments();
    let first = comments.partition_point(|comment| comment.end <= range.start);
    let inside = comments.get(first..).unwrap_or_default().iter().take_while({
        let end = range.end;
        move |comment| comment.start < end
    });
    let mut ranges = Vec::new();
    let mut at = range.start;
    for comment in inside {
        ranges.push(at..comment.start.max(at));
        at = comment.end.min(range.end).max(at);
    }
    ranges.push(at..range.end);
    ranges.into_iter()
}

fn hash_digits(text: &[u8], count: usize) -> String {
    let mut hash = hex::encode(Sha256::digest(text));
    hash.truncate(count);
    hash
}
