//! Counts the living children: an estimate of a child's VRAM is valid only while no other child lives.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers of living children and of all children so far.
#[derive(Debug, Default)]
pub(crate) struct ChildPopulation {
    alive: AtomicU64,
    born: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct ChildBirth {
    population: Arc<ChildPopulation>,
    /// True if no other child lived when this one was created.
    first: bool,
    number: u64,
}

impl ChildBirth {
    pub(crate) fn new(population: &Arc<ChildPopulation>) -> Self {
        let first = population.alive.fetch_add(1, Ordering::SeqCst) == 0;
        let number = population.born.fetch_add(1, Ordering::SeqCst) + 1;
        Self { population: Arc::clone(population), first, number }
    }

    /// True if the child has been the only living one since its creation.
    pub(crate) fn is_alone(&self) -> bool {
        self.first && self.population.born.load(Ordering::SeqCst) == self.number
    }
}

impl Drop for ChildBirth {
    fn drop(&mut self) {
        self.population.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_alone_if_nobody_was_there_and_nobody_has_come_since() {
        let population = Arc::default();
        let first = ChildBirth::new(&population);
        assert!(first.is_alone());
        let second = ChildBirth::new(&population);
        assert!(!first.is_alone() && !second.is_alone());
        drop(first);
        drop(second);
        assert!(ChildBirth::new(&population).is_alone());
    }
}
