//! The content of an answer so far: texts with their channels, and the marks between them. Pure.
//!
//! ```text
//!   reasoning "so, the user" | reasoning ends | content "Hello" | call 0 `weather` | arguments 0
//!   "{\"city\":"
//! ```
//!
//! Another server computes the answer to the same request again. Its answer is compared with this content,
//! and the client gets the part that comes after it.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChannelKind {
    Content,
    Reasoning,
    Arguments,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TextChannel {
    pub(super) kind: ChannelKind,
    /// Index of the content block or tool call; 0 on routes without indices.
    pub(super) index: u64,
}

impl TextChannel {
    pub(super) const CONTENT: Self = Self { kind: ChannelKind::Content, index: 0 };
    pub(super) const REASONING: Self = Self { kind: ChannelKind::Reasoning, index: 0 };
}

/// The part of an event that must be equal in two answers to one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AnswerItem {
    Text(TextChannel, String),
    /// Begin or end of a block or tool call, with its identifiers, which may differ between two answers.
    Mark(String, Vec<String>),
}

/// Bytes that an entry needs apart from its text.
const ENTRY_OVERHEAD: usize = 48;

/// Marks around a text or a thought, in the words of [`super::reading`].
const BLOCK_MARKS: [&str; 11] = [
    "start",
    "created",
    "stop ",
    "signature ",
    "item \"message\" ",
    "item \"reasoning\" ",
    "part ",
    "response.output_text.done",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
];

/// An unfinished answer that is at most one thought, then one text, then one tool call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AnswerBeginning<'a> {
    pub(super) reasoning: &'a str,
    pub(super) text: &'a str,
    pub(super) call: Option<CallBeginning<'a>>,
}

/// A tool call that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallBeginning<'a> {
    pub(super) name: &'a str,
    pub(super) arguments: &'a str,
}

fn is_block_mark(mark: &str) -> bool {
    let is_block =
        |block: &str| block.split(' ').nth(1).is_some_and(|kind| ["text", "thinking"].contains(&kind));
    BLOCK_MARKS.iter().any(|own| mark.starts_with(own)) || mark.strip_prefix("block ").is_some_and(is_block)
}

/// Returns the tool's name if a mark begins a call, in the words of [`super::reading`].
fn called_tool(mark: &str) -> Option<&str> {
    let name = if let Some(name) = mark.strip_prefix("item \"function_call\" ") {
        name
    } else if let Some(numbered) = mark.strip_prefix("block ") {
        numbered.split_once(' ')?.1.strip_prefix("tool_use ")?
    } else {
        mark.strip_prefix("call ")?.split_once(' ')?.1
    };
    Some(name).filter(|name| !name.is_empty())
}

#[derive(Debug)]
enum ContentEntry {
    /// A text that ends at this offset of [`AnswerContent::text`].
    Text(TextChannel, usize),
    Mark(Box<str>),
}

#[derive(Debug, Default)]
pub(super) struct AnswerContent {
    text: String,
    entries: Vec<ContentEntry>,
    /// Identifiers of all marks, in order.
    names: Vec<Box<str>>,
    /// Number of bytes of marks and identifiers.
    mark_bytes: usize,
}

impl AnswerContent {
    pub(super) fn held_bytes(&self) -> usize {
        self.text.len() + self.mark_bytes + self.entries.len() * ENTRY_OVERHEAD
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Returns all texts joined; `None` if any is reasoning or belongs to a tool call.
    pub(super) fn content(&self) -> Option<&str> {
        let is_content = |entry: &ContentEntry| match entry {
            ContentEntry::Text(channel, _) => channel.kind == ChannelKind::Content,
            ContentEntry::Mark(_) => true,
        };
        self.entries.iter().all(is_content).then_some(&self.text)
    }

    /// Returns the parts of an answer that breaks off in a thought, in a text or in its first tool call.
    pub(super) fn beginning(&self) -> Option<AnswerBeginning<'_>> {
        let mut ends = [0; 3];
        let (mut name, mut is_open) = (None, false);
        for entry in &self.entries {
            let ContentEntry::Text(channel, end) = entry else {
                let ContentEntry::Mark(mark) = entry else { return None };
                name = match (name, called_tool(mark)) {
                    (None, Some(called)) => Some(called),
                    (None, None) if is_block_mark(mark) => None,
                    // The call has ended, or another one begins.
                    _ => return None,
                };
                is_open = name.is_some();
                continue;
            };
            let part = match channel.kind {
                ChannelKind::Reasoning => 0,
                ChannelKind::Content => 1,
                ChannelKind::Arguments => 2,
            };
            // Parts in another order, or a second one of the same kind.
            let is_next = ends[part..].iter().all(|end| *end == 0);
            if !is_next || (part == 2) != name.is_some() {
                return None;
            }
            (ends[part], is_open) = (*end, true);
        }
        let thought = ends[0];
        let text = ends[1].max(thought);
        let call =
            name.map(|name| CallBeginning { name, arguments: self.text.get(text..).unwrap_or_default() });
        let text = self.text.get(thought..text)?;
        is_open.then_some(AnswerBeginning { reasoning: self.text.get(..thought)?, text, call })
    }

