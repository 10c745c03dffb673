//! A request without what it says: texts become other texts of the same length, pictures become ours of the same size,
//! sounds become ours, names and everything that is not known to be harmless is dropped.
//!
//! What decides about memory stays: roles, lengths, sizes, numbers of images, sampling, and what requests have in common.
//! The same text becomes the same other text, so a conversation still shares its beginning with itself; the keys
//! of the hash that decides are drawn at every start and never written, which keeps anybody from trying which text it was.

use std::cell::Cell;
use std::hash::{BuildHasher as _, RandomState};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use crate::workload::{Words, picture, sound};

/// Redacts requests of one run.
#[derive(Debug, Default)]
pub struct Redactor {
    keys: RandomState,
    /// Bytes that the line under way may still make.
    left: Cell<usize>,
}

/// Fields with a number or a truth value that are kept.
const PLAIN: [&str; 31] = [
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "n_predict",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "seed",
    "stream",
    "n",
    "cache_prompt",
    "id_slot",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
    "repeat_last_n",
    "mirostat",
    "logprobs",
    "top_logprobs",
    "n_probs",
    "dimensions",
    "include_usage",
    "timings_per_token",
    "return_tokens",
    "return_progress",
    "parallel_tool_calls",
    "add_generation_prompt",
    "continue_final_message",
];

/// Fields whose text is kept if it is one of [`WORDS`].
const NAMED: [&str; 6] = ["role", "type", "encoding_format", "tool_choice", "format", "reasoning_effort"];
const WORDS: [&str; 26] = [
    "user",
    "assistant",
    "system",
    "tool",
    "developer",
    "text",
    "input_text",
    "output_text",
    "image_url",
    "input_image",
    "image",
    "input_audio",
    "function",
    "tool_calls",
    "json_object",
    "float",
    "base64",
    "auto",
    "none",
    "required",
    "wav",
    "mp3",
    "low",
    "medium",
    "high",
    "message",
];

/// Fields with a text, or with something that has texts in it.
const TEXTS: [&str; 9] = [
    "content",
    "text",
    "prompt",
    "input",
    "instructions",
    "system",
    "reasoning_content",
    "arguments",
    "query",
];
/// Fields that are gone into.
const OPEN: [&str; 6] = ["messages", "stream_options", "input_audio", "documents", "tool_calls", "function"];

/// The size of pictures whose own size cannot be read.
const USUAL: (u32, u32) = (640, 480);
/// Nobody sends a larger one; making it would take as long as somebody wants.
const LARGEST: u32 = 4096;
/// Bytes of pictures, sounds and tools that one line makes at most; a request may have 8 MiB, and pictures are given in few.
const MADE: usize = 32 << 20;
/// The first token that stands for others: those before it are the beginning, the end and the unknown.
const FIRST: u64 = 3;

impl Redactor {
    /// With keys of its own, drawn from the system and kept nowhere.
    pub fn new() -> Self {
        Self { keys: RandomState::new(), left: Cell::new(0) }
    }

    /// A line for a recording; `None` for what is no JSON object, and so cannot be redacted, and for what would become too
    /// large: a picture takes its sender a few bytes to claim, and us the whole of it to make.
    pub fn line(&self, method: &str, path: &str, body: &[u8]) -> Option<String> {
        let body: Value = serde_json::from_slice(body).ok()?;
        self.left.set(MADE);
        let body = self.fields(body.as_object()?);
        if self.left.get() == 0 {
            return None;
        }
        // What stands after `?` may name somebody.
        let path = path.split('?').next().unwrap_or_default();
        Some(json!({ "method": method, "path": path, "body": body }).to_string())
    }

    fn fields(&self, fields: &Map<String, Value>) -> Value {
        let mut kept = Map::new();
        for (name, value) in fields {
            if let Some(value) = self.field(name, value) {
                kept.insert(name.clone(), value);
            }
        }
        Value::Object(kept)
    }

    fn field(&self, name: &str, value: &Value) -> Option<Value> {
        match (name, value) {
            ("image_url" | "url", _) => Some(self.image(name, value)),
            ("data", Value::String(data)) => Some(Value::String(self.audio(data))),
            ("tools", Value::Array(tools)) => {
                Some(tools.iter().enumerate().map(|(n, tool)| self.tool(n, tool)).collect())
            }
            (_, Value::Bool(_) | Value::Number(_)) if PLAIN.contains(&name) => Some(value.clone()),
            (_, Value::String(text)) if NAMED.contains(&name) => {
                WORDS.contains(&text.as_str()).then(|| value.clone())
            }
            _ if TEXTS.contains(&name) => Some(self.inside(value)),
            (_, Value::Array(_) | Value::Object(_)) if OPEN.contains(&name) => Some(self.inside(value)),
            _ => None,
        }
    }

