//! Accesses two files of a patched server: the reclaim file, by which a client asks the server to free memory
//! (docs/patches.md), and the counters of the memory report.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Magic number of the reclaim file, followed by the version and the number of blocks per part.
const MAGIC: &[u8; 8] = b"LWRECL1\0";
const BLOCK_BYTES: usize = 64;
const BLOCK_COUNT: u32 = 16;
/// Status bits of an answer: done, and done in part only.
const STATUS_DONE: u16 = 1;
const STATUS_PARTIAL: u16 = 2;
/// Request bits for graphs, pools, cuBLAS and the heap.
pub(super) const RECLAIM_ALL: u32 = 1 | 2 | 4 | 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReclaimReply {
    /// `true`: the part is the CUDA backend; `false`: llama-server itself.
    pub(super) cuda: bool,
    pub(super) done: bool,
    pub(super) bytes: u64,
}

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

    pub(super) const fn from_file(file: File) -> Self {
        Self(file)
    }

    /// Writes a request. The server ignores a `number` that is not higher than the last one.
    pub(super) fn request(&self, number: u64, what: u32, deadline_ms: u32) -> std::io::Result<()> {
        let mut block = [0; BLOCK_BYTES];
        block[..8].copy_from_slice(&number.to_ne_bytes());
        block[8..12].copy_from_slice(&what.to_ne_bytes());
        block[12..16].copy_from_slice(&deadline_ms.to_ne_bytes());
        let check = block_checksum(&block);
        block[56..].copy_from_slice(&check.to_ne_bytes());
        self.0.write_all_at(&block, BLOCK_BYTES as u64)
    }

    /// Number of parts (llama-server itself, the CUDA backend) that have claimed a block for their answers. A
    /// part ignores requests older than its block.
    pub(super) fn count_parts(&self) -> usize {
        let blocks = (0..2 * BLOCK_COUNT).filter(|at| {
            let mut block = [0; BLOCK_BYTES];
            let is_read = self.0.read_exact_at(&mut block, BLOCK_BYTES as u64 * u64::from(2 + at)).is_ok();
            let check = block[BLOCK_BYTES - 8..].try_into().map_or(0, u64::from_ne_bytes);
            is_read && block != [0; BLOCK_BYTES] && check == block_checksum(&block)
        });
        blocks.count()
    }

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

/// Magic number of a memory report; `patches/cuda-memory/llama-warden-cuda.cuh` defines the layout.
const REPORT_MAGIC: &[u8; 8] = b"LWREPT1\0";
const HEADER_BYTES: usize = 128;
/// Bytes of a record, and of the fields before its values.
const RECORD_BYTES: usize = 256;
const VALUES_OFFSET: usize = 16;
const LIVE_STATE: u32 = 1;
const COMPUTES_INDEX: usize = 0;
const GRAPHS_INDEX: usize = 1;
const POOL_BYTES_INDEX: usize = 10;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReportCounters {
    pub(super) computes: u64,
    pub(super) graphs: u64,
    pub(super) pool_bytes: u64,
}

pub(super) fn parse_counters(file: &[u8]) -> Option<ReportCounters> {
    if file.get(..REPORT_MAGIC.len())? != REPORT_MAGIC {
        return None;
    }
    let mut all = ReportCounters::default();
    for record in file.get(HEADER_BYTES..)?.as_chunks::<RECORD_BYTES>().0 {
        let state = record.get(4..8).and_then(|bytes| bytes.try_into().ok()).map(u32::from_ne_bytes);
        if state != Some(LIVE_STATE) {
            continue;
        }
        let value = |at: usize| {
            let bytes = record.get(VALUES_OFFSET + 8 * at..VALUES_OFFSET + 8 * at + 8);
            bytes.and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes)
        };
        all.computes += value(COMPUTES_INDEX);
        all.graphs += value(GRAPHS_INDEX);
        all.pool_bytes += value(POOL_BYTES_INDEX);
    }
    Some(all)
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

    #[test]
    fn living_contexts_are_added_up_and_others_do_not_count() {
        let mut file = vec![0; HEADER_BYTES + 3 * RECORD_BYTES];
        file[..8].copy_from_slice(REPORT_MAGIC);
        let mut put = |record: usize, state: u32, values: &[(usize, u64)]| {
            let at = HEADER_BYTES + record * RECORD_BYTES;
            file[at + 4..at + 8].copy_from_slice(&state.to_ne_bytes());
            for (value, number) in values {
                let at = at + VALUES_OFFSET + 8 * value;
                file[at..at + 8].copy_from_slice(&number.to_ne_bytes());
            }
        };
        put(0, LIVE_STATE, &[(COMPUTES_INDEX, 5), (GRAPHS_INDEX, 2), (POOL_BYTES_INDEX, 100)]);
        put(1, 2, &[(COMPUTES_INDEX, 50)]);
        put(2, LIVE_STATE, &[(COMPUTES_INDEX, 7), (POOL_BYTES_INDEX, 11)]);
        assert_eq!(parse_counters(&file), Some(ReportCounters { computes: 12, graphs: 2, pool_bytes: 111 }));
        assert_eq!(parse_counters(b"something else, longer than a magic"), None);
        assert_eq!(parse_counters(b""), None);
    }
}
