//! Reads the metadata of a GGUF file and the size of each tensor, but no tensor data.
//!
//! Supports versions 2 and 3, little-endian (ggml's `docs/gguf.md`). Long texts and arrays, such as the
//! vocabulary, are skipped. Files are untrusted: no memory is allocated by an unchecked count, and at most
//! [`MAX_HEAD_BYTES`] bytes are read.
//!
//! A tensor's size is the distance to the next tensor, so tensors of unknown types have a size, too.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Maximum bytes before the first tensor. The largest vocabularies take 20 MiB.
const MAX_HEAD_BYTES: u64 = 256 << 20;
/// Maximum number of metadata entries, and maximum number of tensors. The largest models have some thousands.
const MAX_ENTRY_COUNT: u64 = 1 << 17;
/// Maximum bytes of a name, and of a text that is kept.
const MAX_TEXT_BYTES: u64 = 64 << 10;
/// Maximum bytes of all kept names and texts. The largest models have some hundred KiB.
const MAX_KEPT_TEXT_BYTES: u64 = 16 << 20;
/// Maximum length of an array of numbers that is kept; useful ones have one number per layer.
const MAX_KEPT_NUMBERS: u64 = 4096;
const MAX_SPLIT_PARTS: u64 = 999;

/// Errors of reading a GGUF file.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum GgufError {
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{} is no GGUF file: {why}", path.display())]
    NotGguf { path: PathBuf, why: &'static str },
    #[error("{} is damaged: {why}; compare its size with that of the download", path.display())]
    Damaged { path: PathBuf, why: String },
}

/// Description of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// Dimensions, the innermost first.
    pub lengths: Vec<u64>,
    /// Bytes in the file, with padding.
    pub bytes: u64,
}

/// Metadata and tensors of a model file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufFacts {
    /// Text values by key; empty for texts of more than 64 KiB.
    pub texts: BTreeMap<String, String>,
    /// Numbers and booleans (0 and 1) by key; an array has several values.
    pub numbers: BTreeMap<String, Vec<f64>>,
    /// Length of each array by key, including the vocabulary.
    pub lengths: BTreeMap<String, u64>,
    /// All tensors, from all files of a split model.
    pub tensors: Vec<TensorInfo>,
    /// Total bytes of all files of the model.
    pub file_bytes: u64,
}

impl GgufFacts {
    /// The architecture, such as `llama`; empty if the file has none.
    pub fn architecture(&self) -> &str {
        self.texts.get("general.architecture").map_or("", String::as_str)
    }
}

/// Reads a file, and its siblings if the model is split (`…-00001-of-00003.gguf`).
///
/// # Errors
/// Fails if the file or one of its siblings cannot be read, is no GGUF file, or is damaged.
pub fn read(path: &Path) -> Result<GgufFacts, GgufError> {
    let mut facts = read_one(path)?;
    let parts = facts.numbers.get("split.count").and_then(|count| count.first()).copied().unwrap_or(0.0);
    if parts < 2.0 {
        return Ok(facts);
    }
    let siblings = sibling_paths(path, parts).ok_or_else(|| GgufError::Damaged {
        path: path.to_owned(),
        why: format!(
            "it is one of {parts} parts and not named like the first one (`…-00001-of-{parts:05}.gguf`)"
        ),
    })?;
    for sibling in siblings {
        let more = read_one(&sibling)?;
        facts.tensors.extend(more.tensors);
        facts.file_bytes += more.file_bytes;
    }
    Ok(facts)
}

/// Paths of the other parts of a split model, given its first part.
fn sibling_paths(path: &Path, parts: f64) -> Option<Vec<PathBuf>> {
    // A count of files is far below the largest integer that a float represents exactly.
    let parts = to_integer(parts).filter(|parts| *parts <= MAX_SPLIT_PARTS)?;
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(&format!("-00001-of-{parts:05}.gguf"))?;
    Some(
        (2..=parts).map(|part| path.with_file_name(format!("{stem}-{part:05}-of-{parts:05}.gguf"))).collect(),
    )
}

/// Converts a float to an integer; `None` unless the number is whole, not negative and below 9e15.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "what is whole and below 2^53 stays what it is"
)]
fn to_integer(number: f64) -> Option<u64> {
    ((0.0..9e15).contains(&number) && number.fract() == 0.0).then_some(number as u64)
}

