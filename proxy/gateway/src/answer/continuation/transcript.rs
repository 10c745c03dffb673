//! The part of a streamed answer that the client has, kept so that another server can compute the rest. Pure.
//!
//! ```text
//!   whole events --> [ previous event with another text? ] --yes--> the text is noted, nothing is parsed
//!                           | no
//!                           v
//!                    parsed --> texts | marks | finish | counters | end (see `reading`)
//!                           | anything else
//!                           v
//!                    given up, with the reason: the rest could not be sent in the same form
//! ```
//!
//! Holds the texts and the marks between them. For plain text, also holds the offset where each piece ends,
//! and token ids if the stream reports them. Its size never exceeds its limit.

use std::borrow::Cow;
use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde_json::{Map, Value};

use super::reading::{self, AnswerStep, UnreadableReason, is_progress};
use super::said::{AnswerBeginning, AnswerContent, AnswerItem, ChannelKind, TextChannel};
use crate::answer::AnswerFormat;

static BLANK_LINE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\n\n"));

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerStage {
    /// Tokens are missing.
    Unfinished,
    /// The client has the finish reason and, if `counted`, the counters.
    Finished { counted: bool },
    /// Nothing is missing.
    Done,
}

#[derive(Debug)]
pub(crate) struct AnswerTranscript {
    pub(super) kind: AnswerFormat,
    limit: usize,
    pub(super) said: AnswerContent,
    /// Offset where each piece of the text ends; used only while the answer is a single text.
    pub(super) ends: Vec<u32>,
    pub(super) tokens: TokenTrail,
    /// Last sequence number, in dialects that number their events.
    pub(super) sequence: Option<u64>,
    /// True if llama-server holds back the text of the last tokens, because it may begin a stop word.
    withholds: bool,
    /// First event; all other events repeat its id and names.
    pub(super) frame: Option<Map<String, Value>>,
    pub(crate) stage: AnswerStage,
    /// Reason why the answer is not a single text, so that no other server can continue from its tokens.
    not_plain: Option<UnreadableReason>,
    /// Reason why the rest cannot be computed elsewhere.
    pub(crate) lost: Option<UnreadableReason>,
    mould: Option<EventTemplate>,
}

/// Tokens as the stream reports them; only in llama-server's own dialect.
#[derive(Debug, Default)]
pub(super) struct TokenTrail {
    /// Ids, while the stream reports an id for each token.
    ids: Vec<u32>,
    has_gap: bool,
    /// Number of tokens by the stream's own count.
    pub(super) counted: Option<u64>,
    /// Number of events so far with token count `counted`.
    pub(super) with_count: u64,
}

impl TokenTrail {
    /// Drops the ids: a list with a gap never counts as complete again.
    fn give_up_ids(&mut self) {
        self.ids = Vec::new();
        self.has_gap = true;
    }
}

/// Bytes of an event before and after its text. An event with the same bytes needs no parsing.
#[derive(Debug)]
struct EventTemplate {
    before: Box<[u8]>,
    after: Box<[u8]>,
    channel: TextChannel,
}

/// Bytes that a piece needs apart from its text.
const PIECE_OVERHEAD: usize = 8;
const TOKEN_BYTES: usize = 4;

impl AnswerTranscript {
    /// Starts the transcript of a stream, with at most `limit` bytes.
    pub(crate) fn for_stream(kind: AnswerFormat, limit: usize) -> Self {
        let not_plain = match kind {
            AnswerFormat::Chat | AnswerFormat::Text | AnswerFormat::Native => None,
            AnswerFormat::Messages | AnswerFormat::Responses => {
                Some("its route does not show how its prompt is rendered")
            }
        };
        Self {
            kind,
            limit,
            said: AnswerContent::default(),
            ends: Vec::new(),
            tokens: TokenTrail::default(),
            sequence: None,
            withholds: false,
            frame: None,
            stage: AnswerStage::Unfinished,
            not_plain,
            lost: None,
            mould: None,
        }
    }

    pub(crate) fn marked_not_plain(mut self, why: UnreadableReason) -> Self {
        self.mark_not_plain(why);
        self
    }

    /// Returns the whole answer; `None` if the transcript was given up, or has reasoning or tool calls.
    pub(crate) fn whole_content(&self) -> Option<&str> {
        self.lost.is_none().then(|| self.said.content()).flatten()
    }

