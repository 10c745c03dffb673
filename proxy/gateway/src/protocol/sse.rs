//! Passes an event stream on in whole events. If a backend dies within an event, the client has no part of
//! that event, so every client can read an error event after it.
//!
//! ```text
//!   piece --> [ ends with an event? ] --yes--> passed on as it is (the usual case: no copy)
//!                    | no
//!                    v
//!             whole events are passed on, the rest is held --- next piece ---> joined
//!                    | more than the limit held
//!                    v
//!             passed on in pieces until the next end of an event
//! ```
//!
//! Holding the beginning of an event delays no client, which needs the whole event.

use bytes::{Bytes, BytesMut};

#[derive(Debug)]
pub(crate) struct EventSplitter {
    held: BytesMut,
    limit: usize,
    torn: bool,
    seen: u64,
    /// Number of complete events and comments so far.
    ends: u64,
}

impl EventSplitter {
    /// Holds at most `limit` bytes of an incomplete event, plus one piece.
    pub(crate) fn new(limit: usize) -> Self {
        Self { held: BytesMut::new(), limit, torn: false, seen: 0, ends: 0 }
    }

    /// Takes a piece of the stream and returns the bytes to pass on now.
    pub(crate) fn push(&mut self, piece: Bytes) -> Bytes {
        if self.held.is_empty() {
            let Some(end) = last_blank_line_end(&piece, 0) else {
                self.held.extend_from_slice(&piece);
                return self.overflow();
            };
            self.torn = false;
            self.count(&piece[..end]);
            if end == piece.len() {
                return piece;
            }
            self.held.extend_from_slice(&piece[end..]);
            return piece.slice(..end);
        }
        // The blank line may begin in the held bytes and end in this piece.
        let from = self.held.len().saturating_sub(3);
        self.held.extend_from_slice(&piece);
        match last_blank_line_end(&self.held, from) {
            Some(end) => {
                self.torn = false;
                let whole = self.held.split_to(end).freeze();
                self.count(&whole);
                whole
            }
            None => self.overflow(),
        }
    }

    /// Returns the held bytes of a stream that ended properly, even without a blank line.
    pub(crate) fn finish(&mut self) -> Bytes {
        self.held.split().freeze()
    }

    /// Drops the held bytes. Returns a blank line if a part of a large event was passed on.
    pub(crate) fn drop_held(&mut self) -> &'static str {
        self.held.clear();
        if self.torn { "\n\n" } else { "" }
    }

    /// Returns whether a part of an event that is too large was passed on.
    pub(crate) fn is_torn(&self) -> bool {
        self.torn
    }

    /// Returns the number of complete events with data passed on so far, without comments.
    pub(crate) fn event_count(&self) -> u64 {
        self.seen
    }

    /// Resets the count of events, because the caller drops the last piece.
    pub(crate) fn reset_count(&mut self, seen: u64) {
        self.seen = seen;
    }

    /// Returns whether any event or comment was passed on.
    pub(crate) fn has_passed_any(&self) -> bool {
        self.ends > 0
    }

    fn count(&mut self, whole: &[u8]) {
        let mut from = 0;
        for end in blank_line_ends(whole) {
            self.ends += 1;
            self.seen += u64::from(has_data(&whole[from..=end]));
            from = end + 1;
        }
    }

    fn overflow(&mut self) -> Bytes {
        if self.held.len() <= self.limit {
            return Bytes::new();
        }
        // The last bytes may be the beginning of a blank line.
        self.torn = true;
        let pass = self.held.len().saturating_sub(3);
        self.held.split_to(pass).freeze()
    }
}

/// Returns the offset after the last blank line beyond `from`. Lines end with `\n`, `\r\n` or `\r`.
fn last_blank_line_end(bytes: &[u8], from: usize) -> Option<usize> {
    let mut until = bytes.len();
    while let Some(at) = memchr::memrchr2(b'\n', b'\r', bytes.get(from..until)?) {
        let at = from + at;
        if is_end(bytes, at) {
            return Some(at + 1);
        }
        until = at;
    }
    None
}

fn is_end(bytes: &[u8], at: usize) -> bool {
    let before = &bytes[..=at];
    before.ends_with(b"\n\n") || before.ends_with(b"\r\n\r\n") || before.ends_with(b"\r\r")
}

