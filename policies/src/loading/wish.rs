//! Requests for room of waiting models, and the places found for them.

use super::amounts::MemoryAmounts;
use super::facts::ModelId;

/// A model that waits for room. The order of the fields is the order of service.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WaitingModel {
    pub(super) guest: bool,
    /// Position in the queue; 0 for a called companion.
    pub(super) place: u64,
    pub(super) name: ModelId,
    /// Others may be unloaded for this model.
    pub(super) urgent: bool,
}

pub(super) type Reservations = Vec<(ModelId, MemoryAmounts)>;

#[derive(Clone, Copy)]
pub(super) struct LoadWish<'a> {
    pub(super) name: &'a ModelId,
    /// Room reserved for earlier models, and perhaps for this one.
    pub(super) kept: &'a [(ModelId, MemoryAmounts)],
    pub(super) free: Option<&'a MemoryAmounts>,
    pub(super) party: &'a [ModelId],
}

pub(super) enum Placement {
    /// Room is free now. Holds the GPUs of each process, the promise, and the reservations for companions.
    Now(Vec<Vec<usize>>, MemoryAmounts, Reservations),
    /// Room is free once models have stopped. Holds the promise, and the reservations for companions.
    Later(MemoryAmounts, Reservations),
    Nowhere,
}
