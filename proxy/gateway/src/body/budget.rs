//! The bytes of request bodies that all requests together may hold in memory. A request reserves before it holds and
//! gives back when it lets go, also by being dropped.
//!
//! No client, which is an address and where keys are asked for also a key, may hold more than twice what is left. One alone
//! comes to two thirds of all, two to two fifths each, and however many of them hold as much as they may, something is left
//! for the next one.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

use crate::body::splice::{self, Edit};
use crate::observe::Gauges;

/// What a held piece costs beside its bytes: its handle, and a share of the buffer it is cut from. Without it, a body
/// in pieces of one byte would cost many times its budget.
const PER_PIECE: usize = 64;

/// A client may hold so many times what is left.
const TIMES_LEFT: usize = 2;

/// The most of a budget of so many bytes that one client comes to hold: when nobody else holds any.
pub fn most_of_one_client(all: u64) -> u64 {
    let times = TIMES_LEFT as u64;
    all / (times + 1) * times
}

/// What is held for one client: an address, or a key.
#[derive(Debug, Default)]
pub(crate) struct Share(AtomicUsize);

/// A client by its address.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) ip: IpAddr,
    /// What is held of the bodies that come from there.
    pub(crate) held: Arc<Share>,
}

/// The common budget, and the shares of whoever takes from it.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    gauges: Arc<Gauges>,
    limit: usize,
    peer: Option<Arc<Share>>,
    key: Option<Arc<Share>>,
}

impl Budget {
    pub(crate) fn new(gauges: Arc<Gauges>, limit: usize) -> Self {
        Self { gauges, limit, peer: None, key: None }
    }

    /// The same for a client.
    pub(crate) fn of(&self, peer: Arc<Share>, key: Option<Arc<Share>>) -> Self {
        Self { peer: Some(peer), key, ..self.clone() }
    }

    fn take(&self, bytes: usize) -> bool {
        self.take_below(self.limit, TIMES_LEFT, bytes)
    }

    /// Takes, if all hold no more than `limit` then, and this client no more than `times` what is left.
    fn take_below(&self, limit: usize, times: usize, bytes: usize) -> bool {
        let used = &self.gauges.held_bytes;
        let Some(before) = add_up_to(used, bytes, limit) else { return false };
        let most = self.limit.saturating_sub(before.saturating_add(bytes)).saturating_mul(times);
        let mut fits = true;
        for share in self.shares() {
            fits &= share.0.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) <= most;
        }
        if !fits {
            self.give(bytes);
        }
        fits
    }

    fn give(&self, bytes: usize) {
        for share in self.shares() {
            share.0.fetch_sub(bytes, Ordering::Relaxed);
        }
        self.gauges.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn shares(&self) -> impl Iterator<Item = &Arc<Share>> {
        self.peer.iter().chain(&self.key)
    }
}

/// Pieces of one body, in order, under the budget. Never one contiguous copy.
#[derive(Debug)]
pub(crate) struct Held {
    pieces: VecDeque<Bytes>,
    bytes: u64,
    reserved: usize,
    budget: Budget,
}

impl Held {
    pub(crate) fn new(budget: Budget) -> Self {
        Self { pieces: VecDeque::new(), bytes: 0, reserved: 0, budget }
    }

    /// No piece, but memory that something else than pieces takes; `None` if the budget is used up.
    pub(crate) fn reserved(budget: Budget, bytes: usize) -> Option<Self> {
        budget.take(bytes).then(|| {
            let mut held = Self::new(budget);
            held.reserved = bytes;
            held
        })
    }

    /// Nothing held, under the same budget.
    pub(crate) fn anew(&self) -> Self {
        Self::new(self.budget.clone())
    }

    pub(crate) fn len(&self) -> u64 {
        self.bytes
    }