fn read_one(path: &Path) -> Result<GgufFacts, GgufError> {
    let io = |source: io::Error| match source.kind() {
        io::ErrorKind::UnexpectedEof => {
            GgufError::Damaged { path: path.to_owned(), why: "it ends within its own description".to_owned() }
        }
        _ => GgufError::Io { path: path.to_owned(), source },
    };
    // Non-blocking: opening a pipe would wait for a writer.
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(io)?;
    let facts = file.metadata().map_err(io)?;
    if !facts.is_file() {
        return Err(GgufError::NotGguf { path: path.to_owned(), why: "it is no file" });
    }
    let mut head = HeadReader { inner: BufReader::new(file), position: 0, size: facts.len(), kept: 0 };
    parse_file(&mut head).map_err(|fault| match fault {
        ParseFault::Io(source) => io(source),
        ParseFault::NotGguf(why) => GgufError::NotGguf { path: path.to_owned(), why },
        ParseFault::Damaged(why) => GgufError::Damaged { path: path.to_owned(), why },
    })
}

enum ParseFault {
    Io(io::Error),
    NotGguf(&'static str),
    Damaged(String),
}

impl From<io::Error> for ParseFault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

struct HeadReader {
    inner: BufReader<File>,
    position: u64,
    size: u64,
    kept: u64,
}

impl HeadReader {
    fn read_bytes<const N: usize>(&mut self) -> Result<[u8; N], ParseFault> {
        let mut bytes = [0; N];
        self.inner.read_exact(&mut bytes)?;
        self.advance(N as u64)?;
        Ok(bytes)
    }

    fn read_u32(&mut self) -> Result<u32, ParseFault> {
        Ok(u32::from_le_bytes(self.read_bytes()?))
    }

    fn read_u64(&mut self) -> Result<u64, ParseFault> {
        Ok(u64::from_le_bytes(self.read_bytes()?))
    }

    fn advance(&mut self, by: u64) -> Result<(), ParseFault> {
        self.position = self.position.saturating_add(by);
        if self.position > MAX_HEAD_BYTES {
            return Err(ParseFault::Damaged(format!(
                "its description is larger than {} MiB",
                MAX_HEAD_BYTES >> 20
            )));
        }
        Ok(())
    }

