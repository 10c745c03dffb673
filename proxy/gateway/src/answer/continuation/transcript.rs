//! What a client has of a streamed answer, kept so that another server can compute the rest. Pure.
//!
//! ```text
//!   whole events --> [ the chunk before, with another text? ] --yes--> its text is noted (the usual case: nothing is parsed)
//!                           | no
//!                           v
//!                    parsed --> text | role | finish | counters | end
//!                           | anything else
//!                           v
//!                    given up, with the reason: the rest could not be said in the same voice
//! ```
//!
//! It holds the text once, where each piece of it ends, and token ids where the stream has them: at most the bytes that it was
//! given.

use std::borrow::Cow;
use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde_json::{Map, Value};

use super::voice::Voice;
use crate::answer::assemble::Kind;

static BLANK: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\n\n"));

/// How far an answer has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Tokens are missing.
    Going,
    /// It has its reason to finish; `counted`: its counters, too.
    Finished { counted: bool },
    /// Nothing is missing.
    Done,
}

/// What a client has of an answer.
#[derive(Debug)]
pub(crate) struct Transcript {
    kind: Kind,
    limit: usize,
    pub(super) text: String,
    /// Where each piece of `text` ends.
    pub(super) ends: Vec<u32>,
    /// Token ids, of llama-server's own dialect, while it tells one for each token.
    ids: Vec<u32>,
    spelled: bool,
    /// Tokens so far as the stream itself counts them, in that dialect.
    pub(super) counted: Option<u64>,
    /// The last tokens have no text. While stop words may be beginning, llama-server holds their text back.
    withholds: bool,
    /// The first event, whose id and names all others have.
    pub(super) frame: Option<Map<String, Value>>,
    stage: Stage,
    lost: Option<&'static str>,
    mould: Option<Mould>,
}

/// A chunk around its text: what comes before the text, and what behind.
#[derive(Debug)]
struct Mould {
    before: Box<[u8]>,
    behind: Box<[u8]>,
}

/// Bytes for each piece beside its text.
const PER_PIECE: usize = 8;
/// Bytes for each token.
const PER_TOKEN: usize = 4;

impl Transcript {
    /// Of a stream of this kind; `None` for one that cannot go on elsewhere. Holds `limit` bytes at most.
    pub(crate) fn of(kind: Kind, limit: usize) -> Option<Self> {
        matches!(kind, Kind::Chat | Kind::Text | Kind::Native).then(|| Self {
            kind,
            limit,
            text: String::new(),
            ends: Vec::new(),
            ids: Vec::new(),
            spelled: true,
            counted: None,
            withholds: false,
            frame: None,
            stage: Stage::Going,
            lost: None,
            mould: None,
        })
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    pub(crate) fn stage(&self) -> Stage {
        self.stage
    }

    /// Why the rest cannot be computed elsewhere.
    pub(crate) fn lost(&self) -> Option<&'static str> {
        self.lost
    }

    /// Gives it up.
    pub(crate) fn lose(&mut self, why: &'static str) {
        if self.lost.is_none() {
            self.lost = Some(why);
            (self.text, self.ends, self.ids) = (String::new(), Vec::new(), Vec::new());
            (self.frame, self.mould) = (None, None);
        }
    }

    /// The pieces of the text, one for each chunk that had one.
    pub(super) fn pieces(&self) -> impl Iterator<Item = &str> {
        let mut from = 0;
        self.ends.iter().filter_map(move |end| {
            let end = *end as usize;
            let piece = self.text.get(from..end);
            from = end;
            piece
        })
    }

    /// The tokens of all of the text, where the stream has each of them.
    pub(super) fn ids_of_all(&self) -> Option<&[u32]> {
        (self.spelled && self.counted == Some(self.ids.len() as u64)).then_some(&*self.ids)
    }

    /// Whether the client has no token of the answer, but for the head of it.
    pub(crate) fn is_blank(&self) -> bool {
        let begun = self.stage == Stage::Going && self.frame.is_some();
        begun && self.text.is_empty() && !self.withholds && self.counted.unwrap_or(0) == 0
    }

