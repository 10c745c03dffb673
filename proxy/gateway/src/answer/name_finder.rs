//! Finds short words in the JSON of an answer, in pieces of any size.

use aho_corasick::packed::Searcher;

/// Most bytes of a word, less one.
const WORD_OVERLAP_BYTES: usize = 23;

/// Remembers the end of the last piece, which may hold the beginning of a word.
#[derive(Debug, Default)]
pub(super) struct NameFinder {
    seam: Vec<u8>,
}

impl NameFinder {
    /// Returns the index of the next word of `searcher`, and the bytes after it.
    pub(super) fn find<'p>(&mut self, searcher: &Searcher, piece: &'p [u8]) -> Option<(usize, &'p [u8])> {
        if !self.seam.is_empty() {
            let before = self.seam.len();
            self.seam.extend_from_slice(&piece[..piece.len().min(WORD_OVERLAP_BYTES)]);
            if let Some(found) = searcher.find(&self.seam)
                && found.start() < before
                && found.end() > before
            {
                let end = found.end() - before;
                self.seam.clear();
                return Some((found.pattern().as_usize(), &piece[end..]));
            }
            self.seam.truncate(before);
        }
        if let Some(found) = searcher.find(piece) {
            self.seam.clear();
            return Some((found.pattern().as_usize(), &piece[found.end()..]));
        }
        self.seam.extend_from_slice(&piece[piece.len().saturating_sub(WORD_OVERLAP_BYTES)..]);
        self.seam.drain(..self.seam.len().saturating_sub(WORD_OVERLAP_BYTES));
        None
    }
}
