//! Continues a stream by sending the same request to another server. The client gets the part of the second
//! answer after the text that it has. Pure.
//!
//! ```text
//!   the client has:   reasoning "so" | content "Hel"
//!   the other says:   reasoning "so" | content "He" "llo" " you" | end
//!   the client gets:                                 "lo" " you" | end      under the names that it knows
//! ```
//!
//! The client ends up with the complete answer of one server, including grammars, tools and reasoning. If the
//! second answer differs from the client's text, the stream ends with an error, so nothing has to be known
//! about either server. This method needs a request whose answer is the same each time: see [`may_repeat`].

use bytes::Bytes;
use serde_json::{Map, Value, json};
use warden_policies::WorkDone;

use super::first::FirstServer;
use super::reading::{self, AnswerStep, EventReading, is_progress};
use super::request::check_prompt;
use super::said::{AnswerItem, ChannelKind, ContentComparison, KnownPart};
use super::transcript::AnswerTranscript;
use super::voice::{DONE, MismatchReason, set_member, set_shared_members, write_event};
use crate::answer::AnswerFormat;

const DIFFERENT_ANSWER: MismatchReason =
    "asked for the same again, the process that follows says something else";

/// Like [`DIFFERENT_ANSWER`], after "sent once more, ".
pub(super) const OTHER_ANSWER: &str = "the process that follows says something else";

/// Members with identifiers, which differ in the second answer.
const ID_MEMBERS: [&str; 3] = ["id", "item_id", "call_id"];

/// State of an answer that another server computes from its beginning.
#[derive(Debug)]
pub(crate) struct RepeatTranslator {
    kind: AnswerFormat,
    frame: Map<String, Value>,
    /// The client's part of the answer, without `frame` and the content in `compared`.
    heard: Box<AnswerTranscript>,
    compared: ContentComparison,
    /// Identifiers in the second answer, each with the identifier that the client has instead.
    names: Vec<(Box<str>, Box<str>)>,
    /// Token count of the second answer so far, and the number of its events with that count.
    other_count: (u64, u64),
    /// Last sequence number that the client has, on routes that number their events.
    pub(super) sequence: Option<u64>,
    /// Correction of the counters, if the second server's prompt contained the beginning of the answer.
    shift: Option<PromptShift>,
    /// The client's thought, which a template may have changed at its end.
    thought: Option<Box<str>>,
    /// Work for the part of the answer that the client has; counted even if the rest never arrives.
    paid: WorkDone,
    /// Server that began the answer, if another method may continue it after a different second answer.
    first: Option<FirstServer>,
    pub(super) is_ended: bool,
}

/// The part of an answer that the client has, the work for it, and the server that began it.
pub(crate) type UnrepeatedAnswer = (AnswerTranscript, WorkDone, FirstServer);

/// Correction of the counters of an answer whose beginning was in the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PromptShift {
    /// Number of the answer's tokens in the prompt.
    pub(super) tokens: u64,
    /// Number of prompt tokens that the preparing requests evaluated.
    pub(super) evaluated: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SamplingRepeat {
    /// The request itself makes the answer the same each time.
    Same,
    /// The server's default settings decide whether the answer is the same.
    Default,
}

const RANDOM_ANSWER: &str = "another answer would be drawn, with a temperature and no seed";

impl SamplingRepeat {
    /// Checks that the answer is the same each time. `is_greedy` is the server's default, if known.
    pub(super) fn check_repeats(self, is_greedy: Option<bool>) -> Result<(), String> {
        match (self, is_greedy) {
            (Self::Default, Some(false)) => Err(RANDOM_ANSWER.to_owned()),
            _ => Ok(()),
        }
    }
}

