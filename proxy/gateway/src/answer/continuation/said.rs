//! What an answer has said so far, in order: texts, each of its channel, and what stands between them. Pure.
//!
//! ```text
//!   reasoning "so, the user" | reasoning ends | content "Hello" | call 0 `weather` | arguments of 0 "{\"city\":"
//! ```
//!
//! It is what the answer to the same request from another server is compared with: of that answer, the client gets only what
//! comes behind all of this.

/// Where a text belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Content,
    Reasoning,
    /// Of the call of a tool.
    Arguments,
}

/// One of the texts that an answer is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Channel {
    pub(super) what: What,
    /// Of the block or call, where they are numbered.
    pub(super) index: u64,
}

impl Channel {
    pub(super) const CONTENT: Self = Self { what: What::Content, index: 0 };
    pub(super) const REASONING: Self = Self { what: What::Reasoning, index: 0 };
}

/// What one event says, as far as two answers to one request have to agree in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Item {
    Text(Channel, String),
    /// Whatever is no text: a block or a call begins or ends. Names that are drawn anew for each answer stand apart.
    Mark(String, Vec<String>),
}

/// The marks behind which a text of content begins.
const BEGINNINGS: [&str; 5] =
    ["start", "block 0 text ", "created", "item \"message\" ", "part \"output_text\""];

/// Bytes for each entry beside its text.
const PER_ENTRY: usize = 48;

#[derive(Debug)]
enum Entry {
    /// It ends here in `text`.
    Text(Channel, usize),
    Mark(Box<str>),
}

/// All that was said.
#[derive(Debug, Default)]
pub(super) struct Said {
    text: String,
    entries: Vec<Entry>,
    /// The names in the order of their marks.
    names: Vec<Box<str>>,
    /// Bytes of marks and names.
    beside: usize,
}

impl Said {
    /// Bytes that it holds, or nearly so.
    pub(super) fn held(&self) -> usize {
        self.text.len() + self.beside + self.entries.len() * PER_ENTRY
    }

    /// All texts behind one another.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// The same, if nothing was thought and no tool was called.
    pub(super) fn content(&self) -> Option<&str> {
        let beside =
            |entry: &Entry| matches!(entry, Entry::Text(channel, _) if channel.what != What::Content);
        (!self.entries.iter().any(beside)).then_some(&self.text)
    }

    /// The text, if there is one of content and nothing has ended it, and if nothing else has been said or begun.
    pub(super) fn only_text(&self) -> Option<&str> {
        let (last, before) = self.entries.split_last()?;
        let begins = |entry: &Entry| match entry {
            Entry::Mark(mark) => BEGINNINGS.iter().any(|known| mark.starts_with(known)),
            Entry::Text(..) => false,
        };
        let is_content = matches!(last, Entry::Text(channel, _) if channel.what == What::Content);
        (is_content && before.iter().all(begins)).then_some(&self.text)
    }

    /// Whether no text has been said.
    pub(super) fn is_silent(&self) -> bool {
        self.text.is_empty()
    }

    /// A text goes on, or another one begins.
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

/// What of an item of the other answer the client has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Had {
    All,
    /// As many bytes of its text.
    Part(usize),
    Nothing,
}

/// How far another answer has come in what was said.
#[derive(Debug, Default)]
pub(super) struct Comparing {
    said: Said,
    entry: usize,
    /// Bytes of all texts.
    at: usize,
    /// Names that the client has.
    name: usize,
}

/// The other answer is another one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Differs;

impl Comparing {
    pub(super) fn with(said: Said) -> Self {
        Self { said, ..Self::default() }
    }

    /// Whether all of it has come again.
    pub(super) fn is_over(&self) -> bool {
        self.entry >= self.said.entries.len()
    }

    /// Lets go of what has come again.
    pub(super) fn forget(&mut self) {
        if self.is_over() && self.entry > 0 {
            *self = Self::default();
        }
    }

    /// A text comes.
    ///
    /// # Errors
    /// It is not the one that the client has, or more than that with something else behind it.
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

    /// Something else comes. With the names by which the client knows what it names.
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
