//! What the text of an answer shows: whether it ends in an endless repetition (`//////`), whether the model
//! stopped without generating anything, and whether log-probabilities are null.
//!
//! Finds the texts in the JSON of an answer or of its events, in pieces of any size. Keeps a few hundred bytes of
//! an answer, and only while the answer is passed on.

use std::sync::LazyLock;

use aho_corasick::packed::Searcher;
use warden_policies::health::AnswerSigns;

use super::meter::searcher_of;
use super::name_finder::NameFinder;

/// Words over all formats, as llama-server writes them: without spaces.
const WORDS: [&str; 13] = [
    // Members that hold generated text.
    "\"content\":\"",
    "\"reasoning_content\":\"",
    "\"text\":\"",
    "\"thinking\":\"",
    "\"delta\":\"",
    // Tool calls.
    "\"arguments\":\"",
    "\"tool_use\"",
    // The model ended the answer, not a limit. In the first format a stop word may have ended it, too.
    "\"finish_reason\":\"stop\"",
    "\"stop_type\":\"eos\"",
    "\"stopped_eos\":true",
    "\"stop_reason\":\"end_turn\"",
    // A null log-probability (NaN), and one with a number.
    "\"logprob\":null",
    "\"logprob\":-",
];
const TOOL_WORDS: usize = 5;
const STOP_WORDS: usize = 7;
const NULL_WORD: usize = 11;

static SEARCHER: LazyLock<Searcher> = LazyLock::new(|| searcher_of(&WORDS));

/// Tokens of an answer without text that are enough to call it empty, if a limit ended it: no format has so
/// many tokens around a text.
const INVISIBLE_TOKENS: u64 = 16;
/// Bytes examined for a repetition. Shorter texts are no evidence.
const JUDGED_BYTES: usize = 128;
/// Longest repeated part in bytes: corrupt processes repeat one token or two, small models whole sentences.
const MAX_PERIOD_BYTES: usize = 16;
const MAX_TAIL_BYTES: usize = 4 * JUDGED_BYTES;

/// Place of the next byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum TextPlace {
    #[default]
    Outside,
    Inside,
    /// Inside a text, after a backslash.
    Escaped,
}

#[derive(Debug, Default)]
pub(super) struct TextTail {
    /// Last bytes of the text, as written in JSON.
    text: Vec<u8>,
    finder: NameFinder,
    place: TextPlace,
    /// True if the answer has text or a tool call.
    has_output: bool,
    /// True if the model ended the answer.
    has_stopped: bool,
    /// Whether a log-probability is null; `None` without log-probabilities.
    has_null: Option<bool>,
}

impl TextTail {
    pub(super) fn feed(&mut self, piece: &[u8]) {
        let mut rest = piece;
        while !rest.is_empty() {
            rest = match self.place {
                TextPlace::Outside => self.find_word(rest),
                TextPlace::Inside | TextPlace::Escaped => self.read_text(rest),
            };
        }
    }

    /// Returns what the text shows. `tokens`: number of generated tokens, if the answer is complete and
    /// reports it.
    pub(super) fn signs(&self, is_complete: bool, tokens: Option<u64>) -> AnswerSigns {
        let is_long = tokens.is_some_and(|tokens| tokens >= INVISIBLE_TOKENS);
        let empty = if self.has_output {
            Some(false)
        } else {
            (is_complete && (self.has_stopped || is_long)).then_some(true)
        };
        AnswerSigns { repeating: self.ends_in_repetition(), empty, null: self.has_null }
    }

    /// Returns whether the text ends in a repetition; `None` if it is too short.
    fn ends_in_repetition(&self) -> Option<bool> {
        let judged = &self.text[self.text.len().checked_sub(JUDGED_BYTES)?..];
        let has_period = |period: usize| judged[period..] == judged[..JUDGED_BYTES - period];
        Some((1..=MAX_PERIOD_BYTES).any(has_period))
    }

