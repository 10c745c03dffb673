//! Reads the pieces of a body once and builds its index. Copies at most a short word at a time.
//!
//! ```text
//!   depth 1   members of the object: key -> colon -> value -> after; wanted ones recorded at their comma
//!   deeper    only in a wanted list, by `messages`
//! ```

use super::messages::MessageListReader;
use super::{JsonIndex, JsonKind, JsonMember, JsonPlace, JsonSlot, MAX_OCCURRENCES};
use crate::body::StringSpelling;
use crate::refusal::UnreadableBody;

/// Maximum raw length of a compared word: `developer` with every letter escaped takes 54 bytes.
const MAX_SPELLING_BYTES: usize = 72;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
enum WalkState {
    #[default]
    Between,
    Text,
    Word,
    Ended,
}

#[derive(Default)]
pub(super) struct JsonWalk<'w> {
    wanted: &'w [&'w str],
    lex: WalkState,
    /// Length of all pieces before the current one.
    before: u64,
    depth: u32,
    start: u64,
    raw: StringSpelling,
    raw_limit: usize,
    member: MemberWalk,
    index: JsonIndex,
    is_object: Option<bool>,
    closed: bool,
    fault: Option<UnreadableBody>,
}

#[derive(Default)]
struct MemberWalk {
    slot: JsonSlot,
    comma: Option<u64>,
    key: Option<(usize, u64)>,
    value: u64,
    /// Member whose value has ended, kept until the next comma is found.
    pending: Option<JsonMember>,
    list: Option<MessageListReader>,
}