/// Decides from a request whether its answer is the same each time.
pub(super) fn may_repeat(kind: AnswerFormat, body: &[u8]) -> Result<SamplingRepeat, String> {
    let Ok(Value::Object(body)) = serde_json::from_slice(body) else {
        return Err("its request is no JSON object".to_owned());
    };
    let member = |name: &str| body.get(name).filter(|value| !value.is_null());
    let mirostat = member("mirostat").and_then(Value::as_u64).is_some_and(|mirostat| mirostat > 0);
    let top_k = member("top_k").and_then(Value::as_u64);
    let temperature = member("temperature").and_then(Value::as_f64);
    let is_greedy =
        !mirostat && (temperature.is_some_and(|temperature| temperature <= 0.0) || top_k == Some(1));
    // The seeds -1 and u32::MAX mean a random seed. llama-server's messages route ignores a seed.
    let seed = member("seed").and_then(Value::as_u64);
    let has_seed = kind != AnswerFormat::Messages && seed.is_some_and(|seed| seed < u64::from(u32::MAX));
    match (is_greedy || has_seed, member("temperature")) {
        (true, _) => Ok(SamplingRepeat::Same),
        // The server's defaults may be random. The comparison then finds that the second answer differs.
        (false, None) if !mirostat => Ok(SamplingRepeat::Default),
        _ => Err(RANDOM_ANSWER.to_owned()),
    }
}

/// Checks for a single answer: the end of the first of several would seem to end the stream.
pub(super) fn check_single_answer(kind: AnswerFormat, body: &[u8]) -> Result<(), String> {
    let Ok(Value::Object(body)) = serde_json::from_slice(body) else {
        return Err("its request is no JSON object".to_owned());
    };
    let member = |name: &str| body.get(name).filter(|value| !value.is_null());
    let is_more_than = |name: &str, most: u64| {
        member(name).is_some_and(|value| value.as_u64().is_none_or(|number| number > most) && *value != false)
    };
    if let Some(name) = ["n", "best_of", "n_cmpl"].into_iter().find(|name| is_more_than(name, 1)) {
        return Err(format!("`{name}` asks for several answers"));
    }
    if let Some(name) =
        ["logprobs", "top_logprobs", "n_probs", "verbose"].into_iter().find(|name| is_more_than(name, 0))
    {
        return Err(format!("`{name}` asks for more than the answer"));
    }
    if matches!(kind, AnswerFormat::Text | AnswerFormat::Native) && member("prompt").is_some() {
        check_prompt(member("prompt"))?;
    }
    let tells = |name: &str| match member("response_fields") {
        Some(Value::Array(fields)) => fields.iter().any(|field| field == name),
        _ => true,
    };
    if kind == AnswerFormat::Native && !(tells("stop") && tells("content")) {
        return Err("`response_fields` leave out what shows its end".to_owned());
    }
    Ok(())
}

impl RepeatTranslator {
    /// Starts from a transcript of the client's events; `None` if there is no event.
    pub(crate) fn from_transcript(heard: AnswerTranscript, paid: WorkDone) -> Option<Self> {
        let mut heard = heard;
        Some(Self {
            kind: heard.kind,
            frame: heard.frame.take()?,
            compared: ContentComparison::from_content(std::mem::take(&mut heard.said)),
            names: Vec::new(),
            other_count: (0, 0),
            sequence: heard.sequence,
            heard: Box::new(heard),
            shift: None,
            thought: None,
            paid,
            first: None,
            is_ended: false,
        })
    }

    /// Lets another method continue the answer if the second answer differs.
    pub(super) fn or_otherwise(mut self, first: Option<FirstServer>) -> Self {
        self.first = first;
        self
    }

    /// Returns whether another method may continue the answer: the client has nothing of the second answer.
    pub(crate) fn may_continue_otherwise(&self) -> bool {
        self.first.is_some() && self.is_catching_up()
    }

    /// Returns what another method needs. Only the first call returns it.
    pub(super) fn take_answer(&mut self) -> Option<UnrepeatedAnswer> {
        if !self.may_continue_otherwise() {
            return None;
        }
        let first = self.first.take()?;
        let spent = AnswerTranscript::for_stream(self.kind, 0);
        let mut heard = std::mem::replace(&mut *self.heard, spent);
        heard.said = self.compared.take_content();
        heard.frame = Some(std::mem::take(&mut self.frame));
        Some((heard, self.paid, first))
    }

    /// Like [`Self::from_transcript`], for a second answer whose beginning was in the prompt.
    pub(super) fn after_prefix(heard: AnswerTranscript, paid: WorkDone, shift: PromptShift) -> Option<Self> {
        let thought = heard.beginning().map(|beginning| beginning.reasoning.into());
        let mut repeat = Self::from_transcript(heard, paid)?;
        (repeat.shift, repeat.thought) = (Some(shift), thought);
        Some(repeat)
    }

