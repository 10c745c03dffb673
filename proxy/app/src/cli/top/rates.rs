//! Requests and tokens per second, from counters that begin at 0 with each process. Pure.
//!
//! For a process that appears together with its model, the first reading is the base. For a process that
//! appears later, all its work counts as new.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use warden_policies::WorkDone;
use warden_policies::units::as_f64;

use super::picture::{ModelRow, ProcessWork};

/// Averaging window of the rates. With a shorter one, rates would jump with each request.
const RATE_WINDOW: Duration = Duration::from_secs(5);
/// Maximum number of pictures kept for an average.
const MAX_KEPT_SUMS: usize = 64;

/// Work of a model per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct WorkRate {
    /// Ended requests.
    pub(super) requests: f64,
    /// Generated tokens of ended requests.
    pub(super) tokens: f64,
}

impl WorkRate {
    pub(super) fn from_work(work: WorkDone, time: Duration) -> Option<Self> {
        let each = |count: u64| as_f64(count) / time.as_secs_f64();
        (!time.is_zero()).then(|| Self { requests: each(work.requests), tokens: each(work.output_tokens) })
    }
}

#[derive(Debug, Default)]
pub(super) struct RateCounters(HashMap<String, WorkCounter>);

#[derive(Debug, Default)]
struct WorkCounter {
    last: Vec<ProcessWork>,
    sum: WorkDone,
    /// Sums at earlier times, oldest first.
    kept: VecDeque<(Duration, WorkDone)>,
}

impl RateCounters {
    /// Counts the work of a picture and sets its rates, which are known from the second picture on. Removes
    /// models that are not in the picture.
    pub(super) fn update_rates(&mut self, at: Duration, rows: &mut [ModelRow]) {
        let mut before = std::mem::take(&mut self.0);
        for row in rows {
            let first = || WorkCounter { last: row.work.clone(), ..WorkCounter::default() };
            let mut counter = before.remove(&row.name).unwrap_or_else(first);
            for (process, work) in &row.work {
                let earlier = counter.last.iter().find(|(own, _)| own == process);
                counter.sum += *work - earlier.map(|(_, work)| *work).unwrap_or_default();
            }
            counter.last.clone_from(&row.work);
            counter.kept.push_back((at, counter.sum));
            while counter.kept.len() > 2
                && (counter.kept.len() > MAX_KEPT_SUMS || counter.kept[1].0 + RATE_WINDOW <= at)
            {
                counter.kept.pop_front();
            }
            let (then, earlier) = counter.kept[0];
            row.rate = WorkRate::from_work(counter.sum - earlier, at.saturating_sub(then));
            self.0.insert(row.name.clone(), counter);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Generation, requests and tokens of a process.
    type WorkCounts = (u64, u64, u64);

    fn row(work: &[WorkCounts]) -> ModelRow {
        let done = |&(generation, requests, output_tokens): &WorkCounts| {
            ((0, Some(generation)), WorkDone { requests, output_tokens, ..WorkDone::default() })
        };
        ModelRow { name: "m".to_owned(), work: work.iter().map(done).collect(), ..ModelRow::default() }
    }

    fn rate(pictures: &[(u64, &[WorkCounts])]) -> Option<WorkRate> {
        let mut counters = RateCounters::default();
        let rates = pictures.iter().map(|(second, work)| {
            let mut rows = [row(work)];
            counters.update_rates(Duration::from_secs(*second), &mut rows);
            rows[0].rate
        });
        rates.last().flatten()
    }

    #[test]
    fn a_rate_is_what_was_done_between_pictures_by_any_process() {
        assert_eq!(rate(&[(0, &[(1, 100, 900)])]), None, "one picture says nothing");
        let two = rate(&[(0, &[(1, 100, 900)]), (2, &[(1, 104, 920)])]);
        assert_eq!(two, Some(WorkRate { requests: 2.0, tokens: 10.0 }));
        // The next process starts at 0, so all its work is new.
        let next = rate(&[(0, &[(1, 100, 900)]), (1, &[(1, 101, 910), (2, 1, 5)]), (2, &[(2, 3, 9)])]);
        assert_eq!(next, Some(WorkRate { requests: 2.0, tokens: 9.5 }));
    }

    #[test]
    fn only_the_last_seconds_count_and_counters_that_fall_do_no_harm() {
        let pictures: Vec<(u64, [WorkCounts; 1])> =
            (0..100).map(|second| (second, [(1, second * 3, 0)])).collect();
        let pictures: Vec<(u64, &[WorkCounts])> =
            pictures.iter().map(|(second, work)| (*second, work.as_slice())).collect();
        assert_eq!(rate(&pictures), Some(WorkRate { requests: 3.0, tokens: 0.0 }));
        let fallen = rate(&[(0, &[(1, 100, 0)]), (20, &[(1, 7, 0)]), (40, &[(1, 27, 0)])]);
        assert_eq!(fallen, Some(WorkRate { requests: 1.0, tokens: 0.0 }));
    }

    #[test]
    fn a_model_that_is_gone_is_forgotten() {
        let mut counters = RateCounters::default();
        counters.update_rates(Duration::ZERO, &mut [row(&[(1, 1, 1)])]);
        counters.update_rates(Duration::from_secs(1), &mut []);
        assert!(counters.0.is_empty());
    }
}