impl<'w> JsonWalk<'w> {
    pub(super) fn new(wanted: &'w [&'w str]) -> Self {
        let longest = wanted.iter().map(|name| name.len() * 6).max().unwrap_or(0);
        Self { wanted, raw_limit: longest.max(MAX_SPELLING_BYTES), ..Self::default() }
    }

    pub(super) fn finish(self) -> Result<JsonIndex, UnreadableBody> {
        match self.fault {
            Some(fault) => Err(fault),
            None if self.closed => Ok(self.index),
            None => Err(UnreadableBody::NotObject),
        }
    }

    pub(super) fn feed(&mut self, piece: &[u8]) {
        let mut at = 0;
        while at < piece.len() && self.fault.is_none() {
            at = match self.lex {
                WalkState::Between => self.between(piece, at),
                WalkState::Text => {
                    let (at, ended) = self.raw.read(piece, at);
                    if ended {
                        self.lex = WalkState::Between;
                        self.text_ends(self.before + at as u64);
                    }
                    at
                }
                WalkState::Word => self.word(piece, at),
                WalkState::Ended => piece.len(),
            };
        }
        self.before += piece.len() as u64;
    }

    fn begin(&mut self, at: usize, lex: WalkState) {
        self.start = self.before + at as u64;
        self.raw.begin(self.raw_limit);
        self.lex = lex;
    }

    fn word(&mut self, piece: &[u8], at: usize) -> usize {
        let rest = &piece[at..];
        let ends = |byte: &u8| {
            matches!(byte, b' ' | b'\t' | b'\r' | b'\n' | b',' | b']' | b'}' | b':' | b'"' | b'[' | b'{')
        };
        let end = rest.iter().position(ends).unwrap_or(rest.len());
        self.raw.append(&rest[..end]);
        if end < rest.len() {
            self.lex = WalkState::Between;
            self.end_word(self.before + (at + end) as u64);
        }
        at + end
    }

    fn between(&mut self, piece: &[u8], at: usize) -> usize {
        let byte = piece[at];
        if matches!(byte, b' ' | b'\t' | b'\r' | b'\n') {
            return at + 1;
        }
        let here = self.before + at as u64;
        if self.is_object.is_none() {
            // llama-server's parser skips a byte order mark, too.
            if matches!((here, byte), (0, 0xEF) | (1, 0xBB) | (2, 0xBF)) {
                return at + 1;
            }
            self.is_object = Some(byte == b'{');
            self.index.open = here;
            self.depth = 1;
            if byte != b'{' {
                self.fault = Some(UnreadableBody::NotObject);
            }
            return at + 1;
        }
        if self.closed {
            if byte == 0 {
                // For llama-server's parser, a zero byte ends the input.
                self.lex = WalkState::Ended;
            } else {
                self.fault = Some(UnreadableBody::NotObject);
            }
            return at + 1;
        }
        match byte {
            b'"' => self.begin(at + 1, WalkState::Text),
            b'{' | b'[' => self.opens(here, byte),
            b'}' | b']' => self.closes(here),
            b':' => self.colon(),
            b',' => self.comma(here),
            _ => {
                self.begin(at, WalkState::Word);
                return at;
            }
        }
        at + 1
    }

    fn opens(&mut self, here: u64, byte: u8) {
        if self.depth == 1 {
            if self.member.slot == JsonSlot::Value {
                self.member.value = here;
                self.member.list =
                    (byte == b'[' && self.member.key.is_some()).then(MessageListReader::default);
            }
        } else if let Some(list) = &mut self.member.list {
            list.opens(self.depth, here, byte);
        }
        self.depth += 1;
    }

    fn closes(&mut self, here: u64) {
        self.depth -= 1;
        match self.depth {
            0 => {
                self.closed = true;
                self.index.close = here;
                self.end_member(None);
            }
            1 if self.member.slot == JsonSlot::Value => {
                let kind =
                    self.member.list.take().map_or(JsonKind::Object, |list| JsonKind::List(list.finish()));
                self.end_value(here + 1, kind);
            }
            2 => {
                if let Some(Err(fault)) = self.member.list.as_mut().map(|list| list.end_element(here + 1)) {
                    self.fault = Some(fault);
                }
            }
            _ => {}
        }
    }

    fn colon(&mut self) {
        if self.depth > 1 {
            if let Some(list) = &mut self.member.list {
                list.colon(self.depth);
            }
        } else if self.member.slot == JsonSlot::Colon {
            self.member.slot = JsonSlot::Value;
        }
    }

    fn comma(&mut self, here: u64) {
        if self.depth > 1 {
            if let Some(list) = &mut self.member.list {
                list.comma(self.depth, here);
            }
            return;
        }
        self.end_member(Some(here));
        self.member.comma = Some(here);
        self.member.slot = JsonSlot::Key;
    }

    fn text_ends(&mut self, end: u64) {
        let start = self.start - 1;
        if self.depth > 1 {
            if let Some(list) = &mut self.member.list {
                list.text(self.depth, start, &self.raw);
            }
            return;
        }
        match self.member.slot {
            JsonSlot::Key => {
                self.member.slot = JsonSlot::Colon;
                self.index.count += 1;
                let found = self.wanted.iter().position(|wanted| self.raw.spells(wanted));
                self.member.key = found.map(|name| (name, start));
            }
            JsonSlot::Value => {
                self.member.value = start;
                self.end_value(end, JsonKind::Text);
            }
            JsonSlot::Colon | JsonSlot::After => {}
        }
    }

    fn end_word(&mut self, end: u64) {
        if self.depth > 1 {
            if let Some(list) = &mut self.member.list {
                list.word(self.depth, self.start);
            }
        } else if self.member.slot == JsonSlot::Value {
            self.member.value = self.start;
            let word = String::from_utf8_lossy(self.raw.raw().unwrap_or_default()).into_owned();
            self.end_value(end, JsonKind::Word(word));
        }
    }

    fn end_value(&mut self, end: u64, kind: JsonKind) {
        self.member.slot = JsonSlot::After;
        let Some((name, start)) = self.member.key.take() else { return };
        self.member.pending = Some(JsonMember {
            name,
            place: JsonPlace {
                index: self.index.count - 1,
                range: start..end,
                comma_before: self.member.comma,
                comma_after: None,
            },
            value: self.member.value..end,
            kind,
        });
    }

    fn end_member(&mut self, comma: Option<u64>) {
        let Some(mut member) = self.member.pending.take() else { return };
        if self.index.members.len() >= MAX_OCCURRENCES {
            self.fault = Some(UnreadableBody::Repeats);
            return;
        }
        member.place.comma_after = comma;
        self.index.members.push(member);
    }
}
