//! Reads a wanted list: counts its elements, and records system messages.
//!
//! ```text
//!   depth 2   elements of the list      counted
//!   depth 3   fields of a message       key -> colon -> value -> after; last role and content count
//!   depth 4   parts of a content        is there one?
//! ```

use super::{Content, List, MOST, Message, Place, Slot};
use crate::body::spelling::Spelling;
use crate::refusal::Unreadable;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Role,
    Content,
    Other,
}

/// An element that may be a message.
#[derive(Debug)]
struct Element {
    start: u64,
    slot: Slot,
    field: Field,
    is_system: bool,
    content: Option<(u64, Content)>,
}

/// State of a list that is being read. A depth is that of the token itself: 2 for the elements.
#[derive(Debug, Default)]
pub(super) struct Messages {
    list: List,
    comma: Option<u64>,
    element: Option<Element>,
}

impl Messages {
    pub(super) fn finish(self) -> List {
        self.list
    }

    /// Handles the beginning of an object or a list.
    pub(super) fn opens(&mut self, depth: u32, here: u64, byte: u8) {
        match depth {
            2 => {
                self.list.count += 1;
                self.element = (byte == b'{').then_some(Element {
                    start: here,
                    slot: Slot::Key,
                    field: Field::Other,
                    is_system: false,
                    content: None,
                });
            }
            3 => {
                let content = if byte == b'[' { Content::List { is_empty: true } } else { Content::Other };
                self.field(here, content, false);
            }
            _ => self.part(depth),
        }
    }

    /// Handles the end of an element that is an object or a list; `end` is the offset after it.
    pub(super) fn element_ends(&mut self, end: u64) -> Result<(), Unreadable> {
        let Some(element) = self.element.as_ref().filter(|element| element.is_system) else { return Ok(()) };
        if self.list.system.len() >= MOST {
            return Err(Unreadable::Repeats);
        }
        self.list.system.push(Message {
            place: Place {
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
            && element.slot == Slot::Colon
        {
            element.slot = Slot::Value;
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
            element.slot = Slot::Key;
        }
    }

    /// Handles a string, in its raw spelling.
    pub(super) fn text(&mut self, depth: u32, start: u64, raw: &Spelling) {
        match depth {
            2 => self.list.count += 1,
            3 => match &mut self.element {
                Some(element) if element.slot == Slot::Key => {
                    element.field = match () {
                        () if raw.spells("role") => Field::Role,
                        () if raw.spells("content") => Field::Content,
                        () => Field::Other,
                    };
                    element.slot = Slot::Colon;
                }
                _ => {
                    let is_system = raw.spells("system") || raw.spells("developer");
                    self.field(start, Content::Text, is_system);
                }
            },
            _ => self.part(depth),
        }
    }

    /// Handles a number or a literal.
    pub(super) fn word(&mut self, depth: u32, start: u64) {
        match depth {
            2 => self.list.count += 1,
            3 => self.field(start, Content::Other, false),
            _ => self.part(depth),
        }
    }

    /// Handles the beginning of a field's value in a message.
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

    /// Notes an element in a list that may hold the parts of a message.
    fn part(&mut self, depth: u32) {
        if depth == 4
            && let Some(element) = &mut self.element
            && element.field == Field::Content
            && let Some((_, Content::List { is_empty })) = &mut element.content
        {
            *is_empty = false;
        }
    }
}