    /// Returns the bytes after the next word.
    fn find_word<'p>(&mut self, piece: &'p [u8]) -> &'p [u8] {
        let Some((word, rest)) = self.finder.find(&SEARCHER, piece) else { return &[] };
        match word {
            ..TOOL_WORDS => self.place = TextPlace::Inside,
            TOOL_WORDS..STOP_WORDS => self.has_output = true,
            STOP_WORDS..NULL_WORD => self.has_stopped = true,
            NULL_WORD => self.has_null = Some(true),
            _ => self.has_null = self.has_null.or(Some(false)),
        }
        rest
    }

    /// Returns the bytes after the closing quote of the text.
    fn read_text<'p>(&mut self, piece: &'p [u8]) -> &'p [u8] {
        let mut at = usize::from(self.place == TextPlace::Escaped);
        self.place = TextPlace::Inside;
        let end = loop {
            match memchr::memchr2(b'"', b'\\', &piece[at..]).map(|found| at + found) {
                Some(found) if piece[found] == b'"' => break Some(found),
                // The escaped character may be in the next piece.
                Some(found) if found + 1 == piece.len() => {
                    self.place = TextPlace::Escaped;
                    break None;
                }
                Some(found) => at = found + 2,
                None => break None,
            }
        };
        self.keep(&piece[..end.unwrap_or(piece.len())]);
        if end.is_some() {
            self.place = TextPlace::Outside;
        }
        end.map_or(&[], |end| &piece[end + 1..])
    }

    fn keep(&mut self, text: &[u8]) {
        self.has_output |= !text.is_empty();
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

    fn judge_in_pieces(answer: &str, size: usize, tokens: u64) -> AnswerSigns {
        let mut tail = TextTail::default();
        for piece in answer.as_bytes().chunks(size) {
            tail.feed(piece);
        }
        tail.signs(true, Some(tokens))
    }

    /// Judges a complete answer that is cut into pieces of all sizes.
    fn judge_all(answer: &str, tokens: u64) -> AnswerSigns {
        let whole = judge_in_pieces(answer, answer.len().max(1), tokens);
        for size in [1, 2, 3, 7, 16, 50, 333] {
            assert_eq!(judge_in_pieces(answer, size, tokens), whole, "in pieces of {size}: {answer}");
        }
        whole
    }

    fn judge(answer: &str) -> Option<bool> {
        judge_all(answer, 1).repeating
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

    #[test]
    fn an_answer_without_output_is_empty_if_the_model_ended_it_or_generated_invisible_tokens() {
        let chat = |finish: &str, message: Value| json!({ "choices": [{ "finish_reason": finish, "message": message }] });
        let stream = |finish: &str| {
            let events = [json!({ "role": "assistant", "content": null }), json!({})];
            let line = |(index, delta): (usize, &Value)| {
                let end = if index == 1 { json!(finish) } else { Value::Null };
                format!("data: {}\n\n", json!({ "choices": [{ "finish_reason": end, "delta": delta }] }))
            };
            events.iter().enumerate().map(line).collect::<String>()
        };
        let nothing = json!({ "content": "" });
        let call =
            json!({ "content": null, "tool_calls": [{ "function": { "name": "f", "arguments": "" } }] });
        for (answer, tokens, empty) in [
            (chat("stop", nothing.clone()).to_string(), 1, Some(true)),
            (stream("stop"), 1, Some(true)),
            (json!({ "content": "", "stop_type": "eos" }).to_string(), 1, Some(true)),
            (json!({ "content": [], "stop_reason": "end_turn" }).to_string(), 1, Some(true)),
            // Only invisible tokens.
            (chat("length", nothing.clone()).to_string(), 16, Some(true)),
            (stream("length"), 200, Some(true)),
            // A limit of 0 or 1, or a stop word.
            (chat("length", nothing.clone()).to_string(), 1, None),
            (stream("length"), 1, None),
            (json!({ "content": "", "stop_type": "word" }).to_string(), 1, None),
            (json!({ "content": "", "stop_type": "limit" }).to_string(), 0, None),
            // Some output.
            (chat("stop", json!({ "content": "y" })).to_string(), 1, Some(false)),
            (chat("stop", json!({ "content": "", "reasoning_content": "hm" })).to_string(), 9, Some(false)),
            (chat("tool_calls", call).to_string(), 20, Some(false)),
            (
                json!({ "content": [{ "type": "tool_use", "input": {} }], "stop_reason": "tool_use" })
                    .to_string(),
                20,
                Some(false),
            ),
        ] {
            assert_eq!(judge_all(&answer, tokens).empty, empty, "{answer}");
        }
        let mut cut = TextTail::default();
        cut.feed(stream("length").as_bytes());
        assert_eq!(cut.signs(false, Some(200)).empty, None, "a cancelled request shows nothing");
    }

    #[test]
    fn a_null_log_probability_is_seen_and_a_missing_one_shows_nothing() {
        let answer = |logprob: Value| {
            let token = json!({ "token": "a", "bytes": [97], "logprob": logprob, "top_logprobs": [] });
            json!({ "choices": [{ "logprobs": { "content": [token] }, "message": { "content": "a" } }] })
                .to_string()
        };
        assert_eq!(judge_all(&answer(json!(-0.5)), 1).null, Some(false));
        assert_eq!(judge_all(&answer(Value::Null), 1).null, Some(true));
        let none = json!({ "choices": [{ "logprobs": null, "message": { "content": "a" } }] }).to_string();
        assert_eq!(judge_all(&none, 1).null, None);
    }

    proptest! {
        /// Texts of random letters, bytes as base64, and other languages do not end in a repetition.
        #[test]
        fn random_texts_are_sound(text in "(\\PC{200,400}|[A-Za-z0-9+/]{200,400}|[\u{4e00}-\u{9fff}]{80,200})") {
            prop_assert_eq!(judge(&whole(&text)), Some(false));
        }
    }
}
