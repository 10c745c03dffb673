//! The content of an answer so far, in order: texts with their channels, and the marks between them. Pure.
//!
//! ```text
//!   reasoning "so, the user" | reasoning ends | content "Hello" | call 0 `weather` | arguments 0
//!   "{\"city\":"
//! ```
//!
//! The answer of another server to the same request is compared with it. The client gets only what comes
//! after it.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Content,
    Reasoning,
    /// Arguments of a tool call.
    Arguments,
}

/// Identifies one of the texts that make up an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Channel {
    pub(super) what: What,
    /// Index of the block or call, where they are numbered.
    pub(super) index: u64,
}

impl Channel {
    pub(super) const CONTENT: Self = Self { what: What::Content, index: 0 };
    pub(super) const REASONING: Self = Self { what: What::Reasoning, index: 0 };
}

/// Content of one event, as far as two answers to one request must agree in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Item {
    Text(Channel, String),
    /// Anything but text: a block or a call begins or ends. Identifiers that differ between answers are
    /// kept apart.
    Mark(String, Vec<String>),
}

/// Marks after which a text of content begins.
const BEGINNINGS: [&str; 5] =
    ["start", "block 0 text ", "created", "item \"message\" ", "part \"output_text\""];

/// Overhead of an entry in bytes, apart from its text.
const PER_ENTRY: usize = 48;

#[derive(Debug)]
enum Entry {
    /// Ends at this offset of `text`.
    Text(Channel, usize),
    Mark(Box<str>),
}

/// Complete content of an answer so far.
#[derive(Debug, Default)]
pub(super) struct Said {
    text: String,
    entries: Vec<Entry>,
    /// Identifiers in the order of their marks.
    names: Vec<Box<str>>,
    /// Bytes of marks and identifiers.
    beside: usize,
}

impl Said {
    /// Returns about how many bytes this holds.
    pub(super) fn held(&self) -> usize {
        self.text.len() + self.beside + self.entries.len() * PER_ENTRY
    }

    /// Returns all texts, concatenated.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Like [`Self::text`], if there is no reasoning and no tool call.
    pub(super) fn content(&self) -> Option<&str> {
        let beside =
            |entry: &Entry| matches!(entry, Entry::Text(channel, _) if channel.what != What::Content);
        (!self.entries.iter().any(beside)).then_some(&self.text)
    }

    /// Returns the text if it is an unfinished content text and the answer has nothing else.
    pub(super) fn only_text(&self) -> Option<&str> {
        let (last, before) = self.entries.split_last()?;
        let begins = |entry: &Entry| match entry {
            Entry::Mark(mark) => BEGINNINGS.iter().any(|known| mark.starts_with(known)),
            Entry::Text(..) => false,
        };
        let is_content = matches!(last, Entry::Text(channel, _) if channel.what == What::Content);
        (is_content && before.iter().all(begins)).then_some(&self.text)
    }

    /// Returns whether there is no text yet.
    pub(super) fn is_silent(&self) -> bool {
        self.text.is_empty()
    }

    /// Extends the last text, or begins another one.
    pub(super) fn add_text(&mut self, channel: Channel, text: &str) {
        if text.is_empty() {
            return;
        }
        self.text.push_str(text);
        let end = self.text.len();
        match self.entries.last_mut() {
            Some(Entry::Text(last, until)) if *last == channel => *until = end,
            _ => self.entries.push(Entry::Text(channel, end)),
        }
    }

    pub(super) fn add_mark(&mut self, mark: &str, names: Vec<String>) {
        self.beside += mark.len() + names.iter().map(|name| name.len() + PER_ENTRY).sum::<usize>();
        self.entries.push(Entry::Mark(mark.into()));
        self.names.extend(names.into_iter().map(String::into_boxed_str));
    }
}

/// Part of an item of the second answer that the client has already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Had {
    All,
    /// This many bytes of its text.
    Part(usize),
    Nothing,
}

/// Progress of a second answer through what was said.
#[derive(Debug, Default)]
pub(super) struct Comparing {
    said: Said,
    entry: usize,
    /// Offset in the concatenated texts.
    at: usize,
    /// Identifiers passed so far.
    name: usize,
}

/// Error: the second answer differs from the first.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Differs;

impl Comparing {
    pub(super) fn with(said: Said) -> Self {
        Self { said, ..Self::default() }
    }

    /// Returns whether the second answer has passed all of it.
    pub(super) fn is_over(&self) -> bool {
        self.entry >= self.said.entries.len()
    }

