//! Reads the few counters of a patched server's memory report that a comparison needs. The layout is
//! defined in `patches/cuda-memory/llama-warden-cuda.cuh`; the sensors read the whole report while serving.

/// Magic number of the file.
const MAGIC: &[u8; 8] = b"LWREPT1\0";
/// Bytes of the file's header.
const HEADER: usize = 128;
/// Bytes of a record, and of the fields before its values.
const RECORD: usize = 256;
const BEFORE: usize = 16;
/// Second field of a record whose context exists.
const LIVE: u32 = 1;
/// Indices of values in a record.
const COMPUTES: usize = 0;
const GRAPHS: usize = 1;
const POOL_BYTES: usize = 10;

/// Sums over all existing contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) computes: u64,
    pub(super) graphs: u64,
    pub(super) pool_bytes: u64,
}

/// Parses a report; `None` for any other file.
pub(super) fn read(file: &[u8]) -> Option<Counters> {
    if file.get(..MAGIC.len())? != MAGIC {
        return None;
    }
    let mut all = Counters::default();
    for record in file.get(HEADER..)?.as_chunks::<RECORD>().0 {
        let state = record.get(4..8).and_then(|bytes| bytes.try_into().ok()).map(u32::from_ne_bytes);
        if state != Some(LIVE) {
            continue;
        }
        let value = |at: usize| {
            let bytes = record.get(BEFORE + 8 * at..BEFORE + 8 * at + 8);
            bytes.and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes)
        };
        all.computes += value(COMPUTES);
        all.graphs += value(GRAPHS);
        all.pool_bytes += value(POOL_BYTES);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn living_contexts_are_added_up_and_others_do_not_count() {
        let mut file = vec![0; HEADER + 3 * RECORD];
        file[..8].copy_from_slice(MAGIC);
        let mut put = |record: usize, state: u32, values: &[(usize, u64)]| {
            let at = HEADER + record * RECORD;
            file[at + 4..at + 8].copy_from_slice(&state.to_ne_bytes());
            for (value, number) in values {
                let at = at + BEFORE + 8 * value;
                file[at..at + 8].copy_from_slice(&number.to_ne_bytes());
            }
        };
        put(0, LIVE, &[(COMPUTES, 5), (GRAPHS, 2), (POOL_BYTES, 100)]);
        put(1, 2, &[(COMPUTES, 50)]);
        put(2, LIVE, &[(COMPUTES, 7), (POOL_BYTES, 11)]);
        assert_eq!(read(&file), Some(Counters { computes: 12, graphs: 2, pool_bytes: 111 }));
        assert_eq!(read(b"something else, longer than a magic"), None);
        assert_eq!(read(b""), None);
    }
}
