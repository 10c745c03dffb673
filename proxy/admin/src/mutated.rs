//! For tests of parsers of foreign input: texts with some of their bytes replaced, doubled, dropped, or
//! moved.

use proptest::prelude::*;
use proptest::sample::{Index, select};

/// Bytes with a meaning in some format.
const SPECIAL_BYTES: &[u8] = b"\r\n\t \0:;,#%&=+$'\"\\{}[]<>|!*-~.0\x7f\xc3\xff";

/// Generates one of the texts in `from`, with at most seven changes.
pub(crate) fn mutated(from: &'static [&'static str]) -> impl Strategy<Value = Vec<u8>> {
    let change = (any::<Index>(), 0..6_u8, select(SPECIAL_BYTES), any::<Index>());
    (select(from), proptest::collection::vec(change, 0..8)).prop_map(|(text, changes)| {
        let mut bytes = text.as_bytes().to_vec();
        for (at, how, byte, other) in changes {
            if bytes.is_empty() {
                bytes.push(byte);
            }
            let (at, other) = (at.index(bytes.len()), other.index(bytes.len()));
            let (from, to) = (at.min(other), at.max(other));
            match how {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                2 => drop(bytes.remove(at)),
                3 => bytes.truncate(at),
                4 => drop(bytes.drain(from..to.min(from + 40))),
                _ => bytes.extend_from_within(from..to.min(from + 200)),
            }
        }
        bytes
    })
}

/// [`mutated`] as text, for parsers that take only text.
pub(crate) fn mutated_text(from: &'static [&'static str]) -> impl Strategy<Value = String> {
    mutated(from).prop_map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}
