//! Two short lists of counted mappings, under a spin lock. A program may unmap a mapping in parts, or
//! together with others, so a table with one key per mapping does not suffice. Mappings change some times a
//! second only.
//!
//! Unmapping may fail, and as soon as it succeeds, another thread may get the same addresses. Ranges about to
//! be unmapped are therefore marked first, and removed or unmarked when the result is known. A range that was
//! counted at these addresses meanwhile has no mark, or another one.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::layout::{COUNT_UNIT, header};
use crate::live::RANGES_OFFSET;
use crate::state::{self, private_u64};
use crate::sys;

const MAX_RANGES: usize = 8192;
/// Bytes of a list: lock, length, and three words per range.
const LIST_BYTES: usize = 16 + MAX_RANGES * 24;
pub(crate) const LISTS_BYTES: usize = 2 * LIST_BYTES;
const LOCK_SPINS: u32 = 256;
/// Yields before an event is left uncounted: a signal or a debugger may have stopped the lock's holder for
/// good.
const LOCK_YIELDS: u32 = 20_000;
/// Yields before an event is left uncounted, after an earlier wait for the lock has failed.
const LOCK_YIELDS_AFTER_TIMEOUT: u32 = 4;

#[derive(Clone, Copy)]
pub(crate) enum RangeList {
    Host = 0,
    Device = 1,
}

#[derive(Clone, Copy)]
struct MappedRange {
    start: u64,
    end: u64,
    site: u32,
    /// The mapping counts as ended when this range is removed. Only one part of a split mapping has this
    /// flag.
    whole: bool,
    /// Mark of the call that is about to unmap this range; 0 for none.
    mark: u32,
}

/// Bit of [`MappedRange::whole`] in the third word of a range, between record and mark.
const WHOLE_BIT: u64 = 1 << 31;

impl MappedRange {
    fn count(&self) -> u64 {
        if self.whole { COUNT_UNIT } else { 0 }
    }

