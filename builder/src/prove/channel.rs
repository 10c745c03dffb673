//! The supervisor's side of the reclaim file (docs/patches.md), for comparisons: requests memory back from
//! one server.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Magic number of the file. The version follows, then the answers of each part.
const MAGIC: &[u8; 8] = b"LWRECL1\0";
const BLOCK_BYTES: usize = 64;
const BLOCK_COUNT: u32 = 16;
/// Status bits of an answer: done, and done in part only.
const STATUS_DONE: u16 = 1;
const STATUS_PARTIAL: u16 = 2;
/// Request bits for graphs, pools, cuBLAS and the heap.
pub(super) const RECLAIM_ALL: u32 = 1 | 2 | 4 | 8;

/// Answer of one part of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReclaimReply {
    /// `true`: the part is the CUDA backend; `false`: llama-server itself.
    pub(super) cuda: bool,
    pub(super) done: bool,
    pub(super) bytes: u64,
}

/// The reclaim file, written from the supervisor's side.
pub(super) struct ReclaimFile(File);

impl ReclaimFile {
    pub(super) fn create(path: &Path) -> std::io::Result<Self> {
        let file = File::options().create_new(true).read(true).write(true).open(path)?;
        file.set_len(BLOCK_BYTES as u64 * u64::from(2 + 2 * BLOCK_COUNT))?;
        let mut header = [0; BLOCK_BYTES];
        header[..8].copy_from_slice(MAGIC);
        header[8..12].copy_from_slice(&1_u32.to_ne_bytes());
        header[12..16].copy_from_slice(&BLOCK_COUNT.to_ne_bytes());
        file.write_all_at(&header, 0)?;
        Ok(Self(file))
    }

    /// Uses an existing file.
    pub(super) const fn from_file(file: File) -> Self {
        Self(file)
    }

    /// Writes a request. `number` must be higher than the last request's, else the server ignores the
    /// request.
    pub(super) fn request(&self, number: u64, what: u32, deadline_ms: u32) -> std::io::Result<()> {
        let mut block = [0; BLOCK_BYTES];
        block[..8].copy_from_slice(&number.to_ne_bytes());
        block[8..12].copy_from_slice(&what.to_ne_bytes());
        block[12..16].copy_from_slice(&deadline_ms.to_ne_bytes());
        let check = block_checksum(&block);
        block[56..].copy_from_slice(&check.to_ne_bytes());
        self.0.write_all_at(&block, BLOCK_BYTES as u64)
    }

    /// Number of parts that have claimed a block. A part ignores requests from before its claim.
    pub(super) fn count_parts(&self) -> usize {
        let blocks = (0..2 * BLOCK_COUNT).filter(|at| {
            let mut block = [0; BLOCK_BYTES];
            let is_read = self.0.read_exact_at(&mut block, BLOCK_BYTES as u64 * u64::from(2 + at)).is_ok();
            let check = block[BLOCK_BYTES - 8..].try_into().map_or(0, u64::from_ne_bytes);
            is_read && block != [0; BLOCK_BYTES] && check == block_checksum(&block)
        });
        blocks.count()
    }

    /// Answers to a request so far.
    pub(super) fn answers(&self, number: u64) -> Vec<ReclaimReply> {
        (0..2 * BLOCK_COUNT)
            .filter_map(|at| {
                let mut block = [0; BLOCK_BYTES];
                self.0.read_exact_at(&mut block, BLOCK_BYTES as u64 * u64::from(2 + at)).ok()?;
                parse_answer(&block, number, at >= BLOCK_COUNT)
            })
            .collect()
    }
}

fn parse_answer(block: &[u8; BLOCK_BYTES], number: u64, cuda: bool) -> Option<ReclaimReply> {
    let long = |at: usize| block[at..at + 8].try_into().map_or(0, u64::from_ne_bytes);
    let short = |at: usize| block[at..at + 2].try_into().map_or(0, u16::from_ne_bytes);
    let result = short(44);
    if long(56) != block_checksum(block) || long(0) != number || result == 0 {
        return None;
    }
    let bytes = (0..4).map(|count| long(8 + 8 * count)).sum();
    Some(ReclaimReply { cuda, done: matches!(result, STATUS_DONE | STATUS_PARTIAL), bytes })
}

/// Checksum: FNV-1a over all but the last eight bytes.
fn block_checksum(block: &[u8; BLOCK_BYTES]) -> u64 {
    block[..BLOCK_BYTES - 8]
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_counts_for_its_request_and_only_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("reclaim");
        let channel = ReclaimFile::create(&path).unwrap();
        channel.request(3, RECLAIM_ALL, 1000).unwrap();
        assert_eq!((channel.answers(3), channel.count_parts()), (Vec::new(), 0));
        let mut block = [0; BLOCK_BYTES];
        block[..8].copy_from_slice(&3_u64.to_ne_bytes());
        block[24..32].copy_from_slice(&500_u64.to_ne_bytes());
        block[44..46].copy_from_slice(&STATUS_DONE.to_ne_bytes());
        let check = block_checksum(&block);
        block[56..].copy_from_slice(&check.to_ne_bytes());
        let at = BLOCK_BYTES as u64 * u64::from(2 + BLOCK_COUNT);
        channel.0.write_all_at(&block, at).unwrap();
        assert_eq!(channel.answers(3), [ReclaimReply { cuda: true, done: true, bytes: 500 }]);
        assert_eq!((channel.answers(4), channel.count_parts()), (Vec::new(), 1));
        channel.0.write_all_at(&[9], at + 24).unwrap();
        assert_eq!(channel.answers(3), [], "it is torn");
        assert!(ReclaimFile::create(&path).is_err(), "nobody's file is taken");
    }
}