    fn skip(&mut self, bytes: u64) -> Result<(), ParseFault> {
        if bytes > self.size.saturating_sub(self.position) {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        self.advance(bytes)?;
        self.inner.seek_relative(i64::try_from(bytes).unwrap_or(i64::MAX))?;
        Ok(())
    }

    /// Reads a text; returns an empty one if it is too long.
    fn read_text(&mut self) -> Result<String, ParseFault> {
        let length = self.read_u64()?;
        if length > MAX_TEXT_BYTES {
            self.skip(length)?;
            return Ok(String::new());
        }
        self.kept += length;
        if self.kept > MAX_KEPT_TEXT_BYTES {
            return Err(ParseFault::Damaged(format!(
                "its names are longer than {} MiB",
                MAX_KEPT_TEXT_BYTES >> 20
            )));
        }
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        self.inner.read_exact(&mut bytes)?;
        self.advance(length)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn read_count(&mut self, of: &str) -> Result<u64, ParseFault> {
        let count = self.read_u64()?;
        if count > MAX_ENTRY_COUNT {
            return Err(ParseFault::Damaged(format!("it says that it has {count} {of}")));
        }
        Ok(count)
    }
}

const TEXT_TYPE: u32 = 8;
const ARRAY_TYPE: u32 = 9;

const fn number_width(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

#[expect(clippy::cast_precision_loss, reason = "sizes of models are far below 2^53")]
fn read_number(head: &mut HeadReader, kind: u32) -> Result<f64, ParseFault> {
    Ok(match kind {
        0 => f64::from(u8::from_le_bytes(head.read_bytes()?)),
        1 => f64::from(i8::from_le_bytes(head.read_bytes()?)),
        2 => f64::from(u16::from_le_bytes(head.read_bytes()?)),
        3 => f64::from(i16::from_le_bytes(head.read_bytes()?)),
        4 => f64::from(head.read_u32()?),
        5 => f64::from(i32::from_le_bytes(head.read_bytes()?)),
        6 => f64::from(f32::from_le_bytes(head.read_bytes()?)),
        7 => f64::from(u8::from_le_bytes(head.read_bytes()?) & 1),
        10 => head.read_u64()? as f64,
        11 => i64::from_le_bytes(head.read_bytes()?) as f64,
        12 => f64::from_le_bytes(head.read_bytes()?),
        _ => return Err(ParseFault::Damaged(format!("it has a value of type {kind}"))),
    })
}

fn parse_file(head: &mut HeadReader) -> Result<GgufFacts, ParseFault> {
    match head.read_bytes::<4>() {
        Ok(magic) if magic == *b"GGUF" => {}
        Ok(_) => return Err(ParseFault::NotGguf("it does not begin like one")),
        Err(ParseFault::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(ParseFault::NotGguf("it is empty, or nearly so"));
        }
        Err(fault) => return Err(fault),
    }
    match head.read_u32()? {
        2 | 3 => {}
        1 => return Err(ParseFault::NotGguf("it is of version 1, which llama.cpp does not read any more")),
        version if version.swap_bytes() <= 3 => return Err(ParseFault::NotGguf("it is big-endian")),
        _ => return Err(ParseFault::NotGguf("its version is not known")),
    }
    let tensors = head.read_count("tensors")?;
    let entries = head.read_count("entries")?;
    let mut facts = GgufFacts { file_bytes: head.size, ..GgufFacts::default() };
    for _ in 0..entries {
        read_entry(head, &mut facts)?;
    }
    let mut begins = Vec::new();
    for _ in 0..tensors {
        let name = head.read_text()?;
        let dimensions = head.read_u32()?;
        if dimensions > 8 {
            return Err(ParseFault::Damaged(format!("its tensor {name} has {dimensions} dimensions")));
        }
        let lengths = (0..dimensions).map(|_| head.read_u64()).collect::<Result<Vec<_>, _>>()?;
        let _kind = head.read_u32()?;
        begins.push((head.read_u64()?, begins.len()));
        facts.tensors.push(TensorInfo { name, lengths, bytes: 0 });
    }
    let alignment = facts.numbers.get("general.alignment").and_then(|of| of.first()).copied();
    let alignment = alignment.and_then(to_integer).filter(|of| of.is_power_of_two()).unwrap_or(32);
    let data = head.position.next_multiple_of(alignment);
    begins.sort_unstable();
    let ends = begins.iter().skip(1).map(|(begin, _)| *begin).chain([head.size.saturating_sub(data)]);
    for ((begin, index), end) in begins.iter().zip(ends) {
        let Some(bytes) = end.checked_sub(*begin) else {
            let name = &facts.tensors[*index].name;
            return Err(ParseFault::Damaged(format!("its tensor {name} begins behind the end of the file")));
        };
        facts.tensors[*index].bytes = bytes;
    }
    Ok(facts)
}

fn read_entry(head: &mut HeadReader, facts: &mut GgufFacts) -> Result<(), ParseFault> {
    let key = head.read_text()?;
    let kind = head.read_u32()?;
    match kind {
        TEXT_TYPE => {
            let text = head.read_text()?;
            facts.texts.insert(key, text);
        }
        ARRAY_TYPE => {
            let of = head.read_u32()?;
            let length = head.read_u64()?;
            facts.lengths.insert(key.clone(), length);
            match (of, number_width(of)) {
                (TEXT_TYPE, _) => {
                    for _ in 0..length {
                        let bytes = head.read_u64()?;
                        head.skip(bytes)?;
                    }
                }
                (_, Some(_)) if length <= MAX_KEPT_NUMBERS => {
                    let numbers =
                        (0..length).map(|_| read_number(head, of)).collect::<Result<Vec<_>, _>>()?;
                    facts.numbers.insert(key, numbers);
                }
                (_, Some(width)) => head.skip(length.saturating_mul(width))?,
                (_, None) => {
                    return Err(ParseFault::Damaged(format!("its entry {key} is an array of type {of}")));
                }
            }
        }
        _ => {
            let value = read_number(head, kind)?;
            facts.numbers.insert(key, vec![value]);
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "read_tests.rs"]
mod tests;
