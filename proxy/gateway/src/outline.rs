//! Where the wanted members of a JSON body's outermost object are, every time they occur, and the system's messages in
//! lists of messages. Reads pieces of any size and copies no more than short words.
//!
//! llama-server's parser keeps the last of several members with one name, in every object. The outline therefore has every
//! occurrence, and of a message it says what its last occurrences say.
//!
//! It does not judge syntax beyond what it needs. A body that llama-server's parser takes is read as that parser reads it;
//! one that it does not take is refused there, or here as [`Unreadable`].

use std::ops::Range;

use bytes::Bytes;
use memchr::memchr2;

/// A client repeats no member this often, and a conversation has fewer system messages.
const MOST: usize = 64;
/// Longest raw spelling of a word that is compared: `developer` with every letter escaped takes 54 bytes.
const SPELLING: usize = 72;

/// Why a body cannot be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// It is no JSON object.
    NotObject,
    /// It repeats what should stand once, many times.
    Repeats,
}

/// A member or an element, with the commas around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The how manieth of its object or list.
    pub(crate) index: u32,
    /// From its first byte (of a member: of its key) to behind its last.
    pub(crate) range: Range<u64>,
    pub(crate) comma_before: Option<u64>,
    pub(crate) comma_after: Option<u64>,
}

/// A wanted member of the outermost object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Which of the wanted names.
    pub(crate) name: usize,
    pub(crate) place: Place,
    pub(crate) value: Range<u64>,
    pub(crate) kind: Kind,
}

/// What a value is, as far as rules ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    /// A number, `true`, `false` or `null`, as it is spelled; empty if it is longer than any sane one.
    Word(String),
    List(List),
    Object,
}

/// A list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct List {
    /// Elements.
    pub(crate) count: u32,
    /// Those that are messages of role `system` or `developer`.
    pub(crate) system: Vec<Message>,
}

/// A message of the system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) place: Place,
    /// Where its last `content` begins, and what that is.
    pub(crate) content: Option<(u64, Content)>,
}

/// What a content is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Text,
    List { is_empty: bool },
    Other,
}

/// What was found in a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outline {
    /// Members in all.
    pub(crate) count: u32,
    /// The wanted ones, in order.
    pub(crate) members: Vec<Member>,
    /// Where the closing brace is.
    pub(crate) close: u64,
}

impl Outline {
    /// Walks through a body.
    pub(crate) fn of<'a>(
        pieces: impl IntoIterator<Item = &'a Bytes>,
        wanted: &[&str],
    ) -> Result<Self, Unreadable> {
        let mut walk = Walk::new(wanted);
        for piece in pieces {
            walk.feed(piece);
        }
        walk.finish()
    }

    /// All members of one name.
    pub(crate) fn named(&self, name: usize) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(move |member| member.name == name)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lex {
    Between,
    Text {
        escaped: bool,
    },
    Word,
    /// Behind the end.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Key,
    Colon,
    Value,
    After,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Role,
    Content,
    Other,
}

/// An element of a list of messages.
#[derive(Debug)]
struct Element {
    start: u64,
    slot: Slot,
    field: Field,
    is_system: bool,
    content: Option<(u64, Content)>,
}

struct Walk<'w> {
    wanted: &'w [&'w str],
    lex: Lex,
    /// Bytes of all pieces before this one.
    before: u64,
    depth: u32,
    /// Of the token that is being read.
    start: u64,
    raw: Vec<u8>,
    raw_limit: usize,
    raw_over: bool,
    slot: Slot,
    comma: Option<u64>,
    key: Option<(usize, u64)>,
    /// The member whose value has ended, until its comma is known.
    pending: Option<Member>,
    value: u64,
    list: Option<(List, Option<u64>)>,
    element: Option<Element>,
    outline: Outline,
    is_object: Option<bool>,
    closed: bool,
    fault: Option<Unreadable>,
}

