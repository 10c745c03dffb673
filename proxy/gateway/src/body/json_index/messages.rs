//! Reads a wanted list of the body, such as `messages`: counts its elements, records system messages.
//!
//! ```text
//!   depth 2   elements of the list      counted
//!   depth 3   fields of a message       key -> colon -> value -> after; the last role and content are used
//!   depth 4   parts of a content        only checked for existence
//! ```

use super::{ContentKind, JsonList, JsonPlace, JsonSlot, MAX_OCCURRENCES, SystemMessage};
use crate::body::StringSpelling;
use crate::refusal::UnreadableBody;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageField {
    Role,
    Content,
    Other,
}

#[derive(Debug)]
struct ListElement {
    start: u64,
    slot: JsonSlot,
    field: MessageField,
    is_system: bool,
    content: Option<(u64, ContentKind)>,
}

/// State of a list being read. The depth of a method is the depth of the token: 2 for an element.
#[derive(Debug, Default)]
pub(super) struct MessageListReader {
    list: JsonList,
    comma: Option<u64>,
    element: Option<ListElement>,
}

impl MessageListReader {
    pub(super) fn finish(self) -> JsonList {
        self.list
    }

    pub(super) fn opens(&mut self, depth: u32, here: u64, byte: u8) {
        match depth {
            2 => {
                self.list.count += 1;
                self.element = (byte == b'{').then_some(ListElement {
                    start: here,
                    slot: JsonSlot::Key,
                    field: MessageField::Other,
                    is_system: false,
                    content: None,
                });
            }
            3 => {
                let content =
                    if byte == b'[' { ContentKind::List { is_empty: true } } else { ContentKind::Other };
                self.field(here, content, false);
            }
            _ => self.part(depth),
        }
    }

    /// Handles the end of an object or a list; `end` is the offset after it.
    pub(super) fn end_element(&mut self, end: u64) -> Result<(), UnreadableBody> {
        let Some(element) = self.element.as_ref().filter(|element| element.is_system) else { return Ok(()) };
        if self.list.system.len() >= MAX_OCCURRENCES {
            return Err(UnreadableBody::Repeats);
        }
        self.list.system.push(SystemMessage {
            place: JsonPlace {
                index: self.list.count - 1,
                range: element.start..end,
                comma_before: self.comma,
                comma_after: None,
            },
            content: element.content,
        });
        Ok(())
    }

    pub(super) fn colon(&mut self, depth: u32) {
        if depth == 3
            && let Some(element) = &mut self.element
            && element.slot == JsonSlot::Colon
        {
            element.slot = JsonSlot::Value;
        }
    }

    pub(super) fn comma(&mut self, depth: u32, here: u64) {
        if depth == 2 {
            self.comma = Some(here);
            let index = self.list.count.saturating_sub(1);
            if let Some(last) = self.list.system.last_mut().filter(|last| last.place.index == index) {
                last.place.comma_after = Some(here);
            }
            self.element = None;
        } else if depth == 3
            && let Some(element) = &mut self.element
        {
            element.slot = JsonSlot::Key;
        }
    }

    /// Handles a string, still escaped as in the body.
    pub(super) fn text(&mut self, depth: u32, start: u64, raw: &StringSpelling) {
        match depth {
            2 => self.list.count += 1,
            3 => match &mut self.element {
                Some(element) if element.slot == JsonSlot::Key => {
                    element.field = match () {
                        () if raw.spells("role") => MessageField::Role,
                        () if raw.spells("content") => MessageField::Content,
                        () => MessageField::Other,
                    };
                    element.slot = JsonSlot::Colon;
                }
                _ => {
                    let is_system = raw.spells("system") || raw.spells("developer");
                    self.field(start, ContentKind::Text, is_system);
                }
            },
            _ => self.part(depth),
        }
    }

    pub(super) fn word(&mut self, depth: u32, start: u64) {
        match depth {
            2 => self.list.count += 1,
            3 => self.field(start, ContentKind::Other, false),
            _ => self.part(depth),
        }
    }

    /// Handles the beginning of a field's value in a message.
    fn field(&mut self, here: u64, content: ContentKind, is_system: bool) {
        if let Some(element) = &mut self.element
            && element.slot == JsonSlot::Value
        {
            match element.field {
                MessageField::Role => element.is_system = is_system,
                MessageField::Content => element.content = Some((here, content)),
                MessageField::Other => {}
            }
            element.slot = JsonSlot::After;
        }
    }

    /// Handles an element of a message's content.
    fn part(&mut self, depth: u32) {
        if depth == 4
            && let Some(element) = &mut self.element
            && element.field == MessageField::Content
            && let Some((_, ContentKind::List { is_empty })) = &mut element.content
        {
            *is_empty = false;
        }
    }
}