fn blank_line_ends(bytes: &[u8]) -> impl Iterator<Item = usize> + '_ {
    memchr::memchr2_iter(b'\n', b'\r', bytes).filter(|at| is_end(bytes, *at))
}

/// Returns whether a block has a line that is neither empty nor a comment.
fn has_data(block: &[u8]) -> bool {
    let is_data = |line: &[u8]| line.first().is_some_and(|first| *first != b':');
    // Nearly always, the first line has data.
    is_data(block) && !block.starts_with(b"\n") && !block.starts_with(b"\r")
        || block.split(|byte| matches!(byte, b'\n' | b'\r')).any(is_data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pass(events: &mut EventSplitter, piece: &str) -> String {
        String::from_utf8(events.push(Bytes::copy_from_slice(piece.as_bytes())).to_vec()).unwrap()
    }

    #[test]
    fn whole_events_pass_untouched_and_halves_wait() {
        let mut events = EventSplitter::new(1000);
        let piece = Bytes::from_static(b"data: 1\n\ndata: 2\n\n");
        assert_eq!(events.push(piece.clone()).as_ptr(), piece.as_ptr(), "no copy");
        assert_eq!(pass(&mut events, "data: 3\n\ndata: 4"), "data: 3\n\n");
        assert_eq!(pass(&mut events, "4\n"), "");
        assert_eq!(pass(&mut events, "\n: ping\n"), "data: 44\n\n");
        assert_eq!(pass(&mut events, "\n"), ": ping\n\n");
        assert_eq!((events.event_count(), events.ends), (4, 5), "a comment is no event");
        assert_eq!(events.finish(), "");
    }

    #[test]
    fn the_half_of_an_event_is_dropped_when_the_stream_is_cut() {
        let mut events = EventSplitter::new(1000);
        assert_eq!(pass(&mut events, "data: 1\r\n\r\ndata: {\"ha"), "data: 1\r\n\r\n");
        assert_eq!(events.drop_held(), "");
        assert_eq!(events.finish(), "");
    }

    #[test]
    fn an_event_beyond_the_limit_passes_in_pieces_and_is_ended_before_another() {
        let mut events = EventSplitter::new(10);
        assert_eq!(pass(&mut events, "data: 0123456789\n"), "data: 01234567");
        assert_eq!(pass(&mut events, "\n"), "89\n\n");
        assert_eq!(events.drop_held(), "");
        assert_eq!(pass(&mut events, "data: 0123456789"), "data: 0123456");
        assert_eq!(events.drop_held(), "\n\n");
        assert_eq!(pass(&mut events, "x\n\n"), "x\n\n");
        assert_eq!(events.drop_held(), "");
        let mut slow = EventSplitter::new(10);
        let mut out = String::new();
        for _ in 0..20 {
            out += &pass(&mut slow, "abc");
            assert!(slow.held.len() <= 10);
        }
        assert_eq!(slow.drop_held(), "\n\n");
        assert!("abc".repeat(20).starts_with(&out) && out.len() >= 50, "{out}");
    }

    proptest! {
        #[test]
        fn every_byte_passes_once_in_order_however_it_is_split(
            parts in proptest::collection::vec("(data: [a-z]{0,5}|:|\n|\r\n|\r|\n\n|\r\n\r\n){0,8}", 0..8),
            limit in 4usize..40,
        ) {
            let mut events = EventSplitter::new(limit);
            let mut out = Vec::new();
            for part in &parts {
                let passed = events.push(Bytes::copy_from_slice(part.as_bytes()));
                out.extend_from_slice(&passed);
                prop_assert!(events.held.len() <= limit.max(part.len()));
            }
            out.extend_from_slice(&events.finish());
            prop_assert_eq!(out, parts.concat().into_bytes());
        }

        #[test]
        fn below_the_limit_only_whole_events_pass(text in "[ab\n\r]{0,60}", cut in 0usize..60) {
            let cut = cut.min(text.len());
            let mut events = EventSplitter::new(1000);
            for part in [&text[..cut], &text[cut..]] {
                let passed = events.push(Bytes::copy_from_slice(part.as_bytes()));
                prop_assert!(passed.is_empty() || is_end(&passed, passed.len() - 1), "{:?}", passed);
            }
            prop_assert_eq!(events.drop_held(), "");
        }
    }
}
