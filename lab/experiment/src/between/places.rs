//! Chooses the next revision: halfway between the closest healthy and ill revisions, avoiding revisions that
//! cannot be judged.

use std::collections::BTreeMap;

use super::conclusion::RevisionStanding;

/// Most revisions between two judged ones that cannot be judged before a search ends, because each costs a
/// build.
pub(super) const UNKNOWN_MOST: usize = 16;

/// Known judgements of the revisions.
#[derive(Clone, Debug)]
pub(super) struct KnownRevisions {
    /// Index of the newer end; the older end has index 0.
    pub(super) last: usize,
    /// Index of the end with the symptom.
    pub(super) ill: usize,
    known: BTreeMap<usize, RevisionStanding>,
}

impl KnownRevisions {
    /// Creates revisions without any judgement.
    pub(super) const fn new(last: usize) -> Self {
        Self { last, ill: 0, known: BTreeMap::new() }
    }

    /// Returns the end without the symptom.
    pub(super) const fn healthy(&self) -> usize {
        self.last - self.ill
    }

    /// Records which end has the symptom.
    pub(super) fn set_ill_end(&mut self, is_newer: bool) {
        self.ill = if is_newer { self.last } else { 0 };
        self.set(self.ill, RevisionStanding::Ill);
    }

    /// Records the judgement of a revision.
    pub(super) fn set(&mut self, revision: usize, standing: RevisionStanding) {
        self.known.insert(revision, standing);
    }

    /// Returns the judgement of a revision, if known.
    pub(super) fn standing(&self, revision: usize) -> Option<&RevisionStanding> {
        self.known.get(&revision)
    }

    /// Returns the healthy and the ill revision between which the change lies, as close as known.
    pub(super) fn bounds(&self) -> Option<(usize, usize)> {
        let away = |at: &usize| at.abs_diff(self.healthy());
        let all = |wanted: RevisionStanding| {
            self.known.iter().filter(move |(_, standing)| **standing == wanted).map(|(at, _)| *at)
        };
        let healthy = all(RevisionStanding::Healthy).max_by_key(away)?;
        // Ignore an ill revision before a healthy one: it had another cause, which a later revision removed.
        let ill = all(RevisionStanding::Ill).filter(|at| away(at) > away(&healthy)).min_by_key(away)?;
        Some((healthy, ill))
    }

    /// Returns the next revision; `None` if the ends are unknown or no revision between them can be judged.
    pub(super) fn next(&self) -> Option<usize> {
        let (healthy, ill) = self.bounds()?;
        let (low, high) = (healthy.min(ill), healthy.max(ill));
        let unknown: Vec<usize> = (low + 1..high).filter(|at| self.known.contains_key(at)).collect();
        next_between(low, high, &unknown).filter(|_| unknown.len() < UNKNOWN_MOST)
    }
}

/// Chooses the next revision between two known ones. A single revision that cannot be judged is avoided. If
/// there are several, search first outside the block that they form, then inside.
fn next_between(low: usize, high: usize, unknown: &[usize]) -> Option<usize> {
    let middle = low.midpoint(high);
    // Returns the middle of the widest gap that contains a revision.
    let within = |gaps: &[(usize, usize)]| {
        let open = gaps.iter().filter(|(from, to)| to - from > 1);
        open.max_by_key(|(from, to)| to - from).map(|(from, to)| from.midpoint(*to))
    };
    match unknown {
        [] => Some(middle).filter(|at| *at > low),
        [one] => (low + 1..high).filter(|at| at != one).min_by_key(|at| (at.abs_diff(middle), *at)),
        [first, .., last] => within(&[(low, *first), (*last, high)])
            .or_else(|| within(&unknown.windows(2).map(|pair| (pair[0], pair[1])).collect::<Vec<_>>())),
    }
}