    /// Returns the parts of an unfinished answer: at most one thought, one text, one tool call.
    pub(super) fn beginning(&self) -> Option<AnswerBeginning<'_>> {
        self.lost.is_none().then(|| self.said.beginning()).flatten()
    }

    /// Frees what only another continuation would need.
    pub(super) fn free_pieces(&mut self) {
        self.ends = Vec::new();
        self.tokens.give_up_ids();
        self.mould = None;
    }

    pub(crate) fn give_up(&mut self, why: UnreadableReason) {
        if self.lost.is_none() {
            self.lost = Some(why);
            self.said = AnswerContent::default();
            self.ends = Vec::new();
            self.tokens.give_up_ids();
            self.frame = None;
            self.mould = None;
        }
    }

    fn mark_not_plain(&mut self, why: UnreadableReason) {
        self.not_plain.get_or_insert(why);
        self.ends = Vec::new();
        self.tokens.give_up_ids();
    }

    /// Checks that the answer is the beginning of one text and nothing else.
    pub(super) fn is_plain(&self) -> Result<(), UnreadableReason> {
        match (self.not_plain, self.stage) {
            (Some(why), _) => Err(why),
            (None, AnswerStage::Unfinished) => Ok(()),
            (None, _) => Err("only its final counters are missing"),
        }
    }

    pub(super) fn decode_string(&self) -> &str {
        self.said.text()
    }

    /// Returns the pieces of the text, one per chunk with text.
    pub(super) fn pieces(&self) -> impl Iterator<Item = &str> {
        let mut from = 0;
        self.ends.iter().filter_map(move |end| {
            let end = *end as usize;
            let piece = self.said.text().get(from..end);
            from = end;
            piece
        })
    }

    /// Returns the tokens of the whole text, if the stream reported each id.
    pub(super) fn all_token_ids(&self) -> Option<&[u32]> {
        let TokenTrail { ids, has_gap, counted, .. } = &self.tokens;
        (!has_gap && *counted == Some(ids.len() as u64)).then_some(ids.as_slice())
    }

    /// Returns whether the client has the first event of the answer, but no token.
    pub(crate) fn has_no_token(&self) -> bool {
        let begun = self.stage == AnswerStage::Unfinished && self.frame.is_some();
        begun && self.said.has_no_text() && !self.withholds && self.tokens.counted.unwrap_or(0) == 0
    }

    pub(super) fn has_withheld_text(&self) -> bool {
        self.withholds
    }

    /// Records whole events that the client got.
    pub(crate) fn feed(&mut self, whole: &[u8]) {
        let mut rest = whole;
        while self.lost.is_none() && !rest.is_empty() {
            let Some(end) = BLANK_LINE.find(rest) else {
                // Other line ends: another kind of server wrote the events.
                return self.give_up("its stream is not written as llama-server writes one");
            };
            let (event, behind) = rest.split_at(end);
            rest = &behind[2..];
            if event.is_empty() || event.starts_with(b":") {
                continue;
            }
            if let Err(why) = self.add_event(event) {
                self.give_up(why);
            }
        }
    }

    fn add_event(&mut self, event: &[u8]) -> Result<(), UnreadableReason> {
        if self.stage == AnswerStage::Unfinished
            && let Some(mould) = &self.mould
            && let Some(quoted) = mould.event_text(event)
        {
            let channel = mould.channel;
            return match text(quoted) {
                Some(text) if text.is_empty() => {
                    self.withholds = self.kind == AnswerFormat::Text;
                    Ok(())
                }
                Some(text) => self.add_piece(channel, &text),
                None => Err("its text cannot be read"),
            };
        }
        let (_, data) = reading::split_event(event)?;
        if data == b"[DONE]" {
            self.stage = AnswerStage::Done;
            return Ok(());
        }
        let Ok(Value::Object(chunk)) = serde_json::from_slice(data) else {
            return Err("an event is no JSON object");
        };
        let reading = reading::read_event(self.kind, &chunk)?;
        if self.stage == AnswerStage::Done
            || (self.stage != AnswerStage::Unfinished && !reading.items.is_empty())
        {
            return Err("something follows its last event");
        }
        if self.kind == AnswerFormat::Native && reading.step != AnswerStep::Done && !is_progress(&chunk) {
            self.add_tokens(&chunk);
        }
        if self.kind == AnswerFormat::Text && reading.step == AnswerStep::Continues && !is_progress(&chunk) {
            self.withholds = true;
        }
        self.sequence = chunk.get("sequence_number").and_then(Value::as_u64).or(self.sequence);
        let only = match &reading.items[..] {
            [AnswerItem::Text(channel, text)] if !text.is_empty() => Some((*channel, text.clone())),
            _ => None,
        };
        for item in reading.items {
            match item {
                AnswerItem::Text(_, text) if text.is_empty() => {}
                AnswerItem::Text(channel, text) => self.add_piece(channel, &text)?,
                AnswerItem::Mark(mark, names) => self.add_mark(&mark, names, reading.step)?,
            }
        }
        match reading.step {
            AnswerStep::Continues => {}
            AnswerStep::Finished { counted } => self.stage = AnswerStage::Finished { counted },
            AnswerStep::Counted => {
                if let AnswerStage::Finished { counted } = &mut self.stage {
                    *counted = true;
                }
            }
            AnswerStep::Done => self.stage = AnswerStage::Done,
        }
        if self.kind != AnswerFormat::Native && self.stage == AnswerStage::Unfinished && only.is_some() {
            self.mould = only.and_then(|(channel, text)| EventTemplate::from_event(event, channel, &text));
        }
        if self.frame.is_none() {
            self.frame = Some(chunk);
        }
        Ok(())
    }

    /// Records the tokens of an event. An event without all its tokens leaves a gap, and a list with a gap
    /// never counts as complete again, even if later counts match. (The event with the last byte of a
    /// multi-byte character has all tokens of this character.)
    fn add_tokens(&mut self, chunk: &Map<String, Value>) {
        let counted = chunk.get("tokens_predicted").and_then(Value::as_u64);
        let told = chunk.get("tokens").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let tokens = &mut self.tokens;
        let grown = counted.and_then(|counted| counted.checked_sub(tokens.counted.unwrap_or(0)));
        if !tokens.has_gap && grown == Some(told.len() as u64) {
            tokens.ids.extend(told.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()));
        } else {
            tokens.give_up_ids();
        }
        self.withholds = !told.is_empty() || grown.is_some_and(|grown| grown > 0);
        tokens.with_count = if tokens.counted == counted { tokens.with_count + 1 } else { 1 };
        tokens.counted = counted;
    }

    fn add_piece(&mut self, channel: TextChannel, text: &str) -> Result<(), UnreadableReason> {
        self.withholds = false;
        if channel != TextChannel::CONTENT {
            self.mark_not_plain(match channel.kind {
                ChannelKind::Arguments => "it calls a tool",
                _ => "it has reasoning apart from its text",
            });
        }
        self.said.add_text(channel, text);
        if self.not_plain.is_none() {
            self.ends.push(u32::try_from(self.said.text().len()).unwrap_or(u32::MAX));
        }
        self.check_limit()
    }

    fn add_mark(&mut self, mark: &str, names: Vec<String>, step: AnswerStep) -> Result<(), UnreadableReason> {
        if step == AnswerStep::Continues {
            self.mark_not_plain("it calls a tool");
        }
        self.said.add_mark(mark, names);
        self.check_limit()
    }

    fn check_limit(&self) -> Result<(), UnreadableReason> {
        let ids = self.tokens.ids.len() * TOKEN_BYTES;
        let held = self.said.held_bytes() + self.ends.len() * PIECE_OVERHEAD + ids;
        if held > self.limit || u32::try_from(held).is_err() {
            return Err("it is longer than is kept (`internal.upstream.continue_bytes`)");
        }
        Ok(())
    }
}