    /// Whether a piece is held, however small.
    pub(crate) fn has_pieces(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// Whether no more than half of the budget is used: what could do without goes first.
    pub(crate) fn is_ample(&self) -> bool {
        self.budget.gauges.held_bytes.load(Ordering::Relaxed) <= self.budget.limit / 2
    }

    /// Keeps a piece; the piece comes back if the budget is used up.
    pub(crate) fn push(&mut self, piece: Bytes) -> Result<(), Bytes> {
        self.push_below(self.budget.limit, TIMES_LEFT, piece)
    }

    /// Keeps a piece that could as well wait where it is; the piece comes back if half of the budget is used up, or the client
    /// holds as much as is left. The rest is for those who cannot go on without.
    pub(crate) fn push_ahead(&mut self, piece: Bytes) -> Result<(), Bytes> {
        self.push_below(self.budget.limit / 2, TIMES_LEFT / 2, piece)
    }

    fn push_below(&mut self, limit: usize, times: usize, piece: Bytes) -> Result<(), Bytes> {
        let cost = piece.len() + PER_PIECE;
        if !self.budget.take_below(limit, times, cost) {
            return Err(piece);
        }
        self.reserved += cost;
        self.push_unreserved(piece);
        Ok(())
    }

    /// Keeps a piece that is at hand anyway and will be the last, whatever the budget says.
    pub(crate) fn push_unreserved(&mut self, piece: Bytes) {
        self.bytes += piece.len() as u64;
        self.pieces.push_back(piece);
    }

    /// Lets the first piece go.
    pub(crate) fn pop(&mut self) -> Option<Bytes> {
        let piece = self.pieces.pop_front()?;
        self.bytes -= piece.len() as u64;
        let back = (piece.len() + PER_PIECE).min(self.reserved);
        self.reserved -= back;
        self.budget.give(back);
        Some(piece)
    }

    /// The pieces, to be looked at.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = &Bytes> {
        self.pieces.iter()
    }

    /// Changes the bytes in place; false, and nothing is changed, if the budget has no room for what is added.
    pub(crate) fn edit(&mut self, edits: Vec<Edit>) -> bool {
        let added: usize = edits.iter().map(|edit| edit.text.len() + 2 * PER_PIECE).sum();
        if !self.budget.take(added) {
            return false;
        }
        self.reserved += added;
        self.pieces = splice::apply(std::mem::take(&mut self.pieces), edits);
        self.bytes = self.pieces.iter().map(|piece| piece.len() as u64).sum();
        true
    }

    /// The same pieces again, sharing their bytes and therefore outside the budget: whoever asks keeps `self` as long.
    pub(crate) fn again(&self) -> VecDeque<Bytes> {
        self.pieces.clone()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.give(self.reserved);
    }
}

/// Adds to a sum that may not pass `limit`, and returns what it was; `None` if it would pass it.
pub(crate) fn add_up_to(sum: &AtomicUsize, more: usize, limit: usize) -> Option<usize> {
    let mut before = sum.load(Ordering::Relaxed);
    loop {
        let after = before.checked_add(more).filter(|after| *after <= limit)?;
        match sum.compare_exchange_weak(before, after, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return Some(before),
            Err(newer) => before = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_holds_much_leaves_room_for_others_by_its_address_and_by_its_key() {
        let budget = Budget::new(Arc::new(Gauges::default()), 3_000_000);
        let share = Arc::<Share>::default;
        let fill = |held: &mut Held| {
            while held.push(Bytes::from_static(&[0; 10_000])).is_ok() {}
            held.len()
        };
        let (peer, key) = (share(), share());
        let mut one = Held::new(budget.of(peer.clone(), None));
        let first = fill(&mut one);
        assert!((1_900_000..=2_000_000).contains(&first), "{first}");
        assert_eq!(fill(&mut Held::new(budget.of(peer.clone(), Some(key.clone())))), 0, "the same address");
        let mut two = Held::new(budget.of(share(), Some(key.clone())));
        let second = fill(&mut two);
        assert!((600_000..=667_000).contains(&second), "{second}");
        assert_eq!(fill(&mut Held::new(budget.of(share(), Some(key.clone())))), 0, "the same key");
        assert!(fill(&mut Held::new(budget.of(share(), Some(share())))) > 200_000, "neither");
        drop((one, two));
        assert_eq!((peer.0.load(Ordering::Relaxed), key.0.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn the_budget_is_common_and_comes_back() {
        let gauges = Arc::new(Gauges::default());
        let budget = Budget::new(gauges.clone(), 300);
        let mut one = Held::new(budget.clone());
        let mut two = Held::new(budget.clone());
        assert!(one.push(Bytes::from_static(&[0; 100])).is_ok());
        assert!(two.push(Bytes::from_static(&[0; 50])).is_ok());
        assert_eq!(two.push(Bytes::from_static(&[0; 50])).unwrap_err().len(), 50);
        two.push_unreserved(Bytes::from_static(&[0; 50]));
        assert_eq!((one.len(), two.len()), (100, 100));
        assert_eq!(one.pop().unwrap().len(), 100);
        assert!(one.pop().is_none());
        assert_eq!(gauges.held_bytes.load(Ordering::Relaxed), 50 + PER_PIECE);
        while two.pop().is_some() {}
        drop(one);
        assert_eq!(gauges.held_bytes.load(Ordering::Relaxed), 0);
        drop(two);
        assert_eq!(gauges.held_bytes.load(Ordering::Relaxed), 0);
    }
}
