//! Which builds of a batch are waited for to their end, and which are broken off: nobody waits long for one that may not be needed.
//!
//! | what happened | what runs on |
//! |---|---|
//! | all that are needed in any case have ended | the others, as long again as those took |
//! | the one that is needed now cannot be built | those that would be built next without it; what is needed next is waited for |
//! | it had no room, or there is no going on | none |

/// The builds of a batch that still run. Builds are named by the places of their revisions.
#[derive(Debug)]
pub(super) struct Course {
    running: Vec<usize>,
    /// Those that are waited for.
    awaited: Vec<usize>,
}

impl Course {
    /// All of these run, and the first `certain` of them are needed in any case.
    pub(super) fn new(all: &[usize], certain: usize) -> Self {
        Self { running: all.to_vec(), awaited: all.iter().copied().take(certain).collect() }
    }

    /// One has ended.
    pub(super) fn ended(&mut self, revision: usize) {
        self.running.retain(|running| *running != revision);
    }

    /// Whether none runs any more that is waited for, but others do.
    pub(super) fn only_spares(&self) -> bool {
        !self.running.is_empty() && !self.running.iter().any(|running| self.awaited.contains(running))
    }

    /// The one that is needed now cannot be built, and these are what is built next then, what is needed first. Says which are to be broken off.
    pub(super) fn goes_on_with(&mut self, next: &[usize]) -> Vec<usize> {
        self.awaited.retain(|awaited| next.contains(awaited));
        self.awaited.extend(next.first());
        let (on, off) = self.running.iter().partition(|running| next.contains(running));
        self.running = on;
        off
    }

    /// None is waited for any more. Says which are to be broken off: all that run.
    pub(super) fn breaks_off(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.running)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spares_are_known_once_all_others_have_ended() {
        let mut course = Course::new(&[8, 0, 4], 2);
        assert!(!course.only_spares());
        course.ended(8);
        assert!(!course.only_spares(), "the other end is needed, too");
        course.ended(0);
        assert!(course.only_spares());
        assert_eq!(course.breaks_off(), [4]);
        assert!(!course.only_spares(), "none is left to be broken off again");
        let mut course = Course::new(&[8, 0, 4], 2);
        course.ended(4);
        course.ended(8);
        assert!(!course.only_spares());
        course.ended(0);
        assert!(!course.only_spares(), "none runs");
    }

    #[test]
    fn without_the_one_that_was_needed_only_what_comes_next_runs_on() {
        // 4 is needed beside the ill end 8; after it comes 6 or 2.
        let mut course = Course::new(&[4, 8, 6, 2], 2);
        course.ended(4);
        assert_eq!(course.goes_on_with(&[3, 8, 2]), [6]);
        assert!(!course.only_spares(), "the ill end is needed still");
        course.ended(8);
        assert!(course.only_spares(), "2 may not be needed");
        let mut course = Course::new(&[4, 6, 2], 1);
        course.ended(4);
        assert_eq!(course.goes_on_with(&[2, 5]), [6]);
        assert!(!course.only_spares(), "what comes next is waited for");
        let mut course = Course::new(&[8, 0], 2);
        course.ended(8);
        assert_eq!(course.goes_on_with(&[]), [0], "nothing comes without an end");
    }
}