/// Members whose value is generated text, each with its opening quote.
const TEXT_MEMBERS: [&[u8]; 7] = [
    b"\"content",
    b"\"reasoning_content",
    b"\"text",
    b"\"thinking",
    b"\"delta",
    b"\"arguments",
    b"\"partial_json",
];

impl EventTemplate {
    /// Makes a template from an event in which the text occurs exactly once.
    fn from_event(event: &[u8], channel: TextChannel, text: &str) -> Option<Self> {
        let quoted = serde_json::to_string(text).ok()?;
        let mut found = memchr::memmem::find_iter(event, &quoted);
        let (Some(at), None) = (found.next(), found.next()) else { return None };
        let key = event[..at].strip_suffix(b"\":")?;
        if !TEXT_MEMBERS.iter().any(|name| key.ends_with(name)) {
            return None;
        }
        let end = at + quoted.len() - 1;
        Some(Self { before: event[..=at].into(), after: event[end..].into(), channel })
    }

    /// Returns the quoted text of an event whose other bytes equal the template.
    fn event_text<'a>(&self, event: &'a [u8]) -> Option<&'a [u8]> {
        let before = self.before.len();
        let behind = self.after.len();
        if event.len() < before + behind || !event.starts_with(&self.before) || !event.ends_with(&self.after)
        {
            return None;
        }
        let inner = &event[before..event.len() - behind];
        is_whole_string(inner).then(|| &event[before - 1..=event.len() - behind])
    }
}

/// Returns whether these bytes between two quotes are exactly one JSON string.
fn is_whole_string(inner: &[u8]) -> bool {
    let is_escaped = |at: usize| inner[..at].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1;
    memchr::memchr_iter(b'"', inner).all(is_escaped) && !is_escaped(inner.len())
}

fn text(quoted: &[u8]) -> Option<Cow<'_, str>> {
    let inner = &quoted[1..quoted.len() - 1];
    if memchr::memchr(b'\\', inner).is_none() {
        return std::str::from_utf8(inner).ok().map(Cow::Borrowed);
    }
    serde_json::from_slice::<String>(quoted).ok().map(Cow::Owned)
}

#[cfg(test)]
#[path = "transcript_tests.rs"]
mod tests;