    pub(super) fn has_no_text(&self) -> bool {
        self.text.is_empty()
    }

    pub(super) fn add_text(&mut self, channel: TextChannel, text: &str) {
        if text.is_empty() {
            return;
        }
        self.text.push_str(text);
        let end = self.text.len();
        match self.entries.last_mut() {
            Some(ContentEntry::Text(last, until)) if *last == channel => *until = end,
            _ => self.entries.push(ContentEntry::Text(channel, end)),
        }
    }

    pub(super) fn add_mark(&mut self, mark: &str, names: Vec<String>) {
        self.mark_bytes += mark.len() + names.iter().map(|name| name.len() + ENTRY_OVERHEAD).sum::<usize>();
        self.entries.push(ContentEntry::Mark(mark.into()));
        self.names.extend(names.into_iter().map(String::into_boxed_str));
    }
}

/// How much of an item of the second answer the client already has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KnownPart {
    All,
    /// Number of bytes at the beginning of the item's text.
    Part(usize),
    Nothing,
}

/// Compares a second answer with the client's content, item by item.
#[derive(Debug, Default)]
pub(super) struct ContentComparison {
    said: AnswerContent,
    entry_index: usize,
    /// Offset reached in the joined texts.
    text_offset: usize,
    /// Number of identifiers passed so far.
    name_index: usize,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct ContentMismatch;

impl ContentComparison {
    pub(super) fn from_content(said: AnswerContent) -> Self {
        Self { said, ..Self::default() }
    }

    /// Returns whether the second answer has repeated all content that the client has.
    pub(super) fn has_passed_all(&self) -> bool {
        self.entry_index >= self.said.entries.len()
    }

    /// Frees the content once the second answer has repeated it.
    pub(super) fn forget(&mut self) {
        if self.has_passed_all() && self.entry_index > 0 {
            *self = Self::default();
        }
    }

    /// Returns the client's content and forgets it.
    pub(super) fn take_content(&mut self) -> AnswerContent {
        std::mem::take(self).said
    }

    /// Compares a text of the second answer with the content at the current position. Fails if the client has
    /// a different text there, or a shorter text followed by something else.
    pub(super) fn compare_text(
        &mut self,
        channel: TextChannel,
        text: &str,
    ) -> Result<KnownPart, ContentMismatch> {
        if channel.kind != ChannelKind::Reasoning {
            self.skip_blank_end();
        }
        let (own, end) = match self.said.entries.get(self.entry_index) {
            _ if text.is_empty() => return Ok(KnownPart::All),
            Some(_) if self.is_blank_after_thought(channel, text) => return Ok(KnownPart::All),
            None => return Ok(KnownPart::Nothing),
            Some(ContentEntry::Text(own, end)) => (*own, *end),
            Some(ContentEntry::Mark(_)) => return Err(ContentMismatch),
        };
        let left = self.said.text.get(self.text_offset..end).unwrap_or_default();
        if own != channel {
            return Err(ContentMismatch);
        }
        if let Some(behind) = left.strip_prefix(text) {
            self.text_offset += text.len();
            self.entry_index += usize::from(behind.is_empty());
            return Ok(KnownPart::All);
        }
        let had = left.len();
        let is_thought = own.kind == ChannelKind::Reasoning;
        if let Some(more) = text.strip_prefix(left)
            && is_thought
            && self.entry_index + 1 < self.said.entries.len()
            && more.trim_ascii().is_empty()
        {
            (self.text_offset, self.entry_index) = (end, self.entry_index + 1);
            return Ok(KnownPart::All);
        }
        if !text.starts_with(left) || self.entry_index + 1 < self.said.entries.len() {
            return Err(ContentMismatch);
        }
        (self.text_offset, self.entry_index) = (end, self.entry_index + 1);
        Ok(KnownPart::Part(had))
    }