    /// Returns whether the second answer still repeats text that the client has.
    pub(crate) fn is_catching_up(&self) -> bool {
        !self.compared.has_passed_all()
    }

    /// Returns the work for the client's answer; while the second answer catches up, for the first.
    pub(crate) fn work(&self, all: WorkDone) -> WorkDone {
        if self.is_catching_up() {
            return self.paid;
        }
        let Some(PromptShift { tokens, evaluated }) = self.shift else { return all };
        WorkDone { prompt_tokens: evaluated, output_tokens: all.output_tokens + tokens, ..all }
    }

    /// Translates whole events of the second answer into the events that the client lacks.
    pub(crate) fn translate(&mut self, whole: &[u8]) -> Result<Bytes, MismatchReason> {
        let mut out = Vec::new();
        let mut name = None;
        for line in whole.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end) {
            if line.starts_with(b":") {
                out.extend_from_slice(line);
                out.extend_from_slice(b"\n\n");
            } else if let Some(own) = line.strip_prefix(b"event: ") {
                name = Some(own);
            } else if !self.is_ended
                && let Some(data) = line.strip_prefix(b"data: ")
            {
                self.translate_event(&mut out, name.take(), data)?;
            }
        }
        Ok(out.into())
    }

    fn translate_event(
        &mut self,
        out: &mut Vec<u8>,
        name: Option<&[u8]>,
        data: &[u8],
    ) -> Result<(), MismatchReason> {
        if data == b"[DONE]" {
            self.is_ended = true;
            if self.is_catching_up() {
                return Err(DIFFERENT_ANSWER);
            }
            out.extend_from_slice(DONE);
            return Ok(());
        }
        let Ok(Value::Object(mut event)) = serde_json::from_slice(data) else {
            return Err("its continuation is not written as llama-server writes one");
        };
        let is_error = event.get("error").is_some_and(|error| !error.is_null());
        if is_error || event.get("type").is_some_and(|kind| kind == "error" || kind == "response.failed") {
            if self.may_continue_otherwise() {
                return Err(DIFFERENT_ANSWER);
            }
            // Pass on an error event with the server's text.
            self.is_ended = true;
            self.write_event(out, name, event);
            return Ok(());
        }
        let was_over = self.compared.has_passed_all();
        let EventReading { items, step } = reading::read_event(self.kind, &event)?;
        let has_items = !items.is_empty();
        let is_new = self.remove_known(items, &mut event)?;
        let ends = step == AnswerStep::Done;
        if ends && self.is_catching_up() {
            return Err(DIFFERENT_ANSWER);
        }
        let is_said = match self.kind {
            AnswerFormat::Native => ends || self.has_new_tokens(&event, is_new, was_over)?,
            AnswerFormat::Chat if was_over && !is_new => is_news_to_chat(&mut event, step),
            // The client already has the event that begins the response.
            AnswerFormat::Responses if step == AnswerStep::Continues && !has_items => false,
            _ => is_new || was_over,
        };
        self.is_ended |= ends;
        if !self.is_catching_up() {
            self.compared.forget();
            if self.first.take().is_some() {
                self.heard.free_pieces();
            }
        }
        if is_said {
            self.write_event(out, name, event);
        }
        Ok(())
    }

    /// Removes from an event the content that the client has. Returns whether any content is left.
    fn remove_known(
        &mut self,
        items: Vec<AnswerItem>,
        event: &mut Map<String, Value>,
    ) -> Result<bool, MismatchReason> {
        let mut is_new = false;
        for item in items {
            match item {
                AnswerItem::Text(_, text) if text.is_empty() => {}
                AnswerItem::Text(channel, text) => match self
                    .compared
                    .compare_text(channel, &text)
                    .map_err(|_| DIFFERENT_ANSWER)?
                {
                    KnownPart::Nothing => is_new = true,
                    KnownPart::All => cut_text(self.kind, event, channel.kind, ""),
                    KnownPart::Part(_) if self.kind == AnswerFormat::Native => return Err(DIFFERENT_ANSWER),
                    KnownPart::Part(bytes) => {
                        cut_text(self.kind, event, channel.kind, text.get(bytes..).ok_or(DIFFERENT_ANSWER)?);
                        is_new = true;
                    }
                },
                AnswerItem::Mark(mark, names) => {
                    match self.compared.compare_mark(&mark, &names).map_err(|_| DIFFERENT_ANSWER)? {
                        None => is_new = true,
                        Some(own) => {
                            let names = names.into_iter().map(String::into_boxed_str);
                            self.names.extend(names.zip(own).filter(|(other, own)| other != own));
                            if self.kind == AnswerFormat::Chat {
                                strip_call_head(event);
                            }
                        }
                    }
                }
            }
        }
        Ok(is_new)
    }

    /// Returns whether an event, whose tokens cannot be split, has tokens that the client lacks.
    fn has_new_tokens(
        &mut self,
        event: &Map<String, Value>,
        is_new: bool,
        was_over: bool,
    ) -> Result<bool, MismatchReason> {
        let counted =
            if is_progress(event) { None } else { event.get("tokens_predicted").and_then(Value::as_u64) };
        let is_had = counted.is_some_and(|counted| {
            self.other_count =
                if self.other_count.0 == counted { (counted, self.other_count.1 + 1) } else { (counted, 1) };
            // Tokens drafted together share a count.
            let own = &self.heard.tokens;
            let last = own.counted.unwrap_or(0);
            counted < last || (counted == last && self.other_count.1 <= own.with_count)
        });
        match (is_new, is_had) {
            (true, true) => Err(DIFFERENT_ANSWER),
            (is_new, is_had) => Ok(is_new || (was_over && !is_had)),
        }
    }

    /// Writes an event with the identifiers that the client has.
    fn write_event(&mut self, out: &mut Vec<u8>, name: Option<&[u8]>, mut event: Map<String, Value>) {
        if matches!(self.kind, AnswerFormat::Chat | AnswerFormat::Text) && !event.contains_key("error") {
            set_shared_members(&mut event, &self.frame);
            let choice = event.get_mut("choices").and_then(|choices| choices.get_mut(0));
            if let Some(Value::Object(delta)) = choice.and_then(|choice| choice.get_mut("delta")) {
                delta.shift_remove("role");
            }
        }
        if let Some(PromptShift { tokens, .. }) = self.shift {
            shift_counts(&mut event, tokens);
            if let Some(Value::Object(response)) = event.get_mut("response") {
                shift_counts(response, tokens);
                self.restore_thought(response);
            }
        }
        if !self.names.is_empty() {
            event.iter_mut().for_each(|(member, value)| self.rename_ids(member, value));
        }
        if let (Some(last), true) = (self.sequence, event.contains_key("sequence_number")) {
            self.sequence = Some(last + 1);
            set_member(&mut event, "sequence_number", json!(last + 1));
        }
        if let Some(name) = name {
            out.extend_from_slice(b"event: ");
            out.extend_from_slice(name);
            out.push(b'\n');
        }
        write_event(out, &event);
    }

    /// Writes the client's own blanks at the end of a thought in an event that repeats the whole answer.
    fn restore_thought(&self, response: &mut Map<String, Value>) {
        let Some(own) = &self.thought else { return };
        let Some(Value::Array(items)) = response.get_mut("output") else { return };
        for item in items.iter_mut().filter(|item| item["type"] == "reasoning") {
            if let Some(Value::String(text)) = item.pointer_mut("/content/0/text")
                && text.trim_ascii_end() == own.trim_ascii_end()
            {
                own.as_ref().clone_into(text);
            }
        }
    }

    fn rename_ids(&self, member: &str, value: &mut Value) {
        match value {
            Value::String(text) if ID_MEMBERS.contains(&member) => {
                if let Some((_, own)) = self.names.iter().find(|(other, _)| **other == **text) {
                    *text = own.to_string();
                }
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.rename_ids(member, item)),
            Value::Object(members) => {
                members.iter_mut().for_each(|(member, value)| self.rename_ids(member, value));
            }
            _ => {}
        }
    }
}

