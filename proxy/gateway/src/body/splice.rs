//! Edits a JSON body by replacing byte ranges, so that the rest stays as the client wrote it: unknown fields,
//! the form of numbers, order, white space. Never joins the pieces of the body.
//!
//! ```text
//!   pieces --read once--> `json_index`: offsets of the wanted members of the outermost object
//!                            | rules (`rules::plan`)
//!                            v
//!                         edits: range -> new bytes
//!                            | apply
//!                            v
//!                         pieces, old and new
//! ```

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;

use crate::body::JsonPlace;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ByteEdit {
    pub(crate) range: Range<u64>,
    pub(crate) text: String,
}

/// Returns the ranges that cut the elements at `places`, each with a comma, out of `count` elements.
pub(crate) fn removal_ranges(places: &[&JsonPlace], count: u32) -> Vec<Range<u64>> {
    // Elements at the end are cut with the comma before them, all others with the comma after them.
    let mut tail = places.len();
    while tail > 0 && u64::from(places[tail - 1].index) + (places.len() - tail) as u64 + 1 == u64::from(count)
    {
        tail -= 1;
    }
    let front = places[..tail].iter().filter_map(|place| Some(place.range.start..place.comma_after? + 1));
    let mut cut: Vec<Range<u64>> = front.collect();
    if let (Some(first), Some(last)) = (places.get(tail), places.last()) {
        cut.push(first.comma_before.unwrap_or(first.range.start)..last.range.end);
    }
    cut
}

/// Applies edits, which must not overlap.
pub(crate) fn apply_edits(pieces: VecDeque<Bytes>, mut edits: Vec<ByteEdit>) -> VecDeque<Bytes> {
    edits.sort_by_key(|edit| (edit.range.start, edit.range.end));
    let mut edits = edits.into_iter().peekable();
    let mut out = VecDeque::with_capacity(pieces.len() + 2 * edits.len());
    let mut at = 0_u64;
    let mut skip_to = 0_u64;
    for mut piece in pieces {
        while !piece.is_empty() {
            let end = at + piece.len() as u64;
            if at < skip_to {
                let skipped = piece.split_to(piece_offset(skip_to.min(end) - at));
                at += skipped.len() as u64;
                continue;
            }
            if let Some(edit) = edits.next_if(|edit| edit.range.start < end) {
                let kept = piece.split_to(piece_offset(edit.range.start.saturating_sub(at)));
                at += kept.len() as u64;
                if !kept.is_empty() {
                    out.push_back(kept);
                }
                if !edit.text.is_empty() {
                    out.push_back(Bytes::from(edit.text));
                }
                skip_to = edit.range.end;
            } else {
                at = end;
                out.push_back(std::mem::take(&mut piece));
            }
        }
    }
    out
}

/// Converts an offset within one piece, which always fits.
fn piece_offset(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
#[path = "splice_tests.rs"]
mod tests;
