//! Scans a JSON body while it is passed on, in pieces of any size: its model, whether it asks for a stream,
//! and its number of images and audio clips. Never changes, copies or delays the body. Checks no syntax,
//! because the backend does.
//!
//! On every valid body the result agrees with a full parser:
//! - `model` and `stream` count only as keys of the outermost object, in any spelling (`"mod\u0065l"`).
//! - The first `model` is used. A backend cannot misread a second one: it serves a single model and ignores
//!   the name.
//! - `stream` is true only if it occurs once, as the literal `true`: the proof that a request may be sent
//!   again relies on it.
//! - An image is a string value `image_url`, `input_image` or `image` of a key `type` at any depth, as in
//!   OpenAI chat, OpenAI responses and Anthropic messages. For an audio clip the value is `input_audio`.

use std::ops::Range;

use crate::body::StringSpelling;

/// Maximum raw length of a compared word: `input_image` with every letter escaped takes 66 bytes.
const MAX_SPELLING_BYTES: usize = 72;
/// Maximum raw length of a model name; file systems and registries have lower limits.
const MAX_MODEL_BYTES: usize = 4096;

/// Compares many bytes at a time without branches, so that the compiler uses vector instructions.
fn find_structural(bytes: &[u8]) -> Option<usize> {
    const AT_A_TIME: usize = 32;
    // `[` and `]` differ from `{` and `}` in one bit.
    let is_one = |byte: u8| byte == b'"' || byte | 0x20 == b'{' || byte | 0x20 == b'}';
    let mut at = 0;
    for some in bytes.chunks(AT_A_TIME) {
        if some.iter().fold(false, |any, byte| any | is_one(*byte)) {
            return some.iter().position(|byte| is_one(*byte)).map(|n| at + n);
        }
        at += some.len();
    }
    None
}

#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(crate) enum ScannedModel {
    #[default]
    Absent,
    Named(String),
    NotText,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
enum ScanState {
    #[default]
    Between,
    Text,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
enum ScanSlot {
    #[default]
    Key,
    Colon,
    Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
enum ScanKey {
    Model,
    Stream,
    #[default]
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
enum TypeKeyState {
    #[default]
    No,
    Seen,
    Colon,
}

impl TypeKeyState {
    fn after_colon(self) -> Self {
        if self == Self::Seen { Self::Colon } else { Self::No }
    }
}

/// Scanner of one body, fed with the body's pieces in order.
#[derive(Debug, Default)]
pub(crate) struct BodyScanner {
    lex: ScanState,
    depth: u32,
    slot: ScanSlot,
    key: ScanKey,
    raw: StringSpelling,
    object: Option<bool>,
    closed: bool,
    names: ModelScan,
    media: MediaScan,
    streams: u32,
    stream_true: bool,
    /// Length of all pieces before the current one.
    before: u64,
}

#[derive(Debug, Default)]
struct ModelScan {
    model: ScannedModel,
    /// Number of `model` keys in the outermost object.
    count: u32,
    /// Byte range of the first model name with its quotes.
    value: Range<u64>,
}

#[derive(Debug, Default)]
struct MediaScan {
    type_key: TypeKeyState,
    data_key: TypeKeyState,
    images: u32,
    audio: u32,
    bytes: u64,
}

impl BodyScanner {
    pub(crate) fn model(&self) -> &ScannedModel {
        &self.names.model
    }

    pub(crate) fn models(&self) -> u32 {
        self.names.count
    }

    pub(crate) fn model_value(&self) -> Option<Range<u64>> {
        matches!(self.names.model, ScannedModel::Named(_)).then(|| self.names.value.clone())
    }

    /// Returns whether the rest of the body can no longer name the model.
    pub(crate) fn settled(&self) -> bool {
        self.names.model != ScannedModel::Absent || self.closed || self.object == Some(false)
    }

    /// Returns whether the body is an object and was read to its end.
    pub(crate) fn is_complete_object(&self) -> bool {
        self.closed && self.object == Some(true)
    }

    /// Returns whether the body asks for a stream; false before its end.
    pub(crate) fn is_stream(&self) -> bool {
        self.is_complete_object() && self.streams == 1 && self.stream_true
    }

    pub(crate) fn images(&self) -> u32 {
        self.media.images
    }

    pub(crate) fn audio(&self) -> u32 {
        self.media.audio
    }

    /// Returns the total length of images and recordings: `data:` URLs, and values of keys named `data`.
    pub(crate) fn media_bytes(&self) -> u64 {
        self.media.bytes
    }

    pub(crate) fn feed(&mut self, piece: &[u8]) {
        let mut at = 0;
        while at < piece.len() && !self.closed && self.object != Some(false) {
            at = match self.lex {
                ScanState::Text => {
                    let (at, ended) = self.raw.read(piece, at);
                    if ended {
                        self.lex = ScanState::Between;
                        self.text_ends(self.before + at as u64);
                    }
                    at
                }
                ScanState::Between => self.between(piece, at),
            };
        }
        self.before += piece.len() as u64;
    }

