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

const CONTENT_MARKS: [&str; 5] =
    ["start", "block 0 text ", "created", "item \"message\" ", "part \"output_text\""];

/// Marks after a text, before the tool call that follows it.
const CONTENT_END_MARKS: [&str; 4] =
    ["stop 0", "response.output_text.done", "response.content_part.done", "response.output_item.done"];

/// A tool call that has begun, and the text before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BegunCall<'a> {
    pub(super) before: &'a str,
    pub(super) name: &'a str,
    pub(super) arguments: &'a str,
}

/// Bytes that an entry needs apart from its text.
const ENTRY_OVERHEAD: usize = 48;

/// Returns the tool's name if a mark begins a call, in the words of [`super::reading`].
fn called_tool(mark: &str) -> Option<&str> {
    let name = match mark.strip_prefix("item \"function_call\" ") {
        Some(name) => name,
        None => {
            let numbered = mark.strip_prefix("call ").or_else(|| mark.strip_prefix("block "))?;
            let (_, rest) = numbered.split_once(' ')?;
            if mark.starts_with("block ") { rest.strip_prefix("tool_use ")? } else { rest }
        }
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

    /// Returns the text of an answer that is one unfinished text of the content channel.
    pub(super) fn only_text(&self) -> Option<&str> {
        let (last, before) = self.entries.split_last()?;
        let begins = |entry: &ContentEntry| match entry {
            ContentEntry::Mark(mark) => CONTENT_MARKS.iter().any(|known| mark.starts_with(known)),
            ContentEntry::Text(..) => false,
        };
        let is_content =
            matches!(last, ContentEntry::Text(channel, _) if channel.kind == ChannelKind::Content);
        (is_content && before.iter().all(begins)).then_some(&self.text)
    }

    /// Returns the tool call of an answer that is at most one text and one unfinished call after it.
    pub(super) fn begun_call(&self) -> Option<BegunCall<'_>> {
        let (mut before, mut call, mut from) = (0, None, 0);
        for entry in &self.entries {
            match (entry, call) {
                (ContentEntry::Text(channel, end), None) if channel.kind == ChannelKind::Content => {
                    (before, from) = (*end, *end);
                }
                (ContentEntry::Text(channel, end), Some(name)) if channel.kind == ChannelKind::Arguments => {
                    call = Some(name);
                    from = *end;
                }
                (ContentEntry::Mark(mark), None) => match called_tool(mark) {
                    Some(name) => call = Some(name),
                    None if CONTENT_MARKS.iter().chain(&CONTENT_END_MARKS).any(|own| mark.starts_with(own)) => {}
                    None => return None,
                },
                // Reasoning, a second text or call, or the end of the call.
                _ => return None,
            }
        }
        Some(BegunCall { before: self.text.get(..before)?, name: call?, arguments: self.text.get(before..from)? })
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
        let (own, end) = match self.said.entries.get(self.entry_index) {
            _ if text.is_empty() => return Ok(KnownPart::All),
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
        if !text.starts_with(left) || self.entry_index + 1 < self.said.entries.len() {
            return Err(ContentMismatch);
        }
        (self.text_offset, self.entry_index) = (end, self.entry_index + 1);
        Ok(KnownPart::Part(had))
    }

    /// Compares a mark of the second answer and returns the identifiers that the client has for it. Fails if
    /// the client has a text or another mark at the current position.
    pub(super) fn compare_mark(
        &mut self,
        mark: &str,
        names: &[String],
    ) -> Result<Option<Vec<Box<str>>>, ContentMismatch> {
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
    fn a_call_has_begun_after_at_most_one_text() {
        let with = |marks: &[&str], before: &str, call: &str, arguments: &str| {
            let mut said = AnswerContent::default();
            let (start, end) = marks.split_at(marks.len() / 2);
            start.iter().for_each(|mark| said.add_mark(mark, Vec::new()));
            said.add_text(TextChannel::CONTENT, before);
            end.iter().for_each(|mark| said.add_mark(mark, Vec::new()));
            said.add_mark(call, vec!["id".to_owned()]);
            said.add_text(TextChannel { kind: ChannelKind::Arguments, index: 1 }, arguments);
            said
        };
        let call = |before, arguments| Some(BegunCall { before, name: "f g", arguments });
        assert_eq!(with(&[], "", "call 0 f g", "{").begun_call(), call("", "{"));
        assert_eq!(with(&[], "so", "call 0 f g", "").begun_call(), call("so", ""));
        let marks = ["start", "block 0 text ", "stop 0", "stop 0"];
        assert_eq!(with(&marks, "so", "block 1 tool_use f g", "{").begun_call(), call("so", "{"));
        let marks = ["created", "item \"message\" ", "response.output_text.done", "response.output_item.done"];
        assert_eq!(with(&marks, "so", "item \"function_call\" f g", "{").begun_call(), call("so", "{"));
        assert_eq!(with(&["start", "stop 1"], "", "call 0 f", "{").begun_call(), None);
        let mut two = with(&[], "", "call 0 f", "{}");
        two.add_mark("call 1 f", Vec::new());
        assert_eq!(two.begun_call(), None);
        let mut thought = AnswerContent::default();
        thought.add_text(TextChannel::REASONING, "so");
        thought.add_mark("call 0 f", Vec::new());
        assert_eq!(thought.begun_call(), None);
        assert_eq!(AnswerContent::default().begun_call(), None);
    }

    #[test]
    fn what_is_held_is_counted() {
        assert!(AnswerContent::default().held_bytes() == 0);
        let held = said().held_bytes();
        assert!((12 + 2 * ENTRY_OVERHEAD..12 + 6 * ENTRY_OVERHEAD).contains(&held), "{held}");
        assert_eq!(said().text(), "so, Hello");
    }
}
