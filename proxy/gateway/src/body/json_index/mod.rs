//! Index of a JSON body: offsets of wanted members and system messages. Copies only short words.
//!
//! If members of an object have the same name, llama-server's parser uses the last. The index has every
//! occurrence, and describes a message by the last occurrence of each field.
//!
//! Checks syntax only as far as needed. The index is right for every body that llama-server's parser accepts.
//! Any other body is refused by llama-server, or here as [`UnreadableBody`].

mod messages;
mod walk;

use std::ops::Range;

use bytes::Bytes;

use self::walk::JsonWalk;
use crate::refusal::UnreadableBody;

/// Maximum number of wanted members, and of system messages; real requests have far fewer.
const MAX_OCCURRENCES: usize = 64;

/// Offsets of a member or an element, and of the commas around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JsonPlace {
    /// Position in its object or list, from 0.
    pub(crate) index: u32,
    /// Offsets from the first byte (of a member: of its key) to the byte after the last.
    pub(crate) range: Range<u64>,
    pub(crate) comma_before: Option<u64>,
    pub(crate) comma_after: Option<u64>,
}

/// A wanted member of the outermost object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JsonMember {
    /// Index into the wanted names.
    pub(crate) name: usize,
    pub(crate) place: JsonPlace,
    pub(crate) value: Range<u64>,
    pub(crate) kind: JsonKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum JsonKind {
    Text,
    /// A number, `true`, `false` or `null` as spelled; empty if it is unreasonably long.
    Word(String),
    List(JsonList),
    Object,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct JsonList {
    pub(crate) count: u32,
    /// Messages of role `system` or `developer`.
    pub(crate) system: Vec<SystemMessage>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SystemMessage {
    pub(crate) place: JsonPlace,
    /// Offset and kind of the last `content`.
    pub(crate) content: Option<(u64, ContentKind)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContentKind {
    Text,
    List { is_empty: bool },
    Other,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct JsonIndex {
    /// Number of all members of the outermost object.
    pub(crate) count: u32,
    /// The wanted members in the order of the body.
    pub(crate) members: Vec<JsonMember>,
    pub(crate) open: u64,
    pub(crate) close: u64,
}

impl JsonIndex {
    pub(crate) fn from_pieces<'a>(
        pieces: impl IntoIterator<Item = &'a Bytes>,
        wanted: &[&str],
    ) -> Result<Self, UnreadableBody> {
        let mut walk = JsonWalk::new(wanted);
        for piece in pieces {
            walk.feed(piece);
        }
        walk.finish()
    }

    pub(crate) fn named(&self, name: usize) -> impl Iterator<Item = &JsonMember> {
        self.members.iter().filter(move |member| member.name == name)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
enum JsonSlot {
    #[default]
    Key,
    Colon,
    Value,
    After,
}
