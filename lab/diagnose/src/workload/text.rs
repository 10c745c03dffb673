//! Generates texts of a given number of tokens; only their difference matters, not their meaning.

use warden_policies::world::SplitMix;

/// Common words, most of them a single token in any vocabulary.
const WORDS: [&str; 64] = [
    "the", "water", "house", "small", "over", "river", "light", "green", "walk", "morning", "table", "under",
    "stone", "music", "open", "letter", "night", "garden", "slow", "window", "paper", "north", "story",
    "road", "bright", "winter", "voice", "early", "hand", "field", "often", "bread", "quiet", "number",
    "cold", "forest", "friend", "yellow", "after", "city", "heavy", "question", "summer", "door", "island",
    "simple", "horse", "far", "market", "old", "silver", "rain", "answer", "deep", "mountain", "new",
    "picture", "warm", "bridge", "late", "school", "wide", "apple", "sound",
];

pub(crate) const SAMPLE_WORDS: u32 = 256;
/// Four tokens for three English words, for a server that does not count tokens.
const DEFAULT_TOKENS_PER_WORD: f64 = 1.33;

#[derive(Clone, Copy, Debug)]
pub(crate) struct TextGenerator {
    per_token: f64,
}

impl TextGenerator {
    pub(crate) fn new(tokens_per_word: f64) -> Self {
        let usable = tokens_per_word.is_finite() && tokens_per_word >= 0.1;
        Self { per_token: if usable { 1.0 / tokens_per_word } else { 1.0 / DEFAULT_TOKENS_PER_WORD } }
    }

    /// Returns the text that measures tokens per word.
    pub(crate) fn sample() -> String {
        make_text(u64::MAX, u64::from(SAMPLE_WORDS))
    }

    /// Returns text number `which`, of about `tokens` tokens. Texts differ from the first word on.
    pub(crate) fn text(self, which: u64, tokens: u64) -> String {
        make_text(which, warden_policies::units::scale_bytes(tokens, self.per_token).max(1))
    }
}

fn make_text(which: u64, count: u64) -> String {
    let mut random = SplitMix::new(which);
    let mut text = String::new();
    for n in 0..count {
        // The first words encode the number, so that no other text has this beginning.
        let pick = if n < 6 { (which >> (6 * n)) % 64 } else { random.below(64) };
        if n > 0 {
            text.push(' ');
        }
        text.push_str(WORDS[usize::try_from(pick).unwrap_or(0)]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_the_wanted_length_and_its_own_beginning() {
        let words = TextGenerator::new(2.0);
        assert_eq!(words.text(1, 100).split(' ').count(), 50);
        assert_eq!(words.text(1, 100), words.text(1, 100));
        let starts: std::collections::BTreeSet<String> = (0..5000).map(|n| words.text(n, 12)).collect();
        assert_eq!(starts.len(), 5000);
        assert_eq!(TextGenerator::new(0.0).text(0, 133).split(' ').count(), 100);
    }
}
