//! The first numbers of each vector in an answer with embeddings, and the scores of a ranking.
//!
//! NaN is written as null. llama-server divides a vector by its length, so one NaN makes all entries null. A
//! vector whose first entries are all equal contains nothing, such as one of zeros.

use std::sync::LazyLock;

use aho_corasick::packed::Searcher;

use super::meter::searcher_of;
use super::name_finder::NameFinder;

/// Members that hold a vector or a score.
const MEMBERS: [&str; 3] = ["\"embedding\":", "\"relevance_score\":", "\"score\":"];
const VECTOR_MEMBER: usize = 0;

static SEARCHER: LazyLock<Searcher> = LazyLock::new(|| searcher_of(&MEMBERS));

/// Bytes examined of a vector: a dozen numbers.
const VECTOR_BYTES: usize = 256;
/// Bytes examined of a score.
const SCORE_BYTES: usize = 8;
/// Entries without which a vector is no evidence.
const MIN_ENTRIES: usize = 4;
/// In base64, three numbers of four bytes take 16 letters.
const BASE64_PERIOD: usize = 16;

#[derive(Debug, Default)]
pub(super) struct VectorScan {
    finder: NameFinder,
    /// Beginning of the present vector or score.
    head: Vec<u8>,
    /// Bytes that `head` is to have; 0 between two members.
    wanted: usize,
    has_fault: Option<bool>,
}

impl VectorScan {
    pub(super) fn feed(&mut self, piece: &[u8]) {
        let mut rest = piece;
        while !rest.is_empty() {
            if self.wanted > 0 {
                let (head, more) = rest.split_at(rest.len().min(self.wanted - self.head.len()));
                self.head.extend_from_slice(head);
                rest = more;
                if self.head.len() == self.wanted {
                    self.has_fault = self.sign();
                    self.head.clear();
                    self.wanted = 0;
                }
            } else if let Some((member, after)) = self.finder.find(&SEARCHER, rest) {
                self.wanted = if member == VECTOR_MEMBER { VECTOR_BYTES } else { SCORE_BYTES };
                rest = after;
            } else {
                return;
            }
        }
    }

    /// Returns whether a number is null, or a vector has equal entries only; `None` without any.
    pub(super) fn sign(&self) -> Option<bool> {
        let now = match self.wanted {
            0 => None,
            SCORE_BYTES => is_null_score(&self.head),
            _ => is_void_vector(&self.head),
        };
        match (self.has_fault, now) {
            (Some(before), Some(now)) => Some(before || now),
            (before, now) => before.or(now),
        }
    }
}

fn is_null_score(head: &[u8]) -> Option<bool> {
    match head.trim_ascii_start().first()? {
        b'n' => Some(true),
        b'-' | b'0'..=b'9' => Some(false),
        _ => None,
    }
}

fn is_void_vector(head: &[u8]) -> Option<bool> {
    let head = head.trim_ascii_start();
    if let Some(base64) = head.strip_prefix(b"\"") {
        let letters = base64.split(|byte| *byte == b'"').next()?;
        let shifted = letters.get(BASE64_PERIOD..).filter(|shifted| shifted.len() >= BASE64_PERIOD)?;
        return Some(letters.starts_with(shifted));
    }
    // Without pooling there is a vector per token.
    let start = head.iter().position(|byte| !matches!(byte, b'[' | b' '))?;
    let numbers = &head[start..];
    let end = numbers.iter().position(|byte| *byte == b']');
    let mut entries: Vec<&[u8]> =
        numbers[..end.unwrap_or(numbers.len())].split(|byte| *byte == b',').map(<[u8]>::trim_ascii).collect();
    if end.is_none() {
        // The last entry may be incomplete.
        entries.pop();
    }
    if entries.contains(&b"null".as_slice()) {
        return Some(true);
    }
    (entries.len() >= MIN_ENTRIES).then(|| entries.iter().all(|entry| *entry == entries[0]))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn judge(answer: &Value) -> Option<bool> {
        let answer = answer.to_string();
        let in_pieces = |size: usize| {
            let mut scan = VectorScan::default();
            answer.as_bytes().chunks(size).for_each(|piece| scan.feed(piece));
            scan.sign()
        };
        let whole = in_pieces(answer.len());
        for size in [1, 2, 3, 7, 16, 50, 333] {
            assert_eq!(in_pieces(size), whole, "in pieces of {size}: {answer}");
        }
        whole
    }

    fn embeddings(vectors: &[Value]) -> Value {
        let one = |vector: &Value| json!({ "object": "embedding", "index": 0, "embedding": vector });
        json!({ "object": "list", "data": vectors.iter().map(one).collect::<Vec<_>>() })
    }

    #[test]
    fn null_and_equal_entries_are_seen_in_every_form() {
        let sound: Vec<f64> = (0..1024).map(|n| f64::from(n).sin()).collect();
        let sound = json!(sound);
        let (null, zero) = (json!(vec![Value::Null; 1024]), json!(vec![0.0; 1024]));
        assert_eq!(judge(&embeddings(&[sound.clone(), sound.clone()])), Some(false));
        assert_eq!(judge(&embeddings(&[sound.clone(), null.clone()])), Some(true));
        assert_eq!(judge(&embeddings(&[zero.clone(), sound.clone()])), Some(true));
        // Without pooling, and short vectors.
        assert_eq!(judge(&json!([{ "index": 0, "embedding": [sound, sound] }])), Some(false));
        assert_eq!(judge(&json!([{ "index": 0, "embedding": [null] }])), Some(true));
        assert_eq!(judge(&embeddings(&[json!([0.5, 0.25, 0.1, 0.3])])), Some(false));
        assert_eq!(judge(&embeddings(&[json!([0.0, 0.0, 0.0, 0.0])])), Some(true));
        assert_eq!(judge(&embeddings(&[json!([1.0])])), None, "one number can be right");
        // Base64: numbers, zeros, NaN.
        let letters = |part: &str| json!(part.repeat(400));
        assert_eq!(
            judge(&embeddings(&[json!("mpmZPs3MTD8AAIC/".to_owned() + &"zczMPQrXIzyPwnU9".repeat(9) + "x")])),
            Some(false)
        );
        assert_eq!(judge(&embeddings(&[letters("AAAA")])), Some(true));
        assert_eq!(judge(&embeddings(&[letters("AADAfwAAwH8AAMB/")])), Some(true));
        assert_eq!(judge(&json!({ "content": "no numbers" })), None);
    }

    #[test]
    fn null_scores_are_seen() {
        let ranked = |score: Value| json!({ "results": [{ "index": 0, "relevance_score": 0.5 }, { "index": 1, "relevance_score": score }] });
        assert_eq!(judge(&ranked(json!(-3.25))), Some(false));
        assert_eq!(judge(&ranked(json!(0.5))), Some(false), "two documents may be equal");
        assert_eq!(judge(&ranked(Value::Null)), Some(true));
        assert_eq!(judge(&json!([{ "index": 0, "score": Value::Null }])), Some(true));
    }
}
