//! Where on a line is looked: halfway between the healthy and the ill revision that are closest to each other, around those that cannot be
//! judged.

use std::collections::BTreeMap;

use super::conclusion::Standing;

/// So many that cannot be judged between two that can are the end of a search: each is a build.
pub(super) const UNKNOWN_MOST: usize = 16;

/// How the revisions of a line stand, as far as that is known.
#[derive(Clone, Debug)]
pub(super) struct Places {
    /// The newer end; the older one is 0.
    pub(super) last: usize,
    /// The end that has the symptom.
    pub(super) ill: usize,
    known: BTreeMap<usize, Standing>,
}

impl Places {
    /// Nothing is known.
    pub(super) const fn new(last: usize) -> Self {
        Self { last, ill: 0, known: BTreeMap::new() }
    }

    /// The end that has not the symptom.
    pub(super) const fn healthy(&self) -> usize {
        self.last - self.ill
    }

    /// Which end has the symptom is known.
    pub(super) fn differ(&mut self, is_newer: bool) {
        self.ill = if is_newer { self.last } else { 0 };
        self.set(self.ill, Standing::Ill);
    }

    /// A revision is judged.
    pub(super) fn set(&mut self, revision: usize, standing: Standing) {
        self.known.insert(revision, standing);
    }

    /// How a revision stands, if that is known.
    pub(super) fn standing(&self, revision: usize) -> Option<&Standing> {
        self.known.get(&revision)
    }

    /// The healthy revision and the ill one that are closest to each other.
    pub(super) fn bounds(&self) -> Option<(usize, usize)> {
        let away = |at: &usize| at.abs_diff(self.healthy());
        let all = |wanted: Standing| {
            self.known.iter().filter(move |(_, standing)| **standing == wanted).map(|(at, _)| *at)
        };
        let healthy = all(Standing::Healthy).max_by_key(away)?;
        // An ill revision before a healthy one had another cause, which ended.
        let ill = all(Standing::Ill).filter(|at| away(at) > away(&healthy)).min_by_key(away)?;
        Some((healthy, ill))
    }

    /// Where to look next; `None`: there are no two to look between, or nothing between them that could be judged.
    pub(super) fn next(&self) -> Option<usize> {
        let (healthy, ill) = self.bounds()?;
        let (low, high) = (healthy.min(ill), healthy.max(ill));
        let unknown: Vec<usize> = (low + 1..high).filter(|at| self.known.contains_key(at)).collect();
        next_between(low, high, &unknown).filter(|_| unknown.len() < UNKNOWN_MOST)
    }
}

/// Which revision is the next one between two that are known, where `unknown` cannot be judged. One alone is gone around. Several are a
/// block: its edges are looked for, because beyond them lies what can be judged; last come those within.
fn next_between(low: usize, high: usize, unknown: &[usize]) -> Option<usize> {
    let middle = low.midpoint(high);
    // The middle of the widest gap, if anything is in it.
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