impl<'w> Walk<'w> {
    fn new(wanted: &'w [&'w str]) -> Self {
        let longest = wanted.iter().map(|name| name.len() * 6).max().unwrap_or(0);
        Self {
            wanted,
            lex: Lex::Between,
            before: 0,
            depth: 0,
            start: 0,
            raw: Vec::new(),
            raw_limit: longest.max(SPELLING),
            raw_over: false,
            slot: Slot::Key,
            comma: None,
            key: None,
            pending: None,
            value: 0,
            list: None,
            element: None,
            outline: Outline::default(),
            is_object: None,
            closed: false,
            fault: None,
        }
    }

    fn finish(self) -> Result<Outline, Unreadable> {
        match self.fault {
            Some(fault) => Err(fault),
            None if self.closed => Ok(self.outline),
            None => Err(Unreadable::NotObject),
        }
    }

    fn feed(&mut self, piece: &[u8]) {
        let mut at = 0;
        while at < piece.len() && self.fault.is_none() {
            at = match self.lex {
                Lex::Between => self.between(piece, at),
                Lex::Text { escaped } => self.text(piece, at, escaped),
                Lex::Word => self.word(piece, at),
                Lex::Over => piece.len(),
            };
        }
        self.before += piece.len() as u64;
    }

    fn keep(&mut self, bytes: &[u8]) {
        let kept = bytes.len().min(self.raw_limit.saturating_sub(self.raw.len()));
        self.raw.extend_from_slice(&bytes[..kept]);
        self.raw_over |= kept < bytes.len();
    }

    fn begin(&mut self, at: usize, lex: Lex) {
        self.start = self.before + at as u64;
        self.raw.clear();
        self.raw_over = false;
        self.lex = lex;
    }

    fn text(&mut self, piece: &[u8], at: usize, escaped: bool) -> usize {
        if escaped {
            self.keep(&piece[at..=at]);
            self.lex = Lex::Text { escaped: false };
            return at + 1;
        }
        let rest = &piece[at..];
        match memchr2(b'"', b'\\', rest) {
            None => {
                self.keep(rest);
                piece.len()
            }
            Some(n) if rest[n] == b'\\' => {
                self.keep(&rest[..=n]);
                self.lex = Lex::Text { escaped: true };
                at + n + 1
            }
            Some(n) => {
                self.keep(&rest[..n]);
                self.lex = Lex::Between;
                self.text_ends(self.before + (at + n) as u64 + 1);
                at + n + 1
            }
        }
    }

    fn word(&mut self, piece: &[u8], at: usize) -> usize {
        let rest = &piece[at..];
        let ends = |byte: &u8| {
            matches!(byte, b' ' | b'\t' | b'\r' | b'\n' | b',' | b']' | b'}' | b':' | b'"' | b'[' | b'{')
        };
        let end = rest.iter().position(ends).unwrap_or(rest.len());
        self.keep(&rest[..end]);
        if end < rest.len() {
            self.lex = Lex::Between;
            self.word_ends(self.before + (at + end) as u64);
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
            // A byte order mark, as llama-server's parser skips it.
            if matches!((here, byte), (0, 0xEF) | (1, 0xBB) | (2, 0xBF)) {
                return at + 1;
            }
            self.is_object = Some(byte == b'{');
            self.depth = 1;
            if byte != b'{' {
                self.fault = Some(Unreadable::NotObject);
            }
            return at + 1;
        }
        if self.closed {
            if byte == 0 {
                // llama-server's parser takes it for the end.
                self.lex = Lex::Over;
            } else {
                self.fault = Some(Unreadable::NotObject);
            }
            return at + 1;
        }
        match byte {
            b'"' => self.begin(at + 1, Lex::Text { escaped: false }),
            b'{' | b'[' => self.opens(here, byte),
            b'}' | b']' => self.closes(here),
            b':' => self.colon(),
            b',' => self.comma(here),
            _ => {
                self.begin(at, Lex::Word);
                return at;
            }
        }
        at + 1
    }

    fn opens(&mut self, here: u64, byte: u8) {
        match self.depth {
            1 if self.slot == Slot::Value => {
                self.value = here;
                if byte == b'[' && self.key.is_some() {
                    self.list = Some((List::default(), None));
                }
            }
            2 => {
                if let Some((list, _)) = &mut self.list {
                    list.count += 1;
                    self.element = (byte == b'{').then_some(Element {
                        start: here,
                        slot: Slot::Key,
                        field: Field::Other,
                        is_system: false,
                        content: None,
                    });
                }
            }
            3 => {
                let content = if byte == b'[' { Content::List { is_empty: true } } else { Content::Other };
                self.field(here, content, false);
            }
            _ => self.in_content(),
        }
        self.depth += 1;
    }

    /// Something stands in what may be the list of a message's parts.
    fn in_content(&mut self) {
        if self.depth == 4
            && let Some(element) = &mut self.element
            && element.field == Field::Content
            && let Some((_, Content::List { is_empty })) = &mut element.content
        {
            *is_empty = false;
        }
    }

    /// The value of a message's field begins.
    fn field(&mut self, here: u64, content: Content, is_system: bool) {
        if let Some(element) = &mut self.element
            && element.slot == Slot::Value
        {
            match element.field {
                Field::Role => element.is_system = is_system,
                Field::Content => element.content = Some((here, content)),
                Field::Other => {}
            }
            element.slot = Slot::After;
        }
    }

    fn closes(&mut self, here: u64) {
        self.depth -= 1;
        match self.depth {
            0 => {
                self.closed = true;
                self.outline.close = here;
                self.member_ends(None);
            }
            1 if self.slot == Slot::Value => {
                let kind = self.list.take().map_or(Kind::Object, |(list, _)| Kind::List(list));
                self.value_ends(here + 1, kind);
            }
            2 => self.element_ends(here + 1),
            _ => {}
        }
    }

    fn element_ends(&mut self, end: u64) {
        let (Some(element), Some((list, comma))) = (&self.element, &mut self.list) else { return };
        if !element.is_system {
            return;
        }
        if list.system.len() >= MOST {
            self.fault = Some(Unreadable::Repeats);
            return;
        }
        list.system.push(Message {
            place: Place {
                index: list.count - 1,
                range: element.start..end,
                comma_before: *comma,
                comma_after: None,
            },
            content: element.content,
        });
    }

    fn colon(&mut self) {
        match self.depth {
            1 if self.slot == Slot::Colon => self.slot = Slot::Value,
            3 => {
                if let Some(element) = &mut self.element
                    && element.slot == Slot::Colon
                {
                    element.slot = Slot::Value;
                }
            }
            _ => {}
        }
    }

    fn comma(&mut self, here: u64) {
        match self.depth {
            1 => {
                self.member_ends(Some(here));
                self.comma = Some(here);
                self.slot = Slot::Key;
            }
            2 => {
                if let Some((list, comma)) = &mut self.list {
                    *comma = Some(here);
                    let index = list.count.saturating_sub(1);
                    if let Some(last) = list.system.last_mut()
                        && last.place.index == index
                    {
                        last.place.comma_after = Some(here);
                    }
                }
                self.element = None;
            }
            3 => {
                if let Some(element) = &mut self.element {
                    element.slot = Slot::Key;
                }
            }
            _ => {}
        }
    }

    fn text_ends(&mut self, end: u64) {
        let start = self.start - 1;
        match self.depth {
            1 => match self.slot {
                Slot::Key => {
                    self.slot = Slot::Colon;
                    self.outline.count += 1;
                    let name = self.spelled();
                    let found = name.and_then(|name| self.wanted.iter().position(|wanted| *wanted == name));
                    self.key = found.map(|name| (name, start));
                }
                Slot::Value => {
                    self.value = start;
                    self.value_ends(end, Kind::Text);
                }
                Slot::Colon | Slot::After => {}
            },
            2 => self.plain_element(),
            3 => {
                let slot = self.element.as_ref().map(|element| element.slot);
                if slot == Some(Slot::Value) {
                    let is_system = matches!(self.spelled().as_deref(), Some("system" | "developer"));
                    self.field(start, Content::Text, is_system);
                } else if slot == Some(Slot::Key) {
                    let field = match self.spelled().as_deref() {
                        Some("role") => Field::Role,
                        Some("content") => Field::Content,
                        _ => Field::Other,
                    };
                    if let Some(element) = &mut self.element {
                        element.field = field;
                        element.slot = Slot::Colon;
                    }
                }
            }
            _ => self.in_content(),
        }
    }

    fn word_ends(&mut self, end: u64) {
        match self.depth {
            1 if self.slot == Slot::Value => {
                self.value = self.start;
                let word = if self.raw_over {
                    String::new()
                } else {
                    String::from_utf8_lossy(&self.raw).into_owned()
                };
                self.value_ends(end, Kind::Word(word));
            }
            2 => self.plain_element(),
            3 => self.field(self.start, Content::Other, false),
            _ => self.in_content(),
        }
    }

    /// An element of a list that is no message.
    fn plain_element(&mut self) {
        if let Some((list, _)) = &mut self.list {
            list.count += 1;
        }
    }

    fn value_ends(&mut self, end: u64, kind: Kind) {
        self.slot = Slot::After;
        self.element = None;
        let Some((name, start)) = self.key.take() else { return };
        self.pending = Some(Member {
            name,
            place: Place {
                index: self.outline.count - 1,
                range: start..end,
                comma_before: self.comma,
                comma_after: None,
            },
            value: self.value..end,
            kind,
        });
    }

    fn member_ends(&mut self, comma: Option<u64>) {
        let Some(mut member) = self.pending.take() else { return };
        if self.outline.members.len() >= MOST {
            self.fault = Some(Unreadable::Repeats);
            return;
        }
        member.place.comma_after = comma;
        self.outline.members.push(member);
    }

    /// The string just read, unescaped; `None` if it is longer than any that is looked for.
    fn spelled(&self) -> Option<String> {
        if self.raw_over {
            return None;
        }
        if !self.raw.contains(&b'\\') {
            return std::str::from_utf8(&self.raw).ok().map(str::to_owned);
        }
        let quoted = [b"\"", self.raw.as_slice(), b"\""].concat();
        serde_json::from_slice(&quoted).ok()
    }
}