    /// A text, a list of texts or parts, an object.
    fn inside(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.text(text)),
            Value::Array(items) if !items.is_empty() && items.iter().all(Value::is_number) => {
                self.tokens(items)
            }
            Value::Array(items) => items.iter().map(|item| self.inside(item)).collect(),
            Value::Object(fields) => self.fields(fields),
            Value::Number(_) => json!(FIRST),
            Value::Bool(_) | Value::Null => value.clone(),
        }
    }

    /// As many tokens, of the first thousand, which every vocabulary has. Each hangs on all before it, so that lists still
    /// share their beginnings, and no token has a stand-in of its own that could be guessed by how often it comes.
    fn tokens(&self, items: &[Value]) -> Value {
        let mut before = 0;
        let next = |item: &Value| {
            before = self.keys.hash_one((before, item.as_u64()));
            json!(before % 1000 + FIRST)
        };
        items.iter().map(next).collect()
    }

    /// Takes `bytes` from what a line may make; false if there are not so many.
    fn pay(&self, bytes: usize) -> bool {
        let left = self.left.get().saturating_sub(bytes);
        self.left.set(left);
        left > 0
    }

    /// A tool as long as this one, that does nothing.
    fn tool(&self, number: usize, tool: &Value) -> Value {
        let long = tool["function"].to_string();
        if !self.pay(long.len().saturating_add(256)) {
            return Value::Null;
        }
        json!({ "type": "function", "function": {
            "name": format!("tool_{number}"),
            "description": self.text(&long),
            "parameters": { "type": "object", "properties": {} },
        } })
    }

    /// Another text of the same length.
    fn text(&self, text: &str) -> String {
        let length = text.chars().count();
        if length == 0 {
            return String::new();
        }
        // Words have five letters and a space on average; cut to measure.
        let words =
            Words::new(1.0).text(self.seed(text.as_bytes()), u64::try_from(length / 3 + 8).unwrap_or(8));
        words.chars().take(length).collect()
    }

    /// A number that only tells whether two texts are the same: a keyed hash, so that who knows one text cannot find the keys
    /// and try others.
    fn seed(&self, bytes: &[u8]) -> u64 {
        self.keys.hash_one(bytes)
    }

    /// Our picture in the place of one, in the form in which it came.
    fn image(&self, name: &str, value: &Value) -> Value {
        let own = |url: &str| {
            let size = url.split_once(";base64,").and_then(|(_, data)| size(data)).unwrap_or(USUAL);
            let (width, height) = (size.0.clamp(1, LARGEST), size.1.clamp(1, LARGEST));
            // A byte for each pixel, and what belongs to a file.
            let pixels = usize::try_from(width * height).unwrap_or(usize::MAX);
            if !self.pay(pixels.saturating_add(1024)) {
                return Value::Null;
            }
            let png = picture::png(width, height).unwrap_or_default();
            Value::String(format!("data:image/png;base64,{}", STANDARD.encode(png)))
        };
        match value {
            Value::String(url) => own(url),
            Value::Object(fields) if name == "image_url" => {
                json!({ "url": own(fields.get("url").and_then(Value::as_str).unwrap_or_default()) })
            }
            _ => Value::Null,
        }
    }

    /// Our sound in the place of one: as long, as far as its bytes tell (16,000 samples a second, 16 bits).
    fn audio(&self, data: &str) -> String {
        let seconds = u32::try_from(data.len() / 4 * 3 / 32_000).unwrap_or(1).clamp(1, 60);
        let bytes = usize::try_from(seconds).unwrap_or(usize::MAX).saturating_mul(43_000);
        if self.pay(bytes) { STANDARD.encode(sound::wav(seconds)) } else { String::new() }
    }
}

