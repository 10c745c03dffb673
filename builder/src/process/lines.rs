//! Splits a stream of bytes into lines of text. A carriage return ends a line, too: progress output
//! overwrites itself.

/// Longest line in bytes; longer ones are passed on in pieces, so that a program cannot fill our memory.
const MAX_LINE_BYTES: usize = 256 * 1024;

/// Splitter with the incomplete last line.
#[derive(Debug, Default)]
pub(crate) struct LineSplitter {
    pending: Vec<u8>,
}

impl LineSplitter {
    /// Adds bytes and passes on each completed line, without its terminator.
    pub(crate) fn push(&mut self, bytes: &[u8], line: &mut impl FnMut(&str)) {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            self.pending.extend_from_slice(&rest[..end]);
            self.finish(line);
            rest = &rest[end + 1..];
        }
        self.pending.extend_from_slice(rest);
        if self.pending.len() > MAX_LINE_BYTES {
            self.finish(line);
        }
    }

    /// Passes on the incomplete last line, if any.
    pub(crate) fn finish(&mut self, line: &mut impl FnMut(&str)) {
        if !self.pending.is_empty() {
            line(&String::from_utf8_lossy(&self.pending));
            self.pending.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(chunks: &[&[u8]]) -> Vec<String> {
        let (mut lines, mut found) = (LineSplitter::default(), Vec::new());
        for chunk in chunks {
            lines.push(chunk, &mut |line: &str| found.push(line.to_owned()));
        }
        lines.finish(&mut |line: &str| found.push(line.to_owned()));
        found
    }

    #[test]
    fn lines_are_joined_across_chunks() {
        assert_eq!(cut(&[b"on", b"e\ntw", b"o\r\nthree"]), ["one", "two", "three"]);
    }

    #[test]
    fn bytes_that_are_not_text_are_replaced() {
        assert_eq!(cut(&[b"a\xffb\n"]), ["a\u{fffd}b"]);
    }

    #[test]
    fn a_line_without_end_is_handed_over_in_pieces() {
        assert_eq!(
            cut(&[&vec![b'x'; MAX_LINE_BYTES + 1], b"y\n"]),
            ["x".repeat(MAX_LINE_BYTES + 1), "y".to_owned()]
        );
    }
}
