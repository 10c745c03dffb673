//! Where the wanted members of a JSON body's outermost object are, every time they occur, and the system's messages in
//! lists of messages. Reads pieces of any size and copies no more than short words.
//!
//! llama-server's parser keeps the last of several members with one name, in every object. The index therefore has every
//! occurrence, and of a message it says what its last occurrences say.
//!
//! It does not judge syntax beyond what it needs. A body that llama-server's parser takes is read as that parser reads it;
//! one that it does not take is refused there, or here as [`Unreadable`].

mod messages;
mod walk;

use std::ops::Range;

use bytes::Bytes;

use self::walk::Walk;
use crate::refusal::Unreadable;

/// A client repeats no member this often, and a conversation has fewer system messages.
const MOST: usize = 64;

/// A member or an element, with the commas around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Its number in its object or list, from 0.
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

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct List {
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
pub(crate) struct JsonIndex {
    /// Members in all.
    pub(crate) count: u32,
    /// The wanted ones, in order.
    pub(crate) members: Vec<Member>,
    /// Where the opening brace is.
    pub(crate) open: u64,
    /// Where the closing brace is.
    pub(crate) close: u64,
}

impl JsonIndex {
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

    pub(crate) fn named(&self, name: usize) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(move |member| member.name == name)
    }
}

/// What comes next in an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Key,
    Colon,
    Value,
    After,
}
