//! Blanks everything that is no code: comments, contents of strings and characters, and our hooks' lines.
//!
//! The result keeps the input's length and line ends, so that offsets are the same in both. The result is
//! ASCII: other bytes outside of comments and strings become `?`.
//!
//! Supported C++ syntax: both kinds of comments, line comments continued by a backslash, strings with
//! escapes and prefixes, raw strings, characters, digit separators as in `5'000'000`. An unclosed string or
//! character ends with its line, as in `#error don't`. The name after `#include` is kept, because anchors
//! and probes search for it.

use std::ops::Range;

use crate::marker::{self, MARKER_PREFIX};

/// Longest delimiter of a raw string in the C++ standard.
const MAX_RAW_DELIMITER: usize = 16;

/// UTF-8 byte order mark, which some editors write at the beginning of a file.
pub(crate) const UTF8_BOM: &[u8] = b"\xef\xbb\xbf";

#[derive(Clone, Debug)]
pub(super) struct MaskedText {
    pub(super) code: Vec<u8>,
    /// Ranges of comments and of our lines, in order.
    pub(super) comments: Vec<Range<usize>>,
    /// Ranges of preprocessor lines with their continuations, without the last line end, in order.
    pub(super) directives: Vec<Range<usize>>,
}

struct TextMasker<'a> {
    raw: &'a [u8],
    out: MaskedText,
    at: usize,
    /// The current line has only blanks so far.
    fresh: bool,
    line: usize,
    directive: Option<usize>,
    include: bool,
}

pub(super) fn mask_text(raw: &[u8]) -> MaskedText {
    let code = raw.iter().map(|&byte| if byte.is_ascii() { byte } else { b'?' }).collect();
    let out = MaskedText { code, comments: Vec::new(), directives: Vec::new() };
    let mut masker = TextMasker { raw, out, at: 0, fresh: true, line: 0, directive: None, include: false };
    if raw.starts_with(UTF8_BOM) {
        blank_range(&mut masker.out.code, 0..UTF8_BOM.len());
        masker.at = UTF8_BOM.len();
    }
    masker.run();
    masker.out
}

impl TextMasker<'_> {
    fn run(&mut self) {
        while let Some(&byte) = self.raw.get(self.at) {
            match byte {
                b'\\' if splice_length(self.raw, self.at) > 0 => {
                    // The next line continues this one.
                    self.at += splice_length(self.raw, self.at);
                    self.line = self.at;
                }
                b'\n' => self.end_of_line(),
                b'/' if self.spliced_peek().0 == Some(b'/') => self.line_comment(),
                b'/' if self.spliced_peek().0 == Some(b'*') => self.block_comment(),
                b'"' if self.include => self.skip_quoted(byte, false),
                b'"' | b'\'' => self.skip_quoted(byte, true),
                b'#' if self.fresh => self.begin_directive(),
                b'0'..=b'9' => self.skip_number(),
                _ if is_word_byte(byte) => self.skip_word(),
                _ => {
                    self.fresh &= byte.is_ascii_whitespace();
                    self.at += 1;
                }
            }
        }
        self.end_directive();
    }

    fn peek(&self, ahead: usize) -> Option<u8> {
        self.raw.get(self.at + ahead).copied()
    }

    /// The next byte after line continuations, with its offset.
    fn spliced_peek(&self) -> (Option<u8>, usize) {
        let mut at = self.at + 1;
        while splice_length(self.raw, at) > 0 {
            at += splice_length(self.raw, at);
        }
        (self.raw.get(at).copied(), at)
    }

    fn end_of_line(&mut self) {
        self.end_directive();
        self.at += 1;
        self.fresh = true;
        self.line = self.at;
    }

    fn begin_directive(&mut self) {
        // A `#` at the beginning of a continuation line starts no new directive.
        if self.directive.is_none() {
            self.directive = Some(self.at);
            let rest = self.raw.get(self.at + 1..).unwrap_or_default();
            let rest = rest.trim_ascii_start();
            self.include = rest.starts_with(b"include") || rest.starts_with(b"import");
        }
        self.fresh = false;
        self.at += 1;
    }

    fn end_directive(&mut self) {
        if let Some(start) = self.directive.take() {
            self.out.directives.push(start..self.at);
        }
        self.include = false;
    }

    fn line_comment(&mut self) {
        let start = self.at;
        let mut end = start;
        loop {
            end += self
                .raw
                .get(end..)
                .and_then(|rest| rest.iter().position(|&byte| byte == b'\n'))
                .unwrap_or(self.raw.len() - end);
            if end < self.raw.len() && is_continued(self.raw, end) {
                end += 1;
            } else {
                break;
            }
        }
        let text = self.raw.get(start..end).unwrap_or_default();
        let ours = text.starts_with(MARKER_PREFIX.as_bytes())
            && std::str::from_utf8(text).is_ok_and(|text| marker::parse_marker(text).is_some());
        let from = if ours { self.line } else { start };
        if ours {
            // We inserted the whole line, so a directive on it is ours, too.
            self.directive = self.directive.filter(|directive| *directive < from);
        }
        blank_range(&mut self.out.code, from..end);
        self.out.comments.push(from..end);
        self.at = end;
    }

    fn block_comment(&mut self) {
        let start = self.at;
        let end = self.end_of_block(self.spliced_peek().1 + 1);
        blank_range(&mut self.out.code, start..end);
        self.out.comments.push(start..end);
        self.at = end;
        self.move_line(start, end);
    }

    /// Offset after the end of a block comment whose content begins at `at`.
    fn end_of_block(&self, mut at: usize) -> usize {
        while let Some(byte) = self.raw.get(at) {
            at += 1;
            if *byte == b'*' {
                let mut next = at;
                while splice_length(self.raw, next) > 0 {
                    next += splice_length(self.raw, next);
                }
                if self.raw.get(next) == Some(&b'/') {
                    return next + 1;
                }
            }
        }
        self.raw.len()
    }

    fn skip_quoted(&mut self, quote: u8, inside: bool) {
        let start = self.at + 1;
        let mut end = start;
        loop {
            match self.raw.get(end) {
                None | Some(b'\n') => break,
                Some(b'\\') if splice_length(self.raw, end) > 0 => end += splice_length(self.raw, end),
                Some(b'\\') => match self.raw.get(end + 1..) {
                    Some([_, ..]) => end += 2,
                    _ => end += 1,
                },
                Some(&byte) if byte == quote => break,
                Some(_) => end += 1,
            }
        }
        let end = end.min(self.raw.len());
        if inside {
            blank_range(&mut self.out.code, start..end);
        }
        self.fresh = false;
        self.at = if self.raw.get(end) == Some(&quote) { end + 1 } else { end };
        self.move_line(start, end);
    }

    fn move_line(&mut self, start: usize, end: usize) {
        if let Some(last) =
            self.raw.get(start..end).unwrap_or_default().iter().rposition(|&byte| byte == b'\n')
        {
            self.line = start + last + 1;
        }
    }

    fn skip_number(&mut self) {
        self.fresh = false;
        self.at += 1;
        while let Some(byte) = self.peek(0) {
            match byte {
                b'\'' if self.peek(1).is_some_and(is_word_byte) => self.at += 2,
                b'+' | b'-' if matches!(self.raw.get(self.at - 1), Some(b'e' | b'E' | b'p' | b'P')) => {
                    self.at += 1;
                }
                b'.' => self.at += 1,
                _ if is_word_byte(byte) => self.at += 1,
                _ => break,
            }
        }
    }

    fn skip_word(&mut self) {
        self.fresh = false;
        let start = self.at;
        while self.peek(0).is_some_and(is_word_byte) {
            self.at += 1;
        }
        let word = self.raw.get(start..self.at).unwrap_or_default();
        if self.peek(0) == Some(b'"') && matches!(word, b"R" | b"LR" | b"uR" | b"UR" | b"u8R") {
            self.skip_raw_string();
        }
    }

    fn skip_raw_string(&mut self) {
        let inside = self.at + 1;
        let rest = self.raw.get(inside..).unwrap_or_default();
        let delimiter = rest.iter().take(MAX_RAW_DELIMITER + 1).position(|&byte| byte == b'(');
        // This is an ordinary string, not a raw one.
        let Some(delimiter) = delimiter.and_then(|length| rest.get(..length)) else { return };
        if delimiter.iter().any(|byte| byte.is_ascii_whitespace() || matches!(byte, b'"' | b'\\' | b')')) {
            return;
        }
        let mut closing = vec![b')'];
        closing.extend_from_slice(delimiter);
        closing.push(b'"');
        let body = inside + delimiter.len() + 1;
        let end = memchr::memmem::find(self.raw.get(body..).unwrap_or_default(), &closing)
            .map_or(self.raw.len(), |length| body + length + closing.len() - 1);
        blank_range(&mut self.out.code, inside..end);
        self.move_line(inside, end);
        self.at = (end + 1).min(self.raw.len());
    }
}

