//! Reads a string of a JSON body in its raw, still escaped spelling, in pieces of any size. Keeps only bytes
//! that may be compared and measures the rest, such as images. Checks no syntax.

use memchr::memchr;

/// Raw spelling of the current or the last string.
#[derive(Debug, Default)]
pub(crate) struct StringSpelling {
    bytes: Vec<u8>,
    limit: usize,
    is_too_long: bool,
    /// True if the last byte was an unescaped backslash: the next byte is escaped.
    ends_in_escape: bool,
    /// Raw length in bytes, including bytes not kept.
    pub(crate) length: u64,
}

impl StringSpelling {
    /// Begins a string; keeps at most `limit` raw bytes of it.
    pub(crate) fn begin(&mut self, limit: usize) {
        self.bytes.clear();
        (self.limit, self.length) = (limit, 0);
        (self.is_too_long, self.ends_in_escape) = (false, false);
    }

    /// Reads from `start` to the closing quote or the end of the piece. Returns the offset after the bytes
    /// read, and whether the string has ended. Searches only for quotes: a backslash matters only right
    /// before a quote and at the end of the piece.
    pub(crate) fn read(&mut self, piece: &[u8], start: usize) -> (usize, bool) {
        let text = &piece[start..];
        let mut from = 0;
        while let Some(quote) = memchr(b'"', &text[from..]).map(|n| from + n) {
            if !self.is_next_escaped(&text[..quote]) {
                self.append(&text[..quote]);
                return (start + quote + 1, true);
            }
            from = quote + 1;
        }
        self.ends_in_escape = self.is_next_escaped(text);
        self.append(text);
        (piece.len(), false)
    }

    /// Returns whether the byte after `text`, which continues the last piece, is escaped.
    fn is_next_escaped(&self, text: &[u8]) -> bool {
        let run = text.iter().rev().take_while(|byte| **byte == b'\\').count();
        (run % 2 == 1) != (run == text.len() && self.ends_in_escape)
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) {
        self.length += bytes.len() as u64;
        let kept = bytes.len().min(self.limit.saturating_sub(self.bytes.len()));
        self.bytes.extend_from_slice(&bytes[..kept]);
        self.is_too_long |= kept < bytes.len();
    }

    /// Returns whether the unescaped string equals `word`.
    pub(crate) fn spells(&self, word: &str) -> bool {
        if self.is_too_long {
            false
        } else if self.is_escaped() {
            self.decoded().as_deref() == Some(word)
        } else {
            self.bytes == word.as_bytes()
        }
    }

    /// Returns whether the string is a `data:` URL with base64; event streams begin with `data:`, too.
    pub(crate) fn is_media(&self) -> bool {
        self.bytes.starts_with(b"data:") && memchr::memmem::find(&self.bytes, b";base64,").is_some()
    }

    #[cfg(test)]
    pub(crate) fn kept(&self) -> usize {
        self.bytes.capacity()
    }

    /// Returns the raw spelling; `None` if it is too long.
    pub(crate) fn raw(&self) -> Option<&[u8]> {
        (!self.is_too_long).then_some(&self.bytes)
    }

    fn is_escaped(&self) -> bool {
        memchr(b'\\', &self.bytes).is_some()
    }

    /// Returns the unescaped string; `None` if it is too long or invalid.
    pub(crate) fn decoded(&self) -> Option<String> {
        let raw = self.raw()?;
        if !self.is_escaped() && raw.iter().all(|byte| *byte >= b' ') {
            return String::from_utf8(raw.to_vec()).ok();
        }
        serde_json::from_slice(&[b"\"", raw, b"\""].concat()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, size: usize, limit: usize) -> (StringSpelling, usize) {
        let mut spelling = StringSpelling::default();
        spelling.begin(limit);
        let mut read = 0;
        for piece in text.as_bytes().chunks(size) {
            let (at, ended) = spelling.read(piece, 0);
            read += at;
            if ended {
                return (spelling, read);
            }
        }
        panic!("{text} does not end")
    }

    #[test]
    fn a_string_ends_at_its_own_quote_in_pieces_of_any_size() {
        for (text, word) in [
            (r#"model" : "x""#, "model"),
            (r#"mod\u0065l","#, "model"),
            (r#"a\"b\\" "#, "a\"b\\"),
            (r#"\\\"" "#, "\\\""),
            ("\" ", ""),
        ] {
            let end = text.rfind('"').filter(|_| !text.contains(':')).map_or(6, |at| at + 1);
            for size in 1..=text.len() {
                let (spelling, read) = of(text, size, 64);
                assert_eq!(spelling.decoded().as_deref(), Some(word), "{text} by {size}");
                assert!(spelling.spells(word) && !spelling.spells("other"), "{text} by {size}");
                assert_eq!((read, spelling.length), (end, end as u64 - 1), "{text} by {size}");
            }
        }
    }

    #[test]
    fn runs_of_backslashes_are_counted_over_pieces_and_quotes() {
        // Check all strings of eight of these three characters against a reader that goes byte by byte.
        for number in 0..3_usize.pow(8) {
            let letter = |at| b"a\\\""[number / 3_usize.pow(at) % 3];
            let text: Vec<u8> = (0..8).map(letter).chain(*b"a\"").collect();
            let mut end = 0;
            while text[end] != b'"' {
                end += if text[end] == b'\\' { 2 } else { 1 };
            }
            let text = String::from_utf8(text).unwrap();
            for size in [1, 2, 3, 10] {
                let (spelling, read) = of(&text, size, 64);
                assert_eq!(
                    (read, spelling.raw()),
                    (end + 1, Some(&text.as_bytes()[..end])),
                    "{text} by {size}"
                );
            }
        }
    }

    #[test]
    fn what_is_longer_than_anybody_compares_is_measured_and_is_no_word() {
        let (spelling, read) = of("abcdef\"", 2, 5);
        assert_eq!((read, spelling.length), (7, 6));
        assert!(spelling.decoded().is_none() && spelling.raw().is_none());
        assert!(!spelling.spells("abcde") && !spelling.spells("abcdef"));
    }

    #[test]
    fn line_breaks_and_broken_escapes_are_no_text() {
        assert_eq!(of("a\nb\"", 9, 64).0.decoded(), None);
        assert_eq!(of("a\\xb\"", 9, 64).0.decoded(), None);
    }
}
