//! Mappings that were counted: they end in parts, or several at once, so a key is not enough.
//!
//! Two short lists under a lock that spins: mappings come and go some times a second, not some million times.
//!
//! An end may be refused, and as soon as it is granted another thread may be given the same addresses. So what is about to
//! end is marked first, and it is taken away, or loses its mark, when the answer is known; whatever is counted there
//! meanwhile has no mark or another.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::layout::{COUNT_UNIT, header};
use crate::live::RANGES_AT;
use crate::state::{self, private};
use crate::sys;

const RANGES: usize = 8192;
/// Bytes of a list: lock, length, and three words for each range.
const LIST: usize = 16 + RANGES * 24;
/// Bytes of both lists.
pub(crate) const BYTES: usize = 2 * LIST;
/// Turns to wait for the lock without giving the processor away.
const SPINS: u32 = 256;
/// Times that the processor is given away before something is left uncounted: a thread that holds the lock may have been
/// stopped for good, by a signal or a debugger.
const YIELDS: u32 = 20_000;
/// The same after that has happened.
const FEWER_YIELDS: u32 = 4;

#[derive(Clone, Copy)]
pub(crate) enum List {
    /// Anonymous host memory.
    Host = 0,
    Device = 1,
}

#[derive(Clone, Copy)]
struct Range {
    start: u64,
    end: u64,
    site: u32,
    /// Whether the mapping as such ends with it: of one that was taken apart only one part does.
    whole: bool,
    /// Of the call that is about to end it; 0 for none.
    mark: u32,
}

/// In the third word of a range: record, [`Range::whole`], mark.
const WHOLE: u64 = 1 << 31;

impl Range {
    fn count(&self) -> u64 {
        if self.whole { COUNT_UNIT } else { 0 }
    }

    fn bytes(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

/// A list while we have its lock.
struct Held(usize);

impl Held {
    fn lock(list: List) -> Option<Self> {
        static WAITED_IN_VAIN: AtomicBool = AtomicBool::new(false);
        let base = RANGES_AT + list as usize * LIST;
        let lock = private(base)?;
        let yields = if WAITED_IN_VAIN.load(Ordering::Relaxed) { FEWER_YIELDS } else { YIELDS };
        for turn in 0..SPINS + yields {
            if lock.compare_exchange_weak(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                WAITED_IN_VAIN.store(false, Ordering::Relaxed);
                return Some(Self(base));
            }
            if turn < SPINS {
                core::hint::spin_loop();
            } else {
                // SAFETY: takes nothing and keeps nothing.
                unsafe { sys::sched_yield() };
            }
        }
        WAITED_IN_VAIN.store(true, Ordering::Relaxed);
        None
    }

    fn word(&self, index: usize) -> u64 {
        private(self.0 + index * 8).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    fn put(&self, index: usize, value: u64) {
        if let Some(word) = private(self.0 + index * 8) {
            word.store(value, Ordering::Relaxed);
        }
    }

    fn len(&self) -> usize {
        usize::try_from(self.word(1)).unwrap_or(0).min(RANGES)
    }

    fn get(&self, index: usize) -> Range {
        let at = 2 + index * 3;
        let rest = self.word(at + 2);
        Range {
            start: self.word(at),
            end: self.word(at + 1),
            site: (rest & (WHOLE - 1)) as u32,
            whole: rest & WHOLE != 0,
            mark: (rest >> 32) as u32,
        }
    }

    fn set(&self, index: usize, range: Range) {
        let at = 2 + index * 3;
        self.put(at, range.start);
        self.put(at + 1, range.end);
        let whole = if range.whole { WHOLE } else { 0 };
        self.put(at + 2, u64::from(range.mark) << 32 | whole | u64::from(range.site));
    }

    fn push(&self, range: Range) -> bool {
        let len = self.len();
        if len == RANGES {
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

    /// Marks what lies between; false if nothing does. What another call has marked is its own, unless `all` is wanted.
    fn mark(&self, begin: u64, limit: u64, mark: u32, all: bool) -> bool {
        let (mut any, mut index) = (false, 0);
        while index < self.len() {
            let range = self.get(index);
            let (first, stop) = (range.start.max(begin), range.end.min(limit));
            if first < stop && range.mark != mark && (all || range.mark == 0) {
                let before = Range { end: first, ..range };
                let after = Range { start: stop, whole: range.whole && before.bytes() == 0, ..range };
                let alone = before.bytes() == 0 && after.bytes() == 0;
                let inside = Range { start: first, end: stop, mark, whole: range.whole && alone, ..range };
                let parts = usize::from(before.bytes() > 0) + usize::from(after.bytes() > 0);
                if self.len() + parts > RANGES {
                    state::count(header::UNFOLLOWED);
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

    /// Takes away what has this mark; tells `gone` the record, bytes, and how many mappings (in 256ths) it was.
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

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(lock) = private(self.0) {
            lock.store(0, Ordering::Release);
        }
    }
}

/// A mark that nobody has; there are four billion.
fn fresh() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed).max(1)
}

/// Adds a range; false if it will not be followed. What was there before has ended without a word; `gone` is told.
pub(crate) fn add(
    list: List,
    start: usize,
    length: usize,
    site: u32,
    mut gone: impl FnMut(u32, u64, u64),
) -> bool {
    let Some(held) = Held::lock(list) else { return false };
    let (start, end) = (start as u64, (start as u64).saturating_add(length as u64));
    let mark = fresh();
    // Whoever marked it was unmapping it, and that is done: else the kernel would not have given the place away.
    if held.mark(start, end, mark, true) {
        held.take(mark, &mut gone);
    }
    held.push(Range { start, end, site, whole: true, mark: 0 })
}

/// Something that is about to end.
#[derive(Clone, Copy)]
pub(crate) struct Leaving {
    list: List,
    mark: u32,
}

/// Marks whatever of the list lies in a range that is about to end; `None` if nothing does.
pub(crate) fn leaving(list: List, start: usize, length: usize) -> Option<Leaving> {
    let Some(held) = Held::lock(list) else {
        state::count(header::UNFOLLOWED);
        return None;
    };
    let mark = fresh();
    let begin = start as u64;
    held.mark(begin, begin.saturating_add(length as u64), mark, false).then_some(Leaving { list, mark })
}

impl Leaving {
    pub(crate) fn gone(self, mut gone: impl FnMut(u32, u64, u64)) {
        match Held::lock(self.list) {
            Some(held) => held.take(self.mark, &mut gone),
            None => state::count(header::UNFOLLOWED),
        }
    }

    /// It has not.
    pub(crate) fn stayed(self) {
        let Some(held) = Held::lock(self.list) else { return state::count(header::UNFOLLOWED) };
        for index in 0..held.len() {
            let range = held.get(index);
            if range.mark == self.mark {
                held.set(index, Range { mark: 0, ..range });
            }
        }
    }
}