    /// Returns whether a text only adds blanks to a thought that the client has, and that something follows.
    /// Templates write the end of a thought with their own blanks.
    fn is_blank_after_thought(&self, channel: TextChannel, text: &str) -> bool {
        let before = self.entry_index.checked_sub(1).and_then(|before| self.said.entries.get(before));
        let is_same = matches!(before, Some(ContentEntry::Text(own, _)) if *own == channel);
        channel.kind == ChannelKind::Reasoning && is_same && text.trim_ascii().is_empty()
    }

    /// Skips blanks at the end of a thought that the second answer leaves out.
    fn skip_blank_end(&mut self) {
        let Some(ContentEntry::Text(own, end)) = self.said.entries.get(self.entry_index) else { return };
        let left = self.said.text.get(self.text_offset..*end).unwrap_or_default();
        let is_begun = self.said.text.get(..self.text_offset).is_some_and(|text| !text.is_empty());
        let is_last = self.entry_index + 1 >= self.said.entries.len();
        if own.kind == ChannelKind::Reasoning && is_begun && !is_last && left.trim_ascii().is_empty() {
            (self.text_offset, self.entry_index) = (*end, self.entry_index + 1);
        }
    }

    /// Compares a mark of the second answer and returns the identifiers that the client has for it. Fails if
    /// the client has a text or another mark at the current position.
    pub(super) fn compare_mark(
        &mut self,
        mark: &str,
        names: &[String],
    ) -> Result<Option<Vec<Box<str>>>, ContentMismatch> {
        self.skip_blank_end();
        match self.said.entries.get(self.entry_index) {
            None => Ok(None),
            Some(ContentEntry::Mark(own)) if **own == *mark => {
                self.entry_index += 1;
                let own = self
                    .said
                    .names
                    .get(self.name_index..self.name_index + names.len())
                    .ok_or(ContentMismatch)?;
                self.name_index += names.len();
                Ok(Some(own.to_vec()))
            }
            Some(_) => Err(ContentMismatch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said() -> AnswerContent {
        let mut said = AnswerContent::default();
        said.add_text(TextChannel::REASONING, "so");
        said.add_text(TextChannel::REASONING, ", ");
        said.add_text(TextChannel::CONTENT, "");
        said.add_mark("block 1", vec!["old".to_owned()]);
        said.add_text(TextChannel::CONTENT, "Hello");
        said
    }

    #[test]
    fn pieces_may_be_cut_otherwise_and_what_is_behind_them_is_new() {
        let mut other = ContentComparison::from_content(said());
        assert_eq!(other.compare_text(TextChannel::REASONING, "s"), Ok(KnownPart::All));
        assert_eq!(other.compare_text(TextChannel::REASONING, "o, "), Ok(KnownPart::All));
        assert_eq!(other.compare_text(TextChannel::CONTENT, ""), Ok(KnownPart::All));
        assert_eq!(other.compare_mark("block 1", &["new".to_owned()]), Ok(Some(vec!["old".into()])));
        assert!(!other.has_passed_all());
        assert_eq!(other.compare_text(TextChannel::CONTENT, "Hello you"), Ok(KnownPart::Part(5)));
        assert!(other.has_passed_all());
        assert_eq!(other.compare_text(TextChannel::CONTENT, "!"), Ok(KnownPart::Nothing));
        assert_eq!(other.compare_mark("end", &[]), Ok(None));
    }

    #[test]
    fn whatever_else_comes_is_another_answer() {
        let begun = |items: &[(TextChannel, &str)]| {
            let mut other = ContentComparison::from_content(said());
            for (channel, text) in items {
                other.compare_text(*channel, text).unwrap();
            }
            other
        };
        assert_eq!(begun(&[]).compare_text(TextChannel::REASONING, "sO"), Err(ContentMismatch));
        assert_eq!(begun(&[]).compare_text(TextChannel::CONTENT, "so"), Err(ContentMismatch));
        assert_eq!(begun(&[]).compare_mark("block 1", &[]), Err(ContentMismatch));
        assert_eq!(
            begun(&[]).compare_text(TextChannel::REASONING, "so, the"),
            Err(ContentMismatch),
            "more than the client has"
        );
        let thought = [(TextChannel::REASONING, "so, ")];
        assert_eq!(begun(&thought).compare_mark("block 2", &[]), Err(ContentMismatch));
        assert_eq!(begun(&thought).compare_text(TextChannel::REASONING, "x"), Err(ContentMismatch));
        assert_eq!(begun(&thought).compare_mark("block 1", &["a".into(), "b".into()]), Err(ContentMismatch));
    }

    #[test]
    fn an_answer_breaks_off_in_a_thought_a_text_or_its_first_call() {
        let with = |parts: &[(&str, Option<TextChannel>)]| {
            let mut said = AnswerContent::default();
            for (text, channel) in parts {
                match channel {
                    Some(channel) => said.add_text(*channel, text),
                    None => said.add_mark(text, vec!["id".to_owned()]),
                }
            }
            said
        };
        let text = |text| (text, Some(TextChannel { kind: ChannelKind::Content, index: 1 }));
        let thought = |text| (text, Some(TextChannel::REASONING));
        let arguments = |text| (text, Some(TextChannel { kind: ChannelKind::Arguments, index: 2 }));
        let mark = |mark| (mark, None);
        let call = |arguments| Some(CallBeginning { name: "f g", arguments });
        let [m0, m1, m2] = ["block 0 thinking ", "block 1 text ", "block 2 tool_use f g"].map(mark);
        let [r0, r1, r2] =
            ["item \"reasoning\" ", "item \"message\" ", "item \"function_call\" f g"].map(mark);
        for (parts, wanted) in [
            (vec![text("so")], ("", "so", None)),
            (vec![thought("so")], ("so", "", None)),
            (vec![thought("so"), text("I")], ("so", "I", None)),
            (vec![mark("call 0 f g"), arguments("{")], ("", "", call("{"))),
            (vec![thought("so"), mark("call 0 f g")], ("so", "", call(""))),
            (vec![thought("so"), text("I"), mark("call 0 f g"), arguments("{")], ("so", "I", call("{"))),
            (
                vec![mark("start"), m0, thought("so"), mark("signature 0"), mark("stop 0"), m1, text("I")],
                ("so", "I", None),
            ),
            (vec![mark("start"), m1, text("I"), mark("stop 1"), m2, arguments("{")], ("", "I", call("{"))),
            (
                vec![mark("created"), r0, thought("so"), mark("response.output_item.done"), r2],
                ("so", "", call("")),
            ),
            (vec![mark("created"), r1, mark("part \"output_text\""), text("I")], ("", "I", None)),
        ] {
            let said = with(&parts);
            let (reasoning, text, call) = wanted;
            assert_eq!(said.beginning(), Some(AnswerBeginning { reasoning, text, call }), "{parts:?}");
        }
        for parts in [
            vec![],
            vec![mark("start"), m1],
            vec![m1, text("I"), mark("stop 1")],
            vec![text("I"), thought("so")],
            vec![thought("so"), text("I"), thought("so")],
            vec![mark("call 0 f"), arguments("{}"), mark("call 1 f")],
            vec![mark("call 0 f"), arguments("{}"), mark("stop 0")],
            vec![mark("call 0 f"), text("I")],
            vec![arguments("{}")],
            vec![text("I"), mark("finish \"stop\"")],
        ] {
            assert_eq!(with(&parts).beginning(), None, "{parts:?}");
        }
    }

    #[test]
    fn what_is_held_is_counted() {
        assert!(AnswerContent::default().held_bytes() == 0);
        let held = said().held_bytes();
        assert!((12 + 2 * ENTRY_OVERHEAD..12 + 6 * ENTRY_OVERHEAD).contains(&held), "{held}");
        assert_eq!(said().text(), "so, Hello");
    }
}