    /// Frees the content once the second answer has passed it.
    pub(super) fn forget(&mut self) {
        if self.is_over() && self.entry > 0 {
            *self = Self::default();
        }
    }

    /// Compares a text of the second answer.
    ///
    /// # Errors
    /// The client has another text there, or has something else after a shorter one.
    pub(super) fn text(&mut self, channel: Channel, text: &str) -> Result<Had, Differs> {
        let (own, end) = match self.said.entries.get(self.entry) {
            _ if text.is_empty() => return Ok(Had::All),
            None => return Ok(Had::Nothing),
            Some(Entry::Text(own, end)) => (*own, *end),
            Some(Entry::Mark(_)) => return Err(Differs),
        };
        let left = self.said.text.get(self.at..end).unwrap_or_default();
        if own != channel {
            return Err(Differs);
        }
        if let Some(behind) = left.strip_prefix(text) {
            self.at += text.len();
            self.entry += usize::from(behind.is_empty());
            return Ok(Had::All);
        }
        let had = left.len();
        if !text.starts_with(left) || self.entry + 1 < self.said.entries.len() {
            return Err(Differs);
        }
        (self.at, self.entry) = (end, self.entry + 1);
        Ok(Had::Part(had))
    }

    /// Compares a mark of the second answer. Returns the client's identifiers for it.
    ///
    /// # Errors
    /// The client has something else there.
    pub(super) fn mark(&mut self, mark: &str, names: &[String]) -> Result<Option<Vec<Box<str>>>, Differs> {
        match self.said.entries.get(self.entry) {
            None => Ok(None),
            Some(Entry::Mark(own)) if **own == *mark => {
                self.entry += 1;
                let own = self.said.names.get(self.name..self.name + names.len()).ok_or(Differs)?;
                self.name += names.len();
                Ok(Some(own.to_vec()))
            }
            Some(_) => Err(Differs),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said() -> Said {
        let mut said = Said::default();
        said.add_text(Channel::REASONING, "so");
        said.add_text(Channel::REASONING, ", ");
        said.add_text(Channel::CONTENT, "");
        said.add_mark("block 1", vec!["old".to_owned()]);
        said.add_text(Channel::CONTENT, "Hello");
        said
    }

    #[test]
    fn pieces_may_be_cut_otherwise_and_what_is_behind_them_is_new() {
        let mut other = Comparing::with(said());
        assert_eq!(other.text(Channel::REASONING, "s"), Ok(Had::All));
        assert_eq!(other.text(Channel::REASONING, "o, "), Ok(Had::All));
        assert_eq!(other.text(Channel::CONTENT, ""), Ok(Had::All));
        assert_eq!(other.mark("block 1", &["new".to_owned()]), Ok(Some(vec!["old".into()])));
        assert!(!other.is_over());
        assert_eq!(other.text(Channel::CONTENT, "Hello you"), Ok(Had::Part(5)));
        assert!(other.is_over());
        assert_eq!(other.text(Channel::CONTENT, "!"), Ok(Had::Nothing));
        assert_eq!(other.mark("end", &[]), Ok(None));
    }

    #[test]
    fn whatever_else_comes_is_another_answer() {
        let begun = |items: &[(Channel, &str)]| {
            let mut other = Comparing::with(said());
            for (channel, text) in items {
                other.text(*channel, text).unwrap();
            }
            other
        };
        assert_eq!(begun(&[]).text(Channel::REASONING, "sO"), Err(Differs));
        assert_eq!(begun(&[]).text(Channel::CONTENT, "so"), Err(Differs));
        assert_eq!(begun(&[]).mark("block 1", &[]), Err(Differs));
        assert_eq!(begun(&[]).text(Channel::REASONING, "so, the"), Err(Differs), "more than the client has");
        let thought = [(Channel::REASONING, "so, ")];
        assert_eq!(begun(&thought).mark("block 2", &[]), Err(Differs));
        assert_eq!(begun(&thought).text(Channel::REASONING, "x"), Err(Differs));
        assert_eq!(begun(&thought).mark("block 1", &["a".into(), "b".into()]), Err(Differs));
    }

    #[test]
    fn what_is_held_is_counted() {
        assert!(Said::default().held() == 0);
        let held = said().held();
        assert!((12 + 2 * PER_ENTRY..12 + 6 * PER_ENTRY).contains(&held), "{held}");
        assert_eq!(said().text(), "so, Hello");
    }
}