/// Returns true if a backslash continues the line that ends here.
pub(super) fn is_continued(raw: &[u8], newline: usize) -> bool {
    // Compilers ignore blanks after the backslash.
    let line = raw.get(..newline).unwrap_or_default();
    let last = line.iter().rev().find(|byte| !matches!(byte, b' ' | b'\t' | b'\r' | 0x0b | 0x0c));
    last == Some(&b'\\')
}

/// Length of a line splice (backslash, optional blanks, line end), which compilers remove before any other
/// processing; 0 if there is none here.
fn splice_length(raw: &[u8], at: usize) -> usize {
    let Some((b'\\', rest)) = raw.get(at..).and_then(<[u8]>::split_first) else { return 0 };
    let blanks = rest.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\r' | 0x0b | 0x0c)).count();
    if rest.get(blanks) == Some(&b'\n') { blanks + 2 } else { 0 }
}

pub(super) fn join_continued(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        match splice_length(text, at) {
            0 => {
                out.push(*byte);
                at += 1;
            }
            length => at += length,
        }
    }
    out
}

pub(super) fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

/// Blanks a range except line ends; words stay separated.
pub(super) fn blank_range(text: &mut [u8], range: Range<usize>) {
    for byte in text.get_mut(range).unwrap_or_default() {
        if !matches!(byte, b'\n' | b'\r') {
            *byte = b' ';
        }
    }
}

/// Offset after the bracket that closes the one at `start`.
pub(super) fn after_closing(text: &[u8], start: usize, open: u8, close: u8) -> Option<usize> {
    let mut depth = 0usize;
    for (at, &byte) in text.iter().enumerate().skip(start) {
        if byte == open {
            depth += 1;
        } else if byte == close {
            depth -= 1;
            if depth == 0 {
                return Some(at + 1);
            }
        }
    }
    None
}

pub(super) fn split_directive(directive: &[u8]) -> Option<(String, Vec<u8>)> {
    let line = join_continued(directive);
    let line = line.trim_ascii().strip_prefix(b"#")?.trim_ascii();
    let length = line.iter().position(|byte| !byte.is_ascii_alphabetic()).unwrap_or(line.len());
    let (word, rest) = line.split_at_checked(length)?;
    Some((String::from_utf8_lossy(word).into_owned(), rest.to_vec()))
}