/// Returns whether a chat event without text has more than the role, which the client has.
fn is_news_to_chat(event: &mut Map<String, Value>, step: AnswerStep) -> bool {
    let delta = event.get_mut("choices").and_then(|choices| choices.get_mut(0)?.get_mut("delta"));
    let Some(Value::Object(delta)) = delta else { return true };
    let had_role = delta.shift_remove("role").is_some();
    step != AnswerStep::Continues || !had_role || is_progress(event)
}

fn cut_text(kind: AnswerFormat, event: &mut Map<String, Value>, what: ChannelKind, rest: &str) {
    let at = |event: &mut Map<String, Value>, path: &[&str]| -> Option<()> {
        let (first, path) = path.split_first()?;
        let mut value = event.get_mut(*first)?;
        for member in path {
            value = match value {
                Value::Array(items) => items.get_mut(member.parse::<usize>().ok()?)?,
                value => value.get_mut(*member)?,
            };
        }
        *value = Value::String(rest.to_owned());
        Some(())
    };
    let path: &[&str] = match (kind, what) {
        (AnswerFormat::Native, _) => &["content"],
        (AnswerFormat::Text, _) => &["choices", "0", "text"],
        (AnswerFormat::Chat, ChannelKind::Content) => &["choices", "0", "delta", "content"],
        (AnswerFormat::Chat, ChannelKind::Reasoning) => &["choices", "0", "delta", "reasoning_content"],
        (AnswerFormat::Chat, ChannelKind::Arguments) => {
            &["choices", "0", "delta", "tool_calls", "0", "function", "arguments"]
        }
        (AnswerFormat::Messages, ChannelKind::Content) => &["delta", "text"],
        (AnswerFormat::Messages, ChannelKind::Reasoning) => &["delta", "thinking"],
        (AnswerFormat::Messages, ChannelKind::Arguments) => &["delta", "partial_json"],
        (AnswerFormat::Responses, _) => &["delta"],
    };
    at(event, path);
}

