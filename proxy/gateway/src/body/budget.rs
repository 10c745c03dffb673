//! The memory budget for request bodies, common to all requests. Holding bytes needs a reservation.
//!
//! A client is identified by its address, and by its key if keys are used. No client may hold more than twice
//! the bytes left in the budget: a single client gets at most two thirds, two clients two fifths each. So the
//! next client always finds some bytes left.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

use crate::body::{ByteEdit, splice};
use crate::observe::GatewayGauges;

/// Bytes that a held piece needs apart from its content: its handle, and a share of its buffer. Without them,
/// a body in pieces of one byte would take many times its budget.
const PIECE_OVERHEAD: usize = 64;

/// Maximum ratio between the bytes that one client holds and the bytes left.
const MAX_SHARE_RATIO: usize = 2;

/// Returns the maximum number of bytes of a budget of `all` that one client can hold.
pub fn max_client_bytes(all: u64) -> u64 {
    let times = MAX_SHARE_RATIO as u64;
    all / (times + 1) * times
}

/// Bytes held for one address or one key.
#[derive(Debug, Default)]
pub(crate) struct ClientShare(AtomicUsize);

#[derive(Clone, Debug)]
pub(crate) struct ClientPeer {
    pub(crate) ip: IpAddr,
    /// Bytes held of request bodies from this address.
    pub(crate) held: Arc<ClientShare>,
}

/// The common budget and the shares of one client.
#[derive(Clone, Debug)]
pub(crate) struct BodyBudget {
    gauges: Arc<GatewayGauges>,
    limit: usize,
    peer: Option<Arc<ClientShare>>,
    key: Option<Arc<ClientShare>>,
}

impl BodyBudget {
    pub(crate) fn new(gauges: Arc<GatewayGauges>, limit: usize) -> Self {
        Self { gauges, limit, peer: None, key: None }
    }

    pub(crate) fn for_client(&self, peer: Arc<ClientShare>, key: Option<Arc<ClientShare>>) -> Self {
        Self { peer: Some(peer), key, ..self.clone() }
    }

    fn take(&self, bytes: usize) -> bool {
        self.take_below(self.limit, MAX_SHARE_RATIO, bytes)
    }

    /// Reserves bytes within `limit` in total, and for this client within `times` the bytes left.
    fn take_below(&self, limit: usize, times: usize, bytes: usize) -> bool {
        let used = &self.gauges.held_bytes;
        let Some(before) = add_within_limit(used, bytes, limit) else { return false };
        let most = self.limit.saturating_sub(before.saturating_add(bytes)).saturating_mul(times);
        let mut fits = true;
        for share in self.shares() {
            fits &= share.0.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) <= most;
        }
        if !fits {
            self.release(bytes);
        }
        fits
    }

    fn release(&self, bytes: usize) {
        for share in self.shares() {
            share.0.fetch_sub(bytes, Ordering::Relaxed);
        }
        self.gauges.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn shares(&self) -> impl Iterator<Item = &Arc<ClientShare>> {
        self.peer.iter().chain(&self.key)
    }
}

/// Pieces of one body in order, counted in the budget and never joined into one buffer.
#[derive(Debug)]
pub(crate) struct HeldPieces {
    pieces: VecDeque<Bytes>,
    bytes: u64,
    reserved: usize,
    budget: BodyBudget,
}

impl HeldPieces {
    pub(crate) fn new(budget: BodyBudget) -> Self {
        Self { pieces: VecDeque::new(), bytes: 0, reserved: 0, budget }
    }

    /// Reserves memory for another use than pieces; `None` if the budget is used up.
    pub(crate) fn reserved(budget: BodyBudget, bytes: usize) -> Option<Self> {
        budget.take(bytes).then(|| {
            let mut held = Self::new(budget);
            held.reserved = bytes;
            held
        })
    }

    pub(crate) fn new_empty(&self) -> Self {
        Self::new(self.budget.clone())
    }

    pub(crate) fn len(&self) -> u64 {
        self.bytes
    }