/// Width and height of a picture in base64, from the beginning of its file: PNG and JPEG.
fn size(data: &str) -> Option<(u32, u32)> {
    // A JPEG may have a preview in front of its sizes.
    const ENOUGH: usize = 256 << 10;
    let head = data.get(..data.len().min(ENOUGH) / 4 * 4)?;
    let bytes = STANDARD.decode(head).ok()?;
    if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
        let number = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        return Some((number(16)?, number(20)?));
    }
    if !bytes.starts_with(&[0xFF, 0xD8]) {
        return None;
    }
    let mut at = 2;
    loop {
        let pair = |at: usize| Some(u32::from(*bytes.get(at)?) << 8 | u32::from(*bytes.get(at + 1)?));
        let marker = *bytes.get(at + 1)?;
        // Frame headers hold the size; C4, C8 and CC are other things (ITU-T T.81, table B.1).
        if (0xC0..=0xCF).contains(&marker) && ![0xC4, 0xC8, 0xCC].contains(&marker) {
            return Some((pair(at + 7)?, pair(at + 5)?));
        }
        at += 2 + usize::try_from(pair(at + 2)?).ok()?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redacted(body: &Value) -> Value {
        let line = Redactor::new().line("POST", "/v1/chat/completions?who=me", body.to_string().as_bytes());
        serde_json::from_str(&line.unwrap()).unwrap()
    }

    #[test]
    fn nothing_that_was_said_is_left_and_all_that_decides_is() {
        let picture = format!("data:image/png;base64,{}", STANDARD.encode(picture::png(31, 17).unwrap()));
        let body = json!({
            "model": "secret-model", "user": "secret-user", "metadata": { "secret": 1 }, "max_tokens": 32, "stream": true,
            "stop": ["secret"], "secret": 7, "tool_choice": "secret", "stream_options": { "include_usage": true },
            "messages": [
                { "role": "system", "content": "a secret as long as this one", "name": "secret" },
                { "role": "user", "content": [
                    { "type": "text", "text": "secret" },
                    { "type": "image_url", "image_url": { "url": picture, "detail": "secret" } },
                    { "type": "input_audio", "input_audio": { "data": "c2VjcmV0", "format": "wav" } } ] },
                { "role": "assistant", "content": null, "tool_calls": [
                    { "id": "secret", "type": "function", "function": { "name": "secret", "arguments": "{secret}" } } ] },
            ],
            "tools": [{ "type": "function", "function": { "name": "secret", "parameters": { "properties": { "secret": {} } } } }],
        });
        let line = redacted(&body);
        assert!(!line.to_string().contains("secret") && !line.to_string().contains("c2VjcmV0"), "{line}");
        let kept = &line["body"];
        assert_eq!(line["path"], "/v1/chat/completions");
        assert_eq!((&kept["max_tokens"], &kept["stream"]), (&json!(32), &json!(true)));
        assert_eq!(kept["stream_options"], json!({ "include_usage": true }));
        assert_eq!(kept["messages"][0]["role"], "system");
        let length = "a secret as long as this one".len();
        assert_eq!(kept["messages"][0]["content"].as_str().unwrap().len(), length);
        let url = kept["messages"][1]["content"][1]["image_url"]["url"].as_str().unwrap().to_owned();
        assert_eq!(size(url.split_once(";base64,").unwrap().1), Some((31, 17)));
        assert_eq!(kept["tools"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn the_same_text_becomes_the_same_other_text_and_each_run_makes_another() {
        let body =
            json!({ "prompt": "a text that comes again", "input": ["a text that comes again", "another"] });
        let line = redacted(&body);
        assert_eq!(line["body"]["prompt"], line["body"]["input"][0]);
        assert_ne!(line["body"]["prompt"], body["prompt"]);
        let other = Redactor::new().line("POST", "/a", body.to_string().as_bytes()).unwrap();
        assert!(!other.contains(line["body"]["prompt"].as_str().unwrap()));
    }

    #[test]
    fn tokens_become_others_that_hang_on_those_before_them() {
        let line = redacted(&json!({ "prompt": [7, 7, 9], "input": [[7, 7, 8], [9]] }));
        let (all, other) = (&line["body"]["prompt"], &line["body"]["input"][0]);
        assert_eq!((&all[0], &all[1]), (&other[0], &other[1]), "what they begin with stays common");
        assert_eq!(
            (all.as_array().unwrap().len(), line["body"]["input"][1].as_array().unwrap().len()),
            (3, 1)
        );
        assert!(
            all[0] != all[1] || all[2] != line["body"]["input"][1][0],
            "no token has a stand-in of its own: {line}"
        );
    }

    #[test]
    fn a_request_that_would_make_more_than_anybody_sends_is_not_recorded() {
        let part = json!({ "type": "input_audio", "input_audio": { "data": "" } });
        let body = json!({ "messages": [{ "role": "user", "content": vec![part; 100_000] }] }).to_string();
        assert_eq!(Redactor::new().line("POST", "/a", body.as_bytes()), None);
        let huge = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAEAAAABAA";
        let part = json!({ "type": "image_url", "image_url": { "url": huge } });
        let body = json!({ "messages": [{ "role": "user", "content": vec![part; 5000] }] }).to_string();
        assert_eq!(Redactor::new().line("POST", "/a", body.as_bytes()), None);
        assert!(Redactor::new().line("POST", "/a", b"{}").is_some());
    }

    #[test]
    fn what_is_no_object_is_not_recorded_and_a_size_is_read_from_a_jpeg_too() {
        assert_eq!(Redactor::new().line("POST", "/a", b"[1]"), None);
        assert_eq!(Redactor::new().line("POST", "/a", b"text"), None);
        let mut jpeg = vec![0xFF, 0xD8, 0xFF, 0xE0, 0, 4, 0, 0, 0xFF, 0xC0, 0, 11, 8];
        jpeg.extend([0x01, 0xE0, 0x02, 0x80, 1, 0, 0]);
        jpeg.resize(21, 0);
        assert_eq!(size(&STANDARD.encode(jpeg)), Some((640, 480)));
        assert_eq!(size("bm90IGFuIGltYWdl"), None);
    }
}