    /// The voice in which a blank one is begun anew.
    pub(crate) fn anew(self) -> Option<Voice> {
        Voice::anew(self.kind, self.frame)
    }

    /// Whether there are tokens whose text the client does not have.
    pub(super) fn withholds(&self) -> bool {
        self.withholds
    }

    /// Whole events, as they passed.
    pub(crate) fn feed(&mut self, whole: &[u8]) {
        let mut rest = whole;
        while self.lost.is_none() && !rest.is_empty() {
            let Some(end) = BLANK.find(rest) else {
                // The end of another server's lines.
                return self.lose("its stream is not written as llama-server writes one");
            };
            let (event, behind) = rest.split_at(end);
            rest = &behind[2..];
            if event.is_empty() || event.starts_with(b":") {
                continue;
            }
            if let Err(why) = self.event(event) {
                self.lose(why);
            }
        }
    }

    fn event(&mut self, event: &[u8]) -> Result<(), &'static str> {
        if let Some(mould) = self.mould.as_ref().filter(|_| self.stage == Stage::Going)
            && let Some(quoted) = mould.text(event)
        {
            return match text(quoted) {
                Some(text) if text.is_empty() => {
                    self.withholds = self.kind == Kind::Text;
                    Ok(())
                }
                Some(text) => self.piece(&text),
                None => Err("its text cannot be read"),
            };
        }
        let Some(data) = event.strip_prefix(b"data: ").filter(|data| !data.contains(&b'\n')) else {
            return Err("its events have names");
        };
        if data == b"[DONE]" {
            self.stage = Stage::Done;
            return Ok(());
        }
        let Ok(Value::Object(chunk)) = serde_json::from_slice(data) else {
            return Err("an event is no JSON object");
        };
        if chunk.get("error").is_some_and(|error| !error.is_null()) {
            return Err("its server reported an error");
        }
        if self.stage != Stage::Going && self.kind == Kind::Native {
            return Err("something follows its last event");
        }
        let text = match self.kind {
            Kind::Native => self.native(&chunk)?,
            _ => self.choice(&chunk)?,
        };
        if !text.is_empty() {
            self.piece(&text)?;
            if self.kind != Kind::Native && self.stage == Stage::Going {
                self.mould = Mould::of(event, &text);
            }
        }
        if self.frame.is_none() {
            self.frame = Some(chunk);
        }
        Ok(())
    }

    /// An event in llama-server's own dialect.
    fn native(&mut self, chunk: &Map<String, Value>) -> Result<String, &'static str> {
        if chunk.contains_key("completion_probabilities") {
            return Err("it has probabilities");
        }
        if chunk.get("index").and_then(Value::as_u64).is_some_and(|index| index > 0) {
            return Err("there are several answers");
        }
        let Some(Value::String(text)) = chunk.get("content") else { return Err("an event has no text") };
        if chunk.get("stop") == Some(&Value::Bool(true)) {
            self.stage = Stage::Done;
        } else if !is_progress(chunk) {
            self.tokens(chunk, text.is_empty());
        }
        Ok(text.clone())
    }

    /// The tokens of an event. One whose tokens are not told, or not all of them (the bytes of one character come with the last
    /// one), is a gap behind which no list of them is whole again, whatever it counts.
    fn tokens(&mut self, chunk: &Map<String, Value>, is_silent: bool) {
        let counted = chunk.get("tokens_predicted").and_then(Value::as_u64);
        let told = chunk.get("tokens").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let grown = counted.and_then(|counted| counted.checked_sub(self.counted.unwrap_or(0)));
        if grown == Some(told.len() as u64) {
            self.ids.extend(told.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()));
        } else {
            (self.spelled, self.ids) = (false, Vec::new());
        }
        self.withholds = is_silent && (!told.is_empty() || grown.is_some_and(|grown| grown > 0));
        self.counted = counted;
    }

    /// An event in `OpenAI`'s dialect.
    fn choice(&mut self, chunk: &Map<String, Value>) -> Result<String, &'static str> {
        if chunk.contains_key("__verbose") {
            return Err("it tells what debugging needs");
        }
        let counted = chunk.get("usage").is_some_and(Value::is_object);
        let Some(Value::Array(choices)) = chunk.get("choices") else { return Err("an event has no choices") };
        let choice = match &choices[..] {
            [] => {
                if let Stage::Finished { counted: before } = &mut self.stage {
                    *before |= counted;
                }
                return Ok(String::new());
            }
            [Value::Object(choice)] => choice,
            _ => return Err("there are several answers"),
        };
        if choice.get("index").and_then(Value::as_u64).is_some_and(|index| index > 0) {
            return Err("there are several answers");
        }
        if choice.get("logprobs").is_some_and(|told| !told.is_null()) {
            return Err("it has probabilities");
        }
        let text = match self.kind {
            Kind::Chat => delta(choice.get("delta"))?,
            _ => match choice.get("text") {
                Some(Value::String(text)) => text.clone(),
                _ => return Err("an event has no text"),
            },
        };
        if choice.get("finish_reason").is_some_and(|reason| !reason.is_null()) {
            self.stage = Stage::Finished { counted };
        } else if self.stage != Stage::Going {
            return Err("something follows its last event");
        } else if self.kind == Kind::Text && !is_progress(chunk) {
            self.withholds = text.is_empty();
        }
        Ok(text)
    }

    fn piece(&mut self, text: &str) -> Result<(), &'static str> {
        self.withholds = false;
        let held =
            self.text.len() + text.len() + (self.ends.len() + 1) * PER_PIECE + self.ids.len() * PER_TOKEN;
        if held > self.limit || u32::try_from(held).is_err() {
            return Err("it is longer than is kept (`internal.upstream.continue_bytes`)");
        }
        self.text.push_str(text);
        self.ends.push(u32::try_from(self.text.len()).unwrap_or(u32::MAX));
        Ok(())
    }
}

