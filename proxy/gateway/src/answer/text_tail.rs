//! The last generated text of an answer, to see whether it ends in an endless repetition (`//////`).
//!
//! Finds the texts in the JSON of an answer or of its events, in pieces of any size. Keeps a few hundred bytes of
//! an answer, and only while the answer is passed on.

use std::sync::LazyLock;

use aho_corasick::packed::Searcher;

use super::meter::searcher_of;

/// Members that hold generated text, over all formats, as llama-server writes them: without spaces.
const TEXT_NAMES: [&str; 5] =
    ["\"content\":\"", "\"reasoning_content\":\"", "\"text\":\"", "\"thinking\":\"", "\"delta\":\""];
/// One less than the length of the longest name.
const NAME_OVERLAP_BYTES: usize = 20;

static TEXT_SEARCHER: LazyLock<Searcher> = LazyLock::new(|| searcher_of(&TEXT_NAMES));

/// Bytes examined for a repetition. Shorter texts are no evidence.
const JUDGED_BYTES: usize = 128;
/// Longest repeated part in bytes: corrupt processes repeat one token or two, small models whole sentences.
const MAX_PERIOD_BYTES: usize = 16;
const MAX_TAIL_BYTES: usize = 4 * JUDGED_BYTES;

#[derive(Debug, Default)]
pub(super) struct TextTail {
    /// Last bytes of the text, as written in JSON.
    text: Vec<u8>,
    /// End of the last piece, which may hold the beginning of a name.
    seam: Vec<u8>,
    in_text: bool,
    is_escaped: bool,
}

impl TextTail {
    pub(super) fn feed(&mut self, piece: &[u8]) {
        let mut rest = piece;
        while !rest.is_empty() {
            rest = if self.in_text { self.read_text(rest) } else { self.find_text(rest) };
        }
    }

    /// Returns whether the text ends in a repetition; `None` if it is too short.
    pub(super) fn ends_in_repetition(&self) -> Option<bool> {
        let judged = &self.text[self.text.len().checked_sub(JUDGED_BYTES)?..];
        let has_period = |period: usize| judged[period..] == judged[..JUDGED_BYTES - period];
        Some((1..=MAX_PERIOD_BYTES).any(has_period))
    }

