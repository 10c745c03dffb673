//! The file of one series: a head, then a ring of buckets for each tier. The file has its full length from
//! the start, with holes for missing buckets.
//!
//! ```text
//!  head, 4 KiB: "LWSERIES" · version u32 · length of the text u32 · checksum u32 · text: key and tiers
//!  tier 0: slot 0, slot 1, …    a bucket's time determines its slot; an older bucket there is replaced
//!  tier 1: …
//! ```
//!
//! Each bucket is a single write with a checksum: a process that is killed during a write loses only that
//! bucket.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use warden_policies::rollup::{ReadingBucket, RollupTier};

use super::key::SeriesKey;
use super::record::{RECORD_BYTES, crc32, decode, encode};

const FILE_MAGIC: &[u8; 8] = b"LWSERIES";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 4096;
const TEXT_OFFSET: usize = 20;
/// The file has names of models, so other users must not read it.
const FILE_MODE: u32 = 0o640;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RingHead {
    #[serde(flatten)]
    pub(super) key: SeriesKey,
    /// Seconds and number of slots, by tier.
    tiers: Vec<(u64, u64)>,
    pub(super) since: u64,
}

/// Only [`RingError::Io`] may be temporary; a retry does not help against the others.
#[derive(Debug, thiserror::Error)]
pub(super) enum RingError {
    #[error("it is of a later version of llama-warden ({0})")]
    Later(u32),
    #[error("it is no file of llama-warden's")]
    Foreign,
    #[error("it is the series of something else, or with other widths")]
    Other,
    #[error("the name of the model is too long for it")]
    Long,
    #[error(transparent)]
    Io(#[from] io::Error),
}

pub(super) fn file_length(tiers: &[RollupTier]) -> u64 {
    tier_offset(tiers, tiers.len())
}

fn tier_offset(tiers: &[RollupTier], number: usize) -> u64 {
    let slots: u64 = tiers.iter().take(number).map(|tier| tier.slots).sum();
    HEAD_BYTES as u64 + slots * RECORD_BYTES as u64
}

#[derive(Debug)]
pub(super) struct RingFile {
    file: File,
    tiers: Vec<RollupTier>,
    pub(super) since: u64,
}

impl RingFile {
    pub(super) fn open(
        path: &Path,
        key: &SeriesKey,
        tiers: &[RollupTier],
        write: bool,
    ) -> Result<Self, RingError> {
        let file = open_options().write(write).open(path)?;
        let head = parse_head(&file)?;
        let same = head.tiers.iter().copied().eq(tiers.iter().map(|tier| (tier.seconds, tier.slots)));
        if head.key != *key || !same {
            return Err(RingError::Other);
        }
        Ok(Self { file, tiers: tiers.to_vec(), since: head.since })
    }

    /// The file appears with its head or not at all.
    pub(super) fn create(
        path: &Path,
        key: &SeriesKey,
        tiers: &[RollupTier],
        now: u64,
    ) -> Result<Self, RingError> {
        let widths = tiers.iter().map(|tier| (tier.seconds, tier.slots)).collect();
        let head = RingHead { key: key.clone(), tiers: widths, since: now };
        let text = serde_json::to_vec(&head).map_err(io::Error::from)?;
        if text.len() > HEAD_BYTES - TEXT_OFFSET {
            return Err(RingError::Long);
        }
        let size = u32::try_from(text.len()).map_err(|_| RingError::Long)?;
        let mut bytes = Vec::with_capacity(HEAD_BYTES);
        bytes.extend_from_slice(FILE_MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&size.to_le_bytes());
        bytes.extend_from_slice(&crc32(&text).to_le_bytes());
        bytes.extend_from_slice(&text);
        let folder = path.parent().unwrap_or(Path::new("."));
        let new = tempfile::Builder::new().prefix(".new-").tempfile_in(folder)?;
        new.as_file().write_all_at(&bytes, 0)?;
        new.as_file().set_len(file_length(tiers))?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(FILE_MODE);
        new.as_file().set_permissions(mode)?;
        // Sync before the rename. After a power failure, a name without content would not show that the file
        // belongs to llama-warden.
        new.as_file().sync_all()?;
        let file = new.persist_noclobber(path).map_err(|failed| failed.error)?;
        Ok(Self { file, tiers: tiers.to_vec(), since: now })
    }

    /// Returns buckets in order of time.
    pub(super) fn read(&self, number: usize) -> io::Result<Vec<ReadingBucket>> {
        let Some(tier) = self.tiers.get(number).copied() else { return Ok(Vec::new()) };
        let slots = usize::try_from(tier.slots).unwrap_or(0);
        let mut bytes = vec![0; slots * RECORD_BYTES];
        let read = read_up_to(&self.file, &mut bytes, tier_offset(&self.tiers, number))?;
        let records = bytes[..read].as_chunks::<RECORD_BYTES>().0.iter().zip(0_u64..);
        // A record whose time belongs to another slot is invalid.
        let bucket = |(record, slot): (&[u8; RECORD_BYTES], u64)| {
            decode(record, to_u8(number), tier).filter(|bucket| tier.slot(bucket.start) == slot)
        };
        let mut all: Vec<ReadingBucket> = records.filter_map(bucket).collect();
        all.sort_by_key(|bucket| bucket.start);
        Ok(all)
    }

    /// Merges an added bucket with the stored bucket of the same time. After an error, the caller has to
    /// retry.
    pub(super) fn merge(&self, number: usize, added: &ReadingBucket) -> io::Result<()> {
        let Some(tier) = self.tiers.get(number).copied() else { return Ok(()) };
        let place = tier_offset(&self.tiers, number) + tier.slot(added.start) * RECORD_BYTES as u64;
        let mut bytes = [0; RECORD_BYTES];
        let read = read_up_to(&self.file, &mut bytes, place)?;
        let there = decode(&bytes[..read], to_u8(number), tier).filter(|there| there.start == added.start);
        let all = there.map_or_else(
            || added.clone(),
            |mut there| {
                there.merge(added);
                there
            },
        );
        self.file.write_all_at(&encode(&all, to_u8(number)), place)
    }
}

pub(super) fn read_head(path: &Path) -> Result<RingHead, RingError> {
    parse_head(&open_options().open(path)?)
}

fn open_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    // A link would lead to a foreign file, and a pipe would block.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    options.read(true).custom_flags(i32::try_from(flags.bits()).unwrap_or(0));
    options
}

fn parse_head(file: &File) -> Result<RingHead, RingError> {
    if !file.metadata()?.is_file() {
        return Err(RingError::Foreign);
    }
    let mut bytes = [0; HEAD_BYTES];
    let read = read_up_to(file, &mut bytes, 0)?;
    let bytes = &bytes[..read];
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    if !bytes.starts_with(FILE_MAGIC) {
        return Err(RingError::Foreign);
    }
    let version = word(8).ok_or(RingError::Foreign)?;
    if version != VERSION {
        return Err(RingError::Later(version));
    }
    let text = word(12).zip(word(16)).and_then(|(size, check)| {
        let text = bytes.get(TEXT_OFFSET..TEXT_OFFSET.checked_add(usize::try_from(size).ok()?)?)?;
        (crc32(text) == check).then_some(text)
    });
    text.and_then(|text| serde_json::from_slice(text).ok()).ok_or(RingError::Foreign)
}

fn read_up_to(file: &File, bytes: &mut [u8], place: u64) -> io::Result<usize> {
    let mut read = 0;
    while read < bytes.len() {
        match file.read_at(&mut bytes[read..], place + read as u64) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

fn to_u8(number: usize) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