/// Whether an event tells how much of the prompt is evaluated.
fn is_progress(chunk: &Map<String, Value>) -> bool {
    chunk.get("prompt_progress").is_some_and(|progress| !progress.is_null())
}

/// The text that a chunk of a chat adds. What is no text (a call, reasoning) is not continued.
fn delta(delta: Option<&Value>) -> Result<String, &'static str> {
    let Some(Value::Object(delta)) = delta else { return Err("an event has no delta") };
    let mut text = String::new();
    for (name, value) in delta {
        match (name.as_str(), value) {
            ("role", _) | (_, Value::Null) => {}
            ("content", Value::String(content)) => text.push_str(content),
            ("reasoning_content", _) => return Err("it has reasoning apart from its text"),
            ("tool_calls", _) => return Err("it calls a tool"),
            _ => return Err("it has more than text"),
        }
    }
    Ok(text)
}

impl Mould {
    /// Of a chunk with this text, if that stands in it once.
    fn of(event: &[u8], text: &str) -> Option<Self> {
        let quoted = serde_json::to_string(text).ok()?;
        let mut found = memchr::memmem::find_iter(event, &quoted);
        let (Some(at), None) = (found.next(), found.next()) else { return None };
        if ![&b"\"content\":"[..], b"\"text\":"].iter().any(|key| event[..at].ends_with(key)) {
            return None;
        }
        let (from, to) = (at + 1, at + quoted.len() - 1);
        Some(Self { before: event[..from].into(), behind: event[to..].into() })
    }

    /// What stands in its place, quotes included, if this is the same chunk with another text.
    fn text<'a>(&self, event: &'a [u8]) -> Option<&'a [u8]> {
        let (before, behind) = (self.before.len(), self.behind.len());
        if event.len() < before + behind || !event.starts_with(&self.before) || !event.ends_with(&self.behind)
        {
            return None;
        }
        let inner = &event[before..event.len() - behind];
        ends_with_itself(inner).then(|| &event[before - 1..=event.len() - behind])
    }
}

/// Whether no quote in these bytes of a JSON text ends it, nor makes the quote behind them part of it.
fn ends_with_itself(inner: &[u8]) -> bool {
    let is_escaped = |at: usize| inner[..at].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1;
    memchr::memchr_iter(b'"', inner).all(is_escaped) && !is_escaped(inner.len())
}

/// What a JSON text says.
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
