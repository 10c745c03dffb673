//! Where on a line is looked: halfway between the healthy and the ill revision that are closest to each other, around those that cannot be
//! told.

use std::collections::BTreeMap;

use super::conclusion::Standing;

/// So many that cannot be told between two that can are the end of a search: each is a build.
pub(super) const UNKNOWN_MOST: usize = 16;

/// How the revisions of a line stand, as far as that is known.
#[derive(Clone, Debug)]
pub(super) struct Places {
    /// The newer end; the older one is 0.
    last: usize,
    /// The end that has the symptom.
    ill: usize,
    known: BTreeMap<usize, Standing>,
}

impl Places {
    /// Nothing is known.
    pub(super) const fn new(last: usize) -> Self {
        Self { last, ill: 0, known: BTreeMap::new() }
    }

    /// The newer end.
    pub(super) const fn last(&self) -> usize {
        self.last
    }

    /// The end that has the symptom.
    pub(super) const fn ill(&self) -> usize {
        self.ill
    }

    /// The end that has not.
    pub(super) const fn healthy(&self) -> usize {
        self.last - self.ill
    }

    /// The newer end has the symptom, or the older one.
    pub(super) fn differ(&mut self, newer: bool) {
        self.ill = if newer { self.last } else { 0 };
        self.set(self.ill, Standing::Ill);
    }

    /// A revision stands so.
    pub(super) fn set(&mut self, revision: usize, standing: Standing) {
        self.known.insert(revision, standing);
    }

    /// How it stands, if that is known.
    pub(super) fn of(&self, revision: usize) -> Option<&Standing> {
        self.known.get(&revision)
    }

    /// The healthy revision and the ill one that are closest to each other.
    pub(super) fn bounds(&self) -> Option<(usize, usize)> {
        let is = |wanted: &Standing| {
            let all = self.known.iter().filter(|(_, standing)| *standing == wanted).map(|(at, _)| *at);
            all.collect::<Vec<_>>()
        };
        let (healthy, ill) = (is(&Standing::Healthy), is(&Standing::Ill));
        let closest = |all: &[usize], ill_is_newer: bool| {
            if ill_is_newer { all.iter().max().copied() } else { all.iter().min().copied() }
        };
        let newer = self.ill == self.last;
        // Of the healthy ones the one that is nearest to the ill end, of the ill ones the one that is farthest from it, unless it lies
        // behind a healthy one: then that was ill before, and is another story.
        let healthy = closest(&healthy, newer)?;
        let beyond: Vec<usize> =
            ill.into_iter().filter(|at| if newer { *at > healthy } else { *at < healthy }).collect();
        Some((healthy, closest(&beyond, !newer)?))
    }

    /// Where to look next; `None`: there are no two to look between, or nothing between them that could be told.
    pub(super) fn next(&self) -> Option<usize> {
        let (healthy, ill) = self.bounds()?;
        let (low, high) = (healthy.min(ill), healthy.max(ill));
        let unknown: Vec<usize> = (low + 1..high).filter(|at| self.known.contains_key(at)).collect();
        next_between(low, high, &unknown).filter(|_| unknown.len() < UNKNOWN_MOST)
    }
}

/// Which revision is the next one between two that are known, if these between them cannot be told. One alone is gone around; more of them are
/// a block, whose edges are looked for, because beyond them lies what can be told; and last come those within.
fn next_between(low: usize, high: usize, unknown: &[usize]) -> Option<usize> {
    let middle = low.midpoint(high);
    let (Some(first), Some(last)) = (unknown.first().copied(), unknown.last().copied()) else {
        return Some(middle).filter(|at| *at > low);
    };
    if unknown.len() == 1 {
        let all = (low + 1..high).filter(|at| *at != first);
        return all.min_by_key(|at| (at.abs_diff(middle), *at));
    }
    // The middle of the larger gap, if anything is in it.
    let within = |gaps: &mut dyn Iterator<Item = (usize, usize)>| {
        let gap = gaps.filter(|(from, to)| to - from > 1).max_by_key(|(from, to)| to - from);
        gap.map(|(from, to)| from.midpoint(to))
    };
    within(&mut [(low, first), (last, high)].into_iter())
        .or_else(|| within(&mut unknown.iter().copied().zip(unknown.iter().skip(1).copied())))
}
