//! The format of a bucket in a file: fixed length, little-endian, with a checksum at the end. Pure.
//!
//! ```text
//!  0 start u64 · 8 first u32 · 12 last u32 · 16 covered u32 · 20 count u32 · 24 generation u64
//!    (first and last in ms after the start)
//!  32 min u64 · 40 max u64 · 48 last u64 · 56 mean f64
//!  64 law, its low and high end, kept from and to, soft, hard: seven u32 of KiB, 0 for none
//!  92 verdict u8 · 93 tier u8 · 94 nothing · 100 check u32
//! ```
//!
//! A record with a wrong checksum is incomplete or foreign, and is ignored, as is a hole in the file.

use warden_policies::growth::{GrowthLine, GrowthVerdict};
use warden_policies::rollup::{ReadingBucket, RollupContext, RollupTier};

pub(super) const RECORD_BYTES: usize = 104;

const CHECKSUM_OFFSET: usize = RECORD_BYTES - 4;

/// Unit of the recorded growth law, caches and budgets. Plots need no more precision, and operators set
/// budgets in round numbers.
const KIB: u64 = 1024;

/// The file contains indexes of this list, so a verdict must keep its index.
const VERDICTS: [GrowthVerdict; 5] = [
    GrowthVerdict::Warming,
    GrowthVerdict::Steady,
    GrowthVerdict::Bounded,
    GrowthVerdict::Suspected,
    GrowthVerdict::Leaking,
];

pub(super) fn encode(bucket: &ReadingBucket, tier: u8) -> [u8; RECORD_BYTES] {
    let mut bytes = [0; RECORD_BYTES];
    let begin = bucket.start.saturating_mul(1000);
    let after = |at: u64| to_u32(at.saturating_sub(begin));
    let RollupContext { generation, verdict, law, kept, soft, hard } = bucket.lines;
    put_bytes(&mut bytes, 0, &bucket.start.to_le_bytes());
    put_bytes(&mut bytes, 8, &after(bucket.first_at).to_le_bytes());
    put_bytes(&mut bytes, 12, &after(bucket.last_at).to_le_bytes());
    put_bytes(&mut bytes, 16, &to_u32(bucket.covered).to_le_bytes());
    put_bytes(&mut bytes, 20, &to_u32(bucket.count).to_le_bytes());
    put_bytes(&mut bytes, 24, &generation.to_le_bytes());
    put_bytes(&mut bytes, 32, &bucket.min.to_le_bytes());
    put_bytes(&mut bytes, 40, &bucket.max.to_le_bytes());
    put_bytes(&mut bytes, 48, &bucket.last.to_le_bytes());
    put_bytes(&mut bytes, 56, &bucket.mean.to_le_bytes());
    let lines = [
        law.map(|law| law.level),
        law.map(|law| law.low),
        law.map(|law| law.high),
        kept.map(|(from, _)| from),
        kept.map(|(_, to)| to),
        soft,
        hard,
    ];
    for (number, line) in lines.into_iter().enumerate() {
        // 0 means that there is no line, so a line is at least 1 KiB.
        let kib = line.map_or(0, |line| to_u32(line / KIB).max(1));
        put_bytes(&mut bytes, 64 + 4 * number, &kib.to_le_bytes());
    }
    bytes[92] =
        VERDICTS.iter().position(|known| *known == verdict).and_then(|at| at.try_into().ok()).unwrap_or(0);
    bytes[93] = tier;
    let check = crc32(&bytes[..CHECKSUM_OFFSET]);
    put_bytes(&mut bytes, CHECKSUM_OFFSET, &check.to_le_bytes());
    bytes
}

/// Returns `None` if the bytes are no valid record of this tier.
pub(super) fn decode(bytes: &[u8], number: u8, tier: RollupTier) -> Option<ReadingBucket> {
    if u32::from_le_bytes(bytes_at(bytes, CHECKSUM_OFFSET)?) != crc32(bytes.get(..CHECKSUM_OFFSET)?)
        || bytes[93] != number
    {
        return None;
    }
    let long = |offset: usize| Some(u64::from_le_bytes(bytes_at(bytes, offset)?));
    let word = |offset: usize| Some(u64::from(u32::from_le_bytes(bytes_at(bytes, offset)?)));
    let line = |number: usize| Some(word(64 + 4 * number)?).map(|kib| (kib > 0).then(|| kib * KIB));
    let start = long(0)?;
    let begin = start.checked_mul(1000)?;
    let min = long(32)?;
    let max = long(40)?;
    let last = long(48)?;
    let mean = f64::from_le_bytes(bytes_at(bytes, 56)?);
    let count = word(20)?;
    if count == 0 || start % tier.seconds != 0 || !mean.is_finite() || min > max {
        return None;
    }
    let law = line(0)?.zip(line(1)?.zip(line(2)?));
    Some(ReadingBucket {
        start,
        seconds: tier.seconds,
        count,
        min,
        max,
        last,
        mean,
        first_at: begin.checked_add(word(8)?)?,
        last_at: begin.checked_add(word(12)?)?,
        covered: word(16)?,
        lines: RollupContext {
            generation: long(24)?,
            verdict: VERDICTS.get(usize::from(bytes[92])).copied().unwrap_or_default(),
            law: law.map(|(level, (low, high))| GrowthLine { level, low, high }),
            kept: line(3)?.zip(line(4)?),
            soft: line(5)?,
            hard: line(6)?,
        },
    })
}

fn put_bytes(bytes: &mut [u8], offset: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(offset..offset + value.len()) {
        place.copy_from_slice(value);
    }
}

fn bytes_at<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..offset + N)?.try_into().ok()
}

fn to_u32(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// CRC-32 of Ethernet, gzip and PNG, which detects every burst of up to 32 bits.
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use warden_policies::rollup::RollupReading;

    pub(crate) const TIER: RollupTier = RollupTier { seconds: 10, slots: 6 };

    /// A bucket with everything in it.
    pub(crate) fn full(second: u64, bytes: u64) -> ReadingBucket {
        let lines = RollupContext {
            generation: 7,
            verdict: GrowthVerdict::Leaking,
            law: Some(GrowthLine { level: 5 << 20, low: 4 << 20, high: 6 << 20 }),
            kept: Some((1 << 20, 9 << 30)),
            soft: Some(1 << 31),
            hard: Some(3 << 40),
        };
        ReadingBucket::from_reading(&RollupReading { at: second * 1000 + 17, bytes, lines }, TIER)
    }

    #[test]
    fn the_check_is_the_usual_one() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
    }

    #[test]
    fn a_bucket_comes_back_as_it_was_and_no_bit_of_it_may_differ() {
        let bucket = full(1_790_000_005, 123_456_789);
        let bytes = encode(&bucket, 2);
        assert_eq!(decode(&bytes, 2, TIER), Some(bucket));
        assert_eq!(decode(&bytes, 1, TIER), None, "of another tier");
        assert_eq!(decode(&bytes[..RECORD_BYTES - 1], 2, TIER), None, "torn");
        assert_eq!(decode(&[0; RECORD_BYTES], 0, TIER), None, "a hole");
        for bit in 0..RECORD_BYTES * 8 {
            let mut other = bytes;
            other[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&other, 2, TIER), None, "bit {bit}");
        }
    }
}