/// Moves `tokens` tokens from the prompt's count to the answer's count.
fn shift_counts(of: &mut Map<String, Value>, tokens: u64) {
    let known = |of: &Map<String, Value>, name: &str| of.get(name).and_then(Value::as_u64);
    if let Some(Value::Object(timings)) = of.get_mut("timings")
        && let (Some(cached), Some(evaluated)) = (known(timings, "cache_n"), known(timings, "prompt_n"))
    {
        let prompt = (cached + evaluated).saturating_sub(tokens);
        let cached = cached.min(prompt);
        set_member(timings, "cache_n", json!(cached));
        set_member(timings, "prompt_n", json!(prompt - cached));
        if let Some(predicted) = known(timings, "predicted_n") {
            set_member(timings, "predicted_n", json!(predicted + tokens));
        }
    }
    let Some(Value::Object(usage)) = of.get_mut("usage") else { return };
    // The messages route does not count cached tokens as prompt tokens.
    let apart = known(usage, "cache_read_input_tokens");
    for name in ["prompt_tokens", "input_tokens"] {
        let Some(counted) = known(usage, name) else { continue };
        let prompt = (counted + apart.unwrap_or(0)).saturating_sub(tokens);
        let cached = apart.map(|cached| cached.min(prompt));
        set_member(usage, name, json!(prompt - cached.unwrap_or(0)));
        if let Some(cached) = cached {
            set_member(usage, "cache_read_input_tokens", json!(cached));
        }
        for details in ["prompt_tokens_details", "input_tokens_details"] {
            if let Some(Value::Object(details)) = usage.get_mut(details)
                && let Some(cached) = known(details, "cached_tokens")
            {
                set_member(details, "cached_tokens", json!(cached.min(prompt)));
            }
        }
    }
    for name in ["completion_tokens", "output_tokens"] {
        if let Some(counted) = known(usage, name) {
            set_member(usage, name, json!(counted + tokens));
        }
    }
}

/// Removes the beginning of a tool call, which the client has, from a chunk.
fn strip_call_head(event: &mut Map<String, Value>) {
    let call = event.get_mut("choices").and_then(|choices| choices.get_mut(0)?.get_mut("delta"));
    let call = call.and_then(|delta| delta.get_mut("tool_calls")?.get_mut(0));
    if let Some(Value::Object(call)) = call {
        call.shift_remove("id");
        call.shift_remove("type");
        if let Some(Value::Object(function)) = call.get_mut("function") {
            function.shift_remove("name");
        }
    }
}

#[cfg(test)]
#[path = "repeat_tests.rs"]
mod tests;
