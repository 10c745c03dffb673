//! Reads the few counters of a patched server's memory report that a comparison needs. The layout is
//! defined in `patches/cuda-memory/llama-warden-cuda.cuh`; the sensors read the whole report while serving.

/// Magic number of the file.
const MAGIC: &[u8; 8] = b"LWREPT1\0";
/// Bytes of the file's header.
const HEADER_BYTES: usize = 128;
/// Bytes of a record, and of the fields before its values.
const RECORD_BYTES: usize = 256;
const VALUES_OFFSET: usize = 16;
/// Second field of a record whose context exists.
const LIVE_STATE: u32 = 1;
/// Indices of values in a record.
const COMPUTES_INDEX: usize = 0;
const GRAPHS_INDEX: usize = 1;
const POOL_BYTES_INDEX: usize = 10;

/// Sums over all existing contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReportCounters {
    pub(super) computes: u64,
    pub(super) graphs: u64,
    pub(super) pool_bytes: u64,
}

/// Parses a report; `None` for any other file.
pub(super) fn parse_counters(file: &[u8]) -> Option<ReportCounters> {
    if file.get(..MAGIC.len())? != MAGIC {
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
    fn living_contexts_are_added_up_and_others_do_not_count() {
        let mut file = vec![0; HEADER_BYTES + 3 * RECORD_BYTES];
        file[..8].copy_from_slice(MAGIC);
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
