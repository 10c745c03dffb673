//! Content of a conversation's JSON file.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::lease::turns::ConversationTurn;
use crate::process::needs::AnswerIdentity;
use crate::process::regular_file;
use crate::process::slot_files::checkpoint_name;
use crate::process::touch::AnswerText;

/// Version of the format. Records of other versions are removed.
const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ConversationRecord {
    version: u32,
    path: String,
    body: Option<String>,
    answer: AnswerRecord,
    prompt_tokens: u64,
    tokens: u64,
    has_media: bool,
    pub(super) slot: Option<SlotRecord>,
}

/// [`AnswerText`] as JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum AnswerRecord {
    Nothing,
    Text(String),
    Whole(String),
}

/// A slot file and its checkpoints.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SlotRecord {
    pub(super) kin: AnswerIdentity,
    pub(super) tokens: u64,
    state: FileChecksum,
    checkpoints: Option<FileChecksum>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileChecksum {
    bytes: u64,
    crc32: u32,
}

impl ConversationRecord {
    pub(super) fn new(turn: &ConversationTurn, slot: Option<SlotRecord>) -> Self {
        let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).ok();
        let answer = match &turn.said {
            AnswerText::Nothing => AnswerRecord::Nothing,
            AnswerText::Text(text) => AnswerRecord::Text(text.clone()),
            AnswerText::Whole(json) => text(json).map_or(AnswerRecord::Nothing, AnswerRecord::Whole),
        };
        Self {
            version: VERSION,
            path: turn.path.clone(),
            body: turn.body.as_ref().and_then(text),
            answer,
            prompt_tokens: turn.prompt,
            tokens: turn.tokens,
            has_media: turn.has_media,
            slot,
        }
    }

    /// Returns `None` for an incomplete record, or one of another version.
    pub(super) fn parse(json: &[u8]) -> Option<Self> {
        let record: Self = serde_json::from_slice(json).ok()?;
        (record.version == VERSION && record.path.starts_with('/')).then_some(record)
    }

    pub(super) fn into_turn(self) -> ConversationTurn {
        ConversationTurn {
            path: self.path,
            body: self.body.map(Bytes::from),
            said: match self.answer {
                AnswerRecord::Nothing => AnswerText::Nothing,
                AnswerRecord::Text(text) => AnswerText::Text(text),
                AnswerRecord::Whole(json) => AnswerText::Whole(Bytes::from(json)),
            },
            prompt: self.prompt_tokens,
            tokens: self.tokens,
            has_media: self.has_media,
            prefill: None,
        }
    }
}

impl SlotRecord {
    /// Reads the files once, for their checksums.
    ///
    /// # Errors
    /// A file cannot be read before the deadline.
    pub(super) fn of_file(
        (directory, file): (&Path, &str),
        tokens: u64,
        kin: AnswerIdentity,
        deadline: Instant,
    ) -> io::Result<Self> {
        let checkpoints = FileChecksum::of_optional(&directory.join(checkpoint_name(file)), deadline)?;
        Ok(Self { kin, tokens, state: FileChecksum::of_file(&directory.join(file), deadline)?, checkpoints })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.state.bytes + self.checkpoints.map_or(0, |file| file.bytes)
    }

    /// True if the files are as they were written.
    ///
    /// # Errors
    /// A file cannot be read before the deadline.
    pub(super) fn is_intact(&self, directory: &Path, file: &str, deadline: Instant) -> io::Result<bool> {
        let checkpoints = FileChecksum::of_optional(&directory.join(checkpoint_name(file)), deadline)?;
        let state = FileChecksum::of_optional(&directory.join(file), deadline)?;
        Ok(checkpoints == self.checkpoints && state == Some(self.state))
    }
}

impl FileChecksum {
    fn of_file(path: &Path, deadline: Instant) -> io::Result<Self> {
        let mut file: File = regular_file::open_unlinked(path)?;
        let mut hasher = crc32fast::Hasher::new();
        let mut buffer = vec![0; 1 << 20];
        let mut bytes = 0;
        loop {
            let count = file.read(&mut buffer)?;
            if count == 0 {
                return Ok(Self { bytes, crc32: hasher.finalize() });
            }
            hasher.update(&buffer[..count]);
            bytes += count as u64;
            if Instant::now() >= deadline {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "reading it takes too long"));
            }
        }
    }

    fn of_optional(path: &Path, deadline: Instant) -> io::Result<Option<Self>> {
        match Self::of_file(path, deadline) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            read => read.map(Some),
        }
    }
}
