//! Hash table of call sites in the published file.

use core::sync::atomic::Ordering;

use crate::layout::{BUSY_HASH, HEADER_BYTES, MAX_FRAMES, MAX_SITES, RECORD_BYTES, header, record};
use crate::state::{self, public_u32, public_u64};

const MAX_PROBES: usize = 256;

const fn record_offset(site: usize, offset: usize) -> usize {
    HEADER_BYTES + site * RECORD_BYTES + offset
}

/// Returns the number of the site's record; `None` if there is no free slot.
pub(crate) fn find_or_create(function: u32, parent: u32, addresses: &[usize]) -> Option<u32> {
    let start = u64::from(function) | u64::from(parent) << 32;
    let hash = addresses
        .iter()
        .fold(mix_bits(start), |hash, address| mix_bits(hash ^ *address as u64))
        .max(BUSY_HASH + 1);
    let first = usize::try_from(hash >> 32).unwrap_or(0);
    for probe in 0..MAX_PROBES {
        let site = (first + probe) % MAX_SITES;
        let state = public_u64(record_offset(site, record::HASH))?;
        let mut seen = state.load(Ordering::Acquire);
        if seen == 0 {
            match state.compare_exchange(0, BUSY_HASH, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => {
                    fill_record(site, function, parent, addresses)?;
                    state.store(hash, Ordering::Release);
                    return u32::try_from(site).ok();
                }
                Err(other) => seen = other,
            }
        }
        // Two threads may write slots for the same site at the same time. The reader adds up both records.
        if seen == hash {
            return u32::try_from(site).ok();
        }
    }
    state::increment(header::SITELESS);
    None
}

fn fill_record(site: usize, function: u32, parent: u32, addresses: &[usize]) -> Option<()> {
    public_u32(record_offset(site, record::FUNCTION))?.store(function, Ordering::Relaxed);
    public_u32(record_offset(site, record::PARENT))?.store(parent, Ordering::Relaxed);
    let count = addresses.len().min(MAX_FRAMES);
    public_u32(record_offset(site, record::FRAME_COUNT))?
        .store(u32::try_from(count).unwrap_or(0), Ordering::Relaxed);
    for (index, address) in addresses.iter().take(count).enumerate() {
        public_u64(record_offset(site, record::FRAME + 8 * index))?.store(*address as u64, Ordering::Relaxed);
    }
    Some(())
}

/// Counts an allocation at a site; only one that is `followed` counts as live.
pub(crate) fn add(site: u32, bytes: u64, count: u64, followed: bool) {
    let site = site as usize;
    add_to_counter(site, record::TOTAL_BYTES, bytes);
    add_to_counter(site, record::TOTAL_COUNT, count);
    if followed {
        add_to_counter(site, record::LIVE_COUNT, count);
        let live = add_to_counter(site, record::LIVE_BYTES, bytes).wrapping_add(bytes).cast_signed();
        if let (Some(peak), Ok(live)) =
            (public_u64(record_offset(site, record::PEAK_BYTES)), u64::try_from(live))
        {
            peak.fetch_max(live, Ordering::Relaxed);
        }
    } else {
        state::increment(header::UNFOLLOWED);
    }
}

pub(crate) fn remove(site: u32, bytes: u64, count: u64) {
    add_to_counter(site as usize, record::LIVE_BYTES, bytes.wrapping_neg());
    add_to_counter(site as usize, record::LIVE_COUNT, count.wrapping_neg());
}

/// Returns the counter's previous value.
fn add_to_counter(site: usize, offset: usize, by: u64) -> u64 {
    if site >= MAX_SITES {
        return 0;
    }
    public_u64(record_offset(site, offset)).map_or(0, |word| word.fetch_add(by, Ordering::Relaxed))
}

const fn mix_bits(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

pub(crate) fn restore_live(site: u32, bytes: u64, count: u64) {
    add_to_counter(site as usize, record::LIVE_BYTES, bytes);
    add_to_counter(site as usize, record::LIVE_COUNT, count);
}
