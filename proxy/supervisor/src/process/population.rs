//! Counts the children: an estimate of VRAM is valid only while no other child of ours lives.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers of living children and of all children so far.
#[derive(Debug, Default)]
pub(crate) struct Population {
    alive: AtomicU64,
    born: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Birth {
    population: Arc<Population>,
    /// No other child lived at its birth.
    first: bool,
    number: u64,
}

impl Birth {
    pub(crate) fn new(population: &Arc<Population>) -> Self {
        let first = population.alive.fetch_add(1, Ordering::SeqCst) == 0;
        let number = population.born.fetch_add(1, Ordering::SeqCst) + 1;
        Self { population: Arc::clone(population), first, number }
    }

    /// True if it has been the only child since its birth.
    pub(crate) fn is_alone(&self) -> bool {
        self.first && self.population.born.load(Ordering::SeqCst) == self.number
    }
}

impl Drop for Birth {
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
        let first = Birth::new(&population);
        assert!(first.is_alone());
        let second = Birth::new(&population);
        assert!(!first.is_alone() && !second.is_alone());
        drop(first);
        drop(second);
        assert!(Birth::new(&population).is_alone());
    }
}
