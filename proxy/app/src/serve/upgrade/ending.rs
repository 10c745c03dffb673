//! The stop of an old program: it admits, refuses and cuts requests at the same times as the program that
//! serves.
//!
//! ```text
//!   told ── probe.drain_delay ──> stop ── requests on their way ──> refuse ── running requests ──> cut
//!                                   └──────────── server.shutdown_deadline ─────────────────────────┘
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

#[derive(Clone, Copy, Debug)]
pub(in crate::serve) struct StopTimes {
    /// Time for which requests are still accepted.
    pub(in crate::serve) delay: Duration,
    /// Time after `delay` for which requests that were already sent are still admitted.
    pub(in crate::serve) grace: Duration,
    /// Time limit for running requests.
    pub(in crate::serve) deadline: Duration,
}

impl StopTimes {
    /// Returns the time until running requests are cut.
    pub(super) const fn total(&self) -> Duration {
        self.delay.saturating_add(self.deadline)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopStep {
    Stop,
    /// Refuse requests that would have to wait.
    Refuse,
    Cut,
}

#[derive(Debug)]
pub(super) struct StopSchedule {
    steps: VecDeque<(Instant, StopStep)>,
}

impl StopSchedule {
    pub(super) fn new(now: Instant, times: StopTimes) -> Self {
        let stop = now + times.delay;
        let steps = [
            (stop, StopStep::Stop),
            (stop + times.grace.min(times.deadline), StopStep::Refuse),
            (stop + times.deadline, StopStep::Cut),
        ];
        Self { steps: steps.into() }
    }

    /// Stops and refuses at once, because no program serves any more; running requests keep their time.
    pub(super) fn stop_now(&mut self, now: Instant) {
        for (at, step) in &mut self.steps {
            if *step != StopStep::Cut {
                *at = now.min(*at);
            }
        }
    }

    pub(super) fn next_time(&self) -> Option<Instant> {
        self.steps.front().map(|(at, _)| *at)
    }

    pub(super) fn take_due(&mut self, now: Instant) -> Option<StopStep> {
        if self.next_time()? > now {
            return None;
        }
        self.steps.pop_front().map(|(_, step)| step)
    }

    pub(super) fn cut_time(&self) -> Option<Instant> {
        self.steps.back().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: StopTimes = StopTimes {
        delay: Duration::from_secs(15),
        grace: Duration::from_millis(250),
        deadline: Duration::from_secs(30),
    };

    /// Steps taken at each second.
    fn done(ending: &mut StopSchedule, from: Instant, seconds: &[u64]) -> Vec<Vec<StopStep>> {
        let at = |second| from + Duration::from_secs(second);
        seconds.iter().map(|second| std::iter::from_fn(|| ending.take_due(at(*second))).collect()).collect()
    }

    #[test]
    fn requests_are_taken_as_long_as_by_the_program_that_serves_and_get_the_same_time() {
        let now = Instant::now();
        let mut ending = StopSchedule::new(now, TIMES);
        assert_eq!(ending.cut_time(), Some(now + TIMES.total()));
        let steps = done(&mut ending, now, &[0, 14, 15, 16, 44, 45, 46]);
        assert_eq!(
            steps,
            [
                vec![],
                vec![],
                vec![StopStep::Stop],
                vec![StopStep::Refuse],
                vec![],
                vec![StopStep::Cut],
                vec![]
            ]
        );
        // A grace for requests on their way that is longer than the deadline.
        let mut ending = StopSchedule::new(now, StopTimes { grace: Duration::from_secs(3600), ..TIMES });
        assert_eq!(
            done(&mut ending, now, &[44, 45]),
            [vec![StopStep::Stop], vec![StopStep::Refuse, StopStep::Cut]]
        );
    }

    #[test]
    fn where_nobody_serves_any_more_nobody_is_let_in_and_what_runs_keeps_its_time() {
        let now = Instant::now();
        let mut ending = StopSchedule::new(now, TIMES);
        ending.stop_now(now + Duration::from_secs(2));
        let steps = done(&mut ending, now, &[1, 2, 44, 45]);
        assert_eq!(steps, [vec![], vec![StopStep::Stop, StopStep::Refuse], vec![], vec![StopStep::Cut]]);
    }
}
