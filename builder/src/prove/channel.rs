//! The supervisor's side of the reclaim file (docs/patches.md), for comparisons: requests memory back from
//! one server.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Magic number of the file. The version follows, then the answers of each part.
const MAGIC: &[u8; 8] = b"LWRECL1\0";
const BLOCK: usize = 64;
const BLOCKS: u32 = 16;
/// Status bits of an answer: done, and done in part only.
const DONE: u16 = 1;
const PARTLY: u16 = 2;
/// Request bits for graphs, pools, cuBLAS and the heap.
pub(super) const ALL: u32 = 1 | 2 | 4 | 8;

/// Answer of one part of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// The part is the CUDA backend, else llama-server itself.
    pub(super) cuda: bool,
    pub(super) done: bool,
    pub(super) bytes: u64,
}

/// The mapped file, as the supervisor uses it.
pub(super) struct Channel(File);

impl Channel {
    pub(super) fn create(path: &Path) -> std::io::Result<Self> {
        let file = File::options().create_new(true).read(true).write(true).open(path)?;
        file.set_len(BLOCK as u64 * u64::from(2 + 2 * BLOCKS))?;
        let mut header = [0; BLOCK];
        header[..8].copy_from_slice(MAGIC);
        header[8..12].copy_from_slice(&1_u32.to_ne_bytes());
        header[12..16].copy_from_slice(&BLOCKS.to_ne_bytes());
        file.write_all_at(&header, 0)?;
        Ok(Self(file))
    }

    /// Uses an existing file.
    pub(super) const fn of(file: File) -> Self {
        Self(file)
    }

    /// Writes a request. Its number must be higher than the last one, else the server ignores it.
    pub(super) fn ask(&self, number: u64, what: u32, deadline_ms: u32) -> std::io::Result<()> {
        let mut block = [0; BLOCK];
        block[..8].copy_from_slice(&number.to_ne_bytes());
        block[8..12].copy_from_slice(&what.to_ne_bytes());
        block[12..16].copy_from_slice(&deadline_ms.to_ne_bytes());
        let check = check_of(&block);
        block[56..].copy_from_slice(&check.to_ne_bytes());
        self.0.write_all_at(&block, BLOCK as u64)
    }

    /// Number of parts that have claimed a block. A part counts earlier requests as done.
    pub(super) fn joined(&self) -> usize {
        let blocks = (0..2 * BLOCKS).filter(|at| {
            let mut block = [0; BLOCK];
            let is_read = self.0.read_exact_at(&mut block, BLOCK as u64 * u64::from(2 + at)).is_ok();
            let check = block[BLOCK - 8..].try_into().map_or(0, u64::from_ne_bytes);
            is_read && block != [0; BLOCK] && check == check_of(&block)
        });
        blocks.count()
    }

    /// Answers to a request so far.
    pub(super) fn answers(&self, number: u64) -> Vec<Answer> {
        (0..2 * BLOCKS)
            .filter_map(|at| {
                let mut block = [0; BLOCK];
                self.0.read_exact_at(&mut block, BLOCK as u64 * u64::from(2 + at)).ok()?;
                answer_of(&block, number, at >= BLOCKS)
            })
            .collect()
    }
}

fn answer_of(block: &[u8; BLOCK], number: u64, cuda: bool) -> Option<Answer> {
    let long = |at: usize| block[at..at + 8].try_into().map_or(0, u64::from_ne_bytes);
    let short = |at: usize| block[at..at + 2].try_into().map_or(0, u16::from_ne_bytes);
    let result = short(44);
    if long(56) != check_of(block) || long(0) != number || result == 0 {
        return None;
    }
    let bytes = (0..4).map(|count| long(8 + 8 * count)).sum();
    Some(Answer { cuda, done: matches!(result, DONE | PARTLY), bytes })
}

/// Checksum: FNV-1a over all but the last eight bytes.
fn check_of(block: &[u8; BLOCK]) -> u64 {
    block[..BLOCK - 8]
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
        let channel = Channel::create(&path).unwrap();
        channel.ask(3, ALL, 1000).unwrap();
        assert_eq!((channel.answers(3), channel.joined()), (Vec::new(), 0));
        let mut block = [0; BLOCK];
        block[..8].copy_from_slice(&3_u64.to_ne_bytes());
        block[24..32].copy_from_slice(&500_u64.to_ne_bytes());
        block[44..46].copy_from_slice(&DONE.to_ne_bytes());
        let check = check_of(&block);
        block[56..].copy_from_slice(&check.to_ne_bytes());
        let at = BLOCK as u64 * u64::from(2 + BLOCKS);
        channel.0.write_all_at(&block, at).unwrap();
        assert_eq!(channel.answers(3), [Answer { cuda: true, done: true, bytes: 500 }]);
        assert_eq!((channel.answers(4), channel.joined()), (Vec::new(), 1));
        channel.0.write_all_at(&[9], at + 24).unwrap();
        assert_eq!(channel.answers(3), [], "it is torn");
        assert!(Channel::create(&path).is_err(), "nobody's file is taken");
    }
}