    fn between(&mut self, piece: &[u8], mut at: usize) -> usize {
        if self.depth > 1
            && self.media.type_key == TypeKeyState::No
            && self.media.data_key == TypeKeyState::No
        {
            // Numbers, literals and commas do not matter here.
            match find_structural(&piece[at..]) {
                Some(skipped) => at += skipped,
                None => return piece.len(),
            }
        }
        let byte = piece[at];
        if matches!(byte, b' ' | b'\t' | b'\r' | b'\n') {
            return at + 1;
        }
        if self.object.is_none() {
            // llama-server's parser skips a byte order mark, too.
            if matches!((self.before + at as u64, byte), (0, 0xEF) | (1, 0xBB) | (2, 0xBF)) {
                return at + 1;
            }
            self.object = Some(byte == b'{');
            if byte == b'{' {
                self.depth = 1;
            }
            return at + 1;
        }
        match byte {
            b'"' => {
                let is_name = self.depth == 1 && self.slot == ScanSlot::Value && self.key == ScanKey::Model;
                self.raw.begin(if is_name { MAX_MODEL_BYTES } else { MAX_SPELLING_BYTES });
                self.lex = ScanState::Text;
                return at + 1;
            }
            b'{' | b'[' => {
                self.begin_value(false);
                self.depth += 1;
            }
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                self.closed = self.depth == 0;
            }
            b':' => {
                if self.depth == 1 && self.slot == ScanSlot::Colon {
                    self.slot = ScanSlot::Value;
                }
                self.media.type_key = self.media.type_key.after_colon();
                self.media.data_key = self.media.data_key.after_colon();
                return at + 1;
            }
            b',' => {
                if self.depth == 1 {
                    self.slot = ScanSlot::Key;
                    self.key = ScanKey::Other;
                }
            }
            first => self.begin_value(first == b't'),
        }
        self.media.type_key = TypeKeyState::No;
        self.media.data_key = TypeKeyState::No;
        at + 1
    }

    /// Handles the first byte of a value in the outermost object that is not a string.
    fn begin_value(&mut self, is_true: bool) {
        if self.depth == 1 && self.slot == ScanSlot::Value {
            match self.key {
                ScanKey::Model if self.names.model == ScannedModel::Absent => {
                    self.names.model = ScannedModel::NotText;
                }
                ScanKey::Stream => {
                    self.streams += 1;
                    self.stream_true = is_true;
                }
                ScanKey::Model | ScanKey::Other => {}
            }
            self.key = ScanKey::Other;
        }
    }

    fn text_ends(&mut self, end: u64) {
        let of_type = std::mem::replace(&mut self.media.type_key, TypeKeyState::No) == TypeKeyState::Colon;
        let of_data = std::mem::replace(&mut self.media.data_key, TypeKeyState::No) == TypeKeyState::Colon;
        if of_data || self.raw.is_media() {
            self.media.bytes = self.media.bytes.saturating_add(self.raw.length);
        }
        if self.depth == 1 && self.slot == ScanSlot::Value {
            match self.key {
                ScanKey::Model if self.names.model == ScannedModel::Absent => {
                    self.names.model = match self.raw.decoded() {
                        Some(name) => ScannedModel::Named(name),
                        None => ScannedModel::NotText,
                    };
                    self.names.value = end - self.raw.length - 2..end;
                }
                ScanKey::Stream => {
                    self.streams += 1;
                    self.stream_true = false;
                }
                ScanKey::Model | ScanKey::Other => {}
            }
            self.key = ScanKey::Other;
            if !of_type {
                return;
            }
        }
        if of_type {
            if ["image_url", "input_image", "image"].iter().any(|word| self.raw.spells(word)) {
                self.media.images = self.media.images.saturating_add(1);
            } else if self.raw.spells("input_audio") {
                self.media.audio = self.media.audio.saturating_add(1);
            }
            return;
        }
        if self.raw.spells("type") {
            self.media.type_key = TypeKeyState::Seen;
        } else if self.raw.spells("data") {
            self.media.data_key = TypeKeyState::Seen;
        }
        if self.depth == 1 && self.slot == ScanSlot::Key {
            self.slot = ScanSlot::Colon;
            self.key = if self.raw.spells("model") {
                self.names.count = self.names.count.saturating_add(1);
                ScanKey::Model
            } else if self.raw.spells("stream") {
                ScanKey::Stream
            } else {
                ScanKey::Other
            };
        }
    }
}

#[cfg(test)]
#[path = "scan_tests.rs"]
mod tests;
