//! An old program at a stop: it lets in, refuses and cuts when the one that serves does.
//!
//! ```text
//!   told ── probe.drain_delay ──> stop ── what is on its way ──> refuse ── what runs may end ──> cut
//!                                   └──────────── server.shutdown_deadline ────────────────────────┘
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// How long a stop takes.
#[derive(Clone, Copy, Debug)]
pub(in crate::serve) struct Times {
    /// Requests are still taken.
    pub(in crate::serve) delay: Duration,
    /// Requests may be on their way.
    pub(in crate::serve) grace: Duration,
    /// What runs may end.
    pub(in crate::serve) deadline: Duration,
}

impl Times {
    /// From the word until all is cut.
    pub(super) const fn all(&self) -> Duration {
        self.delay.saturating_add(self.deadline)
    }
}

/// What is to be done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// No connection is kept for another request.
    Stop,
    /// Nobody is let in any more who would have to wait.
    Refuse,
    /// Whatever still runs has had its time.
    Cut,
}

/// The steps of a stop that are still to come.
#[derive(Debug)]
pub(super) struct Ending {
    steps: VecDeque<(Instant, Step)>,
}

impl Ending {
    /// Told at this time.
    pub(super) fn new(now: Instant, times: Times) -> Self {
        let stop = now + times.delay;
        let steps = [
            (stop, Step::Stop),
            (stop + times.grace.min(times.deadline), Step::Refuse),
            (stop + times.deadline, Step::Cut),
        ];
        Self { steps: steps.into() }
    }

    /// Nobody serves any more: there is nothing to wait for but what runs.
    pub(super) fn hurry(&mut self, now: Instant) {
        for (at, step) in &mut self.steps {
            if *step != Step::Cut {
                *at = now.min(*at);
            }
        }
    }

    /// When there is something to do.
    pub(super) fn next(&self) -> Option<Instant> {
        self.steps.front().map(|(at, _)| *at)
    }

    /// What it is, if its time has come.
    pub(super) fn take(&mut self, now: Instant) -> Option<Step> {
        if self.next()? > now {
            return None;
        }
        self.steps.pop_front().map(|(_, step)| step)
    }

    /// When all has had its time.
    pub(super) fn cut(&self) -> Option<Instant> {
        self.steps.back().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: Times = Times {
        delay: Duration::from_secs(15),
        grace: Duration::from_millis(250),
        deadline: Duration::from_secs(30),
    };

    /// What is done from second to second.
    fn done(ending: &mut Ending, from: Instant, seconds: &[u64]) -> Vec<Vec<Step>> {
        let at = |second| from + Duration::from_secs(second);
        seconds.iter().map(|second| std::iter::from_fn(|| ending.take(at(*second))).collect()).collect()
    }

    #[test]
    fn requests_are_taken_as_long_as_by_the_program_that_serves_and_get_the_same_time() {
        let now = Instant::now();
        let mut ending = Ending::new(now, TIMES);
        assert_eq!(ending.cut(), Some(now + TIMES.all()));
        let steps = done(&mut ending, now, &[0, 14, 15, 16, 44, 45, 46]);
        assert_eq!(
            steps,
            [vec![], vec![], vec![Step::Stop], vec![Step::Refuse], vec![], vec![Step::Cut], vec![]]
        );
        // One that waits for requests on their way for longer than for those that run.
        let mut ending = Ending::new(now, Times { grace: Duration::from_secs(3600), ..TIMES });
        assert_eq!(done(&mut ending, now, &[44, 45]), [vec![Step::Stop], vec![Step::Refuse, Step::Cut]]);
    }

    #[test]
    fn where_nobody_serves_any_more_nobody_is_let_in_and_what_runs_keeps_its_time() {
        let now = Instant::now();
        let mut ending = Ending::new(now, TIMES);
        ending.hurry(now + Duration::from_secs(2));
        let steps = done(&mut ending, now, &[1, 2, 44, 45]);
        assert_eq!(steps, [vec![], vec![Step::Stop, Step::Refuse], vec![], vec![Step::Cut]]);
    }
}