    /// Returns the bytes after the opening quote of the next text.
    fn find_text<'p>(&mut self, piece: &'p [u8]) -> &'p [u8] {
        if !self.seam.is_empty() {
            let before = self.seam.len();
            self.seam.extend_from_slice(&piece[..piece.len().min(NAME_OVERLAP_BYTES)]);
            if let Some(found) = TEXT_SEARCHER.find(&self.seam)
                && found.start() < before
                && found.end() > before
            {
                let end = found.end() - before;
                self.begin_text();
                return &piece[end..];
            }
            self.seam.truncate(before);
        }
        if let Some(found) = TEXT_SEARCHER.find(piece) {
            self.begin_text();
            return &piece[found.end()..];
        }
        self.seam.extend_from_slice(&piece[piece.len().saturating_sub(NAME_OVERLAP_BYTES)..]);
        self.seam.drain(..self.seam.len().saturating_sub(NAME_OVERLAP_BYTES));
        &[]
    }

    fn begin_text(&mut self) {
        self.seam.clear();
        (self.in_text, self.is_escaped) = (true, false);
    }

    /// Returns the bytes after the closing quote of the text.
    fn read_text<'p>(&mut self, piece: &'p [u8]) -> &'p [u8] {
        let mut at = 0;
        if self.is_escaped {
            self.is_escaped = false;
            at = 1;
        }
        let end = loop {
            match memchr::memchr2(b'"', b'\\', &piece[at..]).map(|found| at + found) {
                Some(found) if piece[found] == b'"' => break Some(found),
                // The escaped character may be in the next piece.
                Some(found) if found + 1 == piece.len() => {
                    self.is_escaped = true;
                    break None;
                }
                Some(found) => at = found + 2,
                None => break None,
            }
        };
        self.keep(&piece[..end.unwrap_or(piece.len())]);
        self.in_text = end.is_none();
        end.map_or(&[], |end| &piece[end + 1..])
    }

    fn keep(&mut self, text: &[u8]) {
        let text = &text[text.len().saturating_sub(JUDGED_BYTES)..];
        if self.text.len() + text.len() > MAX_TAIL_BYTES {
            self.text.drain(..self.text.len().saturating_sub(JUDGED_BYTES));
        }
        self.text.extend_from_slice(text);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn judge_in_pieces(answer: &str, size: usize) -> Option<bool> {
        let mut tail = TextTail::default();
        for piece in answer.as_bytes().chunks(size) {
            tail.feed(piece);
        }
        tail.ends_in_repetition()
    }

    /// Judges an answer that is cut into pieces of all sizes.
    fn judge(answer: &str) -> Option<bool> {
        let whole = judge_in_pieces(answer, answer.len().max(1));
        for size in [1, 2, 3, 7, 16, 50, 333] {
            assert_eq!(judge_in_pieces(answer, size), whole, "in pieces of {size}: {answer}");
        }
        whole
    }

    fn streamed(tokens: impl IntoIterator<Item = String>) -> String {
        let event = |text: String| json!({ "choices": [{ "delta": { "content": text }, "index": 0 }] });
        let events = tokens.into_iter().map(|text| format!("data: {}\n\n", event(text)));
        events.collect::<Vec<_>>().concat() + "data: [DONE]\n\n"
    }

    fn whole(text: &str) -> String {
        json!({ "choices": [{ "message": { "role": "assistant", "content": text } }], "usage": {} })
            .to_string()
    }

    #[test]
    fn endless_repetitions_are_seen_in_every_format() {
        for token in ["/", "//////", "GG", "@", "\\", "\"", "\n", "\u{8bf4}", "ab ", " the"] {
            let text = token.repeat(200);
            let answer = |name: &str| json!({ name: text }).to_string();
            let events = std::iter::once("Well: ".to_owned()).chain((0..200).map(|_| token.to_owned()));
            assert_eq!(judge(&streamed(events)), Some(true), "{token}");
            assert_eq!(judge(&whole(&text)), Some(true), "{token}");
            for name in ["text", "reasoning_content", "delta", "thinking"] {
                assert_eq!(judge(&answer(name)), Some(true), "{token} in {name}");
            }
        }
    }

    #[test]
    fn texts_that_repeat_longer_parts_and_short_ones_are_no_repetition() {
        let numbers: Vec<String> = (0..200).map(|n| format!("{n}, ")).collect();
        let rows: Vec<String> = (0..40).map(|n| format!("| {n} | {} |\n", n * 7)).collect();
        let table = format!("| a | b |\n|---|---|\n{}", rows.concat());
        let code: Vec<String> = (0..40).map(|n| format!("    let x{n} = {n};\n")).collect();
        let song = "Happy birthday to you, dear friend.\n".repeat(20);
        for text in [numbers.concat().as_str(), &table, &code.concat(), &song] {
            assert_eq!(judge(&whole(text)), Some(false), "{text}");
        }
        assert_eq!(judge(&whole(&"=".repeat(100))), None, "a line");
        assert_eq!(judge(&json!({ "data": [{ "embedding": vec![0; 500] }] }).to_string()), None);
        let quoted = json!({ "arguments": whole(&"/".repeat(300)) }).to_string();
        assert_eq!(judge(&quoted), None, "quoted in another text");
        let more: Value = json!({ "content": "a".repeat(300), "text": "the end" });
        assert_eq!(judge(&more.to_string()), Some(false));
    }

    proptest! {
        /// Texts of random letters, bytes as base64, and other languages do not end in a repetition.
        #[test]
        fn random_texts_are_sound(text in "(\\PC{200,400}|[A-Za-z0-9+/]{200,400}|[\u{4e00}-\u{9fff}]{80,200})") {
            prop_assert_eq!(judge(&whole(&text)), Some(false));
        }
    }
}
