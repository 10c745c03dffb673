//! The difference between two states of a file as pieces of bytes, made along its lines.
//!
//! A journal keeps these: with the original they give the patched file back, to the byte, whatever its line ends or
//! its encoding.

use diffy::{DiffOptions, Hunk, Line};
use serde::{Deserialize, Serialize};

/// More lines of context than a file has: the difference then comes as one hunk, and its lines can simply be counted.
const WHOLE_FILE: usize = 1 << 40;

/// Bytes that are written as text where they are text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Piece {
    Text(String),
    Hex { hex: String },
}

impl Piece {
    fn new(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::Text(text.to_owned()),
            Err(_) => Self::Hex { hex: hex::encode(bytes) },
        }
    }

    fn bytes(&self) -> Option<Vec<u8>> {
        match self {
            Self::Text(text) => Some(text.clone().into_bytes()),
            Self::Hex { hex } => hex::decode(hex).ok(),
        }
    }
}

/// Bytes that stand where others stood.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Splice {
    /// Offset in the original, in bytes.
    at: usize,
    /// How many bytes of the original go.
    removed: usize,
    /// What takes their place.
    inserted: Piece,
}

/// What makes `after` of `before`, in order.
pub(super) fn between(before: &[u8], after: &[u8]) -> Vec<Splice> {
    let mut options = DiffOptions::new();
    let patch = options.set_context_len(WHOLE_FILE).create_patch_bytes(before, after);
    let mut splices: Vec<(usize, usize, Vec<u8>)> = Vec::new();
    let mut at = 0;
    // The splice that the lines so far belong to, until a line that is in both ends it.
    let mut open: Option<(usize, usize, Vec<u8>)> = None;
    for line in patch.hunks().iter().flat_map(Hunk::lines) {
        match line {
            Line::Context(text) => {
                splices.extend(open.take());
                at += text.len();
            }
            Line::Delete(text) => {
                open.get_or_insert_with(|| (at, 0, Vec::new())).1 += text.len();
                at += text.len();
            }
            Line::Insert(text) => {
                open.get_or_insert_with(|| (at, 0, Vec::new())).2.extend_from_slice(text);
            }
        }
    }
    splices.extend(open);
    let splices: Vec<Splice> = splices
        .into_iter()
        .map(|(at, removed, inserted)| Splice { at, removed, inserted: Piece::new(&inserted) })
        .collect();
    if apply(before, &splices).as_deref() == Some(after) {
        return splices;
    }
    // Whatever a line-wise difference cannot say is said with one splice.
    vec![Splice { at: 0, removed: before.len(), inserted: Piece::new(after) }]
}

/// The patched bytes; nothing if the splices do not fit to this original.
pub(super) fn apply(before: &[u8], splices: &[Splice]) -> Option<Vec<u8>> {
    let mut after = Vec::with_capacity(before.len());
    let mut at = 0;
    for splice in splices {
        after.extend_from_slice(before.get(at..splice.at)?);
        after.extend_from_slice(&splice.inserted.bytes()?);
        at = splice.at.checked_add(splice.removed)?;
    }
    after.extend_from_slice(before.get(at..)?);
    Some(after)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const LINES: [&[u8]; 4] = [b"a\n", b"b\r\n", b"\xff\xfe\n", b"end"];

    #[test]
    fn an_inserted_line_is_one_small_piece() {
        let splices = between(b"a\nb\nc\n", b"a\nb\nnew\nc\n");
        assert_eq!(splices, [Splice { at: 4, removed: 0, inserted: Piece::Text("new\n".into()) }]);
    }

    #[test]
    fn splices_of_another_file_do_not_fit() {
        let splices = between(b"a\nb\nc\n", b"a\nb\nc\nd\n");
        assert_eq!(apply(b"a", &splices), None);
    }

    proptest! {
        #[test]
        fn any_two_files_are_joined_by_their_splices(
            before in vec(0..LINES.len(), 0..30),
            after in vec(0..LINES.len(), 0..30),
        ) {
            let text = |lines: &[usize]| lines.iter().flat_map(|line| LINES[*line]).copied().collect::<Vec<u8>>();
            let (before, after) = (text(&before), text(&after));
            let splices = between(&before, &after);
            let json = serde_json::to_string(&splices).unwrap();
            let splices: Vec<Splice> = serde_json::from_str(&json).unwrap();
            prop_assert_eq!(apply(&before, &splices), Some(after));
        }
    }
}