    /// Returns whether any piece is held, even an empty one.
    pub(crate) fn has_pieces(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// Returns whether at most half of the budget is used. If not, dispensable bytes are released.
    pub(crate) fn is_ample(&self) -> bool {
        self.budget.gauges.held_bytes.load(Ordering::Relaxed) <= self.budget.limit / 2
    }

    /// Holds a piece, or returns it as an error if the budget is used up.
    pub(crate) fn push(&mut self, piece: Bytes) -> Result<(), Bytes> {
        self.push_below(self.budget.limit, MAX_SHARE_RATIO, piece)
    }

    /// Holds a piece that could stay in the socket as well. Returns it as an error if half of the budget is
    /// used, or if the client would hold more than is left. The other half is for requests that cannot
    /// proceed without it.
    pub(crate) fn push_ahead(&mut self, piece: Bytes) -> Result<(), Bytes> {
        self.push_below(self.budget.limit / 2, MAX_SHARE_RATIO / 2, piece)
    }

    fn push_below(&mut self, limit: usize, times: usize, piece: Bytes) -> Result<(), Bytes> {
        let cost = piece.len() + PIECE_OVERHEAD;
        if !self.budget.take_below(limit, times, cost) {
            return Err(piece);
        }
        self.reserved += cost;
        self.push_unreserved(piece);
        Ok(())
    }

    /// Holds a last piece without reserving its bytes: the piece is in memory anyway.
    pub(crate) fn push_unreserved(&mut self, piece: Bytes) {
        self.bytes += piece.len() as u64;
        self.pieces.push_back(piece);
    }

    pub(crate) fn pop(&mut self) -> Option<Bytes> {
        let piece = self.pieces.pop_front()?;
        self.bytes -= piece.len() as u64;
        let back = (piece.len() + PIECE_OVERHEAD).min(self.reserved);
        self.reserved -= back;
        self.budget.release(back);
        Some(piece)
    }

    pub(crate) fn pieces(&self) -> impl Iterator<Item = &Bytes> {
        self.pieces.iter()
    }

    /// Applies edits. Returns false, without any change, if the budget has no room for them.
    pub(crate) fn edit(&mut self, edits: Vec<ByteEdit>) -> bool {
        let added: usize = edits.iter().map(|edit| edit.text.len() + 2 * PIECE_OVERHEAD).sum();
        if !self.budget.take(added) {
            return false;
        }
        self.reserved += added;
        self.pieces = splice::apply_edits(std::mem::take(&mut self.pieces), edits);
        self.bytes = self.pieces.iter().map(|piece| piece.len() as u64).sum();
        true
    }

    /// Returns all pieces in one buffer, without a copy if there is only one.
    pub(crate) fn joined(&self) -> Bytes {
        match self.pieces.len() {
            1 => self.pieces[0].clone(),
            _ => Vec::from(self.shared_pieces()).concat().into(),
        }
    }

    /// Returns the same pieces, not counted again. The caller must keep `self` as long as they live.
    pub(crate) fn shared_pieces(&self) -> VecDeque<Bytes> {
        self.pieces.clone()
    }
}

impl Drop for HeldPieces {
    fn drop(&mut self) {
        self.budget.release(self.reserved);
    }
}

/// Adds to a sum and returns its old value; `None` if the sum would exceed `limit`.
pub(crate) fn add_within_limit(sum: &AtomicUsize, more: usize, limit: usize) -> Option<usize> {
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
        let budget = BodyBudget::new(Arc::new(GatewayGauges::default()), 3_000_000);
        let share = Arc::<ClientShare>::default;
        let fill = |held: &mut HeldPieces| {
            while held.push(Bytes::from_static(&[0; 10_000])).is_ok() {}
            held.len()
        };
        let (peer, key) = (share(), share());
        let mut one = HeldPieces::new(budget.for_client(peer.clone(), None));
        let first = fill(&mut one);
        assert!((1_900_000..=2_000_000).contains(&first), "{first}");
        assert_eq!(
            fill(&mut HeldPieces::new(budget.for_client(peer.clone(), Some(key.clone())))),
            0,
            "the same address"
        );
        let mut two = HeldPieces::new(budget.for_client(share(), Some(key.clone())));
        let second = fill(&mut two);
        assert!((600_000..=667_000).contains(&second), "{second}");
        assert_eq!(
            fill(&mut HeldPieces::new(budget.for_client(share(), Some(key.clone())))),
            0,
            "the same key"
        );
        assert!(fill(&mut HeldPieces::new(budget.for_client(share(), Some(share())))) > 200_000, "neither");
        drop((one, two));
        assert_eq!((peer.0.load(Ordering::Relaxed), key.0.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn the_budget_is_common_and_comes_back() {
        let gauges = Arc::new(GatewayGauges::default());
        let budget = BodyBudget::new(gauges.clone(), 300);
        let mut one = HeldPieces::new(budget.clone());
        let mut two = HeldPieces::new(budget.clone());
        assert!(one.push(Bytes::from_static(&[0; 100])).is_ok());
        assert!(two.push(Bytes::from_static(&[0; 50])).is_ok());
        assert_eq!(two.push(Bytes::from_static(&[0; 50])).unwrap_err().len(), 50);
        two.push_unreserved(Bytes::from_static(&[0; 50]));
        assert_eq!((one.len(), two.len()), (100, 100));
        assert_eq!(one.pop().unwrap().len(), 100);
        assert!(one.pop().is_none());
        assert_eq!(gauges.held_bytes.load(Ordering::Relaxed), 50 + PIECE_OVERHEAD);
        while two.pop().is_some() {}
        drop(one);
        assert_eq!(gauges.held_bytes.load(Ordering::Relaxed), 0);
        drop(two);
        assert_eq!(gauges.held_bytes.load(Ordering::Relaxed), 0);
    }
}