    fn bytes(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

struct LockedList(usize);

impl LockedList {
    fn lock(list: RangeList) -> Option<Self> {
        static WAITED_IN_VAIN: AtomicBool = AtomicBool::new(false);
        let base = RANGES_OFFSET + list as usize * LIST_BYTES;
        let lock = private_u64(base)?;
        let yields =
            if WAITED_IN_VAIN.load(Ordering::Relaxed) { LOCK_YIELDS_AFTER_TIMEOUT } else { LOCK_YIELDS };
        for turn in 0..LOCK_SPINS + yields {
            if lock.compare_exchange_weak(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                WAITED_IN_VAIN.store(false, Ordering::Relaxed);
                return Some(Self(base));
            }
            if turn < LOCK_SPINS {
                core::hint::spin_loop();
            } else {
                // SAFETY: `sched_yield` takes no arguments and accesses no memory of ours.
                unsafe { sys::sched_yield() };
            }
        }
        WAITED_IN_VAIN.store(true, Ordering::Relaxed);
        None
    }

    fn word(&self, index: usize) -> u64 {
        private_u64(self.0 + index * 8).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    fn put(&self, index: usize, value: u64) {
        if let Some(word) = private_u64(self.0 + index * 8) {
            word.store(value, Ordering::Relaxed);
        }
    }

    fn len(&self) -> usize {
        usize::try_from(self.word(1)).unwrap_or(0).min(MAX_RANGES)
    }

    fn get(&self, index: usize) -> MappedRange {
        let at = 2 + index * 3;
        let rest = self.word(at + 2);
        MappedRange {
            start: self.word(at),
            end: self.word(at + 1),
            site: (rest & (WHOLE_BIT - 1)) as u32,
            whole: rest & WHOLE_BIT != 0,
            mark: (rest >> 32) as u32,
        }
    }

    fn set(&self, index: usize, range: MappedRange) {
        let at = 2 + index * 3;
        self.put(at, range.start);
        self.put(at + 1, range.end);
        let whole = if range.whole { WHOLE_BIT } else { 0 };
        self.put(at + 2, u64::from(range.mark) << 32 | whole | u64::from(range.site));
    }

    fn push(&self, range: MappedRange) -> bool {
        let len = self.len();
        if len == MAX_RANGES {
            return false;
        }
        self.set(len, range);
        self.put(1, len as u64 + 1);
        true
    }

    fn swap_remove(&self, index: usize) {
        let last = self.len().saturating_sub(1);
        self.set(index, self.get(last));
        self.put(1, last as u64);
    }

    /// Marks all ranges between two addresses; returns false if there are none. Skips ranges that other calls
    /// have marked, unless `all`.
    fn mark(&self, begin: u64, limit: u64, mark: u32, all: bool) -> bool {
        let mut any = false;
        let mut index = 0;
        while index < self.len() {
            let range = self.get(index);
            let first = range.start.max(begin);
            let stop = range.end.min(limit);
            if first < stop && range.mark != mark && (all || range.mark == 0) {
                let before = MappedRange { end: first, ..range };
                let after = MappedRange { start: stop, whole: range.whole && before.bytes() == 0, ..range };
                let alone = before.bytes() == 0 && after.bytes() == 0;
                let inside =
                    MappedRange { start: first, end: stop, mark, whole: range.whole && alone, ..range };
                let parts = usize::from(before.bytes() > 0) + usize::from(after.bytes() > 0);
                if self.len() + parts > MAX_RANGES {
                    state::increment(header::UNFOLLOWED);
                } else {
                    self.set(index, inside);
                    for part in [before, after] {
                        if part.bytes() > 0 {
                            self.push(part);
                        }
                    }
                    any = true;
                }
            }
            index += 1;
        }
        any
    }

    /// Removes ranges with this mark; passes record, bytes and number of mappings (in 256ths) to `gone`.
    fn take(&self, mark: u32, gone: &mut impl FnMut(u32, u64, u64)) {
        let mut index = 0;
        while index < self.len() {
            let range = self.get(index);
            if range.mark == mark {
                gone(range.site, range.bytes(), range.count());
                self.swap_remove(index);
            } else {
                index += 1;
            }
        }
    }
}

impl Drop for LockedList {
    fn drop(&mut self) {
        if let Some(lock) = private_u64(self.0) {
            lock.store(0, Ordering::Release);
        }
    }
}

/// Returns an unused mark; there are four billion.
fn new_mark() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed).max(1)
}

/// Adds a range; returns false if it cannot be tracked. Older ranges at the same addresses were unmapped
/// without a count: they are removed and passed to `gone`.
pub(crate) fn add_range(
    list: RangeList,
    start: usize,
    length: usize,
    site: u32,
    mut gone: impl FnMut(u32, u64, u64),
) -> bool {
    let Some(held) = LockedList::lock(list) else { return false };
    let (start, end) = (start as u64, (start as u64).saturating_add(length as u64));
    let mark = new_mark();
    // A call that marked such ranges has finished unmapping, because the kernel has reused the addresses.
    if held.mark(start, end, mark, true) {
        held.take(mark, &mut gone);
    }
    held.push(MappedRange { start, end, site, whole: true, mark: 0 })
}

#[derive(Clone, Copy)]
pub(crate) struct PendingUnmap {
    list: RangeList,
    mark: u32,
}

/// Marks the counted ranges that are about to be unmapped; `None` if there are none.
pub(crate) fn mark_leaving(list: RangeList, start: usize, length: usize) -> Option<PendingUnmap> {
    let Some(held) = LockedList::lock(list) else {
        state::increment(header::UNFOLLOWED);
        return None;
    };
    let mark = new_mark();
    let begin = start as u64;
    held.mark(begin, begin.saturating_add(length as u64), mark, false).then_some(PendingUnmap { list, mark })
}

impl PendingUnmap {
    pub(crate) fn complete(self, mut gone: impl FnMut(u32, u64, u64)) {
        match LockedList::lock(self.list) {
            Some(held) => held.take(self.mark, &mut gone),
            None => state::increment(header::UNFOLLOWED),
        }
    }

    pub(crate) fn cancel(self) {
        let Some(held) = LockedList::lock(self.list) else { return state::increment(header::UNFOLLOWED) };
        for index in 0..held.len() {
            let range = held.get(index);
            if range.mark == self.mark {
                held.set(index, MappedRange { mark: 0, ..range });
            }
        }
    }
}
